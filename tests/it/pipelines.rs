//! A pipeline of processes, as users start it.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::ffi::OsStr;

use crate::harness::{Finished, Launch, TinyJob, ddp_train, launch, losses, wait_for_step, worker};

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
    piped.expect_exit(0).expect_stdout(
        "1F1B: 2 stages with 3 + 1 layers on 2 ranks, 4 micro-batches; idle 20.0 % of the time",
    );
    assert_eq!(losses(&one.out()), losses(&two.out()));
    let trace = std::fs::read_to_string(two.out().join("timeline/timeline.json")).expect("a trace");
    for span in [
        "0F3: stage 0, micro-batch 3: forward",
        "1B0: stage 1, micro-batch 0: backward",
        "send to 1 (`1RECV_F2`: activations of micro-batch 2 from stage 0 for stage 1)",
    ] {
        assert!(trace.contains(span), "`{span}` is not in the trace");
    }
}

/// Runs `ddp-train` in the directory of the configuration.
fn train(job: &TinyJob, words: impl IntoIterator<Item: AsRef<OsStr>>) -> Finished {
    let program = ddp_train().dir(job.dir());
    program.args(words).run()
}

#[test]
fn the_legend_of_a_schedule_explains_only_what_it_has() {
    let job = untied();
    let words = "schedule --schedule zb-h1 --stages 2 --micro-batches 4";
    let shown = train(&job, words.split(' '));
    let shown = shown.expect_exit(0).stdout().join("\n");
    assert!(
        shown.contains("`.` is a time in which the rank does not compute\n") && !shown.contains("---"),
        "{shown}"
    );
}

#[test]
fn a_schedule_is_shown_as_text_and_as_picture() {
    let job = untied();
    let words = "schedule --schedule 1f1b --stages 2 --micro-batches 3";
    let shown = train(&job, words.split(' '));
    insta::assert_snapshot!(shown.expect_exit(0).stdout().join("\n"), @r"
    1F1B: 2 ranks, 3 micro-batches
    rank 0   0F0 0F1 .   .   0B0 --- 0F2 0B1 --- .   0B2 ---
    rank 1   .   1F0 1B0 --- 1F1 1B1 --- 1F2 1B2 --- .   .
    `.` is a time in which the rank does not compute, `---` the rest of the action before it
    simulated: 12 units, bubble 25.0 %, at most 2 micro-batches kept
    one unit is the time of F, I or W for one micro-batch in all stages of a rank
    ");
    let picture = "schedule --schedule zbv --stages 2 --micro-batches 4 --output zbv.svg";
    train(&job, picture.split(' '))
        .expect_exit(0)
        .expect_stdout("4 stages on 2 ranks, 4 micro-batches");
    let svg = std::fs::read_to_string(job.dir().join("zbv.svg")).expect("a picture");
    assert!(
        svg.starts_with("<svg") && svg.contains("rank 0: stages 0, 3"),
        "{svg}"
    );
    launched(&job, 2)
        .set("parallel.pipeline.stages=2")
        .set("parallel.pipeline.schedule=zbv")
        .target("tiny.yaml")
        .run()
        .expect_exit(0);
}

#[test]
fn schedules_that_cannot_be_shown_are_refused_by_flag() {
    let job = untied();
    train(&job, "schedule --schedule 1f1b --stages 0".split(' ')).expect_exit(2);
    let alone = train(
        &job,
        "schedule --schedule gpipe --stages 1 --micro-batches 1".split(' '),
    );
    assert!(
        alone.stdout()[0].ends_with(": 1 rank, 1 micro-batch"),
        "{:?}",
        alone.stdout()
    );
    train(&job, "schedule --schedule 2f2b".split(' '))
        .expect_exit(2)
        .expect_stderr("hint: use one of gpipe, 1f1b");
    train(&job, "schedule --schedule zbv --chunks 3".split(' '))
        .expect_exit(2)
        .expect_stderr("hint: change `--chunks`, `--micro-batches` or `--schedule`");
}

#[test]
fn a_picture_takes_the_place_of_another() {
    let job = untied();
    let [picture, other] = ["a.svg", "b.svg"].map(|name| job.dir().join(name));
    std::fs::write(&picture, "as it was").expect("writable");
    // Another name of the old file: a reader that has it open still has all of it.
    std::fs::hard_link(&picture, &other).expect("of the same file system");
    train(&job, "schedule --schedule 1f1b -o a.svg".split(' ')).expect_exit(0);
    let [drawn, old] = [&picture, &other].map(|path| std::fs::read_to_string(path).expect("readable"));
    assert!(drawn.starts_with("<svg") && old == "as it was", "{old}");
    let entries = std::fs::read_dir(job.dir()).expect("readable");
    let names = entries.map(|entry| entry.expect("readable").file_name().into_string().expect("UTF-8"));
    assert_eq!(
        names.filter(|name| name.contains("svg")).count(),
        2,
        "nothing is left over"
    );
}

/// Stage, action and micro-batch; or that the rank is behind the last action of a step.
#[track_caller]
pub(crate) fn expect_place(line: &str, stage: u32) {
    assert!(names_action(line, stage), "{line}");
}

pub(crate) fn names_action(line: &str, stage: u32) -> bool {
    let stage = format!(", stage {stage} of 2, ");
    let action = line.split_once(&stage).map_or("", |(_, action)| action);
    let actions = [
        "forward of micro-batch ",
        "backward of micro-batch ",
        "reduction and update",
    ];
    let is_action = actions.iter().any(|kind| action.starts_with(kind));
    (line.contains("phase training, step ") || line.contains(" at step ")) && is_action
}

/// Stops the last stage of a pipeline: the job, and what its launcher said of the lost rank.
fn stopped_stage() -> (TinyJob, String) {
    let job = untied();
    let running = launched(&job, 2)
        .flag("--hang-timeout", "6")
        .flag("--max-restarts", "0")
        .set("parallel.pipeline.stages=2")
        .set("train.steps=1000000")
        // A step then takes much longer than a rank waits before it sends its action.
        .set("train.grad_accumulation=128")
        .target("tiny.yaml")
        .start();
    wait_for_step(&job.out(), 3);
    let victim = worker(running.pid(), "1");
    kill(Pid::from_raw(victim), Signal::SIGSTOP).expect("a living worker");
    let finished = running.finish();
    finished.expect_exit(134).expect_stderr("first failure: rank 1");
    let output = finished.stderr();
    let lost = output.lines().find(|line| line.contains("rank 1 hung: "));
    (job, lost.unwrap_or_default().to_owned())
}

/// The rank that waits says for which action of which stage and micro-batch, and for whom.
#[test]
fn a_stage_that_is_stopped_is_named_with_the_action_that_waits_for_it() {
    // A rank sends its action within 10 ms. A rank that is stopped before that at a new phase has sent none.
    let mut tries = std::iter::repeat_with(stopped_stage).take(3);
    let stopped = tries.find(|(_, lost)| names_action(lost, 1));
    let (job, _) = stopped.expect("the launcher names the action in one of three tries");
    let state_of = |rank: &str| {
        let file = job.out().join("logs/attempt_0").join(rank).join("hang.txt");
        std::fs::read_to_string(file).expect("what the rank did")
    };
    expect_place(state_of("1").lines().next().unwrap_or_default(), 1);
    let waits = state_of("0");
    expect_place(waits.lines().next().unwrap_or_default(), 0);
    // Behind its last action, a rank waits for what all stages share: the losses of the step, then the norm.
    let is_behind = waits
        .lines()
        .next()
        .is_some_and(|line| line.contains("reduction and update"));
    let awaits = |line: &str| {
        line.ends_with(" for rank 1")
            && if is_behind {
                let is_shared = line.contains("(losses, ") || line.contains("(partial norms, ");
                line.contains("all-gather #") && is_shared
            } else {
                line.contains("of micro-batch") && line.contains("stage 1")
            }
    };
    assert!(waits.lines().any(awaits), "{waits}");
}
