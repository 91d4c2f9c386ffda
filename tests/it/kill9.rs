//! `kill -9` in the middle of training: named, restarted, resumed, and the same parameters to the last bit.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{
    ReservedPort, Running, TinyJob, descendants, environment_of, eventually, launch, metrics, parameters,
    parameters_of, wait_for_step, worker,
};

fn train(job: &TinyJob) -> Running {
    job.launch().nproc(2).start()
}

/// The shared memory that a process maps, by name. What has no name in a file system is gone with its processes.
fn shared_memory(pid: i32) -> Vec<String> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let paths = maps
        .lines()
        .filter_map(|line| line.split_once('/').map(|(_, path)| format!("/{path}")));
    paths
        .filter(|path| path.starts_with("/memfd:") || path.starts_with("/dev/shm"))
        .collect()
}

/// Ranks of a node share memory, and none of it can stay behind in `/dev/shm`.
#[track_caller]
fn expect_nameless_shared_memory(pid: i32) {
    let segments = shared_memory(pid);
    assert!(
        segments.iter().any(|path| path.starts_with("/memfd:ddp-")),
        "{segments:?}"
    );
    assert!(
        !segments.iter().any(|path| path.starts_with("/dev/shm")),
        "{segments:?}"
    );
}

#[test]
fn a_killed_worker_changes_nothing_in_the_result() {
    let undisturbed = TinyJob::new();
    train(&undisturbed).finish().expect_exit(0);
    let expected = parameters(&undisturbed.out());
    let steps = metrics(&undisturbed.out()).len();
    for round in 0..5 {
        let job = TinyJob::new();
        let running = train(&job);
        let victim = worker(running.pid(), if round % 2 == 0 { "1" } else { "0" });
        // Before, at and after checkpoints.
        wait_for_step(&job.out(), 1 + 3 * round);
        kill(Pid::from_raw(victim), Signal::SIGKILL).expect("a living worker");
        let finished = running.finish();
        finished.expect_exit(0).expect_stderr("SIGKILL");
        assert_eq!(parameters(&job.out()), expected, "round {round}");
        assert_eq!(metrics(&job.out()).len(), steps, "round {round}: each step once");
    }
}

/// Nothing is saved before the end: what the other workers hold is all that is left of the run.
#[test]
fn the_other_workers_keep_their_processes_and_all_steps() {
    const RANKS: [&str; 4] = ["0", "1", "2", "3"];
    for (parallel, victim) in [
        ("", 0),
        ("parallel: { strategy: zero1, shard_group: 2 }\n", 3),
        ("parallel: { strategy: zero3, shard_group: 2 }\n", 1),
        ("parallel: { tensor: 2 }\n", 2),
        ("parallel: { pipeline: { stages: 2 } }\n", 1),
    ] {
        let job = || {
            TinyJob::with(|yaml| {
                let yaml = yaml.replace("steps: 40", "steps: 150");
                yaml.replace("checkpoint_every: 5", "checkpoint_every: 0") + parallel
            })
        };
        let start = |job: &TinyJob| job.launch().nproc(4).start();
        let (undisturbed, disturbed) = (job(), job());
        start(&undisturbed).finish().expect_exit(0);
        let running = start(&disturbed);
        let pids = || RANKS.map(|rank| worker(running.pid(), rank));
        let before = pids();
        wait_for_step(&disturbed.out(), 20);
        kill(Pid::from_raw(before[victim]), Signal::SIGKILL).expect("a living worker");
        eventually("a step of the next generation", || {
            (metrics(&disturbed.out()).last()?["generation"] == 2).then_some(())
        });
        let stayed: Vec<bool> = before
            .iter()
            .zip(pids())
            .map(|(one, other)| *one == other)
            .collect();
        let finished = running.finish();
        finished.expect_exit(0).expect_stdout("restarted after step ");
        assert_eq!(stayed, [0, 1, 2, 3].map(|rank| rank != victim), "{parallel}");
        assert_eq!(
            parameters(&disturbed.out()),
            parameters(&undisturbed.out()),
            "{parallel}"
        );
        assert_eq!(metrics(&disturbed.out()).len(), 150, "{parallel}: each step once");
    }
}

#[test]
fn a_worker_killed_in_a_ring_changes_nothing_in_the_result() {
    a_kill_changes_nothing_in(&["recv from 1", "send to 1"], |yaml| {
        yaml + "parallel: { context: 2, context_algorithm: ring }\n"
    });
}

#[test]
fn a_worker_killed_in_an_all_to_all_of_experts_changes_nothing_in_the_result() {
    a_kill_changes_nothing_in(&["all-to-all"], |yaml| {
        yaml.replace("gpt2", "mixtral") + "parallel: { expert: 2 }\n"
    });
}

/// Rank 0 is killed while it waits in one of `operations` for rank 1, which is stopped. All but a few of a step are such.
fn a_kill_changes_nothing_in(operations: &[&str], edit: fn(String) -> String) {
    let job = || {
        TinyJob::with(|yaml| {
            let yaml = yaml.replace("steps: 40", "steps: 5\n  grad_accumulation: 100");
            edit(yaml.replace("checkpoint_every: 5", "checkpoint_every: 2"))
        })
    };
    let [undisturbed, disturbed] = [job(), job()];
    train(&undisturbed).finish().expect_exit(0);
    let mut running = train(&disturbed);
    let [victim, other] = ["0", "1"].map(|rank| Pid::from_raw(worker(running.pid(), rank)));
    // No save begins after it: ranks that wait for the end of the save before would be in no operation of the model.
    wait_for_step(&disturbed.out(), 3);
    kill(other, Signal::SIGSTOP).expect("a living worker");
    let waits = running.wait_for(" for rank 1");
    let is_one = |operation| waits.contains(&format!("rank 0: {operation} #"));
    assert!(operations.iter().any(is_one), "{waits}");
    kill(victim, Signal::SIGKILL).expect("a living worker");
    kill(other, Signal::SIGCONT).expect("a living worker");
    let finished = running.finish();
    finished.expect_exit(0).expect_stderr("rank 0 (node ");
    finished.expect_stderr("died of SIGKILL at step 3");
    assert_eq!(parameters(&disturbed.out()), parameters(&undisturbed.out()));
    assert_eq!(metrics(&disturbed.out()).len(), 5, "each step once");
}

/// All workers read the file again, since the one that is started anew does.
#[test]
fn a_configuration_that_was_edited_counts_for_all_after_a_kill() {
    let job = TinyJob::with(|yaml| yaml.replace("steps: 40", "steps: 150"));
    let running = train(&job);
    let victim = worker(running.pid(), "1");
    wait_for_step(&job.out(), 7);
    let file = job.dir().join("tiny.yaml");
    let edited = std::fs::read_to_string(&file).expect("readable");
    std::fs::write(&file, edited.replace("lr: 1.0e-3", "lr: 2.0e-3")).expect("writable");
    kill(Pid::from_raw(victim), Signal::SIGKILL).expect("a living worker");
    let finished = running.finish();
    finished.expect_exit(0).expect_stdout("[0] restarted");
    assert!(
        !finished.transcript().contains("kept:"),
        "{}",
        finished.transcript()
    );
    assert_eq!(metrics(&job.out()).len(), 150, "each step once");
}

#[test]
fn a_killed_launcher_leaves_no_worker_and_no_shared_memory() {
    let job = TinyJob::with(|yaml| yaml.replace("steps: 40", "steps: 100000"));
    let running = train(&job);
    wait_for_step(&job.out(), 3);
    let family = descendants(running.pid());
    assert!(family.len() >= 2, "{family:?}");
    expect_nameless_shared_memory(worker(running.pid(), "0"));
    expect_nameless_shared_memory(worker(running.pid(), "1"));
    running.signal(Signal::SIGKILL);
    running.finish().expect_killed_by(Signal::SIGKILL);
    eventually("all processes of the launcher to be gone", || {
        // A number that is in use again belongs to a process without our marker.
        let ours = |pid: &&i32| environment_of(**pid).contains_key("DDP_JOB_MARKER");
        family.iter().find(ours).is_none().then_some(())
    });
}

/// Large enough that both of two ranks own parameters: they are dealt out by 16,384 elements, of each block apart.
fn sharded(strategy: &str) -> TinyJob {
    TinyJob::with(|yaml| {
        let yaml = yaml.replace("n_embd: 32", "n_embd: 64");
        format!("{yaml}parallel: {{ strategy: {strategy} }}\n")
    })
}

/// What a rank held when it was killed can only be missed if it held something.
#[track_caller]
fn expect_owner_of_parameters(job: &TinyJob, rank: &str) {
    assert!(parameters_of(&job.out(), rank, 2) > 0, "rank {rank} owns nothing");
}

#[test]
fn sharded_strategies_survive_a_killed_worker_on_another_node() {
    for (strategy, rank) in [("zero2", "1"), ("zero3", "0")] {
        let (undisturbed, disturbed) = (sharded(strategy), sharded(strategy));
        let nodes = |job: &TinyJob, endpoint: &str| {
            ["0", "1"].map(|rank| {
                let node = launch().node_of(2, endpoint, "sharded").flag("--node-rank", rank);
                node.nproc(1).dir(job.dir()).target("tiny.yaml").start()
            })
        };
        let port = ReservedPort::new();
        for node in nodes(&undisturbed, &port.endpoint) {
            node.finish().expect_exit(0);
        }
        expect_owner_of_parameters(&undisturbed, rank);
        let port = ReservedPort::new();
        let mut nodes = nodes(&disturbed, &port.endpoint);
        if rank == "0" {
            nodes.reverse();
        }
        let [one, other] = nodes;
        let victim = worker(other.pid(), rank);
        wait_for_step(&disturbed.out(), 13);
        kill(Pid::from_raw(victim), Signal::SIGKILL).expect("a living worker");
        other.finish().expect_exit(0).expect_stderr("SIGKILL");
        one.finish().expect_exit(0);
        assert_eq!(
            parameters(&disturbed.out()),
            parameters(&undisturbed.out()),
            "{strategy}"
        );
    }
}
