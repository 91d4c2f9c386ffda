//! How a launch ends, told by its exit code and its report.

use std::os::unix::fs::PermissionsExt;

use ddp_proto::rendezvous::agent_message::Body as Report;
use ddp_proto::rendezvous::refused::Code;
use ddp_proto::rendezvous::{Join, Refused};

use crate::daemon::{Daemon, Policy};
use crate::harness::{Meeting, launch};

#[test]
fn success_says_little() {
    let daemon = Daemon::start();
    let end = launch(&daemon).workers(8).run();
    let lines: Vec<&str> = end.stderr.lines().collect();
    let [begin, finish] = lines[..] else {
        panic!("two lines: {lines:?}")
    };
    assert!(
        begin.contains(": ranks 0 to 7; pids ") && finish.contains("finished in 0:"),
        "{lines:?}"
    );
    assert_eq!(end.code, 0);
}

#[test]
fn the_exit_code_of_the_first_failure_is_passed_on() {
    let daemon = Daemon::start();
    let meeting = Meeting::new();
    // Rank 1 fails when rank 0 runs.
    let script = r#"if [ "$RANK" = 0 ]; then : >"$FIFO"; exec tail -f /dev/null; fi
        cat "$FIFO"; echo "no such file" >&2; exit 42"#;
    let end = launch(&daemon).workers(2).meet(&meeting).sh(script).run();
    end.expect_code(42);
    end.expect_stderr("first failure: rank 1");
    end.expect_stderr("exited with code 42");
    end.expect_stderr("      no such file");
    end.expect_stderr("rank 0: terminated by ddp-run (SIGTERM)");
    let exit = daemon.expect("a worker's exit", |message| match message.body {
        Some(Report::WorkerExit(exit)) => Some(exit),
        _ => None,
    });
    assert_eq!((exit.rank, exit.exit_code, exit.signal), (1, Some(42), None));
    assert_eq!(exit.stderr_tail, ["no such file"]);
}

#[test]
fn a_signal_is_named_and_counted_as_shells_do() {
    let daemon = Daemon::start();
    let end = launch(&daemon).sh("kill -9 $$").run();
    end.expect_code(137);
    end.expect_stderr("died of SIGKILL");
    end.expect_stderr("not sent by ddp-run");
}

#[test]
fn rank_0_may_end_long_before_the_others() {
    let daemon = Daemon::start();
    let meeting = Meeting::new();
    // Rank 1 ends when rank 0 is gone: no process has the pipe open for writing any more.
    let script = r#"if [ "$RANK" = 0 ]; then exec 3>"$FIFO"; exit 0; fi; cat "$FIFO"; echo last"#;
    let end = launch(&daemon).workers(2).meet(&meeting).sh(script).run();
    end.expect_code(0);
    end.expect_stdout("[1] last");
}

#[test]
fn a_failure_begins_the_next_generation() {
    let daemon = Daemon::start();
    let logs = tempfile::tempdir().unwrap();
    let script = r#"echo "count $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS in $DDP_GENERATION"
        [ "$TORCHELASTIC_RESTART_COUNT" = 2 ] || exit 5"#;
    let launch = launch(&daemon).max_restarts(3).log_dir(logs.path()).sh(script);
    let end = launch.run();
    end.expect_code(0);
    for (attempt, generation) in [(0, 1), (1, 2), (2, 3)] {
        let line = format!("count {attempt} of 3 in {generation}");
        end.expect_stdout(format!("[0] {line}"));
        let log = logs.path().join(format!("attempt_{attempt}/0/stdout.log"));
        assert_eq!(std::fs::read_to_string(log).unwrap().trim(), line);
    }
    let joins = |message| match message {
        Some(Report::Join(Join { master_port, .. })) => Some(master_port),
        _ => None,
    };
    let received = daemon.received();
    let ports: Vec<u32> = received
        .iter()
        .filter_map(|message| joins(message.body.clone()))
        .collect();
    assert_eq!(ports.len(), 3);
    assert!(ports.iter().all(|port| *port > 1024), "{ports:?}");
}

#[test]
fn when_the_budget_is_used_up_the_code_is_passed_on() {
    let daemon = Daemon::start();
    let end = launch(&daemon).max_restarts(2).sh("exit 7").run();
    end.expect_code(7);
    end.expect_stderr("(2/2)");
}

#[test]
fn a_missing_program_is_one_clear_message() {
    let daemon = Daemon::start();
    let end = launch(&daemon)
        .program("no-such-program", &[])
        .max_restarts(3)
        .run();
    end.expect_code(127);
    insta::assert_snapshot!(end.stderr, @r"
    [ddp-run] error: program `no-such-program` was not found
    [ddp-run]   hint: give a path, such as `./train.py`, or a name that is in `PATH`
    ");
    assert!(daemon.received().is_empty(), "it joined");
}

#[test]
fn a_program_that_cannot_be_executed_costs_no_restart() {
    let daemon = Daemon::start();
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("script");
    std::fs::write(&script, "#!/etc/passwd\n").unwrap();
    std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
    let end = launch(&daemon)
        .workers(2)
        .max_restarts(3)
        .program(script, &[])
        .run();
    end.expect_code(126);
    let received = daemon.received();
    assert!(
        !received
            .iter()
            .any(|message| matches!(message.body, Some(Report::WorkerExit(_)))),
        "{received:?}"
    );
    assert!(
        received
            .iter()
            .any(|message| matches!(message.body, Some(Report::Leave(_)))),
        "{received:?}"
    );
}

#[test]
fn a_refusal_has_the_code_of_its_reason() {
    let cases = [
        (Code::Disagree, 76),
        (Code::TimedOut, 75),
        (Code::Invalid, 2),
        (Code::JobOver, 75),
    ];
    for (code, exit_code) in cases {
        let refused = Refused {
            code: code.into(),
            reason: "nodes `a` and `b` run different programs".into(),
            ..Refused::default()
        };
        let daemon = Daemon::with(Policy {
            refuses: Some(refused),
            ..Policy::default()
        });
        let end = launch(&daemon).run();
        end.expect_code(exit_code);
        assert_eq!(
            end.stderr,
            "[ddp-run] error: nodes `a` and `b` run different programs\n"
        );
    }
}

#[test]
fn a_missing_interpreter_is_noticed_before_the_node_joins() {
    let daemon = Daemon::start();
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("script");
    std::fs::write(&script, "#!/dev/null/interpreter\n").unwrap();
    std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
    let end = launch(&daemon).program(script, &[]).run();
    end.expect_code(127);
    let words = "its interpreter `/dev/null/interpreter` was not found";
    end.expect_stderr(words);
    assert!(daemon.received().is_empty(), "it joined");
}
