//! Limits of the programs' own processes (`ulimit -s`, `ulimit -n`): what is too little is refused before anything is
//! started, with the number that is enough.

use std::net::TcpStream;

use nix::sys::signal::Signal;

use crate::harness::{Finished, Program, TinyJob, launch, temp_dir};

/// `ddp-run` behind `ulimit` with these words.
fn limited(ulimit: &str, words: &[&str]) -> Program {
    behind(ulimit, env!("CARGO_BIN_EXE_ddp-run"), words)
}

fn behind(ulimit: &str, program: &str, words: &[&str]) -> Program {
    let script = format!("ulimit {ulimit} && exec \"$0\" \"$@\"");
    let words = ["-c", &script, program].into_iter().chain(words.iter().copied());
    Program::new("/bin/sh").args(words)
}

/// The number behind `before` in what a launcher says.
#[track_caller]
fn number_behind(finished: &Finished, before: &str) -> u64 {
    let said = finished.stderr();
    let (_, rest) = said
        .split_once(before)
        .unwrap_or_else(|| panic!("no `{before}` in\n{said}"));
    let digits = rest
        .split(|c: char| !c.is_ascii_digit())
        .next()
        .unwrap_or_default();
    digits
        .parse()
        .unwrap_or_else(|_| panic!("no number behind `{before}` in\n{said}"))
}

#[test]
fn a_stack_that_is_too_small_is_refused_and_the_smallest_is_enough() {
    let job = TinyJob::new();
    let words = ["--nproc-per-node", "2", "--set", "train.steps=2", "tiny.yaml"];
    let refused = limited("-s 100", &words).dir(job.dir()).run();
    refused
        .expect_exit(70)
        .expect_stderr("hint: raise the limit: `ulimit -s");
    assert!(!job.out().exists(), "nothing was begun");
    let enough = number_behind(&refused, "and ddp-run needs ");
    limited(&format!("-s {enough}"), &words)
        .dir(job.dir())
        .run()
        .expect_exit(0);
}

#[test]
fn a_launch_that_cannot_have_its_files_is_refused_and_the_fewest_are_enough() {
    let logs = temp_dir();
    let logs = logs.path().to_str().expect("unicode");
    limited("-n 8", &["--", "true"])
        .run()
        .expect_exit(70)
        .expect_stderr("at most 8 files may be open (`ulimit -Hn`)");
    for workers in ["2", "9", "40"] {
        for with_files in [&["--tee", "3", "--log-dir", logs][..], &[]] {
            let words = [
                &["--nproc-per-node", workers],
                with_files,
                &["--", "sh", "-c", "echo on; sleep 0"],
            ]
            .concat();
            let refused = limited("-n 38", &words).run();
            refused.expect_exit(70).expect_stderr("`ulimit -Hn");
            assert_eq!(refused.stdout(), [""; 0], "no worker was started");
            let enough = number_behind(&refused, "on this node needs ");
            let finished = limited(&format!("-n {enough}"), &words).run();
            finished.expect_exit(0);
            assert_eq!(finished.stdout().len().to_string(), workers);
        }
    }
}

#[test]
fn the_soft_limit_is_raised_for_the_launcher_and_not_for_its_workers() {
    let words = ["--nproc-per-node", "300", "--", "sh", "-c", "ulimit -Sn"];
    let finished = limited("-Sn 256", &words).run();
    finished.expect_exit(0);
    let told = finished
        .stdout()
        .iter()
        .filter(|line| line.ends_with("] 256"))
        .count();
    assert_eq!(told, 300, "{}", finished.transcript());
}

/// Each has the shared memory of all others open.
#[test]
fn many_native_workers_do_with_a_small_soft_limit() {
    let job = TinyJob::new();
    let words = "--nproc-per-node 12 --set train.steps=1 --max-restarts 0 tiny.yaml";
    let words: Vec<_> = words.split(' ').collect();
    limited("-Sn 32", &words).dir(job.dir()).run().expect_exit(0);
}

/// It has a connection open for each node.
#[test]
fn a_rendezvous_takes_more_nodes_than_its_soft_limit_has_files() {
    let program = env!("CARGO_BIN_EXE_ddp-rendezvous");
    let mut daemon = behind("-Sn 24", program, &["serve", "--listen", "127.0.0.1:0"]).start();
    let endpoint = daemon.wait_for("127.0.0.1:");
    let others: Vec<TcpStream> = (0..40)
        .map(|_| TcpStream::connect(&endpoint).expect("it listens"))
        .collect();
    launch()
        .words(["--nnodes", "1:2", "--rdzv-id", "j", "--rdzv-endpoint", &endpoint])
        .flag("--rdzv-conf", "last_call_timeout=0.1,connect_timeout=10")
        .target("true")
        .run()
        .expect_exit(0);
    drop(others);
    daemon.signal(Signal::SIGTERM);
    daemon.finish().expect_exit(0);
}
