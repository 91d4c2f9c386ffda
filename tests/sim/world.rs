//! One world: hosts with agents and workers, a network, daemons, and a clock that jumps from event to event.

mod faults;
mod network;
mod plan;

pub(crate) use faults::KINDS;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use ddp_launcher::{Ending, ExitReason};
use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{AgentMessage, DaemonMessage};
use ddp_run::rendezvous::{At, CallId, Config, ConnId, Effect, Event, Peer, Record, Secret, State, apply};
use rand::Rng;
use rand::rngs::StdRng;
use tokio::time::Instant;

use crate::node::{Life, Node, NodeEvent};
use crate::store::{Asked, Call};
use crate::witness::Witness;

use network::{Cut, Stream};
use plan::JobPlan;

/// By then every world has come to rest: faults, leases, back-off, join time-out and linger are shorter together.
const END: Duration = Duration::from_mins(15);
/// More than any world needs; a world that does not come to rest hits it.
const MAX_EVENTS: usize = 400_000;
/// Millionths.
const MILLION: u64 = 1_000_000;

/// What happens next, to whom. Nodes are numbered in order of their birth, so are daemons.
#[derive(Debug)]
pub(crate) enum SimEvent {
    /// A message of an agent arrives at its daemon.
    Arrives(ConnId, AgentMessage),
    /// The daemon learns that a stream is gone.
    Ends(ConnId, bool),
    /// A message of the daemon, or the end of the stream, arrives at an agent.
    Delivers(ConnId, Option<DaemonMessage>),
    Node(usize, NodeEvent),
    /// A worker of a node ends, by itself or because it was told to; true: with all of its work done.
    WorkerEnds(usize, u64, Ending, bool),
    /// A worker of a node leaves its generation, and waits for the next one.
    WorkerParks(usize, u64),
    /// A worker calls the store.
    Asks(Call),
    /// The call arrives at a daemon.
    Receives(usize, Call),
    /// A new agent process on a host.
    Starts(usize),
    /// The workers of a node have died, among them the one of this rank; its peers lose their data connections.
    PeersFail(usize, u32),
    /// The guardian of a killed agent has killed the workers.
    GuardianEnds(usize),
    /// The guardian of a node looks at its clock.
    Guards(usize),
    /// A stopped agent goes on.
    NodeWakes(usize),
    /// A stopped daemon goes on.
    DaemonWakes(usize),
    /// A daemon takes the place of this one, which died.
    DaemonStarts(usize),
    /// The older of two daemons dies.
    DaemonLeaves(usize),
    /// Some fault.
    Fault,
    /// The daemon dies as soon as every node is well.
    Crashes,
}

/// One daemon process.
#[derive(Debug)]
pub(crate) struct Daemon {
    state: State,
    born: Duration,
    /// How fast its clock runs, in millionths.
    pace: u64,
    pub(crate) is_alive: bool,
    /// It is stopped until then; what comes meanwhile waits.
    stalled: Option<Duration>,
    backlog: Vec<Event>,
    /// The last record of each job, in worlds with ledgers.
    ledger: Option<BTreeMap<String, Record>>,
    /// Number of the first daemon with this ledger.
    first: usize,
}

impl Daemon {
    /// The time by its own clock.
    pub(crate) fn clock(&self, now: Duration) -> Duration {
        scale(now.saturating_sub(self.born), self.pace, MILLION)
    }

    /// When its timer is due.
    fn wakes_at(&self) -> Option<Duration> {
        if !self.is_alive || self.stalled.is_some() {
            return None;
        }
        let wake = self.state.next_wake()?;
        let after = scale(wake, MILLION, self.pace);
        Some(self.born.saturating_add(after))
    }
}

/// `time * by / of`.
fn scale(time: Duration, by: u64, of: u64) -> Duration {
    let nanos = time.as_nanos() * u128::from(by) / u128::from(of);
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// How a world ended.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// Exit codes of the launchers that were not killed.
    pub(crate) exit_codes: Vec<i32>,
    pub(crate) generations: u64,
    /// Generations with several assignments.
    pub(crate) counted_twice: u64,
    /// Two living holders of one place, or values of other assignments, in words.
    pub(crate) breaches: Vec<String>,
    /// Runs to which two daemons gave different verdicts.
    pub(crate) changed_verdicts: u64,
    /// How often each kind of fault has occurred.
    pub(crate) faults: BTreeMap<&'static str, u64>,
}

/// Everything there is.
#[expect(clippy::struct_excessive_bools, reason = "they are independent")]
pub(crate) struct World {
    pub(crate) rng: StdRng,
    pub(crate) config: Config,
    pub(crate) now: Duration,
    /// What `now` is for code that asks a clock.
    epoch: Instant,
    /// By time and order of creation.
    agenda: BTreeMap<(Duration, u64), SimEvent>,
    pub(crate) jobs: Vec<JobPlan>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) daemons: Vec<Daemon>,
    /// The daemon that each host reaches.
    pub(crate) routes: Vec<usize>,
    cuts: Vec<Cut>,
    pub(crate) streams: BTreeMap<ConnId, Stream>,
    pub(crate) calls: BTreeMap<CallId, Asked>,
    pub(crate) witness: Witness,
    /// How likely a node's workers fail.
    pub(crate) failing: f64,
    /// How long workers work.
    pub(crate) work_ms: Range<u64>,
    /// Longest time until a worker writes in the store.
    pub(crate) put_ms: u64,
    /// What daemons write down is there when one is started in the place of a dead one.
    has_ledgers: bool,
    /// Clocks differ.
    has_drift: bool,
    /// A message that must change nothing is being told.
    is_hostile: bool,
    pub(crate) ids: u64,
    faults: BTreeMap<&'static str, u64>,
    pub(crate) loud: bool,
}

impl World {
    /// Runs until nothing is left to happen.
    pub(crate) fn run(mut self) -> Outcome {
        self.advance(END);
        self.rest()
    }

    /// Runs until a moment.
    pub(crate) fn advance(&mut self, until: Duration) {
        for _ in 0..MAX_EVENTS {
            let due = self.daemons.iter().enumerate();
            let due = due.filter_map(|(number, daemon)| Some((daemon.wakes_at()?, number)));
            let (wake, daemon) = due.min().unwrap_or((Duration::MAX, 0));
            let next = self.agenda.first_key_value();
            let next = next.map_or(Duration::MAX, |((time, _), _)| *time);
            if wake.min(next) > until {
                self.now = until;
                return;
            }
            if wake < next {
                self.now = wake.max(self.now);
                self.tick(daemon);
            } else if let Some(((time, _), event)) = self.agenda.pop_first() {
                self.now = time.max(self.now);
                self.happen(event);
            }
        }
        let states: Vec<_> = self.daemons.iter().map(|daemon| &daemon.state).collect();
        panic!("the world does not come to rest; daemons: {states:#?}");
    }

    fn tick(&mut self, number: usize) {
        self.apply(number, Event::Tick);
        let daemon = &self.daemons[number];
        let (now, again) = (daemon.clock(self.now), daemon.state.next_wake());
        let is_later = again.is_none_or(|again| again > now);
        assert!(is_later, "the timer of daemon {number} spins at {now:?}");
        self.check_calls(number);
    }

    /// Nothing more happens: every agent must have ended, and every call must have been answered.
    fn rest(mut self) -> Outcome {
        for (number, node) in self.nodes.iter().enumerate() {
            assert!(node.is_gone(), "node {number} is stuck: {node:#?}");
            let lives = node.has_live_workers();
            assert!(!lives, "a worker outlives node {number}: {node:#?}");
        }
        assert!(self.calls.is_empty(), "calls without an answer: {:?}", self.calls);
        for daemon in self.daemons.iter().filter(|daemon| daemon.is_alive) {
            assert!(daemon.state.is_idle(), "state: {:#?}", daemon.state);
        }
        let mut exit_codes = Vec::new();
        for number in 0..self.nodes.len() {
            exit_codes.extend(self.check_end(number));
        }
        let counted_twice = self.witness.counted_twice();
        let must_know = self.has_ledgers && !self.faults.contains_key("two daemons");
        assert!(!must_know || counted_twice == 0, "a generation was counted twice");
        let mut breaches = std::mem::take(&mut self.witness.breaches);
        let is_one_daemon = !self.faults.contains_key("two daemons");
        if is_one_daemon && (self.has_ledgers || !self.faults.contains_key("daemon killed")) {
            breaches.append(&mut self.witness.overlaps);
        }
        Outcome {
            exit_codes,
            generations: self.witness.generations(),
            counted_twice,
            breaches,
            changed_verdicts: self.witness.changed_verdicts(),
            faults: self.faults,
        }
    }

    /// An agent ends with the verdict that it was told; it is told each verdict of a daemon that lives, or has a reason
    /// of its own.
    fn check_end(&self, number: usize) -> Option<i32> {
        let node = &self.nodes[number];
        let Life::Ended(exit_reason) = &node.life else {
            return None;
        };
        let code = i32::from(exit_reason.exit_code());
        let has_own_end = match exit_reason {
            // A signal that came before the verdict goes before it.
            ExitReason::Stopped { signal } => Some(*signal) == node.stopped_by,
            // So does giving up the daemon.
            ExitReason::DaemonGone { .. } => true,
            _ => false,
        };
        let owed = self.witness.owed(&node.incarnation);
        // The ledger has the nodes of a generation, not its standbys. With two daemons, the node may be one of the other's.
        let is_in_ledger = !node.run_token().is_empty() && !self.faults.contains_key("two daemons");
        let knows = |daemon: usize| self.daemons[daemon].is_alive || is_in_ledger && self.still_knows(daemon);
        let owed = owed.filter(|(daemon, _)| knows(*daemon));
        let verdict = node.told.or(owed.map(|(_, code)| code));
        if let Some(verdict) = verdict
            && !has_own_end
        {
            let assumed = node.told.is_none() && *exit_reason == ExitReason::Succeeded;
            assert!(
                code == verdict || assumed,
                "node {number} ended with {exit_reason:?}, but the verdict was {verdict}: {node:#?}"
            );
            return Some(code);
        }
        let job = &self.jobs[node.job];
        // A node that comes when the job is over, or that no other node joins in time, ends with 75; one that asks for
        // a rank while a dead process still seems to hold it, with 2; one that comes to a job of one node while a dead
        // process still seems to be that node, with 76.
        let is_refused = matches!(exit_reason, ExitReason::Refused { .. })
            && (code == 75 || (job.ranks_asked && code == 2) || (job.max_nodes == 1 && code == 76));
        let is_assumed = *exit_reason == ExitReason::Succeeded && node.is_broken;
        assert!(
            has_own_end || is_refused || is_assumed,
            "node {number} ended with {exit_reason:?} without a verdict: {node:#?}"
        );
        Some(code)
    }

    /// Whether some daemon knows the end that this one has given to a run.
    fn still_knows(&self, daemon: usize) -> bool {
        let first = self.daemons[daemon].first;
        let mut heirs = self.daemons.iter().filter(|heir| heir.first == first);
        heirs.any(|heir| heir.is_alive)
    }

    fn happen(&mut self, event: SimEvent) {
        if self.loud {
            println!("{:>9.3}  {event:?}", self.now.as_secs_f64());
        }
        match event {
            SimEvent::Arrives(conn, message) => self.arrive(conn, message),
            SimEvent::Ends(conn, clean) => {
                if let Some(stream) = self.streams.remove(&conn) {
                    self.tell_daemon(stream.daemon, Event::Closed { conn, clean });
                }
            }
            SimEvent::Delivers(conn, message) => self.deliver(conn, message),
            SimEvent::Node(number, event) => self.on_node(number, event),
            SimEvent::WorkerEnds(number, worker, ending, is_finished) => {
                self.worker_ends(number, worker, ending, is_finished);
            }
            SimEvent::WorkerParks(number, worker) => self.worker_parks(number, worker),
            SimEvent::Asks(call) => self.ask(call),
            SimEvent::Receives(daemon, call) => self.receive_call(daemon, call),
            SimEvent::Starts(host) => self.start(host),
            SimEvent::NodeWakes(number) => {
                if self.nodes[number].stalled.is_some_and(|until| until <= self.now) {
                    self.nodes[number].stalled = None;
                    for event in std::mem::take(&mut self.nodes[number].backlog) {
                        self.on_node(number, event);
                    }
                }
            }
            SimEvent::PeersFail(number, rank) => self.peers_fail(number, rank),
            SimEvent::GuardianEnds(number) => self.tell_launcher_died(number),
            SimEvent::Guards(number) => self.guard(number),
            SimEvent::DaemonWakes(number) => self.daemon_wakes(number),
            SimEvent::DaemonStarts(dead) => self.start_daemon(Some(dead)),
            SimEvent::DaemonLeaves(number) => self.daemon_leaves(number),
            SimEvent::Fault => self.fault(),
            SimEvent::Crashes if self.is_well() => self.crash_daemon(),
            // Before all have started, or when the first has left.
            SimEvent::Crashes => {
                if self.nodes.iter().all(|node| !node.is_gone()) {
                    self.later(Duration::from_millis(50), SimEvent::Crashes);
                }
            }
        }
    }

    fn arrive(&mut self, conn: ConnId, message: AgentMessage) {
        let Some(stream) = self.streams.get(&conn) else {
            return;
        };
        let (daemon, host) = (stream.daemon, self.nodes[stream.node].host);
        if let Some(Body::Join(join)) = &message.body {
            let first = self.daemons[daemon].first;
            let words = self.witness.words(first, &message.job_id);
            words.joins(&message.incarnation, &join.run_token);
        }
        let peer = Peer {
            remote: IpAddr::from([10, 0, 0, host as u8]),
            local: IpAddr::from([10, 0, 1, 0]),
        };
        let message = Box::new(message);
        self.tell_daemon(daemon, Event::Message { conn, peer, message });
    }

    /// Something arrives at a daemon.
    pub(crate) fn tell_daemon(&mut self, number: usize, event: Event) {
        let daemon = &mut self.daemons[number];
        if daemon.stalled.is_some() {
            daemon.backlog.push(event);
        } else if daemon.is_alive {
            self.apply(number, event);
        }
    }

    /// Lets a daemon decide, and carries out what it wants over the network.
    fn apply(&mut self, number: usize, event: Event) {
        let daemon = &mut self.daemons[number];
        let mut now = daemon.clock(self.now);
        if let (Event::Tick, Some(wake)) = (&event, daemon.state.next_wake()) {
            now = now.max(wake);
        }
        let at = At {
            now,
            dice: self.rng.random(),
            id: self.rng.random(),
            secret: Secret::new(self.rng.random()),
        };
        let is_hostile = self.is_hostile;
        for effect in apply(at, &mut daemon.state, event) {
            match effect {
                Effect::Send { conn, message } => self.carry(number, conn, Arc::unwrap_or_clone(message)),
                Effect::Close { conn } => {
                    if let Some(stream) = self.streams.get_mut(&conn) {
                        assert!(!is_hostile, "a hostile message ends stream {conn:?}");
                        stream.is_ended = true;
                        self.send_down(conn, None);
                    }
                }
                Effect::Answer { call, result } => {
                    let is_asked = self.calls.contains_key(&call);
                    assert!(is_hostile != is_asked, "{call:?} was answered twice");
                    assert!(!is_hostile || result.is_err(), "the store obeys a hostile call");
                    if is_asked {
                        self.answer(call, result.as_ref().map(|v| &v[..]).map_err(Clone::clone));
                    }
                }
                Effect::Record(record) => {
                    assert!(!is_hostile, "a hostile message is written down as {record:?}");
                    if let Some(ledger) = &mut self.daemons[number].ledger {
                        ledger.insert(record.job().to_owned(), *record);
                    }
                }
                Effect::Observed(_) => {}
                Effect::Note { words, .. } => {
                    if self.loud {
                        println!("{:>9.3}      daemon {number}: {words}", self.now.as_secs_f64());
                    }
                }
            }
        }
    }

    /// A daemon sends a message.
    fn carry(&mut self, daemon: usize, conn: ConnId, message: DaemonMessage) {
        let Some(stream) = self.streams.get_mut(&conn) else {
            return;
        };
        assert!(
            !self.is_hostile,
            "a hostile message makes the daemon say {message:?}"
        );
        assert!(!stream.is_ended, "a message after the end of stream {conn:?}");
        if stream.is_dropped {
            return;
        }
        stream.unread += 1;
        let is_full = stream.unread > self.config.agent_queue;
        stream.is_dropped = is_full;
        let node = &self.nodes[stream.node];
        let job = &self.jobs[node.job].name;
        let first = self.daemons[daemon].first;
        self.witness.words(first, job).says(&node.incarnation, &message);
        if let (Some(Reply::JobOver(over)), false) = (&message.body, is_full) {
            let run_token = node.run_token();
            self.witness
                .verdict(daemon, &node.incarnation, &run_token, over.exit_code);
        }
        if is_full {
            self.note("slow reader that is disconnected");
        }
        self.send_down(conn, (!is_full).then_some(message));
    }

    /// Counts a fault.
    pub(crate) fn note(&mut self, fault: &'static str) {
        *self.faults.entry(fault).or_default() += 1;
    }

    pub(crate) fn happens(&mut self, probability: f64) -> bool {
        self.rng.random_bool(probability)
    }

    pub(crate) fn pause(&mut self, max_ms: u64) -> Duration {
        Duration::from_micros(self.rng.random_range(0..=max_ms * 1000))
    }

    pub(crate) fn later(&mut self, delay: Duration, event: SimEvent) {
        self.at(self.now + delay, event);
    }

    /// After a delay by the clock of a node.
    pub(crate) fn later_at(&mut self, number: usize, delay: Duration, event: NodeEvent) {
        let delay = scale(delay, MILLION, self.nodes[number].pace);
        self.later(delay, SimEvent::Node(number, event));
    }

    /// The time by the clock of a node.
    pub(crate) fn clock(&self, number: usize) -> Duration {
        scale(self.now, self.nodes[number].pace, MILLION)
    }

    /// The guardian of a node looks at its clock after this time.
    pub(crate) fn guard_later(&mut self, number: usize, delay: Duration) {
        let delay = scale(delay, MILLION, self.nodes[number].pace) + Duration::from_millis(1);
        self.later(delay, SimEvent::Guards(number));
    }

    /// After some time of at most so many milliseconds.
    pub(crate) fn soon(&mut self, number: usize, max_ms: u64, event: NodeEvent) {
        let delay = self.pause(max_ms);
        self.later(delay, SimEvent::Node(number, event));
    }

    fn at(&mut self, time: Duration, event: SimEvent) {
        self.ids += 1;
        self.agenda.insert((time, self.ids), event);
    }
}
