//! One world: hosts with agents, a network, a daemon, and a clock that jumps from event to event.

mod network;
mod trouble;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use ddp_proto::rendezvous::{AgentMessage, DaemonMessage, Join, KvGetRequest, WorkerExit};
use ddp_run::rendezvous::{At, CallId, Config, ConnId, Effect, Event, Peer, Record, State, apply};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::agent::{Agent, AgentAction, Life};
use crate::invariants::Witness;

use network::Stream;

const JOB: &str = "sim";
const MAX_RESTARTS: u32 = 3;
/// After this the world makes no more trouble.
const TROUBLE: Duration = Duration::from_mins(1);
/// By then every world has come to rest: trouble, leases, back-off, join time-out and linger are shorter together.
const END: Duration = Duration::from_mins(15);
/// More than any world needs; a world that does not come to rest hits it.
const MAX_EVENTS: usize = 400_000;

/// What happens next, to whom. Agents are numbered in order of their birth.
#[derive(Debug)]
enum SimEvent {
    /// A message of an agent arrives at the daemon.
    Arrives(ConnId, AgentMessage),
    /// The daemon learns that a stream is gone.
    Ends(ConnId, bool),
    /// A message of the daemon, or the end of the stream, arrives at an agent.
    Delivers(ConnId, Option<DaemonMessage>),
    Connects(usize),
    Heartbeats(usize, ConnId),
    WorkersEnd(usize, u64),
    WorkersGone(usize, u64),
    /// The workers of an agent are gone that was stopped by this signal.
    Leaves(usize, i32),
    /// An agent has waited long enough for the last word.
    Listened(usize),
    /// A new process on a host.
    Starts(usize),
    /// Some trouble.
    Trouble,
    /// The daemon dies as soon as every node is well.
    Crashes,
}

/// How a world ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// Exit code of the job's nodes; none if every agent was killed.
    pub(crate) exit_code: Option<i32>,
    pub(crate) generations: u64,
    pub(crate) reconnects: u64,
    pub(crate) deaths: u64,
    /// Daemons that died.
    pub(crate) crashes: u64,
}

/// Everything there is.
pub(crate) struct World {
    rng: StdRng,
    config: Config,
    state: State,
    now: Duration,
    /// By time and order of creation.
    agenda: BTreeMap<(Duration, u64), SimEvent>,
    agents: Vec<Agent>,
    streams: BTreeMap<ConnId, Stream>,
    calls: BTreeMap<CallId, Duration>,
    witness: Witness,
    /// What the daemon's ledger has of the job, in worlds where it has one: it is not lost with the daemon.
    ledger: Option<Vec<Record>>,
    /// How likely workers fail and how often the network breaks, in this world.
    failing: f64,
    troubles: u32,
    min_nodes: u32,
    max_nodes: u32,
    /// Every node asks for a rank of its own.
    ranks_asked: bool,
    /// Longest time until an agent comes back that has lost its stream.
    away_ms: u64,
    /// No node has come to this daemon yet.
    fresh: bool,
    ids: u64,
    outcome: Outcome,
    loud: bool,
}

impl World {
    pub(crate) fn new(seed: u64, loud: bool) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let hosts = match rng.random_range(0..4) {
            0 => 1,
            1 => rng.random_range(2..=4),
            2 => rng.random_range(5..=16),
            _ => rng.random_range(17..=64),
        };
        let min_nodes = if rng.random_bool(0.5) {
            hosts
        } else {
            rng.random_range(1..=hosts)
        };
        let max_nodes = hosts.max(min_nodes);
        let mut world = Self {
            config: Config::default(),
            state: State::new(Config::default()),
            now: Duration::ZERO,
            agenda: BTreeMap::new(),
            agents: Vec::new(),
            streams: BTreeMap::new(),
            calls: BTreeMap::new(),
            witness: Witness::default(),
            ledger: rng.random_bool(0.5).then(Vec::new),
            failing: [0.0, 0.2, 0.8][rng.random_range(0..3)] / f64::from(hosts).sqrt(),
            troubles: rng.random_range(0..12),
            min_nodes,
            max_nodes,
            ranks_asked: rng.random_bool(0.2),
            away_ms: 8000,
            fresh: true,
            ids: 0,
            outcome: Outcome {
                exit_code: None,
                generations: 0,
                reconnects: 0,
                deaths: 0,
                crashes: 0,
            },
            loud,
            rng,
        };
        for host in 0..hosts as usize {
            let delay = world.pause(3000);
            world.later(delay, SimEvent::Starts(host));
        }
        for _ in 0..world.troubles {
            let delay = world.pause(TROUBLE.as_millis() as u64);
            world.later(delay, SimEvent::Trouble);
        }
        world
    }

    /// One in which nothing goes wrong but that the daemon dies, up to three times.
    pub(crate) fn healthy(seed: u64, loud: bool) -> Self {
        let mut world = Self::new(seed, loud);
        world
            .agenda
            .retain(|_, event| matches!(event, SimEvent::Starts(_)));
        world.failing = 0.0;
        world.min_nodes = world.max_nodes;
        // Soon enough that all are back within a lease of the first.
        world.away_ms = 5000;
        for _ in 0..3 {
            let delay = world.pause(15_000);
            world.later(delay, SimEvent::Crashes);
        }
        world
    }

    /// Runs until nothing is left to happen.
    pub(crate) fn run(mut self) -> Outcome {
        for _ in 0..MAX_EVENTS {
            let wake = self.state.next_wake().unwrap_or(Duration::MAX);
            let next = self
                .agenda
                .first_key_value()
                .map_or(Duration::MAX, |((time, _), _)| *time);
            if wake.min(next) > END {
                return self.rest();
            }
            if wake < next {
                self.now = wake.max(self.now);
                self.apply(Event::Tick);
                let again = self.state.next_wake();
                assert!(
                    again.is_none_or(|again| again > self.now),
                    "the timer spins at {:?}",
                    self.now
                );
            } else if let Some(((time, _), event)) = self.agenda.pop_first() {
                self.now = time;
                self.happen(event);
            }
        }
        panic!(
            "the world does not come to rest; status: {:#?}",
            self.state.status(self.now, JOB)
        );
    }

    /// Nothing more happens: every agent must have ended, and every call must have been answered.
    fn rest(mut self) -> Outcome {
        for agent in &self.agents {
            assert_eq!(
                agent.life,
                Life::Gone,
                "`{}` is stuck: {agent:?}",
                agent.incarnation
            );
        }
        assert!(self.calls.is_empty(), "calls without an answer: {:?}", self.calls);
        assert!(
            self.state.is_idle(),
            "status: {:#?}",
            self.state.status(self.now, JOB)
        );
        for agent in &self.agents {
            let (code, verdict) = (agent.exit_code, self.witness.verdict(&agent.incarnation));
            // A node that comes when the job is over, or that no other node joins in time, ends with 75; one that asks
            // for a rank while a dead process still seems to hold it, with 2; one that comes to a job of one node while
            // a dead process still seems to be that node, with 76.
            let twin = (self.ranks_asked && code == Some(2)) || (self.max_nodes == 1 && code == Some(76));
            assert!(
                code.is_none() || code == verdict || code == Some(75) || twin,
                "{agent:?}, but {verdict:?}"
            );
            self.outcome.exit_code = self.outcome.exit_code.or(verdict).or(code);
        }
        self.outcome.generations = self.witness.generations();
        self.outcome
    }

    fn happen(&mut self, event: SimEvent) {
        if self.loud {
            println!("{:>9.3}  {event:?}", self.now.as_secs_f64());
        }
        match event {
            SimEvent::Arrives(conn, message) => {
                let agent = self.streams[&conn].agent;
                let remote = IpAddr::from([10, 0, 0, self.agents[agent].host as u8]);
                let peer = Peer {
                    remote,
                    local: IpAddr::from([10, 0, 1, 0]),
                };
                let message = Box::new(message);
                self.apply(Event::Message { conn, peer, message });
            }
            SimEvent::Ends(conn, clean) => self.apply(Event::Closed { conn, clean }),
            SimEvent::Delivers(conn, message) => self.deliver(conn, message),
            SimEvent::Connects(agent) => self.connect(agent),
            SimEvent::Heartbeats(agent, conn) => {
                if self.agents[agent].conn == Some(conn) {
                    self.send(agent, Agent::heartbeat());
                    self.later(
                        self.config.heartbeat_interval(),
                        SimEvent::Heartbeats(agent, conn),
                    );
                }
            }
            SimEvent::WorkersEnd(agent, generation) => self.workers_end(agent, generation),
            SimEvent::WorkersGone(agent, generation) => {
                let it = &mut self.agents[agent];
                if it.life == Life::Stopping && it.generation == generation {
                    let actions = it.stopped();
                    self.grant(agent, actions);
                }
            }
            SimEvent::Leaves(agent, signal) => {
                if self.agents[agent].life == Life::Leaving {
                    self.exit(agent, Some(signal));
                }
            }
            SimEvent::Listened(agent) => {
                let actions = self.agents[agent].last_word();
                self.grant(agent, actions);
            }
            SimEvent::Starts(host) => self.start(host),
            SimEvent::Trouble => self.trouble(),
            SimEvent::Crashes if self.is_well() => self.crash_daemon(),
            // Before all have started, or when the first has left.
            SimEvent::Crashes => {
                if self.agents.iter().all(|agent| agent.life != Life::Gone) {
                    self.later(Duration::from_millis(50), SimEvent::Crashes);
                }
            }
        }
    }

    /// Lets the daemon decide, and carries out what it wants over the network.
    fn apply(&mut self, event: Event) {
        let at = At {
            now: self.now,
            dice: self.rng.random(),
            id: self.rng.random(),
        };
        for effect in apply(at, &mut self.state, event) {
            match effect {
                Effect::Send { conn, message } => {
                    let Some(stream) = self.streams.get(&conn) else {
                        continue;
                    };
                    assert!(!stream.ended, "a message after the end of stream {conn:?}");
                    let agent = stream.agent;
                    self.witness.receive(&self.agents[agent].incarnation, &message);
                    self.send_down(conn, Some(message));
                }
                Effect::Close { conn } => {
                    self.send_down(conn, None);
                    if let Some(stream) = self.streams.get_mut(&conn) {
                        stream.ended = true;
                    }
                }
                Effect::Answer { call, .. } => {
                    assert!(self.calls.remove(&call).is_some(), "{call:?} was answered twice");
                }
                Effect::Record(record) => {
                    if let Some(ledger) = &mut self.ledger {
                        *ledger = vec![*record];
                    }
                }
                Effect::Note { words, .. } => {
                    if self.loud {
                        println!("{:>9.3}      {words}", self.now.as_secs_f64());
                    }
                }
            }
        }
        match (self.state.is_idle(), self.fresh) {
            (true, false) => self.witness.idle(),
            (true, true) => {}
            (false, _) => self.fresh = false,
        }
        for (call, deadline) in &self.calls {
            assert!(self.now <= *deadline, "{call:?} is past its deadline");
        }
    }

    fn start(&mut self, host: usize) {
        let number = self.agents.len();
        let join = Join {
            protocol: 1,
            hostname: format!("n{host}"),
            node_rank: self.ranks_asked.then_some(host as u32),
            min_nodes: self.min_nodes,
            max_nodes: self.max_nodes,
            workers: 1 + host as u32 % 3,
            max_restarts: MAX_RESTARTS,
            local_addr: String::new(),
            master_port: 29_500,
            job_signature: "s".into(),
            job_description: String::new(),
            join_timeout_ms: 120_000,
            run_token: String::new(),
            role: String::new(),
            last_call_ms: 0,
            ..Join::default()
        };
        self.agents.push(Agent {
            incarnation: format!("n{host}#{number}"),
            host,
            join,
            conn: None,
            generation: 0,
            life: Life::Joining,
            report: None,
            place: None,
            latest_generation: 0,
            exit_code: None,
        });
        self.connect(number);
    }

    fn grant(&mut self, number: usize, actions: Vec<AgentAction>) {
        let generation = self.agents[number].generation;
        for action in actions {
            match action {
                AgentAction::Send(body) => self.send(number, body),
                AgentAction::RunWorkers => {
                    let delay = self.pause(20_000);
                    self.later(delay, SimEvent::WorkersEnd(number, generation));
                    self.read(number);
                }
                AgentAction::StopWorkers => {
                    let delay = self.pause(5000);
                    self.later(delay, SimEvent::WorkersGone(number, generation));
                }
                AgentAction::Listen(bound) => self.later(bound, SimEvent::Listened(number)),
                AgentAction::Exit(code) => {
                    self.agents[number].exit_code = Some(code);
                    self.exit(number, None);
                }
            }
        }
    }

    /// A worker waits for a key that no rank writes: the call must end with the generation or at its deadline.
    fn read(&mut self, number: usize) {
        self.ids += 1;
        let call = CallId(self.ids);
        let timeout_ms = self.rng.random_range(0..30_000);
        self.calls
            .insert(call, self.now + Duration::from_millis(timeout_ms.into()));
        let request = KvGetRequest {
            job_id: JOB.into(),
            generation: self.agents[number].generation,
            key: "k".into(),
            timeout_ms,
            assignment_id: self.agents[number].assignment_id(),
        };
        self.apply(Event::KvGet { call, request });
    }

    fn workers_end(&mut self, number: usize, generation: u64) {
        let fails = self.rng.random_bool(self.failing);
        let agent = &mut self.agents[number];
        let Life::Running(assignment) = &agent.life else {
            return;
        };
        if agent.generation != generation {
            return;
        }
        let rank = assignment.nodes[assignment.node_rank as usize].first_rank;
        let actions = if fails {
            let signal = number.is_multiple_of(2).then_some(9);
            let exit_code = signal.is_none().then_some(10 + number as i32 % 100);
            // Some of them only follow from another rank's failure, real or not.
            let consequence = exit_code.is_some() && number.is_multiple_of(3);
            agent.worker_failed(WorkerExit {
                rank,
                signal,
                exit_code,
                consequence,
                ..WorkerExit::default()
            })
        } else {
            agent.workers_succeeded()
        };
        self.grant(number, actions);
    }

    /// The agent says good-bye, ends its stream in order, and is gone.
    fn exit(&mut self, number: usize, signal: Option<i32>) {
        self.send(number, Agent::farewell(signal));
        if let Some(conn) = self.agents[number].conn.take() {
            self.send_up(conn, |conn| SimEvent::Ends(conn, true));
        }
        self.agents[number].life = Life::Gone;
    }

    fn pause(&mut self, max_ms: u64) -> Duration {
        Duration::from_micros(self.rng.random_range(0..=max_ms * 1000))
    }

    fn later(&mut self, delay: Duration, event: SimEvent) {
        self.at(self.now + delay, event);
    }

    fn at(&mut self, time: Duration, event: SimEvent) {
        self.ids += 1;
        self.agenda.insert((time, self.ids), event);
    }
}
