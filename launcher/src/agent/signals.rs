//! The signals that the launcher listens to.

use std::future::poll_fn;
use std::io;
use std::task::Poll;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};

use crate::plan::SignalPlan;

/// A signal that stops the job and comes again this soon is the same request: `timeout` signals the program, and then
/// its process group. People take longer.
const SAME_REQUEST: Duration = Duration::from_millis(100);

/// Listens from its creation on: a signal that comes between two actions is kept.
pub(super) struct Signals {
    /// In order of precedence.
    streams: Vec<(Stream, SignalAction)>,
    /// The last request to stop, and when it came.
    stopped: Option<(i32, Instant)>,
}

/// What to do about a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SignalAction {
    /// Stop, because of this signal.
    Stop(i32),
    /// Pass this signal on to the workers.
    Forward(i32),
    /// A child may have ended.
    Child,
}

impl Signals {
    /// Takes over the signals. SIGHUP stays ignored under `nohup`.
    pub(super) fn listen(plan: &SignalPlan) -> io::Result<Self> {
        let hangup = Signal::SIGHUP as i32;
        let hangup_ignored = is_ignored(Signal::SIGHUP);
        let stops = plan.stop.iter().copied().map(SignalAction::Stop);
        let forwards = plan.forward.iter().copied().map(SignalAction::Forward);
        let mut streams = Vec::new();
        for action in stops.chain(forwards).chain([SignalAction::Child]) {
            let number = match action {
                SignalAction::Stop(number) | SignalAction::Forward(number) => number,
                SignalAction::Child => Signal::SIGCHLD as i32,
            };
            if number != hangup || !hangup_ignored {
                streams.push((signal(SignalKind::from_raw(number))?, action));
            }
        }
        Ok(Self {
            streams,
            stopped: None,
        })
    }

    /// The next signal. Cancel safe: a signal that was not returned is kept.
    pub(super) async fn next(&mut self) -> SignalAction {
        poll_fn(|context| {
            for (stream, action) in &mut self.streams {
                while stream.poll_recv(context).is_ready() {
                    if !is_repeated(&mut self.stopped, *action, Instant::now()) {
                        return Poll::Ready(*action);
                    }
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// True if the last request was delivered twice. A repetition does not restart the time.
fn is_repeated(stopped: &mut Option<(i32, Instant)>, action: SignalAction, now: Instant) -> bool {
    let SignalAction::Stop(signal) = action else {
        return false;
    };
    let is_repeated =
        stopped.is_some_and(|(last, at)| last == signal && now.duration_since(at) < SAME_REQUEST);
    if !is_repeated {
        *stopped = Some((signal, now));
    }
    is_repeated
}

/// True if our parent process had the signal ignored.
pub fn is_ignored(signal: Signal) -> bool {
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
    fn a_stop_that_is_delivered_twice_counts_once() {
        let (mut stopped, start) = (None, Instant::now());
        let mut repeated = |action, ms| is_repeated(&mut stopped, action, start + Duration::from_millis(ms));
        assert!(!repeated(SignalAction::Stop(15), 0));
        assert!(repeated(SignalAction::Stop(15), 0) && repeated(SignalAction::Stop(15), 99));
        assert!(
            !repeated(SignalAction::Stop(15), 100),
            "a later repetition counts"
        );
        assert!(
            !repeated(SignalAction::Stop(2), 101),
            "another signal is another request"
        );
        assert!(!repeated(SignalAction::Child, 102) && !repeated(SignalAction::Child, 102));
        assert!(!repeated(SignalAction::Forward(10), 102) && !repeated(SignalAction::Forward(10), 102));
    }

    #[test]
    fn ignored_signals_are_seen() {
        // The Rust runtime ignores SIGPIPE in every program; SIGKILL cannot be ignored.
        assert!(is_ignored(Signal::SIGPIPE));
        assert!(!is_ignored(Signal::SIGKILL));
    }

    #[tokio::test]
    async fn a_signal_is_forwarded_or_stops_as_planned() {
        let plan = SignalPlan {
            stop: vec![],
            forward: vec![Signal::SIGUSR2 as i32],
            ..SignalPlan::default()
        };
        let mut signals = Signals::listen(&plan).unwrap();
        nix::sys::signal::raise(Signal::SIGUSR2).unwrap();
        loop {
            match signals.next().await {
                SignalAction::Child => {}
                action => {
                    assert_eq!(action, SignalAction::Forward(Signal::SIGUSR2 as i32));
                    break;
                }
            }
        }
    }
}
