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

/// Anybody was told it who guessed a number, with the hosts and the last words of workers.
#[test]
fn the_verdict_on_a_job_is_for_those_with_its_token() {
    let (own, other) = (Token::random(), Token::random());
    let address = [10, 0, 0, 1];
    let mut s = among(Callers::OfJobs);
    s.join_with("a", address, 0, with_proof("a", &own, JOB));
    let (generation, _) = s.assignment("a");
    s.leave("a", Some(15), "");
    let on_standby = |node: &str, token: &Token| Join {
        latest_generation: generation,
        ..with_proof(node, token, JOB)
    };
    let records: Vec<Record> = s.records.values().cloned().collect();
    let mut restarted = among(Callers::OfJobs);
    let config = Config {
        callers: Callers::OfJobs,
        ..Config::default()
    };
    restarted.state = State::recall(config, records, Duration::ZERO);
    for mut s in [s, restarted] {
        s.join_with("b", address, 0, on_standby("b", &own));
        let told = s.words("b");
        assert!(
            told.starts_with("job over 143: node `a` (node rank 0) was stopped"),
            "{told}"
        );
        s.join_with("c", address, 0, on_standby("c", &other));
        let told = s.words("c");
        assert!(!told.contains("node `a`"), "{told}");
        assert!(s.state.status(s.now, JOB).is_some(), "it is a job of its own");
    }
}

fn with_proof(node: &str, token: &Token, job: &str) -> Join {
    Join {
        token_proof: token.proof(job).to_vec(),
        ..join(node, 1, 1)
    }
}

/// One user could keep all others from a daemon that they share.
#[test]
fn an_address_has_a_quarter_of_the_jobs_of_a_daemon_of_several_users() {
    for callers in [Callers::OfJobs, Callers::Proven] {
        let mut s = Scene::with(Config {
            callers,
            max_jobs: 8,
            ..Config::default()
        });
        let token = Token::random();
        let mut begin = |job: &'static str, last: u8| {
            s.job = job;
            s.join_with(job, [10, 0, 0, last], 0, with_proof(job, &token, job));
            s.words(job)
        };
        for (job, address) in [("j1", 1), ("j2", 1), ("j3", 2)] {
            let words = begin(job, address);
            assert!(words.starts_with("assignment 1"), "{words}");
        }
        let words = begin("j4", 1);
        if callers == Callers::OfJobs {
            let refused =
                "refused Invalid: this daemon already has 2 jobs from `10.0.0.1`, the most of one address";
            assert!(words.starts_with(refused), "{words}");
        } else {
            assert!(words.starts_with("assignment 1"), "{words}");
        }
    }
}

#[test]
fn an_address_has_a_quarter_of_the_stores_of_a_daemon_of_several_users() {
    for callers in [Callers::OfJobs, Callers::Proven] {
        let mut s = Scene::with(Config {
            callers,
            kv: super::super::KvLimits {
                bytes_of_all: 64,
                ..super::super::KvLimits::default()
            },
            ..Config::default()
        });
        let token = Token::random();
        s.join_with("a", [10, 0, 0, 1], 0, with_proof("a", &token, JOB));
        let fits = s.put(1, "k", &[0; 15]);
        assert_eq!(s.answer(fits), Some(Ok(vec![])));
        let more = s.put(1, "l", &[0; 15]);
        match s.answer(more).unwrap() {
            Ok(_) => assert_eq!(callers, Callers::Proven),
            Err(words) => {
                assert_eq!(callers, Callers::OfJobs);
                assert!(words.contains("from this address"), "{words}");
            }
        }
    }
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
