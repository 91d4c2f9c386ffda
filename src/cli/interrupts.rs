//! SIGINT and SIGTERM to a worker that no agent looks after: the first asks it to save and stop, the second ends it.
//!
//! The signals are blocked, and a thread waits for them: no system call of the training is interrupted.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use ddp_proto::exit;
use nix::sys::signal::{SigSet, Signal, raise};

/// Listens until the process ends.
#[derive(Debug)]
pub(super) struct Interrupts {
    /// Number of the first signal; 0 before.
    first: Arc<AtomicI32>,
}

impl Interrupts {
    /// Begins to listen; `stop` gets the name of the first signal. Must be called while this thread is the only one:
    /// others inherit what is blocked. Signals that our parent process had ignored stay ignored, as in a shell's
    /// background.
    pub(super) fn listen(stop: impl FnOnce(&str) + Send + 'static) -> io::Result<Self> {
        let wanted = [Signal::SIGINT, Signal::SIGTERM].into_iter();
        let wanted: SigSet = wanted
            .filter(|signal| !ddp_launcher::is_ignored(*signal))
            .collect();
        wanted.thread_block()?;
        let first = Arc::new(AtomicI32::new(0));
        let told = first.clone();
        let builder = std::thread::Builder::new().name("ddp-signals".to_owned());
        let spawned = builder.spawn(move || {
            // It fails only for a set without signals.
            let Ok(signal) = wanted.wait() else { return };
            told.store(signal as i32, Ordering::Relaxed);
            stop(signal.as_str());
            let words = "finishing and saving the current step; a second signal exits immediately";
            // A console that is gone does not keep it from stopping.
            let _ = writeln!(io::stderr(), "stopped by {signal}: {words}");
            let Ok(signal) = wanted.wait() else { return };
            die_of(signal);
        });
        match spawned {
            Ok(_) => Ok(Self { first }),
            Err(error) => {
                wanted.thread_unblock()?;
                Err(error)
            }
        }
    }

    /// Exit code of a run that stopped because it was asked to.
    pub(super) fn exit_code(&self) -> u8 {
        exit::of_signal(self.first.load(Ordering::Relaxed))
    }
}

/// Ends the process as the signal would by default: the parent sees which signal ended it.
fn die_of(signal: Signal) {
    if SigSet::from(signal).thread_unblock().is_ok() {
        // A refusal cannot be reported here, and the first signal still holds.
        let _ = raise(signal);
    }
}
