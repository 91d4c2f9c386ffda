//! Eight ranks, pipeline 2 × data 2 × tensor 2, whose ranks are killed in mid-schedule: named with stage and action, restarted,
//! resumed, and the same parameters to the last bit.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::harness::{
    Daemon, Running, TinyJob, environment_of, eventually, launch, metrics, parameters, repository,
    wait_for_step, worker,
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
        .filter(|line| line.contains("note: rank ") && line.contains(" left the step ("));
    for survivor in survivors.clone() {
        assert!(
            survivor.contains(") and waits for the next start: rank 5 (node"),
            "{survivor}"
        );
        let is_action = [" of micro-batch ", "reduction and update"].map(|action| survivor.contains(action));
        assert!(
            survivor.contains("stage ") && is_action.contains(&true),
            "{survivor}"
        );
    }
    assert!(survivors.count() > 0, "{words}");
}

/// Each of two nodes has a stage, of two tensor ranks.
fn on_two_nodes() -> TinyJob {
    TinyJob::with(|yaml| {
        let yaml = yaml.replace("steps: 40", "steps: 24\n  grad_accumulation: 4");
        yaml.replace("checkpoint_every: 5", "checkpoint_every: 8")
            + "parallel:\n  tensor: 2\n  pipeline: { stages: 2, schedule: zb-h1 }\n"
    })
}

fn start_node(job: &TinyJob, daemon: &Daemon, rank: u32) -> Running {
    let node = launch().node_of(2, &daemon.endpoint, "nodes").nproc(2);
    let node = node.flag("--node-rank", rank.to_string()).dir(job.dir());
    node.target("tiny.yaml").start()
}

/// Launcher and workers of a node are gone at once, and another one comes in its place.
#[test]
fn a_node_that_is_killed_in_mid_schedule_is_named_and_changes_no_bit() {
    let daemon = Daemon::start();
    let undisturbed = on_two_nodes();
    for node in [0, 1].map(|rank| start_node(&undisturbed, &daemon, rank)) {
        node.finish().expect_exit(0);
    }
    let expected = parameters(&undisturbed.out());
    daemon.stop().expect_exit(0);
    for lost_rank in [1, 0] {
        let (daemon, job) = (Daemon::start(), on_two_nodes());
        let [mut left, lost] = [1 - lost_rank, lost_rank].map(|rank| start_node(&job, &daemon, rank));
        wait_for_step(&job.out(), 10);
        // Held, so that the others stand in the middle of a step until the node is gone.
        let held = Pid::from_raw(worker(left.pid(), &(2 * (1 - lost_rank)).to_string()));
        kill(held, Signal::SIGSTOP).expect("a living worker");
        let workers = [0, 1].map(|local| worker(lost.pid(), &(2 * lost_rank + local).to_string()));
        lost.signal(Signal::SIGKILL);
        eventually("the workers to go with their launcher", || {
            let is_gone = |pid: &i32| !environment_of(*pid).contains_key("DDP_JOB_MARKER");
            workers.iter().all(is_gone).then_some(())
        });
        kill(held, Signal::SIGCONT).expect("a living worker");
        left.wait_for(&format!("(node rank {lost_rank}) was lost"));
        let again = start_node(&job, &daemon, lost_rank);
        again.finish().expect_exit(0);
        let words = left.finish().expect_exit(0).stderr();
        // Whom the ranks that were left waited for, in their own words.
        let mut survivors = words.lines().filter(|line| line.contains("note: rank "));
        let names_lost = |line: &str| {
            [" lost rank ", " was lost"]
                .iter()
                .any(|words| line.contains(words))
        };
        assert!(survivors.any(names_lost), "{words}");
        lost.finish().expect_killed_by(Signal::SIGKILL);
        assert_eq!(parameters(&job.out()), expected, "node {lost_rank}");
        assert_eq!(metrics(&job.out()).len(), 24, "each step once");
        daemon.stop().expect_exit(0);
    }
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
    let mut last = 0;
    for (step, rank, moment_ms) in kills {
        if step > 0 {
            wait_for_step(&job.out(), step);
        }
        // Not one of those that are on their way out because of the last kill, so that each kill ends a generation.
        let (victim, generation) = eventually("the next generation", || {
            let victim = worker(running.pid(), &rank.to_string());
            let generation = environment_of(victim)
                .get("DDP_GENERATION")?
                .parse::<u64>()
                .ok()?;
            (generation > last).then_some((victim, generation))
        });
        assert!(
            !running.ended_within(Duration::from_millis(moment_ms)),
            "step {step}"
        );
        kill(Pid::from_raw(victim), Signal::SIGKILL).expect("a living worker");
        last = generation;
    }
    running.finish().expect_exit(0);
    let summary = std::fs::read(job.out().join("summary.json")).expect("a summary");
    let summary: serde_json::Value = serde_json::from_slice(&summary).expect("a summary of JSON");
    eprintln!("{KILLS} restarts in {:.0?}", began.elapsed());
    assert_eq!(summary["generation"], KILLS + 1, "each kill ended one");
    assert_eq!(parameters(&job.out()), expected, "DDP_CHAOS_SEED={seed}");
    assert_eq!(metrics(&job.out()).len() as u64, steps, "each step once");
}
