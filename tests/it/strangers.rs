//! Programs that connect to a job's ports and are none of its nodes.

use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::harness::{Daemon, TinyJob, launch, metrics, parameters};

/// How many callers are silent while the ranks look for each other.
const SILENT: usize = 300;

/// A range of ports, of which another program has the first.
fn range(ports: u16) -> (TcpListener, u16, String) {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let first = taken.local_addr().expect("an address").port().min(65_000);
    let range = format!("{first}-{}", first + ports - 1);
    (taken, first, range)
}

/// Trains a job of two nodes, one rank each.
fn train(ports: &str) -> TinyJob {
    let job = TinyJob::new();
    let daemon = Daemon::start();
    let node = |rank: &str| {
        let node = launch().node_of(2, &daemon.endpoint, "strangers");
        let node = node.flag("--node-rank", rank).flag("--worker-ports", ports);
        node.dir(job.dir()).target("tiny.yaml").start()
    };
    let (one, other) = (node("0"), node("1"));
    one.finish().expect_exit(0);
    other.finish().expect_exit(0);
    job
}

/// Everything that trained, to the last bit.
fn result(job: &TinyJob) -> (Vec<String>, impl PartialEq + use<>) {
    let losses = metrics(&job.out())
        .into_iter()
        .map(|line| line["loss"].to_string());
    (losses.collect(), parameters(&job.out()))
}

#[test]
fn three_hundred_silent_callers_change_no_bit_of_a_job() {
    let (_taken, first, ports) = range(8);
    let undisturbed = result(&train(&ports));
    let (is_over, silent) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let disturbed = std::thread::scope(|scope| {
        scope.spawn(|| {
            // From the first moment at which a rank listens.
            while !is_over.load(Ordering::Relaxed) {
                for port in first + 1..first + 8 {
                    let connected = TcpStream::connect(("127.0.0.1", port));
                    let mut silent = silent.lock().expect("no panic");
                    if silent.len() < SILENT {
                        silent.extend(connected);
                    }
                }
                std::thread::yield_now();
            }
        });
        let job = train(&ports);
        is_over.store(true, Ordering::Relaxed);
        result(&job)
    });
    let callers = silent.into_inner().expect("no panic").len();
    assert!(callers > 0, "nobody called");
    assert_eq!(disturbed.0, undisturbed.0, "losses, with {callers} callers");
    assert!(disturbed.1 == undisturbed.1, "parameters, with {callers} callers");
}
