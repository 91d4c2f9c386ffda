//! One save on a thread of its own: this rank's files, and on rank 0 the checkpoint made of everybody's.
//!
//! The thread talks with no other rank. The training loop asks it for its [`Stage`], tells the other ranks, and
//! gives rank 0's thread the order that follows from all of them.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::save_storage::{NotedStorage, Notes};
use crate::checkpoint::{CheckpointError, Extent, Keep, PartWriter, State, Storage, Writer, retain};
use crate::device::{Buffer, DeviceError, Stream};
use crate::optim::{StateMemory, evict};
use crate::session::Cancel;

/// Bytes that are read from the device, or written, between two looks at whether the save is still wanted.
const CHUNK_BYTES: usize = 4 << 20;

/// The lowest: a save takes what the training leaves of a processor, and at least a hundredth or so.
const NICE: i32 = 19;

/// What one rank does for a checkpoint.
pub(super) struct SaveTask {
    pub(super) storage: Arc<dyn Storage>,
    pub(super) out_dir: PathBuf,
    pub(super) step: u64,
    pub(super) generation: u64,
    pub(super) files: Vec<SaveFile>,
    /// On rank 0.
    pub(super) leader: Option<Leader>,
    /// Reads what is not on the host, on a stream of its own.
    pub(super) home: Arc<StateMemory>,
    pub(super) stream: Stream,
    pub(super) cancel: Cancel,
}

/// A file of this rank.
pub(super) struct SaveFile {
    pub(super) stem: String,
    pub(super) extents: Vec<Extent>,
    pub(super) source: Source,
}

/// Where the bytes of each extent of a file are, in order. Nothing changes them while the save lasts.
pub(super) enum Source {
    /// A copy on the host, as bytes.
    Snapshot(Vec<Vec<Buffer>>),
    /// The state itself: training stands still.
    Live(Vec<Vec<Buffer>>),
}

/// What rank 0 needs to commit.
pub(super) struct Leader {
    pub(super) state: State,
    /// Files of all ranks.
    pub(super) stems: Vec<String>,
    pub(super) keep: Option<Keep>,
    /// Steps that are kept in any case.
    pub(super) needed: Vec<u64>,
}

/// How far a save is on this rank.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Stage {
    Writing,
    /// This rank's files are on the disk.
    Written,
    /// On rank 0: `latest` names it, and what is not kept is deleted; or could not be, and why.
    Committed(Option<CheckpointError>),
    Failed(CheckpointError),
}

/// What rank 0's thread does when all ranks are [`Stage::Written`], or have failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Commit,
    GiveUp,
}

/// A save under way. Nobody joins its thread, which a file system may hold for ever. When it is dropped, the thread ends
/// by itself soon, and rank 0's deletes what was written.
pub(super) struct SaveThread {
    shared: Arc<SharedProgress>,
    orders: Sender<Order>,
    step: u64,
}

struct SharedProgress {
    progress: Mutex<SaveProgress>,
    changed: Condvar,
    notes: Arc<Notes>,
}

struct SaveProgress {
    stage: Stage,
    /// Nobody waits for it any more.
    dropped: bool,
    /// The thread touches nothing any more.
    ended: bool,
}

/// The operation that a save waits for.
pub(super) struct Wait {
    /// In words: `write`.
    pub(super) doing: &'static str,
    pub(super) path: PathBuf,
}

impl SaveThread {
    /// Begins. What goes wrong is said by [`SaveThread::stage`].
    pub(super) fn start(task: SaveTask) -> Self {
        let shared = Arc::new(SharedProgress::new(Stage::Writing));
        let (orders, inbox) = channel();
        let (step, own) = (task.step, shared.clone());
        let storage = Arc::new(NotedStorage {
            storage: task.storage,
            notes: shared.notes.clone(),
        });
        let task = SaveTask { storage, ..task };
        let thread = std::thread::Builder::new()
            .name("ddp-checkpoint".into())
            .spawn(move || run(&task, &own, &inbox));
        if let Err(error) = thread {
            let cause = format!("the system cannot start a thread: {error}");
            shared.set(Stage::Failed(CheckpointError::GivenUp { step, cause }));
            shared.progress().ended = true;
        }
        Self { shared, orders, step }
    }

    /// A save that could not begin on this rank.
    pub(super) fn failed(step: u64, error: CheckpointError) -> Self {
        let shared = SharedProgress::new(Stage::Failed(error));
        shared.progress().ended = true;
        Self {
            shared: Arc::new(shared),
            orders: channel().0,
            step,
        }
    }

    /// The step that is saved.
    pub(super) fn step(&self) -> u64 {
        self.step
    }

    pub(super) fn stage(&self) -> Stage {
        self.shared.progress().stage.clone()
    }

    /// Waits until the stage is another than `known`, at most until `deadline`.
    pub(super) fn await_change(&self, known: &Stage, deadline: Instant) {
        let mut progress = self.shared.progress();
        while progress.stage == *known {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                return;
            };
            let woken = self.shared.changed.wait_timeout(progress, left);
            progress = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Time since the disk last took something.
    pub(super) fn silence(&self) -> Duration {
        self.shared.notes.silence()
    }

    /// What the thread waits for now.
    pub(super) fn wait(&self, out_dir: &Path) -> Wait {
        let doing = self.shared.notes.doing();
        // Between two operations it reads, in this folder.
        let (doing, path) = doing.unwrap_or_else(|| ("read", out_dir.join("checkpoints")));
        Wait { doing, path }
    }

    pub(super) fn order(&self, order: Order) {
        // Until now the thread may have waited for other ranks, and not for its disk.
        self.shared.notes.moved();
        // A thread that is gone has failed, and said so.
        let _ = self.orders.send(order);
    }

    /// Gives the save up, and waits until the thread touches nothing any more, at most until `deadline`. What it is
    /// about to commit may still become a checkpoint.
    pub(super) fn abandon(self, deadline: Instant) {
        let shared = self.shared.clone();
        // With it the orders end, for which rank 0's thread may wait.
        drop(self);
        shared.await_end(|| deadline.checked_duration_since(Instant::now()));
    }

    /// Waits for a thread that has nothing left to do but to clean up, as long as its disk takes something every
    /// `patience`. True if it touches nothing any more.
    pub(super) fn end(&self, patience: Duration) -> bool {
        self.shared.progress().dropped = true;
        self.shared.await_end(|| patience.checked_sub(self.silence()))
    }
}

impl Drop for SaveThread {
    fn drop(&mut self) {
        self.shared.progress().dropped = true;
    }
}

impl SharedProgress {
    fn new(stage: Stage) -> Self {
        Self {
            progress: Mutex::new(SaveProgress {
                stage,
                dropped: false,
                ended: false,
            }),
            changed: Condvar::new(),
            notes: Arc::new(Notes::new()),
        }
    }

    fn progress(&self) -> MutexGuard<'_, SaveProgress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, stage: Stage) {
        self.progress().stage = stage;
        // The time of what comes next begins.
        self.notes.moved();
        self.changed.notify_all();
    }

    /// Waits until the thread has ended, as long as `left` gives a time. True if it has.
    fn await_end(&self, left: impl Fn() -> Option<Duration>) -> bool {
        let mut progress = self.progress();
        while !progress.ended {
            let Some(left) = left() else { return false };
            let woken = self.changed.wait_timeout(progress, left);
            progress = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Fails if the save is not wanted any more.
    fn wanted(&self, task: &SaveTask) -> Result<(), CheckpointError> {
        let progress = self.progress();
        let cause = match task.cancel.cause() {
            Some(cause) => cause.to_owned(),
            None if progress.dropped => "the run is over".to_owned(),
            None => return Ok(()),
        };
        let step = task.step;
        Err(CheckpointError::GivenUp { step, cause })
    }
}

fn run(task: &SaveTask, shared: &Arc<SharedProgress>, orders: &Receiver<Order>) {
    let _guard = End(shared, task.step);
    if task
        .files
        .iter()
        .any(|file| matches!(file.source, Source::Snapshot(_)))
    {
        give_way();
    }
    let writer = Writer::on(task.storage.clone(), &task.out_dir, task.step, task.generation);
    let written = write_all(task, &writer, shared);
    shared.set(written.map_or_else(Stage::Failed, |()| Stage::Written));
    if let Some(leader) = &task.leader {
        match orders.recv() {
            Ok(Order::Commit) => shared.set(match commit(task, leader, &writer, shared) {
                Ok(kept) => Stage::Committed(kept.err()),
                Err(error) => Stage::Failed(error),
            }),
            Ok(Order::GiveUp) | Err(_) => {
                // What cannot be deleted now is when the next save begins.
                let _ = writer.abort();
            }
        }
    }
}

/// The end of the thread. A panic must not look like a save that takes long.
struct End<'a>(&'a Arc<SharedProgress>, u64);

impl Drop for End<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.set(Stage::Failed(CheckpointError::GivenUp {
                step: self.1,
                cause: "its thread panicked".into(),
            }));
        }
        self.0.progress().ended = true;
        self.0.changed.notify_all();
    }
}

fn write_all(task: &SaveTask, writer: &Writer, shared: &SharedProgress) -> Result<(), CheckpointError> {
    match task.leader {
        Some(_) => writer.lead()?,
        None => writer.follow()?,
    }
    for file in &task.files {
        let mut part = writer.part(&file.stem, &file.extents)?;
        shared.wanted(task)?;
        for index in part.order() {
            match &file.source {
                Source::Snapshot(buffers) => buffers[index]
                    .iter()
                    .try_for_each(|buffer| put_host(task, shared, buffer, &mut part))?,
                Source::Live(buffers) => buffers[index]
                    .iter()
                    .try_for_each(|buffer| put_live(task, shared, buffer, &mut part))?,
            }
        }
        writer.close(&file.stem, part)?;
        shared.wanted(task)?;
    }
    Ok(())
}

fn put_host(
    task: &SaveTask,
    shared: &SharedProgress,
    buffer: &Buffer,
    part: &mut PartWriter,
) -> Result<(), CheckpointError> {
    let bytes = buffer.host_bytes().map_err(|e| unreadable(task, &e))?;
    for chunk in bytes.chunks(CHUNK_BYTES) {
        part.put(chunk)?;
        shared.wanted(task)?;
    }
    Ok(())
}

fn put_live(
    task: &SaveTask,
    shared: &SharedProgress,
    buffer: &Buffer,
    part: &mut PartWriter,
) -> Result<(), CheckpointError> {
    let each = CHUNK_BYTES / buffer.dtype().bytes();
    for start in (0..buffer.len()).step_by(each) {
        let slice = buffer.slice(start..buffer.len().min(start + each));
        let bytes = task.home.download(task.stream, &slice);
        evict(&slice);
        part.put(&bytes.map_err(|e| unreadable(task, &e))?)?;
        shared.wanted(task)?;
    }
    Ok(())
}

fn unreadable(task: &SaveTask, error: &DeviceError) -> CheckpointError {
    CheckpointError::Source {
        step: task.step,
        cause: error.to_string(),
    }
}

/// The checkpoint, and then what is not kept of the others.
fn commit(
    task: &SaveTask,
    leader: &Leader,
    writer: &Writer,
    shared: &SharedProgress,
) -> Result<Result<(), CheckpointError>, CheckpointError> {
    if let Err(error) = shared.wanted(task) {
        // The next generation may have begun: nothing of this one is to be seen.
        let _ = writer.abort();
        return Err(error);
    }
    writer.commit(&leader.state, &leader.stems)?;
    if shared.wanted(task).is_err() {
        // A later life may be reading what is not kept.
        return Ok(Ok(()));
    }
    Ok(match leader.keep {
        Some(keep) => retain(task.storage.as_ref(), &task.out_dir, keep, &leader.needed).map(drop),
        None => Ok(()),
    })
}

/// Lowers the priority of the calling thread, and of no other. Where the system refuses, the save is no worse for it.
#[expect(unsafe_code, reason = "the priority of a thread")]
fn give_way() {
    // SAFETY: no memory is involved. On Linux, `0` is the calling thread, not its process.
    let _ = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
}

#[cfg(test)]
mod tests {
    use super::*;

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
