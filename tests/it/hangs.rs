//! A rank that goes on no more, under `--hang-timeout`: named, asked, written down, ended.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{TinyJob, wait_for_step, worker};

#[test]
fn a_native_rank_that_is_stopped_is_lost_and_the_other_one_says_whom_it_waits_for() {
    let job = TinyJob::with(|text| text.replace("steps: 40", "steps: 1000000"));
    let running = job
        .launch()
        .nproc(2)
        .flag("--hang-timeout", "6")
        .flag("--max-restarts", "0")
        .start();
    wait_for_step(&job.out(), 3);
    let victim = worker(running.pid(), "1");
    kill(Pid::from_raw(victim), Signal::SIGSTOP).expect("a living worker");
    let finished = running.finish();
    finished
        .expect_exit(134)
        .expect_stderr("rank 1 hung: no heartbeat for")
        .expect_stderr("T (stopped)")
        .expect_stderr("first failure: rank 1")
        .expect_stderr("hung: no heartbeat");
    let state_of = |rank: &str| {
        let file = job.out().join("logs/attempt_0").join(rank).join("hang.txt");
        std::fs::read_to_string(file).expect("what the rank did")
    };
    assert!(state_of("1").contains("T (stopped)"), "{}", state_of("1"));
    // The one that is well answers for itself: the operation, for whom it waits, and where its threads are.
    let waits = state_of("0");
    let operation = waits
        .lines()
        .find(|line| line.contains(" has waited "))
        .unwrap_or_default();
    assert!(
        operation.ends_with(" for rank 1") && operation.contains(" #"),
        "{waits}"
    );
    assert!(waits.contains("ddp_worker::"), "no stacks with names:\n{waits}");
}
