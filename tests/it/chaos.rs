//! Two hundred random kills: every job ends in success or in a failure with a name, and leaves nothing.
//!
//! A seed decides what the jobs are and who is killed when: workers, agents, the daemon, or the connection to it. The
//! kernel decides the rest, so a seed repeats the plan but not each race. `DDP_CHAOS_SEED=<seed> cargo test --test it
//! chaos` repeats it.

mod job;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use job::{Job, Verdict};

/// Kills before no more jobs are started.
const KILLS: u64 = 200;
/// Jobs at a time: they mostly wait.
const AT_ONCE: u64 = 4;
/// Jobs that suffer nothing would never get to the end; this many are far too many.
const MAX_JOBS: u64 = 1000;

/// Who or what is struck.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// SIGKILL of a worker.
    Worker,
    /// SIGKILL of a launcher.
    Agent,
    /// The connections of a launcher to its daemon break.
    Connection,
    /// SIGKILL of the daemon; another one takes its place.
    Daemon,
}

/// What happened, so that the test cannot pass by sparing everybody.
#[derive(Debug, Default)]
struct Tally {
    faults: BTreeMap<Fault, u64>,
    succeeded: u64,
    /// Jobs that ended with this code on the first of their nodes that was not killed.
    failed: BTreeMap<i32, u64>,
    /// Jobs all of whose nodes were killed.
    killed: u64,
}

impl Tally {
    fn count(&mut self, verdict: &Verdict) {
        for fault in &verdict.faults {
            *self.faults.entry(*fault).or_default() += 1;
        }
        match verdict.exit_code {
            Some(0) => self.succeeded += 1,
            Some(code) => *self.failed.entry(code).or_default() += 1,
            None => self.killed += 1,
        }
    }

    fn kills(&self) -> u64 {
        self.faults.values().sum()
    }
}

fn seed() -> u64 {
    match std::env::var("DDP_CHAOS_SEED") {
        Ok(seed) => seed.parse().expect("DDP_CHAOS_SEED is a number"),
        Err(_) => rand::random(),
    }
}

/// Names of ours in `/dev/shm`.
fn shared_memory() -> BTreeSet<String> {
    let names = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.contains("ddp")).collect()
}

#[test]
fn every_job_comes_to_an_end_and_leaves_nothing() {
    let (seed, began, before) = (seed(), Instant::now(), shared_memory());
    eprintln!("chaos: DDP_CHAOS_SEED={seed}");
    let (next, tally) = (AtomicU64::new(0), Mutex::new(Tally::default()));
    let tally_now = || tally.lock().unwrap_or_else(PoisonError::into_inner);
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while tally_now().kills() < KILLS {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    assert!(index < MAX_JOBS, "{:?}", tally_now());
                    let verdict = Job::of(seed, index).run();
                    tally_now().count(&verdict);
                }
            });
        }
    });
    let tally = tally_now();
    eprintln!("chaos: {tally:?} in {:.1?}", began.elapsed());
    let left: Vec<_> = shared_memory().difference(&before).cloned().collect();
    assert!(left.is_empty(), "left in /dev/shm: {left:?}");
    for fault in [Fault::Worker, Fault::Agent, Fault::Connection, Fault::Daemon] {
        assert!(
            tally.faults.contains_key(&fault),
            "no {fault:?} was injected: {tally:?}"
        );
    }
    assert!(tally.succeeded > 0 && !tally.failed.is_empty(), "{tally:?}");
}
