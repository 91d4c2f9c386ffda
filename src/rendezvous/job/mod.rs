//! One job. It consists of parts, each with fields that only its own file sees, and methods for what may happen to them:
//!
//! | file | part | knows |
//! |---|---|---|
//! | `node` | one node | its stream, its lease, whether its workers are gone |
//! | `node_table` | all nodes | which are there, which were in the last assignment, how many the job needs |
//! | `gathering` | gathering | when a generation starts, what the nodes wait for |
//! | `recovery` | recovery | how a daemon that lost its state takes up a generation that runs, and the [`Record`]s of the ledger |
//! | `running` | the running generation | which nodes succeeded, which failure waits for its cause, which peers were reported lost |
//! | `job_end` | the end of the job | the verdict for every node, also for nodes that come back later |
//! | `failures` | all failures | their order, and which are listed |
//!
//! Decisions that involve several parts:
//!
//! | file | noun | knows |
//! |---|---|---|
//! | `joining` | joining | admission, reconnects, refusals |
//! | `assignment` | the start | the assignment of each node |
//! | `generation_end` | the end of a generation | failures, success, restarts |
//! | `hang` | a job that hangs | which rank is the cause, and which collective waits for it |
//! | `departure` | nodes that go | nodes that leave, that are lost, and that peers report lost |
//! | `scale` | growing | nodes that come to a job that runs |
//! | `stragglers` | slow ranks | for which ranks the others wait |
//! | `takeover` | replacing a lost node | until when its workers may still train |
//! | `lease_extension` | silent members | extends their leases while their peers make progress |

mod assignment;
mod departure;
mod failures;
mod gathering;
mod generation_end;
mod hang;
mod job_end;
mod joining;
mod lease_extension;
mod node;
mod node_table;
mod recovery;
mod running;
mod scale;
mod stragglers;
mod takeover;

use std::time::Duration;

use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{
    GenerationOver, Heard, Heartbeat, JobSummary, Join, KvPutRequest, NodeStopped, StatusReply,
};
use ddp_proto::{exit, printable};

use super::context::ApplyContext;
use super::event::{About, CallId, ConnId, KvError, Origin, Record, regrouping};
use super::generation_counter::GenerationCounter;
use super::history::History;
use super::kv::{KvStore, Read};
use super::policy::Account;
use super::ranks::Member;
use super::report::Census;
use super::size::RankLimits;
use super::store_totals::Load;
use failures::Failures;
use gathering::Gathering;
use job_end::Over;
use node::Node;
use node_table::NodeTable;
use recovery::Recovery;
use running::Running;
use takeover::Takeover;

#[cfg(test)]
pub(super) use failures::{MAX_KNOWN, MAX_LISTED, MAX_TAKEN};
pub(super) use job_end::Finished;
pub(super) use joining::Joining;

/// One job at the daemon.
#[derive(Debug)]
pub(super) struct Job {
    id: String,
    since: Duration,
    counter: GenerationCounter,
    table: NodeTable,
    phase: Phase,
    takeover: Takeover,
    account: Account,
    failures: Failures,
    /// Why the last generation ended; none before the first assignment.
    last_over: Option<GenerationOver>,
    /// The record of an earlier daemon; valid until this daemon assigns or takes up a generation.
    earlier: Option<Record>,
    kv: KvStore,
    history: History,
    /// The next deadline of this job; it may be early, never late.
    next_wake: Option<Duration>,
}

/// What a job is doing.
#[derive(Debug)]
enum Phase {
    /// The job waits for nodes before it starts the next generation.
    Gathering(Gathering),
    /// A generation of an earlier daemon runs; not all of its nodes have reconnected yet.
    Recovering(Recovery),
    /// A generation runs.
    Running(Box<Running>),
    /// The job has ended; nodes that come back receive the verdict.
    Over(Over),
}

impl Phase {
    /// The name of the phase in the status.
    fn name(&self) -> &'static str {
        match self {
            Self::Gathering(_) => "gathering",
            Self::Recovering(_) => "recovering",
            Self::Running(_) => "running",
            Self::Over(_) => "over",
        }
    }

    fn running(&self) -> Option<&Running> {
        match self {
            Self::Running(running) => Some(running),
            _ => None,
        }
    }

    fn running_mut(&mut self) -> Option<&mut Running> {
        match self {
            Self::Running(running) => Some(running),
            _ => None,
        }
    }
}

impl Job {
    /// A job without nodes, whose generations are numbered after `floor`.
    pub(super) fn new(id: &str, floor: u64, now: Duration) -> Self {
        Self {
            id: id.to_owned(),
            since: now,
            counter: GenerationCounter::after(floor),
            table: NodeTable::default(),
            phase: Phase::Gathering(Gathering::new(now, now, Duration::MAX)),
            takeover: Takeover::default(),
            account: Account::default(),
            failures: Failures::default(),
            last_over: None,
            earlier: None,
            kv: KvStore::default(),
            history: History::default(),
            next_wake: None,
        }
    }

    pub(super) fn next_wake(&self) -> Option<Duration> {
        self.next_wake
    }

    #[cfg(test)]
    pub(super) fn assert_counts(&self) {
        self.table.assert_counts();
    }

    pub(super) fn is_idle(&self) -> bool {
        self.table.nodes().is_empty()
    }

    /// The node belongs to this job, or did and may still report about it.
    pub(super) fn has(&self, incarnation: &str) -> bool {
        let table = &self.table;
        let is_awaited = matches!(&self.phase, Phase::Recovering(recovery) if recovery.is_of(incarnation));
        is_awaited
            || table.get(incarnation).is_some()
            || table.rank_of(incarnation).is_some()
            || table.is_lost(incarnation)
    }

    /// What its store takes.
    pub(super) fn load(&self) -> Load {
        self.kv.load()
    }

    /// Cancels a read whose caller is gone.
    pub(super) fn cancel(&mut self, call: CallId) {
        self.kv.cancel(call);
    }

    /// A message of a node, other than `Join`.
    pub(super) fn receive(
        &mut self,
        context: &mut ApplyContext<'_>,
        conn: ConnId,
        from: &Origin,
        body: Body,
    ) {
        let node = self.table.get(&from.incarnation);
        if !node.is_some_and(|node| node.speaks_on(conn)) {
            self.ignore(context, from, "a message on an old stream");
        } else if !self.is_of_another_assignment(from.generation, &from.assignment_id) {
            self.message(context, from, body);
        } else if let Some(body) = self.without_claims(context, from, body) {
            self.message(context, from, body);
        }
    }

    fn message(&mut self, context: &mut ApplyContext<'_>, from: &Origin, body: Body) {
        let Some(silence) = self.table.change(&from.incarnation, |node| node.heard(context)) else {
            return;
        };
        self.tell_back(context, &from.incarnation, silence);
        self.refuse_successor(context, &from.incarnation);
        let Some(body) = self.hold(context, from, body) else {
            return;
        };
        match body {
            Body::Heartbeat(heartbeat) => return self.heartbeat(context, from, &heartbeat),
            Body::NodeStopped(stopped) => self.node_stopped(context, from, &stopped),
            Body::WorkerExit(exit) => self.worker_exit(context, from, exit),
            Body::NodeSucceeded(_) => self.node_succeeded(context, from),
            Body::NodeLeaving(leaving) => self.node_leaving(context, from, leaving.signal),
            Body::HungWorkers(hung) => self.hung_workers(context, from, hung),
            Body::Leave(leave) => self.leave(context, &from.incarnation, &leave),
            Body::Join(_) => {}
        }
        self.plan_wake();
    }

    fn heartbeat(&mut self, context: &mut ApplyContext<'_>, from: &Origin, heartbeat: &Heartbeat) {
        let generation = self.counter.generation();
        if from.generation == generation {
            self.table.change(&from.incarnation, |node| {
                node.reached(heartbeat.step);
                node.note_progress(context, heartbeat);
            });
        }
        self.acknowledge(context, from, heartbeat.sent_ms);
        self.note_loss(from, heartbeat);
        self.note_lost_peer(context, from, heartbeat.lost_rank);
        if self.is_of_member(from)
            && let (Some(running), Some(step)) = (self.phase.running_mut(), heartbeat.step)
        {
            running.note_step(context.at.now, step);
            self.compare_waits(context, from);
        }
        // Also of a generation that an earlier daemon assigned.
        if from.generation == self.counter.highest()
            && let Some(limits) = RankLimits::of(heartbeat)
        {
            self.limit_sizes(context, limits);
        }
    }

    /// Tells a node that others could replace that its heartbeat has arrived.
    fn acknowledge(&self, context: &mut ApplyContext<'_>, from: &Origin, sent_ms: u64) {
        let node = self.table.get(&from.incarnation);
        if let Some(node) = node.filter(|_| sent_ms > 0 && self.has_replacements()) {
            node.send(
                context,
                self.counter.generation(),
                Reply::Heard(Heard { sent_ms }),
            );
        }
    }

    /// Rank 0 is on the first node.
    fn note_loss(&mut self, from: &Origin, heartbeat: &Heartbeat) {
        let rank_0 = heartbeat.ranks.first().filter(|first| first.rank == 0);
        let is_first =
            |members: &[Member]| members.first().is_some_and(|m| m.incarnation == from.incarnation);
        if let Some((rank_0, loss)) = rank_0.and_then(|rank_0| Some((rank_0, rank_0.loss?)))
            && from.generation == self.counter.generation()
            && self.phase.running().is_some()
            && is_first(self.table.members())
        {
            self.history.note_loss(rank_0.step, loss);
        }
    }

    /// Reduces a message about another assignment of the same generation: it proves only that the node is alive, that its
    /// workers are gone, or that it leaves.
    fn without_claims(&mut self, context: &mut ApplyContext<'_>, from: &Origin, body: Body) -> Option<Body> {
        match body {
            Body::Heartbeat(heartbeat) => Some(Body::Heartbeat(Heartbeat {
                sent_ms: heartbeat.sent_ms,
                ..Heartbeat::default()
            })),
            Body::NodeStopped(_) => Some(Body::NodeStopped(NodeStopped::default())),
            Body::Leave(leave) => Some(Body::Leave(leave)),
            Body::HungWorkers(_) => None,
            Body::WorkerExit(_) | Body::NodeSucceeded(_) | Body::NodeLeaving(_) | Body::Join(_) => {
                let cause = self.another_assignment_words(from.generation, &from.assignment_id);
                self.ignore(context, from, &format!("a report ({cause})"));
                let node = self.table.get(&from.incarnation);
                if let Some(node) = node.filter(|node| !node.is_stopping()) {
                    node.send(context, from.generation, Reply::GenerationOver(regrouping(cause)));
                }
                None
            }
        }
    }

    /// Logs why a message changes nothing.
    fn ignore(&self, context: &mut ApplyContext<'_>, from: &Origin, what: &str) {
        let phase = match self.phase {
            Phase::Gathering(_) if !self.counter.has_begun() => "not assigned yet",
            Phase::Gathering(_) => "over; nodes are gathering for the next one",
            Phase::Recovering(_) => "unknown; the daemon is recovering an earlier one",
            Phase::Running(_) => "running",
            Phase::Over(_) => "over, and so is the job",
        };
        context.detail(format!(
            "job `{}`: ignored {what} of {} for generation {}: generation {} is {phase}",
            self.id,
            self.table.name_of(&from.incarnation),
            from.generation,
            self.counter.generation(),
        ));
    }

    /// The stream of a node ended or broke.
    pub(super) fn closed(
        &mut self,
        context: &mut ApplyContext<'_>,
        incarnation: &str,
        conn: ConnId,
        clean: bool,
    ) {
        let node = self.table.get(incarnation);
        if !node.is_some_and(|node| node.speaks_on(conn)) {
            return;
        }
        let is_news = self.table.change(incarnation, |node| node.disconnect(context));
        let is_news = is_news.unwrap_or(false);
        if clean && matches!(self.phase, Phase::Over(_)) {
            self.table.dismiss(context, incarnation);
        } else if is_news {
            context.detail(format!(
                "job `{}`: connection of node `{}` broke; it is lost unless it reconnects within {:.1} s",
                self.id,
                self.table.get(incarnation).map_or("", Node::hostname),
                context.config.reconnect_grace.as_secs_f64()
            ));
            self.believe_witnesses(context);
        }
        self.plan_wake();
    }

    /// Handles what is due: expired leases, the end of the back-off, the last call, time-outs.
    pub(super) fn tick(&mut self, context: &mut ApplyContext<'_>) {
        let now = context.at.now;
        self.kv.expire(context);
        for incarnation in self.table.expired(context) {
            if !self.extend_lease(context, &incarnation) {
                self.lease_lost(context, &incarnation);
            }
        }
        match &self.phase {
            Phase::Gathering(_) => self.consider_start(context),
            Phase::Recovering(recovery) if recovery.until() <= now => self.recovery_timed_out(context),
            Phase::Over(over) if over.until() <= now => self.table.dismiss_all(context),
            Phase::Running(_) => {
                self.judge_suspect(context);
                self.consider_scale_up(context);
            }
            Phase::Over(_) | Phase::Recovering(_) => {}
        }
        self.plan_wake();
    }

    /// True if any node seems to be connected.
    pub(super) fn has_open_streams(&self) -> bool {
        self.table.connected() > 0
    }

    /// The daemon itself was stalled, or cut off: no node loses its lease for that.
    pub(super) fn renew_leases(&mut self, until: Duration) {
        self.table.renew_leases(until);
        if let Phase::Recovering(recovery) = &mut self.phase {
            recovery.wait_at_least(until);
        }
        self.plan_wake();
    }

    /// Computes the next deadline. Heartbeats only move deadlines away and need no new one.
    fn plan_wake(&mut self) {
        let phase = match &self.phase {
            Phase::Gathering(gathering) => Some(gathering.next_step()),
            Phase::Recovering(recovery) => Some(recovery.until()),
            Phase::Over(over) => Some(over.until()),
            Phase::Running(running) => running.next_step(self.away_until()),
        };
        let deadlines = [self.table.next_lease(), phase, self.kv.next_deadline()];
        self.next_wake = deadlines.into_iter().flatten().min();
    }

    /// True if no node needs this job any more.
    pub(super) fn is_forgotten(&self, now: Duration) -> bool {
        self.table.nodes().is_empty()
            && match &self.phase {
                Phase::Over(_) => true,
                // A job that ran keeps its restart count until its nodes had the time to come back.
                Phase::Gathering(gathering) => {
                    let may_train = self.takeover.until(now).is_some();
                    let is_new = self.earlier.is_none() || gathering.is_timed_out(now);
                    !self.counter.has_begun() && is_new && !may_train
                }
                Phase::Recovering(_) | Phase::Running(_) => false,
            }
    }

    /// The node is a member of the running generation.
    fn is_member(&self, incarnation: &str) -> bool {
        self.phase.running().is_some() && self.table.rank_of(incarnation).is_some()
    }

    /// The node is a member of the running generation and has not succeeded yet.
    fn is_at_work(&self, incarnation: &str) -> bool {
        self.is_member(incarnation) && !self.has_succeeded(incarnation)
    }

    /// The sender is a member, and its message is about the running generation.
    fn is_of_member(&self, from: &Origin) -> bool {
        from.generation == self.counter.generation() && self.is_member(&from.incarnation)
    }

    /// Writes an entry of the store.
    pub(super) fn put(
        &mut self,
        context: &mut ApplyContext<'_>,
        request: KvPutRequest,
    ) -> Result<(), KvError> {
        self.check_store(&request.incarnation, request.generation, &request.assignment_id)?;
        // A write may answer reads: then the next deadline is early, which is harmless.
        self.kv.put(context, request.key, request.value)
    }

    /// Reads the store, now or later.
    pub(super) fn read(
        &mut self,
        context: &mut ApplyContext<'_>,
        call: CallId,
        read: Read,
    ) -> Result<(), KvError> {
        self.check_store(&read.incarnation, read.generation, &read.assignment_id)?;
        self.kv.read(context, call, read.wanted, read.timeout);
        let deadlines = [self.next_wake, self.kv.next_deadline()];
        self.next_wake = deadlines.into_iter().flatten().min();
        Ok(())
    }

    /// Only members of the running assignment may use the store.
    fn check_store(&self, incarnation: &str, generation: u64, assignment_id: &str) -> Result<(), KvError> {
        if self.is_of_another_assignment(generation, assignment_id) {
            let words = self.another_assignment_words(generation, assignment_id);
            return Err(KvError::Superseded(words));
        }
        let (own, id) = (self.counter.generation(), &self.id);
        match &self.phase {
            Phase::Recovering(recovery) if recovery.generation() == generation => {
                let is_member = recovery.has(incarnation) || recovery.is_of(incarnation);
                if !is_member {
                    return Err(KvError::Unknown(format!(
                        "no node of generation {generation} of job `{id}` has reconnected yet"
                    )));
                }
                Ok(())
            }
            _ if generation > own => Err(KvError::Unknown(format!(
                "generation {generation} of job `{id}` was not assigned by this daemon"
            ))),
            Phase::Running(_) if generation == own && self.is_member(incarnation) => Ok(()),
            Phase::Running(_) if generation == own => Err(KvError::Superseded(format!(
                "generation {own} of the job runs without this node"
            ))),
            Phase::Over(over) => Err(KvError::Superseded(format!(
                "the job has ended: {}",
                over.reason()
            ))),
            _ => Err(KvError::Superseded(self.last_over.as_ref().map_or_else(
                || format!("generation {own} of the job runs"),
                |over| over.cause.clone(),
            ))),
        }
    }

    /// The subject of notes about this job.
    pub(super) fn about(&self, incarnation: &str) -> About {
        let node = self.table.get(incarnation);
        About {
            job: self.id.clone(),
            generation: self.counter.generation(),
            node: node.map_or_else(String::new, |node| node.hostname().to_owned()),
        }
    }

    /// Number of the running generation, if one runs.
    pub(super) fn running_generation(&self) -> Option<u64> {
        self.phase.running().map(|_| self.counter.generation())
    }

    pub(super) fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over(_))
    }

    /// An operator ends the job; `reason` says who.
    pub(super) fn close(&mut self, context: &mut ApplyContext<'_>, reason: &str) {
        if !self.is_over() {
            self.job_over(context, exit::CLOSED, printable::text(reason).into_owned());
            self.plan_wake();
        }
    }

    /// Adds the job to all of them.
    pub(super) fn count(&self, now: Duration, census: &mut Census) {
        let phase = match &self.phase {
            Phase::Gathering(_) => &mut census.gathering,
            Phase::Recovering(_) => &mut census.recovering,
            Phase::Running(_) => &mut census.running,
            Phase::Over(_) => &mut census.over,
        };
        *phase += 1;
        if let Phase::Gathering(gathering) = &self.phase {
            census.longest_gathering = census.longest_gathering.max(gathering.waited(now));
        }
        census.ranks += u64::from(self.ranks());
        let running = self.phase.running();
        census.stragglers += running.map_or(0, |running| running.stragglers().count());
        census.kv_bytes += self.kv.load().bytes as u64;
        for node in self.table.nodes().values() {
            census.nodes += 1;
            census.connected += u64::from(node.is_connected());
            let silence = now.saturating_sub(node.last_word());
            census.longest_silence = census.longest_silence.max(silence);
        }
    }

    /// Ranks of the generation that runs.
    fn ranks(&self) -> u32 {
        let members = self.phase.running().map(|_| self.table.members_there());
        members
            .into_iter()
            .flatten()
            .map(|(_, node)| node.join().workers)
            .sum()
    }

    /// The job in one line of a list.
    pub(super) fn summary(&self, now: Duration) -> JobSummary {
        if let Phase::Over(over) = &self.phase {
            return over.summary(now);
        }
        let owner = self.table.owner();
        let name = |name: fn(&Join) -> &String| owner.map_or_else(String::new, |join| name(join).clone());
        let ranks = || self.table.nodes().values().flat_map(Node::ranks);
        JobSummary {
            job_id: self.id.clone(),
            phase: self.phase.name().into(),
            generation: self.counter.generation(),
            restart_count: self.account.spent(),
            max_restarts: self.table.max_restarts(),
            nodes: self.table.nodes().len() as u32,
            ranks: self.ranks(),
            step: self.table.step(),
            reason: self.waiting_words(now),
            kv_bytes: self.kv.load().bytes as u64,
            user: name(|join| &join.user),
            hostname: name(|join| &join.hostname),
            target: name(|join| &join.target),
            age_ms: now.saturating_sub(self.since).as_millis() as u64,
            ended_ms: None,
            loss: ranks().find_map(|rank| rank.loss),
            step_time_s: ranks().filter_map(|rank| rank.step_time_s).reduce(f64::max),
        }
    }

    /// The status of the job.
    pub(super) fn status(&self, now: Duration) -> StatusReply {
        let (min_nodes, max_nodes) = self.table.limits();
        let mut reply = StatusReply {
            generation: self.counter.generation(),
            phase: self.phase.name().into(),
            restart_count: self.account.spent(),
            max_restarts: self.table.max_restarts(),
            assignment_id: self.counter.assignment_id().to_owned(),
            nodes: self.table.statuses(now, self.phase.running().is_some()),
            reason: self.waiting_words(now),
            min_nodes,
            max_nodes,
            kv_bytes: self.kv.load().bytes as u64,
            ..StatusReply::default()
        };
        reply.more_nodes = (self.table.nodes().len() - reply.nodes.len()) as u32;
        self.history.tell(now, &mut reply);
        if let Some(running) = self.phase.running() {
            running.stragglers().tell(&mut reply.nodes);
        }
        reply
    }
}
