//! When other nodes take the place of a lost one.

use super::*;

/// An elastic job in which `a` trains alone, and falls silent when `b` comes.
fn alone() -> Scene {
    let mut s = Scene::new();
    s.join("a", 1, 2).pass(10 * SECOND, &["a"]);
    let (generation, assignment) = s.assignment("a");
    assert_eq!((generation, assignment.takeover_ms), (1, 15_000));
    s.pass(2 * SECOND, &[]).join("b", 1, 2);
    s
}

#[test]
fn a_silent_node_is_replaced_when_its_workers_have_stopped() {
    let mut s = alone();
    // Its last heartbeat came at 9 s.
    s.pass(11 * SECOND, &["b"]);
    assert_eq!(s.now, 23 * SECOND);
    assert!(
        s.words("b")
            .contains("a lost node may still train: waiting up to ")
    );
    s.pass(2 * SECOND, &["b"]);
    let (generation, assignment) = s.assignment("b");
    assert_eq!((generation, assignment.node_count), (2, 1));
}

#[test]
fn a_lost_node_that_comes_back_and_stops_is_not_waited_for() {
    let mut s = alone();
    s.pass(9 * SECOND, &["b"]).words("b");
    s.join_with("a", [10, 0, 0, 1], 1, join("a", 1, 2));
    assert!(s.words("a").contains("generation 1 over: "));
    assert_eq!(s.words("b"), "");
    s.rejoin("a", 1, 1, 2);
    let (generation, assignment) = s.assignment("b");
    assert_eq!((generation, assignment.node_count), (2, 2));
}

#[test]
fn a_node_that_others_could_replace_learns_that_its_heartbeats_arrive() {
    let beat = |s: &mut Scene, node: &str| {
        let heartbeat = Heartbeat {
            sent_ms: 77,
            ..Heartbeat::default()
        };
        s.words(node);
        s.say(node, 1, Body::Heartbeat(heartbeat)).words(node)
    };
    assert_eq!(beat(&mut alone(), "b"), "heard 77 ms");
    let mut fixed = Scene::new();
    fixed.join("a", 2, 2).join("b", 2, 2);
    assert_eq!(fixed.assignment("a").1.takeover_ms, 0);
    assert_eq!(beat(&mut fixed, "a"), "");
    // A standby could take its place.
    fixed.join("c", 2, 2);
    assert_eq!(beat(&mut fixed, "a"), "heard 77 ms");
}

#[test]
fn survivors_of_an_elastic_job_start_without_a_last_call() {
    let mut s = Scene::new();
    s.join("a", 2, 4)
        .join("b", 2, 4)
        .join("c", 2, 4)
        .pass(10 * SECOND, &["a", "b", "c"]);
    s.words("a");
    s.leave("c", None, "broken");
    s.rejoin("a", 1, 2, 4).rejoin("b", 1, 2, 4);
    let (generation, assignment) = s.assignment("a");
    assert_eq!((generation, assignment.node_count), (2, 2));
}

#[test]
fn a_node_of_a_fixed_job_is_replaced_when_a_peer_has_stopped() {
    let mut s = Scene::new();
    s.join("a", 2, 2).join("b", 2, 2).pass(12 * SECOND, &["a"]);
    assert!(s.words("a").contains("generation 1 over: "));
    s.rejoin("a", 1, 2, 2).join("b'", 2, 2);
    let (generation, assignment) = s.assignment("b'");
    assert_eq!((generation, assignment.node_count), (2, 2));
}

#[test]
fn a_daemon_that_was_restarted_gives_the_nodes_in_its_ledger_their_time() {
    let mut s = Scene::new();
    s.join("a", 1, 2).pass(11 * SECOND, &["a"]).words("a");
    let records = s.records.values().cloned().collect();
    let config = Config {
        reattach_wait: 5 * SECOND,
        ..Config::default()
    };
    (s.state, s.now) = (State::recall(config, records, Duration::ZERO), Duration::ZERO);
    s.join("b", 1, 2).pass(14 * SECOND, &["b"]);
    assert_eq!(s.state.status(s.now, JOB).unwrap().phase, "gathering");
    s.pass(2 * SECOND, &["b"]);
    assert_eq!(s.assignment("b").0, 2);
}

/// With the same `--node-rank`, as Kubernetes gives it to the pod that takes the place of one whose machine lost power.
#[test]
fn the_successor_of_a_silent_node_takes_its_rank_when_the_node_is_lost() {
    for seconds in [1, 3, 10] {
        let asks = |node: &str, rank| Join {
            node_rank: Some(rank),
            ..join(node, 2, 2)
        };
        let mut s = Scene::new();
        s.join_with("a", [10, 0, 0, 1], 0, asks("a", 0));
        s.join_with("b", [10, 0, 0, 2], 0, asks("b", 1));
        s.words("a");
        s.pass(seconds * SECOND, &["a"]);
        s.join_with("b'", [10, 0, 0, 3], 0, asks("b'", 1));
        let is_waiting = s.words("b'").starts_with("waiting: ");
        assert!(is_waiting, "after {seconds} s");
        if seconds < 9 {
            s.pass(10 * SECOND, &["a", "b'"]);
        }
        assert!(
            s.words("a")
                .contains("generation 1 over: node `b` (node rank 1) was lost")
        );
        s.rejoin("a", 1, 2, 2);
        let (generation, assignment) = s.assignment("b'");
        assert_eq!((generation, assignment.node_rank), (2, 1), "after {seconds} s");
    }
}

/// The guardian of this node speaks, on a stream of its own.
fn launcher_died(s: &mut Scene, node: &str) {
    s.last_id += 1;
    let leave = Leave {
        launcher_died: true,
        ..Leave::default()
    };
    s.say_from(node, ConnId(s.last_id), [10, 0, 0, 1], 0, Body::Leave(leave));
}

#[test]
fn a_node_whose_guardian_has_killed_the_workers_is_replaced_at_once() {
    let mut s = alone();
    launcher_died(&mut s, "a");
    let (generation, assignment) = s.assignment("b");
    assert_eq!((generation, assignment.node_count), (2, 1));
}

#[test]
fn a_launcher_that_is_started_again_waits_until_the_old_workers_are_gone() {
    let restarted = || {
        let mut s = Scene::new();
        s.join("a", 1, 1).pass(2 * SECOND, &["a"]);
        s.break_stream("a").join("a'", 1, 1);
        let words = s.words("a'");
        assert!(words.contains("a lost node may still train"), "{words}");
        s
    };
    let mut s = restarted();
    launcher_died(&mut s, "a");
    assert_eq!(s.assignment("a'").0, 2);
    // The guardian was killed too.
    let mut s = restarted();
    s.pass(4 * SECOND, &["a'"]);
    assert_eq!(s.state.status(s.now, JOB).unwrap().phase, "gathering");
    s.pass(SECOND, &["a'"]);
    assert_eq!(s.assignment("a'").0, 2);
}

/// Only members prove that their generation makes no more steps.
#[test]
fn the_end_of_a_newcomer_frees_no_place_of_a_silent_node() {
    let mut s = Scene::new();
    s.join("a", 2, 2).join("b", 2, 2).pass(12 * SECOND, &[]);
    s.join("c", 2, 2).pass(12 * SECOND, &["c"]);
    launcher_died(&mut s, "c");
    launcher_died(&mut s, "unknown");
    s.join("d", 2, 2).join("e", 2, 2).pass(60 * SECOND, &["d", "e"]);
    assert_eq!(s.state.status(s.now, JOB).unwrap().phase, "gathering");
    s.pass(540 * SECOND, &["d", "e"]);
    assert_eq!(s.assignment("d").0, 2);
}
