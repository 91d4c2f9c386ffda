//! A node whose wall clock is off by an hour: nothing is decided by wall clocks.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::harness::{Daemon, Launch, launch, temp_dir};

const HOUR_S: i64 = 3600;

/// A library that is loaded before libc: every wall clock is an hour ahead.
const SHIM: &str = "\
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && clock == CLOCK_REALTIME) now->tv_sec += 3600;
    return failed;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
";

/// None without a C compiler.
fn build_shim(dir: &Path) -> Option<PathBuf> {
    let (source, library) = (dir.join("clock.c"), dir.join("clock.so"));
    std::fs::write(&source, SHIM).expect("writable");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .args([&library, &source])
        .status();
    built.is_ok_and(|status| status.success()).then_some(library)
}

#[test]
fn a_node_an_hour_ahead_works_fails_and_is_reported_like_any_other() {
    let dir = temp_dir();
    let Some(shim) = build_shim(dir.path()) else {
        eprintln!("SKIPPED: no C compiler");
        return;
    };
    let daemon = Daemon::start();
    // Longer than the time between two heartbeats of the agents.
    let script = r#"echo "now $(date +%s)"; sleep 4; [ "$RANK" = 0 ] || exit 7; exec sleep 1000"#;
    let node = |rank: &str| -> Launch {
        launch()
            .node_of(2, &daemon.endpoint, "clocks")
            .flag("--node-rank", rank)
            .shell(script)
    };
    let mut right = node("0").start();
    let mut ahead = node("1").env("LD_PRELOAD", &shim).start();
    let clock = |line: String| -> i64 {
        let (_, now) = line.split_once("now ").expect("just found");
        now.parse().expect("seconds")
    };
    let skew = clock(ahead.wait_for("now ")) - clock(right.wait_for("now "));
    assert!(
        (HOUR_S - 60..HOUR_S + 60).contains(&skew),
        "the clock was not moved: {skew} s"
    );
    // Neither lost nor refused, and the failure is reported as soon as it happens, with the same code on both.
    let (right, ahead) = (right.finish(), ahead.finish());
    ahead.expect_exit(7);
    // By a wall clock it would be an hour.
    let told = ahead.stderr();
    let (_, after) = told.split_once("exited with code 7 after ").expect("a report");
    let seconds: f64 = after
        .split(' ')
        .next()
        .unwrap_or_default()
        .parse()
        .expect("seconds");
    assert!((4.0..1800.0).contains(&seconds), "{told}");
    right
        .expect_exit(7)
        .expect_stderr("first failure: rank 1")
        .expect_stderr("rank 0: terminated by ddp-run (SIGTERM)");
}
