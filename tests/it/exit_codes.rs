//! Exit codes of launches that nobody answers, that disagree, or whose program fails.

use crate::harness::{Daemon, ReservedPort, TinyJob, launch};

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
            words.contains("]   the job was started 0:0") && words.contains("` with `tiny.yaml`"),
            "{words}"
        );
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
