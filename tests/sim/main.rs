//! The rendezvous under a simulated network, driven by a seed.
//!
//! Agents follow the protocol; the network delays their messages, breaks their streams and lets processes die at
//! any moment; the daemon's clock is a number. After every event the invariants of `invariants.rs` are checked, and at
//! the end every world must have come to rest: done, or waiting for something that it can name.
//!
//! `DDP_SIM_SEEDS=<n>` runs more of them. A failing case prints its seed: `DDP_SIM_SEED=<seed> cargo test --test sim -- --nocapture`
//! replays it alone.

mod agent;
mod invariants;
mod world;

use world::{Outcome, World};

/// Seeds of one run; they take a few seconds.
const SEEDS: u64 = 600;

/// Seeds of worlds in which only the daemon has trouble.
const HEALTHY_SEEDS: u64 = 200;

#[test]
fn any_trouble_ends_well() {
    if let Ok(seed) = std::env::var("DDP_SIM_SEED") {
        let seed = seed.parse().expect("DDP_SIM_SEED is a number");
        let outcome = World::new(seed, true).run();
        println!("seed {seed}: {outcome:?}");
        return;
    }
    let mut tally = Tally::default();
    let seeds =
        std::env::var("DDP_SIM_SEEDS").map_or(SEEDS, |n| n.parse().expect("DDP_SIM_SEEDS is a number"));
    for seed in 0..seeds {
        let replay = Replay(seed);
        tally.count(&World::new(seed, false).run());
        std::mem::forget(replay);
    }
    println!("{tally:?}");
    // A simulation that never meets trouble, or never gets through it, proves nothing.
    assert!(tally.succeeded > seeds / 10, "{tally:?}");
    assert!(tally.failed > seeds / 20, "{tally:?}");
    assert!(tally.crashes > seeds / 4, "{tally:?}");
    assert!(tally.stopped > 0 && tally.timed_out > 0, "{tally:?}");
    assert!(
        tally.generations > 2 * seeds && tally.reconnects > seeds && tally.deaths > seeds / 4,
        "{tally:?}"
    );
}

/// A daemon that dies and comes back restarts no healthy node: one generation, from the beginning to success.
#[test]
fn an_outage_of_the_daemon_restarts_no_healthy_worker() {
    if let Ok(seed) = std::env::var("DDP_SIM_SEED") {
        let seed = seed.parse().expect("DDP_SIM_SEED is a number");
        println!("seed {seed}: {:?}", World::healthy(seed, true).run());
        return;
    }
    let mut crashes = 0;
    for seed in 0..HEALTHY_SEEDS {
        let replay = Replay(seed);
        let outcome = World::healthy(seed, false).run();
        assert_eq!(
            (outcome.exit_code, outcome.generations),
            (Some(0), 1),
            "{outcome:?}"
        );
        crashes += outcome.crashes;
        std::mem::forget(replay);
    }
    assert!(crashes > HEALTHY_SEEDS, "only {crashes} daemons died");
}

/// The same seed gives the same world, or a replay would be worth nothing.
#[test]
fn a_seed_replays_exactly() {
    for seed in [3, 77] {
        assert_eq!(World::new(seed, false).run(), World::new(seed, false).run());
    }
}

/// What the worlds went through, so that the test cannot pass by avoiding trouble.
#[derive(Debug, Default)]
struct Tally {
    succeeded: u64,
    failed: u64,
    stopped: u64,
    timed_out: u64,
    generations: u64,
    reconnects: u64,
    deaths: u64,
    crashes: u64,
}

impl Tally {
    fn count(&mut self, outcome: &Outcome) {
        match outcome.exit_code {
            Some(0) => self.succeeded += 1,
            Some(130 | 143) => self.stopped += 1,
            Some(75) => self.timed_out += 1,
            Some(_) => self.failed += 1,
            None => {}
        }
        self.generations += outcome.generations;
        self.reconnects += outcome.reconnects;
        self.deaths += outcome.deaths;
        self.crashes += outcome.crashes;
    }
}

/// Names the seed if the world panics.
struct Replay(u64);

impl Drop for Replay {
    fn drop(&mut self) {
        eprintln!(
            "seed {} failed; replay: DDP_SIM_SEED={} cargo test --test sim -- --nocapture",
            self.0, self.0
        );
    }
}
