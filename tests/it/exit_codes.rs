//! Every documented exit code, and that it is the same on every node.

use nix::sys::signal::Signal;

use crate::harness::{Daemon, ReservedPort, Running, TinyJob, launch, temp_dir};

/// Rank 1 fails once rank 0 is ready, which says when it is asked to stop and goes on.
const STUBBORN: &str = r#"[ "$RANK" = 1 ] && { until [ -e "$READY" ]; do sleep 0.02; done; exit 42; }
    trap "" INT; trap "echo asked" TERM; : >"$READY"; while :; do sleep 1000 & wait; done"#;

#[test]
fn success_is_silent() {
    // A larger number than the affinity mask leaves would be reported.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    launch()
        .nproc(cores.min(8) as u32)
        .target("true")
        .run()
        .expect_exit(0)
        .expect_silence();
}

#[test]
fn a_signalled_worker_gives_128_and_its_number() {
    let script = r#"if [ "$RANK" = 1 ]; then kill -9 $$; fi; exec sleep 1000"#;
    let finished = launch().nproc(2).shell(script).run();
    finished
        .expect_exit(137)
        .expect_stderr("rank 1")
        .expect_stderr("SIGKILL");
}

#[test]
fn the_first_failure_is_named_and_victims_are_not_blamed() {
    let script = r#"if [ "$RANK" = 0 ]; then echo cause of it all >&2; exit 3; fi; exec sleep 1000"#;
    let finished = launch().nproc(3).shell(script).run();
    finished
        .expect_exit(3)
        .expect_stderr("first failure: rank 0")
        .expect_stderr("cause of it all");
}

#[test]
fn a_restart_that_works_is_a_success() {
    let script = r#"[ "$TORCHELASTIC_RESTART_COUNT" = 1 ] || [ "$RANK" = 0 ] || exit 7"#;
    launch()
        .nproc(2)
        .flag("--max-restarts", "1")
        .shell(script)
        .run()
        .expect_exit(0);
}

#[test]
fn programs_other_than_ours_are_not_restarted_by_default() {
    let finished = launch().shell("echo life; exit 7").run();
    finished.expect_exit(7);
    assert_eq!(finished.stdout(), ["[0] life"]);
}

#[test]
fn nobody_at_the_endpoint_gives_69() {
    let port = ReservedPort::new();
    let conf = "is_host=0,connect_timeout=0.3";
    let finished = launch()
        .node_of(2, &port.endpoint, "j")
        .flag("--rdzv-conf", conf)
        .target("true")
        .run();
    finished
        .expect_exit(69)
        .expect_stderr("is unreachable")
        .expect_stderr(&port.endpoint)
        .expect_stderr("hint:");
}

#[test]
fn missing_nodes_give_75() {
    let daemon = Daemon::start();
    let conf = "join_timeout=0.3";
    let finished = launch()
        .node_of(2, &daemon.endpoint, "j")
        .flag("--rdzv-conf", conf)
        .target("true")
        .run();
    finished.expect_exit(75);
    daemon.stop().expect_exit(0);
}

#[test]
fn nodes_that_disagree_learn_of_the_keys_that_differ_and_of_no_others() {
    let daemon = Daemon::start();
    let (job, other) = (
        TinyJob::new(),
        TinyJob::with(|yaml| {
            yaml.replace("seed: 7", "seed: 8")
                .replace("lr: 1.0e-3", "lr: 0.001")
        }),
    );
    let node = |job: &TinyJob| {
        let node = launch().node_of(2, &daemon.endpoint, "j").dir(job.dir());
        node.target("tiny.yaml").start()
    };
    for (node, seed) in [(node(&job), 7), (node(&other), 8)] {
        let finished = node.finish();
        finished
            .expect_exit(76)
            .expect_stderr("nodes disagree on job `j`: `run.seed` differs between ");
        let words = finished.stderr();
        assert!(
            words.contains(&format!("`run.seed` on this node: `{seed}`")),
            "{words}"
        );
        for alike in ["train.", "configuration:", "--nnodes"] {
            assert!(!words.contains(alike), "`{alike}` does not differ:\n{words}");
        }
    }
    daemon.stop().expect_exit(0);
}

/// Stops a launcher whose worker does not stop: what it says, and then the worker's end, follow the signals.
fn insist(running: &mut Running, signal: Signal) {
    running.wait_for("[0] asked");
    running.signal(signal);
    running.wait_for("another signal kills them");
    running.insist(signal, "killing the workers");
}

#[test]
fn a_signal_to_one_node_after_a_failure_on_another_leaves_the_exit_code_the_same() {
    let (daemon, dir) = (Daemon::start(), temp_dir());
    let ready = dir.path().join("ready");
    let node = |rank: &str| {
        launch()
            .node_of(2, &daemon.endpoint, "j")
            .flag("--node-rank", rank)
            .flag("--shutdown-timeout", "3600")
            .env("READY", &ready)
            .shell(STUBBORN)
            .start()
    };
    let (mut stubborn, failing) = (node("0"), node("1"));
    insist(&mut stubborn, Signal::SIGTERM);
    stubborn
        .finish()
        .expect_exit(42)
        .expect_stderr("first failure: rank 1");
    failing.finish().expect_exit(42);
    daemon.stop().expect_exit(0);
}
