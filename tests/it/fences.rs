//! Two nodes that each believe to be rank 0 of generation 1: the daemon was killed while one of them was cut off.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ddp_worker::session::{Session, StoreError};
use nix::sys::signal::Signal;

use crate::harness::{Daemon, Launch, PATIENCE, Running, ddp_rendezvous, eventually, launch, temp_dir};

/// The name of a worker's node.
const NODE: &str = "DDP_TEST_NODE";
/// Where they meet.
const DIR: &str = "DDP_TEST_DIR";
/// Pause between two writes.
const LOOK: Duration = Duration::from_millis(20);

/// `x` writes a key at once, and more of them until it is refused. `y` writes the same key when it is told to.
pub(crate) fn writes_the_meeting() {
    let node = std::env::var(NODE).expect("a name");
    let dir = PathBuf::from(std::env::var_os(DIR).expect("a directory"));
    let session = Session::from_env().expect("started by a launcher");
    let soon = || Instant::now() + PATIENCE;
    println!("{node} is rank {}", session.env().rank.0);
    if node == "y" {
        eventually("the test says go", || dir.join("go").exists().then_some(()));
    }
    let written = session.store().put("nccl/world/meeting", node.as_bytes(), soon());
    println!("{node} wrote: {written:?}");
    let mut number = 0;
    while node == "x" && !dir.join("go").exists() {
        let key = format!("x/{number}");
        let written = session.store().put(&key, b"x", soon());
        // A pause: nobody writes this one.
        let looked = session.store().get("never", Instant::now() + LOOK);
        match written.and(looked) {
            // The daemon is away, or this node's launcher.
            Ok(_) | Err(StoreError::Unavailable(_)) => number += 1,
            Err(error) => {
                println!("x was refused: {error}");
                break;
            }
        }
    }
    if node == "x" {
        eventually("the test says go", || dir.join("go").exists().then_some(()));
    }
    session.shutdown();
}

struct Split {
    dir: tempfile::TempDir,
    endpoint: String,
}

impl Split {
    fn node(&self, name: &str) -> Launch {
        launch()
            .role("writes_the_meeting")
            .node_of(1, &self.endpoint, "split")
            .flag("--rdzv-conf", "is_host=false")
            .flag("--event-log-handler", self.events(name))
            .nproc(1)
            .env(NODE, name)
            .env(DIR, self.dir.path())
    }

    fn events(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.events"))
    }

    /// The assignments in which this node was rank 0: generation and name.
    fn assignments(&self, name: &str) -> BTreeSet<(u64, String)> {
        let text = std::fs::read_to_string(self.events(name)).expect("a log of events");
        let events = text
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
        events
            .filter(|event| event["event"] == "assigned" && event["node_rank"] == 0)
            .map(|event| {
                let id = event["assignment_id"]
                    .as_str()
                    .expect("each assignment has a name");
                (event["generation"].as_u64().expect("a number"), id.to_owned())
            })
            .collect()
    }

    fn release(&self) {
        std::fs::write(self.dir.path().join("go"), "").expect("writable");
    }
}

/// `x` runs generation 1 of the first daemon and is cut off; that daemon is dead, and the next one is up.
fn cut_off(state: &[&str]) -> (Split, Daemon, Running) {
    let daemon = Daemon::start_with("127.0.0.1:0", state);
    let split = Split {
        dir: temp_dir(),
        endpoint: daemon.endpoint.clone(),
    };
    let mut x = split.node("x").start();
    x.wait_for("x wrote: Ok(())");
    x.signal(Signal::SIGSTOP);
    daemon.kill();
    let daemon = Daemon::start_with(&split.endpoint, state);
    (split, daemon, x)
}

#[test]
fn a_daemon_with_a_ledger_waits_for_a_node_that_is_cut_off() {
    let state = temp_dir();
    let flags = ["--state-dir", state.path().to_str().expect("unicode")];
    let (split, mut daemon, mut x) = cut_off(&flags);
    let y = split.node("y").start();
    daemon.wait_for("` joined from ");
    x.signal(Signal::SIGCONT);
    x.wait_for("the workers continue without a restart");
    split.release();
    x.finish().expect_exit(0);
    let y = y.finish();
    y.expect_exit(0);
    y.expect_no_stderr("is rank 0");
    daemon.stop().expect_exit(0);
    assert_eq!(split.assignments("x").len(), 1);
    assert!(split.assignments("y").is_empty());
}

#[test]
fn a_node_that_stays_away_for_longer_is_gone_and_its_number_is_not_used_again() {
    let state = temp_dir();
    let dir = state.path().to_str().expect("unicode");
    let wait = ["--reattach-wait", "0.5", "--outage-timeout", "3"];
    let (split, daemon, mut x) = cut_off(&[&["--state-dir", dir][..], &wait].concat());
    let mut y = split.node("y").start();
    y.wait_for("y is rank 0");
    x.signal(Signal::SIGCONT);
    x.wait_for("was unreachable for longer than its lease");
    split.release();
    y.finish().expect_exit(0).expect_stdout("y wrote: Ok(())");
    x.finish().expect_exit(0);
    daemon.stop().expect_exit(0);
    assert_eq!(
        split.assignments("y").first().map(|(generation, _)| *generation),
        Some(2)
    );
}

#[test]
fn two_daemons_of_one_state_directory_and_a_damaged_ledger_are_one_clear_message() {
    let state = temp_dir();
    let flags = ["--state-dir", state.path().to_str().expect("unicode")];
    let daemon = Daemon::start_with("127.0.0.1:0", &flags);
    let second = || {
        let args = ["serve", "--listen", "127.0.0.1:0"].into_iter().chain(flags);
        ddp_rendezvous().args(args).run()
    };
    second()
        .expect_exit(73)
        .expect_stderr("another daemon uses the state in");
    daemon.stop().expect_exit(0);
    std::fs::write(state.path().join("ledger"), "not a ledger\n").expect("writable");
    second()
        .expect_exit(65)
        .expect_stderr("line 1 of `")
        .expect_stderr("` is damaged");
}

#[test]
fn a_node_that_was_cut_off_does_not_write_into_the_next_nodes_store() {
    let (split, daemon, mut x) = cut_off(&[]);
    let mut y = split.node("y").start();
    y.wait_for("y is rank 0");
    x.signal(Signal::SIGCONT);
    x.wait_for("has assigned generation 1 anew");
    split.release();
    y.finish().expect_exit(0).expect_stdout("y wrote: Ok(())");
    let x = x.finish();
    x.expect_exit(0).expect_stdout("x was refused: ");
    daemon.stop().expect_exit(0);
    let (of_x, of_y) = (split.assignments("x"), split.assignments("y"));
    let generation = |assignments: &BTreeSet<(u64, String)>| -> Vec<u64> {
        assignments.iter().map(|(generation, _)| *generation).collect()
    };
    assert_eq!((generation(&of_x), generation(&of_y)), (vec![1], vec![1]));
    assert!(of_x.is_disjoint(&of_y), "one rank 0 each: {of_x:?}, {of_y:?}");
}
