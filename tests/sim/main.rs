//! The rendezvous and the agents under a simulated network, driven by a seed.
//!
//! What decides is the product: the daemon's `apply`, the agent's `Machine` and the memory of its link. Processes, the
//! network and clocks are numbers. A [`witness`] outside of all of them sees which workers live, what the store gives
//! them, and how each launcher ends; [`words`] checks what each daemon says. At the end every world must have come to
//! rest: each launcher has ended, each call was answered.
//!
//! [`steps`] has a world of its own: ranks that train, die and recover what is left of the state in memory. There the worker
//! decides.
//!
//! A failing case prints its seed: `DDP_SIM_SEED=<seed> cargo test --test sim any_trouble -- --nocapture` replays it alone.
//! `DDP_SIM_SEEDS=<n>` runs more of them, `DDP_SIM_FIRST=<n>` begins with another one than 0.

mod node;
mod scenarios;
mod steps;
mod store;
mod witness;
mod words;
mod world;

use std::collections::BTreeMap;

use world::{KINDS, Outcome, World};

/// Seeds of one run; they take less than a minute.
const SEEDS: u64 = 600;

/// Seeds of worlds in which only the daemon has trouble.
const HEALTHY_SEEDS: u64 = 200;

#[test]
fn any_trouble_ends_well() {
    if let Some(seed) = number("DDP_SIM_SEED") {
        println!("seed {seed}: {:#?}", World::new(seed, true).run());
        return;
    }
    let seeds = number("DDP_SIM_SEEDS").unwrap_or(SEEDS);
    let mut tally = Tally::default();
    let first = number("DDP_SIM_FIRST").unwrap_or(0);
    for seed in first..first + seeds {
        let replay = Replay(seed, "any_trouble");
        tally.count(seed, &World::new(seed, false).run());
        std::mem::forget(replay);
    }
    println!("{tally:#?}");
    // A simulation that never meets trouble, or never gets through it, proves nothing.
    let codes = |wanted: &[i32]| {
        wanted
            .iter()
            .filter_map(|code| tally.exit_codes.get(code))
            .sum::<u64>()
    };
    assert!(codes(&[0]) > seeds, "{tally:#?}");
    assert!(
        codes(&[130, 143]) > 0 && codes(&[75]) > 0 && codes(&[69]) > 0,
        "{tally:#?}"
    );
    assert!(
        tally.exit_codes.len() > 10,
        "workers fail with codes of their own: {tally:#?}"
    );
    assert!(tally.generations > 2 * seeds, "{tally:#?}");
    for kind in KINDS {
        assert!(tally.faults.contains_key(kind), "no {kind} in {tally:#?}");
    }
    assert!(tally.counted_twice > 0, "no two daemons count alike: {tally:#?}");
    assert_eq!(tally.breaches, 0, "{tally:#?}");
}

/// A daemon that dies and comes back restarts no healthy node: one generation, from the beginning to success.
#[test]
fn an_outage_of_the_daemon_restarts_no_healthy_worker() {
    if let Some(seed) = number("DDP_SIM_SEED") {
        println!("seed {seed}: {:#?}", World::healthy(seed, true).run());
        return;
    }
    let mut crashes = 0;
    for seed in 0..HEALTHY_SEEDS {
        let replay = Replay(seed, "an_outage");
        let outcome = World::healthy(seed, false).run();
        let all_succeed = outcome.exit_codes.iter().all(|code| *code == 0);
        assert!(all_succeed && outcome.generations == 1, "{outcome:?}");
        assert_eq!(outcome.breaches, [""; 0]);
        crashes += outcome.faults.get("daemon killed").copied().unwrap_or(0);
        std::mem::forget(replay);
    }
    assert!(crashes > HEALTHY_SEEDS, "only {crashes} daemons died");
}

/// In this world an agent was stopped for 50 s. When it went on, it gave up the daemon before it had read the verdict that
/// had come meanwhile, and ended with the success of its own workers.
#[test]
fn who_was_stopped_reads_what_came_meanwhile_before_it_gives_up_the_daemon() {
    World::new(40716, false).run();
}

/// The same seed gives the same world, or a replay would be worth nothing.
#[test]
fn a_seed_replays_exactly() {
    for seed in [3, 77] {
        assert_eq!(World::new(seed, false).run(), World::new(seed, false).run());
    }
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is no number")))
}

/// What the worlds went through, so that the test cannot pass by avoiding trouble.
#[derive(Debug, Default)]
struct Tally {
    /// Launchers that ended with each code.
    exit_codes: BTreeMap<i32, u64>,
    generations: u64,
    /// Two living holders of one place, or values of other assignments.
    breaches: u64,
    /// The first of them, and its seed.
    first_breach: Option<(u64, String)>,
    changed_verdicts: u64,
    counted_twice: u64,
    faults: BTreeMap<&'static str, u64>,
}

impl Tally {
    fn count(&mut self, seed: u64, outcome: &Outcome) {
        for code in &outcome.exit_codes {
            *self.exit_codes.entry(*code).or_default() += 1;
        }
        self.generations += outcome.generations;
        self.breaches += outcome.breaches.len() as u64;
        if let (None, Some(first)) = (&self.first_breach, outcome.breaches.first()) {
            self.first_breach = Some((seed, first.clone()));
        }
        self.changed_verdicts += outcome.changed_verdicts;
        self.counted_twice += outcome.counted_twice;
        for (kind, count) in &outcome.faults {
            *self.faults.entry(kind).or_default() += count;
        }
    }
}

/// Names the seed, and the test, if the world panics.
struct Replay(u64, &'static str);

impl Drop for Replay {
    fn drop(&mut self) {
        let Self(seed, test) = self;
        eprintln!(
            "seed {seed} failed; replay: DDP_SIM_SEED={seed} cargo test --test sim {test} -- --nocapture"
        );
    }
}
