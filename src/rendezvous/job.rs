//! One job: its nodes, its generation and its phase. The decisions are in `joining`, `gather`, `assignment` and
//! `outcome`; here is what they share: dispatch, leases, timers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{
    Assignment, GenerationOver, Heartbeat, HeartbeatAck, Join, NodeStatus, NodeStopped, StatusReply,
};

use super::event::{ConnId, Peer, Turn};
use super::failures::Failures;
use super::kv::KvStore;
use super::outcome::GenerationEnd;
use super::policy::Account;
use super::ranks::{Candidate, Member};
use super::record::Record;
use super::recovery::Recovery;
use super::silence::{Excuse, Progress};
use super::size::RankLimits;
use super::unnamed::Lookalike;
use super::witnesses::Sighting;
use super::words;

/// One job at the daemon.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) id: String,
    /// Last generation that was assigned; 0: none yet.
    pub(super) generation: u64,
    /// Random name of its assignment; empty if an earlier daemon of an older build has assigned it.
    pub(super) assignment_id: String,
    /// Last generation of a run or a daemon before this one: no number is used twice.
    pub(super) floor: u64,
    /// Generations up to this one of an earlier run or daemon are over for certain: none of them is taken up again.
    pub(super) highest_ended: u64,
    /// Number of the next generation's log files: generations of this run that ended, and those of earlier runs that
    /// left files.
    pub(super) attempts: u32,
    pub(super) account: Account,
    /// Random name of this run, from its first assignment on.
    pub(super) run_token: String,
    /// By incarnation.
    pub(super) nodes: BTreeMap<String, Node>,
    /// Incarnations of lost nodes, newest last: they may come back when the job is over.
    pub(super) lost: VecDeque<String>,
    /// Nodes that fell silent on an open stream, by incarnation, and how long each is expected back: their launchers
    /// may have been suspended.
    pub(super) silent: BTreeMap<String, Duration>,
    /// Nodes that ever came, which numbers their arrival.
    pub(super) arrivals: u64,
    pub(super) phase: Phase,
    /// What an earlier daemon has written down of it, until this one assigns or takes up a generation.
    pub(super) earlier: Option<Record>,
    /// Members of the last assignment: ranks are sticky.
    pub(super) previous: Vec<Member>,
    pub(super) lookalike: Option<Lookalike>,
    /// Longest time for which a node that ever came would wait for others: where all are away, they may come back.
    pub(super) patience: Duration,
    /// The number of ranks has to divide this one, as the workers last said; none: any will do.
    pub(super) rank_limits: RankLimits,
    pub(super) failures: Failures,
    /// Why the last generation is over; none while the first one has not been assigned.
    pub(super) last_over: Option<GenerationOver>,
    pub(super) kv: KvStore,
    /// No deadline of this job is before this moment; it may be early, never late.
    pub(super) next_wake: Option<Duration>,
}

/// What a job is doing.
#[derive(Debug)]
pub(super) enum Phase {
    /// Nodes are to come before the next generation can start.
    Gathering(Gathering),
    /// A generation runs that an earlier daemon has assigned; its nodes have not all come back yet.
    Recovering(Recovery),
    /// A generation runs.
    Running(Running),
    /// Every node was sent the end, or will be when it comes back.
    Over(Over),
}

#[derive(Debug)]
pub(super) struct Gathering {
    pub(super) began: Duration,
    /// The job is over if the nodes are not there by then; `MAX` until the first one has joined.
    pub(super) until: Duration,
    /// Back-off: nothing starts before.
    pub(super) not_before: Duration,
    /// MIN nodes are there: start with them at this moment.
    pub(super) last_call: Option<Duration>,
}

#[derive(Debug)]
pub(super) struct Running {
    /// Without the node rank, which differs from node to node.
    pub(super) assignment: Assignment,
    /// Members whose workers all ended with 0, by incarnation.
    pub(super) succeeded: BTreeSet<String>,
    /// A failure that names another one as its cause, or that may follow from a member whose connection is broken.
    pub(super) suspect: Option<Suspect>,
    /// By node rank: members to which a data connection broke.
    pub(super) sightings: BTreeMap<u32, Sighting>,
    pub(super) progress: Progress,
    /// When this daemon has assigned it, or taken it up.
    pub(super) since: Duration,
    /// How long it ran before that, under an earlier daemon.
    pub(super) ran_before: Duration,
    /// Nodes have come that the job has room for: it goes on with them at this moment.
    pub(super) scale_up: Option<Duration>,
}

/// What ends the generation if nothing better comes.
#[derive(Debug)]
pub(super) struct Suspect {
    pub(super) end: GenerationEnd,
    /// How long it waits for a better cause, if no member's connection is broken: see [`Job::suspect_until`].
    pub(super) until: Duration,
    /// How long it waits at most.
    pub(super) latest: Duration,
}

#[derive(Debug)]
pub(super) struct Over {
    /// What every node is told: `JobOver` or `Refused`.
    pub(super) verdict: Reply,
    pub(super) reason: String,
    /// All incarnations that the verdict concerns.
    pub(super) told: BTreeSet<String>,
    /// Nodes that have not left by then are forgotten.
    pub(super) until: Duration,
}

/// One agent process.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) conn: Option<ConnId>,
    pub(super) peer: Peer,
    pub(super) join: Join,
    pub(super) arrival: u64,
    pub(super) lease_until: Duration,
    /// When it spoke last, or its connection broke.
    pub(super) last_word: Duration,
    /// Why it is not lost although its lease has run out.
    pub(super) excuse: Option<Excuse>,
    pub(super) readiness: Readiness,
    pub(super) step: Option<u64>,
}

/// Who speaks, and of what.
pub(super) struct Speech<'a> {
    pub(super) incarnation: &'a str,
    pub(super) generation: u64,
    pub(super) assignment_id: &'a str,
}

/// How far a node is from running workers of the next generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Readiness {
    /// Joined; in the running generation or free for the next one.
    Joined,
    /// Told that this generation is over, has not confirmed that its workers are gone.
    Stopping(u64),
    /// Its workers are gone, it has not joined again.
    Stopped,
}

impl Job {
    /// A job that no node has joined yet, and whose generations come after `floor`.
    pub(super) fn new(id: &str, floor: u64, now: Duration) -> Self {
        Self {
            id: id.to_owned(),
            generation: 0,
            assignment_id: String::new(),
            floor,
            highest_ended: floor,
            attempts: 0,
            account: Account::default(),
            run_token: String::new(),
            nodes: BTreeMap::new(),
            lost: VecDeque::new(),
            silent: BTreeMap::new(),
            arrivals: 0,
            phase: Phase::Gathering(Gathering {
                began: now,
                until: Duration::MAX,
                not_before: now,
                last_call: None,
            }),
            earlier: None,
            previous: Vec::new(),
            lookalike: None,
            patience: Duration::ZERO,
            rank_limits: RankLimits::default(),
            failures: Failures::default(),
            last_over: None,
            kv: KvStore::default(),
            next_wake: None,
        }
    }

    /// A message of a known node, other than `Join`.
    pub(super) fn message(&mut self, turn: &mut Turn<'_>, incarnation: &str, generation: u64, body: Body) {
        let Some(node) = self.nodes.get_mut(incarnation) else {
            return;
        };
        let silence = node.heard(turn);
        self.tell_back(turn, incarnation, silence);
        let hurry = turn.at.now + turn.config.lease;
        let Some(body) = self.hold(incarnation, generation, body, hurry) else {
            return;
        };
        let Some(node) = self.nodes.get_mut(incarnation) else {
            return;
        };
        match body {
            Body::Heartbeat(heartbeat) => {
                if generation == self.generation {
                    node.step = heartbeat.step;
                }
                turn.send(node.conn, self.generation, Reply::HeartbeatAck(HeartbeatAck {}));
                self.note_progress(turn, incarnation, generation, heartbeat.step);
                // Also of a generation that an earlier daemon assigned.
                if generation == self.highest_generation()
                    && let Some(limits) = RankLimits::of(&heartbeat)
                {
                    self.limit_sizes(turn, limits);
                }
                return;
            }
            Body::NodeStopped(stopped) => self.node_stopped(turn, incarnation, generation, &stopped),
            Body::WorkerExit(exit) => self.worker_exit(turn, incarnation, generation, exit),
            Body::NodeSucceeded(_) => self.node_succeeded(turn, incarnation, generation),
            Body::NodeLeaving(leaving) => self.node_leaving(turn, incarnation, generation, leaving.signal),
            Body::Leave(leave) => self.leave(turn, incarnation, &leave),
            Body::Join(_) => {}
        }
        self.plan_wake();
    }

    /// What a node says of another assignment of the same generation changes nothing, but that the node is there, that
    /// its workers are gone, and that it leaves.
    pub(super) fn message_of_another(&mut self, turn: &mut Turn<'_>, from: &Speech<'_>, body: Body) {
        let Speech {
            incarnation,
            generation,
            assignment_id,
        } = *from;
        let body = match body {
            Body::Heartbeat(_) => Body::Heartbeat(Heartbeat::default()),
            Body::NodeStopped(_) => Body::NodeStopped(NodeStopped::default()),
            Body::Leave(leave) => Body::Leave(leave),
            Body::WorkerExit(_) | Body::NodeSucceeded(_) | Body::NodeLeaving(_) | Body::Join(_) => {
                let cause = self.another_assignment_words(generation, assignment_id);
                self.ignore(turn, incarnation, generation, &format!("a report ({cause})"));
                let over = GenerationOver {
                    cause,
                    membership: true,
                    ..GenerationOver::default()
                };
                let node = self.nodes.get(incarnation);
                if let Some(node) = node.filter(|node| node.readiness == Readiness::Joined) {
                    turn.send(node.conn, generation, Reply::GenerationOver(over));
                }
                return;
            }
        };
        self.message(turn, incarnation, generation, body);
    }

    /// Says why a message changes nothing.
    pub(super) fn ignore(&self, turn: &mut Turn<'_>, incarnation: &str, generation: u64, what: &str) {
        let phase = self.phase_name();
        turn.detail(format!(
            "job `{}`: ignored {what} of {} for generation {generation}: generation {} is {phase}",
            self.id,
            self.node_name(incarnation),
            self.generation,
        ));
    }

    /// The stream of a node is gone.
    pub(super) fn closed(&mut self, turn: &mut Turn<'_>, incarnation: &str, conn: ConnId, clean: bool) {
        let Some(node) = self
            .nodes
            .get_mut(incarnation)
            .filter(|node| node.conn == Some(conn))
        else {
            return;
        };
        if clean && matches!(self.phase, Phase::Over(_)) {
            self.nodes.remove(incarnation);
        } else {
            node.conn = None;
            if node.excuse.is_some() {
                // Nothing new: what is silent for long is cut off at some time.
                return;
            }
            node.last_word = turn.at.now;
            node.lease_until = node.lease_until.min(turn.at.now + turn.config.reconnect_grace);
            turn.detail(format!(
                "job `{}`: connection of node `{}` broke; it is lost unless it reconnects within {:.1} s",
                self.id,
                node.join.hostname,
                turn.config.reconnect_grace.as_secs_f64()
            ));
            self.believe_witnesses(turn);
        }
        self.plan_wake();
    }

    /// Does what is due: expired leases, the end of the back-off, last call, time-outs.
    pub(super) fn tick(&mut self, turn: &mut Turn<'_>) {
        let now = turn.at.now;
        self.kv.expire(now, &mut turn.effects);
        let lost: Vec<String> = self
            .nodes
            .iter()
            .filter(|(_, node)| node.lease_until <= now)
            .map(|(id, _)| id.clone())
            .collect();
        for incarnation in lost {
            if !self.excuse(turn, &incarnation) {
                self.lease_lost(turn, &incarnation);
            }
        }
        match &self.phase {
            Phase::Gathering(_) => self.consider_start(turn),
            Phase::Recovering(recovery) if recovery.until <= now => self.recovery_timed_out(turn),
            Phase::Over(over) if over.until <= now => {
                for node in self.nodes.values() {
                    turn.close(node.conn);
                }
                self.nodes.clear();
            }
            Phase::Running(_) => {
                self.judge_suspect(turn);
                self.consider_scale_up(turn);
            }
            Phase::Over(_) | Phase::Recovering(_) => {}
        }
        self.plan_wake();
    }

    /// The daemon itself was stalled: no node loses its lease for that.
    pub(super) fn renew_leases(&mut self, until: Duration) {
        for node in self.nodes.values_mut() {
            node.lease_until = node.lease_until.max(until);
        }
        if let Phase::Recovering(recovery) = &mut self.phase {
            recovery.until = recovery.until.max(until);
        }
        self.plan_wake();
    }

    /// Computes the next deadline; heartbeats only move deadlines away and need no new plan.
    pub(super) fn plan_wake(&mut self) {
        let leases = self.nodes.values().map(|node| node.lease_until).min();
        let phase = match &self.phase {
            Phase::Gathering(gathering) => Some(gathering.next_step()),
            Phase::Recovering(recovery) => Some(recovery.until),
            Phase::Over(over) => Some(over.until),
            Phase::Running(running) => {
                let suspect = self.suspect_until();
                [suspect, running.scale_up].into_iter().flatten().min()
            }
        };
        self.next_wake = [leases, phase, self.kv.next_deadline()]
            .into_iter()
            .flatten()
            .min();
    }

    /// True if no node needs this job any more.
    pub(super) fn is_forgotten(&self, now: Duration) -> bool {
        self.nodes.is_empty()
            && match self.phase {
                Phase::Over(_) => true,
                // A job that ran keeps its restart count until its nodes had the time to come back.
                Phase::Gathering(ref gathering) => {
                    self.generation == 0 && (self.earlier.is_none() || gathering.until <= now)
                }
                Phase::Recovering(_) | Phase::Running(_) => false,
            }
    }

    /// No generation above this one was ever assigned.
    pub(super) fn highest_generation(&self) -> u64 {
        self.generation.max(self.floor)
    }

    pub(super) fn is_member(&self, incarnation: &str) -> bool {
        matches!(self.phase, Phase::Running(_)) && self.rank_of(incarnation).is_some()
    }

    /// Node rank in the last assignment.
    pub(super) fn rank_of(&self, incarnation: &str) -> Option<u32> {
        self.previous
            .iter()
            .position(|member| member.incarnation == incarnation)
            .map(|rank| rank as u32)
    }

    /// How people call a node: its host, with its rank if it has one.
    pub(super) fn node_name(&self, incarnation: &str) -> String {
        let host = self
            .nodes
            .get(incarnation)
            .map(|node| node.join.hostname.as_str())
            .or_else(|| {
                self.previous
                    .iter()
                    .find(|s| s.incarnation == incarnation)
                    .map(|s| s.hostname.as_str())
            });
        words::node(host.unwrap_or("unknown"), self.rank_of(incarnation))
    }

    fn phase_name(&self) -> &'static str {
        match self.phase {
            Phase::Gathering(_) if self.generation == 0 => "not assigned yet",
            Phase::Gathering(_) => "over; nodes are gathering for the next one",
            Phase::Recovering(_) => "unknown; the daemon is recovering an earlier one",
            Phase::Running(_) => "running",
            Phase::Over(_) => "over, and so is the job",
        }
    }

    /// What people and tools may know.
    pub(super) fn status(&self, now: Duration) -> StatusReply {
        let node = |(incarnation, node): (&String, &Node)| NodeStatus {
            hostname: node.join.hostname.clone(),
            addr: node.address_alone(),
            node_rank: self
                .is_member(incarnation)
                .then(|| self.rank_of(incarnation))
                .flatten(),
            workers: node.join.workers,
            lease_left_ms: node.lease_until.saturating_sub(now).as_millis() as u32,
            step: node.step,
        };
        let phase = match self.phase {
            Phase::Gathering(_) => "gathering",
            Phase::Recovering(_) => "recovering",
            Phase::Running(_) => "running",
            Phase::Over(_) => "over",
        };
        StatusReply {
            generation: self.generation,
            phase: phase.into(),
            restart_count: self.account.spent(),
            assignment_id: self.assignment_id.clone(),
            nodes: self.nodes.iter().map(node).collect(),
            reason: self.waiting_words(now),
        }
    }
}

impl Gathering {
    /// When there is something to decide again, if no node comes or goes.
    fn next_step(&self) -> Duration {
        // The end of the back-off is a step of its own only until it has passed (`began` moves there then).
        let backoff = (self.not_before > self.began).then_some(self.not_before);
        [backoff, self.last_call]
            .into_iter()
            .flatten()
            .fold(self.until, Duration::min)
    }
}

impl Node {
    /// Free for the next generation, and connected.
    pub(super) fn is_ready(&self) -> bool {
        self.readiness == Readiness::Joined && self.conn.is_some()
    }

    /// As one that may take part in the next generation.
    pub(super) fn candidate(&self, incarnation: &str) -> Candidate {
        Candidate {
            incarnation: incarnation.to_owned(),
            hostname: self.join.hostname.clone(),
            asked: self.join.node_rank,
            arrival: self.arrival,
            workers: self.join.workers,
        }
    }

    /// Address of this node, seen without the others.
    pub(super) fn address_alone(&self) -> String {
        if self.join.local_addr.is_empty() {
            self.peer.remote.to_string()
        } else {
            self.join.local_addr.clone()
        }
    }
}
