//! One save on a thread of its own: this rank's files, and on rank 0 the checkpoint made of everybody's.
//!
//! The thread talks with no other rank. The training loop asks it for its [`Stage`], tells the other ranks, and
//! gives it the order that follows from all of them. Its storage notes what the disk is asked to do, so that a save that
//! hangs can say where.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::owned_state::OwnTensors;
use crate::checkpoint::{
    CheckpointError, DiskStep, Keep, PartWriter, State, Storage, Writer, file_stem, retain,
};
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
    /// This rank, and how many there are.
    pub(super) rank: (usize, usize),
    /// A file of each. Nothing changes the buffers while the save lasts.
    pub(super) tensors: Vec<OwnTensors>,
    /// Reads the buffers, on a stream of its own, where they are the state itself and training stands still; none where
    /// they are a copy on the host, as bytes.
    pub(super) live: Option<(Arc<StateMemory>, Stream)>,
    /// On rank 0.
    pub(super) leader: Option<Leader>,
    pub(super) cancel: Cancel,
}

/// What rank 0 needs to commit.
pub(super) struct Leader {
    pub(super) state: State,
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
    /// Whatever becomes of the save: the other ranks may act on it later, when a disk that was given up has moved again.
    Failed(CheckpointError),
}

/// What the thread does next. The later one overrules the earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Order {
    /// On rank 0, when all ranks are [`Stage::Written`].
    Commit,
    /// Nobody wants the checkpoint any more.
    GiveUp,
}

/// A save under way. Nobody joins its thread, which a file system may hold for ever. When it is dropped, the thread ends
/// by itself soon, and rank 0's deletes what was written.
pub(super) struct SaveThread {
    shared: Arc<SharedProgress>,
    step: u64,
}

/// What the thread and the training loop share.
struct SharedProgress {
    progress: Mutex<SaveProgress>,
    changed: Condvar,
    /// The thread reads in this folder between two operations of the disk.
    root: PathBuf,
}

struct SaveProgress {
    stage: Stage,
    order: Option<Order>,
    /// The thread touches nothing any more.
    ended: bool,
    /// The operation that has not returned, in words, and its path.
    doing: Option<(&'static str, PathBuf)>,
    /// When the disk last took something, or was asked to.
    moved: Instant,
}

impl SaveProgress {
    /// The thread has something to do.
    fn is_busy(&self) -> bool {
        match self.stage {
            Stage::Writing => true,
            Stage::Written => self.order == Some(Order::Commit),
            Stage::Committed(_) | Stage::Failed(_) => false,
        }
    }

    /// The time of what comes next begins, unless the disk is asked for something.
    fn begin(&mut self) {
        if self.doing.is_none() {
            self.moved = Instant::now();
        }
    }
}

impl SaveThread {
    /// Begins the save of a step, or fails as the task did. What goes wrong is a [`Stage`].
    pub(super) fn start(out_dir: &Path, step: u64, task: Result<SaveTask, CheckpointError>) -> Self {
        let shared = Arc::new(SharedProgress::new(out_dir.join("checkpoints")));
        let started = task.and_then(|task| {
            let own = shared.clone();
            let storage = NotedStorage {
                storage: task.storage,
                shared: shared.clone(),
            };
            let task = SaveTask {
                storage: Arc::new(storage),
                ..task
            };
            let thread = std::thread::Builder::new().name("ddp-checkpoint".into());
            thread.spawn(move || run(&task, &own)).map_err(|error| {
                CheckpointError::given_up(step, format!("the system cannot start a thread: {error}"))
            })
        });
        if let Err(error) = started {
            shared.set(Stage::Failed(error));
            shared.progress().ended = true;
        }
        Self { shared, step }
    }

    /// The step that is saved.
    pub(super) fn step(&self) -> u64 {
        self.step
    }

    /// How far it is. A save whose disk takes nothing for as long as `patience` has failed.
    pub(super) fn stage(&self, patience: Duration) -> Stage {
        let mut progress = self.shared.progress();
        if progress.is_busy() && progress.moved.elapsed() > patience {
            let asked = self.shared.asked(&progress);
            let error = CheckpointError::stalled(self.step, &asked, patience.as_secs_f64());
            progress.stage = Stage::Failed(error);
        }
        progress.stage.clone()
    }

    /// Waits while the thread is busy with the same as now, for no longer than `bound`.
    pub(super) fn await_change(&self, bound: Duration) {
        let progress = self.shared.progress();
        let known = progress.stage.clone();
        let is_same = |progress: &mut SaveProgress| progress.is_busy() && progress.stage == known;
        drop(self.shared.changed.wait_timeout_while(progress, bound, is_same));
    }

    /// What the thread waits for now.
    pub(super) fn asked(&self) -> (&'static str, PathBuf) {
        self.shared.asked(&self.shared.progress())
    }

    /// Gives an order, unless one that overrules it was given.
    pub(super) fn order(&self, order: Order) {
        let mut progress = self.shared.progress();
        if progress.order < Some(order) {
            progress.order = Some(order);
            // Until now the thread may have waited for other ranks, and not for its disk.
            progress.begin();
            self.shared.changed.notify_all();
        }
    }

    /// Gives the save up, and waits until the thread touches nothing any more, for no longer than `bound`. What it is
    /// about to commit may still become a checkpoint.
    pub(super) fn abandon(self, bound: Duration) {
        self.order(Order::GiveUp);
        let progress = self.shared.progress();
        let changed = &self.shared.changed;
        drop(changed.wait_timeout_while(progress, bound, |progress| !progress.ended));
    }

    /// Waits for a thread that has nothing left to do but to clean up, as long as its disk takes something every
    /// `patience`. True if it touches nothing any more.
    pub(super) fn end(&self, patience: Duration) -> bool {
        self.order(Order::GiveUp);
        let mut progress = self.shared.progress();
        while !progress.ended {
            let Some(left) = patience.checked_sub(progress.moved.elapsed()) else {
                return false;
            };
            let woken = self.shared.changed.wait_timeout(progress, left);
            progress = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl Drop for SaveThread {
    fn drop(&mut self) {
        self.order(Order::GiveUp);
    }
}

impl SharedProgress {
    fn new(root: PathBuf) -> Self {
        Self {
            progress: Mutex::new(SaveProgress {
                stage: Stage::Writing,
                order: None,
                ended: false,
                doing: None,
                moved: Instant::now(),
            }),
            changed: Condvar::new(),
            root,
        }
    }

    fn progress(&self) -> MutexGuard<'_, SaveProgress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn asked(&self, progress: &SaveProgress) -> (&'static str, PathBuf) {
        let doing = progress.doing.clone();
        doing.unwrap_or_else(|| ("read", self.root.clone()))
    }

    fn set(&self, stage: Stage) {
        let mut progress = self.progress();
        if !matches!(progress.stage, Stage::Failed(_)) {
            progress.stage = stage;
        }
        progress.begin();
        self.changed.notify_all();
    }

    /// The order, when there is one.
    fn await_order(&self) -> Option<Order> {
        let waited = self
            .changed
            .wait_while(self.progress(), |progress| progress.order.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).order
    }

    /// Fails if the save is not wanted any more.
    fn wanted(&self, task: &SaveTask) -> Result<(), CheckpointError> {
        let is_over = self.progress().order == Some(Order::GiveUp);
        let cause = task.cancel.cause().or(is_over.then_some("the run is over"));
        cause.map_or(Ok(()), |cause| Err(CheckpointError::given_up(task.step, cause)))
    }
}

/// Storage that notes what it is asked to do.
struct NotedStorage {
    storage: Arc<dyn Storage>,
    shared: Arc<SharedProgress>,
}

impl NotedStorage {
    fn note(&self, doing: Option<(&'static str, PathBuf)>) {
        let mut progress = self.shared.progress();
        progress.doing = doing;
        progress.moved = Instant::now();
    }
}

impl Storage for NotedStorage {
    fn perform(&self, step: DiskStep<'_>) -> io::Result<()> {
        let (doing, path) = step.words();
        self.note(Some((doing, path.to_owned())));
        let done = self.storage.perform(step);
        self.note(None);
        done
    }
}

fn run(task: &SaveTask, shared: &Arc<SharedProgress>) {
    let _guard = End(shared, task.step);
    if task.live.is_none() {
        give_way();
    }
    let writer = Writer::on(task.storage.clone(), &task.out_dir, task.step, task.generation);
    let written = write_all(task, &writer, shared);
    shared.set(written.map_or_else(Stage::Failed, |()| Stage::Written));
    if let Some(leader) = &task.leader {
        if shared.await_order() == Some(Order::Commit) {
            let done = commit(task, leader, &writer, shared);
            shared.set(done.map_or_else(Stage::Failed, Stage::Committed));
        } else {
            // What cannot be deleted now is when the next save begins.
            let _ = writer.abort();
        }
    }
}

/// The end of the thread. A panic must not look like a save that takes long.
struct End<'a>(&'a Arc<SharedProgress>, u64);

impl Drop for End<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let error = CheckpointError::given_up(self.1, "its thread panicked");
            self.0.set(Stage::Failed(error));
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
    let (rank, ranks) = task.rank;
    for OwnTensors {
        kind,
        extents,
        buffers,
    } in &task.tensors
    {
        writer.file(&file_stem(kind, rank, ranks), extents, |index, part| {
            let mut buffers = buffers[index].iter();
            buffers.try_for_each(|buffer| put(task, shared, buffer, part))
        })?;
        shared.wanted(task)?;
    }
    Ok(())
}

/// Puts the elements of a buffer in a file, as long as the save is wanted.
fn put(
    task: &SaveTask,
    shared: &SharedProgress,
    buffer: &Buffer,
    part: &mut PartWriter<'_>,
) -> Result<(), CheckpointError> {
    let failed = |error: DeviceError| unreadable(task.step, &error);
    let each = CHUNK_BYTES / buffer.dtype().bytes();
    for start in (0..buffer.len()).step_by(each) {
        shared.wanted(task)?;
        let chunk = buffer.slice(start..buffer.len().min(start + each));
        match &task.live {
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

/// The state of a rank cannot be copied to the host.
pub(super) fn unreadable(step: u64, error: &DeviceError) -> CheckpointError {
    CheckpointError::NotSaved(format!(
        "the state of step {step} cannot be read for its checkpoint: {error}"
    ))
}

/// The checkpoint, and then what is not kept of the others. Returns why that could not be deleted, if it could not.
fn commit(
    task: &SaveTask,
    leader: &Leader,
    writer: &Writer,
    shared: &SharedProgress,
) -> Result<Option<CheckpointError>, CheckpointError> {
    if let Err(error) = shared.wanted(task) {
        // The next generation may have begun: nothing of this one is to be seen.
        let _ = writer.abort();
        return Err(error);
    }
    let of_rank = |rank| {
        let kinds = task.tensors.iter().map(|tensors| &tensors.kind);
        kinds.map(move |kind| file_stem(kind, rank, task.rank.1))
    };
    let stems: Vec<String> = (0..task.rank.1).flat_map(of_rank).collect();
    writer.commit(&leader.state, &stems)?;
    // Unwanted, a later life may be reading what is not kept.
    let keep = leader.keep.filter(|_| shared.wanted(task).is_ok());
    Ok(keep.and_then(|keep| retain(task.storage.as_ref(), &task.out_dir, keep, &leader.needed).err()))
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
    fn a_failure_that_was_told_is_told_again_whatever_becomes_of_the_save() {
        let shared = SharedProgress::new(PathBuf::new());
        let stage = || shared.progress().stage.clone();
        assert_eq!(stage(), Stage::Writing);
        let failed = Stage::Failed(unreadable(4, &DeviceError::Upstream("none".into())));
        shared.set(failed.clone());
        assert_eq!(stage(), failed);
        for later in [Stage::Writing, Stage::Written, Stage::Committed(None)] {
            shared.set(later);
            assert_eq!(stage(), failed);
        }
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
