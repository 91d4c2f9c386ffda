//! The key-value store of one generation: write-once entries, blocking reads with deadlines, everything bounded.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::event::{CallId, Effect, KvError, Turn};

/// The entries of one generation and the reads that wait for some.
#[derive(Debug, Default)]
pub(super) struct KvStore {
    entries: HashMap<String, Arc<Vec<u8>>>,
    bytes: usize,
    waiters: BTreeMap<CallId, Waiter>,
    /// Calls that wait for a key that no rank wrote yet.
    by_key: HashMap<String, Vec<CallId>>,
    /// No waiter's deadline is before this moment; it may be early, never late.
    next_deadline: Option<Duration>,
}

#[derive(Debug)]
struct Waiter {
    key: String,
    asked_at: Duration,
    deadline: Duration,
}

impl KvStore {
    /// Writes an entry and answers all reads that waited for it.
    pub(super) fn put(&mut self, turn: &mut Turn<'_>, key: String, value: Vec<u8>) -> Result<(), KvError> {
        let limits = turn.config.kv;
        if key.len() > limits.key_bytes {
            return Err(KvError::TooMuch(format!(
                "key `{}…` has {} bytes, at most {} are allowed",
                clip(&key, 32),
                key.len(),
                limits.key_bytes
            )));
        }
        if value.len() > limits.value_bytes {
            return Err(KvError::TooMuch(format!(
                "value of `{key}` has {} bytes, at most {} are allowed",
                value.len(),
                limits.value_bytes
            )));
        }
        if let Some(old) = self.entries.get(&key) {
            return if **old == value {
                Ok(())
            } else {
                Err(KvError::Exists(format!(
                    "key `{key}` is already written with a different value ({} bytes, now {} bytes)\n  \
                     hint: keys are write-once in a generation; use a different key for each value",
                    old.len(),
                    value.len()
                )))
            };
        }
        let bytes = self.bytes + key.len() + value.len();
        if self.entries.len() >= limits.entries || bytes > limits.total_bytes {
            return Err(KvError::TooMuch(format!(
                "the store of this generation is full ({} entries, {} bytes): `{key}` was not written",
                self.entries.len(),
                self.bytes
            )));
        }
        self.bytes = bytes;
        let value = Arc::new(value);
        for call in self.by_key.remove(&key).unwrap_or_default() {
            if self.waiters.remove(&call).is_some() {
                turn.effects.push(Effect::Answer {
                    call,
                    result: Ok(Arc::clone(&value)),
                });
            }
        }
        self.entries.insert(key, value);
        Ok(())
    }

    /// Answers a read at once, or lets it wait for at most `timeout`.
    pub(super) fn get(&mut self, turn: &mut Turn<'_>, call: CallId, key: String, timeout: Duration) {
        let (limits, now) = (turn.config.kv, turn.at.now);
        let result = if let Some(value) = self.entries.get(&key) {
            Ok(Arc::clone(value))
        } else if timeout.is_zero() {
            Err(not_written(&key, timeout))
        } else if key.len() > limits.key_bytes || self.waiters.len() >= limits.waiters {
            Err(KvError::TooMuch(format!(
                "cannot wait for key `{}`: {} reads wait already, keys have at most {} bytes",
                clip(&key, 32),
                self.waiters.len(),
                limits.key_bytes
            )))
        } else {
            let deadline = now + timeout.min(limits.wait);
            self.next_deadline = Some(self.next_deadline.map_or(deadline, |next| next.min(deadline)));
            self.by_key.entry(key.clone()).or_default().push(call);
            self.waiters.insert(
                call,
                Waiter {
                    key,
                    asked_at: now,
                    deadline,
                },
            );
            return;
        };
        turn.effects.push(Effect::Answer { call, result });
    }

    /// Bytes of all keys and values.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// When the next waiting read may have to be answered.
    pub(super) fn next_deadline(&self) -> Option<Duration> {
        self.next_deadline
    }

    /// Answers the reads whose deadline has passed.
    pub(super) fn expire(&mut self, turn: &mut Turn<'_>) {
        let now = turn.at.now;
        if self.next_deadline.is_none_or(|next| next > now) {
            return;
        }
        let by_key = &mut self.by_key;
        self.waiters.retain(|&call, waiter| {
            let waits = waiter.deadline > now;
            if !waits {
                let result = Err(not_written(
                    &waiter.key,
                    waiter.deadline.saturating_sub(waiter.asked_at),
                ));
                turn.effects.push(Effect::Answer { call, result });
                if let Some(calls) = by_key.get_mut(&waiter.key) {
                    calls.retain(|&other| other != call);
                    if calls.is_empty() {
                        by_key.remove(&waiter.key);
                    }
                }
            }
            waits
        });
        self.next_deadline = self.waiters.values().map(|waiter| waiter.deadline).min();
    }

    /// Ends the store: every waiting read fails with the cause, every entry is gone.
    pub(super) fn end(&mut self, turn: &mut Turn<'_>, cause: &str) {
        for &call in self.waiters.keys() {
            turn.effects.push(Effect::Answer {
                call,
                result: Err(KvError::Superseded(cause.to_owned())),
            });
        }
        *self = Self::default();
    }
}

fn not_written(key: &str, waited: Duration) -> KvError {
    KvError::NotWritten(format!("no rank wrote key `{key}` within {waited:?}"))
}

/// At most `bytes` bytes of `text`, cut at a character.
pub(super) fn clip(text: &str, bytes: usize) -> &str {
    let end = (0..=bytes.min(text.len()))
        .rev()
        .find(|&end| text.is_char_boundary(end));
    &text[..end.unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::event::About;
    use crate::rendezvous::{At, Config, KvLimits};

    const SECOND: Duration = Duration::from_secs(1);

    fn turn(config: &Config) -> Turn<'_> {
        Turn {
            at: At {
                now: Duration::ZERO,
                dice: 0.0,
                id: 0,
            },
            config,
            effects: Vec::new(),
            about: About::default(),
        }
    }

    fn answers(effects: &[Effect]) -> Vec<(u64, Result<Vec<u8>, String>)> {
        effects
            .iter()
            .map(|effect| match effect {
                Effect::Answer { call, result } => (
                    call.0,
                    result.as_ref().map(|v| v.to_vec()).map_err(ToString::to_string),
                ),
                other => panic!("unexpected effect: {other:?}"),
            })
            .collect()
    }

    #[test]
    fn a_waiting_read_is_answered_by_the_write_once() {
        let config = Config::default();
        let (mut store, mut turn) = (KvStore::default(), turn(&config));
        store.get(&mut turn, CallId(1), "id".into(), SECOND);
        store.get(&mut turn, CallId(2), "id".into(), SECOND);
        assert!(turn.effects.is_empty());
        store.put(&mut turn, "id".into(), vec![7]).unwrap();
        assert_eq!(answers(&turn.effects), [(1, Ok(vec![7])), (2, Ok(vec![7]))]);
        turn.effects.clear();
        turn.at.now = SECOND;
        store.expire(&mut turn);
        assert!(turn.effects.is_empty(), "answered reads do not expire");
    }

    #[test]
    fn keys_are_write_once_but_the_same_value_may_come_again() {
        let config = Config::default();
        let (mut store, mut turn) = (KvStore::default(), turn(&config));
        store.put(&mut turn, "k".into(), vec![1]).unwrap();
        store.put(&mut turn, "k".into(), vec![1]).unwrap();
        let error = store.put(&mut turn, "k".into(), vec![2, 3]).unwrap_err();
        insta::assert_snapshot!(error, @r"
        key `k` is already written with a different value (1 bytes, now 2 bytes)
          hint: keys are write-once in a generation; use a different key for each value
        ");
    }

    #[test]
    fn reads_expire_at_their_own_deadline() {
        let config = Config::default();
        let (mut store, mut turn) = (KvStore::default(), turn(&config));
        store.get(&mut turn, CallId(1), "a".into(), SECOND);
        store.get(&mut turn, CallId(2), "a".into(), 3 * SECOND);
        assert_eq!(store.next_deadline(), Some(SECOND));
        turn.at.now = SECOND;
        store.expire(&mut turn);
        assert_eq!(
            answers(&turn.effects),
            [(1, Err("no rank wrote key `a` within 1s".into()))]
        );
        assert_eq!(store.next_deadline(), Some(3 * SECOND));
        turn.effects.clear();
        store.put(&mut turn, "a".into(), vec![]).unwrap();
        assert_eq!(answers(&turn.effects), [(2, Ok(vec![]))]);
    }

    #[test]
    fn everything_is_bounded() {
        let config = Config {
            kv: KvLimits {
                key_bytes: 4,
                value_bytes: 4,
                entries: 2,
                total_bytes: 10,
                waiters: 1,
                wait: SECOND,
            },
            ..Config::default()
        };
        let (mut store, mut turn) = (KvStore::default(), turn(&config));
        let mut put = |key: &str, len: usize| store.put(&mut turn, key.into(), vec![0; len]);
        assert!(matches!(put("12345", 0), Err(KvError::TooMuch(_))));
        assert!(matches!(put("k", 5), Err(KvError::TooMuch(_))));
        put("a", 4).unwrap();
        assert!(
            matches!(put("b2345"[..4].as_ref(), 4), Err(KvError::TooMuch(_))),
            "bytes"
        );
        put("b", 4).unwrap();
        assert!(matches!(put("", 0), Err(KvError::TooMuch(_))), "entries");
        store.get(&mut turn, CallId(1), "x".into(), 9 * SECOND);
        assert_eq!(
            store.next_deadline(),
            Some(SECOND),
            "no wait is longer than the bound"
        );
        store.get(&mut turn, CallId(2), "x".into(), SECOND);
        assert!(matches!(
            turn.effects.as_slice(),
            [Effect::Answer {
                call: CallId(2),
                result: Err(KvError::TooMuch(_))
            }]
        ));
    }

    #[test]
    fn the_end_of_a_generation_ends_the_reads() {
        let config = Config::default();
        let (mut store, mut turn) = (KvStore::default(), turn(&config));
        store.get(&mut turn, CallId(1), "x".into(), SECOND);
        store.end(&mut turn, "rank 1 (node `b`) died of SIGKILL");
        let words = "generation superseded: rank 1 (node `b`) died of SIGKILL".to_owned();
        assert_eq!(answers(&turn.effects), [(1, Err(words))]);
        assert_eq!(store.next_deadline(), None);
    }
}
