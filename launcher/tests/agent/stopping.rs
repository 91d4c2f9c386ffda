//! The stop routine, and signals in every state.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ddp_proto::rendezvous::agent_message::Body as Report;
use nix::sys::signal::Signal;

use crate::daemon::{DEADLINE, Daemon};
use crate::harness::{Meeting, launch};
use crate::leftovers::groups_of;

const STUBBORN: &str = r#"trap "" TERM INT; echo ready; while :; do tail -f /dev/null; done"#;

fn leave_signal(daemon: &Daemon) -> Option<i32> {
    daemon.expect("a good-bye", |message| match message.body {
        Some(Report::Leave(leave)) => Some(leave.signal),
        _ => None,
    })
}

#[test]
fn a_worker_that_ignores_sigterm_is_killed_after_the_grace() {
    let daemon = Daemon::start();
    let meeting = Meeting::new();
    let script = format!(
        r#"if [ "$RANK" = 1 ]; then cat "$FIFO"; exit 3; fi
           trap "" TERM; : >"$FIFO"; {STUBBORN}"#
    );
    let launch = launch(&daemon).workers(2).meet(&meeting).sh(&script);
    let end = launch.shutdown_timeout(Duration::from_millis(300)).run();
    end.expect_code(3);
    end.expect_stderr("rank 0: terminated by ddp-run (SIGKILL)");
}

#[test]
fn a_first_signal_stops_with_its_code() {
    for (signal, code) in [
        (Signal::SIGINT, 130),
        (Signal::SIGQUIT, 131),
        (Signal::SIGTERM, 143),
        (Signal::SIGHUP, 129),
    ] {
        let daemon = Daemon::start();
        // It gets this signal and no other.
        let name = &signal.as_str()[3..];
        let script = format!(
            "trap 'echo saved; exit 0' {name}; echo ready; while :; do tail -f /dev/null & wait; done"
        );
        let mut launcher = launch(&daemon).sh(&script).start();
        launcher.stdout.expect("[0] ready");
        launcher.signal(signal);
        let end = launcher.wait();
        end.expect_code(code);
        assert!(
            end.stdout.contains("[0] saved"),
            "it had no time to save: {end:?}"
        );
        assert_eq!(leave_signal(&daemon), Some(signal as i32));
    }
}

/// It cannot save without an answer of its child, which dies of the signal.
#[test]
fn with_the_scope_of_a_rank_its_children_live_until_it_has_saved() {
    let script = r#"dir=$(dirname "$FIFO"); mkfifo "$dir/ask" "$dir/answer"
        (while read -r ask <"$dir/ask"; do echo "$ask too" >"$dir/answer"; done) &
        trap 'echo please >"$dir/ask"; read -r words <"$dir/answer"; echo "saved: $words"; exit 0' TERM
        echo ready; while :; do tail -f /dev/null & wait $!; done"#;
    for ranks_only in [true, false] {
        let (daemon, meeting) = (Daemon::start(), Meeting::new());
        let launch = launch(&daemon).meet(&meeting).sh(script);
        let launch = if ranks_only {
            launch
                .signals_ranks_only()
                .shutdown_timeout(Duration::from_hours(1))
        } else {
            launch.shutdown_timeout(Duration::from_millis(300))
        };
        let mut launcher = launch.start();
        launcher.stdout.expect("[0] ready");
        launcher.signal(Signal::SIGTERM);
        let end = launcher.wait();
        end.expect_code(143);
        let saved = end.stdout.contains("[0] saved: please too");
        assert_eq!(saved, ranks_only, "{} {}", end.stdout, end.stderr);
    }
}

/// `timeout 30 ddp-run` signals the program and then its process group.
#[test]
fn a_signal_that_is_delivered_twice_leaves_time_to_save() {
    let script = r#"trap 'read -r go <"$FIFO"; echo saved; exit 0' TERM
        echo ready; while :; do tail -f /dev/null & wait $!; done"#;
    let saves = || {
        let (daemon, meeting) = (Daemon::start(), Meeting::new());
        let mut launcher = launch(&daemon).meet(&meeting).sh(script).start();
        launcher.stdout.expect("[0] ready");
        launcher.signal(Signal::SIGTERM);
        // The first is known to have been taken.
        launcher.stderr.expect("stopping the workers");
        launcher.signal(Signal::SIGTERM);
        if launcher
            .stderr
            .comes("killing", Instant::now() + Duration::from_millis(300))
        {
            return false;
        }
        fs::write(&meeting.fifo, "go\n").unwrap();
        launcher.wait().stdout.contains("[0] saved")
    };
    // The second one may come late on a machine that is busy with something else.
    assert!((0..5).any(|_| saves()), "the workers are killed");
}

/// Holds processes in state D, where not even SIGKILL reaches them: the freezer of control groups, version 1.
struct Freezer(PathBuf);

impl Freezer {
    /// None where this user may not, or version 1 is not mounted.
    fn make() -> Option<Self> {
        let name = format!("ddp-test-{}", std::process::id());
        let dir = PathBuf::from("/sys/fs/cgroup/freezer").join(name);
        fs::create_dir(&dir).ok()?;
        Some(Self(dir))
    }

    fn freeze(&self, pid: &str) {
        fs::write(self.0.join("cgroup.procs"), pid).unwrap();
        fs::write(self.0.join("freezer.state"), "FROZEN").unwrap();
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        // Its member has been killed long since, and dies now; the folder goes when it is empty.
        let _ = fs::write(self.0.join("freezer.state"), "THAWED");
        until_removed(&self.0);
    }
}

/// The last member of a control group is gone some moments after it was killed.
fn until_removed(group: &Path) {
    let deadline = Instant::now() + DEADLINE;
    while fs::remove_dir(group).is_err() && group.exists() && Instant::now() < deadline {
        std::thread::yield_now();
    }
}

#[track_caller]
fn until(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !is_so() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::yield_now();
    }
}

#[test]
fn a_process_that_cannot_be_killed_is_named_and_does_not_hold_up_the_end() {
    let Some(freezer) = Freezer::make() else {
        eprintln!("SKIPPED: no freezer of control groups here");
        return;
    };
    let daemon = Daemon::start();
    let launch = launch(&daemon).sh("echo pid $$; exec tail -f /dev/null");
    let mut launcher = launch.shutdown_timeout(Duration::from_millis(100)).start();
    let line = launcher.stdout.expect("pid ");
    let pid = line.trim().rsplit(' ').next().unwrap();
    freezer.freeze(pid);
    launcher.signal(Signal::SIGTERM);
    let launcher_pid = launcher.pid();
    let end = launcher.wait();
    // It could not leave while a process was in it; another launcher cannot either.
    let groups = groups_of(launcher_pid);
    let next = || {
        let end = crate::harness::launch(&daemon).run();
        end.expect_code(0);
    };
    next();
    assert_eq!(groups_of(launcher_pid), groups);
    drop(freezer);
    until("it is empty", || {
        groups
            .iter()
            .all(|group| fs::read_to_string(group.join("cgroup.procs")).is_ok_and(|pids| pids.is_empty()))
    });
    next();
    assert_eq!(groups_of(launcher_pid), [] as [PathBuf; 0]);
    for group in &groups {
        let words = format!(
            "cannot remove control group `{}`, because of {pid} (`",
            group.display()
        );
        end.expect_stderr(&words);
    }
    assert!(
        !groups.is_empty() || ddp_launcher::parent_of_workers().is_err(),
        "the group of a process that cannot be killed is gone"
    );
    end.expect_code(143);
    // The freezer may have been faster than `exec`.
    let named = ["tail", "sh"].map(|name| format!("cannot kill processes: {pid} (`{name}`, state D"));
    assert!(
        named.iter().any(|words| end.stderr.contains(words)),
        "{}",
        end.stderr
    );
}

/// Opening a pipe for writing waits for a reader, as a file on a dead file system waits for its server.
#[test]
fn a_log_folder_that_does_not_answer_holds_up_neither_heartbeats_nor_a_stop() {
    let (daemon, logs) = (Daemon::start(), tempfile::tempdir().unwrap());
    let launcher = launch(&daemon)
        .max_restarts(1)
        .log_dir(logs.path())
        .stdout_filter("loss")
        .env("LOGS", logs.path())
        .sh(r#"mkdir "$LOGS/attempt_1" && mkfifo "$LOGS/attempt_1/filtered_stdout.log"; exit 3"#)
        .start();
    daemon.expect("a heartbeat of the second generation", |message| {
        (message.generation == 2 && matches!(message.body, Some(Report::Heartbeat(_)))).then_some(())
    });
    launcher.signal(Signal::SIGTERM);
    assert_eq!(launcher.wait().code, 143);
}
