//! A pipeline of processes, as users start it.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{Launch, TinyJob, launch, losses, wait_for_step, worker};

/// An untied model, whose ends may lie on different ranks, without clipping.
fn untied() -> TinyJob {
    TinyJob::with(|yaml| {
        let yaml = yaml.replace("kind: gpt2", "kind: mlp");
        let yaml = yaml.replace("n_layer: 2", "n_layer: 4");
        yaml.replace("steps: 40", "steps: 6\n  grad_accumulation: 4\n  grad_clip: null")
    })
}

fn launched(job: &TinyJob, ranks: u32) -> Launch {
    launch().nproc(ranks).dir(job.dir())
}

#[test]
fn two_stages_give_the_losses_of_one_rank() {
    let (one, two) = (untied(), untied());
    let alone = launched(&one, 1).target("tiny.yaml").run();
    alone.expect_exit(0);
    let piped = launched(&two, 2)
        .set("parallel.pipeline.stages=2")
        .set("run.timeline=3")
        .target("tiny.yaml")
        .run();
    piped
        .expect_exit(0)
        .expect_stdout("1F1B: 2 stages of 3, 1 layers on 2 ranks, 4 micro-batches; 20.0 % of the time idle");
    assert_eq!(losses(&one.out()), losses(&two.out()));
    let trace = std::fs::read_to_string(two.out().join("timeline/timeline.json")).expect("a trace");
    for span in [
        "stage 0, micro-batch 4: forward",
        "stage 1, micro-batch 1: backward",
        "send to 1 (`1RECV_F2`: activations of micro-batch 2 from stage 0 for stage 1)",
    ] {
        assert!(trace.contains(span), "`{span}` is not in the trace");
    }
}

#[test]
fn a_schedule_that_cannot_run_is_refused_before_a_worker_starts() {
    let job = untied();
    std::fs::write(
        job.dir().join("schedule.csv"),
        "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
    )
    .expect("writable");
    let finished = launched(&job, 2)
        .set("parallel.pipeline.stages=2")
        .set("parallel.pipeline.file=schedule.csv")
        .set("train.grad_accumulation=2")
        .target("tiny.yaml")
        .run();
    finished.expect_exit(2).expect_stderr(
        "rank 0 at `0B0` waits for `1B0` of rank 1; rank 1 at `1F1` waits for `0F1` of rank 0",
    );
    assert!(!job.out().exists(), "nothing was begun");
}

/// The rank that waits says for which action of which stage and micro-batch, and for whom.
#[test]
fn a_stage_that_is_stopped_is_named_with_the_action_that_waits_for_it() {
    let job = untied();
    let running = launched(&job, 2)
        .flag("--hang-timeout", "6")
        .flag("--max-restarts", "0")
        .set("parallel.pipeline.stages=2")
        .set("train.steps=1000000")
        .target("tiny.yaml")
        .start();
    wait_for_step(&job.out(), 3);
    let victim = worker(running.pid(), "1");
    kill(Pid::from_raw(victim), Signal::SIGSTOP).expect("a living worker");
    running
        .finish()
        .expect_exit(134)
        .expect_stderr("first failure: rank 1");
    let waits =
        std::fs::read_to_string(job.out().join("logs/attempt_0/0/hang.txt")).expect("what rank 0 did");
    let awaited = waits.lines().find(|line| {
        line.contains("of micro-batch") && line.contains("stage 1") && line.ends_with(" for rank 1")
    });
    assert!(awaited.is_some(), "{waits}");
}
