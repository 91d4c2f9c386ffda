//! A generation ends in the middle of a step: ranks that live keep their state, a replacement gets its part from them, and
//! not one bit of the result changes.

use std::collections::BTreeMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};

use crate::train_support::deferred::DeferredDevice;
use crate::train_support::hooked::{Hooks, hooked};
use crate::train_support::{Job, Trained, assert_same};
use ddp_proto::ids::Generation;
use ddp_worker::collective::{Failure, Request, Subgroup, Transport, Wait};
use ddp_worker::config::{Precision, Recovery, ShardGroup, Strategy, TrainConfig};
use ddp_worker::device::{Arena, ArenaSpec, CpuDevice, Device, Held, Stream};
use ddp_worker::metrics::MetricsLine;
use ddp_worker::ops::Op;
use ddp_worker::session::{MemoryStore, Session};
use ddp_worker::train::{Assignment, Ended, RunSummary, WrapTransport, run_generations};

const STEPS: u64 = 6;

/// What the thread of a rank that dies unwinds with: nothing is printed.
struct Killed;

/// Counts operations. The rank dies before the last one that it may carry out.
#[derive(Clone)]
struct Mortal {
    begun: Arc<AtomicU64>,
    last: u64,
}

impl Mortal {
    fn begin(&self) {
        if self.begun.fetch_add(1, Ordering::Relaxed) + 1 == self.last {
            resume_unwind(Box::new(Killed));
        }
    }
}

impl Hooks for Mortal {
    fn enqueue(&self, cpu: &CpuDevice, stream: Stream, op: Op) {
        self.begin();
        cpu.enqueue(stream, op);
    }
}

/// Makes the device of a rank that dies.
type MakeMortal = fn(Mortal) -> Arc<dyn Device>;

/// Runs operations at once.
fn at_once(mortal: Mortal) -> Arc<dyn Device> {
    hooked(mortal)
}

/// The host is a step ahead, and skips what is behind a collective that has failed.
fn deferred(mortal: Mortal) -> Arc<dyn Device> {
    Arc::new(DeferredDevice::hooked(move || mortal.begin()))
}

/// A device of a rank that lives.
fn sound() -> Arc<dyn Device> {
    at_once(living())
}

fn living() -> Mortal {
    dying_before(NEVER)
}

fn dying_before(last: u64) -> Mortal {
    let begun = Arc::default();
    Mortal { begun, last }
}

const NEVER: u64 = u64::MAX;

/// Acts in the update of this step, from 1.
struct AtUpdate(u64, Box<dyn Fn() + Send + Sync>);

impl Hooks for AtUpdate {
    fn enqueue(&self, cpu: &CpuDevice, stream: Stream, op: Op) {
        if matches!(&op, Op::Update(update) if update.step == self.0) {
            (self.1)();
        }
        cpu.enqueue(stream, op);
    }
}

/// A rank loses the losses of all ranks in one step, after they have got its own: as if another one had died in between.
struct Deaf {
    inner: Box<dyn Transport>,
    /// Such exchanges that are left.
    sound: u64,
}

impl Transport for Deaf {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn members(&self) -> &[usize] {
        self.inner.members()
    }

    fn alloc_shared(
        &mut self,
        device: &Arc<dyn Device>,
        spec: &ArenaSpec,
        wait: &Wait,
    ) -> Result<Arena, Failure> {
        self.inner.alloc_shared(device, spec, wait)
    }

    fn split(&mut self, subgroup: &Subgroup, wait: &Wait) -> Result<Box<dyn Transport>, Failure> {
        self.inner.split(subgroup, wait)
    }

    fn execute(&mut self, request: &Request, held: Held, wait: &Wait) -> Result<u64, Failure> {
        let bytes = self.inner.execute(request, held, wait)?;
        if request.tag == "losses" {
            if self.sound == 0 {
                let how = "its process left or died".to_owned();
                return Err(Failure::PeerLost { rank: 0, how });
            }
            self.sound -= 1;
        }
        Ok(bytes)
    }
}

/// In step 4.
fn deafening() -> WrapTransport {
    Arc::new(|inner| Box::new(Deaf { inner, sound: 3 }))
}

/// Runs a job whose ranks are threads, one generation for each number of `worlds`. `place` gives each its place, by rank and
/// generation. A rank that dies is replaced in the next one, if that has as many ranks.
fn run(job: &Job, worlds: &[u32], place: &(dyn Fn(usize, usize, &Session) -> Assignment + Sync)) {
    let generations: Vec<Vec<Session>> = (worlds.iter().zip(1..))
        .map(|(world, generation)| sessions(job, *world, generation))
        .collect();
    let parked = Barrier::new(worlds[0] as usize);
    let session = |rank: usize, generation: usize| generations.get(generation)?.get(rank);
    std::thread::scope(|scope| {
        for rank in 0..worlds[0] as usize {
            let (generations, parked) = (&generations, &parked);
            scope.spawn(move || {
                let mut generation = 0;
                while let Some(first) = session(rank, generation) {
                    let first = place(rank, generation, first);
                    let next = |ended: &mut Ended| {
                        let error = ended.as_ref().err()?;
                        // Before a failure, which would leave the others there.
                        parked.wait();
                        assert!(error.is_consequence(), "{error}");
                        generation += 1;
                        Some(place(rank, generation, session(rank, generation)?))
                    };
                    let lived = catch_unwind(AssertUnwindSafe(|| run_generations(&job.config, first, next)));
                    match lived {
                        Ok(ended) => {
                            assert_eq!(ended.unwrap().steps, job.config.train.steps);
                            break;
                        }
                        Err(why) if why.is::<Killed>() => {
                            // As an agent does: the generation is over for all when one rank has died.
                            let all = generations[generation].iter().map(Session::cancel);
                            all.for_each(|cancel| cancel.cancel(format!("rank {rank} died")));
                            parked.wait();
                            generation += 1;
                        }
                        Err(why) => resume_unwind(why),
                    }
                }
            });
        }
    });
}

fn sessions(job: &Job, world: u32, generation: u64) -> Vec<Session> {
    let store = Arc::new(MemoryStore::default());
    let session = |rank| {
        let mut env = job.env(rank, world);
        env.generation = Generation(generation);
        env.restart_count = generation as u32 - 1;
        Session::in_process(env, store.clone())
    };
    (0..world).map(session).collect()
}

/// All files of the checkpoints, by path.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all.extend(files(&path));
        } else {
            all.insert(path.display().to_string(), fs::read(&path).unwrap());
        }
    }
    all
}

/// What a run came to.
#[derive(Debug, PartialEq)]
struct Outcome {
    numbers: Vec<(u64, u64, u64, Option<u64>)>,
    files: BTreeMap<String, Vec<u8>>,
}

fn outcome(job: &Job) -> Outcome {
    let numbers = |line: MetricsLine| {
        let val_loss = line.val_loss.map(f64::to_bits);
        (line.step, line.loss.to_bits(), line.grad_norm.to_bits(), val_loss)
    };
    Outcome {
        numbers: job.metrics().into_iter().map(numbers).collect(),
        files: files(&job.out_dir().join("checkpoints")),
    }
}

/// Generation of each step's line.
fn generations(job: &Job) -> Vec<u32> {
    job.metrics().iter().map(|line| line.generation as u32).collect()
}

/// Saves nothing before the end: what is lost in memory begins at step 0 again.
fn job(change: impl FnOnce(&mut TrainConfig)) -> Job {
    Job::with(|c| {
        c.train.steps = STEPS;
        c.train.eval_every = 3;
        c.parallel.timeout_s = 60.0;
        change(c);
    })
}

/// Each of the ranks dies at each `stride`th operation of two steps, and every third replacement once more. Then each rank
/// misses the losses of a step.
fn nothing_changes(what: &str, world: u32, stride: usize, change: impl FnOnce(&mut TrainConfig)) {
    nothing_changes_on(at_once, what, world, stride, change);
}

fn nothing_changes_on(
    device: MakeMortal,
    what: &str,
    world: u32,
    stride: usize,
    change: impl FnOnce(&mut TrainConfig),
) {
    let job = job(change);
    let worlds = [world; 3];
    let begun = Arc::new(AtomicU64::new(0));
    run(&job, &worlds, &|rank, _, session| Assignment {
        device: Some(device(Mortal {
            begun: if rank == 0 { begun.clone() } else { Arc::default() },
            last: NEVER,
        })),
        ..Assignment::of(session)
    });
    let (expected, operations) = (outcome(&job), begun.load(Ordering::Relaxed));
    assert_eq!(expected.numbers.len() as u64, STEPS, "{what}");
    assert!(operations > 20 * STEPS, "{what}: {operations} operations");
    let of_two_steps = operations * 2 / STEPS..operations * 4 / STEPS;
    for (number, operation) in of_two_steps.step_by(stride).enumerate() {
        let victim = number % world as usize;
        let last = [
            operation,
            if number % 3 == 0 {
                1 + operation % 90
            } else {
                NEVER
            },
            NEVER,
        ];
        fs::remove_dir_all(job.out_dir()).unwrap();
        run(&job, &worlds, &|rank, generation, session| Assignment {
            device: Some(device(if rank == victim {
                dying_before(last[generation])
            } else {
                living()
            })),
            ..Assignment::of(session)
        });
        let what = format!("{what}, rank {victim} before operations {last:?}");
        assert!(outcome(&job) == expected, "{what}");
        assert_eq!(generations(&job)[0], 1, "it began anew: {what}");
    }
    for deaf in 0..world as usize {
        fs::remove_dir_all(job.out_dir()).unwrap();
        run(&job, &worlds, &|rank, generation, session| Assignment {
            device: Some(device(living())),
            transport: (rank == deaf && generation == 0).then(deafening),
            ..Assignment::of(session)
        });
        let what = format!("{what}, rank {deaf} misses losses");
        assert!(outcome(&job) == expected, "{what}");
        assert_eq!(
            generations(&job),
            [1, 1, 1, 1, 2, 2],
            "{what}: the others had finished step 4"
        );
    }
}

#[test]
fn ddp_loses_no_step() {
    nothing_changes("ddp", 3, 11, |_| ());
}

#[test]
fn devices_that_run_later_lose_no_step() {
    nothing_changes_on(deferred, "ddp, deferred", 3, 23, |_| ());
    nothing_changes_on(deferred, "zero2, deferred", 4, 61, |c| {
        c.parallel.strategy = Strategy::Zero2;
        c.parallel.shard_group = Some(ShardGroup::Ranks(2));
    });
    nothing_changes_on(deferred, "zero2 with buddies, deferred", 3, 23, |c| {
        with_buddies(c, Strategy::Zero2);
    });
}

#[test]
fn sharded_replicas_lose_no_step() {
    for (strategy, precision) in [
        (Strategy::Zero1, Precision::F32),
        (Strategy::Zero2, Precision::Bf16),
        (Strategy::Zero3, Precision::F32),
    ] {
        nothing_changes(&format!("{strategy:?} in {precision:?}"), 4, 41, |c| {
            c.parallel.strategy = strategy;
            c.parallel.shard_group = Some(ShardGroup::Ranks(2));
            c.train.precision = precision;
        });
    }
}

#[test]
fn tensor_and_pipeline_ranks_with_replicas_lose_no_step() {
    nothing_changes("tensor", 4, 41, |c| c.parallel.tensor = 2);
    nothing_changes("pipeline", 4, 41, |c| {
        c.model.n_layer = 2;
        c.train.grad_accumulation = 2;
        c.parallel.pipeline.stages = 2;
    });
}

fn with_buddies(config: &mut TrainConfig, strategy: Strategy) {
    // So that each rank owns some of the parameters.
    config.model.n_embd = 64;
    (config.parallel.first_bucket_mb, config.parallel.bucket_mb) = (0.2, 0.2);
    config.parallel.strategy = strategy;
    config.train.recovery = Recovery::Buddy;
}

/// Each part of the state is on one rank, and a copy of it on its buddy.
#[test]
fn shards_with_buddies_lose_no_step() {
    for (strategy, precision) in [
        (Strategy::Zero1, Precision::F32),
        (Strategy::Zero2, Precision::Bf16),
        (Strategy::Zero3, Precision::F32),
    ] {
        nothing_changes(
            &format!("{strategy:?} in {precision:?} with buddies"),
            3,
            41,
            |c| {
                with_buddies(c, strategy);
                c.train.precision = precision;
            },
        );
    }
}

/// Of four ranks, `victims` die in step 4 when all have passed its barrier; `deaf` misses the losses. The others finish
/// the step, and copies of other ranks' parts. Returns the generation of each step.
fn generations_after(victims: [usize; 2], deaf: Option<usize>) -> Vec<u32> {
    let job = job(|c| with_buddies(c, Strategy::Zero2));
    let all_die = Arc::new(Barrier::new(if victims[0] == victims[1] { 1 } else { 2 }));
    let run_with = |deaths: usize| {
        run(&job, &[4, 4][..=deaths], &|rank, generation, session| {
            let all_die = all_die.clone();
            let dies = deaths > generation && victims.contains(&rank);
            let die = move || {
                all_die.wait();
                resume_unwind(Box::new(Killed))
            };
            Assignment {
                device: Some(if dies {
                    hooked(AtUpdate(4, Box::new(die)))
                } else {
                    sound()
                }),
                transport: (deaths > generation && deaf == Some(rank)).then(deafening),
                ..Assignment::of(session)
            }
        });
    };
    run_with(0);
    let expected = outcome(&job);
    fs::remove_dir_all(job.out_dir()).unwrap();
    run_with(1);
    assert!(
        outcome(&job) == expected,
        "ranks {victims:?} die, {deaf:?} is deaf"
    );
    generations(&job)
}

#[test]
fn a_part_is_lost_only_with_a_rank_and_its_buddy() {
    assert_eq!(generations_after([0, 2], None), [1, 1, 1, 1, 2, 2]);
    assert_eq!(generations_after([1, 2], None), [2; 6]);
    assert_eq!(generations_after([3, 0], None), [2; 6]);
    // The buddy finishes the copy too.
    assert_eq!(generations_after([1, 1], Some(2)), [1, 1, 1, 1, 2, 2]);
}

/// The others have passed the barrier of the step in which a rank dies, and finish it. No rank takes its place.
#[test]
fn a_smaller_world_goes_on_with_the_bits_of_a_restart_there() {
    const LAST: u64 = 4;
    let make = || job(|c| c.train.grad_accumulation = 2);
    let mut restarted = make();
    restarted.device = Some(Box::new(|session| {
        let stop = session.stop_request();
        // The request goes to the other ranks with the losses of the next step.
        hooked(AtUpdate(
            LAST - 1,
            Box::new(move || stop.ask("the world changes", false)),
        ))
    }));
    assert_eq!(restarted.train(3).summary.steps, LAST);
    (restarted.restarts, restarted.device) = (1, None);
    let expected = restarted.train(2);

    let job = make();
    run(&job, &[3, 2], &|rank, _, session| Assignment {
        device: Some(match rank {
            2 => hooked(AtUpdate(LAST, Box::new(|| resume_unwind(Box::new(Killed))))),
            _ => sound(),
        }),
        ..Assignment::of(session)
    });
    let trained = Trained {
        summary: RunSummary::default(),
        metrics: job.metrics(),
        state: job.state(),
    };
    assert_same(&expected, &trained, "in a smaller world");
    assert_eq!(generations(&job), [1, 1, 1, 1, 2, 2]);
}
