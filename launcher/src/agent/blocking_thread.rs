//! Threads for work that blocks.
//!
//! They exist from the start: when workers have to be swept, the machine may have no thread left to give. The launcher
//! has one for processes and one for files, since a file system that does not answer must not hold up a sweep.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tokio::sync::{mpsc, oneshot};

/// Pieces of work that may wait before the caller has to wait: those of a generation, and of the closing of the launch.
const QUEUE: usize = 4;
const STACK_BYTES: usize = 256 << 10;

type Work = Box<dyn FnOnce() + Send>;

/// Handle to a thread, which ends with the last of them.
#[derive(Clone)]
pub(super) struct BlockingThread {
    queue: mpsc::Sender<Work>,
}

impl BlockingThread {
    /// Starts the thread.
    pub(super) fn start(name: &str) -> io::Result<Self> {
        let (queue, mut waiting) = mpsc::channel::<Work>(QUEUE);
        std::thread::Builder::new()
            .name(name.into())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                while let Some(work) = waiting.blocking_recv() {
                    // The caller sees the missing result; the thread goes on with the next piece.
                    let _ = catch_unwind(AssertUnwindSafe(work));
                }
            })?;
        Ok(Self { queue })
    }

    /// Does `work` after what was given before; none if it panicked.
    pub(super) fn give<T: Send + 'static, W: FnOnce() -> T + Send + 'static>(
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_does_not_end_the_thread() {
        let thread = BlockingThread::start("test").unwrap();
        let failed = thread.give(|| panic!("expected by the test"));
        assert_eq!(failed.await, None::<()>);
        assert_eq!(thread.give(|| 7).await, Some(7));
    }
}
