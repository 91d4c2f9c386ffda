//! The thread that looks after communicators: errors that no call has returned, operations that do not end, and the
//! end of the generation.
//!
//! The communicators of a process are aborted together. An abort frees memory of the device, which waits for all that
//! runs there: also for operations of the other communicators, which never end unless those are aborted too. So each is
//! aborted in a thread of its own, after all have their reason.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::comm::{AbortReason, Comm, Membership, Observation};
use super::flight_recorder::{Oldest, OperationPhase};
use crate::collective::error::Failure;
use crate::device::DeviceError;
use crate::session::{KeyValue, StoreError};

/// Time between two looks at all communicators.
const INTERVAL: Duration = Duration::from_millis(20);

/// For so long a thread may be in a call of NCCL while its communicator waits to be aborted.
const STUCK: Duration = Duration::from_secs(3);

/// For so long a rank waits for the reports of the others after a time-out. Ranks that reach the operation more than that
/// after this one are named too, though they wait themselves.
const REPORT_TIMEOUT: Duration = Duration::from_secs(2);

/// Looks after communicators until it is dropped. Clones are the same.
#[derive(Clone)]
pub(super) struct Watchdog(Arc<WatchdogGuard>);

struct WatchdogGuard(Arc<WatchdogState>);

struct WatchdogState {
    watched: Mutex<WatchedComms>,
    changed: Condvar,
}

#[derive(Default)]
struct WatchedComms {
    comms: Vec<Watched>,
    stop: bool,
    /// The thread has ended.
    over: bool,
    /// Threads that abort.
    aborting: usize,
}

/// A communicator, until it is gone; also one that is not used any more, if it has failed.
struct Watched {
    comm: Arc<Comm>,
    /// Begin of the abort.
    aborted_at: Option<Instant>,
    /// A stuck abort was logged.
    is_reported: bool,
}

impl Watchdog {
    /// Starts the thread. After a time-out the ranks exchange in `store` in which operation they wait.
    pub(super) fn start(store: Arc<dyn KeyValue>) -> Result<Self, Failure> {
        let shared = Arc::new(WatchdogState {
            watched: Mutex::default(),
            changed: Condvar::new(),
        });
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new().name("ddp-watchdog".into());
        thread
            .spawn(move || of_thread.watch(&TimeoutReports(store)))
            .map_err(|error| Failure::System {
                what: "starting the watchdog of the collectives".into(),
                cause: error.to_string(),
            })?;
        Ok(Self(Arc::new(WatchdogGuard(shared))))
    }

    pub(super) fn add(&self, comm: &Arc<Comm>) {
        self.0.0.watched.lock().comms.push(Watched {
            comm: comm.clone(),
            aborted_at: None,
            is_reported: false,
        });
    }

    /// Ends the thread and waits, no longer than `bound`, for all aborts. False if some have not ended.
    pub(super) fn end(&self, bound: Duration) -> bool {
        let shared = &self.0.0;
        let mut watched = shared.watched.lock();
        watched.stop = true;
        shared.changed.notify_all();
        let is_open = |watched: &mut WatchedComms| !watched.has_ended();
        shared.changed.wait_while_for(&mut watched, is_open, bound);
        watched.has_ended()
    }
}

impl Drop for WatchdogGuard {
    fn drop(&mut self) {
        let mut watched = self.0.watched.lock();
        watched.stop = true;
        let comms = std::mem::take(&mut watched.comms).into_iter();
        let (failed, others): (Vec<_>, Vec<_>) = comms.partition(|watched| watched.comm.reason().is_some());
        watched.comms = failed;
        drop(watched);
        self.0.changed.notify_all();
        // Here, and not in a thread that may outlive `main`: they hold on to the device. (The thread drops those that it
        // looks at now.)
        drop(others);
    }
}

impl WatchedComms {
    fn has_ended(&self) -> bool {
        self.over && self.aborting == 0
    }
}

impl WatchdogState {
    fn watch(self: &Arc<Self>, reports: &TimeoutReports) {
        let mut reason = None;
        let mut watched = self.watched.lock();
        loop {
            let is_last = watched.stop;
            let mut comms = std::mem::take(&mut watched.comms);
            // `add` must not wait for this look.
            drop(watched);
            comms.retain(|watched| !watched.is_over());
            let found = if is_last {
                vec![None; comms.len()]
            } else {
                examine(&comms, reports)
            };
            fail_all(&comms, found, &mut reason);
            for watched in &mut comms {
                self.abort(watched);
            }
            watched = self.watched.lock();
            if is_last {
                break;
            }
            comms.append(&mut watched.comms);
            watched.comms = comms;
            if !watched.stop {
                self.changed.wait_for(&mut watched, INTERVAL);
            }
        }
        watched.over = true;
        self.changed.notify_all();
    }

    /// Aborts a communicator that has failed, in a thread of its own.
    fn abort(self: &Arc<Self>, watched: &mut Watched) {
        if watched.comm.reason().is_none() {
            return;
        }
        if watched.aborted_at.is_some() {
            watched.report_stuck();
            return;
        }
        watched.aborted_at = Some(Instant::now());
        self.watched.lock().aborting += 1;
        let (shared, comm) = (self.clone(), watched.comm.clone());
        let abort = move || {
            comm.abort();
            drop(comm);
            shared.watched.lock().aborting -= 1;
            shared.changed.notify_all();
        };
        let thread = std::thread::Builder::new().name("ddp-abort".into());
        if let Err(error) = thread.spawn(abort.clone()) {
            tracing::warn!("cannot start a thread for an abort: {error}");
            abort();
        }
    }
}

impl Watched {
    fn is_over(&self) -> bool {
        let is_unused = Arc::strong_count(&self.comm) == 1 && self.comm.reason().is_none();
        is_unused || self.comm.is_gone()
    }

    /// Logs, once, that it cannot be aborted: beside a call that has not returned, that could free what the call uses. The
    /// agent ends this process.
    fn report_stuck(&mut self) {
        let is_stuck = self.aborted_at.is_some_and(|since| since.elapsed() >= STUCK);
        if is_stuck && !self.is_reported {
            self.is_reported = true;
            let Membership { name, .. } = self.comm.membership();
            tracing::error!(
                "rank {}: a call of NCCL on communicator `{name}` has not returned for {} s, so its operations cannot be aborted",
                self.comm.membership().global(),
                STUCK.as_secs(),
            );
        }
    }
}

/// A reason for each communicator that has failed by itself.
fn examine(comms: &[Watched], reports: &TimeoutReports) -> Vec<Option<AbortReason>> {
    let now = Instant::now();
    let seen: Vec<_> = comms.iter().map(|watched| watched.comm.observe(now)).collect();
    let mut found: Vec<_> = seen.iter().cloned().map(|seen| decide(now, seen?)).collect();
    let is_late = |reason: &AbortReason| matches!(reason.failure, Failure::TimedOut { .. });
    if found.iter().flatten().any(is_late) {
        // One for all reports.
        let deadline = Instant::now() + REPORT_TIMEOUT;
        // Of all, since all are aborted: other ranks may be in time here, and wait for this rank in another one.
        let oldest = |seen: &Option<Observation>| seen.as_ref()?.oldest.clone();
        let waits: Vec<_> = (comms.iter().zip(&seen).zip(&mut found))
            .filter_map(|((Watched { comm, .. }, seen), reason)| {
                Some((comm.membership(), oldest(seen)?, reason))
            })
            .collect();
        let published = waits
            .iter()
            .map(|(comm, oldest, _)| (*comm, oldest.common_name()));
        reports.publish(published, deadline);
        for (membership, oldest, reason) in waits {
            if let Some(AbortReason { failure, .. }) = reason
                && let Failure::TimedOut { waiting_for, .. } = failure
            {
                *waiting_for = reports.late_ranks(membership, &oldest, deadline);
            }
        }
    }
    found
}

/// Fails all communicators if one has failed, also in a call: each for what was found of it, the others for the
/// first reason, which is kept in `reason` for those that are added later.
fn fail_all(comms: &[Watched], found: Vec<Option<AbortReason>>, reason: &mut Option<AbortReason>) {
    let mut all = comms.iter().zip(&found);
    let first = all.find_map(|(Watched { comm, .. }, found)| {
        let reason = comm.reason().or(found.as_ref())?;
        Some(reason.for_others(&comm.membership().name))
    });
    let Some(for_others) = reason.take().or(first) else {
        return;
    };
    for (Watched { comm, .. }, found) in comms.iter().zip(found) {
        if comm.reason().is_none() {
            comm.fail(found.unwrap_or_else(|| for_others.clone()));
        }
    }
    *reason = Some(for_others);
}

/// Whether a communicator is to be aborted, and why. The end of the generation comes first, since it explains the rest.
fn decide(now: Instant, seen: Observation) -> Option<AbortReason> {
    let reason = |failure, sequence| Some(AbortReason { failure, sequence });
    if let Some(cause) = seen.over {
        return reason(Failure::GenerationOver(cause), None);
    }
    if let Some((sequence, error)) = seen.device {
        return reason(Failure::Device(error), Some(sequence));
    }
    let sequence = seen.oldest.as_ref().map(|oldest| oldest.sequence);
    if let Some(failure) = seen.reported {
        return reason(failure, sequence);
    }
    let oldest = seen.oldest?;
    let waited = now.saturating_duration_since(oldest.since);
    if waited < seen.timeout {
        return None;
    }
    let waited_ms = waited.as_millis() as u64;
    if oldest.phase == OperationPhase::Queued {
        let what = format!("the input of {}", oldest.name);
        let error = DeviceError::TimedOut { what, waited_ms };
        return reason(Failure::Device(error), sequence);
    }
    let late = Failure::TimedOut {
        waiting_for: seen.awaited,
        waited_ms,
    };
    reason(late, sequence)
}

/// In which operations the ranks wait: NCCL does not know which of them has not come.
struct TimeoutReports(Arc<dyn KeyValue>);

impl TimeoutReports {
    /// Publishes by `deadline` in which operation of each communicator this rank waits; of each communicator once.
    fn publish<'a>(&self, waits: impl IntoIterator<Item = (&'a Membership, String)>, deadline: Instant) {
        for (membership, operation) in waits {
            let key = key(membership, membership.global());
            if let Err(error) = self.0.put(&key, operation.as_bytes(), deadline) {
                tracing::warn!("cannot publish `{key}`: {error}");
                if matches!(error, StoreError::Unavailable(_)) {
                    // The others would only wait for the same.
                    return;
                }
            }
        }
    }

    /// The global ranks that have not published by `deadline` that they wait in `operation` too. All that it waits for if every
    /// rank waits, or the store is out of reach.
    fn late_ranks(&self, membership: &Membership, operation: &Oldest, deadline: Instant) -> Vec<usize> {
        let (awaited, name) = (membership.awaited(operation.peer), operation.common_name());
        let gather = |count, until| self.0.gather(&prefix(membership), count, until);
        let found = match gather(membership.size(), deadline) {
            // Those that are there are not waited for, but take a while to arrive.
            Ok(None) => gather(0, Instant::now() + REPORT_TIMEOUT),
            found => found,
        };
        let Ok(Some(found)) = found else {
            return awaited;
        };
        let theirs = |rank| found.get(&key(membership, rank));
        let waits = |rank: &usize| theirs(*rank).is_some_and(|theirs| theirs == name.as_bytes());
        let late: Vec<usize> = awaited.iter().copied().filter(|rank| !waits(rank)).collect();
        if late.is_empty() { awaited } else { late }
    }
}

/// What the keys of a communicator's ranks begin with. Other groups of its name have other members.
fn prefix(membership: &Membership) -> String {
    format!("nccl/{} of {}/waits/", membership.name, membership.members[0])
}

fn key(membership: &Membership, rank: usize) -> String {
    format!("{}{rank}", prefix(membership))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::session::{Cancel, Entries, MemoryStore};

    const TIMEOUT: Duration = Duration::from_secs(10);

    fn at_rest() -> Observation {
        Observation {
            over: None,
            reported: None,
            device: None,
            oldest: None,
            timeout: TIMEOUT,
            awaited: vec![1, 2],
        }
    }

    fn oldest(phase: OperationPhase, since: Instant) -> Oldest {
        Oldest {
            sequence: 3,
            peer: None,
            tag: "bucket 0".into(),
            name: "all-reduce #3 (bucket 0)".into(),
            phase,
            since,
        }
    }

    #[test]
    fn nothing_is_aborted_while_operations_are_in_time() {
        let now = Instant::now();
        assert_eq!(decide(now, at_rest()), None);
        for phase in [OperationPhase::Queued, OperationPhase::Running] {
            let seen = Observation {
                oldest: Some(oldest(phase, now)),
                ..at_rest()
            };
            assert_eq!(decide(now + TIMEOUT / 2, seen), None);
        }
    }

    #[test]
    fn a_time_out_says_whether_input_or_ranks_are_late() {
        let since = Instant::now();
        let words = |phase| {
            let seen = Observation {
                oldest: Some(oldest(phase, since)),
                ..at_rest()
            };
            let reason = decide(since + TIMEOUT, seen).unwrap();
            assert_eq!(reason.sequence, Some(3));
            reason.failure.to_string()
        };
        assert_eq!(
            words(OperationPhase::Queued),
            "waited 10000 ms for the input of all-reduce #3 (bucket 0)"
        );
        assert!(words(OperationPhase::Running).starts_with("waited 10000 ms for ranks 1, 2\n"));
    }

    #[test]
    fn the_end_of_the_generation_comes_before_what_the_library_reports() {
        let reported = Failure::Library {
            call: "ncclCommGetAsyncError".into(),
            words: "remote process exited".into(),
            of_peer: true,
        };
        let mut seen = Observation {
            oldest: Some(oldest(OperationPhase::Running, Instant::now())),
            reported: Some(reported.clone()),
            ..at_rest()
        };
        let reason = decide(Instant::now(), seen.clone()).unwrap();
        assert_eq!((reason.failure, reason.sequence), (reported, Some(3)));
        seen.over = Some("rank 2 died of SIGKILL".into());
        let reason = decide(Instant::now(), seen).unwrap();
        assert_eq!(
            reason.failure.to_string(),
            "the launcher stopped the workers: rank 2 died of SIGKILL"
        );
    }

    /// Operation 17.
    fn late() -> Oldest {
        Oldest {
            sequence: 17,
            ..oldest(OperationPhase::Running, Instant::now())
        }
    }

    fn member(rank: usize) -> Membership {
        Membership {
            name: "world".into(),
            rank,
            members: vec![4, 5, 6],
            timeout: REPORT_TIMEOUT,
            cancel: Cancel::new(),
        }
    }

    #[test]
    fn ranks_that_wait_too_are_not_named() {
        let store: Arc<dyn KeyValue> = Arc::new(MemoryStore::default());
        let deadline = Instant::now() + Duration::from_millis(50);
        store.put("nccl/world of 4/waits/5", b"17", deadline).unwrap();
        // Rank 6 waits in an operation before.
        store.put("nccl/world of 4/waits/6", b"16", deadline).unwrap();
        assert_eq!(
            TimeoutReports(store).late_ranks(&member(0), &late(), deadline),
            [6]
        );
    }

    /// The ranks between the two of a message have numbers of their own for it.
    #[test]
    fn a_message_waits_for_the_rank_at_its_other_end() {
        let store: Arc<dyn KeyValue> = Arc::new(MemoryStore::default());
        let deadline = Instant::now() + Duration::from_millis(50);
        let message = Oldest {
            peer: Some(1),
            tag: "`1RECV_F3`".into(),
            ..late()
        };
        let reports = TimeoutReports(store.clone());
        assert_eq!(reports.late_ranks(&member(0), &message, deadline), [5]);
        store
            .put("nccl/world of 4/waits/5", b"`1RECV_F2`", deadline)
            .unwrap();
        assert_eq!(reports.late_ranks(&member(0), &message, deadline), [5]);
    }

    /// The wait for rank 4 uses up the time; rank 5 has published long before.
    #[test]
    fn an_absent_rank_does_not_make_those_after_it_absent() {
        let store: Arc<dyn KeyValue> = Arc::new(MemoryStore::default());
        let reports = TimeoutReports(store);
        let deadline = Instant::now() + Duration::from_millis(50);
        reports.publish([(&member(1), "17".into())], deadline);
        assert_eq!(reports.late_ranks(&member(2), &late(), deadline), [4]);
        assert!(Instant::now() >= deadline);
    }

    #[test]
    fn if_all_wait_all_others_are_named() {
        let store: Arc<dyn KeyValue> = Arc::new(MemoryStore::default());
        let reports = TimeoutReports(store);
        let deadline = Instant::now() + REPORT_TIMEOUT;
        for rank in 0..3 {
            reports.publish([(&member(rank), "17".into())], deadline);
        }
        assert_eq!(reports.late_ranks(&member(2), &late(), deadline), [4, 5]);
    }

    /// A store that is out of reach: each call takes until its deadline, and fails.
    struct Away(AtomicUsize);

    impl KeyValue for Away {
        fn put(&self, _: &str, _: &[u8], deadline: Instant) -> Result<(), StoreError> {
            self.get("", deadline).map(drop)
        }

        fn get(&self, _: &str, deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            // A key that is never written.
            MemoryStore::default().get("never", deadline)?;
            Err(StoreError::Unavailable("the daemon did not answer".into()))
        }

        fn gather(&self, _: &str, _: usize, deadline: Instant) -> Result<Option<Entries>, StoreError> {
            self.get("", deadline).map(|_| None)
        }
    }

    /// Of four communicators with two late operations: one put and one get of each, not twelve.
    #[test]
    fn a_store_out_of_reach_is_not_asked_again_and_again() {
        let away = Arc::new(Away(AtomicUsize::new(0)));
        let reports = TimeoutReports(away.clone());
        let deadline = Instant::now() + Duration::from_millis(20);
        let member = member(0);
        reports.publish(
            [17, 3, 5, 8].map(|number: u64| (&member, number.to_string())),
            deadline,
        );
        assert_eq!(away.0.load(Ordering::Relaxed), 1);
        for _ in 0..2 {
            assert_eq!(reports.late_ranks(&member, &late(), deadline), [5, 6]);
        }
        assert_eq!(away.0.load(Ordering::Relaxed), 3);
    }
}
