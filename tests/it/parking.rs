//! Workers that outlive a generation.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use nix::sys::signal::Signal;

use crate::harness::{Daemon, Launch, eventually, launch, python_is_missing, repository};

/// Runs the script until generation `last`; rank `victim` kills itself, if there is one.
fn worker(last: u32, victim: i32) -> Launch {
    launch()
        .target(repository("tests/it/parking.py"))
        .target_args([last.to_string(), victim.to_string()])
}

/// The process in a line of the script.
fn pid_in(line: &str) -> i32 {
    let (_, pid) = line.split_once(" has pid ").expect("a pid");
    pid.parse().expect("a number")
}

fn lives(pid: i32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

#[test]
fn survivors_keep_their_processes_over_three_kills_of_their_sibling() {
    if python_is_missing() {
        return;
    }
    let logs = tempfile::tempdir().unwrap();
    let log_dir = logs.path().to_str().unwrap();
    let finished = worker(4, 1)
        .nproc(4)
        .flag("--max-restarts", "3")
        .flag("--log-dir", log_dir)
        .run();
    finished.expect_exit(0);
    let mut pids = BTreeMap::<&str, BTreeSet<i32>>::new();
    for rank in ["0", "1", "2", "3"] {
        for generation in 1..5 {
            let words = format!("rank {rank} of generation {generation} has pid ");
            let line = finished.stdout().iter().find(|line| line.contains(&words));
            pids.entry(rank)
                .or_default()
                .insert(pid_in(line.expect("one of each")));
        }
    }
    let processes: Vec<_> = pids.values().map(BTreeSet::len).collect();
    assert_eq!(processes, [1, 4, 4, 1], "{pids:?}");
    finished
        .expect_stderr("rank 1 (node")
        .expect_stderr(&format!("kept: ranks 0, 3; logs in {log_dir}/attempt_3"))
        .expect_no_stderr("cannot kill");
    // The folder of each attempt has the logs of all its workers: those that were kept go on in the first one.
    for (rank, generations) in [(0, 1..=4), (1, 4..=4), (2, 4..=4), (3, 1..=4)] {
        let log = logs.path().join(format!("attempt_3/{rank}/stdout.log"));
        let text = std::fs::read_to_string(log).unwrap();
        let has = |generation: &i32| text.contains(&format!("of generation {generation} "));
        assert_eq!(
            (1..=4).filter(has).collect::<Vec<_>>(),
            generations.collect::<Vec<_>>()
        );
    }
}

#[test]
fn a_worker_stays_while_its_job_grows_but_not_when_it_is_to_stop() {
    if python_is_missing() {
        return;
    }
    let daemon = Daemon::start();
    let node = || {
        worker(3, -1)
            .flag("--nnodes", "1:2")
            .flag("--rdzv-endpoint", &daemon.endpoint)
            .flag("--rdzv-id", "growing")
            .flag("--rdzv-conf", "last_call_timeout=0.3")
            .start()
    };
    let mut first = node();
    let pid = pid_in(&first.wait_for("rank 0 of generation 1"));
    let mut second = node();
    let stayed = first.wait_for("of generation 2 has pid");
    assert_eq!(pid_in(&stayed), pid);
    second.wait_for("of generation 2 has pid");
    first.signal(Signal::SIGTERM);
    first.finish().expect_exit(143);
    // Its worker stays too, and is the only one of the last generation: as rank 0, also on the console.
    second.wait_for("[0] rank 0 of generation 3");
    second.finish().expect_exit(0);
    daemon.stop().expect_exit(0);
}

/// Whatever ends the launch: the verdict, a signal while the node waits for another one, or the launcher's own death.
#[test]
fn no_parked_worker_outlives_its_launcher_or_the_job() {
    if python_is_missing() {
        return;
    }
    let mut running = worker(2, 1).nproc(2).flag("--max-restarts", "0").start();
    let parked = pid_in(&running.wait_for("rank 0 of generation 1"));
    running.wait_for("rank 0 parks");
    running.finish().expect_exit(137);
    assert!(!lives(parked));

    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let daemon = Daemon::start();
        let node = |rank: &str| {
            worker(2, -1)
                .node_of(2, &daemon.endpoint, "parking")
                .flag("--node-rank", rank)
                .flag("--max-restarts", "1")
                .flag("--rdzv-conf", "is_host=false")
        };
        let (mut first, mut second) = (node("0").start(), node("1").start());
        let parked = pid_in(&first.wait_for("rank 0 of generation 1"));
        second.wait_for("rank 1 of generation 1");
        second.signal(Signal::SIGKILL);
        second.finish().expect_killed_by(Signal::SIGKILL);
        first.wait_for("rank 0 parks");
        // The other node does not come back.
        first.wait_for("waiting for");
        assert!(lives(parked), "it was not parked");
        first.signal(signal);
        match signal {
            Signal::SIGKILL => first.finish().expect_killed_by(signal),
            _ => first.finish().expect_exit(143),
        };
        eventually("the parked worker to go", || (!lives(parked)).then_some(()));
        daemon.stop().expect_exit(0);
    }
}
