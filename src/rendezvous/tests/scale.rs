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
    insta::assert_snapshot!(s.words("c"), @"waiting: generation 1 of job `job1` runs with 2 nodes; it takes this node in at its next step boundary");
    s.pass(9 * SECOND, &["a", "b", "c"]);
    assert_eq!(s.words("a"), "", "others may come too");
    s.pass(SECOND, &["a", "b", "c"]);
    insta::assert_snapshot!(s.words("a"), @"generation 1 over at a step boundary: `c` joined; going on with 3 nodes (no restart spent)");
    s.rejoin("a", 1, 2, 4).rejoin("b", 1, 2, 4);
    let (generation, next) = s.assignment("c");
    assert_eq!((generation, next.nodes.len(), next.node_rank), (2, 3, 2));
    assert_eq!((next.restart_count, next.attempt), (0, 1), "no restart is spent");
}

#[test]
fn a_job_that_is_full_does_not_wait_for_more() {
    let mut s = growing();
    s.join("c", 2, 4).join("d", 2, 4);
    insta::assert_snapshot!(s.words("a"), @"generation 1 over at a step boundary: `c`, `d` joined; going on with 4 nodes (no restart spent)");
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
    insta::assert_snapshot!(s.words("a"), @"generation 1 over: node `b` (node rank 1) was lost: its connection broke and it did not come back within 5.0 s (no restart spent)");
    s.rejoin("a", 1, 1, 2).pass(11 * SECOND, &["a"]);
    let (generation, next) = s.assignment("a");
    assert_eq!((generation, next.nodes.len()), (2, 1));
}
