//! The key-value store of the workers of one node.

use std::time::Duration;

use ddp_proto::control::{KvRefusal, ToAgent, ToWorker, WorkerAssignment};

use crate::daemon::{Daemon, Policy};
use crate::harness::launch;
use crate::talk::{Session, plays};

/// Rank 0 writes an entry, all read it twice.
#[test]
fn role_key_value() {
    if !plays("role_key_value") {
        return;
    }
    let mut session = Session::open();
    let assignment = session.receive();
    let ToWorker::Assignment(WorkerAssignment { env, node_addr, .. }) = assignment else {
        panic!("{assignment:?}");
    };
    assert_eq!(env["RANK"], session.env.rank.to_string());
    assert_eq!(node_addr, "127.0.0.1");
    let key = "id".to_owned();
    if session.env.rank.0 == 0 {
        let value = "c2VjcmV0".to_owned();
        session.say(&ToAgent::KvPut {
            call: 1,
            key: key.clone(),
            value,
        });
        let reply = session.receive();
        assert_eq!(
            reply,
            ToWorker::KvReply {
                call: 1,
                value: None,
                error: None,
                refusal: None,
            }
        );
    }
    for call in 2..4 {
        session.say(&ToAgent::KvGet {
            call,
            key: key.clone(),
            timeout_ms: 20_000,
        });
        let reply = session.receive();
        assert_eq!(
            reply,
            ToWorker::KvReply {
                call,
                value: Some("c2VjcmV0".into()),
                error: None,
                refusal: None,
            }
        );
    }
    session.say(&ToAgent::KvGet {
        call: 4,
        key: "no rank writes this".into(),
        timeout_ms: 1,
    });
    let reply = session.receive();
    assert!(
        matches!(
            reply,
            ToWorker::KvReply {
                call: 4,
                value: None,
                error: Some(_),
                refusal: Some(KvRefusal::NotWritten),
            }
        ),
        "{reply:?}"
    );
    println!("all is well");
}

#[test]
fn workers_exchange_values() {
    let daemon = Daemon::start(Policy::default());
    let end = launch(&daemon)
        .workers(3)
        .role_in("key_value", "role_key_value")
        .start()
        .wait();
    assert_eq!(end.code, 0, "{}\n{}", end.stdout, end.stderr);
    assert_eq!(end.stdout.matches("all is well").count(), 3, "{}", end.stdout);
}

/// Rank 0 reads an entry that rank 1 writes when the daemon has given up the read many times.
#[test]
fn role_reads_patiently() {
    if !plays("role_reads_patiently") {
        return;
    }
    let mut session = Session::open();
    session.receive();
    let get = |call, key: &str, timeout_ms| ToAgent::KvGet {
        call,
        key: key.to_owned(),
        timeout_ms,
    };
    if session.env.rank.0 == 0 {
        session.say(&get(1, "late", 20_000));
        let reply = session.receive();
        assert!(
            matches!(&reply, ToWorker::KvReply { value: Some(value), .. } if value == "AA=="),
            "{reply:?}"
        );
        println!("read");
    } else {
        session.say(&get(1, "never", 200));
        session.receive();
        session.say(&ToAgent::KvPut {
            call: 2,
            key: "late".into(),
            value: "AA==".into(),
        });
        session.receive();
    }
}

#[test]
fn a_read_outlasts_the_longest_one_of_the_daemon() {
    let daemon = Daemon::start(Policy {
        longest_read: Duration::from_millis(10),
        ..Policy::default()
    });
    let end = launch(&daemon)
        .workers(2)
        .role_in("key_value", "role_reads_patiently")
        .start()
        .wait();
    assert_eq!(end.code, 0, "{}\n{}", end.stdout, end.stderr);
    assert!(end.stdout.contains("read"), "{}", end.stdout);
}
