//! A node: the agent's real decisions and the real memory of its link, around processes that are numbers.
//!
//! What `launcher/src/agent/driver` and `daemon` do with processes, streams and timers is done here in the world's time.
//! Nothing is decided here.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use ddp_launcher::decisions::{
    Effect, Event, LEAVE_WAIT, Machine, Memory, SpawnEvent, TakeoverClock, VERDICT_WAIT,
};
use ddp_launcher::{Ending, ExitReason};
use ddp_proto::client::ATTEMPT_TIMEOUT;
use ddp_proto::exit;
use ddp_proto::ids::{Generation, LocalRank};
use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{Assignment, DaemonMessage, Heartbeat, Join, LostRank, NodeStopped, WorkerExit};
use ddp_run::rendezvous::ConnId;
use rand::Rng;

use crate::witness::{AssignmentId, Origin};
use crate::world::{SimEvent, World};

/// A deadline that is noticed so late passed while the process was stopped (`launcher/src/agent/daemon/link.rs`).
const OVERSLEPT: Duration = Duration::from_secs(1);

/// One agent process and its workers.
#[derive(Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "they are independent, as in the driver and the link"
)]
pub(crate) struct Node {
    pub(crate) incarnation: String,
    pub(crate) job: usize,
    pub(crate) host: usize,
    pub(crate) join: Join,
    pub(crate) machine: Machine,
    pub(crate) memory: Memory,
    pub(crate) takeover: TakeoverClock,
    /// The stream that it believes to have.
    pub(crate) conn: Option<ConnId>,
    /// It has had a stream.
    pub(crate) has_client: bool,
    /// A daemon has spoken to it.
    pub(crate) is_known: bool,
    /// Its stream broke, and no daemon has spoken since.
    pub(crate) is_broken: bool,
    /// It has said good-bye on its stream.
    pub(crate) is_leaving: bool,
    /// It has given up the daemon.
    pub(crate) link_ended: bool,
    /// When it gives up a daemon that is out of reach.
    pub(crate) gives_up: Duration,
    /// What is to be sent, while there is no stream.
    pub(crate) outbox: VecDeque<(Generation, Body)>,
    /// Number of the alarm that counts.
    pub(crate) alarm: Option<u64>,
    /// The workers of the current generation.
    pub(crate) group: Group,
    /// What its workers have written in the store.
    pub(crate) written: Vec<(String, Vec<u8>)>,
    /// How fast its clock runs, in millionths.
    pub(crate) pace: u64,
    /// It is stopped until then; what comes meanwhile waits, its link's messages too.
    pub(crate) stalled: Option<Duration>,
    pub(crate) backlog: Vec<NodeEvent>,
    /// When the last message that was received is read.
    pub(crate) read_at: Duration,
    pub(crate) life: Life,
    /// The signal with which a user has stopped it.
    pub(crate) stopped_by: Option<i32>,
    /// Exit code of the end of the job, as it was told.
    pub(crate) told: Option<i32>,
}

/// Whether an agent process lives.
#[derive(Debug, PartialEq)]
pub(crate) enum Life {
    Lives,
    Killed,
    Ended(ExitReason),
}

/// The workers of one generation on one node.
#[derive(Debug, Default)]
pub(crate) struct Group {
    pub(crate) assignment: Option<(Origin, Assignment)>,
    /// Nothing was started yet.
    preparing: bool,
    workers: BTreeMap<LocalRank, Worker>,
}

/// One worker process.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent of each other")]
struct Worker {
    /// Of a worker in one generation.
    id: u64,
    rank: u32,
    is_alive: bool,
    /// It has left its generation.
    is_parked: bool,
    ending: Option<Ending>,
    /// The last signal that the agent sent it.
    sent: Option<i32>,
    /// It has done all of its work.
    is_finished: bool,
    consequence: bool,
}

/// What happens to an agent process.
#[derive(Debug)]
pub(crate) enum NodeEvent {
    Connects,
    /// On this stream.
    Heartbeats(ConnId),
    Alarm(u64),
    GivesUp,
    /// Its link receives a message on this stream, or its end.
    Receives(ConnId, Option<DaemonMessage>),
    /// A message that its link has received; true: the first after a break.
    Reads(bool, DaemonMessage),
    Decides(Event),
    /// All is there that the workers of this generation need.
    Prepared(Generation),
    /// Its pings on this stream are not answered.
    Pings(ConnId),
    /// Other nodes may soon take its place, if the daemon has stayed silent.
    Replaceable,
}

impl Node {
    pub(crate) fn is_gone(&self) -> bool {
        self.life != Life::Lives
    }

    /// Which run it is in; empty before its first assignment.
    pub(crate) fn run_token(&self) -> String {
        let assignment = self.group.assignment.as_ref();
        assignment.map_or_else(String::new, |(origin, _)| origin.run_token.clone())
    }

    pub(crate) fn has_live_workers(&self) -> bool {
        self.group.workers.values().any(|worker| worker.is_alive)
    }

    /// Workers that the agent is to leave alone until its next assignment.
    fn parked(&self) -> Vec<LocalRank> {
        let workers = self.group.workers.iter();
        let is_parked = |rank: &LocalRank| self.machine.is_parked(*rank);
        workers
            .filter(|(rank, worker)| worker.is_alive && is_parked(rank))
            .map(|(rank, _)| *rank)
            .collect()
    }

    /// Workers that live, and are not parked.
    fn has_workers_at_large(&self) -> bool {
        let live = self.group.workers.values().filter(|worker| worker.is_alive);
        live.count() > self.parked().len()
    }

    /// All of its workers have done their work.
    fn is_finishing(&self) -> bool {
        let workers = &self.group.workers;
        !workers.is_empty() && workers.values().all(|worker| worker.is_finished)
    }

    /// How its workers ended that did not end with 0.
    fn ends(&self) -> NodeStopped {
        let bad = |worker: &&Worker| worker.ending.is_some_and(|ending| !ending.is_success());
        let exits = self.group.workers.values().filter(bad);
        NodeStopped {
            exits: exits.map(Worker::exit).collect(),
            ..NodeStopped::default()
        }
    }
}

impl Group {
    /// Its workers were started.
    pub(crate) fn has_begun(&self) -> bool {
        !self.workers.is_empty()
    }
}

impl Worker {
    fn exit(&self) -> WorkerExit {
        let (exit_code, signal) = match self.ending {
            Some(Ending::Code(code)) => (Some(code), None),
            Some(Ending::Signal { signal, .. }) => (None, Some(signal)),
            None => (None, None),
        };
        WorkerExit {
            rank: self.rank,
            exit_code,
            signal,
            consequence: self.consequence,
            stopped_with: self.sent,
            ..WorkerExit::default()
        }
    }
}

impl World {
    /// Something happens to an agent that runs.
    pub(crate) fn on_node(&mut self, number: usize, event: NodeEvent) {
        let node = &mut self.nodes[number];
        if node.is_gone() {
            return;
        }
        if node.stalled.is_some() {
            return node.backlog.push(event);
        }
        self.check_takeover(number);
        let node = &mut self.nodes[number];
        match event {
            NodeEvent::Connects => self.connect(number),
            NodeEvent::Heartbeats(conn) => {
                if node.conn == Some(conn) && !node.is_leaving {
                    if !node.is_broken && node.has_client {
                        self.beat(number, Heartbeat::default());
                    }
                    let interval = self.config.heartbeat_interval();
                    self.later_at(number, interval, NodeEvent::Heartbeats(conn));
                }
            }
            NodeEvent::Alarm(alarm) if node.alarm == Some(alarm) => {
                // As the driver does: who cannot be reached decides nothing.
                if node.is_broken && node.machine.is_undecided() {
                    return self.arm(number, VERDICT_WAIT);
                }
                node.alarm = None;
                self.decide(number, Event::Alarm);
            }
            NodeEvent::Alarm(_) | NodeEvent::Replaceable => {}
            NodeEvent::GivesUp => self.give_up_daemon(number),
            NodeEvent::Receives(conn, message) => self.receive(number, conn, message),
            NodeEvent::Reads(restored, message) => self.read(number, restored, message),
            NodeEvent::Decides(event) => self.decide(number, event),
            NodeEvent::Prepared(generation) => self.spawn(number, generation),
            NodeEvent::Pings(conn) => {
                if node.conn == Some(conn) {
                    self.lose_stream(number);
                }
            }
        }
    }

    /// The agent reads a message that its link has received.
    fn read(&mut self, number: usize, restored: bool, message: DaemonMessage) {
        let node = &mut self.nodes[number];
        if restored {
            if node.machine.is_undecided() {
                self.arm(number, VERDICT_WAIT);
            }
            self.write_again(number);
        }
        let node = &mut self.nodes[number];
        let run_token = node.run_token();
        node.takeover.receive(&message);
        self.watch_takeover(number);
        let node = &mut self.nodes[number];
        match &message.body {
            Some(Reply::JobOver(over)) => {
                // Another daemon may have another verdict; the first one stands.
                node.told.get_or_insert(over.exit_code);
            }
            Some(Reply::GenerationOver(over)) if message.generation == node.machine.generation().0 => {
                self.witness
                    .over(&node.incarnation, &run_token, message.generation, over);
            }
            _ => {}
        }
        self.decide(number, Event::Daemon(message));
    }

    /// Sends a heartbeat.
    fn beat(&mut self, number: usize, heartbeat: Heartbeat) {
        let sent_ms = self.clock(number).as_millis() as u64;
        let generation = self.nodes[number].machine.generation();
        self.report(
            number,
            generation,
            Body::Heartbeat(Heartbeat { sent_ms, ..heartbeat }),
        );
    }

    /// As the driver and the guardian do: sets when the workers stop if the daemon stays silent.
    fn watch_takeover(&mut self, number: usize) {
        let (clock, takeover) = (self.clock(number), self.nodes[number].takeover);
        for at in [takeover.stops_at(), takeover.ends_at()].into_iter().flatten() {
            self.later_at(number, at.saturating_sub(clock), NodeEvent::Replaceable);
        }
        if let Some(at) = takeover.ends_at() {
            self.guard_later(number, at.saturating_sub(clock));
        }
    }

    /// As the driver does before each event.
    fn check_takeover(&mut self, number: usize) {
        let clock = self.clock(number);
        let node = &self.nodes[number];
        let left = |at: Option<Duration>| at.map(|at| at.saturating_sub(clock));
        let (Some(stop_in), Some(end_in)) = (left(node.takeover.stops_at()), left(node.takeover.ends_at()))
        else {
            return;
        };
        let is_due = end_in.is_zero() || stop_in.is_zero() && node.machine.is_running();
        if node.machine.has_workers() && is_due {
            self.decide(number, Event::Replaceable { end_in });
        }
    }

    /// The guardian kills the workers of an agent that may be stopped itself.
    pub(crate) fn guard(&mut self, number: usize) {
        let is_over = self.nodes[number].takeover.ends_at() <= Some(self.clock(number));
        // The agent watches no other ones.
        let is_over = is_over && self.nodes[number].machine.has_workers();
        for id in self.live_workers(number) {
            if is_over {
                self.note("workers that the guardian killed");
                self.worker_ends(number, id, killed(9), false);
            }
        }
    }

    /// Lets the agent decide, and carries out what it wants.
    pub(crate) fn decide(&mut self, number: usize, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            if self.loud {
                println!("{:>9.3}  node {number}: {event:?}", self.now.as_secs_f64());
            }
            let node = &mut self.nodes[number];
            let listens = self.jobs[node.job].listens && node.has_workers_at_large();
            node.machine.set_listening(listens);
            let finishing = self.jobs[node.job].native && node.is_finishing();
            node.machine.set_finishing(finishing);
            for effect in self.nodes[number].machine.on(event) {
                self.carry_out(number, effect, &mut events);
            }
        }
    }

    pub(crate) fn carry_out(&mut self, number: usize, effect: Effect, events: &mut VecDeque<Event>) {
        let node = &mut self.nodes[number];
        let generation = node.machine.generation();
        match effect {
            Effect::Join => {
                let clock = self.clock(number);
                let node = &mut self.nodes[number];
                node.takeover.join(clock);
                let mut join = node.join.clone();
                join.run_token = node.run_token();
                self.report(number, generation, Body::Join(join));
            }
            Effect::Report(body) => self.report(number, generation, body),
            Effect::ReportEnds => {
                let ends = node.ends();
                self.report(number, generation, Body::NodeStopped(ends));
            }
            Effect::Spawn(assignment) => self.prepare(number, generation, assignment),
            Effect::CancelSpawn => {
                if std::mem::take(&mut node.group.preparing) {
                    let failure = None;
                    let ended = SpawnEvent::Ended { generation, failure };
                    events.push_back(Event::Spawn(ended));
                }
            }
            Effect::Arm(after) => self.arm(number, after),
            Effect::Disarm => node.alarm = None,
            Effect::Say(words) => {
                if self.loud {
                    println!("{:>9.3}      {words}", self.now.as_secs_f64());
                }
            }
            Effect::Leave(leave) => {
                if !node.has_client || node.link_ended || (node.conn.is_none() && node.memory.is_refused()) {
                    return events.push_back(Event::Left);
                }
                self.report(number, generation, Body::Leave(leave));
                self.arm(number, LEAVE_WAIT);
            }
            Effect::Finish(exit_reason) => self.finish(number, exit_reason),
            of_workers => self.carry_out_on_workers(number, of_workers),
        }
    }

    fn carry_out_on_workers(&mut self, number: usize, effect: Effect) {
        let node = &mut self.nodes[number];
        let generation = node.machine.generation();
        match effect {
            Effect::Notify(_) => self.notify(number, Ending::Code(1)),
            Effect::AskToStop(_) => self.notify(number, Ending::Code(0)),
            Effect::SignalAll(signal) => self.signal(number, None, signal),
            Effect::SignalUnasked(signal) => {
                if !self.jobs[node.job].listens {
                    self.signal(number, None, signal);
                }
            }
            Effect::SignalLate(local_rank, signal) => self.signal(number, Some(local_rank), signal),
            Effect::KillStray(_) => panic!("node {number} has started workers of a generation that is over"),
            Effect::DrainControl(local_rank) => {
                let worker = node.group.workers.get(&local_rank);
                let drained = Event::ControlDrained {
                    generation,
                    local_rank,
                    consequence: worker.is_some_and(|worker| worker.consequence),
                };
                self.soon(number, 50, NodeEvent::Decides(drained));
            }
            Effect::Describe(local_rank) => {
                if let Some(worker) = node.group.workers.get(&local_rank) {
                    let described = Event::Described(worker.exit());
                    self.soon(number, 50, NodeEvent::Decides(described));
                }
            }
            Effect::Sweep => {
                assert!(!node.has_workers_at_large(), "swept, but a worker lives");
                let swept = Event::Swept { stuck: vec![] };
                self.soon(number, 30, NodeEvent::Decides(swept));
            }
            other => unreachable!("{other:?} is none of workers"),
        }
    }

    fn finish(&mut self, number: usize, exit_reason: ExitReason) {
        let node = &mut self.nodes[number];
        assert!(
            !node.has_live_workers(),
            "node {number} ended before its workers: {node:?}"
        );
        node.life = Life::Ended(exit_reason);
        if let Some(conn) = node.conn.take()
            && !node.is_leaving
        {
            self.send_up(conn, |conn| SimEvent::Ends(conn, false));
        }
    }

    /// The daemon is given up if it has not spoken since the stream broke.
    fn give_up_daemon(&mut self, number: usize) {
        let node = &mut self.nodes[number];
        if self.now < node.gives_up || (node.is_known && !node.is_broken) || node.memory.is_refused() {
            return;
        }
        // As the link does: who was stopped when the time was over has not read yet what came meanwhile.
        if self.now > node.gives_up + OVERSLEPT {
            node.gives_up = self.now + ATTEMPT_TIMEOUT;
            return self.later(ATTEMPT_TIMEOUT, SimEvent::Node(number, NodeEvent::GivesUp));
        }
        node.link_ended = true;
        // The agent reads it after all that the link has received.
        let reads_in = node.read_at.saturating_sub(self.now);
        if let Some(conn) = node.conn.take() {
            self.send_up(conn, |conn| SimEvent::Ends(conn, false));
        }
        let gone = Event::DaemonGone {
            exit_code: exit::DAEMON_UNREACHABLE,
            error: "the daemon is unreachable".into(),
        };
        self.later(reads_in, SimEvent::Node(number, NodeEvent::Decides(gone)));
    }

    fn arm(&mut self, number: usize, after: Duration) {
        self.ids += 1;
        let alarm = self.ids;
        self.nodes[number].alarm = Some(alarm);
        self.later_at(number, after, NodeEvent::Alarm(alarm));
    }

    /// What the workers need is being made.
    fn prepare(&mut self, number: usize, generation: Generation, assignment: Assignment) {
        let node = &mut self.nodes[number];
        assert!(
            !node.has_workers_at_large(),
            "node {number} starts workers beside others"
        );
        let job = &self.jobs[node.job].name;
        let origin = Origin {
            job: job.clone(),
            run_token: assignment.run_token.clone(),
            generation: generation.0,
            id: AssignmentId::of(&assignment),
        };
        node.written.clear();
        let parked = node.parked();
        let mut workers = std::mem::take(&mut node.group.workers);
        workers.retain(|local_rank, _| parked.contains(local_rank));
        node.group = Group {
            assignment: Some((origin, assignment)),
            preparing: true,
            workers,
        };
        self.soon(number, 300, NodeEvent::Prepared(generation));
    }

    fn spawn(&mut self, number: usize, generation: Generation) {
        let node = &mut self.nodes[number];
        if generation != node.machine.generation() || !std::mem::take(&mut node.group.preparing) {
            return;
        }
        let Some((origin, assignment)) = node.group.assignment.clone() else {
            return;
        };
        let fails = self.rng.random_bool(self.failing);
        let end = self.rng.random_range(self.work_ms.clone());
        let own = assignment.own.clone().unwrap_or_default();
        let culprit = self.rng.random_range(0..own.workers);
        for local_rank in 0..own.workers {
            self.ids += 1;
            let worker = self.ids;
            let rank = own.first_rank + local_rank;
            let parked = self.nodes[number].group.workers.get(&LocalRank(local_rank));
            let parked = parked.map(|parked| parked.is_alive);
            if parked == Some(false) {
                // It has died since, which the agent does not know yet.
                self.spawned(number, generation, local_rank);
                continue;
            }
            if parked == Some(true) {
                self.note("worker that outlives a generation");
            }
            self.witness.born(worker, &origin, rank, &assignment);
            // Some failures only follow from another rank's, real or not.
            let by_code = number.is_multiple_of(2);
            let begun = Worker {
                id: worker,
                rank,
                is_alive: true,
                is_parked: false,
                ending: None,
                sent: None,
                is_finished: false,
                consequence: fails && by_code && number.is_multiple_of(3),
            };
            self.nodes[number]
                .group
                .workers
                .insert(LocalRank(local_rank), begun);
            self.spawned(number, generation, local_rank);
            let ending = match (fails && local_rank == culprit, by_code) {
                (false, _) => Ending::Code(0),
                (true, true) => Ending::Code(10 + number as i32 % 100),
                (true, false) => killed(9),
            };
            let delay = Duration::from_millis(end) + self.pause(500);
            // The others of a group that fails work until they are stopped.
            if !fails || local_rank == culprit {
                self.later(delay, SimEvent::WorkerEnds(number, worker, ending, true));
            }
        }
        let failure = None;
        self.decide(number, Event::Spawn(SpawnEvent::Ended { generation, failure }));
        self.use_store(number);
    }

    fn spawned(&mut self, number: usize, generation: Generation, local_rank: u32) {
        let spawned = SpawnEvent::Spawned {
            generation,
            local_rank: LocalRank(local_rank),
            pid: 1000 + self.ids as i32,
        };
        self.decide(number, Event::Spawn(spawned));
    }

    /// A worker leaves its generation, which its launcher has told it to be over.
    pub(crate) fn worker_parks(&mut self, number: usize, id: u64) {
        let node = &mut self.nodes[number];
        let mut workers = node.group.workers.iter_mut();
        let Some((local_rank, worker)) = workers.find(|(_, worker)| worker.id == id) else {
            return;
        };
        if !worker.is_alive || worker.is_parked {
            return;
        }
        worker.is_parked = true;
        if let Some((origin, _)) = &node.group.assignment {
            self.witness.died(id, origin, worker.rank);
        }
        let parked = Event::Parked(*local_rank);
        self.on_node(number, NodeEvent::Decides(parked));
    }

    /// A process ends, whether its agent can notice it or not.
    pub(crate) fn worker_ends(&mut self, number: usize, id: u64, ending: Ending, is_finished: bool) {
        let node = &mut self.nodes[number];
        let mut workers = node.group.workers.iter_mut();
        let Some((local_rank, worker)) = workers.find(|(_, worker)| worker.id == id) else {
            return;
        };
        // One that is parked does not work any more.
        if worker.is_parked && is_finished || !std::mem::take(&mut worker.is_alive) {
            return;
        }
        worker.ending = Some(ending);
        worker.is_finished = is_finished && ending.is_success();
        if let Some((origin, _)) = node.group.assignment.as_ref().filter(|_| !worker.is_parked) {
            self.witness.died(id, origin, worker.rank);
        }
        let exited = Event::Exited {
            local_rank: *local_rank,
            ending,
        };
        self.on_node(number, NodeEvent::Decides(exited));
    }

    /// Workers that listen on the control socket are told to end; most do, or park where a generation is over.
    fn notify(&mut self, number: usize, ending: Ending) {
        let job = &self.jobs[self.nodes[number].job];
        if !job.listens {
            return;
        }
        let may_stay = !ending.is_success() || self.nodes[number].machine.is_to_rejoin();
        let outlives = job.outlives && may_stay;
        for id in self.live_workers(number) {
            if self.rng.random_bool(0.8) {
                let delay = self.pause(3000);
                let parks = outlives && !id.is_multiple_of(5);
                self.later(
                    delay,
                    if parks {
                        SimEvent::WorkerParks(number, id)
                    } else {
                        SimEvent::WorkerEnds(number, id, ending, false)
                    },
                );
            }
        }
    }

    fn signal(&mut self, number: usize, only: Option<LocalRank>, signal: i32) {
        let parked = self.nodes[number].parked();
        let workers = self.nodes[number].group.workers.iter_mut();
        let mut ids = Vec::new();
        for (local_rank, worker) in workers.filter(|(local_rank, _)| !parked.contains(local_rank)) {
            if worker.is_alive && only.is_none_or(|only| only == *local_rank) {
                worker.sent = Some(signal);
                ids.push(worker.id);
            }
        }
        for id in ids {
            let obeys = signal == 9 || self.rng.random_bool(0.8);
            if obeys {
                let delay = self.pause(if signal == 9 { 10 } else { 5000 });
                self.later(delay, SimEvent::WorkerEnds(number, id, killed(signal), false));
            }
        }
    }

    /// The agent dies without notice: its guardian kills the workers.
    pub(crate) fn kill_agent(&mut self, number: usize) {
        self.nodes[number].life = Life::Killed;
        if let Some(conn) = self.nodes[number].conn.take() {
            self.send_up(conn, |conn| SimEvent::Ends(conn, false));
        }
        let rank = self.nodes[number]
            .group
            .workers
            .values()
            .find(|worker| worker.is_alive && !worker.is_parked);
        let rank = rank.map(|worker| worker.rank);
        let delay = self.pause(300);
        for id in self.live_workers(number) {
            self.later(delay, SimEvent::WorkerEnds(number, id, killed(9), false));
        }
        // The guardian may be killed too.
        if self.happens(0.7) {
            self.note("guardian that speaks of a killed agent");
            self.later(delay, SimEvent::GuardianEnds(number));
        }
        if let Some(rank) = rank
            && self.happens(0.5)
        {
            self.later(delay, SimEvent::PeersFail(number, rank));
        }
    }

    /// Data connections break with the workers of a node: one of each peer fails of that, and says to which rank.
    pub(crate) fn peers_fail(&mut self, dead: usize, lost_rank: u32) {
        let group = &self.nodes[dead].group;
        let origin = group.assignment.as_ref().map(|(origin, _)| origin.clone());
        for number in (0..self.nodes.len()).filter(|number| *number != dead) {
            let group = &mut self.nodes[number].group;
            let is_peer = group.assignment.as_ref().map(|(origin, _)| origin) == origin.as_ref();
            let is_at_work = |worker: &&mut Worker| is_peer && worker.is_alive && !worker.is_parked;
            if let Some(worker) = group.workers.values_mut().find(is_at_work) {
                worker.consequence = true;
                let (id, witness) = (worker.id, worker.rank);
                self.note("peer that sees a node die");
                self.tell_lost(
                    number,
                    LostRank {
                        rank: lost_rank,
                        witness,
                    },
                );
                let delay = self.pause(1000);
                self.later(delay, SimEvent::WorkerEnds(number, id, Ending::Code(1), false));
            }
        }
    }

    /// The agent passes on at once what a worker saw.
    fn tell_lost(&mut self, number: usize, lost_rank: LostRank) {
        let node = &self.nodes[number];
        if !node.is_gone() && node.stalled.is_none() && !node.is_leaving {
            let heartbeat = Heartbeat {
                lost_rank: Some(lost_rank),
                ..Heartbeat::default()
            };
            self.beat(number, heartbeat);
        }
    }

    fn live_workers(&self, number: usize) -> Vec<u64> {
        let workers = self.nodes[number].group.workers.values();
        workers
            .filter(|worker| worker.is_alive)
            .map(|worker| worker.id)
            .collect()
    }
}

fn killed(signal: i32) -> Ending {
    Ending::Signal {
        signal,
        core_dumped: false,
    }
}
