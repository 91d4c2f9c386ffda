use std::time::Duration;

use ddp_proto::ids::Generation;
use ddp_proto::rendezvous::{Failure, Failures, NodeStopped};

use super::*;
use crate::report::facts::LocalEnd;
use crate::spawn::program::SpawnError;

const KILLED: Ending = Ending::Signal {
    signal: 9,
    core_dumped: false,
};
const TERMINATED: Ending = Ending::Signal {
    signal: 15,
    core_dumped: false,
};
const INTERRUPTED: Ending = Ending::Signal {
    signal: 2,
    core_dumped: false,
};

fn failure(rank: u32, ending: Ending) -> WorkerExit {
    let (exit_code, signal, core_dumped) = match ending {
        Ending::Code(code) => (Some(code), None, false),
        Ending::Signal { signal, core_dumped } => (None, Some(signal), core_dumped),
    };
    WorkerExit {
        rank,
        local_rank: rank % 2,
        pid: 4711,
        exit_code,
        signal,
        core_dumped,
        unix_time_ns: 1_700_000_000_000_000_000,
        ..WorkerExit::default()
    }
}

fn job_over(no_restart: &str, failure: WorkerExit, host: &str) -> ExitReason {
    ExitReason::JobOver {
        exit_code: 1,
        reason: "the daemon's words".into(),
        no_restart: no_restart.into(),
        first_failure: Some(Box::new((failure, host.into()))),
        signal: None,
    }
}

fn end(rank: u32, ending: Ending, sent: Option<i32>, after_ms: u64) -> LocalEnd {
    LocalEnd {
        rank: GlobalRank(rank),
        ending,
        sent,
        after: Some(Duration::from_millis(after_ms)),
        message: None,
        consequence: false,
    }
}

fn text(exit_reason: &ExitReason, local_ends: &[LocalEnd], local_failure: Option<&WorkerExit>) -> String {
    text_of_many(exit_reason, local_ends, local_failure, &Failures::default())
}

fn text_of_many(
    exit_reason: &ExitReason,
    local_ends: &[LocalEnd],
    local_failure: Option<&WorkerExit>,
    failures: &Failures,
) -> String {
    let facts = ReportFacts {
        job_id: "job".into(),
        exit_reason: exit_reason.clone(),
        program: "train.yaml".into(),
        executable: "/opt/venv/bin/python3".into(),
        hostname: "a".into(),
        output_unseen: false,
        local_failure: local_failure.cloned(),
        local_ends: local_ends.to_vec(),
        stopped: NodeStopped::default(),
        failures: failures.clone(),
        generation: Generation(2),
        ran_for: Some(Duration::from_millis(12_340)),
        worker_file: None,
    };
    report(&facts).unwrap_or_default()
}

#[test]
fn what_is_said_once_is_not_repeated() {
    let mut exit = failure(0, Ending::Code(2));
    exit.message = "`out` already holds a run\nhint: take another".into();
    exit.stderr_tail = vec![
        "error: `out` already holds a run".into(),
        "  hint: take another".into(),
    ];
    let mut follower = end(1, Ending::Code(1), None, 40);
    follower.message =
        Some("rank 1 stopped: the launcher stopped the workers: rank 0 (node `a`) exited with code 2".into());
    follower.consequence = true;
    let exit_reason = job_over("", exit, "a");
    insta::assert_snapshot!(text(&exit_reason, &[end(0, Ending::Code(2), None, 0), follower], None), @r"
    error: `train.yaml` failed
      first failure: rank 0 (node `a`, pid 4711) exited with code 2 after 12.3 s at 22:13:20 UTC
        message: `out` already holds a run
                 hint: take another
      rank 1: exited with code 1 as a consequence (0.0 s later)
    ");
}

#[test]
fn ranks_that_fail_alike_are_told_without_their_words() {
    let words = "`step_00000017` is damaged\nhint: restore it";
    let mut exit = failure(0, Ending::Code(2));
    exit.message = words.into();
    exit.stderr_tail = words.lines().map(str::to_owned).collect();
    let mut alike = end(1, Ending::Code(2), None, 40);
    alike.message = Some(words.into());
    let exit_reason = job_over("", exit, "a");
    let text = text(&exit_reason, &[end(0, Ending::Code(2), None, 0), alike], None);
    assert_eq!(text.matches("is damaged").count(), 1, "{text}");
    assert!(
        text.ends_with("\n  rank 1: also exited with code 2 with the same error (0.0 s later)"),
        "{text}"
    );
}

#[test]
fn a_worker_that_exits_by_itself_is_not_said_to_be_killed_too() {
    let mut exit = failure(1, Ending::Code(2));
    exit.message = "unknown key".into();
    let mut alike = end(0, Ending::Code(2), Some(9), 0);
    alike.message = Some("unknown key".into());
    let mut asked = end(2, Ending::Code(2), Some(15), 0);
    asked.message = Some("unknown key".into());
    let ends = [
        alike,
        end(1, Ending::Code(2), None, 0),
        asked,
        end(3, Ending::Code(7), Some(9), 40),
    ];
    let text = text(&job_over("", exit, "a"), &ends, None);
    assert!(
        text.ends_with(
            "\n  ranks 0, 2: also exited with code 2 with the same error (0.0 s later)\
             \n  rank 3: exited with code 7 (0.0 s later)"
        ),
        "{text}"
    );
}

#[test]
fn a_module_that_is_missing_is_told_with_the_interpreter_of_this_node() {
    let mut exit = failure(0, Ending::Code(1));
    exit.stderr_tail = vec!["ModuleNotFoundError: No module named 'torch'".into()];
    insta::assert_snapshot!(text(&job_over("", exit.clone(), "a"), &[], None), @r"
    error: `train.yaml` failed
      first failure: rank 0 (node `a`, pid 4711) exited with code 1 after 12.3 s at 22:13:20 UTC
        last lines of stderr:
          ModuleNotFoundError: No module named 'torch'
        hint: the interpreter was `/opt/venv/bin/python3`: install the module there, or choose a different interpreter with PYTHON_EXEC or by activating its environment
    ");
    let elsewhere = text(&job_over("", exit.clone(), "b"), &[], None);
    assert!(
        !elsewhere.contains("hint"),
        "node `b` tells of its own: {elsewhere}"
    );
    exit.stderr_tail = vec!["ModuleNotFoundError: No module named 'ddp_run'".into()];
    insta::assert_snapshot!(text(&job_over("", exit, "a"), &[], None), @r"
    error: `train.yaml` failed
      first failure: rank 0 (node `a`, pid 4711) exited with code 1 after 12.3 s at 22:13:20 UTC
        last lines of stderr:
          ModuleNotFoundError: No module named 'ddp_run'
        hint: the interpreter was `/opt/venv/bin/python3`: install the wheel of ddp-run there, which contains this module, or set PYTHONPATH=<repository>/python
    ");
}

#[test]
fn an_exit_code_with_its_last_words_and_its_victims() {
    let mut exit = failure(1, Ending::Code(42));
    exit.stderr_tail = vec![
        "Traceback (most recent call last):".into(),
        "ValueError: no data".into(),
    ];
    exit.message = "ValueError: no data".into();
    exit.log_file = "logs/attempt_0/1/stderr.log".into();
    let mut by_itself = end(2, Ending::Code(1), None, 40);
    by_itself.message = Some("all-reduce 17 failed: rank 1 is gone".into());
    let ends = [
        end(0, TERMINATED, Some(15), 1_040),
        end(1, Ending::Code(42), None, 0),
        by_itself,
        end(3, Ending::Code(143), Some(15), 1_100),
        end(4, KILLED, Some(9), 31_000),
        end(5, Ending::Code(0), Some(15), 1_100),
        end(6, KILLED, Some(15), 1_200),
    ];
    insta::assert_snapshot!(text(&job_over("", exit, "a"), &ends, None), @r"
    error: `train.yaml` failed
      first failure: rank 1 (node `a`, pid 4711) exited with code 42 after 12.3 s at 22:13:20 UTC
        message: ValueError: no data
        log file: logs/attempt_0/1/stderr.log
        last lines of stderr:
          Traceback (most recent call last):
          ValueError: no data
      rank 0: terminated by ddp-run (SIGTERM), 1.0 s later
      rank 2: exited with code 1 (0.0 s later): all-reduce 17 failed: rank 1 is gone
      rank 3: terminated by ddp-run (SIGTERM), exited with code 143, 1.1 s later
      rank 4: terminated by ddp-run (SIGKILL), 31.0 s later
      rank 6: died of SIGKILL after ddp-run sent SIGTERM, 1.2 s later
    ");
}

#[test]
fn sigkill_was_not_sent_by_us() {
    let exit_reason = job_over("no restarts left (3/3 used)", failure(0, KILLED), "a");
    insta::assert_snapshot!(text(&exit_reason, &[], None), @r"
    error: `train.yaml` failed; no restarts left (3/3 used)
      first failure: rank 0 (node `a`, pid 4711) died of SIGKILL after 12.3 s at 22:13:20 UTC
        not sent by ddp-run: the kernel's OOM killer (see `dmesg`), or a `kill -9` by a person or program
        no output on stderr
    ");
}

#[test]
fn whatever_the_daemon_says_of_restarts_is_shown() {
    for why in [
        "a restart cannot help",
        "the last 5 starts failed within 5 s each, without progress",
    ] {
        let text = text(&job_over(why, failure(0, Ending::Code(3)), "a"), &[], None);
        assert!(
            text.starts_with(&format!("error: `train.yaml` failed; {why}\n  first failure: ")),
            "{text}"
        );
    }
}

#[test]
fn a_sigkill_while_the_oom_killer_struck() {
    let mut exit = failure(0, KILLED);
    exit.out_of_memory = true;
    let exit_reason = job_over("", exit, "a");
    insta::assert_snapshot!(text(&exit_reason, &[], None), @r"
    error: `train.yaml` failed
      first failure: rank 0 (node `a`, pid 4711) died of SIGKILL after 12.3 s at 22:13:20 UTC
        possibly out of memory: the kernel's OOM killer killed a process of this control group at that time
        no output on stderr
    ");
}

#[test]
fn a_crash_on_another_node() {
    let crash = Ending::Signal {
        signal: 11,
        core_dumped: true,
    };
    let mut exit = failure(7, crash);
    exit.log_file = "/logs/attempt_0/7/stderr.log".into();
    let exit_reason = job_over("", exit, "b");
    insta::assert_snapshot!(text(&exit_reason, &[end(0, TERMINATED, Some(15), 200)], None), @r"
    error: `train.yaml` failed
      first failure: rank 7 (node `b`, pid 4711) died of SIGSEGV (core dumped) at 22:13:20 UTC by that node's clock
        the program crashed
        log file on `b`: /logs/attempt_0/7/stderr.log
        no output on stderr
      rank 0: terminated by ddp-run (SIGTERM), 0.2 s later
    ");
}

#[test]
fn a_job_that_ended_without_a_failed_worker() {
    let exit_reason = ExitReason::JobOver {
        exit_code: 143,
        reason: "node `b` was stopped by SIGTERM".into(),
        no_restart: String::new(),
        first_failure: None,
        signal: Some(15),
    };
    insta::assert_snapshot!(text(&exit_reason, &[end(0, TERMINATED, Some(15), 200)], None), @r"
    node `b` was stopped by SIGTERM
      rank 0: terminated by ddp-run (SIGTERM), 0.2 s later
    ");
}

#[test]
fn stopped_by_a_signal() {
    let ends = [
        end(0, Ending::Code(0), None, 100),
        end(1, KILLED, Some(9), 61_000),
        end(2, INTERRUPTED, Some(2), 100),
        // SIGKILL was on its way too.
        end(3, INTERRUPTED, Some(9), 100),
    ];
    insta::assert_snapshot!(text(&ExitReason::Stopped { signal: 2 }, &ends, None), @r"
    stopped by SIGINT
      rank 1: terminated by ddp-run (SIGKILL), 1 min 1 s later
      ranks 2, 3: terminated by ddp-run (SIGINT), 0.1 s later
    ");
}

#[test]
fn sixty_four_ranks_are_told_in_a_few_lines() {
    let mut ends: Vec<_> = (0..64)
        .map(|rank| end(rank, TERMINATED, Some(15), u64::from(rank) * 5))
        .collect();
    ends[41] = end(41, Ending::Code(42), None, 0);
    ends[7] = end(7, KILLED, Some(9), 30_100);
    for rank in [9, 11] {
        ends[rank].ending = Ending::Code(143);
    }
    for (rank, words) in [
        (20, "all-reduce 17 failed"),
        (22, "no more data"),
        (23, "all-reduce 17 failed"),
    ] {
        ends[rank as usize] = end(rank, Ending::Code(1), None, 40);
        ends[rank as usize].message = Some(words.into());
    }
    for rank in 50..53_u32 {
        ends[rank as usize] = LocalEnd {
            consequence: true,
            message: Some(format!("rank {rank} stopped: rank 41 is gone")),
            ..end(rank, Ending::Code(1), None, 10 * u64::from(rank))
        };
    }
    insta::assert_snapshot!(text(&job_over("", failure(41, Ending::Code(42)), "a"), &ends, None), @r"
    error: `train.yaml` failed
      first failure: rank 41 (node `a`, pid 4711) exited with code 42 after 12.3 s at 22:13:20 UTC
        no output on stderr
      ranks 0 to 6, 8, 10, 12 to 19, 21, 24 to 40, 42 to 49, 53 to 63: terminated by ddp-run (SIGTERM), 0.0 to 0.3 s later
      rank 7: terminated by ddp-run (SIGKILL), 30.1 s later
      ranks 9, 11: terminated by ddp-run (SIGTERM), exited with code 143, 0.0 to 0.1 s later
      ranks 20, 23: exited with code 1 (0.0 s later): all-reduce 17 failed
      rank 22: exited with code 1 (0.0 s later): no more data
      ranks 50 to 52: exited with code 1 as a consequence (0.5 s later)
    ");
}

#[test]
fn a_daemon_that_is_gone_after_a_failure() {
    let exit_reason = ExitReason::DaemonGone {
        exit_code: 69,
        error: "cannot reach the rendezvous at `node0:29400`".into(),
    };
    let exit = failure(1, Ending::Code(3));
    insta::assert_snapshot!(text(&exit_reason, &[], Some(&exit)), @r"
    error: cannot reach the rendezvous at `node0:29400`
    earlier, on this node:
      first failure: rank 1 (node `a`, pid 4711) exited with code 3 after 12.3 s at 22:13:20 UTC
        no output on stderr
    ");
}

#[test]
fn errors_before_any_worker() {
    let refused = ExitReason::Refused {
        exit_code: 76,
        reason: "nodes `a` and `b` run different programs".into(),
    };
    assert_eq!(
        text(&refused, &[], None),
        "error: nodes `a` and `b` run different programs"
    );
    let missing = ExitReason::CannotStart(SpawnError::NotFound {
        program: "x".into(),
        hint: "look".into(),
    });
    assert!(text(&missing, &[], None).starts_with("error: program `x` was not found\n  hint: "));
    assert_eq!(text(&ExitReason::Succeeded, &[], None), "");
}

/// As the daemon lists it, `after_ms` after the first.
fn listed(generation: u64, host: &str, exit: WorkerExit, after_ms: i64) -> Failure {
    Failure {
        generation,
        hostname: host.into(),
        exit: Some(exit),
        happened_ns: after_ms * 1_000_000,
        ..Failure::default()
    }
}

#[test]
fn later_failures_of_other_nodes_are_told_in_a_line_each() {
    let first = failure(5, Ending::Code(42));
    let follower = WorkerExit {
        consequence: true,
        ..failure(4, Ending::Code(1))
    };
    let victim = WorkerExit {
        stopped_with: Some(15),
        ..failure(7, TERMINATED)
    };
    let failures = Failures {
        failures: vec![
            listed(1, "b", failure(3, Ending::Code(9)), 0),
            listed(2, "c", failure(6, KILLED), 59_900),
            listed(2, "b", first.clone(), 60_000),
            listed(2, "a", failure(0, Ending::Code(1)), 60_100),
            listed(2, "b", follower, 60_300),
            listed(2, "b", victim, 60_400),
            Failure {
                generation: 2,
                hostname: "d".into(),
                node_gone: "node `d` (node rank 3) was lost: no heartbeat for 9.0 s".into(),
                happened_ns: 68_000_000_000,
                ..Failure::default()
            },
        ],
        ..Failures::default()
    };
    let here = [
        end(0, Ending::Code(1), None, 100),
        end(1, TERMINATED, Some(15), 200),
    ];
    let exit_reason = job_over("", first, "b");
    insta::assert_snapshot!(text_of_many(&exit_reason, &here, None, &failures), @r"
    error: `train.yaml` failed
      first failure: rank 5 (node `b`, pid 4711) exited with code 42 at 22:13:20 UTC by that node's clock
        no output on stderr
      rank 0: exited with code 1 (0.1 s later)
      rank 1: terminated by ddp-run (SIGTERM), 0.2 s later
      rank 6 (node `c`): died of SIGKILL (0.1 s earlier)
      rank 4 (node `b`): exited with code 1 as a consequence (0.3 s later)
      node `d` (node rank 3) was lost: no heartbeat for 9.0 s (8.0 s later)
      earlier, before a restart: rank 3 (node `b`) exited with code 9
    ");
}

#[test]
fn the_first_failure_of_the_job_is_told_in_a_line_if_another_one_ended_it() {
    let cause = WorkerExit {
        message: "CUDA out of memory\nhint: less".into(),
        log_file: "logs/attempt_0/1/stderr.log".into(),
        ..failure(1, Ending::Code(42))
    };
    let effect = WorkerExit {
        consequence: true,
        ..failure(0, Ending::Code(1))
    };
    let last = failure(0, Ending::Code(3));
    let failures = Failures {
        failures: vec![
            listed(0, "a", effect, 0),
            listed(0, "b", cause, 10),
            listed(1, "a", last.clone(), 1_000),
            listed(2, "a", last.clone(), 2_000),
        ],
        ..Failures::default()
    };
    insta::assert_snapshot!(text_of_many(&job_over("", last, "a"), &[], None, &failures), @r"
    error: `train.yaml` failed
      first failure: rank 0 (node `a`, pid 4711) exited with code 3 after 12.3 s at 22:13:20 UTC
        no output on stderr
      earlier, before a restart: rank 1 (node `b`) exited with code 42: CUDA out of memory; log file: logs/attempt_0/1/stderr.log
    ");
}

/// The report where node `b` has so many failures in the list, of which the first decided, and the list lacks so many
/// more.
fn text_of_node_b(in_list: u32, more_failures: u32) -> String {
    let alike = |rank| listed(2, "b", failure(rank, Ending::Code(1)), i64::from(rank));
    let failures = Failures {
        failures: (0..in_list).map(alike).collect(),
        more_failures,
        more_victims: 7,
        ..Failures::default()
    };
    let first = job_over("", failure(0, Ending::Code(1)), "b");
    text_of_many(&first, &[], None, &failures)
}

#[test]
fn many_failures_of_other_nodes_are_counted() {
    let text = text_of_node_b(16, 0);
    assert_eq!(text.matches("(node `b`): exited").count(), 4, "{text}");
    assert!(text.ends_with("\n  and 11 more"), "{text}");
}

#[test]
fn failures_beyond_the_list_are_not_said_to_be_of_other_nodes() {
    let text = text_of_node_b(16, 100);
    assert!(text.ends_with("\n  and at least 11 more"), "{text}");
    let text = text_of_node_b(5, 100);
    assert!(!text.contains("more"), "{text}");
}

#[test]
fn a_lost_node_that_ended_the_job_is_told_once_and_others_are_its_consequences() {
    let gone = "node `b` (node rank 1) was lost: no heartbeat for 9.0 s";
    let exit_reason = ExitReason::JobOver {
        exit_code: 75,
        reason: format!("{gone}; no restarts left (3/3 used)"),
        no_restart: "no restarts left (3/3 used)".into(),
        first_failure: None,
        signal: None,
    };
    let follower = WorkerExit {
        consequence: true,
        ..failure(5, Ending::Code(1))
    };
    let failures = Failures {
        failures: vec![
            Failure {
                generation: 2,
                hostname: "b".into(),
                node_gone: gone.into(),
                ..Failure::default()
            },
            listed(2, "c", failure(4, Ending::Code(1)), 500),
            Failure {
                happened_ns: -8_000_000_000,
                ..listed(2, "c", follower, 0)
            },
        ],
        ..Failures::default()
    };
    let here = LocalEnd {
        after: None,
        message: Some("all-reduce 3 failed: lost rank 1".into()),
        consequence: true,
        ..end(0, Ending::Code(1), None, 0)
    };
    insta::assert_snapshot!(text_of_many(&exit_reason, &[here], None, &failures), @r"
    error: node `b` (node rank 1) was lost: no heartbeat for 9.0 s; no restarts left (3/3 used)
      rank 0: exited with code 1 as a consequence
      rank 4 (node `c`): exited with code 1 (0.5 s later)
      rank 5 (node `c`): exited with code 1 as a consequence
    ");
}

/// The ranks that failed only lost their connection to a rank that had ended.
#[test]
fn ranks_that_ended_with_0_before_the_others_failed_are_named() {
    let early = LocalEnd {
        after: None,
        ..end(1, Ending::Code(0), None, 0)
    };
    let ends = [
        end(0, Ending::Code(1), None, 0),
        early,
        end(2, Ending::Code(0), None, 40),
    ];
    let failures = Failures {
        succeeded_ranks: vec![4, 5],
        ..Failures::default()
    };
    let exit_reason = job_over("", failure(0, Ending::Code(1)), "a");
    insta::assert_snapshot!(text_of_many(&exit_reason, &ends, None, &failures), @r"
    error: `train.yaml` failed
      first failure: rank 0 (node `a`, pid 4711) exited with code 1 after 12.3 s at 22:13:20 UTC
        no output on stderr
      ranks 1, 4, 5: exited with code 0 before; ranks that wait for such a rank fail or hang
    ");
}
