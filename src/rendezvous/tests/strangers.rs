//! Callers that are no nodes of a job, or that have not shown that they may be.

use super::super::Callers;
use super::super::event::Weight;
use super::*;

fn among(callers: Callers) -> Scene {
    Scene::with(Config {
        callers,
        ..Config::default()
    })
}

/// It ended the job for those who were there first, with 76.
#[test]
fn a_stranger_that_disagrees_is_refused_alone() {
    let mut s = among(Callers::Anybody);
    s.join("a", 2, 2).join("b", 3, 3);
    assert!(s.words("b").starts_with("refused"), "{}", s.words("b"));
    assert_eq!(s.state.status(s.now, JOB).unwrap().phase, "gathering");
    s.join("c", 2, 2);
    assert_eq!(s.assignment("a").0, 1);
}

/// Where all have the token, nobody knows which of two nodes is right: both end.
#[test]
fn a_node_with_the_token_that_disagrees_ends_the_job_that_gathers() {
    let mut s = among(Callers::Authenticated);
    s.join("a", 2, 2).join("b", 3, 3);
    for node in ["a", "b"] {
        let words = s.words(node);
        assert!(words.contains("refused"), "{words}");
    }
}

/// It ended the job with 143.
#[test]
fn a_stranger_that_is_stopped_takes_nobody_with_it() {
    let mut s = among(Callers::Anybody);
    s.join("a", 3, 3).join("b", 3, 3).leave("b", Some(15), "");
    assert_eq!(s.state.status(s.now, JOB).unwrap().phase, "gathering");
    s.join("c", 3, 3).join("d", 3, 3);
    assert_eq!(s.assignment("a").0, 1);
}

#[test]
fn the_store_serves_members_only_and_says_the_same_to_all_others() {
    let mut s = Scene::new();
    s.caller = "stranger";
    let no_job = s.get(1, "collective/0", 0);
    s.caller = "a";
    s.join("a", 1, 1);
    let own = s.put(1, "collective/0", b"secret");
    assert_eq!(s.answer(own), Some(Ok(vec![])));
    s.caller = "stranger";
    for call in [
        s.get(1, "collective/0", 0),
        s.get(7, "collective/0", 0),
        s.put(1, "k", b"v"),
    ] {
        assert_eq!(s.answer(call), s.answer(no_job));
    }
    s.caller = "";
    let nameless = s.get(1, "collective/0", 0);
    assert_eq!(s.answer(nameless), s.answer(no_job));
    insta::assert_snapshot!(s.answer(nameless).unwrap().unwrap_err(), @"this daemon has no job `job1` with this node");
}

#[test]
fn the_reads_that_wait_at_all_jobs_are_bounded_together() {
    let mut s = Scene::with(Config {
        kv: super::super::KvLimits {
            waiters_of_all: 2,
            ..super::super::KvLimits::default()
        },
        ..Config::default()
    });
    s.join("a", 1, 1);
    let waiting = [s.get(1, "x", 1000), s.get(1, "x", 1000)];
    let refused = s.get(1, "x", 1000);
    assert!(s.answer(refused).unwrap().is_err());
    let job = JOB.to_owned();
    s.apply(Event::KvCancel {
        call: CallId(waiting[0]),
        job,
    });
    let another = s.get(1, "x", 1000);
    assert_eq!(s.answer(another), None, "there is room again");
    let written = s.put(1, "x", b"v");
    assert_eq!(s.answer(written), Some(Ok(vec![])));
    for read in [waiting[1], another] {
        assert_eq!(s.answer(read), Some(Ok(b"v".to_vec())));
    }
    let at_once = s.get(1, "x", 1000);
    assert_eq!(s.answer(at_once), Some(Ok(b"v".to_vec())));
}

#[test]
fn the_stores_of_all_jobs_are_bounded_together() {
    let mut s = Scene::with(Config {
        kv: super::super::KvLimits {
            bytes_of_all: 16,
            ..super::super::KvLimits::default()
        },
        ..Config::default()
    });
    s.join("a", 1, 1);
    let fits = s.put(1, "k", &[0; 8]);
    assert_eq!(s.answer(fits), Some(Ok(vec![])));
    let again = s.put(1, "k", &[0; 8]);
    assert!(
        s.answer(again).unwrap().is_err(),
        "what is there counts: 9 bytes, and 9 more are too many"
    );
    let small = s.put(1, "l", &[0; 6]);
    assert_eq!(s.answer(small), Some(Ok(vec![])));
    s.exit("a", 1, killed(0, 9));
    s.rejoin("a", 1, 1, 1).pass(SECOND, &["a"]);
    let next = s.put(2, "k", &[0; 8]);
    assert_eq!(
        s.answer(next),
        Some(Ok(vec![])),
        "a store that has ended frees its place"
    );
}

/// Each of them was a line of the log.
#[test]
fn refused_streams_do_not_fill_the_log() {
    let mut state = State::new(Config::default());
    let mut lines_until = |second: u32, conns: std::ops::Range<u64>| {
        let refused = conns.flat_map(|conn| {
            let at = At {
                now: second * SECOND,
                dice: 1.0,
                id: 1,
                secret: Secret::new([1; 32]),
            };
            let message = Box::new(AgentMessage {
                body: Some(Body::Heartbeat(Heartbeat::default())),
                ..AgentMessage::default()
            });
            let [remote, local] = [IpAddr::V4(Ipv4Addr::LOCALHOST); 2];
            let (conn, peer) = (ConnId(conn), Peer { remote, local });
            apply(at, &mut state, Event::Message { conn, peer, message })
        });
        let is_line = |effect: &Effect| {
            matches!(
                effect,
                Effect::Note {
                    weight: Weight::Decision,
                    ..
                }
            )
        };
        refused.filter(is_line).count()
    };
    assert_eq!(lines_until(0, 0..100), 1);
    assert_eq!(lines_until(9, 100..200), 0);
    assert_eq!(lines_until(11, 200..300), 1);
}
