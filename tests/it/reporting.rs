//! What a run says of itself while it trains and at its end, and what is drawn of it.

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
        .expect_stdout(" nats/byte (unigram ")
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
    assert_eq!(commands, ["plot out", "generate out --prompt 'The '"]);
    run(job.dir(), "plot out".split(' '))
        .expect_exit(0)
        .expect_stdout("out/plot.html: 1 run, 40 steps");
    run(
        job.dir(),
        ["generate", "out", "--prompt", "The ", "--max-tokens", "2"],
    )
    .expect_exit(0);
}

#[test]
fn a_restart_repeats_only_what_has_changed_and_is_marked_in_the_plot() {
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
        .expect_stdout("60, resumed after ");
    let count = |row: &str| {
        let row = format!("[0] {row}");
        let rows = finished.stdout().iter().filter(|line| line.starts_with(&row));
        rows.count()
    };
    assert_eq!(
        (count("steps  "), count("parameters  "), count("strategy  ")),
        (2, 1, 1)
    );
    let plot = run(job.dir(), "plot out out/metrics.jsonl -o both.svg".split(' '));
    plot.expect_exit(0).expect_stdout("both.svg: 2 runs, 60 steps");
    let svg = std::fs::read_to_string(job.dir().join("both.svg")).expect("a picture");
    assert!(
        svg.starts_with("<svg ") && svg.contains(">generation 2</text>"),
        "{svg}"
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

#[test]
fn what_cannot_be_drawn_is_named() {
    let dir = crate::harness::temp_dir();
    std::fs::write(dir.path().join("metrics.jsonl"), "{\"step\":1,\"loss\":2}\nx\n").expect("writable");
    run(dir.path(), "plot .".split(' '))
        .expect_exit(0)
        .expect_stderr("warning: skipped an invalid line: ./metrics.jsonl:2: not a line of metrics");
    run(dir.path(), "plot none".split(' '))
        .expect_exit(2)
        .expect_stderr("error: cannot read `none`: No such file or directory");
    for run in ["runs/a", "runs/b", "runs/no-run"] {
        std::fs::create_dir_all(dir.path().join(run)).expect("writable");
    }
    for run in ["runs/a", "runs/b"] {
        std::fs::write(dir.path().join(run).join("metrics.jsonl"), "").expect("writable");
    }
    // The clock of a file system is coarse: equal times are in the order of the names.
    run(dir.path(), "plot runs".split(' '))
        .expect_exit(2)
        .expect_stderr("error: cannot read `runs/metrics.jsonl`: No such file or directory")
        .expect_stderr("hint: pass one of the runs in this directory, newest first: `runs/b`, `runs/a`");
    std::fs::remove_file(dir.path().join("metrics.jsonl")).expect("it is there");
    run(dir.path(), "plot .".split(' '))
        .expect_exit(2)
        .expect_stderr("hint: pass one of the runs two levels down, newest first: `./runs/b`, `./runs/a`");
    std::fs::write(dir.path().join("metrics.jsonl"), "{\"step\":1,\"loss\":2}\n").expect("writable");
    run(dir.path(), "plot . -o plot.png".split(' '))
        .expect_exit(2)
        .expect_stderr("expected a path that ends in `.html` or `.svg`");
    run(dir.path(), "plot . -o none/plot.svg".split(' '))
        .expect_exit(2)
        .expect_stderr("error: cannot write `none/plot.svg`: No such file or directory");
}
