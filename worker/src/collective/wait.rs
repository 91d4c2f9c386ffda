//! Waiting for other ranks: under a deadline and a cancel token, and visible to the agent.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::error::Failure;
use super::operation::Request;
use crate::session::{Cancel, Waiting, Wanted};

/// After so long a wait reports the ranks that it waits for.
const REPORT_AFTER: Duration = Duration::from_millis(250);

/// Longest time between two checks of the cancel token and the deadline.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// How long a rank waits for the others, and what ends the wait earlier.
#[derive(Clone)]
pub struct Wait {
    /// When the wait began.
    pub started: Instant,
    /// When it ends.
    pub deadline: Instant,
    /// Ends it at once.
    pub cancel: Cancel,
    pending: Option<Arc<Pending>>,
}

impl Wait {
    /// A wait that begins now.
    #[must_use]
    pub fn new(timeout: Duration, cancel: &Cancel) -> Self {
        let started = Instant::now();
        Self {
            started,
            deadline: started + timeout,
            cancel: cancel.clone(),
            pending: None,
        }
    }

    /// Reports the ranks that it waits for to `pending`.
    pub(super) fn reporting_to(mut self, pending: &Arc<Pending>) -> Self {
        self.pending = Some(pending.clone());
        self
    }

    /// A wait within this one, of at most `bound` from now.
    pub(super) fn within(&self, bound: Duration) -> Self {
        let started = Instant::now();
        Self {
            deadline: self.deadline.min(started + bound),
            ..self.clone()
        }
    }

    /// An error if the wait is over; `waiting_for` are the global ranks that have not come. They are also reported.
    pub fn check(&self, waiting_for: impl Fn() -> Vec<usize>) -> Result<(), Failure> {
        self.check_end(&waiting_for)?;
        self.report(waiting_for);
        Ok(())
    }

    /// The same without the report: for ranks that take time to find out.
    pub(super) fn check_end(&self, waiting_for: impl FnOnce() -> Vec<usize>) -> Result<(), Failure> {
        if let Some(cause) = self.cancel.cause() {
            return Err(Failure::GenerationOver(cause.to_owned()));
        }
        let now = Instant::now();
        if now < self.deadline {
            return Ok(());
        }
        Err(Failure::TimedOut {
            waiting_for: waiting_for(),
            waited_ms: now.duration_since(self.started).as_millis() as u64,
        })
    }

    /// Reports the ranks that are waited for, once the wait has lasted.
    pub(super) fn report(&self, waiting_for: impl FnOnce() -> Vec<usize>) {
        if let Some(pending) = &self.pending
            && self.started.elapsed() >= REPORT_AFTER
        {
            pending.set_absent(waiting_for());
        }
    }

    /// The time until the next check.
    pub(super) fn interval(&self) -> Duration {
        POLL_INTERVAL.min(self.deadline.saturating_duration_since(Instant::now()))
    }

    /// Waits until one of the descriptors has an event. `waiting_for` are the global ranks to name if none has.
    pub(super) fn until_ready(
        &self,
        fds: &mut [PollFd<'_>],
        waiting_for: impl Fn() -> Vec<usize>,
    ) -> Result<(), Failure> {
        while !poll_once(fds, self.interval())? {
            self.check(&waiting_for)?;
        }
        Ok(())
    }
}

/// Waits for at most `bound`; true if a descriptor has an event.
pub(super) fn poll_once(fds: &mut [PollFd<'_>], bound: Duration) -> Result<bool, Failure> {
    // Rounded up, so that the last millisecond before a deadline is no busy loop.
    let bound = PollTimeout::try_from(bound.as_micros().div_ceil(1000)).unwrap_or(PollTimeout::ZERO);
    match poll(fds, bound) {
        Ok(count) => Ok(count > 0),
        Err(Errno::EINTR) => Ok(false),
        Err(error) => Err(system_failure("waiting for peers", error)),
    }
}

/// True if the other end of a connection is closed.
pub(super) fn hung_up(fd: &impl AsFd) -> bool {
    let mut fds = [PollFd::new(fd.as_fd(), PollFlags::empty())];
    let ended = PollFlags::POLLHUP | PollFlags::POLLERR;
    matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1))
        && fds[0].revents().is_some_and(|r| r.intersects(ended))
}

/// The failure of a system call.
pub(super) fn system_failure(what: impl Into<String>, error: Errno) -> Failure {
    Failure::System {
        what: what.into(),
        cause: error.desc().to_lowercase(),
    }
}

/// The call of a communicator, or of its set-up, that runs now: the agent asks for it.
pub(super) struct Pending {
    communicator: String,
    call: Mutex<Option<PendingCall>>,
}

struct PendingCall {
    kind: CallKind,
    since: Instant,
    absent: Vec<usize>,
}

/// Formatted only when the agent asks.
enum CallKind {
    Operation { request: Arc<Request>, sequence: u64 },
    SetUp(String),
}

impl Pending {
    /// Registers with `cancel`, through which the agent asks.
    pub(super) fn register(communicator: &str, cancel: &Cancel) -> Arc<Self> {
        let pending = Arc::new(Self {
            communicator: communicator.to_owned(),
            call: Mutex::default(),
        });
        let waiting: Arc<dyn Waiting> = pending.clone();
        cancel.listen_to(Arc::downgrade(&waiting));
        pending
    }

    pub(super) fn begin_operation(&self, sequence: u64, request: &Arc<Request>) {
        let request = request.clone();
        self.begin(CallKind::Operation { request, sequence });
    }

    pub(super) fn begin_set_up(&self, what: impl Into<String>) {
        self.begin(CallKind::SetUp(what.into()));
    }

    fn begin(&self, kind: CallKind) {
        *self.lock() = Some(PendingCall {
            kind,
            since: Instant::now(),
            absent: Vec::new(),
        });
    }

    pub(super) fn end(&self) {
        *self.lock() = None;
    }

    /// It waits for these global ranks. A set-up waits for one after the other: each wait has its own begin.
    fn set_absent(&self, ranks: Vec<usize>) {
        if let Some(call) = self.lock().as_mut() {
            if matches!(call.kind, CallKind::SetUp(_)) && call.absent != ranks {
                call.since = Instant::now();
            }
            call.absent = ranks;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<PendingCall>> {
        self.call.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting for Pending {
    fn waiting(&self) -> Option<Wanted> {
        let call = self.lock();
        let call = call.as_ref()?;
        let what = match &call.kind {
            CallKind::SetUp(what) => format!("{what} of `{}`", self.communicator),
            CallKind::Operation { request, sequence } => format!(
                "{} #{sequence} of `{}` ({}, {} bytes)",
                request.operation,
                self.communicator,
                request.tag,
                request.buffer.bytes()
            ),
        };
        Some(Wanted {
            what,
            waited: call.since.elapsed(),
            ranks: call.absent.clone(),
        })
    }
}
