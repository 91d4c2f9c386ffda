//! Waiting for descriptors, under a deadline and a cancel token.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{Failure, Wait};

/// Longest time between two looks at the cancel token and the deadline.
pub(super) const SLICE: Duration = Duration::from_millis(10);

impl Wait {
    /// The time until the next look at the cancel token.
    pub(super) fn slice(&self) -> Duration {
        SLICE.min(self.deadline.saturating_duration_since(Instant::now()))
    }
}

/// Waits until one of the descriptors has an event. `waiting_for` are the global ranks to name when none comes.
pub(super) fn until_ready(
    fds: &mut [PollFd<'_>],
    wait: &Wait,
    waiting_for: impl Fn() -> Vec<usize>,
) -> Result<(), Failure> {
    while !poll_once(fds, wait.slice())? {
        wait.check(&waiting_for)?;
    }
    Ok(())
}

/// Waits for at most `bound`; true if a descriptor has an event.
pub(super) fn poll_once(fds: &mut [PollFd<'_>], bound: Duration) -> Result<bool, Failure> {
    // Rounded up, lest the last millisecond before a deadline is spent in a loop.
    let bound = PollTimeout::try_from(bound.as_micros().div_ceil(1000)).unwrap_or(PollTimeout::ZERO);
    match poll(fds, bound) {
        Ok(count) => Ok(count > 0),
        Err(Errno::EINTR) => Ok(false),
        Err(error) => Err(system("waiting for peers", error)),
    }
}

/// True if the other end of a connection is closed.
pub(super) fn hung_up(fd: &impl AsFd) -> bool {
    let mut fds = [PollFd::new(fd.as_fd(), PollFlags::empty())];
    let ended = PollFlags::POLLHUP | PollFlags::POLLERR;
    matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1))
        && fds[0].revents().is_some_and(|r| r.intersects(ended))
}

/// A refusal of the system, in its words.
pub(super) fn system(what: impl Into<String>, error: Errno) -> Failure {
    Failure::System {
        what: what.into(),
        cause: error.desc().to_lowercase(),
    }
}
