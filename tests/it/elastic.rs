//! Jobs of `--nnodes MIN:MAX`: they grow and shrink while they run.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{
    Daemon, Launch, TinyJob, environment_of, eventually, expect_same_losses, launch, losses, metrics,
    wait_for_step, worker,
};

/// Says where it is, then works until the file that it is told of exists.
const WORK: &str = r#"echo "world $WORLD_SIZE attempt $TORCHELASTIC_RESTART_COUNT"; until [ -e "$DONE" ]; do sleep 0.02; done"#;

/// One node of a job that must not spend a restart.
fn elastic(daemon: &Daemon, range: &str) -> Launch {
    launch()
        .flag("--nnodes", range)
        .flag("--rdzv-endpoint", &daemon.endpoint)
        .flag("--rdzv-id", "elastic")
        .flag("--rdzv-conf", "last_call_timeout=0.3")
        .flag("--max-restarts", "0")
}

fn node(daemon: &Daemon, range: &str, done: &std::path::Path) -> Launch {
    elastic(daemon, range)
        .env("DONE", done.to_str().expect("unicode"))
        .shell(WORK)
}

#[test]
fn a_job_takes_in_a_node_that_comes_later() {
    let (daemon, dir) = (Daemon::start(), crate::harness::temp_dir());
    let done = dir.path().join("done");
    let mut first = node(&daemon, "1:2", &done).start();
    first.wait_for("world 1 attempt 0");
    let mut second = node(&daemon, "1:2", &done).start();
    second.wait_for("world 2 attempt 0");
    first.wait_for("joined; going on with 2 nodes");
    first.wait_for("world 2 attempt 0");
    std::fs::write(&done, "").expect("writable");
    first.finish().expect_exit(0);
    second.finish().expect_exit(0);
    daemon.stop().expect_exit(0);
}

#[test]
fn a_job_goes_on_without_a_node_that_was_killed_and_spends_no_restart() {
    let (daemon, dir) = (Daemon::start(), crate::harness::temp_dir());
    let done = dir.path().join("done");
    let mut first = node(&daemon, "1:2", &done).start();
    let mut second = node(&daemon, "1:2", &done).start();
    first.wait_for("world 2 attempt 0");
    second.wait_for("world 2 attempt 0");
    second.signal(Signal::SIGKILL);
    let killed = std::time::Instant::now();
    first.wait_for("was lost");
    assert!(
        killed.elapsed() < std::time::Duration::from_secs(10),
        "{:?}",
        killed.elapsed()
    );
    first.wait_for("world 1 attempt 0");
    std::fs::write(&done, "").expect("writable");
    first.finish().expect_exit(0);
    second.finish().expect_killed_by(Signal::SIGKILL);
    daemon.stop().expect_exit(0);
}

#[test]
fn a_spare_takes_the_place_of_a_lost_node() {
    let (daemon, dir) = (Daemon::start(), crate::harness::temp_dir());
    let done = dir.path().join("done");
    let mut members = [
        node(&daemon, "2:2", &done).start(),
        node(&daemon, "2:2", &done).start(),
    ];
    for member in &mut members {
        member.wait_for("world 2 attempt 0");
    }
    let mut spare = node(&daemon, "2:2", &done).start();
    spare.wait_for("this node is a spare");
    let [mut stays, goes] = members;
    goes.signal(Signal::SIGKILL);
    spare.wait_for("world 2 attempt 0");
    stays.wait_for("world 2 attempt 0");
    std::fs::write(&done, "").expect("writable");
    for node in [stays, spare] {
        node.finish().expect_exit(0);
    }
    goes.finish().expect_killed_by(Signal::SIGKILL);
    daemon.stop().expect_exit(0);
}

#[test]
fn a_node_that_says_nothing_is_lost_and_may_come_back() {
    let (daemon, dir) = (Daemon::start(), crate::harness::temp_dir());
    let done = dir.path().join("done");
    let mut first = node(&daemon, "1:2", &done).start();
    let mut second = node(&daemon, "1:2", &done).start();
    first.wait_for("world 2 attempt 0");
    second.wait_for("world 2 attempt 0");
    // Frozen, its connection stays as it is: only the missing heartbeats tell.
    second.signal(Signal::SIGSTOP);
    first.wait_for("was lost: no heartbeat for 9.0 s");
    first.wait_for("world 1 attempt 0");
    second.signal(Signal::SIGCONT);
    first.wait_for("world 2 attempt 0");
    second.wait_for("world 2 attempt 0");
    std::fs::write(&done, "").expect("writable");
    first.finish().expect_exit(0);
    second.finish().expect_exit(0);
    daemon.stop().expect_exit(0);
}

/// The first number of a line.
fn number_in(line: &str) -> u64 {
    let mut digits = line.split(|c: char| !c.is_ascii_digit());
    digits.find_map(|word| word.parse().ok()).expect("a number")
}

/// Holds a process, or lets it go on.
fn send(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).expect("a living worker");
}

#[test]
fn native_training_grows_and_shrinks_and_stays_the_same_run() {
    // One rank makes its global batch of 4 samples in two passes, two ranks in one.
    let job = || {
        TinyJob::with(|yaml| {
            // Written while training stands still: the checkpoint of a step is there when the next step is.
            let batch = "micro_batch: 2\n  grad_accumulation: 2\n  checkpoint_async: false";
            let yaml = yaml.replace("micro_batch: 2", batch);
            yaml.replace("steps: 40", "steps: 400")
        })
    };
    let undisturbed = job();
    let alone = launch().dir(undisturbed.dir()).target("tiny.yaml").run();
    alone.expect_exit(0);

    let (daemon, job) = (Daemon::start(), job());
    let start = || elastic(&daemon, "1:2").dir(job.dir()).target("tiny.yaml").start();
    let mut first = start();
    wait_for_step(&job.out(), 7);
    // Held, so that it is not done before the other node is there.
    let held = worker(first.pid(), "0");
    send(held, Signal::SIGSTOP);
    let second = start();
    first.wait_for("joined; going on with 2 nodes");
    send(held, Signal::SIGCONT);
    let left_at = first.wait_for("the checkpoint is saved");
    let left_at = number_in(left_at.split_once("stopped after step").expect("the step").1);
    first.wait_for(
        "going on with 2 ranks instead of 1: 1 micro-batch a step on each, the global batch stays 4",
    );
    first.wait_for(&format!("400, resumed after {left_at}"));

    // One step beyond a checkpoint of both.
    wait_for_step(&job.out(), left_at + 6);
    let held = worker(first.pid(), "0");
    send(held, Signal::SIGSTOP);
    let lost = worker(second.pid(), "1");
    second.signal(Signal::SIGKILL);
    eventually("the worker to go with its launcher", || {
        (!environment_of(lost).contains_key("DDP_JOB_MARKER")).then_some(())
    });
    send(held, Signal::SIGCONT);
    first.wait_for("was lost");
    first.wait_for(
        "going on with 1 rank instead of 2: 2 micro-batches a step on each, the global batch stays 4",
    );
    first.finish().expect_exit(0);
    second.finish().expect_killed_by(Signal::SIGKILL);
    daemon.stop().expect_exit(0);

    expect_same_losses(
        "grown and shrunk",
        &losses(&job.out()),
        &losses(&undisturbed.out()),
    );
    let ranks_of: Vec<u64> = metrics(&job.out())
        .iter()
        .filter_map(|line| line["world_size"].as_u64())
        .collect();
    let (before, after) = ranks_of.split_at(left_at as usize);
    assert!(before.iter().all(|ranks| *ranks == 1), "no step is done again");
    // Of these only what the last checkpoint holds is left.
    assert!(after.contains(&2), "{after:?}");
    assert_eq!(after.last(), Some(&1));
}

#[test]
fn native_training_leaves_a_node_aside_with_which_it_could_not_make_its_global_batch() {
    // Micro-batches of a step: four, which two ranks and four ranks can share, but not six.
    let job = || {
        TinyJob::with(|yaml| {
            let batch = "micro_batch: 2\n  grad_accumulation: 2\n  checkpoint_async: false";
            let yaml = yaml.replace("micro_batch: 2", batch);
            yaml.replace("steps: 40", "steps: 200")
        })
    };
    let undisturbed = job();
    let alone = launch().nproc(2).dir(undisturbed.dir()).target("tiny.yaml").run();
    alone.expect_exit(0);

    let (daemon, job) = (Daemon::start(), job());
    let start = || {
        let node = elastic(&daemon, "1:3").nproc(2);
        node.dir(job.dir()).target("tiny.yaml").start()
    };
    let mut first = start();
    wait_for_step(&job.out(), 7);
    // Held, so that it is not done before the other nodes are there.
    let held = worker(first.pid(), "0");
    send(held, Signal::SIGSTOP);
    let second = start();
    first.wait_for("joined; going on with 2 nodes");
    send(held, Signal::SIGCONT);
    let left_at = first.wait_for("the checkpoint is saved");
    let left_at = number_in(left_at.split_once("stopped after step").expect("the step").1);
    first.wait_for("going on with 4 ranks instead of 2");
    first.wait_for(&format!("200, resumed after {left_at}"));

    // One step beyond a checkpoint of all.
    wait_for_step(&job.out(), left_at + 6);
    let held = ["0", "1"].map(|rank| worker(first.pid(), rank));
    for pid in held {
        send(pid, Signal::SIGSTOP);
    }
    let mut third = start();
    third.wait_for("its workers can go on only with a number of ranks that divides 4");
    let lost = worker(second.pid(), "2");
    second.signal(Signal::SIGKILL);
    eventually("the worker to go with its launcher", || {
        (!environment_of(lost).contains_key("DDP_JOB_MARKER")).then_some(())
    });
    for pid in held {
        send(pid, Signal::SIGCONT);
    }
    first.wait_for("was lost");
    first.wait_for("200, resumed after");
    first.finish().expect_exit(0);
    third.finish().expect_exit(0);
    second.finish().expect_killed_by(Signal::SIGKILL);
    daemon.stop().expect_exit(0);

    expect_same_losses("with a spare", &losses(&job.out()), &losses(&undisturbed.out()));
    let ranks_of: Vec<u64> = metrics(&job.out())
        .iter()
        .filter_map(|line| line["world_size"].as_u64())
        .collect();
    let (before, after) = ranks_of.split_at(left_at as usize);
    assert!(before.iter().all(|ranks| *ranks == 2), "{before:?}");
    assert!(after.iter().all(|ranks| *ranks == 4), "{after:?}");
}

#[test]
fn a_number_of_ranks_that_cannot_make_the_global_batch_ends_the_job_at_once() {
    let job = TinyJob::with(|yaml| yaml.replace("steps: 40", "steps: 2"));
    let train = |ranks| launch().nproc(ranks).dir(job.dir()).target("tiny.yaml");
    train(2).run().expect_exit(0);
    let again = |ranks| train(ranks).set("run.resume=require").set("train.steps=4");
    again(3)
        .run()
        .expect_exit(2)
        .expect_stderr("the run was trained in global batches of 4 samples, and 3 ranks")
        .expect_stderr("hint: 2 ranks can; ");
    again(1)
        .run()
        .expect_exit(0)
        .expect_stdout("going on with 1 rank instead of 2");
    assert_eq!(metrics(&job.out()).len(), 4);
}
