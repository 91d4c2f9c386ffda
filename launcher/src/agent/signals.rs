//! The signals that the launcher listens to.

use std::future::poll_fn;
use std::io;
use std::task::Poll;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};

use crate::plan::SignalPlan;

/// A SIGTERM that is repeated this soon is the same request: `timeout` signals the program, and then its group. A terminal
/// signals once for each Ctrl-C.
const SAME_REQUEST: Duration = Duration::from_millis(500);

/// Listens from its creation on: a signal that comes between two calls is kept.
pub(super) struct Signals {
    /// In order of precedence.
    streams: Vec<(Stream, Call)>,
    /// The last SIGTERM that counted.
    stopped: Option<Instant>,
}

/// What a signal says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
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
        let stops = plan.stop.iter().map(|number| Call::Stop(*number));
        let forwards = plan.forward.iter().map(|number| Call::Forward(*number));
        let mut streams = Vec::new();
        for call in stops.chain(forwards).chain([Call::Child]) {
            let number = match call {
                Call::Stop(number) | Call::Forward(number) => number,
                Call::Child => Signal::SIGCHLD as i32,
            };
            if number != hangup || !hangup_ignored {
                streams.push((signal(SignalKind::from_raw(number))?, call));
            }
        }
        Ok(Self {
            streams,
            stopped: None,
        })
    }

    /// The next signal. Cancel safe: a signal that was not returned is kept.
    pub(super) async fn next(&mut self) -> Call {
        poll_fn(|context| {
            for (stream, call) in &mut self.streams {
                while stream.poll_recv(context).is_ready() {
                    if !is_repeated(&mut self.stopped, *call, Instant::now()) {
                        return Poll::Ready(*call);
                    }
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// True for a SIGTERM that is the last one, delivered twice.
fn is_repeated(last: &mut Option<Instant>, call: Call, now: Instant) -> bool {
    if call != Call::Stop(Signal::SIGTERM as i32) {
        return false;
    }
    let is_repeated = last.is_some_and(|last| now.duration_since(last) < SAME_REQUEST);
    // A user who insists is heard: a repeated request does not begin the time anew.
    if !is_repeated {
        *last = Some(now);
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
        let (mut last, start) = (None, Instant::now());
        let mut is_repeated = |call, ms| is_repeated(&mut last, call, start + Duration::from_millis(ms));
        assert!(!is_repeated(Call::Stop(15), 0));
        assert!(is_repeated(Call::Stop(15), 1));
        assert!(is_repeated(Call::Stop(15), 400));
        assert!(!is_repeated(Call::Stop(15), 500), "insisting is heard");
        assert!(is_repeated(Call::Stop(15), 501));
        assert!(!is_repeated(Call::Child, 502) && !is_repeated(Call::Child, 503));
        assert!(
            !is_repeated(Call::Stop(2), 502) && !is_repeated(Call::Stop(2), 503),
            "Ctrl-C twice"
        );
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
        };
        let mut signals = Signals::listen(&plan).unwrap();
        nix::sys::signal::raise(Signal::SIGUSR2).unwrap();
        loop {
            match signals.next().await {
                Call::Child => {}
                call => {
                    assert_eq!(call, Call::Forward(Signal::SIGUSR2 as i32));
                    break;
                }
            }
        }
    }
}
