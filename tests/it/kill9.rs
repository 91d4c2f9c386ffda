//! `kill -9` in the middle of training: named, restarted, resumed, and the same parameters to the last bit.

use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{
    Running, TinyJob, descendants, environment_of, eventually, launch, metrics, parameters,
};

fn train(job: &TinyJob) -> Running {
    launch().nproc(2).dir(job.dir()).target("tiny.yaml").start()
}

/// Waits until `metrics.jsonl` has the line of `step`, on which the run goes on to the next.
#[track_caller]
fn wait_for_step(out: &Path, step: u64) {
    eventually(&format!("step {step}"), || {
        metrics(out)
            .iter()
            .any(|line| line["step"].as_u64() >= Some(step))
            .then_some(())
    });
}

/// The process that runs `rank` in the first generation below `launcher`.
fn worker(launcher: i32, rank: &str) -> i32 {
    eventually("the worker to be there", || {
        let is_rank = |pid: &i32| environment_of(*pid).get("RANK").is_some_and(|r| r == rank);
        descendants(launcher).into_iter().find(is_rank)
    })
}

/// The shared memory that a process maps, by name. What has no name in a file system is gone with its processes.
fn shared_memory(pid: i32) -> Vec<String> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let paths = maps
        .lines()
        .filter_map(|line| line.split_once('/').map(|(_, path)| format!("/{path}")));
    paths
        .filter(|path| path.starts_with("/memfd:") || path.starts_with("/dev/shm"))
        .collect()
}

/// Ranks of a node share memory, and none of it can stay behind in `/dev/shm`.
#[track_caller]
fn expect_nameless_shared_memory(pid: i32) {
    let segments = shared_memory(pid);
    assert!(
        segments.iter().any(|path| path.starts_with("/memfd:ddp-")),
        "{segments:?}"
    );
    assert!(
        !segments.iter().any(|path| path.starts_with("/dev/shm")),
        "{segments:?}"
    );
}

#[test]
fn a_killed_worker_changes_nothing_in_the_result() {
    let undisturbed = TinyJob::new();
    train(&undisturbed).finish().expect_exit(0);
    let expected = parameters(&undisturbed.out());
    let steps = metrics(&undisturbed.out()).len();
    for round in 0..10_u64 {
        let job = TinyJob::new();
        let running = train(&job);
        let victim = worker(running.pid(), if round % 2 == 0 { "1" } else { "0" });
        // Before, at and after checkpoints.
        wait_for_step(&job.out(), 1 + 3 * round);
        kill(Pid::from_raw(victim), Signal::SIGKILL).expect("a living worker");
        let finished = running.finish();
        finished.expect_exit(0).expect_stderr("SIGKILL");
        assert_eq!(parameters(&job.out()), expected, "round {round}");
        assert_eq!(metrics(&job.out()).len(), steps, "round {round}: each step once");
    }
}

#[test]
fn survivors_report_the_cause() {
    let job = TinyJob::with(|yaml| yaml.replace("steps: 40", "steps: 100000"));
    let running = launch()
        .nproc(2)
        .flag("--max-restarts", "0")
        .dir(job.dir())
        .target("tiny.yaml")
        .start();
    wait_for_step(&job.out(), 3);
    kill(Pid::from_raw(worker(running.pid(), "1")), Signal::SIGKILL).expect("a living worker");
    running
        .finish()
        .expect_exit(137)
        .expect_stderr("first failure: rank 1")
        // The survivor's own words, not the launcher's.
        .expect_stderr("[0] error: rank 0 stopped: the generation is over: rank 1 (node");
}

#[test]
fn a_killed_launcher_leaves_no_worker_and_no_shared_memory() {
    let job = TinyJob::with(|yaml| yaml.replace("steps: 40", "steps: 100000"));
    let running = train(&job);
    wait_for_step(&job.out(), 3);
    let family = descendants(running.pid());
    assert!(family.len() >= 2, "{family:?}");
    expect_nameless_shared_memory(worker(running.pid(), "0"));
    expect_nameless_shared_memory(worker(running.pid(), "1"));
    running.signal(Signal::SIGKILL);
    running.finish().expect_killed_by(Signal::SIGKILL);
    eventually("all processes of the launcher to be gone", || {
        // A number that is in use again belongs to somebody without our marker.
        let ours = |pid: &&i32| environment_of(**pid).contains_key("DDP_JOB_MARKER");
        family.iter().find(ours).is_none().then_some(())
    });
}

#[test]
fn a_graceful_stop_ends_at_a_step_boundary() {
    let job = TinyJob::with(|yaml| yaml.replace("steps: 40", "steps: 100000"));
    let running = train(&job);
    wait_for_step(&job.out(), 7);
    running.signal(Signal::SIGTERM);
    running.finish().expect_exit(143);
    let reached = metrics(&job.out()).len();
    let resume = launch()
        .nproc(2)
        .dir(job.dir())
        .set("run.resume=require")
        .set(&format!("train.steps={}", reached + 3));
    resume.target("tiny.yaml").run().expect_exit(0);
    assert_eq!(metrics(&job.out()).len(), reached + 3);
}

#[test]
fn sharded_strategies_survive_a_killed_worker_too() {
    for strategy in ["zero1", "zero2", "zero3"] {
        let parallel = format!("parallel: {{ strategy: {strategy} }}\n");
        let job = || TinyJob::with(|yaml| format!("{yaml}{parallel}"));
        let (undisturbed, disturbed) = (job(), job());
        train(&undisturbed).finish().expect_exit(0);
        let running = train(&disturbed);
        let victim = worker(running.pid(), "1");
        wait_for_step(&disturbed.out(), 13);
        kill(Pid::from_raw(victim), Signal::SIGKILL).expect("a living worker");
        running.finish().expect_exit(0).expect_stderr("SIGKILL");
        assert_eq!(
            parameters(&disturbed.out()),
            parameters(&undisturbed.out()),
            "{strategy}"
        );
    }
}
