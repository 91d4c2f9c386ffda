//! Jobs that grow and shrink.

use super::*;

/// Nodes `a` and `b` of a job for two to four, running.
fn growing() -> Scene {
    let mut s = Scene::new();
    s.join("a", 2, 4).join("b", 2, 4).pass(11 * SECOND, &["a", "b"]);
    s.words("a");
    s.words("b");
    s
}

#[test]
fn a_node_that_comes_is_taken_in_after_a_while_at_a_step_boundary() {
    let mut s = growing();
    s.join("c", 2, 4);
    insta::assert_snapshot!(s.words("c"), @"waiting: job `job1` is running with 2 nodes; this node joins at the next step boundary");
    s.pass(9 * SECOND, &["a", "b", "c"]);
    assert_eq!(s.words("a"), "", "others may come too");
    s.pass(SECOND, &["a", "b", "c"]);
    insta::assert_snapshot!(s.words("a"), @"generation 1 over at a step boundary: `c` joined; continuing with 3 nodes (no restart spent)");
    s.rejoin("a", 1, 2, 4).rejoin("b", 1, 2, 4);
    let (generation, next) = s.assignment("c");
    assert_eq!((generation, next.node_count, next.node_rank), (2, 3, 2));
    assert_eq!(
        (next.restart_count, next.attempt),
        (0, 1),
        "this does not count as a restart"
    );
}

#[test]
fn a_job_that_is_full_does_not_wait_for_more() {
    let mut s = growing();
    s.join("c", 2, 4).join("d", 2, 4);
    insta::assert_snapshot!(s.words("a"), @"generation 1 over at a step boundary: `c`, `d` joined; continuing with 4 nodes (no restart spent)");
}

#[test]
fn a_guest_that_goes_again_disturbs_nobody() {
    let mut s = growing();
    s.join("c", 2, 4)
        .leave("c", None, "done")
        .pass(20 * SECOND, &["a", "b"]);
    assert_eq!(s.words("a"), "");
}

#[test]
fn who_has_finished_is_not_asked_to_start_again() {
    let mut s = growing();
    s.succeed("a", 1)
        .join("c", 2, 4)
        .pass(20 * SECOND, &["a", "b", "c"]);
    assert_eq!(s.words("b"), "");
    s.succeed("b", 1);
    assert!(s.words("c").contains("job over 0"));
}

#[test]
fn a_lost_node_costs_nothing_while_enough_are_left() {
    let mut s = Scene::new();
    let at_once = Join {
        max_restarts: 0,
        ..join("a", 1, 2)
    };
    for node in ["a", "b"] {
        s.join_with(
            node,
            [10, 0, 0, 1],
            0,
            Join {
                hostname: node.into(),
                ..at_once.clone()
            },
        );
    }
    s.words("a");
    s.break_stream("b").pass(6 * SECOND, &["a"]);
    insta::assert_snapshot!(s.words("a"), @"generation 1 over: node `b` (node rank 1) was lost: its connection broke and it did not reconnect within 5.0 s (no restart spent)");
    s.rejoin("a", 1, 1, 2).pass(11 * SECOND, &["a"]);
    let (generation, next) = s.assignment("a");
    assert_eq!((generation, next.node_count), (2, 1));
}

/// Nodes `a`, `b` and `c` of a job for two to three, running.
fn three() -> Scene {
    let mut s = Scene::new();
    s.join("a", 2, 3).join("b", 2, 3).join("c", 2, 3);
    for node in ["a", "b", "c"] {
        s.words(node);
    }
    s
}

#[test]
fn a_node_that_is_stopped_leaves_at_a_step_boundary_and_nobody_waits_for_it() {
    let mut s = three();
    s.leaving("b", 1);
    insta::assert_snapshot!(s.words("a"), @"generation 1 over at a step boundary: node `b` (node rank 1) was stopped by SIGTERM; continuing without it (no restart spent)");
    assert_eq!(s.words("b"), s.words("c"), "all stop at the same boundary");
    s.rejoin("a", 1, 2, 3).rejoin("c", 1, 2, 3);
    assert!(
        s.words("c")
            .contains("waiting for workers of the generation before to exit")
    );
    s.words("a");
    s.leave("b", Some(15), "");
    let (generation, next) = s.assignment("a");
    assert_eq!((generation, next.node_count, next.restart_count), (2, 2, 0));
    // Started again, it is a node like any other.
    s.join("b'", 2, 3);
    assert!(s.words("a").contains("`b` joined; continuing with 3 nodes"));
}

#[test]
fn a_job_that_cannot_spare_the_node_is_stopped_when_its_workers_are_gone() {
    let mut s = three();
    s.leaving("b", 1).rejoin("a", 1, 2, 3).rejoin("c", 1, 2, 3);
    s.leave("b", Some(15), "");
    s.words("a");
    s.leaving("c", 2);
    assert_eq!(s.words("a"), "", "its workers stop with those of `c`, and save");
    s.leave("c", Some(15), "");
    insta::assert_snapshot!(s.words("a"), @"job over 143: node `c` (node rank 1) was stopped by SIGTERM (failure on ``), signal 15");
}

#[test]
fn of_nodes_that_are_stopped_together_the_one_that_cannot_be_spared_stops_the_job() {
    let mut s = three();
    s.leaving("b", 1).leaving("c", 1);
    s.leave("c", Some(15), "").leave("b", Some(15), "");
    assert!(s.words("a").contains("job over 143"));
}

#[test]
fn a_leave_that_was_accepted_holds_while_another_node_reconnects() {
    let mut s = three();
    s.leaving("b", 1).rejoin("a", 1, 2, 3);
    s.words("a");
    s.break_stream("c").leave("b", Some(15), "");
    assert_eq!(s.words("a"), "", "`c` has its lease still");
    s.join_with("c", [10, 0, 0, 1], 1, join("c", 2, 3));
    s.rejoin("c", 1, 2, 3);
    let (generation, next) = s.assignment("a");
    assert_eq!((generation, next.node_count, next.restart_count), (2, 2, 0));
}

#[test]
fn nobody_waits_for_a_node_that_left_after_its_success() {
    let mut s = three();
    s.succeed("b", 1).leave("b", Some(15), "");
    assert_eq!(s.words("a"), "", "it has done its part");
    s.exit("a", 1, exited(0, 1));
    s.rejoin("a", 1, 2, 3).rejoin("c", 1, 2, 3);
    assert_eq!(s.assignment("a").0, 2);
}

#[test]
fn a_node_that_leaves_makes_finished_nodes_run_again() {
    let mut s = three();
    s.succeed("a", 1).leaving("b", 1);
    assert!(s.words("a").starts_with("generation 1 over at a step boundary"));
}

#[test]
fn a_node_that_leaves_without_having_said_so_costs_nothing_either() {
    let mut s = three();
    s.leave("b", Some(2), "");
    insta::assert_snapshot!(s.words("a"), @"generation 1 over: node `b` (node rank 1) was stopped by SIGINT; continuing without it (no restart spent)");
    s.rejoin("a", 1, 2, 3).rejoin("c", 1, 2, 3);
    assert_eq!(s.assignment("a").0, 2);
}

#[test]
fn a_node_with_which_the_workers_can_go_on_takes_the_job_with_it_if_they_cannot_without() {
    let mut s = three();
    // Six ranks, or two, or one; not four.
    s.limit_sizes("a", 1, 6).leaving("b", 1);
    assert_eq!(s.words("a"), "");
    s.leave("b", Some(15), "");
    assert!(s.words("a").contains("job over 143"));
}

#[test]
fn the_node_that_hosts_the_daemon_takes_the_job_with_it() {
    let mut s = Scene::with(Config {
        host: Some("b".into()),
        ..Config::default()
    });
    s.join("a", 1, 2).join("b", 1, 2).words("a");
    s.leaving("b", 1);
    assert_eq!(s.words("a"), "");
    s.leave("b", Some(15), "");
    assert!(s.words("a").contains("job over 143"));
}

/// Nodes `a` and `b` of a job for one to four, whose workers can go on with 1, 2 and 4 ranks. A node has two.
fn limited() -> Scene {
    let mut s = Scene::new();
    s.join("a", 1, 4).join("b", 1, 4).pass(11 * SECOND, &["a", "b"]);
    s.words("a");
    s.words("b");
    s.limit_sizes("a", 1, 4);
    s
}

#[test]
fn a_node_with_which_the_workers_could_not_go_on_is_a_spare() {
    let mut s = limited();
    s.join("c", 1, 4);
    insta::assert_snapshot!(s.words("c"), @"waiting: job `job1` is running with 2 nodes; it can run only with a number of ranks that divides 4: this node stays on standby");
    s.pass(20 * SECOND, &["a", "b", "c"]);
    assert_eq!(s.words("a"), "");
}

#[test]
fn nodes_that_fit_only_together_are_taken_in_together() {
    let mut s = Scene::new();
    s.join("a", 1, 4).pass(11 * SECOND, &["a"]);
    s.limit_sizes("a", 1, 6).join("b", 1, 4);
    s.words("a");
    assert!(s.words("b").contains("this node stays on standby"));
    s.join("c", 1, 4).pass(11 * SECOND, &["a", "b", "c"]);
    assert!(s.words("c").contains("this node joins at the next step"));
    assert!(s.words("a").contains("`b`, `c` joined; continuing with 3 nodes"));
}

#[test]
fn a_spare_learns_at_once_that_it_does_not_fit() {
    let mut s = Scene::new();
    s.join("a", 1, 4).join("b", 1, 4).pass(11 * SECOND, &["a", "b"]);
    s.join("c", 1, 4);
    s.words("a");
    assert!(s.words("c").contains("this node joins at the next step"));
    s.limit_sizes("a", 1, 4);
    assert!(s.words("c").contains("this node stays on standby"));
    s.limit_sizes("a", 1, 4).pass(20 * SECOND, &["a", "b", "c"]);
    assert_eq!(s.words("a") + &s.words("c"), "", "once is enough");
}

#[test]
fn the_place_of_a_lost_node_goes_to_a_spare_or_the_job_shrinks_to_what_fits() {
    let mut s = limited();
    s.join("c", 1, 4);
    s.words("c");
    s.break_stream("b").pass(6 * SECOND, &["a", "c"]);
    s.rejoin("a", 1, 1, 4).pass(11 * SECOND, &["a", "c"]);
    let (generation, next) = s.assignment("c");
    assert_eq!((generation, next.node_count), (2, 2));
    s.words("a");

    // What was said holds for later generations: three nodes are back, and two of them fit.
    s.join("d", 1, 4).exit("a", 2, exited(0, 1));
    s.words("d");
    for node in ["a", "c"] {
        s.rejoin(node, 2, 1, 4);
    }
    s.pass(11 * SECOND, &["a", "c", "d"]);
    let (generation, next) = s.assignment("a");
    assert_eq!((generation, next.node_count), (3, 2), "who was there stays");
    assert_eq!(s.assignment("c").0, 3);
    assert!(s.words("d").contains("this node stays on standby"));
}

#[test]
fn nodes_that_can_make_no_size_go_on_and_the_workers_say_why() {
    let mut s = limited();
    s.limit_sizes("b", 1, 3)
        .break_stream("b")
        .pass(6 * SECOND, &["a"]);
    s.rejoin("a", 1, 1, 4);
    s.words("a");
    s.pass(11 * SECOND, &["a"]);
    assert_eq!(s.assignment("a").1.node_count, 1);
}

#[test]
fn what_an_earlier_generation_said_comes_too_late() {
    let mut s = limited();
    s.limit_sizes("a", 0, 6).join("c", 1, 4);
    assert!(s.words("c").contains("divides 4"));
}

#[test]
fn a_daemon_that_was_restarted_learns_the_sizes_before_it_starts_again() {
    let mut s = Scene::new();
    for node in ["a", "b"] {
        s.join_with(node, [10, 0, 0, 1], 5, join(node, 1, 4));
    }
    s.join("c", 1, 4).limit_sizes("a", 5, 4);
    s.rejoin("a", 5, 1, 4).rejoin("b", 5, 1, 4);
    s.pass(31 * SECOND, &["a", "b", "c"]);
    assert_eq!(s.assignment("a").1.node_count, 2);
}
