//! The folder of a run belongs to one job at a time.

use nix::sys::signal::Signal;

use crate::harness::{Launch, Program, TinyJob, launch, losses, metrics, wait_for_step};

fn long(job: &TinyJob) -> Launch {
    launch()
        .nproc(2)
        .set("train.steps=100000")
        .set("train.checkpoint_every=1000")
        .target("tiny.yaml")
        .dir(job.dir())
}

#[test]
fn the_folder_of_a_live_job_is_refused_to_another_that_would_overwrite_or_resume_it() {
    let job = TinyJob::new();
    let first = long(&job).start();
    wait_for_step(&job.out(), 20);
    for how in ["run.overwrite=true", "run.resume=auto", "run.resume=require"] {
        long(&job)
            .set(how)
            .run()
            .expect_exit(73)
            .expect_stderr("tiny.yaml:1: `out` is in use: job `")
            .expect_stderr("hint: wait until that job has ended, or stop it; or set another `run.out_dir`");
    }
    let words = ["run", "tiny.yaml", "--set", "run.resume=auto"];
    Program::new(env!("CARGO_BIN_EXE_ddp-train"))
        .args(words.map(Into::into))
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
    assert_eq!(steps, counted, "the first job's lines, and nobody else's");
    // The folder is free again.
    let next = format!("train.steps={}", steps.len() + 3);
    long(&job).set("run.resume=auto").set(&next).run().expect_exit(0);
    assert_eq!(losses(&job.out()).len(), steps.len() + 3);
}

#[test]
fn of_jobs_that_want_a_folder_at_once_one_gets_it_and_the_others_are_told_so() {
    let job = TinyJob::new();
    let mut jobs: Vec<_> = (0..3).map(|_| long(&job).start()).collect();
    // Whoever is refused ends by itself; the job that trains does so until it is told to end.
    wait_for_step(&job.out(), 20);
    let mut refused = 0;
    while refused < 2 {
        let ended = jobs
            .iter_mut()
            .position(|job| job.ended_within(std::time::Duration::from_millis(50)));
        if let Some(index) = ended {
            let finished = jobs.remove(index).finish();
            let words = finished.stderr();
            assert!(
                words.contains("`out` is in use: job `"),
                "{}",
                finished.transcript()
            );
            refused += 1;
        }
    }
    let winner = jobs.remove(0);
    winner.signal(Signal::SIGTERM);
    winner.finish().expect_exit(143);
    assert!(job.out().join("summary.json").is_file());
}
