//! How a world begins: its jobs, its hosts, and how much goes wrong in it.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use ddp_launcher::decisions::{Machine, Memory, Rules, TakeoverClock};
use ddp_proto::rendezvous::Join;
use ddp_run::rendezvous::{Config, State};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::time::Instant;

use super::{Cut, Daemon, MILLION, SimEvent, World};
use crate::node::{Group, Life, Node, NodeEvent};
use crate::witness::Witness;

/// After this the world makes no more trouble.
const TROUBLE: Duration = Duration::from_mins(1);
const MAX_RESTARTS: u32 = 3;

/// One job.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent of each other")]
pub(crate) struct JobPlan {
    pub(crate) name: String,
    pub(crate) min_nodes: u32,
    pub(crate) max_nodes: u32,
    /// Its workers are `ddp-train`'s.
    pub(crate) native: bool,
    /// Its workers listen on the control socket.
    pub(crate) listens: bool,
    /// They can go on in another generation.
    pub(crate) outlives: bool,
    /// Every node asks for a rank of its own.
    pub(crate) ranks_asked: bool,
    /// How long its agents wait for a daemon that is out of reach.
    patience: Duration,
    /// Its hosts, spares included.
    hosts: std::ops::Range<usize>,
}

impl World {
    /// One in which anything may go wrong.
    pub(crate) fn new(seed: u64, loud: bool) -> Self {
        let mut world = Self::quiet(seed, loud);
        let hosts = world.routes.len();
        for host in 0..hosts {
            let is_late = world.happens(0.05);
            if is_late {
                world.note("late node");
            }
            let delay = world.pause(if is_late { 40_000 } else { 3000 });
            world.later(delay, SimEvent::Starts(host));
        }
        let faults = world.rng.random_range(0..14);
        for _ in 0..faults {
            let delay = world.pause(TROUBLE.as_millis() as u64);
            world.later(delay, SimEvent::Fault);
        }
        world
    }

    /// One job in which nothing goes wrong but that the daemon dies, up to three times.
    pub(crate) fn healthy(seed: u64, loud: bool) -> Self {
        let mut world = Self::quiet(seed, loud);
        world.jobs.truncate(1);
        let job = &mut world.jobs[0];
        let hosts = job.max_nodes as usize;
        (job.min_nodes, job.patience) = (job.max_nodes, Duration::from_mins(1));
        world.failing = 0.0;
        world.config.agent_queue = Config::default().agent_queue;
        for host in 0..hosts {
            let delay = world.pause(3000);
            world.later(delay, SimEvent::Starts(host));
        }
        for _ in 0..3 {
            let delay = world.pause(15_000);
            world.later(delay, SimEvent::Crashes);
        }
        world
    }

    /// One job of `--nnodes 1`, with two hosts for it; nothing happens by itself.
    pub(crate) fn of_one_node(seed: u64, has_ledgers: bool) -> Self {
        let mut world = Self::quiet(seed, false);
        world.has_ledgers = has_ledgers;
        world.daemons[0].ledger = has_ledgers.then(BTreeMap::new);
        world.jobs.truncate(1);
        let job = &mut world.jobs[0];
        (job.min_nodes, job.max_nodes, job.hosts) = (1, 1, 0..2);
        (job.native, job.listens, job.ranks_asked) = (false, false, false);
        job.patience = Duration::from_mins(1);
        (world.failing, world.has_drift, world.put_ms) = (0.0, false, 100);
        world.work_ms = 60_000..60_001;
        world.routes.resize(2, 0);
        world.cuts.resize(2, Cut::default());
        world
    }

    fn quiet(seed: u64, loud: bool) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut jobs = plan_jobs(&mut rng);
        for job in &mut jobs {
            job.outlives = seed % 2 == 1;
        }
        let hosts = jobs.last().map_or(0, |job| job.hosts.end);
        let config = Config {
            agent_queue: if rng.random_bool(0.2) { 1 } else { 64 },
            ..Config::default()
        };
        let mut world = Self {
            epoch: Instant::now(),
            now: Duration::ZERO,
            agenda: BTreeMap::new(),
            nodes: Vec::new(),
            daemons: Vec::new(),
            routes: vec![0; hosts],
            cuts: vec![Cut::default(); hosts],
            streams: BTreeMap::new(),
            calls: BTreeMap::new(),
            witness: Witness::default(),
            failing: [0.0, 0.2, 0.8][rng.random_range(0..3)] / (hosts as f64).sqrt(),
            work_ms: 0..20_000,
            put_ms: 3000,
            has_ledgers: rng.random_bool(0.5),
            has_drift: rng.random_bool(0.5),
            is_hostile: false,
            ids: 0,
            faults: BTreeMap::new(),
            loud,
            jobs,
            config,
            rng,
        };
        if world.has_drift {
            world.note("clocks that differ");
        }
        if world.jobs.len() > 1 {
            world.note("several jobs");
        }
        for job in world.jobs.clone() {
            if job.min_nodes < job.max_nodes {
                world.note("job that may shrink and grow");
            }
            if job.hosts.len() > job.max_nodes as usize {
                world.note("job with spares");
            }
        }
        if world.has_ledgers {
            world.note("daemon with a ledger");
        }
        world.start_daemon(None);
        world
    }

    /// A clock's pace.
    fn pace(&mut self) -> u64 {
        if self.has_drift {
            self.rng.random_range(MILLION - 10_000..=MILLION + 10_000)
        } else {
            MILLION
        }
    }

    /// From now on all hosts reach a new daemon; it has the ledger of a dead one if it takes its place.
    pub(super) fn start_daemon(&mut self, in_place_of: Option<usize>) {
        let number = self.daemons.len();
        let mut ledger = self.has_ledgers.then(BTreeMap::new);
        let mut first = number;
        if let Some(dead) = in_place_of.map(|dead| &mut self.daemons[dead])
            && dead.ledger.is_some()
        {
            (ledger, first) = (dead.ledger.take(), dead.first);
            self.witness.inherit(first);
        }
        let records = ledger.iter().flat_map(BTreeMap::values).cloned().collect();
        let daemon = Daemon {
            state: State::recall(self.config.clone(), records, Duration::ZERO),
            born: self.now,
            pace: self.pace(),
            is_alive: true,
            stalled: None,
            backlog: Vec::new(),
            ledger,
            first,
        };
        self.daemons.push(daemon);
        self.routes.fill(number);
    }

    pub(crate) fn start(&mut self, host: usize) {
        let number = self.nodes.len();
        let Some(job) = self.jobs.iter().position(|job| job.hosts.contains(&host)) else {
            return;
        };
        let plan = self.jobs[job].clone();
        let join = Join {
            protocol: 1,
            hostname: format!("n{host}"),
            node_rank: plan
                .ranks_asked
                .then_some((host - plan.hosts.start) as u32)
                .filter(|rank| *rank < plan.max_nodes),
            min_nodes: plan.min_nodes,
            max_nodes: plan.max_nodes,
            workers: 1 + host as u32 % 3,
            max_restarts: MAX_RESTARTS,
            master_port: 29_500,
            join_timeout_ms: 120_000,
            ..Join::default()
        };
        let (machine, opening) = Machine::start(Rules {
            hostname: join.hostname.clone(),
            native: plan.native,
            resume_hint: None,
            join_timeout: Duration::from_mins(2),
            shutdown_timeout: Duration::from_secs(if plan.native { 30 } else { 8 }),
            workers: join.workers,
            elastic: plan.min_nodes < plan.max_nodes,
        });
        let pace = self.pace();
        self.nodes.push(Node {
            incarnation: format!("n{host}#{number}"),
            job,
            host,
            join,
            machine,
            memory: Memory::default(),
            takeover: TakeoverClock::default(),
            conn: None,
            has_client: false,
            is_known: false,
            is_broken: false,
            is_leaving: false,
            link_ended: false,
            gives_up: self.now + plan.patience,
            outbox: VecDeque::new(),
            alarm: None,
            group: Group::default(),
            written: Vec::new(),
            pace,
            stalled: None,
            backlog: Vec::new(),
            read_at: self.now,
            life: Life::Lives,
            stopped_by: None,
            told: None,
        });
        let mut events = VecDeque::new();
        for effect in opening {
            self.carry_out(number, effect, &mut events);
        }
        self.later(plan.patience, SimEvent::Node(number, NodeEvent::GivesUp));
        self.connect(number);
    }

    /// How long this node waits for a daemon that is out of reach.
    pub(super) fn patience_of(&self, number: usize) -> Duration {
        self.jobs[self.nodes[number].job].patience
    }

    /// The workers of all nodes run, or have succeeded while those of others run.
    pub(super) fn is_well(&self) -> bool {
        let all = self.jobs.iter().map(|job| job.max_nodes as usize).sum::<usize>();
        let has_begun = |node: &Node| node.group.has_begun() && !node.is_gone() && node.told.is_none();
        self.nodes.len() == all
            && self.nodes.iter().all(has_begun)
            && self.nodes.iter().any(Node::has_live_workers)
    }
}

fn plan_jobs(rng: &mut StdRng) -> Vec<JobPlan> {
    let count = [1, 1, 1, 2, 3][rng.random_range(0..5)];
    let mut first = 0;
    let mut jobs = Vec::new();
    for number in 0..count {
        let max_nodes = match rng.random_range(0..if count > 1 { 2 } else { 4 }) {
            0 => 1,
            1 => rng.random_range(2..=4),
            2 => rng.random_range(5..=10),
            _ => rng.random_range(11..=24),
        };
        let min_nodes = if rng.random_bool(0.5) {
            max_nodes
        } else {
            rng.random_range(1..=max_nodes)
        };
        // A second node of a job of one is refused.
        let spares = if max_nodes > 1 && rng.random_bool(0.25) {
            rng.random_range(1..=2)
        } else {
            0
        };
        let hosts = first..first + max_nodes as usize + spares;
        first = hosts.end;
        jobs.push(JobPlan {
            name: format!("job-{number}"),
            min_nodes,
            max_nodes,
            native: rng.random_bool(0.3),
            listens: rng.random_bool(0.5),
            outlives: false,
            ranks_asked: spares == 0 && rng.random_bool(0.2),
            patience: Duration::from_secs(if rng.random_bool(0.2) { 20 } else { 60 }),
            hosts,
        });
    }
    jobs
}
