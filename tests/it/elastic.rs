//! Jobs of `--nnodes MIN:MAX`: they grow and shrink while they run.

use std::path::Path;
use std::sync::LazyLock;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{
    Daemon, Launch, ReservedPort, Running, TinyJob, environment_of, eventually, expect_same_losses, launch,
    losses, metrics, wait_for_step, worker,
};

/// Says where it is, then works until the file `$DONE` exists.
const WORK: &str = r#"echo "world $WORLD_SIZE attempt $TORCHELASTIC_RESTART_COUNT"; until [ -e "$DONE" ]; do sleep 0.02; done"#;

/// One node of a job that must not spend a restart.
fn elastic(daemon: &Daemon, range: &str) -> Launch {
    elastic_with(daemon, range, "last_call_timeout=0.3")
}

fn elastic_with(daemon: &Daemon, range: &str, conf: &str) -> Launch {
    launch()
        .flag("--nnodes", range)
        .flag("--rdzv-endpoint", &daemon.endpoint)
        .flag("--rdzv-id", "elastic")
        .flag("--rdzv-conf", conf)
        .flag("--max-restarts", "0")
}

/// Kills the second node: the first one works on alone, with no restart spent.
fn expect_the_first_to_go_on((mut first, second): (Running, Running), done: &Path) {
    second.signal(Signal::SIGKILL);
    first.wait_for("was lost: its launcher died");
    first.wait_for("world 1 attempt 0");
    std::fs::write(done, "").expect("writable");
    first.finish().expect_exit(0);
    second.finish().expect_killed_by(Signal::SIGKILL);
}

/// As [`WORK`], but fails like a script whose collective loses its peer: a moment after it, for no reason of its own.
const WORK_WITH_A_PEER: &str = r#"
    echo "world $WORLD_SIZE attempt $TORCHELASTIC_RESTART_COUNT"
    peer="$DONE.$((1 - RANK))"
    echo $$ >"$DONE.$RANK"
    until [ -e "$DONE" ]; do
        if [ "$WORLD_SIZE" = 2 ] && [ -s "$peer" ] && ! kill -0 "$(cat "$peer")" 2>/dev/null; then
            sleep 0.1
            exit 1
        fi
        sleep 0.02
    done"#;

#[test]
fn a_script_that_fails_since_a_node_was_killed_spends_no_restart() {
    let (daemon, dir) = (Daemon::start(), crate::harness::temp_dir());
    let done = dir.path().join("done");
    let node = || {
        let node = elastic(&daemon, "1:2").env("DONE", &done);
        node.shell(WORK_WITH_A_PEER).start()
    };
    let (mut first, mut second) = (node(), node());
    first.wait_for("world 2 attempt 0");
    second.wait_for("world 2 attempt 0");
    eventually("both have written who they are", || {
        let has_written = |rank: u32| {
            let pid = std::fs::read_to_string(format!("{}.{rank}", done.display()));
            pid.is_ok_and(|pid| !pid.is_empty())
        };
        (has_written(0) && has_written(1)).then_some(())
    });
    expect_the_first_to_go_on((first, second), &done);
    daemon.stop().expect_exit(0);
}

/// As [`WORK`], and writes who works, and when, into `$LOG`.
const WORK_BY_NAME: &str = r#"
    echo "world $WORLD_SIZE"
    until [ -e "$DONE" ]; do
        echo "$NAME $(date +%s%N)" >>"$LOG"
        sleep 0.02
    done"#;

/// The launcher of the only node is stopped, and another node joins: the job goes on there when the guardian has killed
/// the workers, which the stopped launcher cannot do.
#[test]
fn two_generations_never_work_at_the_same_time() {
    let (daemon, dir) = (Daemon::start(), crate::harness::temp_dir());
    let (done, log) = (dir.path().join("done"), dir.path().join("log"));
    let node = |name| {
        let node = elastic_with(&daemon, "1:2", "last_call_timeout=0.3,takeover_timeout=5");
        node.env("DONE", &done)
            .env("LOG", &log)
            .env("NAME", name)
            .shell(WORK_BY_NAME)
            .start()
    };
    let mut first = node("first");
    first.wait_for("world 1");
    first.signal(Signal::SIGSTOP);
    let mut second = node("second");
    second.wait_for("world 1");
    eventually("the second has worked", || {
        std::fs::read_to_string(&log)
            .is_ok_and(|log| log.contains("second"))
            .then_some(())
    });
    let worked = std::fs::read_to_string(&log).expect("a log");
    let times = |name: &str| -> Vec<u64> {
        let lines = worked.lines().filter_map(|line| line.split_once(' '));
        lines
            .filter(|(who, _)| *who == name)
            .map(|(_, time)| time.parse().expect("a time"))
            .collect()
    };
    let (last, next) = (
        times("first").into_iter().max(),
        times("second").into_iter().min(),
    );
    assert!(last < next, "{worked}");
    first.signal(Signal::SIGCONT);
    first.wait_for("world 2");
    second.wait_for("world 2");
    std::fs::write(&done, "").expect("writable");
    first.finish().expect_exit(0);
    second.finish().expect_exit(0);
    daemon.stop().expect_exit(0);
}

#[test]
fn a_node_that_hosts_the_rendezvous_takes_the_job_with_it() {
    let (port, dir) = (ReservedPort::new(), crate::harness::temp_dir());
    let (endpoint, done) = (port.endpoint.clone(), dir.path().join("done"));
    let node = |rank| {
        launch()
            .flag("--nnodes", "1:2")
            .flag("--rdzv-endpoint", &endpoint)
            .flag("--rdzv-id", "elastic")
            .flag("--rdzv-conf", "last_call_timeout=0.3")
            .flag("--node-rank", rank)
            .env("DONE", &done)
            .shell(WORK)
    };
    let mut host = node("0").start();
    host.wait_for("world 1 attempt 0");
    let mut guest = node("1").start();
    host.wait_for("world 2 attempt 0");
    guest.wait_for("world 2 attempt 0");
    host.signal(Signal::SIGTERM);
    host.finish().expect_exit(143);
    guest.finish().expect_exit(143);
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

/// One node makes its global batch of 4 samples in two passes, two nodes in one.
fn growing_job() -> TinyJob {
    TinyJob::with(|yaml| {
        // Written while training pauses: the checkpoint of a step is there when the next step is.
        let batch = "micro_batch: 2\n  grad_accumulation: 2\n  checkpoint_async: false";
        let yaml = yaml.replace("micro_batch: 2", batch);
        yaml.replace("steps: 40", "steps: 400")
    })
}

/// Two nodes of native training, of which the second joins when the first has made some steps, and the step at which
/// the first stopped for it. Its worker 0 stays.
fn joined(job: &TinyJob, start: impl Fn() -> Running) -> (Running, Running, u64) {
    let mut first = start();
    wait_for_step(&job.out(), 7);
    // Held, so that it is not done before the other node is there.
    let held = worker(first.pid(), "0");
    send(held, Signal::SIGSTOP);
    let second = start();
    first.wait_for("joined; continuing with 2 nodes");
    send(held, Signal::SIGCONT);
    let left_at = stopped_after(&mut first);
    first.wait_for("kept: rank");
    assert_eq!(worker(first.pid(), "0"), held, "it was started again");
    (first, second, left_at)
}

/// A node is joined by a second one, and loses it again.
#[test]
fn native_training_grows_and_shrinks_and_stays_the_same_run() {
    let undisturbed = growing_job();
    undisturbed.launch().run().expect_exit(0);

    let (daemon, job) = (Daemon::start(), growing_job());
    let start = || {
        let node = elastic(&daemon, "1:2").dir(job.dir());
        node.target("tiny.yaml").start()
    };
    let (mut first, second, left_at) = joined(&job, start);
    first.wait_for(
        "continuing with 2 ranks instead of 1: 1 micro-batch per step on each, the global batch stays 4",
    );
    first.wait_for(&format!("restarted after step {left_at}"));

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
        "continuing with 1 rank instead of 2: 2 micro-batches per step on each, the global batch stays 4",
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
fn native_training_keeps_a_node_as_a_spare_if_it_cannot_make_its_global_batch_with_it() {
    // Micro-batches of a step: four, which two ranks and four ranks can share, but not six.
    let undisturbed = growing_job();
    let alone = undisturbed.launch().nproc(2).run();
    alone.expect_exit(0);

    let (daemon, job) = (Daemon::start(), growing_job());
    let start = || {
        let node = elastic(&daemon, "1:3").nproc(2);
        node.dir(job.dir()).target("tiny.yaml").start()
    };
    let (mut first, second, left_at) = joined(&job, start);
    first.wait_for("continuing with 4 ranks instead of 2");
    first.wait_for(&format!("restarted after step {left_at}"));

    // One step beyond a checkpoint of all.
    wait_for_step(&job.out(), left_at + 6);
    let held = ["0", "1"].map(|rank| worker(first.pid(), rank));
    for pid in held {
        send(pid, Signal::SIGSTOP);
    }
    let mut third = start();
    third.wait_for("it can run only with a number of ranks that divides 4");
    let lost = worker(second.pid(), "2");
    second.signal(Signal::SIGKILL);
    eventually("the worker to go with its launcher", || {
        (!environment_of(lost).contains_key("DDP_JOB_MARKER")).then_some(())
    });
    for pid in held {
        send(pid, Signal::SIGCONT);
    }
    first.wait_for("was lost");
    first.wait_for("restarted after step");
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

/// Steps enough that nodes come and go while they are made; a checkpoint only where a node stops.
fn elastic_job() -> TinyJob {
    TinyJob::with(|yaml| {
        let batch = "micro_batch: 2\n  grad_accumulation: 2";
        let yaml = yaml.replace("micro_batch: 2", batch);
        let yaml = yaml.replace("checkpoint_every: 5", "checkpoint_every: 0");
        // A second or more of steps, in which a worker has to be found and stopped. They learn little: a loss near zero
        // would show the order of additions.
        yaml.replace("steps: 40", "steps: 1500")
            .replace("lr: 1.0e-3", "lr: 1.0e-5")
    })
}

/// One node of a job of native training that does not wait for nodes that are known to have left.
fn native_node(daemon: &Daemon, range: &str, job: &TinyJob) -> Launch {
    job.launch()
        .flag("--nnodes", range)
        .flag("--rdzv-endpoint", &daemon.endpoint)
        .flag("--rdzv-id", "elastic")
        .flag("--rdzv-conf", "last_call_timeout=3600")
        .flag("--max-restarts", "0")
}

/// The losses of a run that nothing disturbed.
fn undisturbed_losses() -> &'static [f64] {
    static LOSSES: LazyLock<Vec<f64>> = LazyLock::new(|| {
        let job = elastic_job();
        job.launch().nproc(2).run().expect_exit(0);
        losses(&job.out())
    });
    &LOSSES
}

/// Two native nodes at step 3 or later. The worker of the first, which has rank 0 and the folder of the run, is held
/// with SIGSTOP: no step ends before it is sent SIGCONT.
fn two_native_nodes(daemon: &Daemon, range: &str, job: &TinyJob) -> (Running, Running, i32) {
    let start = |rank| native_node(daemon, range, job).flag("--node-rank", rank).start();
    let (first, second) = (start("0"), start("1"));
    wait_for_step(&job.out(), 3);
    let held = worker(first.pid(), "0");
    send(held, Signal::SIGSTOP);
    (first, second, held)
}

/// The step after which native training says that it has stopped and saved.
fn stopped_after(node: &mut Running) -> u64 {
    let line = node.wait_for("the checkpoint is saved");
    number_in(line.split_once("stopped after step").expect("the step").1)
}

#[test]
fn native_training_goes_on_from_the_step_at_which_a_node_was_stopped() {
    let (daemon, job) = (Daemon::start(), elastic_job());
    // The node that leaves is that of rank 0.
    let (mut first, mut second, held) = two_native_nodes(&daemon, "1:2", &job);
    first.signal(Signal::SIGTERM);
    second.wait_for("was stopped by SIGTERM; continuing without it");
    send(held, Signal::SIGCONT);
    let left_at = stopped_after(&mut first);
    first
        .finish()
        .expect_exit(143)
        .expect_stderr("if the other nodes continue, start this node again to rejoin the job");
    second.wait_for("continuing with 1 rank instead of 2");
    second.wait_for(&format!("restarted after step {left_at}"));

    // Started again, it is taken in; nothing tells it to resume.
    wait_for_step(&job.out(), left_at + 1);
    // It was rank 1 when it was started.
    let held = worker(second.pid(), "1");
    send(held, Signal::SIGSTOP);
    let mut again = native_node(&daemon, "1:2", &job).flag("--node-rank", "0").start();
    second.wait_for("joined; continuing with 2 nodes");
    send(held, Signal::SIGCONT);
    let left_at = stopped_after(&mut second);
    second.wait_for("kept: rank 1");
    assert_eq!(worker(second.pid(), "1"), held, "it was started again");
    again.wait_for(&format!("restarted after step {left_at}"));
    again.finish().expect_exit(0);
    second.finish().expect_exit(0);
    daemon.stop().expect_exit(0);
    expect_same_losses("left and came back", &losses(&job.out()), undisturbed_losses());
}

#[test]
fn native_training_that_was_stopped_resumes_when_the_same_job_is_started_again() {
    let (daemon, job) = (Daemon::start(), elastic_job());
    let (mut first, mut second, held) = two_native_nodes(&daemon, "2:2", &job);
    // At MIN: all nodes stop.
    second.signal(Signal::SIGTERM);
    second.wait_for("SIGTERM: stopping the workers");
    send(held, Signal::SIGCONT);
    let left_at = stopped_after(&mut first);
    first.finish().expect_exit(143);
    second.finish().expect_exit(143);

    // Another job has to say that it means this run.
    let other = job.launch().flag("--rdzv-id", "other");
    other.run().expect_exit(2).expect_stderr("already holds a run");

    let start = |rank| {
        native_node(&daemon, "2:2", &job)
            .flag("--node-rank", rank)
            .start()
    };
    let (mut first, second) = (start("0"), start("1"));
    first.wait_for(&format!("restarted after step {left_at}"));
    first.finish().expect_exit(0);
    second.finish().expect_exit(0);
    daemon.stop().expect_exit(0);
    expect_same_losses(
        "stopped and started again",
        &losses(&job.out()),
        undisturbed_losses(),
    );
}
