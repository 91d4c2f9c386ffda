//! Ranks die at any moment of training. The others keep their processes and the state in their memory, and the last
//! checkpoint has the bits of a run that nothing disturbed.
//!
//! A seed chooses ranks and moments; the kernel decides the rest. `DDP_CHAOS_SEED=<seed> cargo test --test it live::`
//! repeats the plan. A worker test kills each rank at each operation of two steps.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::harness::{
    Running, TinyJob, descendants, environment_of, eventually, metrics, parameters, worker,
};

const RANKS: u32 = 4;
const STEPS: u64 = 240;
const SAVE_EVERY: u64 = 80;
/// Kills of each layout.
const KILLS: u64 = 4;
/// Kills of the long test, and of each of its jobs.
const MANY_KILLS: u64 = 1000;
const KILLS_OF_A_JOB: u64 = 8;
/// Longest time from an event to the kill that follows it: longer than a step, or than a recovery.
const MAX_GAP_MS: u64 = 60;
/// How rank 0 says that the state in memory does not do.
const RELOADS: &str = "the run goes on from ";

/// How a model lies on the ranks.
#[derive(Clone, Copy, Debug)]
struct Layout {
    parallel: &'static str,
    /// Each part of the state is on two ranks.
    has_copies: bool,
    recovery: &'static str,
}

const LAYOUTS: [Layout; 8] = [
    Layout::copied("{ strategy: ddp }"),
    Layout::copied("{ strategy: zero1, shard_group: 2 }"),
    Layout::copied("{ strategy: zero2, shard_group: 2 }"),
    Layout::copied("{ strategy: zero3, shard_group: 2 }"),
    Layout::copied("{ tensor: 2 }"),
    Layout::copied("{ pipeline: { stages: 2 } }"),
    Layout {
        recovery: "buddy",
        ..Layout::copied("{ strategy: zero2 }")
    },
    Layout {
        has_copies: false,
        ..Layout::copied("{ strategy: zero2 }")
    },
];

impl Layout {
    const fn copied(parallel: &'static str) -> Self {
        Self {
            parallel,
            has_copies: true,
            recovery: "none",
        }
    }

    fn job(self) -> TinyJob {
        TinyJob::with(|yaml| {
            let (steps, recovery) = (format!("steps: {STEPS}"), self.recovery);
            let train = format!("{steps}\n  grad_accumulation: 2\n  recovery: {recovery}");
            let yaml = yaml.replace("steps: 40", &train);
            let yaml = yaml.replace("checkpoint_every: 5", &format!("checkpoint_every: {SAVE_EVERY}"));
            // So that each rank owns some of the parameters.
            let yaml = yaml.replace("n_embd: 32", "n_embd: 64");
            format!("{yaml}parallel: {}\n", self.parallel)
        })
    }
}

fn start(job: &TinyJob) -> Running {
    job.launch().nproc(RANKS).flag("--max-restarts", "100").start()
}

/// When a rank is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Moment {
    /// Between its start and its first step.
    Start,
    /// Anywhere in a step: samples, forward, a bucket, the barrier, the update, the numbers.
    Step,
    /// When a checkpoint is due.
    Save,
    /// While the others recover from another death.
    Recovery,
}

/// What happened, so that the test cannot pass by sparing everybody.
#[derive(Debug, Default)]
struct Tally {
    kills: BTreeMap<Moment, u64>,
    /// Survivors of a kill that kept their processes, and those that did not.
    kept: u64,
    replaced: u64,
    /// Recoveries from the checkpoint.
    reloads: u64,
}

impl Tally {
    fn kills(&self) -> u64 {
        self.kills.values().sum()
    }

    fn add(&mut self, other: Self) {
        for (moment, kills) in other.kills {
            *self.kills.entry(moment).or_default() += kills;
        }
        self.kept += other.kept;
        self.replaced += other.replaced;
        self.reloads += other.reloads;
    }
}

/// A job whose ranks are killed.
struct Disturbed {
    dice: StdRng,
    job: TinyJob,
    running: Running,
    /// The newest step before any kill, but for the last ones, which were not written down.
    reached: u64,
    tally: Tally,
}

impl Disturbed {
    fn of(layout: Layout, seed: u64) -> Self {
        let job = layout.job();
        Self {
            dice: StdRng::seed_from_u64(seed),
            running: start(&job),
            reached: 0,
            tally: Tally::default(),
            job,
        }
    }

    /// Kills `kills` ranks, if the run lasts as long, and lets it end.
    fn run(mut self, layout: Layout, kills: u64, expected: &BTreeMap<String, Vec<u8>>) -> Tally {
        let name = format!("{layout:?}");
        while self.tally.kills() < kills && !self.running.ended_within(Duration::ZERO) {
            self.strike();
        }
        let finished = self.running.finish();
        finished.expect_exit(0);
        if self.tally.replaced > 0 {
            eprintln!("{name}: survivors were replaced: {}", finished.transcript());
        }
        // On a fast machine a run may end before its first kill.
        let has_died = finished.transcript().contains("SIGKILL");
        assert_eq!(&parameters(&self.job.out()), expected, "{name}: {:?}", self.tally);
        let steps: Vec<_> = metrics(&self.job.out())
            .iter()
            .filter_map(|line| line["step"].as_u64())
            .collect();
        assert_eq!(steps, (1..=STEPS).collect::<Vec<_>>(), "{name}: each step once");
        self.tally.reloads = finished.transcript().matches(RELOADS).count() as u64;
        let has_second_deaths = self.tally.kills.contains_key(&Moment::Recovery);
        if layout.has_copies && !has_second_deaths {
            assert_eq!(self.tally.reloads, 0, "{name}: {}", finished.transcript());
        }
        if !layout.has_copies && has_died {
            finished.expect_stdout("no rank has the state of rank");
        }
        self.tally
    }

    /// Kills one rank, or two, and looks at the others when the next generation trains.
    fn strike(&mut self) {
        let moments = [
            Moment::Step,
            Moment::Step,
            Moment::Save,
            Moment::Recovery,
            Moment::Start,
        ];
        let is_first = self.tally.kills() == 0;
        let moment = moments[self.dice.random_range(0..if is_first { 5 } else { 4 })];
        self.wait_for(moment);
        let (before, generation) = (self.workers(), self.last_line("generation").max(1));
        let mut victims = BTreeSet::new();
        for _ in 0..if moment == Moment::Recovery { 2 } else { 1 } {
            let gap = self.dice.random_range(0..MAX_GAP_MS);
            self.running.ended_within(Duration::from_millis(gap));
            let victim = self.dice.random_range(0..RANKS);
            let pid = self.workers().get(&victim).copied();
            if pid.is_some_and(|pid| kill(Pid::from_raw(pid), Signal::SIGKILL).is_ok()) {
                *self.tally.kills.entry(moment).or_default() += 1;
                victims.insert(victim);
                self.reached = self.reached.max(self.last_line("step"));
            }
        }
        eventually("the next generation to train", || {
            let trains = metrics(&self.job.out())
                .last()
                .is_some_and(|line| line["generation"].as_u64() > Some(generation));
            (trains || self.running.ended_within(Duration::ZERO)).then_some(())
        });
        let after = self.workers();
        if after.len() < RANKS as usize {
            // The run is at its end.
            return;
        }
        for (rank, pid) in before.iter().filter(|(rank, _)| !victims.contains(rank)) {
            if after[rank] == *pid {
                self.tally.kept += 1;
            } else {
                self.tally.replaced += 1;
            }
        }
    }

    /// Waits for what comes before the moment, or the end of the run. A run without progress from kill to kill is given up.
    fn wait_for(&mut self, moment: Moment) {
        let step = self.last_line("step").max(self.reached);
        let awaited = match moment {
            Moment::Start => {
                worker(self.running.pid(), "0");
                return;
            }
            Moment::Save => (step + 1).next_multiple_of(SAVE_EVERY),
            Moment::Step | Moment::Recovery => step + self.dice.random_range(3..8),
        };
        eventually("the step of a kill", || {
            let is_there = self.last_line("step") >= awaited.min(STEPS);
            (is_there || self.running.ended_within(Duration::ZERO)).then_some(())
        });
    }

    fn last_line(&self, key: &str) -> u64 {
        let lines = metrics(&self.job.out());
        lines.last().and_then(|line| line[key].as_u64()).unwrap_or(0)
    }

    /// The processes of the ranks that live.
    fn workers(&self) -> BTreeMap<u32, i32> {
        let rank = |pid| environment_of(pid).get("RANK")?.parse().ok();
        let pids = descendants(self.running.pid()).into_iter();
        pids.filter_map(|pid| Some((rank(pid)?, pid))).collect()
    }
}

fn undisturbed(layout: Layout) -> BTreeMap<String, Vec<u8>> {
    let job = layout.job();
    start(&job).finish().expect_exit(0);
    parameters(&job.out())
}

fn seed() -> u64 {
    let seed = std::env::var("DDP_CHAOS_SEED")
        .map_or_else(|_| rand::random(), |seed| seed.parse().expect("a number"));
    eprintln!("live: DDP_CHAOS_SEED={seed}");
    seed
}

#[test]
fn survivors_of_a_kill_keep_their_processes_and_no_bit_changes() {
    let seed = seed();
    let mut all = Tally::default();
    for (index, layout) in LAYOUTS.into_iter().enumerate() {
        let expected = undisturbed(layout);
        let job = Disturbed::of(layout, seed.wrapping_add(index as u64));
        all.add(job.run(layout, KILLS, &expected));
    }
    eprintln!("live: {all:?}");
    assert!(
        all.kills() >= LAYOUTS.len() as u64 && all.kept > 0 && all.replaced == 0,
        "{all:?}"
    );
}

#[test]
#[ignore = "1,000 kills: run it alone, by its name"]
fn a_thousand_kills_change_no_bit() {
    let seed = seed();
    let expected = LAYOUTS.map(undisturbed);
    let mut all = Tally::default();
    for index in 0.. {
        let which = index % LAYOUTS.len();
        let job = Disturbed::of(LAYOUTS[which], seed.wrapping_add(index as u64));
        all.add(job.run(LAYOUTS[which], KILLS_OF_A_JOB, &expected[which]));
        eprintln!("live: {all:?}");
        if all.kills() >= MANY_KILLS {
            break;
        }
    }
    for moment in [Moment::Start, Moment::Step, Moment::Save, Moment::Recovery] {
        assert!(all.kills.contains_key(&moment), "{all:?}");
    }
    assert!(all.replaced * 100 <= all.kept, "{all:?}");
}
