//! Scenarios of torchrun's own tests, run against ddp-run; `tests/it/CONFORMANCE.md` maps one to the other.

use nix::sys::signal::Signal;

use crate::harness::{Daemon, Launch, launch, temp_dir};

fn node(daemon: &Daemon, nodes: u32, rank: &str) -> Launch {
    launch()
        .node_of(nodes, &daemon.endpoint, "scenario")
        .flag("--node-rank", rank)
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
