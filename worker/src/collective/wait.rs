//! Waiting for other ranks: under a deadline and a cancel token, and visible to the agent; on connections, and through the
//! key-value store before the ranks are connected.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::Mutex;

use super::error::Failure;
use super::operation::Request;
use crate::session::{Cancel, KeyValue, StoreError, Waiting, Wanted};

/// A wait of this length reports the ranks that it waits for.
const REPORT_AFTER: Duration = Duration::from_millis(250);

/// Longest time between two checks of the cancel token and the deadline.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// In larger groups the absent ranks are looked up only once: each lookup reads one entry per rank.
const MOST_REPORTED_RANKS: usize = 1024;

/// Longest time to read the entries that the store already has.
const SNAPSHOT_PATIENCE: Duration = Duration::from_secs(5);

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

    /// A wait of `what`, which sets up a communicator, that begins now and reports the ranks that it waits for.
    pub(super) fn of_set_up(what: &str, communicator: &str, timeout: Duration, cancel: &Cancel) -> Self {
        let pending = Pending::register(communicator, cancel);
        pending.begin_set_up(what);
        Self::new(timeout, cancel).reporting_to(&pending)
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

/// An exchange of all ranks over the store. Each rank writes one key, so that those without are named.
pub(crate) struct StoreExchange<'a> {
    pub(crate) store: &'a dyn KeyValue,
    /// Bounds each call.
    pub(crate) wait: &'a Wait,
    /// For errors.
    pub(crate) what: &'static str,
    /// What the keys of this exchange begin with, and no others.
    pub(crate) prefix: String,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
}

impl StoreExchange<'_> {
    /// The values of all ranks, by rank.
    pub(super) fn all_gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
        self.publish(&of_rank(self.rank), own)?;
        self.gather()
    }

    /// What rank 0 makes of the values of all ranks, once all have come. N ranks make 2N + 1 requests, and two more a second
    /// each while they wait.
    pub(crate) fn decide(
        &self,
        own: &[u8],
        decision: impl FnOnce(Vec<Vec<u8>>) -> Result<Vec<u8>, Failure>,
    ) -> Result<Vec<u8>, Failure> {
        self.publish(&of_rank(self.rank), own)?;
        if self.rank == 0 {
            let decision = decision(self.gather()?)?;
            self.publish(DECISION, &decision)?;
            return Ok(decision);
        }
        let or_zero = |absent: Vec<_>| if absent.is_empty() { vec![0] } else { absent };
        self.read(DECISION, || self.absent().map(or_zero))
    }

    /// What rank 0 [publishes](Self::publish).
    pub(crate) fn of_rank_zero(&self, name: &str) -> Result<Vec<u8>, Failure> {
        self.read(name, || Some(vec![0]))
    }

    pub(crate) fn publish(&self, name: &str, value: &[u8]) -> Result<(), Failure> {
        let key = self.key(name);
        loop {
            match self.store.put(&key, value, self.wait.deadline) {
                Ok(()) => return Ok(()),
                Err(error) => self.tolerate(error)?,
            }
        }
    }

    fn read(&self, name: &str, missing: impl Fn() -> Option<Vec<usize>>) -> Result<Vec<u8>, Failure> {
        let key = self.key(name);
        self.ask(missing, |until| self.store.get(&key, until))
    }

    fn gather(&self) -> Result<Vec<Vec<u8>>, Failure> {
        let prefix = self.key(RANK);
        let gather = |until| self.store.gather(&prefix, self.ranks, until);
        let mut found = self.ask(|| self.absent(), gather)?;
        let value = |rank| found.remove(&self.key(&of_rank(rank))).unwrap_or_default();
        Ok((0..self.ranks).map(value).collect())
    }

    /// Asks until there is an answer. The agent learns which ranks are `missing`, if that can be found out; so does the
    /// reader of the error when the time is over.
    fn ask<T>(
        &self,
        missing: impl Fn() -> Option<Vec<usize>>,
        ask: impl Fn(Instant) -> Result<Option<T>, StoreError>,
    ) -> Result<T, Failure> {
        let missing = || missing().unwrap_or_default();
        loop {
            if self.ranks <= MOST_REPORTED_RANKS {
                self.wait.report(missing);
            }
            let until = (self.wait.deadline).min(Instant::now() + self.store.patience());
            match ask(until) {
                Ok(Some(answer)) => return Ok(answer),
                Ok(None) => self.wait.check_end(missing)?,
                Err(error) => self.tolerate(error)?,
            }
        }
    }

    /// Ranks without a key. `None`: the store cannot be asked.
    fn absent(&self) -> Option<Vec<usize>> {
        // What is there is not waited for, but it may take a while to arrive.
        let patience = Instant::now() + SNAPSHOT_PATIENCE;
        let there = self.store.gather(&self.key(RANK), 0, patience).ok()??;
        let is_absent = |rank: &usize| !there.contains_key(&self.key(&of_rank(*rank)));
        Some((0..self.ranks).filter(is_absent).collect())
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

    fn key(&self, name: &str) -> String {
        format!("{}/{name}", self.prefix)
    }
}

/// Name of what rank 0 decides.
const DECISION: &str = "decision";

/// What the names of the ranks' keys begin with.
const RANK: &str = "rank/";

fn of_rank(rank: usize) -> String {
    format!("{RANK}{rank}")
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::session::{Entries, MemoryStore};

    const PATIENCE: Duration = Duration::from_mins(1);

    /// A store whose next calls fail with these, the last first.
    struct Failing {
        errors: Mutex<Vec<StoreError>>,
        store: MemoryStore,
    }

    impl Failing {
        fn with(errors: Vec<StoreError>) -> Self {
            let store = MemoryStore::default();
            store.put("test/there", b"value", Instant::now()).unwrap();
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

    fn exchange<'a>(store: &'a dyn KeyValue, wait: &'a Wait, [rank, ranks]: [usize; 2]) -> StoreExchange<'a> {
        StoreExchange {
            store,
            wait,
            what: "meeting",
            prefix: "test".into(),
            rank,
            ranks,
        }
    }

    fn await_there(errors: Vec<StoreError>, timeout: Duration) -> Result<Vec<u8>, Failure> {
        let (store, wait) = (Failing::with(errors), Wait::new(timeout, &Cancel::new()));
        exchange(&store, &wait, [1, 2]).of_rank_zero("there")
    }

    #[test]
    fn a_store_that_is_away_for_a_while_is_waited_for() {
        let value = await_there(vec![away(), away()], PATIENCE);
        assert_eq!(value, Ok(b"value".to_vec()));
        let (store, wait) = (Failing::with(vec![away()]), Wait::new(PATIENCE, &Cancel::new()));
        let one = exchange(&store, &wait, [0, 1]);
        assert_eq!(one.publish("here", b"1"), Ok(()));
        assert_eq!(one.of_rank_zero("here"), Ok(b"1".to_vec()));
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

    /// Counts requests, and ends no wait early: so none is repeated.
    #[derive(Default)]
    struct Counting {
        store: MemoryStore,
        requests: AtomicUsize,
    }

    impl KeyValue for Counting {
        fn put(&self, key: &str, value: &[u8], deadline: Instant) -> Result<(), StoreError> {
            self.requests.fetch_add(1, Ordering::Relaxed);
            self.store.put(key, value, deadline)
        }

        fn get(&self, key: &str, deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
            self.requests.fetch_add(1, Ordering::Relaxed);
            self.store.get(key, deadline)
        }

        fn gather(
            &self,
            prefix: &str,
            count: usize,
            deadline: Instant,
        ) -> Result<Option<Entries>, StoreError> {
            self.requests.fetch_add(1, Ordering::Relaxed);
            self.store.gather(prefix, count, deadline)
        }

        fn patience(&self) -> Duration {
            PATIENCE
        }
    }

    /// What each of these ranks learns.
    fn decide(
        store: &dyn KeyValue,
        came: impl Iterator<Item = usize>,
        ranks: usize,
        wait: &Wait,
    ) -> Vec<Result<Vec<u8>, Failure>> {
        std::thread::scope(|scope| {
            let decide = |rank: usize| {
                let exchange = exchange(store, wait, [rank, ranks]);
                move || exchange.decide(&[rank as u8], |values| Ok(values.concat()))
            };
            let ranks: Vec<_> = came.map(|rank| scope.spawn(decide(rank))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn all_ranks_meet_in_two_requests_each() {
        let store = Counting::default();
        let all = decide(&store, 0..64, 64, &Wait::new(PATIENCE, &Cancel::new()));
        let expected: Vec<u8> = (0..64).collect();
        assert!(all.iter().all(|found| found.as_ref() == Ok(&expected)), "{all:?}");
        assert_eq!(store.requests.load(Ordering::Relaxed), 2 * 64 + 1);
        let keys = store.store.gather("", 0, Instant::now()).unwrap().unwrap();
        assert_eq!(keys.len(), 64 + 1);
    }

    #[test]
    fn every_rank_names_those_that_do_not_come() {
        let cancel = Cancel::new();
        for missing in [0, 2] {
            let came = (0..4).filter(|rank| *rank != missing);
            let wait = Wait::new(Duration::from_millis(100), &cancel);
            for found in decide(&MemoryStore::default(), came, 4, &wait) {
                assert!(
                    matches!(&found, Err(Failure::TimedOut { waiting_for, .. }) if *waiting_for == [missing]),
                    "{found:?}"
                );
            }
        }
    }

    #[test]
    fn every_waiting_rank_reports_those_that_are_late_until_the_generation_ends() {
        let (store, cancel) = (MemoryStore::default(), Cancel::new());
        let decide = |rank| {
            let wait = Wait::of_set_up("connect", "test", PATIENCE, &cancel);
            exchange(&store, &wait, [rank, 4]).decide(b"here", |_| Ok(Vec::new()))
        };
        std::thread::scope(|scope| {
            let ranks = [0, 1, 3].map(|rank| scope.spawn(move || decide(rank)));
            let deadline = Instant::now() + PATIENCE;
            let names_it = |wanted: &&Wanted| wanted.ranks == [2];
            while cancel.waits().iter().filter(names_it).count() < 3 {
                assert!(Instant::now() < deadline, "{:?}", cancel.waits());
                std::thread::park_timeout(Duration::from_millis(1));
            }
            cancel.cancel("rank 2 died");
            let over = Err(Failure::GenerationOver("rank 2 died".into()));
            for rank in ranks {
                assert_eq!(rank.join().unwrap(), over);
            }
        });
    }
}
