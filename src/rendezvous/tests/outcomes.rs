//! Failures, restarts, lost nodes, signals, success.

use super::*;

#[test]
fn a_failure_ends_the_generation_everywhere_and_the_next_one_has_the_same_ranks() {
    let mut s = two_nodes();
    s.exit("b", 1, killed(3, 9));
    let over = s.words("a");
    insta::assert_snapshot!(over, @"generation 1 over: rank 3 (node `b`) died of SIGKILL (failure on `b`, restart 1/3, back-off 0 ms)");
    assert_eq!(s.words("b"), over);
    s.exit("a", 1, killed(0, 6));
    assert_eq!(
        s.words("a"),
        "",
        "the first failure counts, later ones follow from it"
    );

    s.rejoin("b", 1, 2, 2).rejoin("a", 1, 2, 2);
    insta::assert_snapshot!(s.words("a"), @"assignment 2: node rank 0 of 2, first rank 0, master 10.0.0.1:29500, restart 1/3: generation 2: all 2 nodes joined; node ranks kept from before");
    assert_eq!(s.assignment("b").1.node_rank, 1);
}

#[test]
fn the_second_failure_without_progress_is_followed_by_a_pause() {
    let mut s = two_nodes();
    s.exit("b", 1, killed(3, 9))
        .rejoin("b", 1, 2, 2)
        .rejoin("a", 1, 2, 2);
    s.words("a");
    s.exit("b", 2, killed(3, 9));
    insta::assert_snapshot!(s.words("a"), @"generation 2 over: rank 3 (node `b`) died of SIGKILL (failure on `b`, restart 2/3, back-off 100 ms)");
    s.rejoin("b", 2, 2, 2).rejoin("a", 2, 2, 2);
    insta::assert_snapshot!(s.words("a"), @"waiting: 2 of 2 nodes joined: `a`, `b`; pausing before the restart");
    s.pass(SECOND, &["a", "b"]);
    assert_eq!(s.state.status(s.now, JOB).unwrap().phase, "running");
}

/// A worker that says that another rank failed first.
fn follower(rank: u32) -> WorkerExit {
    WorkerExit {
        consequence: true,
        ..exited(rank, 1)
    }
}

#[test]
fn the_cause_is_named_though_its_consequence_is_reported_first() {
    let mut s = two_nodes();
    s.exit("a", 1, follower(0));
    assert_eq!(s.words("a"), "", "no rank is blamed yet");
    s.pass(SECOND / 10, &["a", "b"]).exit("b", 1, killed(3, 9));
    insta::assert_snapshot!(s.words("a"), @"generation 1 over: rank 3 (node `b`) died of SIGKILL (failure on `b`, restart 1/3, back-off 0 ms)");
    // The next generation knows nothing of the suspect.
    s.rejoin("b", 1, 2, 2).rejoin("a", 1, 2, 2);
    s.pass(2 * SECOND, &["a", "b"]);
    assert_eq!(s.state.status(s.now, JOB).unwrap().phase, "running");
}

#[test]
fn a_consequence_without_a_cause_ends_the_generation_in_the_end() {
    let mut s = two_nodes();
    s.exit("a", 1, follower(0));
    s.pass(SECOND / 10, &["a", "b"]).exit("b", 1, follower(2));
    s.pass(SECOND / 3, &["a", "b"]);
    assert_eq!(s.words("a"), "", "the first one's time is not over");
    s.pass(SECOND / 10, &["a", "b"]);
    insta::assert_snapshot!(s.words("a"), @"generation 1 over: rank 0 (node `a`) exited with code 1, reporting that another rank had failed (failure on `a`, restart 1/3, back-off 0 ms)");
}

#[test]
fn a_lost_node_is_the_cause_of_what_follows() {
    let mut s = two_nodes();
    s.exit("a", 1, follower(0)).leave("b", None, "out of memory");
    let words = s.words("a");
    assert!(
        words.contains("node `b`") && words.contains("out of memory"),
        "{words}"
    );
}

#[test]
fn a_consequence_waits_for_a_node_that_is_away_and_a_lost_one_costs_no_restart() {
    let mut s = Scene::new();
    s.join("a", 1, 2).join("b", 1, 2).words("a");
    s.exit("a", 1, follower(0))
        .break_stream("b")
        .pass(4 * SECOND, &["a"]);
    assert_eq!(s.words("a"), "", "the node may come back");
    s.pass(SECOND, &["a"]);
    insta::assert_snapshot!(s.words("a"), @"generation 1 over: node `b` (node rank 1) was lost: its connection broke and it did not reconnect within 5.0 s (no restart spent)");
}

#[test]
fn any_failure_waits_for_a_node_that_is_away_as_a_script_does_not_say_what_it_follows() {
    let away = || {
        let mut s = Scene::new();
        s.join("a", 1, 2).join("b", 1, 2).words("a");
        s.break_stream("b").exit("a", 1, exited(0, 1));
        assert_eq!(s.words("a"), "", "the node may be the cause");
        s
    };
    let mut s = away();
    s.pass(5 * SECOND, &["a"]);
    let words = s.words("a");
    assert!(words.contains("node `b` (node rank 1) was lost"), "{words}");
    assert!(words.contains("no restart spent"), "{words}");
    // What a restart cannot help needs no other cause.
    let mut s = away();
    let permanent = WorkerExit {
        permanent: true,
        ..exited(0, 2)
    };
    s.exit("a", 1, permanent);
    assert!(s.words("a").contains("a restart cannot help"));
    // It comes back and has nothing to say: the failure is what it was.
    let mut s = away();
    s.join_with("b", [10, 0, 0, 1], 1, join("b", 1, 2))
        .pass(SECOND, &["a", "b"]);
    assert!(s.words("a").contains("rank 0 (node `a`) exited with code 1"));
}

#[test]
fn a_connection_that_breaks_again_and_again_does_not_hold_a_failure_back_for_ever() {
    let mut s = two_nodes();
    s.break_stream("b").exit("a", 1, exited(0, 1));
    for _ in 0..30 {
        s.join_with("b", [10, 0, 0, 1], 1, join("b", 2, 2))
            .pass(SECOND / 5, &["a", "b"])
            .break_stream("b")
            .pass(SECOND / 5, &["a"]);
    }
    let words = s.words("a");
    assert!(words.contains("rank 0 (node `a`) exited with code 1"), "{words}");
}

#[test]
fn a_consequence_does_not_wait_out_the_lease_of_a_node_that_has_come_back() {
    let away = || {
        let mut s = two_nodes();
        s.exit("a", 1, follower(0)).break_stream("b").pass(SECOND, &["a"]);
        s.join_with("b", [10, 0, 0, 1], 1, join("b", 2, 2));
        assert_eq!(s.words("a"), "", "its own report may be on the way");
        s
    };
    let mut s = away();
    s.exit("b", 1, killed(3, 9));
    assert!(s.words("a").contains("rank 3 (node `b`) died of SIGKILL"));
    let mut s = away();
    s.pass(SECOND, &["a", "b"]);
    assert!(s.words("a").contains("rank 0 (node `a`) exited with code 1"));
}

#[test]
fn the_only_node_is_believed_at_once() {
    let mut s = Scene::new();
    s.join("a", 1, 1);
    s.words("a");
    s.exit("a", 1, follower(1));
    assert!(s.words("a").starts_with("generation 1 over: rank 1"));
}

#[test]
fn what_a_restart_cannot_help_ends_the_job_everywhere() {
    let mut s = two_nodes();
    let exit = WorkerExit {
        permanent: true,
        ..exited(0, 2)
    };
    s.exit("a", 1, exit);
    let over = s.words("b");
    insta::assert_snapshot!(over, @"job over 2: rank 0 (node `a`) exited with code 2; a restart cannot help (failure on `a`)");
    assert_eq!(s.words("a"), over);
}

#[test]
fn a_taken_port_begins_the_next_generation_for_nothing() {
    let mut s = two_nodes();
    let exit = WorkerExit {
        port_taken: true,
        ..exited(0, 1)
    };
    s.exit("a", 1, exit);
    insta::assert_snapshot!(s.words("b"), @"generation 1 over: rank 0 (node `a`) exited with code 1, because its port was in use (no restart spent)");
    s.rejoin("b", 1, 2, 2).rejoin("a", 1, 2, 2);
    assert!(s.words("a").contains("restart 0/3"));
}

#[test]
fn the_failure_report_goes_to_every_node() {
    let mut s = two_nodes();
    s.exit("b", 1, killed(3, 9));
    let Received::Message(DaemonMessage {
        body: Some(Reply::GenerationOver(over)),
        ..
    }) = &s.received("a")[0]
    else {
        panic!("expected the end of the generation");
    };
    assert_eq!(over.first_failure, Some(killed(3, 9)));
    assert_eq!(over.first_failure_host, "b");
}

#[test]
fn a_long_stderr_is_cut_to_its_last_lines() {
    let mut s = two_nodes();
    let stderr_tail = (0..10_000).map(|n| format!("line {n}")).collect();
    s.exit(
        "b",
        1,
        WorkerExit {
            stderr_tail,
            message: "m".repeat(1 << 20),
            ..exited(2, 1)
        },
    );
    let Received::Message(message) = &s.received("a")[0] else {
        panic!("expected a message")
    };
    let Some(Reply::GenerationOver(over)) = &message.body else {
        panic!("expected the end of the generation")
    };
    let exit = over.first_failure.as_ref().unwrap();
    assert_eq!(exit.stderr_tail.last().unwrap(), "line 9999");
    assert!(exit.stderr_tail.len() > 1000);
    assert!(prost_len(message) < 64 << 10);
}

fn prost_len(message: &DaemonMessage) -> usize {
    format!("{message:?}").len()
}

#[test]
fn the_budget_ends_the_job_with_the_first_failures_code() {
    let mut s = two_nodes();
    for generation in 1..=3 {
        s.exit("a", generation, exited(1, 42));
        s.rejoin("a", generation, 2, 2)
            .rejoin("b", generation, 2, 2)
            .pass(SECOND, &["a", "b"]);
    }
    assert_eq!(s.state.status(s.now, JOB).unwrap().generation, 4);
    s.words("a");
    s.words("b");
    s.exit("a", 4, exited(1, 42));
    let over = s.words("a");
    insta::assert_snapshot!(over, @"job over 42: rank 1 (node `a`) exited with code 42; no restarts left (3/3 used) (failure on `a`)");
    assert_eq!(s.words("b"), over);
}

#[test]
fn without_restarts_the_first_failure_ends_the_job() {
    let mut s = Scene::new();
    s.join_with(
        "a",
        [10, 0, 0, 1],
        0,
        Join {
            max_restarts: 0,
            ..join("a", 1, 1)
        },
    );
    s.words("a");
    s.exit("a", 1, killed(1, 11));
    insta::assert_snapshot!(s.words("a"), @"job over 139: rank 1 (node `a`) died of SIGSEGV (failure on `a`)");
}

#[test]
fn the_job_succeeds_when_every_node_has() {
    let mut s = two_nodes();
    s.succeed("a", 1).succeed("a", 1);
    assert_eq!(s.words("a"), "", "twice the same node is not all nodes");
    s.succeed("b", 1);
    insta::assert_snapshot!(s.words("a"), @"job over 0: all 2 nodes succeeded (failure on ``)");
    s.leave("a", None, "done");
    assert_eq!(s.words("a"), "closed");
    assert!(!s.state.is_idle(), "`b` has not left yet");
    s.end_stream("b");
    assert!(s.state.is_idle());
    assert_eq!(s.state.status(s.now, JOB), None);
    // It is listed for an hour more.
    let ended = |s: &Scene| s.state.jobs(s.now).ended;
    let [line] = ended(&s).try_into().expect("one job");
    assert_eq!(
        (
            line.phase.as_str(),
            line.reason.as_str(),
            line.nodes,
            line.hostname.as_str()
        ),
        ("over", "all 2 nodes succeeded", 2, "a")
    );
    s.now += 3590 * SECOND;
    assert!(
        ended(&s)[0].ended_ms.is_some_and(|ms| ms >= 3_590_000),
        "how long ago"
    );
    s.now += 20 * SECOND;
    assert_eq!(ended(&s), []);
}

/// An administrator had to read the daemon's log.
#[test]
fn no_more_than_256_ended_jobs_are_listed() {
    let mut s = Scene::new();
    for number in 0..300 {
        s.job = format!("job{number}").leak();
        s.join("a", 1, 1).succeed("a", u64::from(number > 999) + 1);
        s.leave("a", None, "done").end_stream("a");
    }
    let ended = s.state.jobs(s.now).ended;
    assert_eq!((ended.len(), ended[0].job_id.as_str()), (256, "job299"));
}

#[test]
fn a_node_that_succeeded_takes_part_again_if_another_one_fails() {
    let mut s = two_nodes();
    s.succeed("a", 1).exit("b", 1, exited(2, 1));
    assert!(s.words("a").starts_with("generation 1 over: "));
    s.succeed("a", 1);
    s.rejoin("a", 1, 2, 2)
        .rejoin("b", 1, 2, 2)
        .pass(SECOND, &["a", "b"]);
    s.succeed("b", 2);
    assert!(
        !s.words("b").contains("job over"),
        "success of generation 1 does not count for generation 2"
    );
    s.succeed("a", 2);
    assert!(s.words("b").contains("job over 0"));
}

#[test]
fn a_signal_to_one_node_stops_the_job() {
    let mut s = two_nodes();
    s.leave("a", Some(2), "stopped by its user");
    insta::assert_snapshot!(s.words("b"), @"job over 130: node `a` (node rank 0) was stopped by SIGINT (failure on ``), signal 2");
    let mut s = two_nodes();
    s.leave("b", Some(15), "");
    assert!(s.words("a").starts_with("job over 143: "));
}

#[test]
fn a_signal_while_waiting_stops_the_others_too() {
    let mut s = Scene::new();
    s.join("a", 3, 3).join("b", 3, 3).words("b");
    s.leave("a", Some(2), "");
    insta::assert_snapshot!(s.words("b"), @"job over 130: node `a` was stopped by SIGINT (failure on ``), signal 2");
}

#[test]
fn a_spare_may_leave_without_harm() {
    let mut s = two_nodes();
    s.join("c", 2, 2).leave("c", Some(15), "");
    assert_eq!(s.words("a"), "");
    s.succeed("a", 1).succeed("b", 1);
    assert!(s.words("a").contains("job over 0"));
}

#[test]
fn a_spare_may_leave_during_a_restart_too_unless_it_is_to_replace_a_member() {
    let mut s = two_nodes();
    s.join("c", 2, 2).exit("b", 1, killed(3, 9)).words("a");
    s.leave("c", Some(15), "");
    assert_eq!(s.words("a"), "");
    s.rejoin("a", 1, 2, 2).rejoin("b", 1, 2, 2);
    assert_eq!(s.assignment("a").0, 2);

    let mut s = two_nodes();
    s.join("c", 2, 2).exit("b", 1, killed(3, 9)).words("a");
    s.leave("b", None, "").leave("c", Some(15), "");
    insta::assert_snapshot!(s.words("a"), @"job over 143: node `c` was stopped by SIGTERM (failure on ``), signal 15");
}

#[test]
fn a_node_that_says_nothing_is_lost() {
    let mut s = two_nodes();
    s.pass(8 * SECOND, &["a"]);
    assert_eq!(s.words("a"), "");
    s.pass(SECOND, &["a"]);
    insta::assert_snapshot!(s.words("a"), @"generation 1 over: node `b` (node rank 1) was lost: no heartbeat for 9.0 s (failure on ``, restart 1/3, back-off 0 ms)");
    insta::assert_snapshot!(s.words("b"), @r"
    generation 1 over: node `b` (node rank 1) was lost: no heartbeat for 9.0 s (failure on ``, restart 1/3, back-off 0 ms)
    closed
    ");
    s.rejoin("a", 1, 2, 2).pass(601 * SECOND, &["a"]);
    insta::assert_snapshot!(s.words("a"), @r"
    waiting: 1 of 2 nodes joined: `a`; waiting for 1 more (up to 600 s)
    refused TimedOut: rendezvous of job `job1` timed out after 600.0 s: 1 of 2 nodes joined: `a`; missing: 1 node (lost: `b`)
      hint: start the missing nodes with the same `--rdzv-endpoint`, `--rdzv-id` and `--nnodes`
    ");
}

#[test]
fn a_node_whose_connection_broke_is_lost_sooner() {
    let mut s = two_nodes();
    s.break_stream("b").pass(4 * SECOND, &["a"]);
    assert_eq!(s.words("a"), "");
    s.pass(SECOND, &["a"]);
    insta::assert_snapshot!(s.words("a"), @"generation 1 over: node `b` (node rank 1) was lost: its connection broke and it did not reconnect within 5.0 s (failure on ``, restart 1/3, back-off 0 ms)");
}

#[test]
fn a_lost_node_ends_the_job_when_no_restart_is_left() {
    let mut s = Scene::new();
    for node in ["a", "b"] {
        s.join_with(
            node,
            [10, 0, 0, 1],
            0,
            Join {
                max_restarts: 0,
                ..join(node, 2, 2)
            },
        );
    }
    s.words("a");
    s.break_stream("b").pass(6 * SECOND, &["a"]);
    insta::assert_snapshot!(s.words("a"), @"job over 75: node `b` (node rank 1) was lost: its connection broke and it did not reconnect within 5.0 s (failure on ``)");
}

#[test]
fn a_node_that_gives_up_ends_a_job_that_cannot_go_on_without_it() {
    let mut s = two_nodes();
    s.leave("b", None, "cannot start `train.py`: no such file");
    insta::assert_snapshot!(s.words("a"), @"job over 70: node `b` (node rank 1) left: cannot start `train.py`: no such file (failure on ``)");
}

#[test]
fn an_elastic_job_goes_on_when_a_node_gives_up() {
    let mut s = Scene::new();
    s.join("a", 1, 2).join("b", 1, 2).words("a");
    s.leave("b", None, "the disk is full");
    insta::assert_snapshot!(s.words("a"), @"generation 1 over: node `b` (node rank 1) left: the disk is full (no restart spent)");
}

#[test]
fn an_elastic_job_goes_on_with_fewer_nodes() {
    let mut s = Scene::new();
    s.join("a", 2, 3).join("b", 2, 3).join("c", 2, 3);
    s.words("a");
    s.break_stream("b").pass(6 * SECOND, &["a", "c"]).words("a");
    s.rejoin("a", 1, 2, 3)
        .rejoin("c", 1, 2, 3)
        .pass(11 * SECOND, &["a", "c"]);
    insta::assert_snapshot!(s.words("c"), @r"
    assignment 1: node rank 2 of 3, first rank 4, master 10.0.0.1:29500, restart 0/3: generation 1: all 3 nodes joined; node ranks by host name
    generation 1 over: node `b` (node rank 1) was lost: its connection broke and it did not reconnect within 5.0 s (no restart spent)
    waiting: 2 nodes joined (of 2 to 3): `a`, `c`; a lost node may still train: waiting up to 9.0 s for its end
    assignment 2: node rank 1 of 2, first rank 2, master 10.0.0.1:29500, restart 0/3: generation 2: all 2 nodes rejoined after generation 1; node ranks: 1 kept from before, 1 by host name
    ");
}

#[test]
fn an_elastic_job_does_not_wait_for_the_last_call_when_nobody_is_lost() {
    let mut s = Scene::new();
    s.join("a", 1, 3).join("b", 1, 3).pass(11 * SECOND, &["a", "b"]);
    s.exit("a", 1, exited(0, 1));
    s.words("a");
    s.rejoin("a", 1, 1, 3)
        .rejoin("b", 1, 1, 3)
        .pass(SECOND, &["a", "b"]);
    let (generation, next) = s.assignment("a");
    assert_eq!((generation, next.node_count), (2, 2));
}

#[test]
fn the_daemons_own_pause_costs_nobody_the_lease() {
    let mut s = two_nodes();
    s.now += 100 * SECOND;
    s.apply(Event::Tick);
    assert_eq!(s.words("a"), "");
    s.pass(8 * SECOND, &["a"]);
    assert_eq!(s.words("a"), "");
    s.pass(2 * SECOND, &["a"]);
    assert!(s.words("a").contains("lost"));
}

#[test]
fn a_node_that_cannot_start_the_program_ends_the_job_with_its_own_code_everywhere() {
    let mut s = two_nodes();
    s.give_up("b", 127, "cannot start `train.py`: no such file");
    insta::assert_snapshot!(s.words("a"), @"job over 127: node `b` (node rank 1) left: cannot start `train.py`: no such file (failure on ``)");
}
