//! One job. It consists of parts, each with fields that only its own file sees, and methods for what may happen to them:
//!
//! | file | part | knows |
//! |---|---|---|
//! | `numbering` | the generations | their numbers and names, those of earlier daemons, the run |
//! | `node` | one node | its stream, its lease, whether its workers are gone |
//! | `roster` | all nodes | who is there, who was in the last assignment, who is gone, how many are needed |
//! | `gathering` | gathering | when a generation starts, what the nodes wait for |
//! | `recovery` | recovery | how a daemon that lost its state takes up a generation that runs |
//! | `running` | the running generation | who is done, which failure is held back, who was seen to die |
//! | `verdict` | the end of the job | what every node is told, and what is kept for those that missed it |
//! | `failures` | all failures | their order, and which are listed |
//!
//! What is decided about several of them:
//!
//! | file | noun | knows |
//! |---|---|---|
//! | `joining` | joining | who may take part, who comes back, who is refused |
//! | `assignment` | the start | what every node receives |
//! | `outcome` | the end of a generation | failures, success, restarts |
//! | `departure` | nodes that go | who leaves, who is lost, whose death two witnesses saw |
//! | `scale` | growing | nodes that come to a job that runs |
//! | `silence` | silent members | whose peers vouch for them, and for how long |
//! | `record` | [`Record`] | what is written down of a job, and what a restarted daemon makes of it |

mod assignment;
mod departure;
mod failures;
mod gathering;
mod joining;
mod node;
mod numbering;
mod outcome;
mod record;
mod recovery;
mod roster;
mod running;
mod scale;
mod silence;
mod verdict;

use std::collections::BTreeMap;
use std::time::Duration;

use ddp_proto::exit;
use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{
    GenerationOver, Heartbeat, HeartbeatAck, JobSummary, KvGatherRequest, KvGetRequest, KvPutRequest,
    NodeStopped, NodesRequest, StatusReply,
};
use prost::bytes::Bytes;

use super::event::{About, CallId, ConnId, KvError, Speech, Turn, regrouping};
use super::history::History;
use super::kv::KvStore;
use super::policy::Account;
use super::ranks::Member;
use super::size::RankLimits;
use super::state::Census;
use super::store_totals::Load;
use super::stragglers;
use failures::Failures;
use gathering::Gathering;
use node::Node;
use numbering::Numbering;
use recovery::Recovery;
use roster::Roster;
use running::Running;
use verdict::Over;

#[cfg(test)]
pub(super) use failures::{MAX_KNOWN, MAX_LISTED, MAX_TAKEN};
pub(super) use joining::Joining;
pub use record::Record;
#[cfg(test)]
pub(super) use record::Stage;
pub(super) use verdict::Finished;

/// One job at the daemon.
#[derive(Debug)]
pub(super) struct Job {
    id: String,
    numbering: Numbering,
    roster: Roster,
    phase: Phase,
    account: Account,
    failures: Failures,
    /// Why the last generation is over; none while the first one has not been assigned.
    last_over: Option<GenerationOver>,
    /// What an earlier daemon has written down of it: it counts until this one assigns or takes up a generation.
    earlier: Option<Record>,
    kv: KvStore,
    history: History,
    /// No deadline of this job is before this moment; it may be early, never late.
    next_wake: Option<Duration>,
}

/// What a job is doing.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a job has one")]
enum Phase {
    /// Nodes are to come before the next generation can start.
    Gathering(Gathering),
    /// A generation runs that an earlier daemon has assigned; its nodes have not all come back yet.
    Recovering(Recovery),
    /// A generation runs.
    Running(Box<Running>),
    /// Every node was sent the end, or will be when it comes back.
    Over(Over),
}

impl Phase {
    /// As people and tools read it.
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
    /// A job that no node has joined yet, and whose generations come after `floor`.
    pub(super) fn new(id: &str, floor: u64, now: Duration) -> Self {
        Self {
            id: id.to_owned(),
            numbering: Numbering::after(floor),
            roster: Roster::default(),
            phase: Phase::Gathering(Gathering::new(now, now, Duration::MAX)),
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

    pub(super) fn is_idle(&self) -> bool {
        self.roster.nodes().is_empty()
    }

    /// Nodes that fell silent, and how long each is expected back.
    pub(super) fn silent(&self) -> &BTreeMap<String, Duration> {
        self.roster.silent()
    }

    /// The node is one of this job, or was and may still speak of it.
    pub(super) fn has(&self, incarnation: &str) -> bool {
        let roster = &self.roster;
        let is_awaited = matches!(&self.phase, Phase::Recovering(recovery) if recovery.is_of(incarnation));
        is_awaited
            || roster.get(incarnation).is_some()
            || roster.rank_of(incarnation).is_some()
            || roster.is_lost(incarnation)
    }

    /// What its store takes.
    pub(super) fn load(&self) -> Load {
        self.kv.load()
    }

    /// Nobody waits for the answer of this read any more.
    pub(super) fn cancel(&mut self, call: CallId) {
        self.kv.cancel(call);
    }

    /// A message of a node, other than `Join`.
    pub(super) fn receive(&mut self, turn: &mut Turn<'_>, conn: ConnId, from: &Speech, body: Body) {
        let node = self.roster.get(&from.incarnation);
        if !node.is_some_and(|node| node.speaks_on(conn)) {
            self.ignore(turn, from, "a message on an old stream");
        } else if !self.is_of_another_assignment(from.generation, &from.assignment_id) {
            self.message(turn, from, body);
        } else if let Some(body) = self.without_claims(turn, from, body) {
            self.message(turn, from, body);
        }
    }

    fn message(&mut self, turn: &mut Turn<'_>, from: &Speech, body: Body) {
        let Some(silence) = self.roster.change(&from.incarnation, |node| node.heard(turn)) else {
            return;
        };
        self.tell_back(turn, &from.incarnation, silence);
        let Some(body) = self.hold(turn, from, body) else {
            return;
        };
        match body {
            Body::Heartbeat(heartbeat) => return self.heartbeat(turn, from, &heartbeat),
            Body::NodeStopped(stopped) => self.node_stopped(turn, from, &stopped),
            Body::WorkerExit(exit) => self.worker_exit(turn, from, exit),
            Body::NodeSucceeded(_) => self.node_succeeded(turn, from),
            Body::NodeLeaving(leaving) => self.node_leaving(turn, from, leaving.signal),
            Body::Leave(leave) => self.leave(turn, &from.incarnation, &leave),
            Body::Join(_) => {}
        }
        self.plan_wake();
    }

    fn heartbeat(&mut self, turn: &mut Turn<'_>, from: &Speech, heartbeat: &Heartbeat) {
        let generation = self.numbering.generation();
        self.roster.change(&from.incarnation, |node| {
            if from.generation == generation {
                node.reached(heartbeat.step);
                node.note_progress(turn, heartbeat);
            }
            node.send(turn, generation, Reply::HeartbeatAck(HeartbeatAck {}));
        });
        self.note_loss(from, heartbeat);
        self.note_sighting(turn, from, heartbeat.lost_rank);
        if self.is_of_member(from)
            && let (Some(running), Some(step)) = (self.phase.running_mut(), heartbeat.step)
        {
            running.note_step(turn.at.now, step);
        }
        // Also of a generation that an earlier daemon assigned.
        if from.generation == self.numbering.highest()
            && let Some(limits) = RankLimits::of(heartbeat)
        {
            self.limit_sizes(turn, limits);
        }
    }

    /// Rank 0 is on the first node.
    fn note_loss(&mut self, from: &Speech, heartbeat: &Heartbeat) {
        let rank_0 = heartbeat.ranks.first().filter(|first| first.rank == 0);
        let is_first =
            |members: &[Member]| members.first().is_some_and(|m| m.incarnation == from.incarnation);
        if let Some((rank_0, loss)) = rank_0.and_then(|rank_0| Some((rank_0, rank_0.loss?)))
            && from.generation == self.numbering.generation()
            && self.phase.running().is_some()
            && is_first(self.roster.members())
        {
            self.history.note_loss(rank_0.step, loss);
        }
    }

    /// What a node says of another assignment of the same generation changes nothing, but that the node is there, that
    /// its workers are gone, and that it leaves.
    fn without_claims(&mut self, turn: &mut Turn<'_>, from: &Speech, body: Body) -> Option<Body> {
        match body {
            Body::Heartbeat(_) => Some(Body::Heartbeat(Heartbeat::default())),
            Body::NodeStopped(_) => Some(Body::NodeStopped(NodeStopped::default())),
            Body::Leave(leave) => Some(Body::Leave(leave)),
            Body::WorkerExit(_) | Body::NodeSucceeded(_) | Body::NodeLeaving(_) | Body::Join(_) => {
                let cause = self.another_assignment_words(from.generation, &from.assignment_id);
                self.ignore(turn, from, &format!("a report ({cause})"));
                let node = self.roster.get(&from.incarnation);
                if let Some(node) = node.filter(|node| !node.is_stopping()) {
                    node.send(turn, from.generation, Reply::GenerationOver(regrouping(cause)));
                }
                None
            }
        }
    }

    /// Says why a message changes nothing.
    fn ignore(&self, turn: &mut Turn<'_>, from: &Speech, what: &str) {
        let phase = match self.phase {
            Phase::Gathering(_) if !self.numbering.has_begun() => "not assigned yet",
            Phase::Gathering(_) => "over; nodes are gathering for the next one",
            Phase::Recovering(_) => "unknown; the daemon is recovering an earlier one",
            Phase::Running(_) => "running",
            Phase::Over(_) => "over, and so is the job",
        };
        turn.detail(format!(
            "job `{}`: ignored {what} of {} for generation {}: generation {} is {phase}",
            self.id,
            self.roster.name_of(&from.incarnation),
            from.generation,
            self.numbering.generation(),
        ));
    }

    /// The stream of a node is gone.
    pub(super) fn closed(&mut self, turn: &mut Turn<'_>, incarnation: &str, conn: ConnId, clean: bool) {
        let node = self.roster.get(incarnation);
        if !node.is_some_and(|node| node.speaks_on(conn)) {
            return;
        }
        let is_news = self.roster.change(incarnation, |node| node.disconnect(turn));
        let is_news = is_news.unwrap_or(false);
        if clean && matches!(self.phase, Phase::Over(_)) {
            self.roster.dismiss(turn, incarnation);
        } else if is_news {
            turn.detail(format!(
                "job `{}`: connection of node `{}` broke; it is lost unless it reconnects within {:.1} s",
                self.id,
                self.roster.get(incarnation).map_or("", Node::hostname),
                turn.config.reconnect_grace.as_secs_f64()
            ));
            self.believe_witnesses(turn);
        }
        self.plan_wake();
    }

    /// Does what is due: expired leases, the end of the back-off, last call, time-outs.
    pub(super) fn tick(&mut self, turn: &mut Turn<'_>) {
        let now = turn.at.now;
        self.kv.expire(turn);
        for incarnation in self.roster.expired(turn) {
            if !self.excuse(turn, &incarnation) {
                self.lease_lost(turn, &incarnation);
            }
        }
        match &self.phase {
            Phase::Gathering(_) => self.consider_start(turn),
            Phase::Recovering(recovery) if recovery.until() <= now => self.recovery_timed_out(turn),
            Phase::Over(over) if over.until() <= now => self.roster.dismiss_all(turn),
            Phase::Running(_) => {
                self.judge_suspect(turn);
                self.consider_scale_up(turn);
            }
            Phase::Over(_) | Phase::Recovering(_) => {}
        }
        self.plan_wake();
    }

    /// A node looks connected.
    pub(super) fn has_open_streams(&self) -> bool {
        self.roster.connected() > 0
    }

    /// The daemon itself was stalled, or cut off: no node loses its lease for that.
    pub(super) fn renew_leases(&mut self, until: Duration) {
        self.roster.renew_leases(until);
        if let Phase::Recovering(recovery) = &mut self.phase {
            recovery.wait_at_least(until);
        }
        self.plan_wake();
    }

    /// Computes the next deadline; heartbeats only move deadlines away and need no new plan.
    fn plan_wake(&mut self) {
        let phase = match &self.phase {
            Phase::Gathering(gathering) => Some(gathering.next_step()),
            Phase::Recovering(recovery) => Some(recovery.until()),
            Phase::Over(over) => Some(over.until()),
            Phase::Running(running) => running.next_step(self.away_until()),
        };
        let deadlines = [self.roster.next_lease(), phase, self.kv.next_deadline()];
        self.next_wake = deadlines.into_iter().flatten().min();
    }

    /// True if no node needs this job any more.
    pub(super) fn is_forgotten(&self, now: Duration) -> bool {
        self.roster.nodes().is_empty()
            && match &self.phase {
                Phase::Over(_) => true,
                // A job that ran keeps its restart count until its nodes had the time to come back.
                Phase::Gathering(gathering) => {
                    !self.numbering.has_begun() && (self.earlier.is_none() || gathering.is_timed_out(now))
                }
                Phase::Recovering(_) | Phase::Running(_) => false,
            }
    }

    /// The node is in the generation that runs.
    fn is_member(&self, incarnation: &str) -> bool {
        self.phase.running().is_some() && self.roster.rank_of(incarnation).is_some()
    }

    /// It is, and not done.
    fn is_at_work(&self, incarnation: &str) -> bool {
        self.is_member(incarnation) && !self.has_succeeded(incarnation)
    }

    /// A member speaks of the generation that runs.
    fn is_of_member(&self, from: &Speech) -> bool {
        from.generation == self.numbering.generation() && self.is_member(&from.incarnation)
    }

    /// Writes an entry of the store.
    pub(super) fn put(&mut self, turn: &mut Turn<'_>, request: KvPutRequest) -> Result<(), KvError> {
        self.check_store(&request.incarnation, request.generation, &request.assignment_id)?;
        // A write may answer reads: then the next deadline is early, which is harmless.
        self.kv.put(turn, request.key, request.value)
    }

    /// Reads an entry of the store, now or later.
    pub(super) fn get(
        &mut self,
        turn: &mut Turn<'_>,
        call: CallId,
        read: KvGetRequest,
    ) -> Result<(), KvError> {
        self.check_store(&read.incarnation, read.generation, &read.assignment_id)?;
        let timeout = Duration::from_millis(read.timeout_ms.into());
        self.kv.get(turn, call, read.key, timeout);
        self.wake_for_store();
        Ok(())
    }

    /// Reads all entries of the store with one prefix, now or when there are enough.
    pub(super) fn gather(
        &mut self,
        turn: &mut Turn<'_>,
        call: CallId,
        read: KvGatherRequest,
    ) -> Result<(), KvError> {
        self.check_store(&read.incarnation, read.generation, &read.assignment_id)?;
        let timeout = Duration::from_millis(read.timeout_ms.into());
        let wanted = (read.prefix, read.count as usize);
        self.kv.gather(turn, call, wanted, timeout);
        self.wake_for_store();
        Ok(())
    }

    fn wake_for_store(&mut self) {
        let deadlines = [self.next_wake, self.kv.next_deadline()];
        self.next_wake = deadlines.into_iter().flatten().min();
    }

    /// All nodes of the generation, if that is the one that runs, encoded.
    pub(super) fn node_list(&self, request: &NodesRequest) -> Result<Bytes, KvError> {
        let generation = request.generation;
        self.check_store(&request.incarnation, generation, &request.assignment_id)?;
        let recovering = || {
            KvError::Unknown(format!(
                "the nodes of generation {generation} have not all reconnected yet"
            ))
        };
        self.phase
            .running()
            .map(|running| running.nodes().encoded())
            .ok_or_else(recovering)
    }

    /// The store is open to the members of this assignment of this generation, if that runs.
    fn check_store(&self, incarnation: &str, generation: u64, assignment_id: &str) -> Result<(), KvError> {
        if self.is_of_another_assignment(generation, assignment_id) {
            let words = self.another_assignment_words(generation, assignment_id);
            return Err(KvError::Superseded(words));
        }
        let (own, id) = (self.numbering.generation(), &self.id);
        match &self.phase {
            Phase::Recovering(recovery) if recovery.generation() == generation => {
                let is_member = recovery.has(incarnation) || recovery.is_of(incarnation);
                if !is_member || recovery.assignment_id().is_empty() && !assignment_id.is_empty() {
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

    /// Of what the notes of a turn speak.
    pub(super) fn about(&self, incarnation: &str) -> About {
        let node = self.roster.get(incarnation);
        About {
            job: self.id.clone(),
            generation: self.numbering.generation(),
            node: node.map_or_else(String::new, |node| node.hostname().to_owned()),
        }
    }

    /// Number of the generation that runs; none if none does.
    pub(super) fn running_generation(&self) -> Option<u64> {
        self.phase.running().map(|_| self.numbering.generation())
    }

    pub(super) fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over(_))
    }

    /// An operator ends the job.
    pub(super) fn close(&mut self, turn: &mut Turn<'_>, reason: &str) {
        if !self.is_over() {
            let words = match reason {
                "" => "an operator closed the job".to_owned(),
                reason => format!("an operator closed the job: {reason}"),
            };
            self.job_over(turn, exit::CLOSED, words);
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
        census.kv_bytes += self.kv.load().bytes as u64;
        for node in self.roster.nodes().values() {
            census.nodes += 1;
            census.connected += u64::from(node.is_connected());
            let silence = now.saturating_sub(node.last_word());
            census.longest_silence = census.longest_silence.max(silence);
        }
    }

    /// Ranks of the generation that runs.
    fn ranks(&self) -> u32 {
        let members = self.phase.running().map(|_| self.roster.members_there());
        members
            .into_iter()
            .flatten()
            .map(|(_, node)| node.join().workers)
            .sum()
    }

    /// The job in one line of a list.
    pub(super) fn summary(&self, now: Duration) -> JobSummary {
        JobSummary {
            job_id: self.id.clone(),
            phase: self.phase.name().into(),
            generation: self.numbering.generation(),
            restart_count: self.account.spent(),
            max_restarts: self.roster.max_restarts(),
            nodes: self.roster.nodes().len() as u32,
            ranks: self.ranks(),
            step: self.roster.step(),
            reason: self.waiting_words(now),
            kv_bytes: self.kv.load().bytes as u64,
        }
    }

    /// What people and tools may know.
    pub(super) fn status(&self, now: Duration) -> StatusReply {
        let (min_nodes, max_nodes) = self.roster.limits();
        let mut reply = StatusReply {
            generation: self.numbering.generation(),
            phase: self.phase.name().into(),
            restart_count: self.account.spent(),
            max_restarts: self.roster.max_restarts(),
            assignment_id: self.numbering.assignment_id().to_owned(),
            nodes: self.roster.statuses(now, self.phase.running().is_some()),
            reason: self.waiting_words(now),
            min_nodes,
            max_nodes,
            kv_bytes: self.kv.load().bytes as u64,
            ..StatusReply::default()
        };
        reply.more_nodes = (self.roster.nodes().len() - reply.nodes.len()) as u32;
        self.history.tell(now, &mut reply);
        let nodes = self.roster.nodes().values();
        stragglers::tell(nodes.flat_map(Node::ranks), &mut reply);
        reply
    }
}
