//! Workers that outlive their generation: in the next one, in the same process, they train on with the bits of processes
//! that were started anew.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::train_support::hooked::{Hooks, hooked};
use crate::train_support::watched::{Watch, watching};
use crate::train_support::{Job, Trained, assert_same};
use ddp_worker::config::{Precision, Strategy, TrainConfig};
use ddp_worker::device::{CpuDevice, Device, Stream};
use ddp_worker::ops::Op;
use ddp_worker::session::{MemoryStore, Session};
use ddp_worker::train::{Assignment, Ended, RunSummary, TrainError, run_generations};

const DEADLINE: Duration = Duration::from_mins(2);

/// The number of ranks of each generation, and the step after which it ends.
const GENERATIONS: [(u32, u64); 3] = [(2, 3), (3, 6), (2, 9)];

/// Acts with the update of a step, from 1.
struct AtUpdate {
    step: u64,
    act: Box<dyn Fn() + Send + Sync>,
}

impl Hooks for AtUpdate {
    fn enqueue(&self, cpu: &CpuDevice, stream: Stream, op: Op) {
        if matches!(&op, Op::Update(update) if update.step == self.step) {
            (self.act)();
        }
        cpu.enqueue(stream, op);
    }
}

/// A device whose rank asks to stop after `last` steps.
fn stopping(session: &Session, last: u64) -> Arc<dyn Device> {
    let stop = session.stop_request();
    hooked(AtUpdate {
        // The request goes to the other ranks with the losses of the next step.
        step: last - 1,
        act: Box::new(move || stop.ask("the world changes", true)),
    })
}

/// 12 samples a step, on 2 ranks and on 3.
fn job(change: impl FnOnce(&mut TrainConfig)) -> Job {
    Job::with(|c| {
        c.model.n_layer = 2;
        c.train.steps = 9;
        c.train.grad_accumulation = 3;
        c.train.schedule.warmup_steps = 5;
        c.parallel.timeout_s = 60.0;
        change(c);
    })
}

fn checkpoints(job: &Job) -> PathBuf {
    job.out_dir().join("checkpoints")
}

/// The files of the last checkpoint.
fn last_checkpoint(job: &Job) -> BTreeMap<PathBuf, Vec<u8>> {
    let folder = fs::read_dir(checkpoints(job).join("step_00000009")).unwrap();
    let paths = folder.map(|entry| entry.unwrap().path());
    paths
        .map(|path| (path.clone(), fs::read(path).unwrap()))
        .collect()
}

/// Each generation in processes of its own, which go on from the checkpoint of those before.
fn in_new_processes(job: &mut Job) -> Trained {
    let lives = GENERATIONS.into_iter().zip(0..).map(|((world, last), life)| {
        job.restarts = life;
        job.device = Some(Box::new(move |session| stopping(session, last)));
        let trained = job.train(world);
        assert_eq!(trained.summary.steps, last);
        trained
    });
    lives.last().unwrap()
}

/// All generations in one process. Where all ranks hold all of the state they go on in memory: the checkpoints are gone.
fn in_one_process(job: &mut Job) -> Trained {
    let is_whole = job.config.parallel.strategy == Strategy::Ddp;
    let config = job.config.clone();
    let mut summary = RunSummary::default();
    std::thread::scope(|scope| {
        let ((ended, endings), config) = (channel(), &config);
        let worker = |ended: Sender<_>| {
            let (assign, assignments) = channel::<Assignment>();
            scope.spawn(move || {
                let Ok(first) = assignments.recv() else { return };
                let next = |outcome: &mut Ended| {
                    let outcome = outcome.as_ref().cloned().map_err(ToString::to_string);
                    ended.send(outcome).unwrap();
                    assignments.recv().ok()
                };
                run_generations(config, first, next).unwrap();
            });
            assign
        };
        let workers: Vec<Sender<Assignment>> = (0..3).map(|_| worker(ended.clone())).collect();
        for ((world, last), life) in GENERATIONS.into_iter().zip(0..) {
            job.restarts = life;
            let store = Arc::new(MemoryStore::default());
            for rank in 0..world {
                let session = Session::in_process(job.env(rank, world), store.clone());
                let assignment = Assignment {
                    device: Some(stopping(&session, last)),
                    ..Assignment::of(&session)
                };
                // A worker need not keep its rank.
                workers[((rank + life) % world) as usize]
                    .send(assignment)
                    .unwrap();
            }
            for _ in 0..world {
                summary = endings.recv_timeout(DEADLINE).unwrap().unwrap();
                assert_eq!(summary.steps, last);
            }
            if is_whole && last < config.train.steps {
                fs::remove_dir_all(checkpoints(job)).unwrap();
            }
        }
    });
    Trained {
        summary,
        metrics: job.metrics(),
        state: job.state(),
    }
}

#[test]
fn three_generations_in_one_process_have_the_bits_of_three_processes() {
    for (strategy, precision) in [
        (Strategy::Ddp, Precision::F32),
        (Strategy::Zero1, Precision::Bf16),
        (Strategy::Zero3, Precision::F32),
    ] {
        let mut job = job(|c| {
            c.parallel.strategy = strategy;
            c.train.precision = precision;
        });
        let expected = in_new_processes(&mut job);
        let files = last_checkpoint(&job);
        assert!(files.len() > 4, "{files:?}");
        // The same folder, which a checkpoint names.
        fs::remove_dir_all(job.out_dir()).unwrap();
        let trained = in_one_process(&mut job);
        let what = format!("{strategy:?} in {precision:?}");
        assert_same(&expected, &trained, &what);
        assert!(last_checkpoint(&job) == files, "the files: {what}");
    }
}

struct Silent;

impl Watch for Silent {}

#[test]
fn a_generation_that_is_over_in_the_middle_of_a_step_leaves_only_its_state_behind() {
    let make = || {
        job(|c| {
            c.parallel.strategy = Strategy::Zero3;
            c.train.checkpoint_every = 3;
            c.train.checkpoint_async = false;
        })
    };
    let undisturbed = make().train(2);
    let mut job = make();
    let sessions: Vec<[Session; 2]> = (0..2)
        .map(|life| {
            job.restarts = life;
            let store = Arc::new(MemoryStore::default());
            [0, 1].map(|rank| Session::in_process(job.env(rank, 2), store.clone()))
        })
        .collect();
    let cancels = [0, 1].map(|rank| sessions[0][rank].cancel());
    let over: Arc<dyn Device> = hooked(AtUpdate {
        step: 5,
        act: Box::new(move || {
            for cancel in &cancels {
                cancel.cancel("rank 7 died of SIGKILL");
            }
        }),
    });
    let devices = Mutex::new(
        [
            over,
            hooked(AtUpdate {
                step: u64::MAX,
                act: Box::new(|| ()),
            }),
        ]
        .map(Some),
    );
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (job, sessions, devices) = (&job, &sessions, &devices);
            scope.spawn(move || {
                let device = devices.lock().unwrap()[rank].take().unwrap();
                let watch = Arc::new(Silent);
                let first = Assignment {
                    device: Some(device),
                    transport: Some(watching(watch.clone())),
                    ..Assignment::of(&sessions[0][rank])
                };
                let mut rest = sessions[1..].iter();
                let trained = run_generations(&job.config, first, |ended| {
                    let next = rest.next()?;
                    let error = ended.as_ref().unwrap_err();
                    assert!(matches!(error, TrainError::GenerationOver { .. }), "{error}");
                    // Each communicator has a transport, which its thread holds, and so does all that has a clone of it.
                    assert_eq!(Arc::strong_count(&watch), 1, "transports of rank {rank}");
                    assert!(sessions[0][rank].cancel().waits().is_empty());
                    Some(Assignment::of(&next[rank]))
                });
                assert_eq!(trained.unwrap().steps, 9);
            });
        }
    });
    let trained = Trained {
        summary: RunSummary::default(),
        metrics: job.metrics(),
        state: job.state(),
    };
    assert_same(&undisturbed, &trained, "after a generation that was over");
}
