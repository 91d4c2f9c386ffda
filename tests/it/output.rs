//! The output of workers on its way to readers that are late, slow or gone, and to full disks.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::OwnedFd;

use nix::sys::signal::Signal;

use crate::harness::{Program, Running, launch};

/// Less than the launcher keeps, and far more than a pipe.
const LINES: usize = 30_000;

/// A job that prints many lines, fails, and has no reader yet.
fn unread_job() -> (Running, std::io::PipeReader) {
    let (unread, stdout) = std::io::pipe().expect("a pipe");
    let lines = "yes 'a line of output that is as long as the lines of usual scripts are'";
    let script = format!("{lines} | head -n {LINES}; exit 3");
    let launch = launch().stdout_to(OwnedFd::from(stdout).into());
    (launch.shell(&script).start(), unread)
}

#[test]
fn a_reader_that_begins_after_the_job_has_failed_gets_every_line() {
    let (mut running, mut unread) = unread_job();
    running.wait_for("exited with code 3");
    let mut text = String::new();
    unread.read_to_string(&mut text).expect("UTF-8");
    running.finish().expect_exit(3);
    assert_eq!(text.lines().count(), LINES);
}

#[test]
fn a_signal_ends_the_wait_for_a_reader_and_the_lost_lines_are_counted() {
    let (mut running, mut unread) = unread_job();
    running.wait_for("exited with code 3");
    running.insist(Signal::SIGTERM, "lines lost");
    let finished = running.finish();
    finished.expect_exit(3);
    let stderr = finished.stderr();
    let (_, lost) = stderr
        .split_once("standard output did not take them: at least ")
        .expect("a count");
    let lost: usize = lost.lines().next().expect("a line").parse().expect("a number");
    let mut text = String::new();
    unread.read_to_string(&mut text).expect("UTF-8");
    assert_eq!(text.matches('\n').count() + lost, LINES);
}

#[test]
fn a_full_disk_does_not_end_the_job_and_the_lost_lines_are_counted() {
    let full = File::options()
        .write(true)
        .open("/dev/full")
        .expect("a full disk");
    let finished = launch()
        .stdout_to(full)
        .flag("--event-log-handler", "/dev/full")
        .shell("echo one; echo two")
        .run();
    finished.expect_exit(0);
    let stderr = finished.stderr();
    for expected in [
        "cannot write to standard output: No space left on device",
        "standard output did not take them: at least 2",
        "events missing in the file of `--event-log-handler`: ",
    ] {
        assert!(stderr.contains(expected), "{stderr}");
    }
}

#[test]
fn lines_of_both_streams_stay_in_order_in_one_place() {
    let script = "i=0; while [ $i -lt 400 ]; do echo $i; echo $((i + 1)) >&2; i=$((i + 2)); done; exit 3";
    let in_one_place = [
        "-c",
        r#"exec "$0" --rdzv-id order sh -c "$1" 2>&1"#,
        env!("CARGO_BIN_EXE_ddp-run"),
        script,
    ];
    let finished = Program::new("sh").args(in_one_place).run();
    finished.expect_exit(3);
    let (lines, report): (Vec<String>, Vec<String>) =
        (finished.stdout().iter().cloned()).partition(|line| line.starts_with("[0]"));
    let expected: Vec<String> = (0..400).map(|line| format!("[0] {line}")).collect();
    assert_eq!(lines, expected);
    let tail = "last lines of stdout and stderr:";
    assert!(report.iter().any(|line| line.contains(tail)), "{report:?}");
}
