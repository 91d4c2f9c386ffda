//! `--worker-ports`: where the workers of several nodes meet.

use std::net::TcpListener;

use crate::harness::{Daemon, TinyJob, launch};

/// The first port of a range, which another program has. No other program has had the range as a whole.
fn taken_range(ports: u16) -> (TcpListener, u16, String) {
    let taken = TcpListener::bind("0.0.0.0:0").expect("a free port");
    let first = taken.local_addr().expect("an address").port();
    let range = format!("{first}-{}", first + ports - 1);
    (taken, first, range)
}

/// A node of two, one rank each, that finds no port.
#[test]
fn a_rank_that_finds_no_port_names_the_range() {
    let (_taken, _, range) = taken_range(1);
    let job = TinyJob::new();
    let daemon = Daemon::start();
    let node = || {
        let node = launch().node_of(2, &daemon.endpoint, "none");
        let node = node.flag("--worker-ports", &range).flag("--max-restarts", "0");
        node.dir(job.dir()).target("tiny.yaml").start()
    };
    let (one, other) = (node(), node());
    let words = format!("cannot listen at `127.0.0.1`: no port of `--worker-ports {range}` is free");
    let (one, other) = (one.finish(), other.finish());
    assert!(
        one.transcript().contains(&words) || other.transcript().contains(&words),
        "{}{}",
        one.transcript(),
        other.transcript()
    );
    assert!(one.code() != Some(0) && other.code() != Some(0));
}

#[test]
fn a_range_that_is_too_small_is_refused_at_the_start() {
    let job = TinyJob::new();
    let node = launch().nproc(3).node_of(2, "127.0.0.1:29400", "small");
    let node = node.flag("--worker-ports", "29500-29501").dir(job.dir());
    let finished = node.target("tiny.yaml").run();
    finished.expect_exit(2);
    finished.expect_stderr(
        "error: `--worker-ports 29500-29501` is 2 ports, but the 3 workers of this node need one each",
    );
    finished.expect_stderr("hint: choose a larger range, with a few more than workers");
    let finished = launch().flag("--worker-ports", "29500").target("true").run();
    finished
        .expect_exit(2)
        .expect_stderr("expected `FIRST-LAST` with 1 <= FIRST <= LAST <= 65535, for example `29500-29600`");
}

#[test]
fn master_port_of_a_script_is_in_the_range_and_again_after_a_restart() {
    let (_taken, first, range) = taken_range(20);
    let ends = r#"echo port $MASTER_PORT; test "$TORCHELASTIC_RESTART_COUNT" = 1"#;
    let launch = launch()
        .env("PET_WORKER_PORTS", &range)
        .flag("--max-restarts", "1");
    let finished = launch.shell(ends).run();
    finished.expect_exit(0);
    let ports = finished
        .stdout()
        .iter()
        .filter_map(|line| line.split_once("port "));
    let ports: Vec<u16> = ports.map(|(_, port)| port.parse().expect("a port")).collect();
    assert_eq!(ports.len(), 2, "{}", finished.transcript());
    let allowed = first + 1..first + 20;
    assert!(ports.iter().all(|port| allowed.contains(port)), "{ports:?}");
}

#[test]
fn a_launcher_that_finds_no_port_for_a_script_says_so() {
    let (_taken, _, range) = taken_range(1);
    let finished = launch().flag("--worker-ports", &range).shell("true").run();
    finished.expect_stderr(&format!(
        "cannot reserve a port of `--worker-ports {range}` for MASTER_PORT: none is free"
    ));
    assert_ne!(finished.code(), Some(0));
}
