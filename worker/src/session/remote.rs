//! The key-value store behind the control socket.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ddp_proto::control::{MAX_VALUE_BYTES, ToAgent};

use super::outbox::{Outbox, Refused};
use super::{Cancel, KeyValue, StoreError};

/// How long a put waits for its answer.
const PUT_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest wait asked of the agent in one call; a longer deadline is cut to it.
const MAX_GET_TIMEOUT: Duration = Duration::from_hours(24);

type Answer = Result<Option<String>, String>;

/// Calls that wait for their answer, by number.
#[derive(Default)]
pub(super) struct Calls {
    waiting: Mutex<HashMap<u64, Option<Answer>>>,
    changed: Condvar,
    next: AtomicU64,
}

impl Calls {
    /// Hands an answer to its caller; answers that nobody waits for any more are dropped.
    pub(super) fn answer(&self, call: u64, answer: Answer) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = waiting.get_mut(&call) {
            *slot = Some(answer);
            self.changed.notify_all();
        }
    }

    /// Lets every caller look again whether the generation is over.
    pub(super) fn wake(&self) {
        // Taken so that a caller between its check and its wait cannot miss the word.
        drop(self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    fn begin(&self) -> u64 {
        let call = self.next.fetch_add(1, Ordering::Relaxed);
        self.waiting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(call, None);
        call
    }

    /// Waits for the answer of `call`; `None` at the deadline or when `cancel` is set.
    fn finish(&self, call: u64, deadline: Instant, cancel: &Cancel) -> Option<Answer> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if waiting.get(&call).is_some_and(Option::is_some) {
                return waiting.remove(&call).flatten();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left == Duration::ZERO || cancel.cause().is_some() {
                waiting.remove(&call);
                return None;
            }
            waiting = self
                .changed
                .wait_timeout(waiting, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// The store of this generation, asked through the agent.
pub(super) struct RemoteStore {
    pub(super) calls: Arc<Calls>,
    pub(super) outbox: Arc<Outbox>,
    pub(super) cancel: Cancel,
}

impl RemoteStore {
    /// One call. `Ok(None)` means that no answer came before the deadline.
    fn call(
        &self,
        message: impl FnOnce(u64) -> ToAgent,
        deadline: Instant,
    ) -> Result<Option<Answer>, StoreError> {
        if let Some(cause) = self.cancel.cause() {
            return Err(StoreError::Superseded(cause.to_owned()));
        }
        let call = self.calls.begin();
        let answer = match self.outbox.push(&message(call), deadline) {
            Ok(()) => self.calls.finish(call, deadline, &self.cancel),
            Err(refused) => {
                self.calls.finish(call, Instant::now(), &self.cancel);
                if refused == Refused::Full {
                    return Err(StoreError::Unavailable(
                        "the agent does not read its control socket".into(),
                    ));
                }
                None
            }
        };
        match (answer, self.cancel.cause()) {
            (Some(answer), _) => Ok(Some(answer)),
            (None, Some(cause)) => Err(StoreError::Superseded(cause.to_owned())),
            (None, None) => Ok(None),
        }
    }
}

impl KeyValue for RemoteStore {
    fn put(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        if value.len() > MAX_VALUE_BYTES {
            return Err(StoreError::Unavailable(format!(
                "the value of key `{key}` has {} bytes, more than {MAX_VALUE_BYTES}",
                value.len()
            )));
        }
        let message = |call| ToAgent::KvPut {
            call,
            key: key.to_owned(),
            value: STANDARD.encode(value),
        };
        match self.call(message, Instant::now() + PUT_TIMEOUT)? {
            Some(Ok(_)) => Ok(()),
            Some(Err(words)) => Err(refused(&format!("put of key `{key}`"), &words)),
            None => Err(StoreError::Unavailable(format!(
                "put of key `{key}` was not answered within {} s",
                PUT_TIMEOUT.as_secs()
            ))),
        }
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>, StoreError> {
        let started = Instant::now();
        let timeout = deadline.saturating_duration_since(started).min(MAX_GET_TIMEOUT);
        let message = |call| ToAgent::KvGet {
            call,
            key: key.to_owned(),
            timeout_ms: timeout.as_millis() as u64,
        };
        let timed_out = || StoreError::TimedOut {
            key: key.to_owned(),
            waited_ms: started.elapsed().as_millis() as u64,
        };
        match self.call(message, started + timeout)? {
            Some(Ok(value)) => STANDARD.decode(value.unwrap_or_default()).map_err(|e| {
                StoreError::Unavailable(format!("the agent's answer for key `{key}` is not base64: {e}"))
            }),
            // The agent's own clock may run out a moment before ours.
            Some(Err(_)) if started.elapsed() >= timeout => Err(timed_out()),
            Some(Err(words)) => Err(refused(&format!("get of key `{key}`"), &words)),
            None => Err(timed_out()),
        }
    }
}

/// The agent's words as an error. It may say that the generation is over in the answer to a call before it
/// says so to everybody.
fn refused(what: &str, words: &str) -> StoreError {
    match words.strip_prefix("generation superseded: ") {
        Some(cause) => StoreError::Superseded(cause.to_owned()),
        None => StoreError::Unavailable(format!("{what}: {words}")),
    }
}
