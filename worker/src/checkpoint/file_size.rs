//! A limit on the size of files (`ulimit -f`) must be an error of the write, not the death of the process.
#![allow(unsafe_code, reason = "signal dispositions")]

use nix::sys::signal::{SigHandler, Signal, signal};

/// Ignores SIGXFSZ in this process and those that it starts, so that a write beyond the limit fails with a name:
/// training must not be lost to a checkpoint that does not fit. For the main of a program that writes checkpoints, before it does.
pub fn ignore_file_size_signal() {
    // SAFETY: ignoring a signal installs no handler.
    let before = unsafe { signal(Signal::SIGXFSZ, SigHandler::SigIgn) };
    debug_assert!(before.is_ok(), "SIGXFSZ can be ignored");
}
