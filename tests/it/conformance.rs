//! Scenarios of torchrun's own tests, run against ddp-run; `tests/it/CONFORMANCE.md` maps one to the other.

use std::collections::BTreeSet;

use nix::sys::signal::Signal;

use crate::harness::{Daemon, Finished, Launch, launch, temp_dir};

/// A worker's whole place.
const PLACE: &str = "echo place $RANK/$WORLD_SIZE local $LOCAL_RANK/$LOCAL_WORLD_SIZE group $GROUP_RANK/$GROUP_WORLD_SIZE role $ROLE_NAME $ROLE_RANK/$ROLE_WORLD_SIZE";

fn places(finished: &Finished) -> BTreeSet<String> {
    finished.expect_exit(0);
    let of = |line: &String| Some(line.split_once("place ")?.1.to_owned());
    finished.stdout().iter().filter_map(of).collect()
}

fn set<const N: usize>(lines: [&str; N]) -> BTreeSet<String> {
    lines.map(str::to_owned).into()
}

fn node(daemon: &Daemon, nodes: u32, rank: &str) -> Launch {
    launch()
        .node_of(nodes, &daemon.endpoint, "scenario")
        .flag("--node-rank", rank)
}

#[test]
fn nodes_may_run_different_numbers_of_workers() {
    let daemon = Daemon::start();
    let start = |rank: &str, workers| node(&daemon, 3, rank).nproc(workers).shell(PLACE).start();
    let running = [start("0", 1), start("1", 2), start("2", 3)];
    let [one, two, three] = running.map(|node| places(&node.finish()));
    assert_eq!(one, set(["0/6 local 0/1 group 0/3 role default 0/6"]));
    assert_eq!(
        two,
        set([
            "1/6 local 0/2 group 1/3 role default 1/6",
            "2/6 local 1/2 group 1/3 role default 2/6"
        ])
    );
    assert_eq!(three.len(), 3);
    assert!(
        three.contains("5/6 local 2/3 group 2/3 role default 5/6"),
        "{three:?}"
    );
}

#[test]
fn roles_are_counted_by_themselves() {
    let daemon = Daemon::start();
    let start = |rank: &str, role: &str| {
        node(&daemon, 3, rank)
            .nproc(2)
            .flag("--role", role)
            .shell(PLACE)
            .start()
    };
    let running = [start("0", "reader"), start("1", "trainer"), start("2", "reader")];
    let [first, trainer, last] = running.map(|node| places(&node.finish()));
    assert!(
        first.contains("1/6 local 1/2 group 0/3 role reader 1/4"),
        "{first:?}"
    );
    assert!(
        trainer.contains("2/6 local 0/2 group 1/3 role trainer 0/2"),
        "{trainer:?}"
    );
    assert!(
        last.contains("5/6 local 1/2 group 2/3 role reader 3/4"),
        "{last:?}"
    );
}

#[test]
fn a_node_whose_agent_is_killed_can_be_started_again() {
    let (daemon, dir) = (Daemon::start(), temp_dir());
    let done = dir.path().join("done");
    let script = r#"echo "attempt $TORCHELASTIC_RESTART_COUNT"; until [ -e "$DONE" ]; do sleep 0.02; done"#;
    let start = |rank: &str| {
        node(&daemon, 2, rank)
            .flag("--max-restarts", "1")
            .env("DONE", &done)
            .shell(script)
            .start()
    };
    let (mut stays, mut goes) = (start("0"), start("1"));
    stays.wait_for("attempt 0");
    goes.wait_for("attempt 0");
    goes.signal(Signal::SIGKILL);
    goes.finish().expect_killed_by(Signal::SIGKILL);
    let mut again = start("1");
    stays.wait_for("attempt 1");
    again.wait_for("attempt 1");
    std::fs::write(&done, "").expect("writable");
    stays.finish().expect_exit(0);
    again.finish().expect_exit(0);
}

#[test]
fn the_failure_of_a_peer_ends_the_job_with_its_code_on_every_node() {
    let daemon = Daemon::start();
    let script = r#"if [ "$RANK" = 1 ]; then echo no luck >&2; exit 42; fi; exec sleep 1000"#;
    let running = ["0", "1"].map(|rank| node(&daemon, 2, rank).shell(script).start());
    for node in running {
        node.finish()
            .expect_exit(42)
            .expect_stderr("first failure: rank 1");
    }
}

#[test]
fn four_of_five_agents_run_and_the_fifth_waits_for_its_turn() {
    let daemon = Daemon::start();
    let dir = temp_dir();
    let done = dir.path().join("done");
    let script = r#"echo "world $WORLD_SIZE"; until [ -e "$DONE" ]; do sleep 0.02; done"#;
    let start = || {
        launch()
            .node_of(4, &daemon.endpoint, "five")
            .env("DONE", &done)
            .shell(script)
            .start()
    };
    let mut running: Vec<_> = (0..4).map(|_| start()).collect();
    for node in &mut running {
        node.wait_for("world 4");
    }
    let mut fifth = start();
    fifth.wait_for("this node is on standby");
    std::fs::write(&done, "").expect("writable");
    for node in running {
        node.finish().expect_exit(0);
    }
    fifth
        .finish()
        .expect_exit(0)
        .expect_stderr("stayed on standby and started no workers");
}

#[test]
fn a_job_that_is_stopped_before_it_begins_leaves_no_empty_folders() {
    let (daemon, dir) = (Daemon::start(), temp_dir());
    let logs = dir.path().join("runs/job/logs");
    let mut waiting = node(&daemon, 2, "0")
        .flag("--log-dir", &logs)
        .target("true")
        .start();
    waiting.wait_for("waiting for 1 more");
    assert!(logs.is_dir());
    waiting.signal(Signal::SIGTERM);
    waiting.finish().expect_exit(143);
    let left = std::fs::read_dir(dir.path()).expect("it was there before");
    assert_eq!(left.count(), 0);
}

#[test]
fn the_time_to_stop_holds_when_a_worker_fails() {
    let dir = temp_dir();
    let script = r#"[ "$RANK" = 1 ] && { until [ -e "$READY" ]; do sleep 0.02; done; exit 5; }
        trap '' TERM; : >"$READY"; while :; do sleep 1000; done"#;
    let finished = launch()
        .nproc(2)
        .env("READY", dir.path().join("ready"))
        .flag("--shutdown-timeout", "0.5")
        .shell(script)
        .run();
    finished
        .expect_exit(5)
        .expect_stderr("rank 0: terminated by ddp-run (SIGKILL)");
}
