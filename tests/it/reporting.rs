//! What a run says of itself while it trains and at its end.

use std::ffi::OsStr;
use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{Finished, TinyJob, ddp_train, wait_for_step, worker};

fn run(dir: &Path, args: impl IntoIterator<Item: AsRef<OsStr>>) -> Finished {
    ddp_train().dir(dir).args(args).run()
}

#[test]
fn the_end_of_a_run_leads_on_and_what_it_names_works() {
    let job = TinyJob::new();
    let finished = job
        .launch()
        .nproc(2)
        .set("train.eval_every=20")
        .set("train.log_every=15")
        .run();
    finished
        .expect_exit(0)
        .expect_stdout("[0] done: 40 steps, 0:")
        .expect_stdout("[0] val loss ")
        .expect_stdout(" nats/byte")
        .expect_stdout("[0] checkpoint  out/checkpoints/step_00000040")
        .expect_stdout("[0] metrics     out/metrics.jsonl");
    let steps: Vec<&str> = (finished.stdout().iter())
        .filter_map(|line| line.strip_prefix("[0] step ")?.split('/').next())
        .collect();
    assert_eq!(
        steps,
        ["15", "20", "30", "40"],
        "every 15, validations and the last"
    );
    let line = |step: &str| {
        let begin = format!("[0] step {step}/40 ");
        let line = finished.stdout().iter().find(|line| line.starts_with(&begin));
        line.expect("a line").clone()
    };
    for (step, is_validated) in [("15", false), ("20", true), ("30", false), ("40", true)] {
        let line = line(step);
        assert_eq!(line.contains("  val "), is_validated, "{line}");
        assert!(line.contains("  lr ") && !line.contains('@'), "{line}");
    }
    // The commands as they stand there, under the names that are on a user's PATH.
    let of_program = |line: &String| line.split_once("ddp-train ").map(|(_, args)| args.to_owned());
    let commands: Vec<String> = finished.stdout().iter().filter_map(of_program).collect();
    assert_eq!(commands, ["generate out --prompt 'The '"]);
    run(
        job.dir(),
        ["generate", "out", "--prompt", "The ", "--max-tokens", "2"],
    )
    .expect_exit(0);
}

#[test]
fn a_restart_repeats_only_what_has_changed() {
    let job = TinyJob::new();
    let running = job
        .launch()
        .nproc(2)
        .set("run.tensorboard=true")
        .set("train.eval_every=10")
        .set("train.checkpoint_async=false")
        .set("train.steps=60")
        .start();
    let victim = worker(running.pid(), "1");
    wait_for_step(&job.out(), 7);
    kill(Pid::from_raw(victim), Signal::SIGKILL).expect("a living worker");
    let finished = running.finish();
    finished
        .expect_exit(0)
        .expect_stdout("[0] restarted after step ")
        .expect_stdout("; all else is as before");
    let count = |row: &str| {
        let row = format!("[0] {row}");
        let rows = finished.stdout().iter().filter(|line| line.starts_with(&row));
        rows.count()
    };
    assert_eq!(
        (count("steps  "), count("parameters  "), count("strategy  ")),
        (1, 1, 1)
    );
    let lives = std::fs::read_dir(job.out().join("tensorboard"))
        .expect("a folder")
        .count();
    assert_eq!(lives, 2, "a file of events for each life");
    job.launch()
        .nproc(2)
        .set("run.overwrite=true")
        .run()
        .expect_exit(0)
        .expect_stdout("[0] parameters  ");
    assert!(!job.out().join("tensorboard").exists());
}

#[test]
fn training_goes_on_without_event_files() {
    let job = TinyJob::new();
    std::fs::create_dir(job.out()).expect("writable");
    std::fs::write(job.out().join("tensorboard"), "in the way").expect("writable");
    job.launch()
        .nproc(2)
        .set("run.tensorboard=true")
        .set("train.steps=3")
        .run()
        .expect_exit(0)
        .expect_stderr("TensorBoard events are no longer written, training continues: ");
}
