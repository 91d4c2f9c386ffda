//! Two launchers on one machine, as two nodes of a job.

use std::collections::BTreeSet;

use crate::harness::{Daemon, Finished, Launch, ReservedPort, launch, temp_dir};

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

/// Works until the file that it is told of exists.
fn until(done: &std::path::Path) -> Launch {
    let script = r#"echo at work; until [ -e "$DONE" ]; do sleep 0.02; done"#;
    launch()
        .env("DONE", done.to_str().expect("unicode"))
        .shell(script)
}

#[test]
fn a_second_job_of_the_same_default_id_is_refused_by_name() {
    let (daemon, dir) = (Daemon::start(), temp_dir());
    let done = dir.path().join("done");
    let node = || {
        until(&done)
            .flag("--nnodes", "2")
            .flag("--rdzv-endpoint", &daemon.endpoint)
            .flag("--rdzv-conf", "is_host=false")
    };
    let mut first = [node().start(), node().start()];
    for node in &mut first {
        node.wait_for("at work");
    }
    for _ in 0..2 {
        node()
            .run()
            .expect_exit(76)
            .expect_stderr("job `none` runs with all of its 2 nodes already")
            .expect_stderr("hint: give every job a `--rdzv-id` of its own");
    }
    std::fs::write(&done, "").expect("writable");
    for node in first {
        node.finish().expect_exit(0);
    }
    daemon.stop().expect_exit(0);
}

/// Four nodes of two jobs that nobody named, all on their way at once. Nodes that disagree while they gather all end, as
/// nobody knows who is wrong; a job whose nodes find each other first runs. Either way, no worker meets one of the other job.
#[test]
fn two_jobs_of_the_same_default_id_that_gather_at_once_are_never_mixed() {
    let daemon = Daemon::start();
    for _ in 0..3 {
        let node = |job: &str| {
            launch()
                .flag("--nnodes", "2")
                .flag("--rdzv-endpoint", &daemon.endpoint)
                .flag("--rdzv-conf", "is_host=false,join_timeout=5")
                .nproc(2)
                .shell(&format!("echo job {job}; {PLACE}"))
                .start()
        };
        let nodes = ["a", "b", "b", "a"].map(|job| (job, node(job)));
        let nodes = nodes.map(|(job, node)| (job, node.finish()));
        for job in ["a", "b"] {
            let own = nodes.iter().filter(|(of, _)| *of == job);
            let (ran, refused): (Vec<_>, Vec<_>) = own
                .map(|(_, finished)| finished)
                .partition(|finished| finished.code() == Some(0));
            for finished in &refused {
                assert!(finished.stdout().is_empty(), "{}", finished.transcript());
                // 75: it came when the others had ended, and waited alone.
                if finished.code() != Some(75) {
                    finished.expect_exit(76).expect_stderr("job `none`");
                }
            }
            // Ranks 0 to 3 of its own two nodes: nobody of the other job has taken a place.
            let all: BTreeSet<String> = ran.iter().flat_map(|finished| places(finished)).collect();
            let whole = ["0 0 0 4 2", "1 1 0 4 2", "2 0 1 4 2", "3 1 1 4 2"];
            match ran.len() {
                0 => {}
                2 => assert_eq!(all, whole.map(str::to_owned).into()),
                _ => panic!(
                    "one node of job {job} ran without the other: {}",
                    refused[0].transcript()
                ),
            }
        }
    }
    daemon.stop().expect_exit(0);
}

#[test]
fn a_job_does_not_end_with_another_one_that_has_the_port() {
    let (port, dir) = (ReservedPort::new(), temp_dir());
    let done = ["first", "second"].map(|name| dir.path().join(name));
    let [first, second] = [&done[0], &done[1]].map(|done| {
        let mut running = until(done).flag("--rdzv-endpoint", &port.endpoint).start();
        running.wait_for("at work");
        running
    });
    let other = || launch().node_of(2, &port.endpoint, "other").target("true");
    let owner = "the rendezvous at this address belongs to job `";
    other()
        .run()
        .expect_exit(69)
        .expect_stderr(owner)
        .expect_stderr("hint: choose another port");
    other()
        .flag("--rdzv-conf", "is_host=false")
        .run()
        .expect_exit(76)
        .expect_stderr(owner);
    std::fs::write(&done[0], "").expect("writable");
    first.finish().expect_exit(0);
    std::fs::write(&done[1], "").expect("writable");
    second.finish().expect_exit(0);
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
