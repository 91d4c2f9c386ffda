//! A thread with a runtime of its own, for work that must not share the agent's.

use std::io;
use std::sync::mpsc::sync_channel;
use std::thread;

use tokio::runtime::Builder;

/// Starts the thread. On it, `begin` makes the future that it runs; returns when that is made.
///
/// The runtime is made and dropped on its thread: it could not be dropped on another one's, the agent's.
pub(crate) fn start<F: Future<Output = ()>>(
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
