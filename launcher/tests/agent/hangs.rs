//! Workers under `--hang-timeout`.

use std::time::Duration;

use ddp_proto::control::{Phase, ToAgent};

use crate::daemon::{Daemon, Policy};
use crate::harness::launch;
use crate::talk::{Session, plays};

fn heartbeat(step: u64) -> ToAgent {
    ToAgent::Heartbeat {
        step,
        phase: Phase::Training,
        quiet_ms: 0,
        progress: None,
        waits: Vec::new(),
        activity: String::new(),
        loss: None,
    }
}

/// Both ranks fall silent. Rank 0, which is behind, has hung up; rank 1 has only replaced its connection.
#[test]
fn role_hangs_up_or_hangs() {
    if !plays("role_hangs_up_or_hangs") {
        return;
    }
    let mut session = Session::open();
    session.receive();
    let _kept = if std::env::var("RANK").as_deref() == Ok("0") {
        session.say(&heartbeat(3));
        drop(session);
        None
    } else {
        session.say(&heartbeat(4));
        let other = Session::open();
        drop(session);
        Some(other)
    };
    loop {
        std::thread::park();
    }
}

#[test]
fn a_worker_that_hung_up_is_not_watched_but_one_that_replaced_its_connection_is() {
    let daemon = Daemon::start(Policy::default());
    let launch = launch(&daemon)
        .workers(2)
        .role_in("hangs", "role_hangs_up_or_hangs")
        .hang_timeout(Duration::from_secs(1));
    let end = launch.start().wait();
    assert_eq!(end.code, 134, "{}", end.stderr);
    assert!(
        end.stderr.contains("rank 1 hung: no heartbeat for"),
        "{}",
        end.stderr
    );
    assert!(!end.stderr.contains("rank 0 hung"), "{}", end.stderr);
    assert!(!end.stderr.contains("rank 0 is slow"), "{}", end.stderr);
    assert!(
        end.stderr
            .contains("hint: if it was still working, raise `--hang-timeout`"),
        "{}",
        end.stderr
    );
}
