//! Workers under `--hang-timeout`.

use std::time::Duration;

use crate::daemon::Daemon;
use crate::harness::launch;
use crate::talk::{Session, heartbeat};

/// Both ranks fall silent. Rank 0, which is behind, has hung up; rank 1 has only replaced its connection.
pub(crate) fn hangs_up_or_hangs() {
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
    let daemon = Daemon::start();
    let launch = launch(&daemon)
        .workers(2)
        .role("hangs_up_or_hangs")
        // Rank 0 hangs up right after its heartbeat: within this time on any machine.
        .hang_timeout(Duration::from_secs(5));
    let end = launch.run();
    end.expect_code(134);
    end.expect_stderr("rank 1 hung: no heartbeat for");
    end.expect_no_stderr("rank 0 hung");
    end.expect_stderr("hint: if it was still working, raise `--hang-timeout`");
}
