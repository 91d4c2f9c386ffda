//! Threads beside the agent's runtime: for work that blocks, and for tasks that must not share that runtime.

use std::io;
use std::sync::mpsc::sync_channel;
use std::thread;

use tokio::runtime::Builder;
use tokio::sync::{mpsc, oneshot};

/// Pieces of work for a [`BlockingThread`] that may wait before the caller has to wait: those of a generation, and of the
/// closing of the launch.
const QUEUE: usize = 4;
/// Stack of a [`BlockingThread`].
const STACK_BYTES: usize = 256 << 10;

type Work = Box<dyn FnOnce() + Send>;

/// Handle to a thread for work that blocks, which ends with the last of them.
///
/// It exists from the start: when workers have to be swept, the machine may have no thread left to give. The launcher has
/// one for processes and one for files, since a file system that does not answer must not hold up a sweep.
#[derive(Clone)]
pub(crate) struct BlockingThread {
    queue: mpsc::Sender<Work>,
}

impl BlockingThread {
    /// Starts the thread.
    pub(crate) fn start(name: &str) -> io::Result<Self> {
        let (queue, mut waiting) = mpsc::channel::<Work>(QUEUE);
        thread::Builder::new()
            .name(name.into())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                while let Some(work) = waiting.blocking_recv() {
                    work();
                }
            })?;
        Ok(Self { queue })
    }

    /// Does `work` after what was given before; none if the thread has ended.
    pub(crate) fn give<T: Send + 'static, W: FnOnce() -> T + Send + 'static>(
        &self,
        work: W,
    ) -> impl Future<Output = Option<T>> + Send + use<T, W> {
        let queue = self.queue.clone();
        let (result, outcome) = oneshot::channel();
        let work: Work = Box::new(move || {
            // The caller may have stopped waiting.
            let _ = result.send(work());
        });
        async move {
            queue.send(work).await.ok()?;
            outcome.await.ok()
        }
    }
}

/// Starts a thread with a runtime of its own. On it, `begin` makes the future that it runs; returns when that is made.
///
/// The runtime is made and dropped on its thread: it could not be dropped on another one's, the agent's.
pub(crate) fn start_runtime<F: Future<Output = ()>>(
    name: &str,
    stack_bytes: usize,
    begin: impl FnOnce() -> io::Result<F> + Send + 'static,
) -> io::Result<()> {
    let (report, begun) = sync_channel(1);
    let run = move || {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let future = {
            let _entered = runtime.enter();
            begin()?
        };
        // The caller waits for it.
        let _ = report.send(());
        runtime.block_on(future);
        Ok(())
    };
    let thread = thread::Builder::new().name(name.into()).stack_size(stack_bytes);
    let thread = thread.spawn(run)?;
    match begun.recv() {
        Ok(()) => Ok(()),
        // It has ended without a report.
        Err(_) => thread
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("its thread panicked"))),
    }
}
