//! A daemon whose own network is cut.

use super::*;

#[test]
fn a_daemon_that_hears_from_nobody_loses_no_node() {
    let mut s = two_nodes();
    s.pass(20 * SECOND, &["a", "b"]).pass(90 * SECOND, &[]);
    // Its own pings have ended the streams, one after the other.
    s.break_stream("a").pass(10 * SECOND, &[]).break_stream("b");
    s.pass(60 * SECOND, &[]);
    for node in ["b", "a"] {
        s.join_with(node, [10, 0, 0, 1], 1, join(node, 2, 2));
        assert_eq!(s.assignment(node).0, 1, "node `{node}` keeps its place");
    }
    s.pass(30 * SECOND, &["a", "b"]);
    assert_eq!(s.words("a") + &s.words("b"), "");
}

#[test]
fn a_node_that_is_not_heard_when_the_others_are_again_is_lost_a_lease_later() {
    let mut s = two_nodes();
    s.pass(60 * SECOND, &[]).pass(8 * SECOND, &["a"]);
    assert_eq!(s.words("a"), "");
    s.pass(4 * SECOND, &["a"]);
    assert!(
        s.words("a")
            .contains("node `b` (node rank 1) was lost: no heartbeat for 69.0 s")
    );
}

#[test]
fn the_daemon_does_not_suspect_itself_for_ever() {
    let mut s = two_nodes();
    s.pass(590 * SECOND, &[]);
    assert_eq!(s.words("a"), "");
    s.pass(40 * SECOND, &[]);
    assert!(s.words("a").contains("was lost"));
}

/// Its job was forgotten, and `/readyz` stayed 503 for ever.
#[test]
fn a_suspicion_ends_with_the_outage() {
    let mut s = two_nodes();
    s.pass(30 * SECOND, &[]);
    assert!(s.state.census(s.now, 0).why_unready().is_some(), "suspected");
    s.pass(600 * SECOND, &[]);
    assert_eq!(s.state.census(s.now, 0).why_unready(), None);
}

#[test]
fn a_suspicion_ends_with_the_last_node() {
    let mut s = two_nodes();
    s.pass(30 * SECOND, &[]);
    s.apply(Event::Close {
        job: JOB.into(),
        reason: String::new(),
    });
    s.pass(2 * Config::default().linger, &[]);
    assert!(s.now < Config::default().silence_limit);
    assert_eq!(s.state.jobs(s.now).jobs.len(), 0);
    assert_eq!(s.state.census(s.now, 0).why_unready(), None);
}

#[test]
fn nodes_that_end_together_are_lost_as_soon_as_their_connections_tell() {
    let mut s = two_nodes();
    s.pass(20 * SECOND, &["a", "b"])
        .break_stream("a")
        .break_stream("b");
    s.pass(6 * SECOND, &[]);
    assert_eq!(
        s.state.status(s.now, JOB).unwrap().nodes,
        [],
        "nobody is waited for"
    );
}

#[test]
fn a_new_launcher_does_not_join_the_run_of_nodes_that_all_died_without_a_word() {
    let mut s = two_nodes();
    s.pass(30 * SECOND, &[]).break_stream("a").break_stream("b");
    s.pass(30 * SECOND, &[]);
    s.join("a'", 2, 2).join("b'", 2, 2);
    // The first two may train without the daemon, and do not know of these.
    s.pass(575 * SECOND, &["a'", "b'"]);
    let (generation, assignment) = s.assignment("a'");
    assert_eq!(
        (generation, assignment.node_count, assignment.restart_count),
        (2, 2, 0)
    );
}

/// It was stalled, and has read nothing of the run that it was assigned to.
#[test]
fn a_node_that_missed_its_whole_run_is_told_the_verdict() {
    let mut s = two_nodes();
    s.pass(20 * SECOND, &["a", "b"]).leave("a", Some(15), "");
    // Its connection breaks while the daemon suspects its own network, so it is not lost.
    s.pass(15 * SECOND, &[]).break_stream("b").pass(30 * SECOND, &[]);
    s.words("b");
    s.join_with("b", [10, 0, 0, 1], 0, join("b", 2, 2));
    assert!(s.words("b").contains("job over 143"));
}
