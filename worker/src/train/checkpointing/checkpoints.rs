//! Checkpoints of a run, as the training loop sees them.
//!
//! At a save each rank copies what it is to write ([`super::owned_state`]) to memory of the host that was set aside at the
//! start, and training goes on; a thread ([`super::save_thread`]) writes the copy. With the losses of each step the ranks
//! tell each other how far they are, and when all have written, rank 0's thread makes the checkpoint of it. One save is under
//! way at a time: the next one waits for it. The last one of a run, and every one with `train.checkpoint_async: false`,
//! needs no copy, because training stands still.
//!
//! A save that failed, on whichever rank, failed on all of them; nothing of it stays, and training goes on.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::owned_state::{OwnFile, RankState, copy, files, stems};
use super::resume::load;
use super::save_thread::{Leader, Order, SaveTask, SaveThread, Source, Stage, Wait};
use super::save_verdict::{self, SaveReport, Told, Verdict};
use crate::checkpoint::{CheckpointError, Extent, Keep, Reader, Rng, State, Storage, step_name};
use crate::config::{OptimizerOffload, TrainConfig};
use crate::data::{Dataset, ORDER_VERSION};
use crate::device::{Arena, ArenaSpec, DType, DeviceError, HostMemory, Stream};
use crate::train::TrainError;
use crate::train::reporting::warn;
use crate::train::world::World;

/// Time between two rounds of telling each other how far a save is, when there is nothing else to do. A rank that
/// writes for long stays in touch, and is not taken for a lost one.
const ROUND: Duration = Duration::from_millis(250);
/// A disk that deletes nothing for so long, of a save that failed, is not waited for.
const CLEAN_UP_BOUND: Duration = Duration::from_secs(10);
/// Longest wait for a thread whose save nobody wants any more.
const ABANDON_BOUND: Duration = Duration::from_secs(2);
/// A wait that is reported.
const LONG_WAIT: Duration = Duration::from_secs(1);
/// The last save of a run has no next one that makes it good: it is tried again at once.
const LAST_ATTEMPTS: u32 = 2;
/// Before that, for a disk that is full or a server that is gone for a moment.
const LAST_PAUSE: Duration = Duration::from_secs(2);

/// The checkpoints of a run, and the save under way.
pub(crate) struct Checkpoints {
    out_dir: PathBuf,
    generation: u64,
    /// What every checkpoint of this run says of it. Its skipped steps are those of earlier lives.
    identity: State,
    storage: Arc<dyn Storage>,
    keep: Option<Keep>,
    every: u64,
    /// A disk that takes nothing for so long is given up.
    patience: Duration,
    /// Reads the state while training stands still.
    stream: Stream,
    /// Room for the copy of what this rank writes; none where all saves are made while training stands still.
    snapshot: Option<Arena>,
    pending: Option<PendingSave>,
    /// The save before, whose thread may still be cleaning up, or hang.
    before: Option<SaveThread>,
    /// Step of the last checkpoint that was saved or loaded.
    last: Option<u64>,
    resumed_from: Option<u64>,
    /// Saves that were not made good at once.
    failed: u64,
    /// Time for which training waited, since it was last asked for.
    stalled: Duration,
}

/// A save under way.
struct PendingSave {
    thread: SaveThread,
    /// As [`Checkpoints::patience`].
    patience: Duration,
    /// Rank 0's thread has been told to commit.
    ordered: bool,
    told: Told,
}

/// Steps finished, and samples consumed by them.
#[derive(Clone, Copy)]
pub(crate) struct Position {
    pub(crate) step: u64,
    pub(crate) samples: u64,
    /// Of the steps of this life.
    pub(crate) skipped: u64,
}

/// How a save ended, on all ranks alike but for the error, which is each rank's own.
struct Ended {
    verdict: Verdict,
    step: u64,
    own: Option<CheckpointError>,
}

impl Checkpoints {
    /// `identity` is what every checkpoint says of the run.
    pub(crate) fn new(
        (out_dir, generation): (&Path, u64),
        (config, world): (&TrainConfig, &World),
        storage: Arc<dyn Storage>,
        identity: State,
    ) -> Self {
        Self {
            out_dir: out_dir.to_owned(),
            generation,
            identity,
            storage,
            keep: config.train.checkpoint_keep.map(|keep| Keep {
                last: keep.last,
                every: keep.every,
            }),
            every: config.train.checkpoint_every,
            patience: Duration::from_secs_f64(config.train.checkpoint_timeout_s),
            stream: world.device.stream(),
            snapshot: None,
            pending: None,
            before: None,
            last: None,
            resumed_from: None,
            failed: 0,
            stalled: Duration::ZERO,
        }
    }

    /// Sets the memory of the copy aside, if saves are to be made while training goes on: what is missing is missing
    /// before the first step.
    pub(crate) fn reserve(&mut self, here: RankState<'_>, config: &TrainConfig) -> Result<(), DeviceError> {
        let train = &config.train;
        let is_periodic = train.checkpoint_every > 0 && train.checkpoint_every < train.steps;
        // Who keeps moments in a file has no memory for a copy of them.
        if !train.checkpoint_async || !is_periodic || train.offload.optimizer == OptimizerOffload::File {
            return Ok(());
        }
        let files = files(here);
        let bytes: u64 = files.iter().flat_map(|f| &f.extents).map(Extent::bytes).sum();
        let spec = ArenaSpec::private(SNAPSHOT, DType::U8, bytes as usize);
        let arena = Arena::new(&spec, HostMemory::private(SNAPSHOT, spec.bytes())?);
        // The system gives the pages now, not in the middle of the first save.
        arena.whole().host_bytes_mut()?.fill(0);
        self.snapshot = Some(arena);
        Ok(())
    }

    /// Memory set aside for the copy.
    pub(crate) fn snapshot_bytes(&self) -> usize {
        self.snapshot.as_ref().map_or(0, Arena::bytes)
    }

    /// Name of the last checkpoint that was saved or loaded.
    pub(crate) fn last(&self) -> Option<String> {
        self.last.map(step_name)
    }

    /// Saves of this life that failed, but for attempts at the last one.
    pub(crate) fn failed(&self) -> u64 {
        self.failed
    }

    /// Time for which saves held training up, since the last call.
    pub(crate) fn take_stalled(&mut self) -> Duration {
        std::mem::take(&mut self.stalled)
    }

    /// Loads the state of an opened checkpoint. Every rank calls it.
    pub(crate) fn load(&mut self, here: RankState<'_>, saved: &Reader) -> Result<(), TrainError> {
        load(saved, (here.world, here.replica, here.optimizer))?;
        let State { step, skipped, .. } = saved.manifest().state;
        self.last = Some(step);
        self.resumed_from = Some(step);
        self.identity.skipped = skipped;
        Ok(())
    }

    /// Begins the save of a step in the middle of the run, after the end of the one before. Every rank calls it.
    pub(crate) fn save(&mut self, here: RankState<'_>, at: Position) -> Result<(), TrainError> {
        let started = Instant::now();
        let before = self.pending.as_ref().map(|pending| pending.thread.step());
        self.drain(here)?;
        let waited = started.elapsed();
        if let Some(before) = before
            && waited > LONG_WAIT
            && here.world.rank() == 0
        {
            warn(&save_verdict::waited(before, at.step, waited));
        }
        let snapshot = self.snapshot.clone();
        self.begin(here, at, snapshot.as_ref());
        if self.snapshot.is_none() {
            self.drain(here)?;
        }
        self.stalled += started.elapsed();
        Ok(())
    }

    /// Saves the last state of the run, which nothing changes any more. Every rank calls it.
    pub(crate) fn save_last(&mut self, here: RankState<'_>, at: Position) -> Result<(), TrainError> {
        self.drain(here)?;
        for attempt in 1.. {
            self.begin(here, at, None);
            let Some(ended) = self.wait_for_end(here)? else {
                break;
            };
            let Verdict::Failed { ranks } = &ended.verdict else {
                break;
            };
            let hangs = matches!(
                ended.own,
                Some(CheckpointError::Stalled { .. } | CheckpointError::Stuck { .. })
            );
            if attempt < LAST_ATTEMPTS && !hangs {
                self.report(here, &ended, Some(LAST_PAUSE));
                pause(here, LAST_PAUSE)?;
                continue;
            }
            return Err(TrainError::NotSaved {
                step: at.step,
                latest: self.last(),
                ranks: ranks.clone(),
                cause: ended.own.map(Box::new),
            });
        }
        Ok(())
    }

    /// Ends the save under way, if there is one, and says so if it failed. Every rank calls it.
    pub(crate) fn drain(&mut self, here: RankState<'_>) -> Result<(), TrainError> {
        if let Some(ended) = self.wait_for_end(here)? {
            self.note(here, &ended);
        }
        Ok(())
    }

    /// How far the save under way is on this rank, as a number for the others, who are told with the losses of a step.
    pub(crate) fn code(&mut self, is_leader: bool) -> f64 {
        let pending = self.pending.as_mut();
        let stage = pending.map(|pending| pending.stage(is_leader, &self.out_dir));
        stage.map_or(0.0, |stage| save_verdict::code(&stage))
    }

    /// Acts on what all ranks told of a step. Every rank calls it, at the same step.
    pub(crate) fn receive(&mut self, here: RankState<'_>, codes: &[f64]) {
        if let Some(ended) = self.finish(here.world.rank() == 0, codes) {
            self.note(here, &ended);
        }
    }

    /// Counts a save in the middle of the run that failed, and says so.
    fn note(&mut self, here: RankState<'_>, ended: &Ended) {
        self.failed += u64::from(matches!(ended.verdict, Verdict::Failed { .. }));
        self.report(here, ended, None);
    }

    /// Gives up the save under way, because training has failed on some rank.
    pub(crate) fn abandon(&mut self) {
        if let Some(pending) = self.pending.take() {
            pending.thread.abandon(Instant::now() + ABANDON_BOUND);
        }
    }

    /// Waits for the end of the save under way. What a failed one wrote is gone then, unless the disk hangs.
    fn wait_for_end(&mut self, here: RankState<'_>) -> Result<Option<Ended>, TrainError> {
        while let Some(pending) = &self.pending {
            here.world.check()?;
            // A disk that takes nothing any more has a deadline of its own, `patience`.
            here.session.still_alive();
            let stage = pending.thread.stage();
            if pending.is_busy(&stage, here.world.rank() == 0) {
                pending.thread.await_change(&stage, Instant::now() + ROUND);
            }
            if let Some(ended) = self.round(here)? {
                self.has_ended();
                return Ok(Some(ended));
            }
        }
        Ok(None)
    }

    /// One round of telling each other, when training stands still.
    fn round(&mut self, here: RankState<'_>) -> Result<Option<Ended>, TrainError> {
        let is_leader = here.world.rank() == 0;
        let own = [self.code(is_leader), 0.0];
        let rows = here.rank_table.gather("progress of the checkpoint", own)?;
        let codes: Vec<f64> = rows.iter().map(|row| row[0]).collect();
        Ok(self.finish(is_leader, &codes))
    }

    fn finish(&mut self, is_leader: bool, codes: &[f64]) -> Option<Ended> {
        let pending = self.pending.as_mut()?;
        let stage = pending.stage(is_leader, &self.out_dir);
        let verdict = save_verdict::of(codes);
        match &verdict {
            Verdict::Pending => return None,
            Verdict::Written => {
                if is_leader && !pending.ordered {
                    pending.thread.order(Order::Commit);
                }
                pending.ordered = true;
                return None;
            }
            Verdict::Saved => self.last = Some(pending.thread.step()),
            Verdict::Failed { .. } => pending.thread.order(Order::GiveUp),
        }
        let own = match stage {
            Stage::Failed(error) => Some(error),
            Stage::Committed(trouble) => trouble,
            Stage::Writing | Stage::Written => None,
        };
        let ended = Ended {
            verdict,
            step: pending.thread.step(),
            own,
        };
        let thread = self.pending.take().map(|pending| pending.thread);
        // A save that could not begin because of the one before has no thread to wait for.
        self.before = self.before.take().or(thread);
        Some(ended)
    }

    /// True if the thread of the save before touches nothing any more. It is waited for only while its disk answers.
    fn has_ended(&mut self) -> bool {
        let patience = CLEAN_UP_BOUND.min(self.patience);
        self.before.take_if(|before| before.end(patience));
        self.before.is_none()
    }

    /// Says on one rank what went wrong, and what comes next: another attempt, or the next save that is due.
    fn report(&self, here: RankState<'_>, ended: &Ended, retry: Option<Duration>) {
        let speaks = match &ended.verdict {
            Verdict::Failed { ranks } => ranks.first() == Some(&here.world.rank()),
            _ => ended.own.is_some(),
        };
        if let (true, Some(error)) = (speaks, &ended.own) {
            let report = SaveReport {
                step: ended.step,
                verdict: &ended.verdict,
                error,
                next_due: (self.every > 0).then(|| (ended.step / self.every + 1) * self.every),
                retry,
                latest: self.last,
            };
            warn(&report.to_string());
        }
    }

    /// Copies, and starts the thread. Fails only as a save does.
    fn begin(&mut self, here: RankState<'_>, at: Position, snapshot: Option<&Arena>) {
        let thread = match self.task(here, at, snapshot) {
            Ok(task) => SaveThread::start(task),
            Err(error) => SaveThread::failed(at.step, error),
        };
        self.pending = Some(PendingSave {
            thread,
            patience: self.patience,
            ordered: false,
            told: Told::default(),
        });
    }

    /// What the thread is to do.
    fn task(
        &mut self,
        here: RankState<'_>,
        at: Position,
        snapshot: Option<&Arena>,
    ) -> Result<SaveTask, CheckpointError> {
        if !self.has_ended()
            && let Some(before) = &self.before
        {
            // It may still read the copy, or rename what it wrote.
            let Wait { doing, path } = before.wait(&self.out_dir);
            return Err(CheckpointError::Stuck {
                step: at.step,
                before: before.step(),
                doing,
                path,
            });
        }
        let files = files(here);
        let (home, stream) = (here.optimizer.home(), &here.world.stream);
        let sources = match snapshot {
            Some(arena) => copy(here, &files, arena),
            // The thread reads on another stream.
            None => home
                .synchronize(*stream)
                .map(|()| files.iter().map(|f| Source::Live(f.buffers.clone())).collect()),
        };
        let sources = sources.map_err(|e| CheckpointError::Source {
            step: at.step,
            cause: e.to_string(),
        })?;
        let leader = (here.world.rank() == 0).then(|| Leader {
            state: State {
                step: at.step,
                consumed_samples: at.samples,
                skipped: self.identity.skipped.saturating_add(at.skipped),
                ..self.identity.clone()
            },
            stems: stems(here),
            keep: self.keep,
            needed: self.resumed_from.into_iter().collect(),
        });
        Ok(SaveTask {
            storage: self.storage.clone(),
            out_dir: self.out_dir.clone(),
            step: at.step,
            generation: self.generation,
            files: files.into_iter().zip(sources).map(OwnFile::with).collect(),
            leader,
            home: home.clone(),
            stream: self.stream,
            cancel: here.world.cancel.clone(),
        })
    }
}

/// What a run is, whatever its step.
pub(crate) fn identity(config: &TrainConfig, dataset: &Dataset) -> Result<State, TrainError> {
    Ok(State {
        step: 0,
        consumed_samples: 0,
        skipped: 0,
        batch: None,
        rng: Rng {
            seed: config.run.seed,
            data_order: ORDER_VERSION.into(),
        },
        config: document(config, dataset),
        data: Some(dataset.train.fingerprint()?),
    })
}

/// A configuration to be compared with another: a tokenizer is the same wherever its file is.
pub(crate) fn document(config: &TrainConfig, dataset: &Dataset) -> serde_json::Value {
    let mut document = serde_json::to_value(config).expect("a configuration serialises");
    document["data"]["tokenizer"] = dataset.vocabulary.identity(&config.data.tokenizer).into();
    document
}

/// For errors and memory accounts.
const SNAPSHOT: &str = "checkpoint snapshot";

impl PendingSave {
    /// The thread's stage, or that its disk takes nothing any more; a failure once, a failure ever after.
    fn stage(&mut self, is_leader: bool, out_dir: &Path) -> Stage {
        let mut stage = self.thread.stage();
        if self.is_busy(&stage, is_leader) && self.thread.silence() > self.patience {
            let Wait { doing, path } = self.thread.wait(out_dir);
            stage = Stage::Failed(CheckpointError::Stalled {
                step: self.thread.step(),
                doing,
                path,
                seconds: self.patience.as_secs_f64(),
            });
        }
        self.told.now(stage)
    }

    /// The thread has something to do on this rank.
    fn is_busy(&self, stage: &Stage, is_leader: bool) -> bool {
        match stage {
            Stage::Writing => true,
            Stage::Written => is_leader && self.ordered,
            Stage::Committed(_) | Stage::Failed(_) => false,
        }
    }
}

/// Lets time pass, unless the generation ends.
fn pause(here: RankState<'_>, duration: Duration) -> Result<(), TrainError> {
    let until = Instant::now() + duration;
    while let Some(left) = until.checked_duration_since(Instant::now()) {
        here.world.check()?;
        here.session.still_alive();
        std::thread::sleep(left.min(ROUND));
    }
    Ok(())
}
