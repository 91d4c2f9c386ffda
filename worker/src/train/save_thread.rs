//! One save on a thread of its own: this rank's files, and on rank 0 the checkpoint made of everybody's.
//!
//! The thread talks with no other rank. The training loop asks it for its [`Stage`], tells the other ranks, and
//! gives rank 0's thread the order that follows from all of them.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::checkpoint::{CheckpointError, Extent, Keep, PartWriter, State, Storage, Writer, retain};
use crate::device::{Buffer, Device, DeviceError, Stream};
use crate::optim::evict;
use crate::session::Cancel;

/// Bytes that are read from the device, or written, between two looks at whether the save is still wanted.
const CHUNK_BYTES: usize = 4 << 20;

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
    pub(super) device: Arc<dyn Device>,
    pub(super) stream: Stream,
    pub(super) cancel: Cancel,
}

/// A file of this rank. It has a buffer for each extent.
pub(super) struct SaveFile {
    pub(super) stem: String,
    pub(super) extents: Vec<Extent>,
    pub(super) source: Source,
}

/// Where the bytes of a file are. Nothing changes them while the save lasts.
pub(super) enum Source {
    /// A copy on the host, as bytes.
    Snapshot(Vec<Buffer>),
    /// The state itself: training stands still.
    Live(Vec<Buffer>),
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

/// A save under way. When it is dropped, the thread ends by itself soon, and rank 0's deletes what was written.
pub(super) struct SaveThread {
    shared: Arc<Shared>,
    orders: Sender<Order>,
    thread: Option<std::thread::JoinHandle<()>>,
}

struct Shared {
    progress: Mutex<Progress>,
    changed: Condvar,
}

struct Progress {
    stage: Stage,
    /// Nobody waits for it any more.
    dropped: bool,
    /// The thread touches nothing any more.
    ended: bool,
    /// When the disk last took something.
    moved: Instant,
}

impl SaveThread {
    /// Begins. What goes wrong is said by [`SaveThread::stage`].
    pub(super) fn start(task: SaveTask) -> Self {
        let shared = Arc::new(Shared::new(Stage::Writing));
        let (orders, inbox) = channel();
        let (step, own) = (task.step, shared.clone());
        let thread = std::thread::Builder::new()
            .name("ddp-checkpoint".into())
            .spawn(move || run(&task, &own, &inbox));
        let thread = match thread {
            Ok(thread) => Some(thread),
            Err(error) => {
                let cause = format!("the system cannot start a thread: {error}");
                shared.set(Stage::Failed(CheckpointError::GivenUp { step, cause }));
                shared.progress().ended = true;
                None
            }
        };
        Self {
            shared,
            orders,
            thread,
        }
    }

    /// A save that could not begin on this rank.
    pub(super) fn failed(error: CheckpointError) -> Self {
        let shared = Shared::new(Stage::Failed(error));
        shared.progress().ended = true;
        Self {
            shared: Arc::new(shared),
            orders: channel().0,
            thread: None,
        }
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
        self.shared.progress().moved.elapsed()
    }

    pub(super) fn order(&self, order: Order) {
        // A thread that is gone has failed, and said so.
        let _ = self.orders.send(order);
    }

    /// Gives the save up, and waits until the thread touches nothing any more, at most until `deadline`. What it is
    /// about to commit may still become a checkpoint.
    pub(super) fn abandon(self, deadline: Instant) {
        let shared = self.shared.clone();
        // With it the orders end, for which rank 0's thread may wait.
        drop(self);
        let mut progress = shared.progress();
        while !progress.ended {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                return;
            };
            let woken = shared.changed.wait_timeout(progress, left);
            progress = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits for the end of a thread that has nothing left to do but to clean up.
    pub(super) fn join(mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for SaveThread {
    fn drop(&mut self) {
        self.shared.progress().dropped = true;
    }
}

impl Shared {
    fn new(stage: Stage) -> Self {
        Self {
            progress: Mutex::new(Progress {
                stage,
                dropped: false,
                ended: false,
                moved: Instant::now(),
            }),
            changed: Condvar::new(),
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, stage: Stage) {
        let mut progress = self.progress();
        progress.stage = stage;
        progress.moved = Instant::now();
        drop(progress);
        self.changed.notify_all();
    }

    /// Notes that the disk took something. Fails if the save is not wanted any more.
    fn moved(&self, task: &SaveTask) -> Result<(), CheckpointError> {
        let mut progress = self.progress();
        progress.moved = Instant::now();
        let cause = match task.cancel.cause() {
            Some(cause) => cause.to_owned(),
            None if progress.dropped => "the run is over".to_owned(),
            None => return Ok(()),
        };
        let step = task.step;
        Err(CheckpointError::GivenUp { step, cause })
    }
}

fn run(task: &SaveTask, shared: &Arc<Shared>, orders: &Receiver<Order>) {
    let _guard = End(shared, task.step);
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
struct End<'a>(&'a Arc<Shared>, u64);

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

fn write_all(task: &SaveTask, writer: &Writer, shared: &Shared) -> Result<(), CheckpointError> {
    match task.leader {
        Some(_) => writer.lead()?,
        None => writer.follow()?,
    }
    for file in &task.files {
        let mut part = writer.part(&file.stem, &file.extents)?;
        shared.moved(task)?;
        for index in part.order() {
            match &file.source {
                Source::Snapshot(buffers) => put_host(task, shared, &buffers[index], &mut part)?,
                Source::Live(buffers) => put_live(task, shared, &buffers[index], &mut part)?,
            }
        }
        writer.close(&file.stem, part)?;
        shared.moved(task)?;
    }
    Ok(())
}

fn put_host(
    task: &SaveTask,
    shared: &Shared,
    buffer: &Buffer,
    part: &mut PartWriter,
) -> Result<(), CheckpointError> {
    let bytes = buffer.host_bytes().map_err(|e| unreadable(task, &e))?;
    for chunk in bytes.chunks(CHUNK_BYTES) {
        part.put(chunk)?;
        shared.moved(task)?;
    }
    Ok(())
}

fn put_live(
    task: &SaveTask,
    shared: &Shared,
    buffer: &Buffer,
    part: &mut PartWriter,
) -> Result<(), CheckpointError> {
    let each = CHUNK_BYTES / buffer.dtype().bytes();
    for start in (0..buffer.len()).step_by(each) {
        let slice = buffer.slice(start..buffer.len().min(start + each));
        let bytes = task.device.download(task.stream, &slice);
        evict(&slice);
        part.put(&bytes.map_err(|e| unreadable(task, &e))?)?;
        shared.moved(task)?;
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
    shared: &Shared,
) -> Result<Result<(), CheckpointError>, CheckpointError> {
    if let Err(error) = shared.moved(task) {
        // The next generation may have begun: nothing of this one is to be seen.
        let _ = writer.abort();
        return Err(error);
    }
    writer.commit(&leader.state, &leader.stems)?;
    if shared.moved(task).is_err() {
        // A later life may be reading what is not kept.
        return Ok(Ok(()));
    }
    Ok(match leader.keep {
        Some(keep) => retain(task.storage.as_ref(), &task.out_dir, keep, &leader.needed).map(drop),
        None => Ok(()),
    })
}
