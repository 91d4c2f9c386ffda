//! The key-value store of the workers of one node.

use std::time::Duration;

use ddp_proto::control::{KvRefusal, ToWorker, WorkerAssignment};

use crate::daemon::{Daemon, Policy};
use crate::harness::launch;
use crate::talk::{Session, get, put};

/// The answer to a call that succeeded.
fn answer(call: u64, value: Option<&str>) -> ToWorker {
    ToWorker::KvReply {
        call,
        value: value.map(Into::into),
        error: None,
        refusal: None,
    }
}

/// Rank 0 writes an entry, all read it twice.
pub(crate) fn key_value() {
    let mut session = Session::open();
    let assignment = session.receive();
    let ToWorker::Assignment(WorkerAssignment { env, node_addr, .. }) = assignment else {
        panic!("{assignment:?}");
    };
    assert_eq!(env["RANK"], session.env.rank.to_string());
    assert_eq!(node_addr, "127.0.0.1");
    if session.env.rank.0 == 0 {
        session.say(&put(1, "id", "c2VjcmV0"));
        assert_eq!(session.receive(), answer(1, None));
    }
    for call in 2..4 {
        session.say(&get(call, "id", 20_000));
        assert_eq!(session.receive(), answer(call, Some("c2VjcmV0")));
    }
    session.say(&get(4, "no rank writes this", 1));
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
    let daemon = Daemon::start();
    let end = launch(&daemon).workers(3).role("key_value").run();
    end.expect_code(0);
    assert_eq!(end.stdout.matches("all is well").count(), 3, "{}", end.stdout);
}

/// Rank 0 reads an entry that rank 1 writes when the daemon has given up the read many times.
pub(crate) fn reads_patiently() {
    let mut session = Session::open();
    session.receive();
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
        session.say(&put(2, "late", "AA=="));
        session.receive();
    }
}

#[test]
fn a_read_outlasts_the_longest_one_of_the_daemon() {
    let daemon = Daemon::with(Policy {
        longest_read: Duration::from_millis(10),
        ..Policy::default()
    });
    let end = launch(&daemon).workers(2).role("reads_patiently").run();
    end.expect_code(0);
    end.expect_stdout("read");
}
