//! Broken streams, stale messages, zombies, a daemon that was restarted, a job that is run again.

use super::*;

#[test]
fn a_run_keeps_its_name_over_restarts_of_workers_and_daemon() {
    let mut s = Scene::new();
    s.join("a", 1, 1);
    let first = s.assignment("a").1.run_token;
    assert!(!first.is_empty());
    s.exit("a", 1, killed(0, 9))
        .rejoin("a", 1, 1, 1)
        .pass(SECOND, &["a"]);
    assert_eq!(s.assignment("a").1.run_token, first);

    let mut restarted = Scene::new();
    let named = Join {
        run_token: "0123".into(),
        ..join("a", 1, 1)
    };
    restarted.join_with("a", [10, 0, 0, 1], 7, named);
    restarted.rejoin("a", 7, 1, 1).pass(SECOND, &["a"]);
    assert_eq!(restarted.assignment("a").1.run_token, "0123");
}

#[test]
fn a_generation_that_no_job_has_reached_is_not_believed() {
    let mut s = Scene::new();
    s.join_with("a", [10, 0, 0, 1], 1 << 40, join("a", 1, 1));
    insta::assert_snapshot!(s.words("a"), @r"
    refused Invalid: node `a` reports generation 1099511627776, expected at most 1073741823
    closed
    ");

    // What the numbers of its generations grow to does not keep a job's own nodes out.
    let last = (1 << 30) - 1;
    let mut s = Scene::new();
    s.join_with("a", [10, 0, 0, 1], last, join("a", 1, 1));
    s.rejoin("a", last, 1, 1);
    assert_eq!(s.assignment("a").0, last + 1);
    s.exit("a", last + 1, killed(0, 9)).rejoin("a", last + 1, 1, 1);
    assert_eq!(s.assignment("a").0, last + 2);
}

#[test]
fn an_agent_that_comes_back_within_its_lease_keeps_its_place() {
    let mut s = Scene::new();
    s.join("a", 2, 2).join("b", 2, 2);
    let (_, before) = s.assignment("b");
    s.words("a");
    s.break_stream("b").pass(4 * SECOND, &["a"]);
    s.join_with("b", [10, 0, 0, 1], 1, join("b", 2, 2));
    assert_eq!(s.assignment("b"), (1, before));
    s.pass(30 * SECOND, &["a", "b"]);
    assert_eq!(s.words("a"), "");
}

#[test]
fn a_new_stream_takes_over_from_one_that_only_looks_open() {
    let mut s = Scene::new();
    s.join("a", 2, 2).join("b", 2, 2);
    let old = s.current["b"];
    s.join_with("b", [10, 0, 0, 1], 1, join("b", 2, 2));
    assert_eq!(s.streams[&old].last(), Some(&Received::Closed));
    s.say_from("b", old, [10, 0, 0, 1], 1, Body::WorkerExit(exited(2, 1)));
    s.apply(Event::Closed {
        conn: old,
        clean: false,
    });
    s.pass(30 * SECOND, &["a", "b"]);
    assert!(!s.words("a").contains("over"), "the old stream has no say");
}

#[test]
fn an_agent_that_missed_the_end_of_the_generation_receives_it_again() {
    let mut s = Scene::new();
    s.join("a", 2, 2).join("b", 2, 2);
    s.break_stream("b").exit("a", 1, killed(0, 9));
    s.join_with("b", [10, 0, 0, 1], 1, join("b", 2, 2));
    insta::assert_snapshot!(s.words("b"), @"generation 1 over: rank 0 (node `a`) died of SIGKILL (failure on `a`, restart 1/3, back-off 0 ms)");
    s.rejoin("b", 1, 2, 2)
        .rejoin("a", 1, 2, 2)
        .pass(SECOND, &["a", "b"]);
    assert_eq!(s.assignment("b").0, 2);
}

#[test]
fn an_agent_that_missed_an_assignment_and_its_end_is_ready_for_the_next() {
    let mut s = Scene::new();
    s.join("a", 2, 2).join("b", 2, 2);
    s.break_stream("b").exit("a", 1, killed(0, 9));
    s.rejoin("a", 1, 2, 2);
    // It never had workers of generation 1: nothing is to be stopped, and it has nothing to confirm.
    s.join_with("b", [10, 0, 0, 1], 0, join("b", 2, 2));
    s.pass(SECOND, &["a", "b"]);
    assert_eq!(s.assignment("b").0, 2);
}

#[test]
fn a_join_that_crossed_an_assignment_does_not_confirm_its_end() {
    let mut s = Scene::new();
    s.join("a", 2, 2).join("b", 2, 2);
    s.exit("a", 1, exited(0, 3)).rejoin("a", 1, 2, 2);
    s.words("b");
    // On the same stream: it was sent before the assignment was read.
    s.say("b", 0, Body::Join(join("b", 2, 2)));
    assert!(s.words("b").starts_with("generation 1 over"));
    s.rejoin("b", 1, 2, 2).pass(SECOND, &["a", "b"]);
    assert_eq!(s.assignment("b").0, 2);
}

#[test]
fn an_agent_that_missed_the_end_of_the_job_receives_it_even_later() {
    let mut s = Scene::new();
    s.join("a", 2, 2).join("b", 2, 2).break_stream("b");
    s.leave("a", Some(2), "").pass(60 * SECOND, &[]);
    assert!(s.state.is_idle());
    s.join_with("b", [10, 0, 0, 1], 1, join("b", 2, 2));
    insta::assert_snapshot!(s.words("b"), @r"
    job over 130: node `a` (node rank 0) was stopped by SIGINT (failure on ``), signal 2
    closed
    ");
}

#[test]
fn an_agent_that_missed_the_end_of_the_job_receives_it_although_a_new_run_has_begun() {
    let mut s = Scene::new();
    s.join("a", 2, 2).join("b", 2, 2).break_stream("b");
    s.leave("a", Some(2), "");
    // The daemon is stalled: it notices that no node is left when the next run begins.
    s.now += 60 * SECOND;
    s.join("c", 2, 2);
    assert!(s.words("c").starts_with("waiting: 1 of 2 nodes joined"));
    s.join_with("b", [10, 0, 0, 1], 1, join("b", 2, 2));
    assert!(s.words("b").starts_with("job over 130: node `a`"));
}

#[test]
fn a_node_on_standby_receives_the_end_of_the_job_although_a_node_was_refused_since() {
    let mut s = Scene::new();
    s.join("a", 2, 2)
        .join("b", 2, 2)
        .join("c", 2, 2)
        .break_stream("c");
    s.leave("a", Some(2), "")
        .leave("b", None, "")
        .pass(60 * SECOND, &[]);
    assert!(s.state.is_idle());
    s.join_with("x", [10, 0, 0, 9], 1 << 40, join("x", 2, 2));
    assert!(s.words("x").contains("reports generation"));
    let on_standby = Join {
        latest_generation: 1,
        ..join("c", 2, 2)
    };
    s.join_with("c", [10, 0, 0, 3], 0, on_standby);
    assert!(s.words("c").starts_with("job over"), "{}", s.words("c"));
}

#[test]
fn stale_messages_are_ignored() {
    let mut s = Scene::new();
    s.join("a", 1, 1)
        .exit("a", 1, exited(0, 1))
        .rejoin("a", 1, 1, 1)
        .pass(SECOND, &["a"]);
    s.words("a");
    s.exit("a", 1, exited(0, 1))
        .succeed("a", 1)
        .exit("a", 9, exited(0, 1));
    s.say("a", 1, Body::NodeStopped(NodeStopped::default()));
    assert_eq!(s.words("a"), "");
    assert_eq!(s.state.status(s.now, JOB).unwrap().restart_count, 1);
}

#[test]
fn a_node_that_was_given_up_must_stop_before_it_takes_part_again() {
    let mut s = Scene::new();
    s.join("a", 1, 2).join("b", 1, 2);
    s.break_stream("b")
        .pass(6 * SECOND, &["a"])
        .rejoin("a", 1, 1, 2)
        .pass(11 * SECOND, &["a"]);
    assert_eq!(s.state.status(s.now, JOB).unwrap().generation, 2);
    s.join_with("b", [10, 0, 0, 1], 1, join("b", 1, 2));
    insta::assert_snapshot!(s.words("b"), @"generation 1 over: node `b` was unreachable for longer than its lease (no restart spent)");
    s.rejoin("b", 1, 1, 2);
    insta::assert_snapshot!(s.words("b"), @"waiting: 1 node joined (of 1 to 2): `b`; waiting for workers of the generation before to exit");
}

#[test]
fn a_node_that_was_given_up_spends_no_restart_when_its_stream_breaks_again() {
    let mut s = Scene::new();
    s.join("a", 1, 2).join("b", 1, 2);
    s.break_stream("b")
        .pass(6 * SECOND, &["a"])
        .rejoin("a", 1, 1, 2)
        .pass(11 * SECOND, &["a"]);
    s.join_with("b", [10, 0, 0, 1], 1, join("b", 1, 2))
        .break_stream("b");
    s.words("b");
    s.join_with("b", [10, 0, 0, 1], 1, join("b", 1, 2));
    insta::assert_snapshot!(s.words("b"), @"generation 1 over: generation 1 continued without node `b` (no restart spent)");
}

#[test]
fn a_node_that_succeeded_and_lost_its_lease_keeps_its_success() {
    let mut s = Scene::new();
    s.join("a", 2, 2)
        .join("b", 2, 2)
        .succeed("b", 1)
        .break_stream("b")
        .pass(6 * SECOND, &["a"]);
    s.words("a");
    s.join_with("b", [10, 0, 0, 1], 1, join("b", 2, 2));
    assert_eq!(s.assignment("b").0, 1, "it keeps its place, nothing is over");
    s.succeed("a", 1);
    assert!(s.words("b").contains("job over 0"));
}

#[test]
fn a_lost_node_receives_the_verdict_when_the_others_have_left() {
    let mut s = Scene::new();
    s.join("a", 2, 2)
        .join("b", 2, 2)
        .succeed("b", 1)
        .break_stream("b")
        .pass(6 * SECOND, &["a"]);
    s.succeed("a", 1).leave("a", None, "done");
    assert!(s.state.is_idle());
    s.join_with("b", [10, 0, 0, 1], 1, join("b", 2, 2));
    insta::assert_snapshot!(s.words("b"), @r"
    job over 0: all 2 nodes succeeded (failure on ``)
    closed
    ");
}

#[test]
fn a_join_that_was_on_its_way_when_the_stream_was_ended_has_no_say() {
    let mut s = Scene::new();
    s.join("a", 1, 2).join("b", 1, 2).pass(16 * SECOND, &["a"]);
    assert!(s.words("b").ends_with("closed"));
    s.say("b", 1, Body::Join(join("b", 1, 2)));
    assert_eq!(s.words("b"), "closed");
    assert_eq!(
        s.state.status(s.now, JOB).unwrap().nodes.len(),
        1,
        "a dead stream makes no node"
    );
}

#[test]
fn a_late_node_learns_that_the_job_is_over() {
    let mut s = Scene::new();
    s.join("a", 1, 2).pass(11 * SECOND, &["a"]).succeed("a", 1);
    s.join("b", 1, 2);
    insta::assert_snapshot!(s.words("b"), @r"
    refused JobOver: job `job1` has ended: node `a` succeeded
      hint: to run it again, start its nodes after all previous launchers have exited
    closed
    ");
}

#[test]
fn a_job_can_be_run_again_under_its_name() {
    let mut s = Scene::new();
    s.join("a", 1, 1).succeed("a", 1).leave("a", None, "done");
    s.join_with(
        "a2",
        [10, 0, 0, 1],
        0,
        Join {
            agreed: agreed(&[("target", "other.yaml")]),
            ..join("a", 1, 1)
        },
    );
    let (generation, again) = s.assignment("a2");
    assert_eq!(
        (generation, again.restart_count),
        (2, 0),
        "the old run stays fenced off"
    );
}

#[test]
fn a_job_whose_nodes_all_died_can_be_run_again_with_other_settings() {
    let mut s = Scene::new();
    s.join("a", 1, 1).break_stream("a").pass(10 * SECOND, &[]);
    assert!(s.state.is_idle());
    s.join_with(
        "a'",
        [10, 0, 0, 1],
        0,
        Join {
            max_restarts: 0,
            ..join("a'", 1, 1)
        },
    );
    let (generation, again) = s.assignment("a'");
    assert_eq!(
        (generation, again.restart_count),
        (2, 0),
        "zombies of generation 1 stay fenced off"
    );
}

#[test]
fn agents_that_do_not_leave_are_forgotten() {
    let mut s = Scene::new();
    s.join("a", 1, 1).succeed("a", 1).pass(61 * SECOND, &["a"]);
    assert!(s.words("a").ends_with("closed"));
    assert!(s.state.is_idle());
}
