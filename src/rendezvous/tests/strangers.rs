//! Who is no member, or has not shown that it may be one.

use ddp_proto::rendezvous::StatusRequest;
use ddp_proto::trust::token::Token;

use super::super::Callers;
use super::*;

fn among(callers: Callers) -> Scene {
    Scene::with(Config {
        callers,
        ..Config::default()
    })
}

fn ask(job: &str, incarnation: &str) -> StatusRequest {
    StatusRequest {
        job_id: job.into(),
        incarnation: incarnation.into(),
    }
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
    let mut s = among(Callers::Proven);
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
fn the_status_is_for_nodes_of_the_job_and_for_the_admin() {
    let mut s = Scene::new();
    s.join("a", 1, 1);
    let seen = |request: &StatusRequest, is_admin| s.state.status_for(s.now, request, is_admin).is_some();
    assert!(seen(&ask(JOB, "a"), false));
    assert!(seen(&ask(JOB, ""), true));
    for request in [ask(JOB, "b"), ask(JOB, ""), ask("no", "a")] {
        assert!(!seen(&request, false), "{request:?}");
    }
    assert!(!seen(&ask("no", "a"), true));
}

#[test]
fn the_first_node_of_a_job_registers_its_token() {
    let mut s = among(Callers::OfJobs);
    let (own, other) = (Token::random(), Token::random());
    let with = |node: &str, proof: Vec<u8>| Join {
        token_proof: proof,
        ..join(node, 2, 2)
    };
    let address = [10, 0, 0, 1];
    s.join_with("none", address, 0, with("none", Vec::new()));
    assert!(
        s.words("none").contains("this daemon needs the token of the job"),
        "{}",
        s.words("none")
    );
    s.join_with("a", address, 0, with("a", own.proof(JOB).to_vec()));
    for proof in [other.proof(JOB), own.proof("another job")] {
        s.join_with("b", address, 0, with("b", proof.to_vec()));
        assert!(
            s.words("b").contains("job `job1` has a different token"),
            "{}",
            s.words("b")
        );
    }
    s.join_with("c", address, 0, with("c", own.proof(JOB).to_vec()));
    assert_eq!(s.assignment("a").0, 1);
    let record = s.records.get(JOB).expect("written down");
    assert_eq!(record.token_proof, own.proof(JOB));
    // A daemon that is restarted knows whose job it is.
    let mut records: Vec<Record> = s.records.values().cloned().collect();
    let mut restarted = among(Callers::OfJobs);
    let config = Config {
        callers: Callers::OfJobs,
        ..Config::default()
    };
    restarted.state = State::recall(config, std::mem::take(&mut records), Duration::ZERO);
    restarted.join_with("b", address, 0, with("b", other.proof(JOB).to_vec()));
    assert!(
        restarted.words("b").contains("has a different token"),
        "{}",
        restarted.words("b")
    );
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
