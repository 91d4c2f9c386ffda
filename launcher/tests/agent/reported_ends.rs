//! How the workers of a node ended: reported before a restart. What all nodes know comes with the verdict.

use ddp_proto::rendezvous::agent_message::Body as Report;
use ddp_proto::rendezvous::{Failure, NodeStopped, WorkerExit};

use crate::daemon::{Daemon, Policy};
use crate::harness::{Meeting, launch};

fn expect_stopped(daemon: &Daemon) -> NodeStopped {
    daemon.expect("how its workers ended", |message| match message.body {
        Some(Report::NodeStopped(stopped)) => Some(stopped),
        _ => None,
    })
}

#[test]
fn all_ends_are_reported_before_a_restart() {
    let (daemon, meeting) = (Daemon::start(), Meeting::new());
    // Rank 1 is killed, then rank 0 says that it follows from that.
    let _launcher = launch(&daemon)
        .workers(2)
        .max_restarts(1)
        .meet(&meeting)
        .role("sibling_dies")
        .native()
        .start();
    let stopped = expect_stopped(&daemon);
    let [first, second] = &stopped.exits[..] else {
        panic!("two ends, not {stopped:?}")
    };
    assert_eq!((first.rank, first.signal, first.consequence), (1, Some(9), false));
    assert_eq!(
        (second.rank, second.exit_code, second.consequence),
        (0, Some(1), true)
    );
    assert_eq!(second.message, "all-reduce 17 failed");
    assert!(first.age_ns > second.age_ns && second.age_ns > 0);
    for exit in &stopped.exits {
        assert!(exit.unix_time_ns > 0 && exit.pid > 0, "{exit:?}");
        assert_eq!((exit.stopped_with, exit.stderr_tail.len()), (None, 0));
    }
}

#[test]
fn workers_that_were_stopped_are_reported_as_such() {
    let (daemon, meeting) = (Daemon::start(), Meeting::new());
    let script = r#"[ "$TORCHELASTIC_RESTART_COUNT" = 0 ] || exit 0
        if [ "$RANK" = 0 ]; then : >"$FIFO"; exec tail -f /dev/null; fi
        cat "$FIFO"; exit 42"#;
    let launcher = launch(&daemon)
        .workers(2)
        .max_restarts(1)
        .meet(&meeting)
        .sh(script)
        .start();
    let stopped = expect_stopped(&daemon);
    let told: Vec<_> = stopped
        .exits
        .iter()
        .map(|exit| (exit.rank, exit.exit_code, exit.signal, exit.stopped_with))
        .collect();
    assert_eq!(told, [(1, Some(42), None, None), (0, None, Some(15), Some(15))]);
    assert_eq!(launcher.wait().code, 0);
}

#[test]
fn the_verdict_brings_the_failures_of_all_nodes_and_ends_the_launch() {
    let other = WorkerExit {
        rank: 7,
        exit_code: Some(9),
        ..WorkerExit::default()
    };
    let daemon = Daemon::with(Policy {
        failures: vec![Failure {
            generation: 1,
            hostname: "elsewhere".into(),
            exit: Some(other),
            happened_ns: 500_000_000,
            ..Failure::default()
        }],
        ..Policy::default()
    });
    let logs = tempfile::tempdir().unwrap();
    let end = launch(&daemon).log_dir(logs.path()).sh("exit 7").run();
    end.expect_code(7);
    let line = "  rank 7 (node `elsewhere`): exited with code 9 (0.5 s later)\n";
    end.expect_stderr(line);
    let text = std::fs::read(logs.path().join("error.json")).unwrap();
    let value: serde_json::Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(value["failures"][0]["rank"], 0);
    assert_eq!(value["failures"][1]["node"], "elsewhere");
    assert_eq!(value["failures"][1]["rank"], 7);
    assert_eq!(value["first_failure"]["rank"], 0);
    let reports = daemon.received().into_iter().filter_map(|message| message.body);
    let stopped = reports.filter(|report| matches!(report, Report::NodeStopped(_)));
    assert_eq!(stopped.count(), 0, "the daemon has said all");
}

#[test]
fn what_this_node_knows_itself_is_reported_if_the_daemon_tells_no_failures() {
    let daemon = Daemon::start();
    let logs = tempfile::tempdir().unwrap();
    let end = launch(&daemon).log_dir(logs.path()).sh("exit 7").run();
    end.expect_code(7);
    let text = std::fs::read(logs.path().join("error.json")).unwrap();
    let value: serde_json::Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(value["failures"][0]["exit_code"], 7);
}
