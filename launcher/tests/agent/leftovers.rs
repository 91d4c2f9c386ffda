//! Nothing that workers started survives them, whatever becomes of the launcher.
//!
//! Every process in question holds a named pipe open for writing: its reader sees the end of the file when the
//! last of them is gone.

use std::fs::File;
use std::path::PathBuf;

use nix::sys::signal::Signal;

use crate::daemon::Daemon;
use crate::harness::{Meeting, launch};

/// A child in the worker's group, one in a session of its own, and an orphan without the worker's variables.
const FAMILY: &str = r#"exec 3>"$FIFO"
    tail -f /dev/null &
    setsid tail -f /dev/null &
    (setsid env -i tail -f /dev/null &)
    echo ready >&3"#;

#[test]
fn leftovers_of_a_worker_that_succeeded_are_gone() {
    let daemon = Daemon::start();
    let meeting = Meeting::new();
    let mut family = meeting.lines();
    // One worker and its family may be gone before the other has opened the pipe: it must not end before.
    let held = File::options().write(true).open(&meeting.fifo).unwrap();
    let end = launch(&daemon).workers(2).meet(&meeting).sh(FAMILY).run();
    end.expect_code(0);
    drop(held);
    family.rest();
}

#[test]
fn leftovers_of_a_worker_that_failed_are_gone() {
    let daemon = Daemon::start();
    let meeting = Meeting::new();
    let mut family = meeting.lines();
    let end = launch(&daemon)
        .meet(&meeting)
        .sh(&format!("{FAMILY}; kill -9 $$"))
        .run();
    end.expect_code(137);
    family.rest();
}

#[test]
fn the_group_of_a_worker_ends_with_it_while_others_run() {
    let daemon = Daemon::start();
    let meeting = Meeting::new();
    let mut family = meeting.lines();
    let script = r#"[ "$RANK" = 0 ] || exec tail -f /dev/null
        exec 3>"$FIFO"; tail -f /dev/null & echo ready >&3; exit 0"#;
    let launcher = launch(&daemon).workers(2).meet(&meeting).sh(script).start();
    family.rest();
    launcher.signal(Signal::SIGTERM);
    assert_eq!(launcher.wait().code, 143);
}

#[test]
fn nothing_survives_a_launcher_that_is_killed() {
    let daemon = Daemon::start();
    let meeting = Meeting::new();
    let mut family = meeting.lines();
    // Without PDEATHSIG, which only the workers themselves have, and in sessions of their own. The one without
    // any variable is in the worker's session.
    let script = r#"exec 3>"$FIFO"
        tail -f /dev/null &
        setsid tail -f /dev/null &
        (setsid setsid tail -f /dev/null &)
        env -i tail -f /dev/null &
        echo ready >&3; exec tail -f /dev/null"#;
    let launcher = launch(&daemon).workers(2).meet(&meeting).sh(script).start();
    family.expect("ready");
    family.expect("ready");
    launcher.signal(Signal::SIGKILL);
    let end = launcher.wait();
    end.expect_code(1009);
    family.rest();
}

/// Control groups that a launcher made.
pub(crate) fn groups_of(launcher: i32) -> Vec<PathBuf> {
    let Ok(own) = ddp_launcher::parent_of_workers() else {
        return Vec::new();
    };
    let prefix = format!("ddp-{launcher}-");
    let is_its = |group: &PathBuf| {
        let name = group.file_name().unwrap_or_default();
        name.to_string_lossy().starts_with(&prefix)
    };
    let groups = std::fs::read_dir(own).unwrap().map(|entry| entry.unwrap().path());
    groups.filter(is_its).collect()
}

#[test]
fn a_control_group_holds_what_has_left_its_session_and_cleared_its_environment() {
    if let Err(why) = ddp_launcher::parent_of_workers() {
        eprintln!("SKIPPED: {why}");
        return;
    }
    let daemon = Daemon::start();
    let meeting = Meeting::new();
    let mut family = meeting.lines();
    let script =
        r#"exec 3>"$FIFO"; (setsid env -i tail -f /dev/null &); echo ready >&3; exec tail -f /dev/null"#;
    let launcher = launch(&daemon).meet(&meeting).sh(script).start();
    family.expect("ready");
    let pid = launcher.pid();
    assert_eq!(groups_of(pid).len(), 1);
    launcher.signal(Signal::SIGKILL);
    assert_eq!(launcher.wait().code, 1009);
    family.rest();
    let deadline = std::time::Instant::now() + crate::daemon::DEADLINE;
    while !groups_of(pid).is_empty() {
        assert!(
            std::time::Instant::now() < deadline,
            "the guardian left the group behind"
        );
        std::thread::yield_now();
    }
}

#[test]
fn the_control_group_goes_with_the_launcher() {
    if let Err(why) = ddp_launcher::parent_of_workers() {
        eprintln!("SKIPPED: {why}");
        return;
    }
    let daemon = Daemon::start();
    let launcher = launch(&daemon).workers(2).sh("cat /proc/self/cgroup").start();
    let pid = launcher.pid();
    let end = launcher.wait();
    end.expect_code(0);
    assert_eq!(
        end.stdout.matches(&format!("/ddp-{pid}-")).count(),
        2,
        "{}",
        end.stdout
    );
    assert!(groups_of(pid).is_empty());
}

#[test]
fn nothing_survives_a_launcher_in_a_launcher() {
    let daemon = Daemon::start();
    let inner_daemon = Daemon::start();
    let meeting = Meeting::new();
    let mut family = meeting.lines();
    let script = r#"exec 3>"$FIFO"; setsid tail -f /dev/null & echo ready >&3; exec tail -f /dev/null"#;
    let inner = launch(&inner_daemon).meet(&meeting).sh(script);
    let launcher = launch(&daemon).launcher(&inner).start();
    family.expect("ready");
    launcher.signal(Signal::SIGKILL);
    assert_eq!(launcher.wait().code, 1009);
    family.rest();
}
