//! Two launchers on one machine, as two nodes of a job.

use std::collections::BTreeSet;

use crate::harness::{Daemon, Finished, Launch, ReservedPort, launch};

/// Each worker's place, as one line.
const PLACE: &str = "echo place $RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE $GROUP_WORLD_SIZE";

fn places(finished: &Finished) -> BTreeSet<String> {
    finished.expect_exit(0);
    finished
        .stdout()
        .iter()
        .filter_map(|line| Some(line.split_once("place ")?.1.to_owned()))
        .collect()
}

/// Starts two nodes of two workers each and checks that they share ranks 0 to 3.
#[track_caller]
fn expect_one_job(node: impl Fn() -> Launch) {
    let node = || node().nproc(2).shell(PLACE).start();
    let (one, other) = (node(), node());
    let (one, other) = (places(&one.finish()), places(&other.finish()));
    let first: BTreeSet<_> = ["0 0 0 4 2", "1 1 0 4 2"].map(str::to_owned).into();
    let second: BTreeSet<_> = ["2 0 1 4 2", "3 1 1 4 2"].map(str::to_owned).into();
    assert!(
        (one == first && other == second) || (one == second && other == first),
        "{one:?} {other:?}"
    );
}

#[test]
fn with_a_daemon_of_its_own() {
    let daemon = Daemon::start();
    expect_one_job(|| launch().node_of(2, &daemon.endpoint, "separate"));
    daemon.stop().expect_exit(0);
}

#[test]
fn hosted_by_one_of_them() {
    let port = ReservedPort::new();
    expect_one_job(|| launch().node_of(2, &port.endpoint, "embedded"));
}

#[test]
fn hosted_by_node_rank_0_even_if_it_comes_last() {
    let port = ReservedPort::new();
    let node = |rank: &str| {
        launch()
            .node_of(2, &port.endpoint, "ranked")
            .flag("--node-rank", rank)
            .nproc(2)
            .shell(PLACE)
            .start()
    };
    let last = node("1");
    let first = node("0");
    let last = places(&last.finish());
    assert_eq!(last, ["2 0 1 4 2", "3 1 1 4 2"].map(str::to_owned).into());
    assert_eq!(
        places(&first.finish()),
        ["0 0 0 4 2", "1 1 0 4 2"].map(str::to_owned).into()
    );
}

#[test]
fn one_daemon_serves_two_jobs_at_a_time() {
    let daemon = Daemon::start();
    let jobs = ["a", "b"].map(|id| {
        let script = format!("echo job {id} $TORCHELASTIC_RUN_ID $WORLD_SIZE");
        let node = || launch().node_of(2, &daemon.endpoint, id).shell(&script).start();
        (id, node(), node())
    });
    for (id, one, other) in jobs {
        for finished in [one.finish(), other.finish()] {
            finished.expect_exit(0).expect_stdout(&format!("job {id} {id} 2"));
        }
    }
    daemon.stop().expect_exit(0);
}

#[test]
fn a_failure_restarts_both_nodes() {
    let port = ReservedPort::new();
    let script = r#"if [ "$TORCHELASTIC_RESTART_COUNT.$RANK" = 0.1 ]; then kill -9 $$; fi
        if [ "$TORCHELASTIC_RESTART_COUNT" = 0 ]; then exec sleep 1000; fi
        echo second life of $RANK"#;
    let node = || {
        launch()
            .node_of(2, &port.endpoint, "restart")
            .flag("--max-restarts", "1")
            .shell(script)
            .start()
    };
    let (one, other) = (node(), node());
    for finished in [one.finish(), other.finish()] {
        finished.expect_exit(0).expect_stdout("second life of");
    }
}
