//! A rank that goes on no more, under `--hang-timeout`: named, asked, written down, ended.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

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

/// In lock-step all ranks have the same step: the slow one is that which waits least.
#[test]
fn a_native_rank_that_is_slowed_down_is_named() {
    let job = TinyJob::with(|text| text.replace("steps: 40", "steps: 1000000"));
    let mut running = job.launch().nproc(2).start();
    wait_for_step(&job.out(), 3);
    let victim = Pid::from_raw(worker(running.pid(), "1"));
    let (end, ended) = mpsc::channel::<()>();
    let slowing = thread::spawn(move || {
        for signal in [Signal::SIGSTOP, Signal::SIGCONT].into_iter().cycle() {
            let time = if signal == Signal::SIGSTOP { 40 } else { 10 };
            if kill(victim, signal).is_err()
                || ended.recv_timeout(Duration::from_millis(time)) != Err(RecvTimeoutError::Timeout)
            {
                break;
            }
        }
        // It is gone, if this fails.
        let _ = kill(victim, Signal::SIGCONT);
    });
    let named = running.wait_for("holds the other ranks up: they wait");
    assert!(named.contains("rank 1 (node "), "{named}");
    drop(end);
    slowing.join().expect("the thread that slows it down");
}
