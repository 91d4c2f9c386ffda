//! Workers that listen on the control socket are given time to end on their own; those that only send are not.

use std::io::Write;
use std::time::Duration;

use ddp_proto::control::{Sizes, ToAgent, ToWorker};
use ddp_proto::rendezvous::agent_message::Body as Report;
use nix::sys::signal::Signal;

use crate::daemon::Daemon;
use crate::harness::{Meeting, launch};
use crate::talk::{Session, heartbeat};

/// Waits to be asked to stop, then ends with success.
pub(crate) fn stops_at_boundary() {
    let mut session = Session::open();
    session.receive();
    session.say(&heartbeat(17));
    session.say(&ToAgent::Sizes(Sizes {
        ranks_divide: Some(12),
        ..Sizes::default()
    }));
    // A message of a newer build is no reason to end.
    session
        .socket
        .get_mut()
        .write_all(b"{\"type\": \"telepathy\"}\n")
        .unwrap();
    println!("ready");
    let asked = session.receive();
    println!("asked: {asked:?}");
    assert!(matches!(asked, ToWorker::StopAtStepBoundary { .. }));
    println!("saved");
}

#[test]
fn a_native_worker_stops_at_a_step_boundary() {
    let daemon = Daemon::start();
    let mut launcher = launch(&daemon)
        .workers(2)
        .role("stops_at_boundary")
        .native()
        .start();
    launcher.stdout.expect("ready");
    launcher.stdout.expect("ready");
    let step = daemon.expect("a heartbeat with a step", |message| match message.body {
        Some(Report::Heartbeat(heartbeat)) => heartbeat.step,
        _ => None,
    });
    assert_eq!(step, 17);
    let divided = daemon.expect("the sizes that the job can have", |message| match message.body {
        Some(Report::Heartbeat(heartbeat)) => heartbeat.ranks_divide,
        _ => None,
    });
    assert_eq!(divided, 12);
    launcher.signal(Signal::SIGINT);
    let end = launcher.wait();
    end.expect_code(130);
    assert_eq!(end.stdout.matches("saved").count(), 2, "{}", end.stdout);
}

/// Rank 0 waits to be asked to stop, then ends with success; rank 1 reacts to signals only.
pub(crate) fn rank_0_stops_at_boundary() {
    if std::env::var("RANK").as_deref() == Ok("1") {
        println!("ready");
        loop {
            std::thread::park();
        }
    }
    let mut session = Session::open();
    session.receive();
    println!("ready");
    assert!(matches!(session.receive(), ToWorker::StopAtStepBoundary { .. }));
    println!("saved");
}

#[test]
fn a_program_that_listens_is_asked_to_stop_and_the_others_are_signalled_at_once() {
    let daemon = Daemon::start();
    let launch = launch(&daemon).workers(2).role("rank_0_stops_at_boundary");
    // Beyond the patience of the test: rank 1 is not to wait for any part of it.
    let mut launcher = launch.shutdown_timeout(Duration::from_hours(1)).start();
    launcher.stdout.expect("ready");
    launcher.stdout.expect("ready");
    launcher.signal(Signal::SIGTERM);
    let end = launcher.wait();
    end.expect_code(143);
    end.expect_stdout("saved");
}

/// Rank 1 connects when rank 0 has been asked to stop.
pub(crate) fn connects_late() {
    let fifo = std::env::var("FIFO").unwrap();
    let is_late = std::env::var("RANK").as_deref() == Ok("1");
    if is_late {
        std::fs::read(&fifo).unwrap();
    }
    let mut session = Session::open();
    session.receive();
    println!("ready");
    assert!(matches!(session.receive(), ToWorker::StopAtStepBoundary { .. }));
    if !is_late {
        drop(std::fs::File::create(fifo).unwrap());
    }
    println!("saved");
}

#[test]
fn a_worker_that_connects_after_the_stop_was_asked_for_is_told() {
    let daemon = Daemon::start();
    let meeting = Meeting::new();
    let launch = launch(&daemon).workers(2).meet(&meeting);
    let mut launcher = launch
        .role("connects_late")
        .native()
        .shutdown_timeout(Duration::from_hours(1))
        .start();
    launcher.stdout.expect("ready");
    launcher.signal(Signal::SIGTERM);
    let end = launcher.wait();
    end.expect_code(143);
    assert_eq!(end.stdout.matches("saved").count(), 2, "{}", end.stdout);
}

/// Rank 1 fails when rank 0 has connected, which only sends.
pub(crate) fn only_sends() {
    let fifo = std::env::var("FIFO").unwrap();
    if std::env::var("RANK").as_deref() == Ok("1") {
        std::fs::read(&fifo).unwrap();
        nix::sys::signal::raise(Signal::SIGKILL).unwrap();
    }
    let mut session = Session::open_to_send();
    // The answer shows that the agent knows of the connection.
    session.receive();
    drop(std::fs::File::create(fifo).unwrap());
    loop {
        std::thread::park();
    }
}

#[test]
fn a_worker_that_only_sends_is_stopped_at_once() {
    let daemon = Daemon::start();
    let meeting = Meeting::new();
    let launch = launch(&daemon).workers(2).meet(&meeting);
    let end = launch.role("only_sends").run();
    end.expect_code(137);
    // Workers that listen have a second before this.
    let stopped = "rank 0: terminated by ddp-run (SIGTERM)";
    end.expect_stderr(stopped);
}
