//! Checkpoints of a run, as the training loop sees them.
//!
//! At a save each rank copies what it is to write ([`super::owned_state`]) to memory of the host that was set aside at the
//! start, and training continues; a thread ([`super::save_thread`]) writes the copy. With the losses of each step the ranks
//! exchange how far they are, and when all have written, rank 0's thread makes the checkpoint of it. One save is under
//! way at a time: the next one waits for it. The last one of a run, and every one with `train.checkpoint_async: false`,
//! needs no copy, because training stands still.
//!
//! A save that failed, on whichever rank, failed on all of them; nothing of it stays, and training continues.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ddp_proto::words::{counted, numbered};

use super::owned_state::{RankState, copy, written};
use super::resume::document;
use super::save_thread::{Leader, SaveTask, SaveThread, Stage, spawn, unreadable};
use crate::checkpoint::{CheckpointError, Extent, Rng, State, Storage, TOKENIZER_FILE, step_name};
use crate::config::{CheckpointKeep, OffloadTarget, Tokenizer, TrainConfig};
use crate::data::{Dataset, ORDER_VERSION};
use crate::device::{Arena, ArenaSpec, DType, DeviceError, HostMemory, Stream};
use crate::metrics::RunDir;
use crate::train::TrainError;
use crate::train::reporting::warn;
use crate::train::world::World;

/// Time between two exchanges of how far a save is while training waits for it. A rank that writes for long stays in touch,
/// so that the others do not take it for lost.
const ROUND: Duration = Duration::from_millis(250);
/// Longest wait for the clean-up of a save when training has failed: the process is about to end.
const ABANDON_BOUND: Duration = Duration::from_secs(2);
/// Longest time that a request of a save's clean-up may take while training waits for it: the ranks wait for each other.
const CLEAN_UP_BOUND: Duration = Duration::from_secs(10);
/// Longer waits are reported.
const LONG_WAIT: Duration = Duration::from_secs(1);
/// The last save of a run is retried once, because no later save makes up for it.
const LAST_ATTEMPTS: u32 = 2;
/// Pause before the retry, for a disk that is full or a server that is away for a moment.
const LAST_PAUSE: Duration = Duration::from_secs(2);

/// The checkpoints of a run, and the save under way.
pub(crate) struct Checkpoints {
    run: SavedRun,
    keep: Option<CheckpointKeep>,
    every: u64,
    /// A save fails if the file system does not answer a request within this time.
    timeout: Duration,
    /// Reads the state while training stands still.
    stream: Stream,
    /// Room for the copy of what this rank writes; `None` if training stands still during all saves.
    snapshot: Option<Arena>,
    pending: Option<SaveThread>,
    /// The save before, whose thread may still be cleaning up, or hang.
    before: Option<SaveThread>,
    /// Step of the last checkpoint of the run.
    last: Option<u64>,
    /// Saves in the middle of the run that failed.
    failed: u64,
    /// Time for which training waited since the last call of [`Checkpoints::take_stalled`].
    stalled: Duration,
}

/// A run whose state is saved, in one of its generations.
pub(crate) struct SavedRun {
    pub(crate) dir: Arc<RunDir>,
    /// Step of the latest checkpoint of earlier generations, which is kept.
    pub(crate) latest: Option<u64>,
    /// What every checkpoint says of the run. Its skipped steps are those of earlier lives.
    pub(crate) identity: State,
    pub(crate) storage: Arc<dyn Storage>,
}

/// Steps finished, and samples consumed by them.
#[derive(Clone, Copy)]
pub(crate) struct Position {
    pub(crate) step: u64,
    pub(crate) samples: u64,
    /// Steps of this life without an update.
    pub(crate) skipped: u64,
}

/// How far a save is on all ranks together.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    /// Some rank still writes.
    Pending,
    /// All have written: rank 0 may commit.
    Written,
    /// No rank writes any more. It is the latest checkpoint, unless these ranks have failed.
    Ended { failed: Vec<usize> },
}

impl Verdict {
    /// From the codes of the stages of all ranks, in rank order: the same on every rank, because they are.
    fn of(codes: &[f64]) -> Self {
        let at = |code: f64| -> Vec<usize> { (0..codes.len()).filter(|&rank| codes[rank] == code).collect() };
        let failed = at(FAILED);
        if !at(WRITING).is_empty() {
            // Even if others have failed: files must not be written while they are deleted.
            Self::Pending
        } else if !failed.is_empty() || codes.first() == Some(&COMMITTED) {
            Self::Ended { failed }
        } else {
            Self::Written
        }
    }
}

const WRITING: f64 = 0.0;
const WRITTEN: f64 = 1.0;
const COMMITTED: f64 = 2.0;
const FAILED: f64 = 3.0;

/// How a save ended. Only the error differs between ranks.
struct Ended {
    step: u64,
    /// The ranks that failed.
    failed: Vec<usize>,
    own: Option<CheckpointError>,
}

impl Checkpoints {
    pub(crate) fn new(run: SavedRun, config: &TrainConfig, world: &World) -> Self {
        Self {
            keep: config.train.checkpoint_keep,
            every: config.train.checkpoint_every,
            timeout: Duration::from_secs_f64(config.train.checkpoint_timeout_s),
            stream: world.compute.device.stream(),
            snapshot: None,
            pending: None,
            before: None,
            last: run.latest,
            run,
            failed: 0,
            stalled: Duration::ZERO,
        }
    }

    /// Reserves the memory of the copy, if saves are made while training continues: a lack of memory shows before the first
    /// step.
    pub(crate) fn reserve(&mut self, here: RankState<'_>, config: &TrainConfig) -> Result<(), DeviceError> {
        let train = &config.train;
        let is_periodic = train.checkpoint_every > 0 && train.checkpoint_every < train.steps;
        // A run that keeps moments in a file has no memory for a copy of them.
        if !train.checkpoint_async || !is_periodic || train.offload.optimizer == OffloadTarget::File {
            return Ok(());
        }
        let own = written(here);
        let bytes: u64 = own.iter().flat_map(|own| &own.extents).map(Extent::bytes).sum();
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

    /// Saves of this life that failed, without attempts at the last one.
    pub(crate) fn failed(&self) -> u64 {
        self.failed
    }

    /// Time for which saves held training up, since the last call.
    pub(crate) fn take_stalled(&mut self) -> Duration {
        std::mem::take(&mut self.stalled)
    }

    /// What is saved with the parameters and moments.
    pub(crate) fn state(&self, at: Position) -> State {
        State {
            step: at.step,
            consumed_samples: at.samples,
            skipped: self.run.identity.skipped.saturating_add(at.skipped),
            ..self.run.identity.clone()
        }
    }

    /// Begins the save of a step in the middle of the run, after the end of the one before. Every rank calls it.
    pub(crate) fn save(&mut self, here: RankState<'_>, at: Position) -> Result<(), TrainError> {
        let started = Instant::now();
        let before = self.pending.as_ref().map(SaveThread::step);
        self.drain(here)?;
        let waited = started.elapsed();
        if let Some(before) = before
            && waited > LONG_WAIT
            && here.world.rank() == 0
        {
            warn(&waited_words(before, at.step, waited));
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
            if ended.failed.is_empty() {
                break;
            }
            let hangs = matches!(ended.own, Some(CheckpointError::Stalled(_)));
            if attempt < LAST_ATTEMPTS && !hangs {
                self.report(here, &ended, Some(LAST_PAUSE));
                pause(here, LAST_PAUSE)?;
                continue;
            }
            return Err(TrainError::NotSaved {
                step: at.step,
                latest: self.last(),
                ranks: ended.failed,
                cause: ended.own.map(Box::new),
            });
        }
        Ok(())
    }

    /// Waits for the end of the save under way, if there is one, and reports a failure. Every rank calls it.
    pub(crate) fn drain(&mut self, here: RankState<'_>) -> Result<(), TrainError> {
        if let Some(ended) = self.wait_for_end(here)? {
            self.note(here, &ended);
        }
        Ok(())
    }

    /// How far the save under way is on this rank, as a number for the others, sent with the losses of a step.
    pub(crate) fn code(&self) -> f64 {
        match self.pending.as_ref().map(|thread| thread.stage(self.timeout)) {
            None | Some(Stage::Writing) => WRITING,
            Some(Stage::Written) => WRITTEN,
            Some(Stage::Committed(_)) => COMMITTED,
            Some(Stage::Failed(_)) => FAILED,
        }
    }

    /// Acts on the numbers of all ranks of a step. Every rank calls it, at the same step.
    pub(crate) fn receive(&mut self, here: RankState<'_>, codes: &[f64]) {
        if let Some(ended) = self.finish(here.world.rank() == 0, codes) {
            self.note(here, &ended);
        }
    }

    /// Counts a save in the middle of the run that failed, and says so.
    fn note(&mut self, here: RankState<'_>, ended: &Ended) {
        self.failed += u64::from(!ended.failed.is_empty());
        self.report(here, ended, None);
    }

    /// Gives up the save under way, because training has failed on some rank. The next job deletes what its thread cannot
    /// delete before the process ends. False if a thread may still read the state.
    pub(crate) fn abandon(&mut self) -> bool {
        let mut threads = self.pending.take().into_iter().chain(self.before.take());
        threads.all(|mut thread| thread.end(ABANDON_BOUND) || !thread.is_live())
    }

    /// True of the step of the latest checkpoint.
    pub(crate) fn has(&self, step: u64) -> bool {
        self.last == Some(step)
    }

    /// Waits for the end of the save under way. A failed one has deleted what it wrote, unless the file system hangs.
    fn wait_for_end(&mut self, here: RankState<'_>) -> Result<Option<Ended>, TrainError> {
        while let Some(thread) = &self.pending {
            here.world.check()?;
            // A file system that does not answer has a deadline of its own, `timeout`.
            here.session.still_alive();
            thread.await_change(ROUND);
            let own = [self.code(), 0.0];
            let rows = here.rank_table.gather("progress of the checkpoint", own)?;
            let codes: Vec<f64> = rows.iter().map(|row| row[0]).collect();
            if let Some(ended) = self.finish(here.world.rank() == 0, &codes) {
                self.has_ended();
                return Ok(Some(ended));
            }
        }
        Ok(None)
    }

    fn finish(&mut self, is_leader: bool, codes: &[f64]) -> Option<Ended> {
        let thread = self.pending.as_mut()?;
        let failed = match Verdict::of(codes) {
            Verdict::Pending => return None,
            Verdict::Written => {
                if is_leader {
                    thread.commit();
                }
                return None;
            }
            Verdict::Ended { failed } => failed,
        };
        let own = match thread.stage(self.timeout) {
            Stage::Failed(error) => Some(error),
            Stage::Committed(trouble) => trouble,
            Stage::Writing | Stage::Written => None,
        };
        let step = thread.step();
        if failed.is_empty() {
            self.last = Some(step);
        } else {
            thread.give_up();
        }
        // A save that could not begin because of the one before has no thread to wait for.
        self.before = self.before.take().or(self.pending.take());
        Some(Ended { step, failed, own })
    }

    /// Waits for the thread of the save before, as long as the file system answers it. True if it touches nothing any more.
    fn has_ended(&mut self) -> bool {
        let timeout = CLEAN_UP_BOUND.min(self.timeout);
        self.before.take_if(|before| before.end(timeout));
        self.before.is_none()
    }

    /// Reports on one rank what went wrong, and what comes next: another attempt, or the next save that is due.
    fn report(&self, here: RankState<'_>, ended: &Ended, retry: Option<Duration>) {
        let rank = here.world.rank();
        let speaks = ended.failed.first().is_none_or(|first| *first == rank);
        if let (true, Some(error)) = (speaks, &ended.own) {
            let next_due = (self.every > 0).then(|| (ended.step / self.every + 1) * self.every);
            warn(&ended.words(error, retry, next_due, self.last));
        }
    }

    /// Copies, and starts the thread. Errors are reported like those of a save.
    fn begin(&mut self, here: RankState<'_>, at: Position, snapshot: Option<&Arena>) {
        let task = self.task(here, at, snapshot);
        self.pending = Some(SaveThread::start(spawn, self.run.dir.path(), at.step, task));
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
            return Err(CheckpointError::stuck(at.step, before.step(), &before.request()));
        }
        let mut tensors = written(here);
        let home = here.optimizer.home();
        let readable = match snapshot {
            Some(arena) => copy(here, &mut tensors, arena),
            // The thread reads on another stream.
            None => home.synchronize(here.world.compute.stream),
        };
        readable.map_err(|e| unreadable(at.step, &e))?;
        let leader = (here.world.rank() == 0).then(|| Leader {
            state: self.state(at),
            keep: self.keep,
            needed: self.run.latest.into_iter().collect(),
        });
        Ok(SaveTask {
            storage: self.run.storage.clone(),
            out_dir: self.run.dir.path().to_owned(),
            step: at.step,
            generation: here.session.env().generation.get(),
            fence: self.run.dir.fence(),
            rank: here.world.rank(),
            ranks: here.world.size(),
            tensors,
            live: snapshot.is_none().then(|| (home.clone(), self.stream)),
            leader,
            cancel: here.world.cancel.clone(),
        })
    }
}

impl Ended {
    /// What went wrong, for people, with what comes next: another attempt after a pause, or the step of the next save.
    /// `latest` is the step of the latest checkpoint.
    fn words(
        &self,
        error: &CheckpointError,
        retry: Option<Duration>,
        next_due: Option<u64>,
        latest: Option<u64>,
    ) -> String {
        let step = self.step;
        if self.failed.is_empty() {
            return format!(
                "the checkpoint of step {step} is saved, but older ones that are not kept could not be deleted: {error}"
            );
        }
        let ranks = numbered("rank", &self.failed);
        let next = match (retry, next_due) {
            (Some(pause), _) => format!("retrying in {} s", pause.as_secs()),
            (None, Some(due)) => format!("training continues; the next one is due after step {due}"),
            (None, None) => "training continues".into(),
        };
        let latest = match latest {
            Some(latest) => format!("the latest is `{}`", step_name(latest)),
            None => "none exists yet".into(),
        };
        format!("the checkpoint of step {step} was not saved on {ranks}; {next} ({latest})\n  {error}")
    }
}

/// What a run is, whatever its step.
pub(crate) fn identity(config: &TrainConfig, dataset: &Dataset) -> Result<State, TrainError> {
    let mut document = document(config);
    if let Tokenizer::File(path) = &config.data.tokenizer {
        // Only to find it again: what counts is its hash.
        document["data"][TOKENIZER_FILE] = std::path::absolute(path)
            .unwrap_or_else(|_| path.clone())
            .to_string_lossy()
            .into();
    }
    let val = config.data.val.as_ref();
    Ok(State {
        step: 0,
        consumed_samples: 0,
        skipped: 0,
        batch: None,
        rng: Rng {
            seed: config.run.seed,
            data_order: ORDER_VERSION.into(),
        },
        config: document,
        data: dataset.train.fingerprint()?,
        val_data: val.map(|_| dataset.val.fingerprint()).transpose()?,
    })
}

/// Name of the copy in errors and memory accounts.
const SNAPSHOT: &str = "checkpoint snapshot";

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

/// Training stood still because a save took long.
fn waited_words(before: u64, step: u64, waited: Duration) -> String {
    format!(
        "training stalled for {:.1} s: the checkpoint of step {step} was due before that of step {before} was written\n  hint: raise `train.checkpoint_every`, or save to a faster disk",
        waited.as_secs_f64()
    )
}

/// At the end of a run: how many of its saves were lost on the way, and what is left.
pub(crate) fn failed_saves(saves: u64, latest: Option<&str>) -> Option<String> {
    if saves == 0 {
        return None;
    }
    let latest = latest.map_or_else(
        || "no checkpoint exists".to_owned(),
        |name| format!("the latest is `{name}`"),
    );
    Some(format!(
        "{} of this run could not be saved (see above); {latest}",
        counted(saves, "checkpoint")
    ))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn all_ranks_must_have_written_and_one_that_fails_fails_for_all() {
        let ended = |failed: &[usize]| Verdict::Ended {
            failed: failed.to_vec(),
        };
        assert_eq!(Verdict::of(&[WRITTEN, WRITING, FAILED]), Verdict::Pending);
        assert_eq!(Verdict::of(&[WRITTEN, WRITTEN]), Verdict::Written);
        assert_eq!(Verdict::of(&[COMMITTED, WRITTEN]), ended(&[]));
        assert_eq!(Verdict::of(&[WRITTEN, FAILED, FAILED]), ended(&[1, 2]));
        // Rank 0 could not commit.
        assert_eq!(Verdict::of(&[FAILED, WRITTEN]), ended(&[0]));
        assert_eq!(Verdict::of(&[WRITTEN]), Verdict::Written);
    }

    #[test]
    fn a_failed_save_says_where_why_and_what_comes_next() {
        let error = CheckpointError::Io {
            doing: "write",
            path: PathBuf::from("out/x"),
            cause: "No space left on device (os error 28)".into(),
            kind: std::io::ErrorKind::StorageFull,
        };
        let ended = Ended {
            step: 40,
            failed: vec![1, 2],
            own: None,
        };
        insta::assert_snapshot!(ended.words(&error, None, Some(60), Some(20)), @r"
        the checkpoint of step 40 was not saved on ranks 1, 2; training continues; the next one is due after step 60 (the latest is `step_00000020`)
          cannot write `out/x`: No space left on device (os error 28)
          hint: free some space there
        ");
        insta::assert_snapshot!(ended.words(&error, Some(Duration::from_secs(2)), None, None), @r"
        the checkpoint of step 40 was not saved on ranks 1, 2; retrying in 2 s (none exists yet)
          cannot write `out/x`: No space left on device (os error 28)
          hint: free some space there
        ");
        let ended = Ended {
            failed: Vec::new(),
            ..ended
        };
        insta::assert_snapshot!(ended.words(&error, None, Some(60), Some(20)), @r"
        the checkpoint of step 40 is saved, but older ones that are not kept could not be deleted: cannot write `out/x`: No space left on device (os error 28)
          hint: free some space there
        ");
        assert_eq!(failed_saves(0, None), None);
        insta::assert_snapshot!(failed_saves(2, Some("step_00000060")).unwrap(), @"2 checkpoints of this run could not be saved (see above); the latest is `step_00000060`");
        insta::assert_snapshot!(waited_words(20, 40, Duration::from_millis(2340)), @r"
        training stalled for 2.3 s: the checkpoint of step 40 was due before that of step 20 was written
          hint: raise `train.checkpoint_every`, or save to a faster disk
        ");
    }
}
