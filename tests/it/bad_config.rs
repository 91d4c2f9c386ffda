//! What a user can get wrong in a configuration: one message with file, line and key, exit code 2, and
//! nothing half-written is left.

use crate::harness::{Finished, TinyJob, launch};

#[track_caller]
fn refused(job: &TinyJob) -> Finished {
    let finished = launch().nproc(2).dir(job.dir()).target("tiny.yaml").run();
    finished.expect_exit(2);
    let errors = finished.stderr().matches("error:").count();
    assert_eq!(errors, 1, "one message, not one a rank:\n{}", finished.stderr());
    finished
}

#[track_caller]
fn expect_nothing_written(job: &TinyJob) {
    assert!(
        !job.out().exists(),
        "`{}` was made for a run that never was",
        job.out().display()
    );
}

#[test]
fn an_unknown_key() {
    let job = TinyJob::with(|yaml| yaml.replace("  micro_batch: 2", "  microbatch: 2"));
    refused(&job)
        .expect_stderr("tiny.yaml")
        .expect_stderr("6")
        .expect_stderr("microbatch");
    expect_nothing_written(&job);
}

#[test]
fn a_wrong_type() {
    let job = TinyJob::with(|yaml| yaml.replace("steps: 40", "steps: many"));
    refused(&job)
        .expect_stderr("tiny.yaml")
        .expect_stderr("5")
        .expect_stderr("steps");
    expect_nothing_written(&job);
}

#[test]
fn a_missing_data_file() {
    let job = TinyJob::with(|yaml| yaml.replace("text.txt", "absent.txt"));
    refused(&job)
        .expect_stderr("data.train")
        .expect_stderr("absent.txt");
    expect_nothing_written(&job);
}

#[test]
fn heads_that_do_not_divide_the_channels() {
    let job = TinyJob::with(|yaml| yaml.replace("n_head: 2", "n_head: 3"));
    refused(&job).expect_stderr("n_embd").expect_stderr("n_head");
    expect_nothing_written(&job);
}

#[test]
fn an_override_of_a_key_that_does_not_exist() {
    let job = TinyJob::new();
    let finished = launch()
        .dir(job.dir())
        .set("train.step=3")
        .target("tiny.yaml")
        .run();
    finished.expect_exit(2).expect_stderr("train.step");
    expect_nothing_written(&job);
}

#[test]
fn an_out_dir_that_cannot_be_written() {
    // Below a file, not below a read-only folder: the tests may run as root.
    let job = TinyJob::with(|yaml| yaml.replace("out_dir: out", "out_dir: text.txt/out"));
    refused(&job).expect_stderr("text.txt/out");
}

#[test]
fn an_out_dir_that_holds_a_run() {
    let job = TinyJob::new();
    let run = || {
        launch()
            .dir(job.dir())
            .set("train.steps=2")
            .target("tiny.yaml")
            .run()
    };
    run().expect_exit(0);
    let before = std::fs::read(job.out().join("metrics.jsonl")).expect("metrics");
    run()
        .expect_exit(2)
        .expect_stderr("run.resume")
        .expect_stderr("run.overwrite");
    let after = std::fs::read(job.out().join("metrics.jsonl")).expect("metrics");
    assert_eq!(
        before, after,
        "a refused run must not touch the one that is there"
    );
    launch()
        .dir(job.dir())
        .set("train.steps=2")
        .set("run.overwrite=true")
        .target("tiny.yaml")
        .run()
        .expect_exit(0);
}

#[test]
fn a_truncated_checkpoint() {
    let job = TinyJob::new();
    launch()
        .dir(job.dir())
        .set("train.steps=5")
        .target("tiny.yaml")
        .run()
        .expect_exit(0);
    let pieces: Vec<_> = crate::harness::parameters(&job.out()).into_iter().collect();
    let (name, bytes) = pieces
        .iter()
        .max_by_key(|(_, bytes)| bytes.len())
        .expect("a piece");
    let checkpoint = job.out().join("checkpoints/step_00000005").join(name);
    std::fs::write(&checkpoint, &bytes[..bytes.len() / 2]).expect("writable");
    let resume = launch()
        .dir(job.dir())
        .set("run.resume=require")
        .set("train.steps=8")
        .flag("--max-restarts", "0");
    let finished = resume.target("tiny.yaml").run();
    finished.expect_exit(2).expect_stderr(name);
}
