//! The key-value store of one generation: write-once entries, blocking reads with deadlines, everything bounded.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::time::Duration;

use ddp_proto::rendezvous::{KvEntries, KvEntry};
use prost::Message as _;
use prost::bytes::Bytes;

use super::event::{CallId, Effect, KvError, Turn};

/// Prefixes of keys that are gathered in one generation: each write looks at all of them.
const MAX_PREFIXES: usize = 64;

/// The entries of one generation and the reads that wait for some.
#[derive(Debug, Default)]
pub(super) struct KvStore {
    entries: BTreeMap<String, Bytes>,
    bytes: usize,
    waiters: BTreeMap<CallId, Waiter>,
    /// Calls that wait for a key that no rank wrote yet.
    by_key: HashMap<String, Vec<CallId>>,
    /// Prefixes that were asked for, from the first call on.
    by_prefix: HashMap<String, Gather>,
    /// No waiter's deadline is before this moment; it may be early, never late.
    next_deadline: Option<Duration>,
}

#[derive(Debug)]
struct Waiter {
    wanted: Wanted,
    asked_at: Duration,
    deadline: Duration,
}

#[derive(Debug)]
enum Wanted {
    Key(String),
    /// So many keys with this prefix.
    Prefix(String, usize),
}

/// What is known of one prefix without looking at all entries.
#[derive(Debug, Default)]
struct Gather {
    /// Keys that begin with it.
    have: usize,
    /// How many of them each call waits for.
    calls: BTreeMap<CallId, usize>,
    /// All of them, encoded once for all calls, until another one is written.
    encoded: Option<Bytes>,
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
        let value = Bytes::from(value);
        for call in self.by_key.remove(&key).unwrap_or_default() {
            if self.waiters.remove(&call).is_some() {
                let result = Ok(value.clone());
                turn.effects.push(Effect::Answer { call, result });
            }
        }
        let prefixes: Vec<String> = self
            .by_prefix
            .keys()
            .filter(|p| key.starts_with(*p))
            .cloned()
            .collect();
        self.entries.insert(key, value);
        for prefix in prefixes {
            self.written(turn, &prefix);
        }
        Ok(())
    }

    /// Another key with this prefix is there: answers those that waited for no more.
    fn written(&mut self, turn: &mut Turn<'_>, prefix: &str) {
        let Some(gather) = self.by_prefix.get_mut(prefix) else {
            return;
        };
        gather.have += 1;
        gather.encoded = None;
        let have = gather.have;
        let done: Vec<CallId> = gather
            .calls
            .extract_if(.., |_, count| *count <= have)
            .map(|(call, _)| call)
            .collect();
        if done.is_empty() {
            return;
        }
        let encoded = self.encoded(prefix);
        for call in done {
            self.waiters.remove(&call);
            let result = Ok(encoded.clone());
            turn.effects.push(Effect::Answer { call, result });
        }
    }

    /// All entries with this prefix, as they go over the wire.
    fn encoded(&mut self, prefix: &str) -> Bytes {
        let encode = || {
            let from = (Bound::Included(prefix), Bound::Unbounded);
            let entries = self.entries.range::<str, _>(from);
            let entries = entries.take_while(|(key, _)| key.starts_with(prefix));
            let entries = entries.map(|(key, value)| KvEntry {
                key: key.clone(),
                value: value.to_vec(),
            });
            let entries = entries.collect();
            Bytes::from(KvEntries { entries }.encode_to_vec())
        };
        match self.by_prefix.get_mut(prefix) {
            Some(gather) => gather.encoded.get_or_insert_with(encode).clone(),
            None => encode(),
        }
    }

    /// Answers a read at once, or lets it wait for at most `timeout`.
    pub(super) fn get(&mut self, turn: &mut Turn<'_>, call: CallId, key: String, timeout: Duration) {
        let result = if let Some(value) = self.entries.get(&key) {
            Ok(value.clone())
        } else if timeout.is_zero() {
            Err(not_written(&key, timeout))
        } else {
            match self.wait(turn, call, Wanted::Key(key.clone()), timeout) {
                Ok(()) => return self.by_key.entry(key).or_default().push(call),
                Err(error) => Err(error),
            }
        };
        turn.effects.push(Effect::Answer { call, result });
    }

    /// Bytes of all keys and values.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Answers with all entries whose keys begin with `prefix`: at once if there are `count` of them, or when there are,
    /// for which it waits for at most `timeout`.
    pub(super) fn gather(
        &mut self,
        turn: &mut Turn<'_>,
        call: CallId,
        (prefix, count): (String, usize),
        timeout: Duration,
    ) {
        let result = match self.known(&prefix) {
            Ok(have) if have >= count => Ok(self.encoded(&prefix)),
            Ok(have) if timeout.is_zero() => Err(too_few(&prefix, have, count, timeout)),
            Ok(_) => match self.wait(turn, call, Wanted::Prefix(prefix.clone(), count), timeout) {
                Ok(()) => {
                    if let Some(gather) = self.by_prefix.get_mut(&prefix) {
                        gather.calls.insert(call, count);
                    }
                    return;
                }
                Err(error) => Err(error),
            },
            Err(error) => Err(error),
        };
        turn.effects.push(Effect::Answer { call, result });
    }

    /// How many keys begin with this prefix; from now on they are counted.
    fn known(&mut self, prefix: &str) -> Result<usize, KvError> {
        if let Some(gather) = self.by_prefix.get(prefix) {
            return Ok(gather.have);
        }
        if self.by_prefix.len() >= MAX_PREFIXES {
            return Err(KvError::TooMuch(format!(
                "cannot gather keys with `{}`: {MAX_PREFIXES} prefixes are gathered in this generation, the maximum",
                clip(prefix, 32)
            )));
        }
        let from = (Bound::Included(prefix), Bound::Unbounded);
        let entries = self.entries.range::<str, _>(from);
        let have = entries.take_while(|(key, _)| key.starts_with(prefix)).count();
        let gather = Gather {
            have,
            ..Gather::default()
        };
        self.by_prefix.insert(prefix.to_owned(), gather);
        Ok(have)
    }

    /// Lets a call wait.
    fn wait(
        &mut self,
        turn: &Turn<'_>,
        call: CallId,
        wanted: Wanted,
        timeout: Duration,
    ) -> Result<(), KvError> {
        let (limits, now) = (turn.config.kv, turn.at.now);
        let (Wanted::Key(key) | Wanted::Prefix(key, _)) = &wanted;
        if key.len() > limits.key_bytes || self.waiters.len() >= limits.waiters {
            return Err(KvError::TooMuch(format!(
                "cannot wait for key `{}`: {} reads wait already, keys have at most {} bytes",
                clip(key, 32),
                self.waiters.len(),
                limits.key_bytes
            )));
        }
        let deadline = now + timeout.min(limits.wait);
        self.next_deadline = Some(self.next_deadline.map_or(deadline, |next| next.min(deadline)));
        self.waiters.insert(
            call,
            Waiter {
                wanted,
                asked_at: now,
                deadline,
            },
        );
        Ok(())
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
        let (by_key, by_prefix) = (&mut self.by_key, &mut self.by_prefix);
        for (call, waiter) in self.waiters.extract_if(.., |_, waiter| waiter.deadline <= now) {
            let waited = waiter.deadline.saturating_sub(waiter.asked_at);
            let error = match waiter.wanted {
                Wanted::Key(key) => {
                    if let Some(calls) = by_key.get_mut(&key) {
                        calls.retain(|&other| other != call);
                        if calls.is_empty() {
                            by_key.remove(&key);
                        }
                    }
                    not_written(&key, waited)
                }
                Wanted::Prefix(prefix, count) => {
                    let gather = by_prefix.get_mut(&prefix);
                    let have = gather.map_or(0, |gather| {
                        gather.calls.remove(&call);
                        gather.have
                    });
                    too_few(&prefix, have, count, waited)
                }
            };
            turn.effects.push(Effect::Answer {
                call,
                result: Err(error),
            });
        }
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

fn too_few(prefix: &str, have: usize, count: usize, waited: Duration) -> KvError {
    KvError::NotWritten(format!(
        "only {have} of {count} keys with `{prefix}` were written within {waited:?}"
    ))
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

    fn keys(answer: &Result<Vec<u8>, String>) -> Vec<String> {
        let entries = KvEntries::decode(answer.as_deref().unwrap()).unwrap().entries;
        entries.into_iter().map(|entry| entry.key).collect()
    }

    #[test]
    fn a_gather_is_answered_when_all_are_there_and_all_readers_share_one_buffer() {
        let config = Config::default();
        let (mut store, mut turn) = (KvStore::default(), turn(&config));
        store.put(&mut turn, "rank/1".into(), vec![1]).unwrap();
        store.put(&mut turn, "rank".into(), vec![9]).unwrap();
        let want = |count| ("rank/".to_owned(), count);
        store.gather(&mut turn, CallId(1), want(2), SECOND);
        store.gather(&mut turn, CallId(2), want(3), SECOND);
        store.gather(&mut turn, CallId(3), want(2), SECOND);
        store.gather(&mut turn, CallId(4), want(0), Duration::ZERO);
        assert_eq!(keys(&answers(&turn.effects)[0].1), ["rank/1"], "with 0, at once");
        turn.effects.clear();
        store.put(&mut turn, "rank/0".into(), vec![0]).unwrap();
        let told = answers(&turn.effects);
        assert_eq!(told.iter().map(|(call, _)| *call).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(keys(&told[0].1), ["rank/0", "rank/1"]);
        let buffers = turn.effects.iter().map(|effect| match effect {
            Effect::Answer {
                result: Ok(value), ..
            } => value.as_ptr(),
            other => panic!("unexpected effect: {other:?}"),
        });
        let buffers: Vec<_> = buffers.collect();
        assert_eq!(buffers[0], buffers[1]);
        turn.effects.clear();
        turn.at.now = SECOND;
        store.expire(&mut turn);
        let words = "only 2 of 3 keys with `rank/` were written within 1s".to_owned();
        assert_eq!(answers(&turn.effects), [(2, Err(words))]);
        turn.effects.clear();
        store.put(&mut turn, "rank/2".into(), vec![]).unwrap();
        assert!(turn.effects.is_empty(), "it has been answered");
        store.gather(&mut turn, CallId(5), want(3), Duration::ZERO);
        assert_eq!(keys(&answers(&turn.effects)[0].1), ["rank/0", "rank/1", "rank/2"]);
    }

    #[test]
    fn the_number_of_prefixes_is_bounded_and_a_generation_forgets_them() {
        let config = Config::default();
        let (mut store, mut turn) = (KvStore::default(), turn(&config));
        let ask = |store: &mut KvStore, turn: &mut Turn<'_>, prefix: usize| {
            turn.effects.clear();
            store.gather(turn, CallId(prefix as u64), (prefix.to_string(), 0), SECOND);
            answers(&turn.effects)[0].1.clone()
        };
        for prefix in 0..MAX_PREFIXES {
            assert!(ask(&mut store, &mut turn, prefix).is_ok());
        }
        assert!(ask(&mut store, &mut turn, MAX_PREFIXES).is_err());
        turn.effects.clear();
        store.end(&mut turn, "over");
        assert!(ask(&mut store, &mut turn, MAX_PREFIXES).is_ok());
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
