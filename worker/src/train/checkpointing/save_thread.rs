//! One save on a thread of its own: this rank's files, and on rank 0 the checkpoint of all ranks.
//!
//! The thread does not talk to other ranks. The training loop reads its [`Stage`], sends it to the other ranks, and lets
//! rank 0's thread commit when all ranks have written. There is one deadline: the file system must answer each request
//! within `train.checkpoint_timeout_s`. The storage notes each request, so that the error can name the one that hangs.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::owned_state::OwnTensors;
use crate::checkpoint::{
    CheckpointError, DiskStep, Fence, PartWriter, State, Storage, Writer, file_stem, retain,
};
use crate::config::CheckpointKeep;
use crate::device::{Buffer, DeviceError, StateMemory, Stream, evict};
use crate::session::Cancel;
use crate::train::reporting::warn;

/// Bytes that are read from the device, or written, between two checks whether the save is still wanted.
const CHUNK_BYTES: usize = 4 << 20;

/// The lowest priority: training comes first.
const NICE: i32 = 19;

/// What one rank does for a checkpoint.
pub(super) struct SaveTask {
    pub(super) storage: Arc<dyn Storage>,
    pub(super) out_dir: PathBuf,
    pub(super) step: u64,
    pub(super) generation: u64,
    pub(super) fence: Option<Fence>,
    pub(super) rank: usize,
    /// The number of ranks.
    pub(super) ranks: usize,
    /// Each kind of tensors becomes a file. Nothing changes the buffers while the save lasts.
    pub(super) tensors: Vec<OwnTensors>,
    /// Reads the buffers on a stream of its own, if they are the state itself and training stands still. `None` if they are
    /// a copy on the host, as bytes.
    pub(super) live: Option<(Arc<StateMemory>, Stream)>,
    /// `None` on ranks other than 0.
    pub(super) leader: Option<Leader>,
    pub(super) cancel: Cancel,
}

/// What rank 0 needs to commit.
pub(super) struct Leader {
    pub(super) state: State,
    pub(super) keep: Option<CheckpointKeep>,
    /// Steps whose checkpoints are always kept.
    pub(super) needed: Vec<u64>,
}

/// How far a save is on this rank.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Stage {
    Writing,
    /// This rank's files are on the disk.
    Written,
    /// On rank 0: `latest` names the checkpoint, and those that are not kept are deleted, or could not be for this reason.
    Committed(Option<CheckpointError>),
    /// A later success does not change it: the other ranks may already have acted on it.
    Failed(CheckpointError),
}

/// A save under way. Nothing joins its thread, because a file system may block it for ever. When this value is dropped,
/// the thread gives the save up, and rank 0's deletes what was written.
///
/// Where the system starts no thread, the caller saves. What it has written is deleted when it gives up, or by the next
/// save. If a file system blocks the caller, the ranks that wait for it notice, and so does `--hang-timeout`.
pub(super) struct SaveThread {
    shared: Arc<SharedProgress>,
    /// Without a thread, the save that waits for its commit.
    here: Option<Save>,
    /// Each message lets rank 0's thread commit. The thread gives the save up when this sender is gone.
    commits: Option<Sender<()>>,
    step: u64,
    /// It reads the state itself, not a copy.
    is_live: bool,
}

/// What the thread and the training loop share.
struct SharedProgress {
    progress: Mutex<SaveProgress>,
    changed: Condvar,
    /// The thread reads in this folder between two requests to the file system.
    root: PathBuf,
}

struct SaveProgress {
    stage: Stage,
    /// The request that the file system has not answered, in words.
    request: Option<String>,
    /// Since when the thread waits for the file system; `None` while it waits for other ranks.
    busy_since: Option<Instant>,
    /// The thread touches nothing any more.
    ended: bool,
}

impl SaveThread {
    /// Begins the save of a step, or fails as the task did. Errors become a [`Stage`]. `spawn` starts the thread.
    pub(super) fn start(
        spawn: impl FnOnce(Box<dyn FnOnce() + Send>) -> io::Result<()>,
        out_dir: &Path,
        step: u64,
        task: Result<SaveTask, CheckpointError>,
    ) -> Self {
        let shared = Arc::new(SharedProgress {
            progress: Mutex::new(SaveProgress {
                stage: Stage::Writing,
                request: None,
                busy_since: Some(Instant::now()),
                ended: false,
            }),
            changed: Condvar::new(),
            root: out_dir.join("checkpoints"),
        });
        let (commits, orders) = mpsc::channel();
        let mut here = None;
        let is_live = task.as_ref().is_ok_and(|task| task.live.is_some());
        let started = task.map(|mut task| {
            let shared = shared.clone();
            task.storage = Arc::new(NotedStorage {
                storage: task.storage,
                shared: shared.clone(),
            });
            let save = Save {
                task,
                shared,
                commits: orders,
            };
            let (hand_over, receive) = mpsc::channel::<Save>();
            let run = move || receive.into_iter().for_each(Save::run);
            match spawn(Box::new(run)) {
                // A thread that was started waits for its save.
                Ok(()) => drop(hand_over.send(save)),
                Err(error) => {
                    warn(&format!("training waits for the checkpoint of step {step}: the system cannot start a thread: {error}"));
                    save.write();
                    here = Some(save);
                }
            }
        });
        if let Err(error) = started {
            shared.set(Stage::Failed(error));
            shared.progress().ended = true;
        }
        Self {
            shared,
            here,
            commits: Some(commits),
            step,
            is_live,
        }
    }

    /// True if it reads the state itself, not a copy.
    pub(super) fn is_live(&self) -> bool {
        self.is_live
    }

    /// The step that is saved.
    pub(super) fn step(&self) -> u64 {
        self.step
    }

    /// How far it is. A save has failed if the file system does not answer a request within `timeout`.
    pub(super) fn stage(&self, timeout: Duration) -> Stage {
        let mut progress = self.shared.progress();
        if progress.busy_since.is_some_and(|since| since.elapsed() > timeout) {
            let request = self.shared.request(&progress);
            let error = CheckpointError::stalled(self.step, &request, timeout.as_secs_f64());
            progress.fail(error);
        }
        progress.stage.clone()
    }

    /// Waits while the thread is busy with the same stage as now, for no longer than `bound`.
    pub(super) fn await_change(&self, bound: Duration) {
        let progress = self.shared.progress();
        let known = progress.stage.clone();
        let is_same = |now: &mut SaveProgress| now.busy_since.is_some() && now.stage == known;
        drop(self.shared.changed.wait_timeout_while(progress, bound, is_same));
    }

    /// The request that the file system has not answered.
    pub(super) fn request(&self) -> String {
        self.shared.request(&self.shared.progress())
    }

    /// Lets rank 0's thread commit, when all ranks are [`Stage::Written`].
    pub(super) fn commit(&mut self) {
        let mut progress = self.shared.progress();
        if progress.stage == Stage::Written && progress.busy_since.is_none() {
            progress.busy_since = Some(Instant::now());
            drop(progress);
            // A thread that has ended needs no order.
            let _ = self.commits.as_ref().map(|commits| commits.send(()));
            self.finish_here();
        }
    }

    /// Gives up a save that is not committed yet. The thread cleans up and ends.
    pub(super) fn give_up(&mut self) {
        self.commits = None;
        self.finish_here();
    }

    fn finish_here(&mut self) {
        if let Some(save) = self.here.take() {
            save.finish();
        }
    }

    /// Gives the save up, and waits until the thread has ended, as long as the file system answers each request within
    /// `timeout`. True if the thread touches nothing any more.
    pub(super) fn end(&mut self, timeout: Duration) -> bool {
        self.give_up();
        let asked = Instant::now();
        let mut progress = self.shared.progress();
        while !progress.ended {
            let since = progress.busy_since.unwrap_or(asked);
            let Some(left) = timeout.checked_sub(since.elapsed()) else {
                return false;
            };
            let woken = self.shared.changed.wait_timeout(progress, left);
            progress = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl SaveProgress {
    fn fail(&mut self, error: CheckpointError) {
        if !matches!(self.stage, Stage::Failed(_)) {
            self.stage = Stage::Failed(error);
        }
    }
}

impl SharedProgress {
    fn progress(&self) -> MutexGuard<'_, SaveProgress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn request(&self, progress: &SaveProgress) -> String {
        let request = progress.request.clone();
        request.unwrap_or_else(|| format!("read `{}`", self.root.display()))
    }

    /// The thread has reached this stage, and now waits for other ranks.
    fn set(&self, stage: Stage) {
        let mut progress = self.progress();
        if !matches!(progress.stage, Stage::Failed(_)) {
            progress.stage = stage;
        }
        progress.busy_since = None;
        self.changed.notify_all();
    }
}

/// Storage that notes each request.
struct NotedStorage {
    storage: Arc<dyn Storage>,
    shared: Arc<SharedProgress>,
}

impl NotedStorage {
    fn note(&self, request: Option<String>) {
        let mut progress = self.shared.progress();
        progress.request = request;
        progress.busy_since = Some(Instant::now());
    }
}

impl Storage for NotedStorage {
    fn perform(&self, step: DiskStep<'_>) -> io::Result<()> {
        let (doing, path) = step.words();
        self.note(Some(format!("{doing} `{}`", path.display())));
        let done = self.storage.perform(step);
        self.note(None);
        done
    }
}

/// A save, on its thread.
struct Save {
    task: SaveTask,
    shared: Arc<SharedProgress>,
    commits: Receiver<()>,
}

impl Drop for Save {
    fn drop(&mut self) {
        // Otherwise a panic would look like a save that takes long.
        if std::thread::panicking() {
            let error = CheckpointError::given_up(self.task.step, "its thread panicked");
            self.shared.set(Stage::Failed(error));
        }
        self.shared.progress().ended = true;
        self.shared.changed.notify_all();
    }
}

impl Save {
    fn run(self) {
        if self.task.live.is_none() {
            give_way();
        }
        self.write();
        self.finish();
    }

    fn writer(&self) -> Writer {
        let task = &self.task;
        Writer::on(task.storage.clone(), &task.out_dir, task.step, task.generation).fenced(task.fence.clone())
    }

    fn write(&self) {
        let written = self.write_all(&self.writer());
        self.shared
            .set(written.map_or_else(Stage::Failed, |()| Stage::Written));
    }

    /// Waits for the order to commit, or for the end of the save.
    fn finish(self) {
        let (Some(leader), writer) = (&self.task.leader, self.writer()) else {
            return;
        };
        if self.commits.recv().is_ok() {
            let done = self.commit(leader, &writer);
            self.shared.set(done.map_or_else(Stage::Failed, Stage::Committed));
        } else {
            // The next save deletes what cannot be deleted now.
            let _ = writer.abort();
        }
    }

    /// Fails if the save is not wanted any more.
    fn wanted(&self) -> Result<(), CheckpointError> {
        let is_over = self.commits.try_recv() == Err(TryRecvError::Disconnected);
        let cause = self.task.cancel.cause().or(is_over.then_some("the run is over"));
        cause.map_or(Ok(()), |cause| {
            Err(CheckpointError::given_up(self.task.step, cause))
        })
    }

    fn write_all(&self, writer: &Writer) -> Result<(), CheckpointError> {
        let task = &self.task;
        match task.leader {
            Some(_) => writer.lead()?,
            None => writer.follow()?,
        }
        for OwnTensors {
            kind,
            extents,
            buffers,
        } in &task.tensors
        {
            writer.file(&file_stem(kind, task.rank, task.ranks), extents, |index, part| {
                let mut buffers = buffers[index].iter();
                buffers.try_for_each(|buffer| self.put(buffer, part))
            })?;
            self.wanted()?;
        }
        Ok(())
    }

    /// Puts the elements of a buffer in a file, as long as the save is wanted.
    fn put(&self, buffer: &Buffer, part: &mut PartWriter<'_>) -> Result<(), CheckpointError> {
        let failed = |error: DeviceError| unreadable(self.task.step, &error);
        let each = CHUNK_BYTES / buffer.dtype().bytes();
        for start in (0..buffer.len()).step_by(each) {
            self.wanted()?;
            let chunk = buffer.slice(start..buffer.len().min(start + each));
            match &self.task.live {
                None => part.put(&chunk.host_bytes().map_err(failed)?)?,
                Some((home, stream)) => {
                    let bytes = home.download(*stream, &chunk);
                    evict(&chunk);
                    part.put(&bytes.map_err(failed)?)?;
                }
            }
        }
        Ok(())
    }

    /// Makes the checkpoint, and then deletes the older ones that are not kept. Returns why those could not be deleted, if
    /// they could not.
    fn commit(&self, leader: &Leader, writer: &Writer) -> Result<Option<CheckpointError>, CheckpointError> {
        let task = &self.task;
        if let Err(error) = self.wanted() {
            // The next generation may have begun: nothing of this one may stay.
            let _ = writer.abort();
            return Err(error);
        }
        let of_rank = |rank| {
            let kinds = task.tensors.iter().map(|tensors| &tensors.kind);
            kinds.map(move |kind| file_stem(kind, rank, task.ranks))
        };
        let stems: Vec<String> = (0..task.ranks).flat_map(of_rank).collect();
        writer.commit(&leader.state, &stems)?;
        // After the end of this life, a later one may be reading what is not kept.
        let keep = leader.keep.filter(|_| self.wanted().is_ok());
        Ok(keep.and_then(|keep| retain(task.storage.as_ref(), &task.out_dir, keep, &leader.needed).err()))
    }
}

/// The error of a rank whose state cannot be copied to the host.
pub(super) fn unreadable(step: u64, error: &DeviceError) -> CheckpointError {
    CheckpointError::NotSaved(format!(
        "the state of step {step} cannot be read for its checkpoint: {error}"
    ))
}

/// Starts the thread of a save.
pub(super) fn spawn(work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
    let thread = std::thread::Builder::new().name("ddp-checkpoint".into());
    thread.spawn(work).map(drop)
}

/// Lowers the priority of the calling thread only. A refusal of the system does no harm.
#[expect(unsafe_code, reason = "the priority of a thread")]
fn give_way() {
    // SAFETY: no memory is involved. On Linux, `0` is the calling thread, not its process.
    let _ = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{Disk, latest_step};

    #[test]
    fn a_failure_stays_whatever_becomes_of_the_save() {
        let failed = unreadable(4, &DeviceError::Upstream("none".into()));
        let thread = SaveThread::start(spawn, Path::new("out"), 4, Err(failed.clone()));
        for later in [Stage::Writing, Stage::Written, Stage::Committed(None)] {
            thread.shared.set(later);
            assert_eq!(thread.stage(Duration::MAX), Stage::Failed(failed.clone()));
        }
    }

    /// Of no tensors, by rank 0 alone.
    fn task(out_dir: &Path) -> SaveTask {
        let state = serde_json::json!({
            "step": 4, "consumed_samples": 8, "skipped": 0, "rng": { "seed": 1, "data_order": "v1" },
            "config": {}, "data": "",
        });
        SaveTask {
            storage: Arc::new(Disk),
            out_dir: out_dir.to_owned(),
            step: 4,
            generation: 1,
            fence: None,
            rank: 0,
            ranks: 1,
            tensors: Vec::new(),
            live: None,
            leader: Some(Leader {
                state: serde_json::from_value(state).unwrap(),
                keep: None,
                needed: Vec::new(),
            }),
            cancel: Cancel::default(),
        }
    }

    fn no_thread(_: Box<dyn FnOnce() + Send>) -> io::Result<()> {
        Err(io::ErrorKind::WouldBlock.into())
    }

    #[test]
    fn the_caller_saves_where_the_system_starts_no_thread() {
        let folder = tempfile::tempdir().unwrap();
        let out_dir = folder.path();
        let mut save = SaveThread::start(no_thread, out_dir, 4, Ok(task(out_dir)));
        assert_eq!(save.stage(Duration::MAX), Stage::Written);
        save.commit();
        assert_eq!(save.stage(Duration::MAX), Stage::Committed(None));
        assert_eq!(latest_step(out_dir).unwrap(), Some(4));
        assert!(save.end(Duration::ZERO));
    }

    #[test]
    fn a_save_of_the_caller_that_is_given_up_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut save = SaveThread::start(no_thread, folder.path(), 4, Ok(task(folder.path())));
        assert!(save.end(Duration::ZERO));
        let left = std::fs::read_dir(folder.path().join("checkpoints")).unwrap();
        assert_eq!(left.count(), 0);
    }

    #[test]
    #[expect(unsafe_code, reason = "the priority of a thread")]
    fn only_the_calling_thread_gives_way() {
        // SAFETY: no memory is involved.
        let own = || unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        let before = own();
        let lowered = std::thread::spawn(move || {
            give_way();
            own()
        });
        assert_eq!(lowered.join().unwrap(), NICE);
        assert_eq!(own(), before);
    }
}
