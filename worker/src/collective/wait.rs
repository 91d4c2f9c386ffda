//! Waiting for other ranks: under a deadline and a cancel token, and visible to the agent; on connections, and through the
//! key-value store while the ranks are not connected, or a connection has failed.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::Mutex;

use super::error::Failure;
use super::operation::Request;
use crate::session::{Cancel, Entries, KeyValue, StoreError, Waiting, Wanted};

/// A wait of this length reports the ranks that it waits for.
const REPORT_AFTER: Duration = Duration::from_millis(250);

/// Longest time between two checks of the cancel token and the deadline.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Longest single wait for a key. The cancel token is checked between two such waits, because a store need not know it.
const STORE_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// In larger groups the absent ranks are looked up only once: each lookup reads one entry per rank.
const MOST_REPORTED_RANKS: usize = 1024;

/// Longest time to read the entries that the store already has.
const SNAPSHOT_PATIENCE: Duration = Duration::from_secs(5);

/// After the deadline, keep asking the store for this long, so that the error can name the missing ranks.
const GRACE: Duration = Duration::from_secs(1);

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
pub(super) fn system_failure(what: impl Into<String>, error: impl Into<io::Error>) -> Failure {
    let error = error.into();
    let in_words = |errno| Errno::from_raw(errno).desc().to_lowercase();
    Failure::System {
        what: what.into(),
        cause: error.raw_os_error().map_or_else(|| error.to_string(), in_words),
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
        *self.call.lock() = Some(PendingCall {
            kind,
            since: Instant::now(),
            absent: Vec::new(),
        });
    }

    pub(super) fn end(&self) {
        *self.call.lock() = None;
    }

    /// It waits for these global ranks. A set-up waits for one after the other: each wait has its own begin.
    fn set_absent(&self, ranks: Vec<usize>) {
        if let Some(call) = self.call.lock().as_mut() {
            if matches!(call.kind, CallKind::SetUp(_)) && call.absent != ranks {
                call.since = Instant::now();
            }
            call.absent = ranks;
        }
    }
}

impl Waiting for Pending {
    fn waiting(&self) -> Option<Wanted> {
        let call = self.call.lock();
        let call = call.as_ref()?;
        let what = match &call.kind {
            CallKind::SetUp(what) => format!("{what} of `{}`", self.communicator),
            CallKind::Operation { request, sequence } => request.name(*sequence, &self.communicator),
        };
        Some(Wanted {
            what,
            waited: call.since.elapsed(),
            ranks: call.absent.clone(),
        })
    }
}

/// The store, within the bounds of a wait.
#[derive(Clone, Copy)]
pub(super) struct StoreExchange<'a> {
    pub(super) store: &'a dyn KeyValue,
    /// Bounds each call.
    pub(super) wait: &'a Wait,
    /// For errors.
    pub(super) what: &'static str,
}

impl StoreExchange<'_> {
    pub(super) fn publish(&self, key: &str, value: &[u8]) -> Result<(), Failure> {
        loop {
            match self.store.put(key, value, self.wait.deadline) {
                Ok(()) => return Ok(()),
                Err(error) => self.tolerate(error)?,
            }
        }
    }

    /// All entries with this prefix, when there are `count` of them: one for each rank. In time, or the error names those
    /// that `missing` finds among the entries that are there.
    pub(super) fn gather(
        &self,
        prefix: &str,
        count: usize,
        missing: impl Fn(&Entries) -> Vec<usize>,
    ) -> Result<Entries, Failure> {
        let absent = || {
            // What is there is not waited for, but it may take a while to arrive.
            let there = self.store.gather(prefix, 0, Instant::now() + SNAPSHOT_PATIENCE);
            there
                .ok()
                .flatten()
                .map_or_else(Vec::new, |there| missing(&there))
        };
        loop {
            if count <= MOST_REPORTED_RANKS {
                self.wait.report(absent);
            }
            let until = self.wait.deadline.min(Instant::now() + self.store.patience());
            match self.store.gather(prefix, count, until) {
                Ok(Some(found)) => return Ok(found),
                Ok(None) => self.wait.check_end(absent)?,
                Err(error) => self.tolerate(error)?,
            }
        }
    }

    /// Waits for `key`, which global rank `writer` publishes; if it does not in time, the error names it.
    pub(super) fn await_key(&self, key: &str, writer: usize) -> Result<Vec<u8>, Failure> {
        loop {
            self.wait.report(|| vec![writer]);
            let until = self.wait.deadline.min(Instant::now() + STORE_POLL_INTERVAL);
            match self.store.get(key, until) {
                Ok(Some(value)) => return Ok(value),
                Ok(None) => self.wait.check_end(|| vec![writer])?,
                Err(error) => self.tolerate(error)?,
            }
        }
    }

    /// Fails with an error of the store. While there is time, a store that is out of reach is asked again; at the end
    /// the error names it instead of a rank.
    fn tolerate(&self, error: StoreError) -> Result<(), Failure> {
        let may_pass = matches!(error, StoreError::Unavailable(_));
        let failure = match error {
            StoreError::Superseded(cause) => Failure::GenerationOver(cause),
            error => Failure::System {
                what: self.what.to_owned(),
                cause: error.to_string(),
            },
        };
        if !may_pass {
            return Err(failure);
        }
        self.wait.check_end(Vec::new).map_err(|over| match over {
            Failure::TimedOut { .. } => failure,
            over => over,
        })
    }
}

/// The ranks among `ranks` that have not arrived, and those that the store could not be asked about in time. Calls
/// `has_arrived` for each rank; it may wait until `deadline`, and looks once after that. Ends [`GRACE`] after the deadline,
/// or once the store is out of reach.
pub(super) fn absent_ranks(
    ranks: &[usize],
    deadline: Instant,
    has_arrived: impl Fn(usize) -> Result<bool, StoreError>,
) -> (Vec<usize>, Vec<usize>) {
    let mut absent = Vec::new();
    for (i, &rank) in ranks.iter().enumerate() {
        let answer = (Instant::now() < deadline + GRACE).then(|| has_arrived(rank));
        match answer {
            Some(Ok(true)) => {}
            Some(Ok(false)) => absent.push(rank),
            Some(Err(_)) | None => return (absent, ranks[i..].to_vec()),
        }
    }
    (absent, Vec::new())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::session::MemoryStore;

    const PATIENCE: Duration = Duration::from_mins(1);

    /// A store whose next calls fail with these, the last first.
    struct Failing {
        errors: Mutex<Vec<StoreError>>,
        store: MemoryStore,
    }

    impl Failing {
        fn with(errors: Vec<StoreError>) -> Self {
            let store = MemoryStore::default();
            store.put("there", b"value", Instant::now()).unwrap();
            Self {
                errors: Mutex::new(errors),
                store,
            }
        }

        fn error(&self) -> Result<(), StoreError> {
            self.errors.lock().unwrap().pop().map_or(Ok(()), Err)
        }
    }

    impl KeyValue for Failing {
        fn put(&self, key: &str, value: &[u8], deadline: Instant) -> Result<(), StoreError> {
            self.error()?;
            self.store.put(key, value, deadline)
        }

        fn get(&self, key: &str, deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
            self.error()?;
            self.store.get(key, deadline)
        }

        fn gather(
            &self,
            prefix: &str,
            count: usize,
            deadline: Instant,
        ) -> Result<Option<Entries>, StoreError> {
            self.error()?;
            self.store.gather(prefix, count, deadline)
        }
    }

    fn away() -> StoreError {
        StoreError::Unavailable("the daemon did not answer".into())
    }

    fn await_there(errors: Vec<StoreError>, timeout: Duration) -> Result<Vec<u8>, Failure> {
        let (store, wait) = (Failing::with(errors), Wait::new(timeout, &Cancel::new()));
        let lookup = StoreExchange {
            store: &store,
            wait: &wait,
            what: "meeting",
        };
        lookup.await_key("there", 0)
    }

    #[test]
    fn a_store_that_is_away_for_a_while_is_waited_for() {
        let value = await_there(vec![away(), away()], PATIENCE);
        assert_eq!(value, Ok(b"value".to_vec()));
        let (store, wait) = (Failing::with(vec![away()]), Wait::new(PATIENCE, &Cancel::new()));
        let lookup = StoreExchange {
            store: &store,
            wait: &wait,
            what: "meeting",
        };
        assert_eq!(lookup.publish("here", b"1"), Ok(()));
        assert_eq!(lookup.await_key("here", 0), Ok(b"1".to_vec()));
    }

    #[test]
    fn a_store_that_stays_away_is_named_instead_of_a_rank() {
        let error = await_there(vec![away()], Duration::ZERO).unwrap_err();
        assert_eq!(
            error.to_string(),
            "meeting: key-value store: the daemon did not answer"
        );
    }

    #[test]
    fn what_the_store_refuses_is_not_asked_again() {
        let refused = StoreError::Refused("too much".into());
        let error = await_there(vec![refused], PATIENCE).unwrap_err();
        assert_eq!(error.to_string(), "meeting: key-value store: too much");
        let over = StoreError::Superseded("rank 1 died".into());
        assert_eq!(
            await_there(vec![over], PATIENCE),
            Err(Failure::GenerationOver("rank 1 died".into()))
        );
    }

    #[test]
    fn asking_ends_where_the_store_is_out_of_reach() {
        let has_arrived = |rank| match rank {
            2 => Ok(false),
            4 => Err(away()),
            _ => Ok(true),
        };
        let found = absent_ranks(&[1, 2, 3, 4, 5], Instant::now(), has_arrived);
        assert_eq!(found, (vec![2], vec![4, 5]));
    }
}
