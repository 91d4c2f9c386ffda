//! The folder of a run: it belongs to one job at a time, and tells of the run what the next one wants to know.

use nix::sys::signal::Signal;

use crate::harness::{Launch, TinyJob, ddp_train, launch, losses, metrics, run_dir, wait_for_step};

fn long(job: &TinyJob) -> Launch {
    job.launch()
        .nproc(2)
        .set("train.steps=100000")
        .set("train.checkpoint_every=1000")
}

#[test]
fn the_folder_of_a_live_job_is_refused_to_another_that_would_overwrite_or_resume_it() {
    let job = TinyJob::new();
    let first = long(&job).start();
    wait_for_step(&job.out(), 20);
    for how in ["run.overwrite=true", "run.resume=auto"] {
        long(&job)
            .set(how)
            .run()
            .expect_exit(73)
            .expect_stderr("tiny.yaml:1: `out` is in use: job `")
            .expect_stderr(
                "hint: wait until that job has ended, or stop it; or set a different `run.out_dir`",
            );
    }
    let words = ["run", "tiny.yaml", "--set", "run.resume=auto"];
    ddp_train()
        .args(words)
        .dir(job.dir())
        .run()
        .expect_exit(73)
        .expect_stderr("error: `out` is in use: job `");
    let reached = metrics(&job.out()).len() as u64;
    wait_for_step(&job.out(), reached + 20);
    first.signal(Signal::SIGTERM);
    first.finish().expect_exit(143);
    let steps: Vec<_> = metrics(&job.out())
        .iter()
        .map(|line| line["step"].as_u64())
        .collect();
    let counted: Vec<_> = (1..=steps.len() as u64).map(Some).collect();
    assert_eq!(steps, counted, "the first job's lines only");
    // The folder is free again.
    let next = format!("train.steps={}", steps.len() + 3);
    long(&job).set("run.resume=auto").set(&next).run().expect_exit(0);
    assert_eq!(losses(&job.out()).len(), steps.len() + 3);
}

/// It called the configuration valid, and the same launch was refused.
#[test]
fn a_dry_run_says_what_becomes_of_the_run_in_the_folder_and_leaves_it_alone() {
    let job = TinyJob::new();
    let launched = || launch().nproc(2).dir(job.dir()).set("train.steps=5");
    launched().target("tiny.yaml").run().expect_exit(0);
    let files = || {
        let names = std::fs::read_dir(job.out()).expect("a folder").flatten();
        let mut files: Vec<_> = names
            .map(|file| {
                (
                    file.file_name(),
                    file.metadata().and_then(|file| file.modified()).ok(),
                )
            })
            .collect();
        files.sort();
        files
    };
    let before = files();
    let dry = |words: &[&str]| launched().words(["--dry-run"]).words(words).target("tiny.yaml");
    let refused = "`out` already holds a run (found `checkpoints`)";
    dry(&[])
        .run()
        .expect_exit(2)
        .expect_stderr(&format!("error: tiny.yaml:1: {refused}"))
        .expect_stderr("hint: set `run.resume: auto` to continue it, `run.overwrite: true` to delete it, ");
    for (how, fate) in [
        ("run.resume=auto", "resumed after step 5"),
        ("run.resume=require", "resumed after step 5"),
        ("run.overwrite=true", "deleted"),
    ] {
        dry(&[])
            .set(how)
            .run()
            .expect_exit(0)
            .expect_stdout(&format!("`out` holds a run (step 5): it would be {fate}"));
    }
    // Of several nodes, rank 0 finds out.
    dry(&["--nnodes", "2", "--rdzv-endpoint", "localhost"])
        .run()
        .expect_exit(0)
        .expect_stdout(&format!(
            "the workers would refuse to begin: tiny.yaml:1: {refused}"
        ));
    assert_eq!(files(), before, "it was only looked at");
}

#[test]
fn resuming_a_run_that_is_done_says_so_and_leaves_its_summary() {
    let job = TinyJob::new();
    let train = |steps: &str| {
        let launch = job.launch().nproc(2);
        launch.set("run.resume=auto").set(steps).run()
    };
    let summary = || std::fs::read_to_string(job.out().join("summary.json")).unwrap_or_default();
    train("train.steps=10").expect_exit(0);
    let told = summary();
    assert!(told.contains("\"steps\": 10"), "{told}");
    train("train.steps=8")
        .expect_exit(0)
        .expect_stdout("nothing left to train: 10 of 8 steps are done");
    assert_eq!(summary(), told);
    // As if that life had been killed between its last checkpoint and its summary.
    std::fs::remove_file(job.out().join("summary.json")).expect("ours");
    train("train.steps=10").expect_exit(0);
    assert!(summary().contains("\"steps\": 10"), "{}", summary());
    train("train.steps=20")
        .expect_exit(0)
        .expect_stdout("over 20 steps instead of 10: training resumes at learning rate ");
}

#[test]
fn a_worker_without_a_launcher_has_a_new_folder_each_time() {
    let job = TinyJob::with(|yaml| yaml.replace("out_dir: out, ", ""));
    for _ in 0..2 {
        let words = ["run", "tiny.yaml", "--set", "train.steps=2"];
        ddp_train().args(words).dir(job.dir()).run().expect_exit(0);
    }
    let runs = std::fs::read_dir(job.dir().join("runs/tiny")).expect("a folder of runs");
    assert_eq!(runs.count(), 2);
}

/// The same command began at step 0 in a new folder, without a word.
#[test]
fn the_newest_run_of_a_name_is_resumed_without_its_folder() {
    let job = TinyJob::with(|yaml| yaml.replace("out_dir: out, seed: 7", "seed: 7, resume: auto"));
    let steps = |steps: u32| job.launch().set(&format!("train.steps={steps}"));
    steps(5)
        .set("run.resume=require")
        .run()
        .expect_exit(2)
        .expect_stderr("holds no checkpoint");
    steps(5).run().expect_exit(0).expect_no_stderr("continuing");
    let first = run_dir(job.dir(), "tiny");
    let name = first.file_name().and_then(|name| name.to_str()).expect("a name");
    // Newer, and without a checkpoint.
    std::fs::create_dir(first.with_file_name("99999999-000000-ffffff")).expect("writable");
    for (steps, how) in [(10, "run.resume=auto"), (15, "run.resume=require")] {
        let steps = format!("train.steps={steps}");
        let resumed = job.launch().set(&steps).set(how).run();
        resumed
            .expect_exit(0)
            .expect_stderr(&format!(
                "continuing the newest run of `tiny`, `runs/tiny/{name}`"
            ))
            .expect_stdout("resumed after step ");
    }
    let alone = ["run", "tiny.yaml", "--set", "train.steps=20"];
    ddp_train()
        .args(alone)
        .dir(job.dir())
        .run()
        .expect_exit(0)
        .expect_stdout("resumed after step 15");
    assert_eq!(losses(&first).len(), 20);
    steps(5)
        .set("run.resume=never")
        .run()
        .expect_exit(0)
        .expect_no_stderr("continuing");
    steps(5)
        .flag("--rdzv-id", "mine")
        .run()
        .expect_exit(0)
        .expect_no_stderr("continuing");
    // It saved last.
    let mine = "continuing the newest run of `tiny`, `runs/tiny/mine`";
    steps(10)
        .run()
        .expect_exit(0)
        .expect_stderr(mine)
        .expect_stdout("resumed after step 5");
}

#[test]
fn a_run_whose_folder_was_deleted_does_not_succeed() {
    let job = TinyJob::new();
    let running = job.launch().set("train.steps=400").start();
    wait_for_step(&job.out(), 1);
    let deleted = job.dir().join("deleted");
    std::fs::rename(job.out(), &deleted).expect("the folder of the run");
    std::fs::remove_dir_all(deleted).expect("deletable");
    running
        .finish()
        .expect_exit(74)
        .expect_stderr("metrics.jsonl` was deleted or moved during the run");
}
