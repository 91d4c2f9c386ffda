//! The key-value store of one generation, as workers see it: within a process, or behind the control socket.

use std::collections::HashMap;
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
/// answer a moment longer. One that is told that the generation is over ends every call at once.
pub trait KeyValue: Send + Sync {
    /// Writes a key; writing the same value again succeeds. After [`StoreError::Unavailable`] it may be written or not.
    fn put(&self, key: &str, value: &[u8], deadline: Instant) -> Result<(), StoreError>;

    /// Reads a key, and waits for it if need be. `None`: no rank had written it by the deadline, and never before that.
    fn get(&self, key: &str, deadline: Instant) -> Result<Option<Vec<u8>>, StoreError>;

    /// The same for a key without which nothing goes on: it is an error that no rank wrote it.
    fn wait_for(&self, key: &str, deadline: Instant) -> Result<Vec<u8>, StoreError> {
        let started = Instant::now();
        self.get(key, deadline)?.ok_or_else(|| StoreError::NotWritten {
            key: key.to_owned(),
            waited_ms: started.elapsed().as_millis() as u64,
        })
    }
}

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
    #[error("key `{0}` was written before with another value")]
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
        match entries.get(key) {
            Some(old) if old != value => Err(StoreError::Conflict(key.to_owned())),
            Some(_) => Ok(()),
            None => {
                entries.insert(key.to_owned(), value.to_vec());
                self.0.written.notify_all();
                Ok(())
            }
        }
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        let mut entries = self.0.entries.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(value) = entries.get(key) {
                return Ok(Some(value.clone()));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return Ok(None);
            }
            entries = self
                .0
                .written
                .wait_timeout(entries, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// How much longer than a call's deadline its answer is waited for. Longer than the agent needs to say itself what is
/// wrong.
pub(super) const GRACE: Duration = ANSWER_GRACE.saturating_mul(2);

/// The store of this generation, asked through the agent.
pub(super) struct RemoteStore {
    pub(super) calls: Arc<Calls>,
    pub(super) outbox: Arc<Outbox>,
    pub(super) cancel: Cancel,
    /// [`GRACE`].
    pub(super) grace: Duration,
}

impl RemoteStore {
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
        let answered = match self.calls.begin(bound, end, &self.cancel) {
            Some(call) => match self.outbox.push(&message(call), end) {
                Ok(()) => {
                    let answer = self.calls.finish(call, end, &self.cancel);
                    answer.ok_or_else(|| unavailable("the agent did not answer"))
                }
                Err(refused) => {
                    self.calls.forget(call);
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

    fn get(&self, key: &str, deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        let what = format!("get of key `{key}`");
        loop {
            let message = |call| ToAgent::KvGet {
                call,
                key: key.to_owned(),
                timeout_ms: whole_ms(deadline.saturating_duration_since(Instant::now())),
            };
            match self.call(&what, MAX_READS, deadline, message)? {
                Ok(value) => {
                    let value = STANDARD.decode(value.unwrap_or_default());
                    return value.map(Some).map_err(|e| {
                        StoreError::Refused(format!("{what}: the agent's answer is not base64: {e}"))
                    });
                }
                // The agent has a longest wait of its own.
                Err((KvRefusal::NotWritten, _)) if Instant::now() < deadline => {}
                Err((KvRefusal::NotWritten, _)) => return Ok(None),
                Err((refusal, words)) => return Err(refused(&what, key, refusal, &words)),
            }
        }
    }
}

/// The agent's words as an error. It may say that the generation is over in the answer to a call before it says so to
/// everybody.
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

/// Blocking reads that may be under way: some calls are left for writes, for which this program's reads may wait.
const MAX_READS: usize = MAX_CALLS - 4;

/// What the agent says to a call: a value for a get, or why it was not done, for this program and in words.
type Answer = Result<Option<String>, (KvRefusal, String)>;

/// The calls that the agent has still to answer. No more are under way than the agent takes: a caller beyond that waits.
#[derive(Default)]
pub(super) struct Calls {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// By number.
    open: HashMap<u64, Call>,
    next: u64,
}

/// One that the agent has still to answer, or has just answered.
enum Call {
    Awaited,
    /// Its caller has gone; the agent is still at it.
    Abandoned,
    Answered(Answer),
}

impl Calls {
    /// Hands an answer to its caller; one that nobody waits for any more is dropped.
    pub(super) fn answer(&self, number: u64, answer: Answer) {
        let mut state = self.lock();
        match state.open.get_mut(&number) {
            Some(call @ Call::Awaited) => *call = Call::Answered(answer),
            Some(Call::Abandoned) => {
                state.open.remove(&number);
            }
            // The agent answers once; it never made up a number.
            Some(Call::Answered(_)) | None => return,
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Lets every caller look again whether the generation is over.
    pub(super) fn wake(&self) {
        // Taken so that a caller between its check and its wait cannot miss the word.
        drop(self.lock());
        self.changed.notify_all();
    }

    /// The number of a new call, as soon as fewer than `bound` are under way; `None` at the deadline or when `cancel` is
    /// set.
    pub(super) fn begin(&self, bound: usize, deadline: Instant, cancel: &Cancel) -> Option<u64> {
        let mut state = self.lock();
        while state.open.len() >= bound {
            state = self.wait(state, time_left(deadline, cancel)?);
        }
        let number = state.next;
        state.next += 1;
        state.open.insert(number, Call::Awaited);
        Some(number)
    }

    /// A call that the agent was not told of.
    fn forget(&self, number: u64) {
        self.lock().open.remove(&number);
        self.changed.notify_all();
    }

    /// Waits for the answer; `None` at the deadline or when `cancel` is set.
    fn finish(&self, number: u64, deadline: Instant, cancel: &Cancel) -> Option<Answer> {
        let mut state = self.lock();
        loop {
            if let Some(Call::Answered(_)) = state.open.get(&number)
                && let Some(Call::Answered(answer)) = state.open.remove(&number)
            {
                drop(state);
                self.changed.notify_all();
                return Some(answer);
            }
            let Some(left) = time_left(deadline, cancel) else {
                state.open.insert(number, Call::Abandoned);
                return None;
            };
            state = self.wait(state, left);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, left: Duration) -> MutexGuard<'a, State> {
        let waited = self.changed.wait_timeout(state, left);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// How long to wait on; `None` at the deadline or when `cancel` is set.
fn time_left(deadline: Instant, cancel: &Cancel) -> Option<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    (left > Duration::ZERO && cancel.cause().is_none()).then_some(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_mins(1);

    #[test]
    fn a_caller_beyond_the_bound_waits_for_an_answer() {
        let (calls, cancel) = (Calls::default(), Cancel::new());
        let soon = Instant::now() + PATIENCE;
        let numbers: Vec<_> = (0..MAX_CALLS)
            .map(|_| calls.begin(MAX_CALLS, soon, &cancel).unwrap())
            .collect();
        assert_eq!(calls.begin(MAX_CALLS, Instant::now(), &cancel), None);
        std::thread::scope(|scope| {
            let one_more = scope.spawn(|| calls.begin(MAX_CALLS, soon, &cancel));
            calls.answer(numbers[3], Ok(None));
            assert_eq!(calls.finish(numbers[3], soon, &cancel), Some(Ok(None)));
            assert!(one_more.join().unwrap().is_some());
        });
    }

    /// The agent is still at a call whose caller has gone, and counts it.
    #[test]
    fn an_abandoned_call_keeps_its_place_until_it_is_answered() {
        let (calls, cancel) = (Calls::default(), Cancel::new());
        let soon = Instant::now() + PATIENCE;
        let numbers: Vec<_> = (0..MAX_CALLS)
            .map(|_| calls.begin(MAX_CALLS, soon, &cancel).unwrap())
            .collect();
        assert_eq!(calls.finish(numbers[0], Instant::now(), &cancel), None);
        assert_eq!(calls.begin(MAX_CALLS, Instant::now(), &cancel), None);
        calls.answer(numbers[0], Ok(None));
        assert!(calls.begin(MAX_CALLS, Instant::now(), &cancel).is_some());
    }

    #[test]
    fn the_end_of_the_generation_ends_the_wait_for_a_place() {
        let (calls, cancel) = (Calls::default(), Cancel::new());
        let soon = Instant::now() + PATIENCE;
        for _ in 0..MAX_CALLS {
            calls.begin(MAX_CALLS, soon, &cancel).unwrap();
        }
        std::thread::scope(|scope| {
            let one_more = scope.spawn(|| calls.begin(MAX_CALLS, soon, &cancel));
            cancel.cancel("rank 1 died");
            calls.wake();
            assert_eq!(one_more.join().unwrap(), None);
        });
    }
}
