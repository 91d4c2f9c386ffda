//! The end of a job that failed: this node's report on all of its workers, and the daemon's last word.

use ddp_proto::rendezvous::agent_message::Body as Report;
use ddp_proto::rendezvous::daemon_message::Body as Word;
use ddp_proto::rendezvous::{Failure, Failures, NodeStopped, WorkerExit};

use crate::daemon::{Daemon, Policy};
use crate::harness::{Meeting, launch};

fn expect_stopped(daemon: &Daemon) -> NodeStopped {
    daemon.expect("how its workers ended", |message| match message.body {
        Some(Report::NodeStopped(stopped)) => Some(stopped),
        _ => None,
    })
}

fn announcing() -> Daemon {
    Daemon::start(Policy {
        last_word_ms: 1000,
        ..Policy::default()
    })
}

#[test]
fn all_ends_are_reported_and_the_last_word_is_passed_on() {
    let daemon = announcing();
    let (meeting, logs) = (Meeting::new(), tempfile::tempdir().unwrap());
    // Rank 1 is killed, then rank 0 says that it follows from that.
    let launcher = launch(&daemon)
        .workers(2)
        .log_dir(logs.path())
        .env("FIFO", &meeting.fifo)
        .role("role_sibling_dies")
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

    let failure = |hostname: &str, exit: WorkerExit, happened_ns| Failure {
        generation: 1,
        hostname: hostname.into(),
        exit: Some(exit),
        happened_ns,
        ..Failure::default()
    };
    let other = WorkerExit {
        rank: 7,
        exit_code: Some(9),
        ..WorkerExit::default()
    };
    daemon.say(Word::LastWord(Failures {
        failures: vec![
            failure("here", first.clone(), 0),
            failure("elsewhere", other, 500_000_000),
        ],
        ..Failures::default()
    }));
    let end = launcher.wait();
    assert_eq!(end.code, 137);
    let line = "  rank 7 (node `elsewhere`): exited with code 9 (0.5 s later)\n";
    assert!(end.stderr.contains(line), "{}", end.stderr);
    let text = std::fs::read(logs.path().join("error.json")).unwrap();
    let value: serde_json::Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(value["failures"][0]["rank"], 1);
    assert_eq!(value["failures"][1]["node"], "elsewhere");
    assert_eq!(value["failures"][1]["rank"], 7);
    assert_eq!(value["first_failure"]["rank"], 1);
}

#[test]
fn workers_that_were_stopped_are_reported_as_such() {
    let daemon = announcing();
    let meeting = Meeting::new();
    let script = r#"if [ "$RANK" = 0 ]; then : >"$FIFO"; exec tail -f /dev/null; fi
        cat "$FIFO"; exit 42"#;
    let launcher = launch(&daemon)
        .workers(2)
        .env("FIFO", &meeting.fifo)
        .sh(script)
        .start();
    let stopped = expect_stopped(&daemon);
    let told: Vec<_> = stopped
        .exits
        .iter()
        .map(|exit| (exit.rank, exit.exit_code, exit.signal, exit.stopped_with))
        .collect();
    assert_eq!(told, [(1, Some(42), None, None), (0, None, Some(15), Some(15))]);
    daemon.say(Word::LastWord(Failures::default()));
    assert_eq!(launcher.wait().code, 42);
}

#[test]
fn a_daemon_that_never_says_its_last_word_is_waited_for_in_vain_but_not_long() {
    let daemon = Daemon::start(Policy {
        last_word_ms: u32::MAX,
        ..Policy::default()
    });
    let logs = tempfile::tempdir().unwrap();
    let end = launch(&daemon).log_dir(logs.path()).sh("exit 7").start().wait();
    assert_eq!(end.code, 7, "{}", end.stderr);
    let text = std::fs::read(logs.path().join("error.json")).unwrap();
    let value: serde_json::Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(
        value["failures"][0]["exit_code"], 7,
        "what this node knows itself"
    );
}

#[test]
fn a_restart_tells_how_the_workers_of_the_last_generation_ended() {
    let daemon = announcing();
    let launcher = launch(&daemon)
        .max_restarts(1)
        .sh(r#"[ "$TORCHELASTIC_RESTART_COUNT" = 1 ] || exit 5"#)
        .start();
    let stopped = expect_stopped(&daemon);
    assert_eq!(stopped.exits[0].exit_code, Some(5));
    assert_eq!(launcher.wait().code, 0);
}
