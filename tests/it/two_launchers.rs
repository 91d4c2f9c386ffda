//! Two launchers on one machine, as two nodes of a job.

use std::collections::BTreeSet;

use nix::sys::signal::Signal;

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
fn hosted_by_one_of_them() {
    let port = ReservedPort::new();
    expect_one_job(|| launch().node_of(2, &port.endpoint, "embedded"));
}

/// The store could not listen at the port of the rendezvous: exit 69.
#[test]
fn master_address_and_port_may_be_those_of_the_rendezvous() {
    let port = ReservedPort::new();
    let (host, number) = port.endpoint.rsplit_once(':').expect("a port");
    let node = || launch().node_of(2, &port.endpoint, "master");
    let node = || node().flag("--master-addr", host).flag("--master-port", number);
    expect_one_job(|| node().flag("--rdzv-backend", "c10d"));
    let kubeflow = || {
        launch()
            .env("PET_MASTER_ADDR", host)
            .env("PET_MASTER_PORT", number)
    };
    let kubeflow = || kubeflow().env("PET_RDZV_BACKEND", "c10d");
    expect_one_job(|| kubeflow().node_of(2, &port.endpoint, "master-again"));
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

/// Works until the file in its argument exists.
fn until(done: &std::path::Path) -> Launch {
    let script = r#"echo at work; until [ -e "$DONE" ]; do sleep 0.02; done"#;
    launch().env("DONE", done).shell(script)
}

#[test]
fn each_wait_for_a_node_is_told() {
    let (daemon, dir) = (Daemon::start(), crate::harness::temp_dir());
    let done = dir.path().join("done");
    let node = |rank| {
        let node = until(&done).flag("--nnodes", "2").flag("--max-restarts", "1");
        let node = node
            .flag("--rdzv-endpoint", &daemon.endpoint)
            .flag("--rdzv-id", "two");
        node.flag("--node-rank", rank).start()
    };
    let mut first = node("0");
    first.wait_for("waiting for 1 more");
    let mut second = node("1");
    first.wait_for("at work");
    second.wait_for("at work");
    second.signal(Signal::SIGKILL);
    second.finish().expect_killed_by(Signal::SIGKILL);
    first.wait_for("was lost: its launcher died");
    first.wait_for("waiting for 1 more");
    std::fs::write(&done, "").expect("writable");
    node("1").finish().expect_exit(0);
    first.finish().expect_exit(0);
    daemon.stop().expect_exit(0);
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
        let refused = node().run();
        refused.expect_no_stderr("broke");
        refused
            .expect_exit(76)
            .expect_stderr(" is already running with all of its 2 nodes")
            .expect_stderr("hint: give each job its own `--rdzv-id`");
    }
    std::fs::write(&done, "").expect("writable");
    for node in first {
        node.finish().expect_exit(0);
    }
    daemon.stop().expect_exit(0);
}

#[test]
fn nodes_that_meet_at_one_of_them_may_be_given_other_arguments() {
    let port = ReservedPort::new();
    let node = |rank: &str| {
        let script = format!("echo {rank} of $WORLD_SIZE of $TORCHELASTIC_RUN_ID on host {rank}");
        launch()
            .flag("--nnodes", "2")
            .flag("--node-rank", rank)
            .flag("--rdzv-endpoint", &port.endpoint)
            .shell(&script)
            .start()
    };
    for (rank, node) in [("0", node("0")), ("1", node("1"))] {
        node.finish()
            .expect_exit(0)
            .expect_stdout(&format!("{rank} of 2 of none on host {rank}"));
    }
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
    let owner = "belongs to job `";
    other()
        .run()
        .expect_exit(69)
        .expect_stderr(&format!(
            "cannot use the rendezvous at `{}`: it {owner}",
            port.endpoint
        ))
        .expect_stderr(
            "hint: if this node belongs to that job, give all nodes of a job the same `--rdzv-id`; ",
        )
        .expect_stderr("choose a different port with `--rdzv-endpoint ");
    other()
        .flag("--rdzv-conf", "is_host=false")
        .run()
        .expect_exit(76)
        .expect_stderr(&format!("the rendezvous at this address {owner}"));
    std::fs::write(&done[0], "").expect("writable");
    first.finish().expect_exit(0);
    std::fs::write(&done[1], "").expect("writable");
    second.finish().expect_exit(0);
}

#[test]
fn runs_that_looked_for_a_log_folder_at_the_same_time_get_one_each() {
    let daemon = Daemon::start();
    let (shared, own) = (temp_dir(), temp_dir());
    let node = |rank: &str, logs: &std::path::Path| {
        launch()
            .node_of(2, &daemon.endpoint, "slow")
            .flag("--rdzv-conf", "is_host=false")
            .flag("--node-rank", rank)
            .flag("--log-dir", logs)
            .shell("echo slow")
    };
    // It has looked, and writes only when the other node is there.
    let mut first = node("0", shared.path()).start();
    first.wait_for("waiting for 1 more");
    launch()
        .flag("--log-dir", shared.path())
        .shell("echo quick")
        .run()
        .expect_exit(0);
    node("1", own.path()).run().expect_exit(0);
    first.finish().expect_exit(0);
    let said = |attempt: u32| {
        let log = shared.path().join(format!("attempt_{attempt}/0/stdout.log"));
        std::fs::read_to_string(log).expect("a log file")
    };
    assert_eq!([said(0), said(1)], ["quick\n", "slow\n"]);
    daemon.stop().expect_exit(0);
}
