//! Recovery: a daemon that has lost its state takes up the generation that an earlier one has assigned.
//!
//! An agent whose stream was opened again sends its [`Place`] with `Join`. When every node of that generation has sent
//! its own and all agree, the generation runs on: no worker notices, and what they reported meanwhile counts. If one
//! does not come within a lease, or disagrees, the generation is over, as if that node had been lost, but no restart is
//! spent for it. Nodes that have no part in the generation wait meanwhile.
//!
//! A daemon with a ledger knows from its start which generation ran, under which assignment and on which nodes. It waits
//! for them for [`Config::reattach_wait`], and no longer than a lease once one of them has failed. What was given to nodes
//! of another assignment does not concern it.
//!
//! A daemon that ends with its job was hosted by one of the nodes, which is gone with it: there is no node to wait for.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{Assignment, Join, NodeAssignment, Place};
use ddp_proto::trust::data_key::DataKey;

use super::gathering::Gathering;
use super::joining::MAX_GENERATION;
use super::running::Running;
use super::takeover::Takeover;
use super::{Job, Phase};
use crate::rendezvous::config::Config;
use crate::rendezvous::context::ApplyContext;
use crate::rendezvous::event::{Effect, Origin, Record, Stage, regrouping, shared};
use crate::rendezvous::generation_counter::GenerationCounter;
use crate::rendezvous::messages;
use crate::rendezvous::nodes::list::NodeList;
use crate::rendezvous::policy::Account;
use crate::rendezvous::ranks::Member;
use crate::rendezvous::size::RankLimits;

/// Highest number of an attempt that is believed.
const MAX_TOLD_ATTEMPT: u32 = 1 << 30;

/// A generation of an earlier daemon, as far as its nodes have come back.
#[derive(Debug, Default)]
pub(super) struct Recovery {
    generation: u64,
    /// Id of its assignment; empty while no node has reported it.
    assignment_id: String,
    /// What its nodes agree on; none while only nodes have come that have no part in it.
    run: Option<Box<Run>>,
    /// By node rank.
    claims: BTreeMap<u32, Claim>,
    /// The rank that each of these nodes claims.
    ranks: HashMap<String, u32>,
    /// What a node reported of the generation, in order of arrival: the first report of each is the one that counts.
    held: Vec<(Origin, Body)>,
    began: Duration,
    /// When it is given up.
    until: Duration,
    /// Its nodes in order of their ranks, if the daemon has them in its ledger.
    recorded: Vec<Member>,
    /// Their incarnations.
    recorded_names: HashSet<String>,
}

/// What all nodes of the generation were told.
#[derive(Debug)]
struct Run {
    /// Without the place of a node.
    assignment: Assignment,
    /// How long it has run.
    ran: Duration,
    rank_limits: Option<RankLimits>,
}

#[derive(Debug)]
struct Claim {
    incarnation: String,
    node: NodeAssignment,
}

impl Recovery {
    /// A recovery that knows no node yet.
    fn of(generation: u64, began: Duration, wait: Duration) -> Self {
        Self {
            generation,
            began,
            until: began + wait,
            ..Self::default()
        }
    }

    /// As the ledger has it, for a daemon that starts.
    pub(super) fn recorded(record: Record, now: Duration, wait: Duration) -> Self {
        Self {
            assignment_id: record.assignment_id,
            recorded_names: record.members.iter().map(|m| m.incarnation.clone()).collect(),
            recorded: record.members,
            ..Self::of(record.generation, now, wait)
        }
    }

    /// The daemon knows from its ledger that the generation ran.
    pub(super) fn is_recorded(&self) -> bool {
        !self.recorded.is_empty()
    }

    /// The ledger has the node in this generation.
    pub(super) fn is_of(&self, incarnation: &str) -> bool {
        self.recorded_names.contains(incarnation)
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    pub(super) fn assignment_id(&self) -> &str {
        &self.assignment_id
    }

    pub(super) fn until(&self) -> Duration {
        self.until
    }

    /// A node is lost: if it had its place again, it has to come once more.
    pub(super) fn lose(&mut self, context: &ApplyContext<'_>, incarnation: &str) {
        if let Some(rank) = self.ranks.remove(incarnation) {
            self.claims.remove(&rank);
            self.hurry(context);
        }
    }

    /// A node has failed: the others are not waited for any longer than for a node that was lost.
    fn hurry(&mut self, context: &ApplyContext<'_>) {
        self.until = self.until.min(context.at.now + context.config.lease);
    }

    /// The daemon was stalled: it is not given up before.
    pub(super) fn wait_at_least(&mut self, until: Duration) {
        self.until = self.until.max(until);
    }

    /// Whether the node has a place in the generation.
    pub(super) fn has(&self, incarnation: &str) -> bool {
        self.ranks.contains_key(incarnation)
    }

    /// What the nodes that are there wait for.
    pub(super) fn waiting_words(&self, now: Duration) -> String {
        let more = messages::time_left(self.until, now);
        let Some(count) = self.node_count() else {
            return format!(
                "the rendezvous daemon was restarted; waiting for the nodes of the job to reconnect{more}"
            );
        };
        format!(
            "the rendezvous daemon was restarted; {} of {} reconnected; waiting for {}{more}",
            self.claims.len(),
            messages::nodes(count),
            self.missing_words()
        )
    }

    /// How many nodes the generation has, if that is known.
    fn node_count(&self) -> Option<u32> {
        let recorded = self.is_recorded().then_some(self.recorded.len() as u32);
        self.run
            .as_ref()
            .map(|run| run.assignment.node_count)
            .or(recorded)
    }

    /// The node of this rank has not come back.
    fn misses(&self, node_rank: u32) -> bool {
        self.node_count().is_some_and(|count| node_rank < count) && !self.claims.contains_key(&node_rank)
    }

    /// Node ranks whose node has not come back, in words.
    fn missing_words(&self) -> String {
        let count = self.node_count().unwrap_or(0);
        let missing = (0..count).filter(|rank| !self.claims.contains_key(rank));
        messages::node_ranks(missing, (count as usize).saturating_sub(self.claims.len()))
    }

    fn is_complete(&self) -> bool {
        // No rank is claimed beyond the number of nodes.
        self.run
            .as_ref()
            .is_some_and(|run| self.claims.len() == run.assignment.node_count as usize)
    }

    /// Ranks follow from each other in order of node rank.
    fn is_dense(&self) -> bool {
        let mut next = 0;
        self.claims.values().all(|claim| {
            let fits = claim.node.first_rank == next;
            next += claim.node.workers;
            fits
        })
    }

    /// Gives a node its place; false if it disagrees with those that are there.
    fn claim(&mut self, incarnation: &str, place: &Place) -> bool {
        let told = place.assignment.as_ref();
        let Some((told, node)) = told.and_then(|told| Some((told, told.own.as_ref()?))) else {
            return false;
        };
        let assignment = Assignment {
            node_rank: 0,
            own: None,
            role_first_rank: 0,
            role_world_size: 0,
            ..told.clone()
        };
        if self.assignment_id.is_empty() {
            self.assignment_id.clone_from(&told.assignment_id);
        }
        let held = Duration::from_millis(place.held_ms);
        let rank_limits = place.heartbeat.as_ref().and_then(RankLimits::of);
        let run = self.run.get_or_insert_with(|| {
            Box::new(Run {
                assignment: assignment.clone(),
                ran: Duration::ZERO,
                rank_limits: None,
            })
        });
        run.ran = run.ran.max(held);
        run.rank_limits = run.rank_limits.or(rank_limits);
        let is_taken = self
            .claims
            .get(&told.node_rank)
            .is_some_and(|claim| claim.incarnation != incarnation);
        if run.assignment != assignment || is_taken {
            return false;
        }
        let claim = Claim {
            incarnation: incarnation.to_owned(),
            node: node.clone(),
        };
        // A node that claims another rank than before gives that one up.
        if let Some(before) = self.ranks.insert(incarnation.to_owned(), told.node_rank)
            && before != told.node_rank
        {
            self.claims.remove(&before);
        }
        self.claims.insert(told.node_rank, claim);
        true
    }

    /// The members of the generation, in order of their ranks, and what each was told of its own part.
    fn members(&mut self) -> (Vec<Member>, Vec<NodeAssignment>) {
        let mut nodes = Vec::with_capacity(self.claims.len());
        let mut recorded = std::mem::take(&mut self.recorded).into_iter();
        let members = (0..self.run.as_ref().map_or(0, |run| run.assignment.node_count)).map(|rank| {
            let absent = recorded.next();
            let claim = self.claims.remove(&rank).map(|Claim { incarnation, node }| {
                let hostname = node.hostname.clone();
                nodes.push(node);
                Member::new(incarnation, hostname)
            });
            // Without a ledger, a name that no agent has.
            claim.or(absent).unwrap_or_default()
        });
        (members.collect(), nodes)
    }
}

impl Job {
    /// A node comes that was in a generation of which this daemon knows nothing: it keeps its place for now, or has to
    /// stop its workers, for the reason that is returned.
    pub(super) fn reclaim(
        &mut self,
        context: &mut ApplyContext<'_>,
        from: &Origin,
        join: &Join,
    ) -> Result<(), String> {
        let generation = from.generation;
        let place = self.believe(context, from, join)?;
        match &mut self.phase {
            Phase::Recovering(recovery) if recovery.generation > generation => {
                return Err(messages::continued_without(generation, &join.hostname));
            }
            Phase::Recovering(recovery) if recovery.generation == generation => {}
            // A newer one has come to light.
            Phase::Recovering(_) => self.switch_to_newer(context, generation),
            _ => {
                self.phase =
                    Phase::Recovering(Recovery::of(generation, context.at.now, context.config.lease));
            }
        }
        if let Phase::Recovering(recovery) = &mut self.phase
            && recovery.claim(&from.incarnation, place)
        {
            return Ok(());
        }
        let why = format!(
            ", and node `{}` disagrees with the others on generation {generation}",
            join.hostname
        );
        self.give_up_recovery(context, &why);
        Err(started_again(&why))
    }

    /// The place of a node in a generation that may still be taken up, or why it is not.
    fn believe<'a>(
        &mut self,
        context: &mut ApplyContext<'_>,
        from: &Origin,
        join: &'a Join,
    ) -> Result<&'a Place, String> {
        let generation = from.generation;
        let checked = check_place(context.config, join, &from.assignment_id);
        if let (Err(why), true) = (&checked, join.place.is_some()) {
            context.decided(format!(
                "job `{}`: rejected the state that node `{}` reported: {why}",
                self.id, join.hostname
            ));
        }
        let Ok((place, assignment)) = checked else {
            self.mark_ended(context, generation, &join.hostname);
            return Err(started_again(""));
        };
        // Whatever becomes of the generation, it and those before it have cost what they have cost.
        let account = Account::read_from(assignment);
        let is_newest = (generation, account.age()) >= (self.counter.highest(), self.account.age());
        if is_newest {
            self.counter.believe_attempt(assignment);
        }
        // Two daemons may have counted on from one generation: then the later one need not have cost more.
        let run_token = self.counter.run_token();
        let is_of_run = run_token.is_empty() || assignment.run_token == run_token;
        if is_newest && !is_of_run || is_of_run && account.age() >= self.account.age() {
            self.account = account;
        }
        if place.over {
            self.mark_ended(context, generation, &join.hostname);
            return Err(started_again(" when its workers had to stop"));
        }
        if self.counter.has_ended(generation) {
            return Err(started_again(", and the workers had to stop on another node"));
        }
        if context.config.only_job.is_some() {
            self.counter.mark_ended(generation);
            return Err(started_again(" together with the node that hosts it"));
        }
        Ok(place)
    }

    /// A node comes that was in a generation of this run under another daemon, while this one has state of its own: the
    /// restarts that were spent there are spent here too.
    pub(super) fn learn_cost(&mut self, context: &ApplyContext<'_>, from: &Origin, join: &Join) {
        if let Ok((_, assignment)) = check_place(context.config, join, &from.assignment_id)
            && assignment.run_token == self.counter.run_token()
        {
            let account = Account::read_from(assignment);
            if account.age() > self.account.age() {
                self.account = account;
            }
        }
    }

    /// A node of the generation comes that knows only an earlier one: the last daemon has written it down, but not sent
    /// it to all of its nodes. It will never be complete.
    pub(super) fn miss_assignment(&mut self, context: &mut ApplyContext<'_>, from: &Origin, hostname: &str) {
        if matches!(&self.phase, Phase::Recovering(recovery)
            if recovery.is_of(&from.incarnation) && from.generation < recovery.generation)
        {
            self.give_up_recovery(context, &format!(", and node `{hostname}` never received it"));
        }
    }

    /// A node comes that was in no generation: as a spare it may know of one that runs.
    pub(super) fn learn_of_generation(&mut self, context: &mut ApplyContext<'_>, join: &Join) {
        let latest = join.latest_generation;
        let highest = self.counter.highest();
        let has_state = self.counter.has_begun() || context.config.only_job.is_some();
        match &mut self.phase {
            Phase::Gathering(_) if !has_state && latest > highest && latest <= MAX_GENERATION => {
                self.counter.learn_of(latest, "");
                self.phase = Phase::Recovering(Recovery::of(latest, context.at.now, context.config.lease));
            }
            // The node with this rank would have come back with it.
            Phase::Recovering(recovery) if join.node_rank.is_some_and(|asked| recovery.misses(asked)) => {
                if recovery.is_recorded() {
                    // Another process wants its rank: it may have failed, or be cut off.
                    recovery.hurry(context);
                } else {
                    self.give_up_recovery(context, &format!(", and node `{}` was restarted", join.hostname));
                }
            }
            _ => {}
        }
    }

    /// A node has taken its place again: the generation runs on if it was the last one.
    pub(super) fn consider_recovered(&mut self, context: &mut ApplyContext<'_>, incarnation: &str) {
        let Phase::Recovering(recovery) = &self.phase else {
            return;
        };
        if !recovery.is_complete() {
            let reason = recovery.waiting_words(context.at.now);
            return self.tell_waiting(context, incarnation, reason);
        }
        if !recovery.is_dense() {
            return self.give_up_recovery(context, ", and its nodes disagree on their ranks");
        }
        let generation = recovery.generation;
        let held = self.take_up(context);
        if let Some(running) = self.phase.running() {
            self.takeover.begin(running.assignment());
        }
        context.decided(format!(
            "job `{}`: generation {generation} of an earlier daemon continues: all {} nodes reconnected",
            self.id,
            self.table.members().len()
        ));
        self.record(context, Stage::Running);
        self.send_assignments(context);
        for (from, body) in held {
            self.message(context, &from, body);
        }
        self.newcomer(context);
        self.tell_spares(context);
    }

    /// Keeps what a node reports of a generation that is not taken up yet; gives back what is for now.
    pub(super) fn hold(&mut self, context: &ApplyContext<'_>, from: &Origin, body: Body) -> Option<Body> {
        let Phase::Recovering(recovery) = &mut self.phase else {
            return Some(body);
        };
        let is_report = matches!(body, Body::WorkerExit(_) | Body::NodeSucceeded(_));
        if !is_report || recovery.generation != from.generation || !recovery.has(&from.incarnation) {
            return Some(body);
        }
        if matches!(body, Body::WorkerExit(_)) {
            recovery.hurry(context);
        }
        let mut held = recovery.held.iter();
        if !held.any(|(who, _)| who.incarnation == from.incarnation) {
            recovery.held.push((from.clone(), body));
        }
        None
    }

    /// Not all nodes have come back in time.
    pub(super) fn recovery_timed_out(&mut self, context: &mut ApplyContext<'_>) {
        let Phase::Recovering(recovery) = &self.phase else {
            return;
        };
        let why = format!(
            ", and {} did not reconnect within {:.1} s",
            recovery.missing_words(),
            recovery.until.saturating_sub(recovery.began).as_secs_f64()
        );
        if recovery.is_recorded() && recovery.run.is_none() {
            // All of its nodes are gone: what comes is a new run of the job.
            self.account = Account::default();
            self.counter.forget_run();
            if let Some(earlier) = &mut self.earlier {
                earlier.members.clear();
            }
        }
        self.give_up_recovery(context, &why);
    }

    /// A node says that this generation is over, or is not fit to go on with it: no node goes on with it.
    fn mark_ended(&mut self, context: &mut ApplyContext<'_>, generation: u64, hostname: &str) {
        self.counter.mark_ended(generation);
        if matches!(&self.phase, Phase::Recovering(recovery) if recovery.generation <= generation) {
            self.give_up_recovery(
                context,
                &format!(", and generation {generation} had ended on node `{hostname}`"),
            );
        }
    }

    /// A newer generation has come to light than the one that was to be taken up.
    fn switch_to_newer(&mut self, context: &mut ApplyContext<'_>, newer: u64) {
        let recovery = Recovery::of(newer, context.at.now, context.config.lease);
        let Phase::Recovering(old) = std::mem::replace(&mut self.phase, Phase::Recovering(recovery)) else {
            return;
        };
        // What its nodes have written again belongs to it.
        let cause = format!("generation {} continued elsewhere", old.generation);
        self.kv.end(context, &cause);
        for claim in old.claims.values() {
            // It has to stop its workers first.
            self.table.change(&claim.incarnation, |node| {
                let over = regrouping(messages::continued_without(old.generation, node.hostname()));
                let message = shared(old.generation, Reply::GenerationOver(over));
                node.stop_workers(context, old.generation, &message);
            });
        }
    }

    /// The generation cannot be taken up, `why`: as if it had run here and its missing nodes had been lost, it is over.
    fn give_up_recovery(&mut self, context: &mut ApplyContext<'_>, why: &str) {
        let Phase::Recovering(recovery) = &self.phase else {
            return;
        };
        let generation = recovery.generation;
        self.counter.mark_ended(generation);
        if recovery.run.is_none() {
            let is_recorded = recovery.is_recorded();
            if is_recorded {
                context.decided(format!(
                    "job `{}`: generation {generation} of an earlier daemon is given up{why}",
                    self.id
                ));
            }
            self.kv.end(context, "its generation has ended");
            self.record(context, Stage::Ended);
            // If no node has come either, it is abandoned at once.
            let timeout = if is_recorded && self.table.nodes().is_empty() {
                Duration::ZERO
            } else {
                self.table.join_timeout(context.config)
            };
            let now = context.at.now;
            self.phase = Phase::Gathering(Gathering::new(now, now, timeout));
            return self.consider_start(context);
        }
        let began = recovery.began;
        let held = self.take_up(context);
        self.await_missing(context, began);
        for (from, body) in held {
            self.message(context, &from, body);
        }
        // Unless a worker has failed, which is worse.
        self.end_with_held_failure(context);
        self.break_up(
            context,
            format!("the rendezvous daemon was restarted{why}: restarting the workers"),
        );
    }

    /// From now on the generation runs here, with the nodes that have come back; returns what they have reported.
    fn take_up(&mut self, context: &mut ApplyContext<'_>) -> Vec<(Origin, Body)> {
        let Phase::Recovering(recovery) = &mut self.phase else {
            return Vec::new();
        };
        let held = std::mem::take(&mut recovery.held);
        let (members, nodes) = recovery.members();
        let Some(run) = recovery.run.take() else {
            return held;
        };
        self.counter.take_up(recovery.generation, &run.assignment);
        self.table.take_up(members, run.rank_limits);
        let assignment = Assignment {
            lease_ms: context.config.lease_ms(),
            ..run.assignment
        };
        self.begin_period(context, &assignment.reason);
        let running = Running::new(assignment, NodeList::new(nodes), context.at.now, run.ran);
        self.phase = Phase::Running(Box::new(running));
        held
    }
}

/// Why the workers of a node are stopped.
fn started_again(why: &str) -> String {
    format!("the rendezvous daemon was restarted{why}: restarting the workers")
}

/// The place that a node tells, if it can have been given it.
fn check_place<'a>(
    config: &Config,
    join: &'a Join,
    assignment_id: &str,
) -> Result<(&'a Place, &'a Assignment), &'static str> {
    let Some((place, told)) = join
        .place
        .as_ref()
        .and_then(|place| Some((place, place.assignment.as_ref()?)))
    else {
        return Err("it has no assignment");
    };
    let Some(node) = &told.own else {
        return Err("it has no node");
    };
    if !(join.min_nodes..=join.max_nodes).contains(&told.node_count) || told.node_rank >= told.node_count {
        return Err("its node rank or number of nodes is invalid");
    }
    if node.hostname != join.hostname || node.workers != join.workers || node.role != join.role {
        return Err("it belongs to a different node");
    }
    let last_rank = u64::from(config.max_nodes) * u64::from(config.max_workers);
    if u64::from(node.first_rank) + u64::from(node.workers) > last_rank.min(u64::from(u32::MAX)) {
        return Err("its ranks are invalid");
    }
    if told.max_restarts != join.max_restarts || told.restart_count > told.max_restarts {
        return Err("its restart count is invalid");
    }
    if told.attempt > MAX_TOLD_ATTEMPT {
        return Err("its attempt number is invalid");
    }
    let names = [&node.addr, &told.master_addr, &told.run_token];
    if names.iter().any(|name| name.len() > config.max_name_bytes)
        || told.reason.len() > config.max_description_bytes
    {
        return Err("its texts are too long");
    }
    if told.run_token.is_empty() || told.run_token != join.run_token {
        return Err("it belongs to a different run");
    }
    if told.assignment_id.is_empty() || told.assignment_id != assignment_id {
        return Err("it belongs to a different assignment");
    }
    if DataKey::of_assignment(&told.data_key).is_none() {
        return Err("its data key is invalid");
    }
    if told.master_port == 0 || told.master_port > u32::from(u16::MAX) {
        return Err("its MASTER_PORT is invalid");
    }
    Ok((place, told))
}

/// The ledger.
impl Job {
    /// Has this written down of the last generation, before anything else of this turn is sent. Without one, only a
    /// verdict is worth it.
    pub(super) fn record(&self, context: &mut ApplyContext<'_>, stage: Stage) {
        let counter = &self.counter;
        let (generation, assignment_id, members) = if counter.has_begun() {
            let id = counter.assignment_id().to_owned();
            (counter.generation(), id, self.table.members().to_vec())
        } else if let Some(earlier) = self.earlier.clone() {
            // What an earlier daemon has written is brought up to date.
            (counter.highest(), earlier.assignment_id, earlier.members)
        } else if matches!(stage, Stage::JobOver { .. } | Stage::Refused { .. }) {
            // It is on the nodes that are there.
            let nodes = self.table.concerned().into_iter();
            let members = nodes.map(|incarnation| Member::new(incarnation, String::new()));
            (counter.highest(), String::new(), members.collect())
        } else {
            return;
        };
        context.effects.push(Effect::Record(Box::new(Record {
            job: self.id.clone(),
            generation,
            assignment_id,
            members,
            run_token: counter.run_token().to_owned(),
            takeover: self.takeover.after(),
            attempt: counter.attempts(),
            account: self.account,
            stage,
        })));
    }

    /// A job that has not ended, for a daemon that starts: it waits for the nodes of the generation that runs. If that is
    /// over, it accepts any node, and abandons the job if none comes.
    pub(in crate::rendezvous) fn recall(config: &Config, record: Record, now: Duration) -> Self {
        let mut job = Self::new(&record.job, record.generation, now);
        job.counter = GenerationCounter::recalled(&record);
        job.account = record.account;
        job.earlier = Some(record.clone());
        job.takeover = Takeover::recalled(config, &record, now);
        if record.stage == Stage::Running {
            job.phase = Phase::Recovering(Recovery::recorded(record, now, config.reattach_wait));
        } else if let Phase::Gathering(gathering) = &mut job.phase {
            gathering.wait_until(now + config.reattach_wait);
        }
        job.plan_wake();
        job
    }
}
