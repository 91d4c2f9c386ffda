//! The key-value store behind the control socket.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ddp_proto::control::{ANSWER_GRACE, KvRefusal, MAX_CALLS, MAX_VALUE_BYTES, PUT_BOUND, ToAgent, whole_ms};

use super::calls::{Answer, Calls, MAX_READS};
use super::outbox::{Outbox, Refused};
use super::{Cancel, KeyValue, StoreError};

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
