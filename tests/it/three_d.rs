//! Eight ranks, pipeline 2 × data 2 × tensor 2, whose ranks are killed in mid-schedule: named with stage and action, restarted,
//! resumed, and the same parameters to the last bit.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::harness::{
    Running, TinyJob, eventually, launch, metrics, parameters, repository, wait_for_step, worker,
};
use crate::pipelines::{expect_place, names_action};

const RANKS: u32 = 8;
const RANKS_OF_A_STAGE: u32 = 4;
/// Kills of the long test.
const KILLS: u64 = 100;
/// What they are, unless `DDP_CHAOS_SEED` says so.
const SEED: u64 = 16;

/// The layout of `examples/three-d` with a model that trains in moments.
fn three_d(steps: u64, checkpoint_every: u64) -> TinyJob {
    let example = std::fs::read_to_string(repository("examples/three-d/train.yaml")).expect("readable");
    let layout = example
        .find("\nparallel:")
        .expect("the layout is the last section");
    TinyJob::with(|yaml| {
        let yaml = yaml.replace("steps: 40", &format!("steps: {steps}\n  grad_accumulation: 4"));
        let yaml = yaml.replace(
            "checkpoint_every: 5",
            &format!("checkpoint_every: {checkpoint_every}"),
        );
        yaml + &example[layout..]
    })
}

fn start(job: &TinyJob, max_restarts: &str) -> Running {
    let launch = launch().nproc(RANKS).flag("--max-restarts", max_restarts);
    launch.dir(job.dir()).target("tiny.yaml").start()
}

fn undisturbed(steps: u64, checkpoint_every: u64) -> BTreeMap<String, Vec<u8>> {
    let job = three_d(steps, checkpoint_every);
    start(&job, "0").finish().expect_exit(0);
    parameters(&job.out())
}

fn kill_rank(running: &Running, rank: u32) {
    let victim = worker(running.pid(), &rank.to_string());
    kill(Pid::from_raw(victim), Signal::SIGKILL).expect("a living worker");
}

/// Ranks 1, 2 and 4 differ from rank 0 along the axis of tensors, data and stages.
#[test]
fn a_rank_killed_on_any_axis_is_named_with_stage_and_action_and_changes_no_bit() {
    let expected = undisturbed(24, 8);
    // Steps that lie between two checkpoints.
    for (rank, step) in [(0, 9), (1, 10), (2, 18), (4, 19)] {
        let job = three_d(24, 8);
        let running = start(&job, "3");
        wait_for_step(&job.out(), step);
        kill_rank(&running, rank);
        let finished = running.finish();
        let words = finished.expect_exit(0).stderr();
        let died = format!("rank {rank} (node `");
        let mut said = words.lines().filter(|line| line.starts_with("[ddp-run] "));
        let named = said.find(|line| line.contains(&died)).unwrap_or_default();
        assert!(named.contains("SIGKILL"), "{words}");
        // A slow test may meet the rank at the next one all the same.
        let saves = named.contains(" while saving at step ");
        assert!(saves || names_action(named, rank / RANKS_OF_A_STAGE), "{words}");
        assert_eq!(parameters(&job.out()), expected, "rank {rank}");
    }
}

#[test]
fn the_report_and_the_other_ranks_say_in_which_action_they_were() {
    let job = three_d(100_000, 0);
    let running = start(&job, "0");
    wait_for_step(&job.out(), 3);
    kill_rank(&running, 5);
    let finished = running.finish();
    let words = finished
        .expect_exit(137)
        .expect_stderr("first failure: rank 5")
        .stderr();
    let last = words
        .lines()
        .find(|line| line.contains("    last heartbeat: "))
        .unwrap_or_default();
    expect_place(last, 1);
    // The survivors' own words.
    let survivors = words
        .lines()
        .filter(|line| line.contains("error: rank ") && line.contains(" stopped ("));
    for survivor in survivors.clone() {
        assert!(
            survivor.contains("): the launcher ended this generation: rank 5 (node"),
            "{survivor}"
        );
        assert!(
            survivor.contains("stage ") && survivor.contains(" of micro-batch "),
            "{survivor}"
        );
    }
    assert!(survivors.count() > 0, "{words}");
}

#[test]
#[ignore = "minutes of restarts: .ci/run examples"]
fn a_hundred_kills_of_the_examples_three_d_layout_change_no_bit() {
    let seed = std::env::var("DDP_CHAOS_SEED").map_or(SEED, |seed| seed.parse().expect("a number"));
    eprintln!("DDP_CHAOS_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    // Step after which, rank, and moment within what follows.
    let mut step = 0;
    let kills = (0..KILLS).map(|_| {
        step += random.random_range(0..5_u64);
        (
            step,
            random.random_range(0..RANKS),
            random.random_range(0..40_u64),
        )
    });
    let kills: Vec<(u64, u32, u64)> = kills.collect();
    let (steps, began) = (step + 10, Instant::now());
    let expected = undisturbed(steps, 3);
    let job = three_d(steps, 3);
    let mut running = start(&job, "1000");
    let mut killed = None;
    for (step, rank, moment_ms) in kills {
        if step > 0 {
            wait_for_step(&job.out(), step);
        }
        // The one that was killed last is gone, so that each kill is one.
        let victim = eventually("the next generation", || {
            let victim = worker(running.pid(), &rank.to_string());
            (Some(victim) != killed).then_some(victim)
        });
        assert!(
            !running.ended_within(Duration::from_millis(moment_ms)),
            "step {step}"
        );
        // It may have ended with its generation.
        let _ = kill(Pid::from_raw(victim), Signal::SIGKILL);
        killed = Some(victim);
    }
    let finished = running.finish();
    let words = finished.expect_exit(0).stderr();
    let restarts = words.matches("SIGKILL").count();
    eprintln!("{restarts} restarts in {:.0?}", began.elapsed());
    assert!(restarts as u64 >= KILLS / 2, "{words}");
    assert_eq!(parameters(&job.out()), expected, "DDP_CHAOS_SEED={seed}");
    assert_eq!(metrics(&job.out()).len() as u64, steps, "each step once");
}
