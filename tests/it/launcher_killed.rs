//! Nothing survives a launcher that is killed.

use nix::sys::signal::Signal;

use crate::harness::launch;

/// It was noticed when a worker ended: there was no other signal.
#[test]
fn the_end_of_the_guardian_is_noticed_while_workers_are_started() {
    let kill = "read guardian others </proc/$PPID/task/$PPID/children; kill -9 $guardian";
    let script = format!("[ $LOCAL_RANK -gt 0 ] || {{ {kill}; }}; exec sleep 1000");
    let mut running = launch().nproc(48).shell(&script).start();
    running.wait_for("the guardian process was killed");
    running.signal(Signal::SIGTERM);
    running.finish().expect_exit(143);
}

#[test]
fn the_launcher_is_small() {
    let finished = launch().nproc(8).shell("grep VmHWM /proc/$PPID/status").run();
    finished.expect_exit(0);
    assert_eq!(finished.stdout().len(), 8);
    for line in finished.stdout() {
        let kib: u64 = line
            .split_whitespace()
            .rev()
            .nth(1)
            .and_then(|n| n.parse().ok())
            .expect("a size in kB");
        assert!(kib < 40 << 10, "the launcher needs {kib} KiB: {line}");
    }
}
