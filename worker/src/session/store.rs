//! The key-value store of one generation, as workers see it: within a process, or behind the control socket.

use std::collections::{BTreeMap, HashMap};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ddp_proto::control::{ANSWER_GRACE, KvRefusal, MAX_CALLS, MAX_VALUE_BYTES, PUT_BOUND, ToAgent, whole_ms};

use super::Cancel;
use super::outbox::{Outbox, Refused};

/// Write-once keys, blocking reads.
///
/// Every call has a deadline; one that has passed means to try once, so that a store behind a connection waits for its
/// answer a moment longer. The end of the generation ends every call at once.
pub trait KeyValue: Send + Sync {
    /// Writes a key; writing the same value again succeeds. After [`StoreError::Unavailable`] it may be written or not.
    fn put(&self, key: &str, value: &[u8], deadline: Instant) -> Result<(), StoreError>;

    /// Reads a key, and waits for it if need be. `None`: no rank had written it by the deadline, and never before that.
    fn get(&self, key: &str, deadline: Instant) -> Result<Option<Vec<u8>>, StoreError>;

    /// All entries whose keys begin with `prefix`, as soon as `count` of them exist; with 0, those that exist now.
    /// `None`: fewer were there at the deadline.
    fn gather(&self, prefix: &str, count: usize, deadline: Instant) -> Result<Option<Entries>, StoreError>;

    /// How long one call may wait for a caller who has to know when the generation is over: longer, if the store itself
    /// ends the call then.
    fn patience(&self) -> Duration {
        POLL_INTERVAL
    }

    /// The same for a key without which nothing goes on: it is an error that no rank wrote it.
    fn wait_for(&self, key: &str, deadline: Instant) -> Result<Vec<u8>, StoreError> {
        let started = Instant::now();
        self.get(key, deadline)?.ok_or_else(|| StoreError::NotWritten {
            key: key.to_owned(),
            waited_ms: started.elapsed().as_millis() as u64,
        })
    }
}

/// Entries by key.
pub type Entries = BTreeMap<String, Vec<u8>>;

/// Longest single wait of a caller that looks in between whether the generation is over.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Why a key-value call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// No rank wrote a key that was needed.
    #[error("no rank wrote key `{key}` within {waited_ms} ms")]
    NotWritten {
        /// The key.
        key: String,
        /// How long it was waited for.
        waited_ms: u64,
    },
    /// Another value was written before.
    #[error("key `{0}` was already written with a different value")]
    Conflict(String),
    /// The generation is over.
    #[error("generation superseded: {0}")]
    Superseded(String),
    /// The store could not be asked until the call's deadline, or the bound of its own that it names. It may be, later.
    #[error("key-value store: {0}")]
    Unavailable(String),
    /// The store refused. It would again.
    #[error("key-value store: {0}")]
    Refused(String),
}

/// A store within one process: for a world of one, and for tests whose ranks are threads.
#[derive(Clone, Default)]
pub struct MemoryStore(Arc<Shared>);

#[derive(Default)]
struct Shared {
    entries: Mutex<HashMap<String, Vec<u8>>>,
    written: Condvar,
}

impl KeyValue for MemoryStore {
    fn put(&self, key: &str, value: &[u8], _: Instant) -> Result<(), StoreError> {
        let mut entries = self.0.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = entries.entry(key.to_owned()).or_insert_with(|| value.to_vec());
        if kept.as_slice() != value {
            return Err(StoreError::Conflict(key.to_owned()));
        }
        self.0.written.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        let entries = self.0.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let left = deadline.saturating_duration_since(Instant::now());
        let is_absent = |entries: &mut HashMap<String, _>| !entries.contains_key(key);
        let waited = self.0.written.wait_timeout_while(entries, left, is_absent);
        let (entries, _) = waited.unwrap_or_else(PoisonError::into_inner);
        Ok(entries.get(key).cloned())
    }

    fn gather(&self, prefix: &str, count: usize, deadline: Instant) -> Result<Option<Entries>, StoreError> {
        let found = |entries: &HashMap<String, Vec<u8>>| -> Entries {
            let found = entries.iter().filter(|(key, _)| key.starts_with(prefix));
            found.map(|(key, value)| (key.clone(), value.clone())).collect()
        };
        let entries = self.0.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let left = deadline.saturating_duration_since(Instant::now());
        let are_few = |entries: &mut HashMap<String, _>| found(entries).len() < count;
        let waited = self.0.written.wait_timeout_while(entries, left, are_few);
        let (entries, _) = waited.unwrap_or_else(PoisonError::into_inner);
        Ok(Some(found(&entries)).filter(|found| found.len() >= count))
    }
}

/// How much longer than a call's deadline its answer is waited for. Longer than the agent needs to report
/// what is wrong.
pub(super) const GRACE: Duration = ANSWER_GRACE.saturating_mul(2);

/// The store of this generation, asked through the agent. No more calls are under way than the agent takes: a caller
/// beyond that waits.
pub(super) struct RemoteStore {
    calls: Mutex<Calls>,
    changed: Condvar,
    outbox: Arc<Outbox>,
    cancel: Cancel,
    /// [`GRACE`].
    grace: Duration,
}

/// The calls that the agent has still to answer.
#[derive(Default)]
struct Calls {
    /// By number. A call whose caller has gone stays: the agent is still at it.
    open: HashMap<u64, Sender<Answer>>,
    next: u64,
}

/// What the agent answers to a call: what was read, or why it was not done, for this program and in words.
type Answer = Result<Option<Answered>, (KvRefusal, String)>;

/// What was read, as base64.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answered {
    /// The value of one entry.
    Value(String),
    /// Some of the entries of a gather, and whether more follow.
    Entries(BTreeMap<String, String>, bool),
}

/// Longest single wait for what is gathered: in between, a caller reports which ranks it waits for.
const GATHER_INTERVAL: Duration = Duration::from_secs(1);

/// Blocking reads that may be under way: some calls are left for writes, for which this program's reads may wait.
const MAX_READS: usize = MAX_CALLS - 4;

impl RemoteStore {
    pub(super) fn new(outbox: &Arc<Outbox>, cancel: &Cancel, grace: Duration) -> Self {
        Self {
            calls: Mutex::default(),
            changed: Condvar::new(),
            outbox: Arc::clone(outbox),
            cancel: cancel.clone(),
            grace,
        }
    }

    /// Hands an answer to its caller, if that still waits.
    pub(super) fn answer(&self, number: u64, answer: Answer) {
        if let Some(caller) = self.forget(number) {
            let _ = caller.send(answer);
        }
    }

    /// Ends every call, when the generation is over.
    pub(super) fn end_calls(&self) {
        self.lock().open.clear();
        self.changed.notify_all();
    }

    /// One call, begun as soon as fewer than `bound` are under way; its answer is waited for until `deadline` and a
    /// moment longer. `what` names it in errors.
    fn call(
        &self,
        what: &str,
        bound: usize,
        deadline: Instant,
        message: impl FnOnce(u64) -> ToAgent,
    ) -> Result<Answer, StoreError> {
        let started = Instant::now();
        let end = deadline.max(started) + self.grace;
        let unavailable = |why: &str| {
            let waited = started.elapsed().as_secs_f64();
            StoreError::Unavailable(format!("{what}: {why} within {waited:.1} s"))
        };
        let answered = match self.begin(bound, end) {
            Some((number, answer)) => match self.outbox.push(&message(number)) {
                Ok(()) => {
                    let answer = answer.recv_timeout(end.saturating_duration_since(Instant::now()));
                    answer.map_err(|_| unavailable("the agent did not answer"))
                }
                Err(refused) => {
                    self.forget(number);
                    Err(match refused {
                        Refused::Full => unavailable("the agent did not read its control socket"),
                        // A connection that was lost has its cause.
                        Refused::Closed => StoreError::Refused(format!("{what}: the session was shut down")),
                    })
                }
            },
            None => Err(unavailable("the agent did not answer earlier calls")),
        };
        match (answered, self.cancel.cause()) {
            (Err(_), Some(cause)) => Err(StoreError::Superseded(cause.to_owned())),
            (answered, _) => answered,
        }
    }

    /// The number of a new call, as soon as fewer than `bound` are under way, and where its answer will be; `None` at the
    /// deadline or when the generation is over.
    fn begin(&self, bound: usize, deadline: Instant) -> Option<(u64, Receiver<Answer>)> {
        let left = deadline.saturating_duration_since(Instant::now());
        let is_over = || self.cancel.cause().is_some();
        let is_full = |calls: &mut Calls| calls.open.len() >= bound && !is_over();
        let waited = self.changed.wait_timeout_while(self.lock(), left, is_full);
        let (mut calls, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() || is_over() {
            return None;
        }
        let number = calls.next;
        calls.next += 1;
        let (caller, answer) = channel();
        calls.open.insert(number, caller);
        Some((number, answer))
    }

    /// Makes room for another call.
    fn forget(&self, number: u64) -> Option<Sender<Answer>> {
        let caller = self.lock().open.remove(&number);
        self.changed.notify_all();
        caller
    }

    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KeyValue for RemoteStore {
    /// Tried for at most 30 seconds by the agent, where the daemon is away.
    fn put(&self, key: &str, value: &[u8], deadline: Instant) -> Result<(), StoreError> {
        let what = format!("put of key `{key}`");
        if value.len() > MAX_VALUE_BYTES {
            let len = value.len();
            return Err(StoreError::Refused(format!(
                "{what}: the value has {len} bytes, more than {MAX_VALUE_BYTES}"
            )));
        }
        let message = |call| ToAgent::KvPut {
            call,
            key: key.to_owned(),
            value: STANDARD.encode(value),
        };
        let deadline = deadline.min(Instant::now() + PUT_BOUND);
        match self.call(&what, MAX_CALLS, deadline, message)? {
            Ok(_) => Ok(()),
            Err((refusal, words)) => Err(refused(&what, key, refusal, &words)),
        }
    }

    fn gather(&self, prefix: &str, count: usize, deadline: Instant) -> Result<Option<Entries>, StoreError> {
        let what = format!("gather of keys `{prefix}`");
        let (mut found, mut after) = (Entries::new(), String::new());
        loop {
            let message = |call| ToAgent::KvGather {
                call,
                prefix: prefix.to_owned(),
                count: u32::try_from(count).unwrap_or(u32::MAX),
                after: after.clone(),
                timeout_ms: whole_ms(deadline.saturating_duration_since(Instant::now())),
            };
            let (entries, more) = match self.call(&what, MAX_READS, deadline, message)? {
                Ok(Some(Answered::Entries(entries, more))) => (entries, more),
                Ok(_) => {
                    return Err(StoreError::Refused(format!(
                        "{what}: the agent's answer has no entries"
                    )));
                }
                Err((KvRefusal::NotWritten, _)) => return Ok(None),
                Err((refusal, words)) => return Err(refused(&what, prefix, refusal, &words)),
            };
            if more && entries.is_empty() {
                return Err(StoreError::Refused(format!(
                    "{what}: the agent's answer has no end"
                )));
            }
            for (key, value) in entries {
                let value = decode(&what, &value)?;
                after.clone_from(&key);
                found.insert(key, value);
            }
            if !more {
                return Ok(Some(found));
            }
        }
    }

    /// The end of the generation ends every call.
    fn patience(&self) -> Duration {
        GATHER_INTERVAL
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        let what = format!("get of key `{key}`");
        loop {
            let message = |call| ToAgent::KvGet {
                call,
                key: key.to_owned(),
                timeout_ms: whole_ms(deadline.saturating_duration_since(Instant::now())),
            };
            match self.call(&what, MAX_READS, deadline, message)? {
                Ok(Some(Answered::Value(value))) => return decode(&what, &value).map(Some),
                Ok(_) => {
                    return Err(StoreError::Refused(format!(
                        "{what}: the agent's answer has no value"
                    )));
                }
                // The agent has a longest wait of its own.
                Err((KvRefusal::NotWritten, _)) if Instant::now() < deadline => {}
                Err((KvRefusal::NotWritten, _)) => return Ok(None),
                Err((refusal, words)) => return Err(refused(&what, key, refusal, &words)),
            }
        }
    }
}

fn decode(what: &str, base64: &str) -> Result<Vec<u8>, StoreError> {
    let value = STANDARD.decode(base64);
    value.map_err(|e| StoreError::Refused(format!("{what}: the agent's answer is not base64: {e}")))
}

/// The agent's words as an error. The answer to a call may report the end of the generation before the message to
/// everybody does.
fn refused(what: &str, key: &str, refusal: KvRefusal, words: &str) -> StoreError {
    match refusal {
        KvRefusal::Superseded => {
            let cause = words.strip_prefix("generation superseded: ").unwrap_or(words);
            StoreError::Superseded(cause.to_owned())
        }
        KvRefusal::Conflict => StoreError::Conflict(key.to_owned()),
        KvRefusal::Unavailable => StoreError::Unavailable(format!("{what}: {words}")),
        KvRefusal::NotWritten | KvRefusal::Other => StoreError::Refused(format!("{what}: {words}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_mins(1);

    fn store() -> RemoteStore {
        let cancel = Cancel::new();
        let outbox = Arc::new(Outbox::new(PATIENCE, &cancel));
        RemoteStore::new(&outbox, &cancel, GRACE)
    }

    fn soon() -> Instant {
        Instant::now() + PATIENCE
    }

    /// As many calls as may be under way.
    fn full(store: &RemoteStore) -> Vec<(u64, Receiver<Answer>)> {
        (0..MAX_CALLS)
            .map(|_| store.begin(MAX_CALLS, soon()).unwrap())
            .collect()
    }

    #[test]
    fn a_caller_beyond_the_bound_waits_for_an_answer() {
        let store = store();
        let calls = full(&store);
        assert!(store.begin(MAX_CALLS, Instant::now()).is_none());
        std::thread::scope(|scope| {
            let one_more = scope.spawn(|| store.begin(MAX_CALLS, soon()));
            let (number, answer) = &calls[3];
            store.answer(*number, Ok(None));
            assert_eq!(answer.recv_timeout(PATIENCE), Ok(Ok(None)));
            assert!(one_more.join().unwrap().is_some());
        });
    }

    /// The agent is still at a call whose caller has gone, and counts it.
    #[test]
    fn an_abandoned_call_keeps_its_place_until_it_is_answered() {
        let store = store();
        let mut calls = full(&store);
        let (number, abandoned) = calls.remove(0);
        drop(abandoned);
        assert!(store.begin(MAX_CALLS, Instant::now()).is_none());
        store.answer(number, Ok(None));
        assert!(store.begin(MAX_CALLS, Instant::now()).is_some());
    }

    #[test]
    fn the_end_of_the_generation_ends_the_wait_for_a_place() {
        let store = store();
        let _calls = full(&store);
        std::thread::scope(|scope| {
            let one_more = scope.spawn(|| store.begin(MAX_CALLS, soon()));
            store.cancel.cancel("rank 1 died");
            store.end_calls();
            assert!(one_more.join().unwrap().is_none());
        });
    }

    #[test]
    fn a_call_that_begins_after_the_end_of_the_generation_does_not_wait() {
        let store = store();
        store.cancel.cancel("rank 1 died");
        store.end_calls();
        assert_eq!(
            store.get("never", soon()),
            Err(StoreError::Superseded("rank 1 died".into()))
        );
    }
}
