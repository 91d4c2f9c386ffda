//! The signals that stop the launcher.

use std::io;

use nix::sys::signal::Signal;
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};

/// Listens from its creation on: a signal that comes while nobody asks is kept.
pub(super) struct Signals {
    interrupt: Stream,
    terminate: Stream,
    hangup: Option<Stream>,
    quit: Stream,
    child: Stream,
}

/// What a signal says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    /// Stop, because of this signal.
    Stop(i32),
    /// A child may have ended.
    Child,
}

impl Signals {
    /// Takes over the signals. SIGHUP stays ignored under `nohup`.
    pub(super) fn listen() -> io::Result<Self> {
        let hangup_ignored = is_ignored(Signal::SIGHUP);
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: if hangup_ignored {
                None
            } else {
                Some(signal(SignalKind::hangup())?)
            },
            quit: signal(SignalKind::quit())?,
            child: signal(SignalKind::child())?,
        })
    }

    /// The next signal. Cancel safe.
    pub(super) async fn next(&mut self) -> Call {
        let hangup = async {
            match &mut self.hangup {
                Some(stream) => stream.recv().await,
                None => std::future::pending().await,
            }
        };
        let stop = |signal: Signal| Call::Stop(signal as i32);
        // Cancel safe: `recv` keeps a signal that it has not returned.
        tokio::select! {
            biased;
            _ = self.interrupt.recv() => stop(Signal::SIGINT),
            _ = self.terminate.recv() => stop(Signal::SIGTERM),
            _ = hangup => stop(Signal::SIGHUP),
            _ = self.quit.recv() => stop(Signal::SIGQUIT),
            _ = self.child.recv() => Call::Child,
        }
    }
}

/// True if whoever started us had the signal ignored.
fn is_ignored(signal: Signal) -> bool {
    // Bit n−1 of the mask is signal n.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0);
    mask & (1 << (signal as i32 - 1)) != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_seen() {
        // The Rust runtime ignores SIGPIPE in every program; SIGKILL cannot be ignored.
        assert!(is_ignored(Signal::SIGPIPE));
        assert!(!is_ignored(Signal::SIGKILL));
    }
}
