//! Checkpoints of whole runs: written while training goes on, lost to no fault, and never training's loss.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::train_support::agent::with_agent;
use crate::train_support::disk::{Before, WatchedDisk, full};
use crate::train_support::faulty::{Fault, FaultyDevice};
use crate::train_support::{Job, Trained};
use ddp_proto::control::ToAgent;
use ddp_worker::checkpoint::{Reader, Which};
use ddp_worker::config::{CheckpointKeep, Resume, Strategy, TrainConfig};
use ddp_worker::metrics::Summary;
use ddp_worker::session::Phase;
use ddp_worker::train::{Assignment, TrainError, run_generations};

const DEADLINE: Duration = Duration::from_mins(10);

fn job(steps: u64, every: u64, change: impl FnOnce(&mut TrainConfig)) -> Job {
    Job::with(|c| {
        c.train.steps = steps;
        c.train.checkpoint_every = every;
        c.train.verify_every = 0;
        change(c);
    })
}

/// Every rank's disk, watched by the same eyes.
fn watch(job: &mut Job, before: Arc<Before>) {
    job.storage = Some(Box::new(move |_| WatchedDisk::storage(before.clone())));
}

/// The disk of one rank.
fn watch_rank(job: &mut Job, rank: u32, before: Arc<Before>) {
    job.storage = Some(Box::new(move |session| {
        let is_watched = session.env().rank.get() == rank;
        let nothing: Arc<Before> = Arc::new(|_, _| Ok(()));
        WatchedDisk::storage(if is_watched { before.clone() } else { nothing })
    }));
}

fn is_of(path: &Path, step: u64) -> bool {
    let name = format!("step_{step:08}");
    path.to_str().is_some_and(|path| path.contains(&name))
}

/// Names below `checkpoints`, and that every checkpoint among them is whole.
fn saved(job: &Job) -> Vec<String> {
    let root = job.out_dir().join("checkpoints");
    let mut names: Vec<String> = std::fs::read_dir(&root)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    for name in names.iter().filter(|name| name.starts_with("step_")) {
        assert_eq!(Reader::open_folder(&root.join(name)).unwrap().damages(), []);
    }
    names
}

fn steps_and_latest(steps: &[u64]) -> Vec<String> {
    let steps = steps.iter().map(|step| format!("step_{step:08}"));
    std::iter::once("latest".to_owned()).chain(steps).collect()
}

fn assert_same(one: &Trained, other: &Trained, what: &str) {
    assert_eq!(one.losses(), other.losses(), "losses: {what}");
    assert_eq!(one.state, other.state, "parameters and moments: {what}");
}

fn lines(path: &Path) -> usize {
    std::fs::read_to_string(path).map_or(0, |text| text.lines().count())
}

#[test]
fn training_goes_on_while_a_checkpoint_is_written() {
    let mut job = job(7, 3, |_| ());
    let metrics = job.out_dir().join("metrics.jsonl");
    let waited = Arc::new(AtomicBool::new(false));
    let seen = waited.clone();
    // The disk takes the checkpoint of step 3 only when step 5 is done.
    let slow = move |operation: &str, path: &Path| {
        if operation == "append" && is_of(path, 3) {
            let deadline = Instant::now() + DEADLINE;
            while lines(&metrics) < 5 {
                if Instant::now() > deadline {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                std::thread::yield_now();
            }
            seen.store(true, Ordering::Relaxed);
        }
        Ok(())
    };
    watch(&mut job, Arc::new(slow));
    let trained = job.train(2);
    assert!(waited.load(Ordering::Relaxed));
    assert_eq!(saved(&job), steps_and_latest(&[3, 6, 7]));
    // What was written is the state after step 3, although training had gone on.
    let still = self::job(7, 3, |c| c.train.checkpoint_async = false);
    assert_same(&trained, &still.train(2), "asynchronous and not");
    let state_at = |job: &Job, step: u64| {
        let reader = Reader::open(&job.out_dir(), Which::Step(step)).unwrap();
        let tensors = reader.manifest().tensors.iter();
        tensors
            .map(|t| reader.read_whole(&t.name).unwrap())
            .collect::<Vec<_>>()
    };
    for step in [3, 6] {
        assert!(state_at(&job, step) == state_at(&still, step), "step {step}");
    }
}

#[test]
fn a_save_that_fails_on_one_rank_fails_on_all_and_training_goes_on() {
    for (strategy, rank, operation) in [
        (Strategy::Ddp, 1, "append"),
        (Strategy::Zero1, 1, "sync"),
        (Strategy::Zero3, 0, "create"),
        (Strategy::Ddp, 0, "sync folder"),
    ] {
        let change = |c: &mut TrainConfig| c.parallel.strategy = strategy;
        let undisturbed = job(8, 2, change).train(2);
        let mut job = job(8, 2, change);
        let tried = Arc::new(AtomicUsize::new(0));
        let counter = tried.clone();
        let broken = move |found: &str, path: &Path| {
            if found == operation && is_of(path, 4) {
                counter.fetch_add(1, Ordering::Relaxed);
                return Err(full());
            }
            Ok(())
        };
        watch_rank(&mut job, rank, Arc::new(broken));
        let trained = job.train(2);
        let what = format!("{strategy:?}, `{operation}` fails on rank {rank}");
        assert_eq!(tried.load(Ordering::Relaxed), 1, "{what}");
        assert_eq!(saved(&job), steps_and_latest(&[2, 6, 8]), "{what}");
        assert_same(&undisturbed, &trained, &what);
        let summary = std::fs::read(job.out_dir().join("summary.json")).unwrap();
        let summary: Summary = serde_json::from_slice(&summary).unwrap();
        assert_eq!(summary.failed_saves, 1, "{what}");
        assert_eq!(summary.checkpoint.as_deref(), Some("step_00000008"), "{what}");
    }
}

/// Counts the operations of the save of one step, and lets `fails` decide about each by its number.
fn during(
    step: u64,
    fails: impl Fn(usize) -> bool + Send + Sync + 'static,
) -> (Arc<Before>, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let (counter, begun, over) = (count.clone(), AtomicBool::new(false), AtomicBool::new(false));
    let before = move |_: &str, path: &Path| {
        begun.fetch_or(is_of(path, step), Ordering::SeqCst);
        over.fetch_or(is_of(path, step + 2), Ordering::SeqCst);
        let is_in = begun.load(Ordering::SeqCst) && !over.load(Ordering::SeqCst);
        if is_in && fails(counter.fetch_add(1, Ordering::SeqCst)) {
            return Err(full());
        }
        Ok(())
    };
    (Arc::new(before), count)
}

fn kept_last(c: &mut TrainConfig) {
    c.train.checkpoint_keep = Some(CheckpointKeep { last: 1, every: None });
    c.parallel.strategy = Strategy::Zero1;
}

#[test]
fn whichever_operation_of_a_save_fails_the_run_ends_as_undisturbed() {
    let mut reference = job(6, 2, kept_last);
    let (disk, count) = during(4, |_| false);
    watch(&mut reference, disk);
    let undisturbed = reference.train(2);
    let operations = count.load(Ordering::SeqCst);
    assert!(operations > 40, "{operations} operations");
    for failing in 0..operations {
        let mut job = job(6, 2, kept_last);
        watch(&mut job, during(4, move |number| number == failing).0);
        let trained = job.train(2);
        let what = format!("operation {failing} fails");
        assert_same(&undisturbed, &trained, &what);
        assert_eq!(saved(&job), steps_and_latest(&[6]), "{what}");
    }
}

#[test]
fn whenever_a_job_dies_in_a_save_the_next_life_goes_on_from_a_whole_checkpoint() {
    let undisturbed = job(6, 2, kept_last).train(2);
    let mut counted = job(6, 2, kept_last);
    let (disk, count) = during(4, |_| false);
    watch(&mut counted, disk);
    counted.train(2);
    for stop in 0..count.load(Ordering::SeqCst) {
        let mut job = job(6, 2, kept_last);
        watch(&mut job, during(4, move |number| number >= stop).0);
        job.device = Some(Box::new(|_| FaultyDevice::going_wrong(Fault::Fails, 6)));
        assert!(job.run(2).iter().all(Result::is_err));
        let latest = Reader::open(&job.out_dir(), Which::Latest).unwrap();
        assert_eq!(latest.damages(), []);
        let step = latest.manifest().state.step;
        assert!(
            step == 2 || step == 4,
            "after {stop} operations the latest is {step}"
        );
        (job.device, job.storage, job.restarts) = (None, None, 1);
        let what = format!("the disk was gone after {stop} operations");
        assert_same(&undisturbed, &job.train(2), &what);
        let names = saved(&job);
        assert!(
            names.iter().all(|name| !name.starts_with('.')),
            "{what}: {names:?}"
        );
    }
}

#[test]
fn a_save_longer_than_the_patience_of_collectives_is_waited_for() {
    let mut job = job(3, 0, |c| c.parallel.timeout_s = 4.0);
    let slow = |operation: &str, path: &Path| {
        if operation == "sync" && path.ends_with("parameters-1-of-2.safetensors") {
            let (_disk, answer) = std::sync::mpsc::channel::<()>();
            let _ = answer.recv_timeout(Duration::from_secs(7));
        }
        Ok(())
    };
    watch(&mut job, Arc::new(slow));
    job.train(2);
    assert_eq!(saved(&job), steps_and_latest(&[3]));
}

#[test]
fn a_last_save_that_fails_is_the_error_of_a_run_that_is_done() {
    let mut job = job(6, 4, |_| ());
    let broken = |operation: &str, path: &Path| {
        if operation == "append" && is_of(path, 6) {
            return Err(full());
        }
        Ok(())
    };
    watch_rank(&mut job, 1, Arc::new(broken));
    let outcomes = job.run(2);
    let message = outcomes[1].as_ref().unwrap_err().to_string();
    let begin = "training ended after step 6, but the state after it could not be saved on rank 1, the latest checkpoint is `step_00000004`: cannot write `";
    assert!(message.starts_with(begin), "{message}");
    assert!(
        message.contains("No space left on device (os error 28)\n  hint: free some space"),
        "{message}"
    );
    // Rank 0 may hear first that the generation is over.
    let other = outcomes[0].as_ref().unwrap_err();
    assert!(other.is_consequence(), "{other}");
    assert_eq!(saved(&job), steps_and_latest(&[4]));
    assert_eq!(job.metrics().len(), 6);
}

#[test]
fn a_disk_that_takes_the_last_save_at_the_second_try_is_forgiven() {
    let mut job = job(2, 0, |_| ());
    let failed = AtomicBool::new(false);
    let moody = move |operation: &str, _: &Path| {
        if operation == "append" && !failed.swap(true, Ordering::Relaxed) {
            return Err(full());
        }
        Ok(())
    };
    watch(&mut job, Arc::new(moody));
    job.train(2);
    assert_eq!(saved(&job), steps_and_latest(&[2]));
}

#[test]
fn the_checkpoint_that_a_run_was_resumed_from_is_kept() {
    let mut job = job(3, 0, |c| c.run.resume = Resume::Auto);
    job.train(1);
    job.config.train.steps = 6;
    job.config.train.checkpoint_every = 1;
    job.config.train.checkpoint_keep = Some(CheckpointKeep { last: 1, every: None });
    job.train(1);
    assert_eq!(saved(&job), steps_and_latest(&[3, 6]));
}

#[test]
fn another_training_text_is_no_continuation() {
    let mut job = job(2, 0, |c| c.run.resume = Resume::Auto);
    job.train(1);
    let path: PathBuf = job.config.data.train.iter().next().unwrap().to_owned();
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replacen("the", "THE", 1)).unwrap();
    job.config.train.steps = 4;
    let outcome = job.run(1).remove(0);
    let error = outcome.unwrap_err();
    assert!(matches!(error, TrainError::Refused(_)), "{error}");
    let message = error.to_string();
    assert!(
        message.contains("`training text of `data.train`` is "),
        "{message}"
    );
    std::fs::write(&path, text).unwrap();
    assert_eq!(job.train(1).summary.steps, 4);
}

#[test]
fn the_snapshot_is_the_ranks_part_and_is_declared() {
    let bytes = |strategy, world, every, beside| {
        let job = job(3, every, |c| {
            c.parallel.strategy = strategy;
            c.train.checkpoint_async = beside;
        });
        let trained = job.train(world);
        let parameters = Reader::open(&job.out_dir(), Which::Latest).unwrap();
        let tensors = parameters.manifest().tensors.iter();
        let all: u64 = tensors.map(|t| t.shape.iter().product::<u64>() * 4).sum();
        assert_eq!(trained.metrics[2].checkpoint_ms > 0.0, every == 2);
        (trained.metrics[0].memory.checkpoint, all)
    };
    let (whole, all) = bytes(Strategy::Ddp, 1, 2, true);
    assert_eq!(whole, all);
    let (half, all) = bytes(Strategy::Ddp, 2, 2, true);
    assert!(half.abs_diff(all / 2) <= 12, "{half} of {all}");
    let (half, all) = bytes(Strategy::Zero1, 2, 2, true);
    assert!(half < all && half > 0, "{half} of {all}");
    // Where training stands still anyway, there is nothing to copy.
    assert_eq!(bytes(Strategy::Ddp, 2, 2, false).0, 0);
    assert_eq!(bytes(Strategy::Ddp, 2, 0, true).0, 0);
}

/// Blocks as long as this is held, at most until a deadline.
#[derive(Default)]
struct Gate(Mutex<bool>, Condvar);

impl Gate {
    fn wait(&self) {
        let open = self.0.lock().unwrap();
        let waited = self.1.wait_timeout_while(open, DEADLINE, |open| !*open).unwrap();
        assert!(!waited.1.timed_out(), "nobody opened the gate");
    }

    fn open(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }
}

/// A disk that does not answer for so long is given up.
fn soon(c: &mut TrainConfig) {
    c.train.checkpoint_timeout_s = 2.0;
    c.parallel.strategy = Strategy::Zero1;
}

#[test]
fn a_disk_that_hangs_for_ever_does_not_hang_the_training() {
    for (rank, operation, doing) in [
        (1, "append", "write"),
        (1, "create", "create"),
        (0, "sync folder", "sync"),
        (0, "rename", "rename to"),
    ] {
        let undisturbed = job(6, 0, soon).train(2);
        let mut job = job(6, 2, soon);
        let gate = Arc::new(Gate::default());
        let held = gate.clone();
        let hangs = move |found: &str, path: &Path| {
            if found == operation && is_of(path, 2) {
                held.wait();
            }
            Ok(())
        };
        watch_rank(&mut job, rank, Arc::new(hangs));
        let outcomes = job.run(2);
        let what = format!("`{operation}` hangs on rank {rank}");
        let losses: Vec<f64> = job.metrics().iter().map(|line| line.loss).collect();
        assert_eq!(losses, undisturbed.losses(), "{what}");
        let error = outcomes[rank as usize].as_ref().unwrap_err();
        assert!(
            matches!(error, TrainError::NotSaved { step: 6, .. }),
            "{what}: {error}"
        );
        let message = error.to_string();
        let begin = format!("the file system has still not responded to {doing} `");
        for part in [
            format!("rank {rank}"),
            begin,
            "step_00000002".into(),
            "`dmesg`".into(),
        ] {
            assert!(message.contains(&part), "{what}: {message}");
        }
        assert!(!job.out_dir().join("checkpoints/latest").exists(), "{what}");
        // Not a run that a signal has stopped: the same job has to say that it resumes.
        let summary = Summary::read(&job.out_dir().join("summary.json"));
        assert!(
            summary.is_none_or(|summary| !summary.complete && summary.stopped.is_none()),
            "{what}"
        );
        gate.open();
    }
}

#[test]
fn a_rank_that_waits_for_a_slow_disk_says_that_it_is_alive() {
    let job = job(2, 1, |c| c.train.checkpoint_async = false);
    let gate = Arc::new(Gate::default());
    let (held, opened) = (gate.clone(), AtomicUsize::new(0));
    let slow = move |operation: &str, _: &Path| {
        if operation == "sync" {
            held.wait();
        }
        Ok(())
    };
    // The disk answers only once the agent has heard three times that the save gets on.
    let listen = |message: &ToAgent| {
        let is_fresh = matches!(
            message,
            ToAgent::Heartbeat {
                phase: Phase::Saving,
                quiet_ms: 0,
                ..
            }
        );
        if is_fresh && opened.fetch_add(1, Ordering::Relaxed) == 3 {
            gate.open();
        }
        None
    };
    let (outcome, _) = with_agent(job.env(0, 1), listen, |session| {
        let assignment = Assignment {
            storage: Some(WatchedDisk::storage(Arc::new(slow))),
            ..Assignment::of(session)
        };
        run_generations(&job.config, assignment, |_| None)
    });
    outcome.unwrap();
}

#[test]
fn a_disk_that_comes_back_takes_checkpoints_again() {
    // Many more than the thread that saves can miss after the disk is back.
    const LAST: u64 = 60;
    for (rank, operation) in [(1, "append"), (0, "rename")] {
        let undisturbed = job(LAST, 0, soon).train(2);
        let mut job = job(LAST, 2, soon);
        let metrics = job.out_dir().join("metrics.jsonl");
        // The save of step 2 hangs until step 5 is done; that of step 4 cannot begin.
        let hangs = move |found: &str, path: &Path| {
            let deadline = Instant::now() + DEADLINE;
            while found == operation && is_of(path, 2) && lines(&metrics) < 5 {
                assert!(Instant::now() < deadline, "training is stalled");
                std::thread::yield_now();
            }
            Ok(())
        };
        watch_rank(&mut job, rank, Arc::new(hangs));
        let trained = job.train(2);
        let what = format!("`{operation}` hangs on rank {rank}");
        assert_same(&undisturbed, &trained, &what);
        let saved = saved(&job);
        let is_saved = |step: u64| saved.iter().any(|name| *name == format!("step_{step:08}"));
        // What rank 0 was about to commit became a checkpoint after all.
        assert_eq!(
            [2, 4, LAST].map(is_saved),
            [rank == 0, false, true],
            "{what}: {saved:?}"
        );
        assert!(
            (6..LAST).step_by(2).any(is_saved),
            "{what}: no save in the middle: {saved:?}"
        );
    }
}

#[test]
fn a_disk_that_hangs_while_it_deletes_a_failed_save_is_not_waited_for() {
    let mut job = job(4, 2, soon);
    let gate = Arc::new(Gate::default());
    let held = gate.clone();
    let hangs = move |found: &str, path: &Path| {
        match found {
            "append" if is_of(path, 2) => return Err(full()),
            "delete" if is_of(path, 2) && !path.ends_with("step_00000002") => held.wait(),
            _ => {}
        }
        Ok(())
    };
    watch_rank(&mut job, 0, Arc::new(hangs));
    let outcomes = job.run(2);
    let message = outcomes[0].as_ref().unwrap_err().to_string();
    assert!(message.contains(" to delete `"), "{message}");
    assert_eq!(job.metrics().len(), 4);
    gate.open();
}
