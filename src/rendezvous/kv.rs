//! The key-value store of one generation: write-once entries, blocking reads with deadlines, everything bounded.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;
use std::time::Duration;

use ddp_proto::rendezvous::{KvEntries, KvEntry, KvGatherRequest, KvGetRequest};
use prost::Message as _;
use prost::bytes::Bytes;

use super::context::ApplyContext;
use super::event::{CallId, Effect, KvError};
use super::messages::clip;
use super::store_totals::Load;

/// Prefixes of keys that are waited for at once: each write looks at all of them.
const MAX_PREFIXES: usize = 64;

/// The entries of one generation and the reads that wait for some.
#[derive(Debug, Default)]
pub(super) struct KvStore {
    entries: BTreeMap<String, Bytes>,
    bytes: usize,
    waiters: BTreeMap<CallId, Waiter>,
    /// The same calls by their deadlines.
    deadlines: BTreeSet<(Duration, CallId)>,
    /// Calls that wait for a key that no rank wrote yet.
    by_key: HashMap<String, BTreeSet<CallId>>,
    /// Prefixes that calls wait for.
    by_prefix: HashMap<String, Gather>,
    /// The last answer to a gather, until a key with its prefix is written: all nodes ask for the same.
    gathered: Option<Gathered>,
}

#[derive(Debug)]
struct Waiter {
    wanted: Wanted,
    asked_at: Duration,
    deadline: Duration,
}

/// A read of the store of one generation, by a node.
pub(super) struct Read {
    pub(super) job_id: String,
    pub(super) incarnation: String,
    pub(super) generation: u64,
    pub(super) assignment_id: String,
    pub(super) wanted: Wanted,
    /// The longest wait.
    pub(super) timeout: Duration,
}

/// What a read is for.
#[derive(Debug)]
pub(super) enum Wanted {
    Key(String),
    /// All keys with this prefix, once this number of them is written.
    Prefix(String, usize),
}

impl From<KvGetRequest> for Read {
    fn from(request: KvGetRequest) -> Self {
        Self {
            job_id: request.job_id,
            incarnation: request.incarnation,
            generation: request.generation,
            assignment_id: request.assignment_id,
            wanted: Wanted::Key(request.key),
            timeout: Duration::from_millis(request.timeout_ms.into()),
        }
    }
}

impl From<KvGatherRequest> for Read {
    fn from(request: KvGatherRequest) -> Self {
        Self {
            job_id: request.job_id,
            incarnation: request.incarnation,
            generation: request.generation,
            assignment_id: request.assignment_id,
            wanted: Wanted::Prefix(request.prefix, request.count as usize),
            timeout: Duration::from_millis(request.timeout_ms.into()),
        }
    }
}

/// What is known of a prefix without looking at all entries.
#[derive(Debug, Default)]
struct Gather {
    /// Keys that begin with it.
    have: usize,
    /// How many of them each call waits for: those that want the fewest are first.
    calls: BTreeSet<(usize, CallId)>,
}

#[derive(Debug)]
struct Gathered {
    prefix: String,
    have: usize,
    /// All entries with the prefix, as they go over the wire.
    encoded: Bytes,
}

impl KvStore {
    /// Writes an entry and answers all reads that waited for it.
    pub(super) fn put(
        &mut self,
        context: &mut ApplyContext<'_>,
        key: String,
        value: Vec<u8>,
    ) -> Result<(), KvError> {
        let limits = context.config.kv;
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
            if self.forget(call).is_some() {
                let result = Ok(value.clone());
                context.effects.push(Effect::Answer { call, result });
            }
        }
        let prefixes: Vec<String> = self
            .by_prefix
            .keys()
            .filter(|p| key.starts_with(*p))
            .cloned()
            .collect();
        if self
            .gathered
            .as_ref()
            .is_some_and(|last| key.starts_with(&last.prefix))
        {
            self.gathered = None;
        }
        self.entries.insert(key, value);
        for prefix in prefixes {
            self.written(context, &prefix);
        }
        Ok(())
    }

    /// Another key with this prefix is there: answers those that waited for no more.
    fn written(&mut self, context: &mut ApplyContext<'_>, prefix: &str) {
        let Some(gather) = self.by_prefix.get_mut(prefix) else {
            return;
        };
        gather.have += 1;
        let have = gather.have;
        let enough = ..=(have, CallId(u64::MAX));
        let done = gather.calls.extract_if(enough, |_| true);
        let done: Vec<CallId> = done.map(|(_, call)| call).collect();
        if gather.calls.is_empty() {
            self.by_prefix.remove(prefix);
        }
        if done.is_empty() {
            return;
        }
        let encoded = self.encoded(context, prefix);
        for call in done {
            self.forget(call);
            let result = encoded.clone();
            context.effects.push(Effect::Answer { call, result });
        }
    }

    fn with_prefix<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a String, &'a Bytes)> {
        let from = (Bound::Included(prefix), Bound::Unbounded);
        let entries = self.entries.range::<str, _>(from);
        entries.take_while(move |(key, _)| key.starts_with(prefix))
    }

    /// All entries with this prefix, encoded once for all calls that ask one after the other.
    fn encoded(&mut self, context: &mut ApplyContext<'_>, prefix: &str) -> Result<Bytes, KvError> {
        if let Some(last) = self.gathered.as_ref().filter(|last| last.prefix == prefix) {
            return Ok(last.encoded.clone());
        }
        if !context.answers.have_room(&context.config.kv) {
            return Err(KvError::TooMuch(format!(
                "cannot gather keys with `{}`: callers of this daemon have not read what they gathered before",
                clip(prefix, 32)
            )));
        }
        let entries: Vec<KvEntry> = self
            .with_prefix(prefix)
            .map(|(key, value)| KvEntry {
                key: key.clone(),
                value: value.to_vec(),
            })
            .collect();
        let have = entries.len();
        let encoded = Bytes::from(KvEntries { entries }.encode_to_vec());
        self.gathered = Some(Gathered {
            prefix: prefix.to_owned(),
            have,
            encoded: encoded.clone(),
        });
        context.answers.add(encoded.clone());
        Ok(encoded)
    }

    /// Answers a read at once, or lets it wait for at most `timeout`.
    pub(super) fn read(
        &mut self,
        context: &mut ApplyContext<'_>,
        call: CallId,
        wanted: Wanted,
        timeout: Duration,
    ) {
        let result = match self.found(context, &wanted) {
            Some(result) => result,
            None if timeout.is_zero() => Err(self.not_written(&wanted, timeout)),
            None => match self.wait(context, call, wanted, timeout) {
                Ok(()) => return,
                Err(error) => Err(error),
            },
        };
        context.effects.push(Effect::Answer { call, result });
    }

    /// The answer to a read that need not wait.
    fn found(&mut self, context: &mut ApplyContext<'_>, wanted: &Wanted) -> Option<Result<Bytes, KvError>> {
        match wanted {
            Wanted::Key(key) => self.entries.get(key).cloned().map(Ok),
            Wanted::Prefix(prefix, _) if prefix.len() > context.config.kv.key_bytes => {
                let words = format!("no key begins with the {} bytes of this prefix", prefix.len());
                Some(Err(KvError::TooMuch(words)))
            }
            Wanted::Prefix(prefix, count) => {
                (self.count(prefix) >= *count).then(|| self.encoded(context, prefix))
            }
        }
    }

    /// What it takes.
    pub(super) fn load(&self) -> Load {
        Load {
            entries: self.entries.len(),
            bytes: self.bytes,
            waiters: self.waiters.len(),
        }
    }

    /// Nobody waits for the answer of this read any more.
    pub(super) fn cancel(&mut self, call: CallId) {
        if let Some(waiter) = self.forget(call) {
            self.strike_out(call, &waiter.wanted);
        }
    }

    /// The read waits no longer. What it wanted may still name it.
    fn forget(&mut self, call: CallId) -> Option<Waiter> {
        let waiter = self.waiters.remove(&call)?;
        self.deadlines.remove(&(waiter.deadline, call));
        Some(waiter)
    }

    /// Takes a read from the list of those that want the same.
    fn strike_out(&mut self, call: CallId, wanted: &Wanted) {
        match wanted {
            Wanted::Key(key) => {
                if let Some(calls) = self.by_key.get_mut(key) {
                    calls.remove(&call);
                    if calls.is_empty() {
                        self.by_key.remove(key);
                    }
                }
            }
            Wanted::Prefix(prefix, count) => {
                if let Some(gather) = self.by_prefix.get_mut(prefix) {
                    gather.calls.remove(&(*count, call));
                    if gather.calls.is_empty() {
                        self.by_prefix.remove(prefix);
                    }
                }
            }
        }
    }

    /// How many keys begin with this prefix.
    fn count(&self, prefix: &str) -> usize {
        let waited_for = self.by_prefix.get(prefix).map(|gather| gather.have);
        let last = self.gathered.as_ref().filter(|last| last.prefix == prefix);
        waited_for
            .or(last.map(|last| last.have))
            .unwrap_or_else(|| self.with_prefix(prefix).count())
    }

    /// Lets a call wait.
    fn wait(
        &mut self,
        context: &ApplyContext<'_>,
        call: CallId,
        wanted: Wanted,
        timeout: Duration,
    ) -> Result<(), KvError> {
        let (limits, now) = (context.config.kv, context.at.now);
        if let Wanted::Prefix(prefix, _) = &wanted
            && !self.by_prefix.contains_key(prefix)
            && self.by_prefix.len() >= MAX_PREFIXES
        {
            return Err(KvError::TooMuch(format!(
                "cannot gather keys with `{}`: {MAX_PREFIXES} prefixes are waited for, the maximum",
                clip(prefix, 32)
            )));
        }
        let (Wanted::Key(key) | Wanted::Prefix(key, _)) = &wanted;
        if key.len() > limits.key_bytes || self.waiters.len() >= limits.waiters {
            return Err(KvError::TooMuch(format!(
                "cannot wait for key `{}`: {} reads wait already, keys have at most {} bytes",
                clip(key, 32),
                self.waiters.len(),
                limits.key_bytes
            )));
        }
        match &wanted {
            Wanted::Key(key) => {
                self.by_key.entry(key.clone()).or_default().insert(call);
            }
            Wanted::Prefix(prefix, count) => {
                let have = self.count(prefix);
                let gather = self.by_prefix.entry(prefix.clone()).or_default();
                gather.have = have;
                gather.calls.insert((*count, call));
            }
        }
        let deadline = now + timeout.min(limits.wait);
        self.deadlines.insert((deadline, call));
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

    /// When the next waiting read has to be answered.
    pub(super) fn next_deadline(&self) -> Option<Duration> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// Answers the reads whose deadline has passed.
    pub(super) fn expire(&mut self, context: &mut ApplyContext<'_>) {
        let now = context.at.now;
        while let Some(&(deadline, call)) = self.deadlines.first()
            && deadline <= now
        {
            self.deadlines.pop_first();
            let Some(waiter) = self.waiters.remove(&call) else {
                continue;
            };
            let waited = deadline.saturating_sub(waiter.asked_at);
            let result = Err(self.not_written(&waiter.wanted, waited));
            self.strike_out(call, &waiter.wanted);
            context.effects.push(Effect::Answer { call, result });
        }
    }

    fn not_written(&self, wanted: &Wanted, waited: Duration) -> KvError {
        KvError::NotWritten(match wanted {
            Wanted::Key(key) => format!("no rank wrote key `{key}` within {waited:?}"),
            Wanted::Prefix(prefix, count) => {
                let have = self.count(prefix);
                format!("only {have} of {count} keys with `{prefix}` were written within {waited:?}")
            }
        })
    }

    /// Ends the store: every waiting read fails with the cause, every entry is gone.
    pub(super) fn end(&mut self, context: &mut ApplyContext<'_>, cause: &str) {
        for &call in self.waiters.keys() {
            context.effects.push(Effect::Answer {
                call,
                result: Err(KvError::Superseded(cause.to_owned())),
            });
        }
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::event::About;
    use crate::rendezvous::store_totals::Answers;
    use crate::rendezvous::{At, Config, KvLimits, Secret};

    const SECOND: Duration = Duration::from_secs(1);

    fn context(config: &Config) -> ApplyContext<'_> {
        ApplyContext {
            at: At {
                now: Duration::ZERO,
                dice: 0.0,
                id: 0,
                secret: Secret::new([0; 32]),
            },
            config,
            effects: Vec::new(),
            about: About::default(),
            answers: Answers::default(),
        }
    }

    impl KvStore {
        fn get(&mut self, context: &mut ApplyContext<'_>, call: CallId, key: String, timeout: Duration) {
            self.read(context, call, Wanted::Key(key), timeout);
        }

        fn gather(
            &mut self,
            context: &mut ApplyContext<'_>,
            call: u64,
            prefix: &str,
            count: usize,
            timeout: Duration,
        ) {
            self.read(
                context,
                CallId(call),
                Wanted::Prefix(prefix.to_owned(), count),
                timeout,
            );
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
        let (mut store, mut context) = (KvStore::default(), context(&config));
        store.get(&mut context, CallId(1), "id".into(), SECOND);
        store.get(&mut context, CallId(2), "id".into(), SECOND);
        assert!(context.effects.is_empty());
        store.put(&mut context, "id".into(), vec![7]).unwrap();
        assert_eq!(answers(&context.effects), [(1, Ok(vec![7])), (2, Ok(vec![7]))]);
        context.effects.clear();
        context.at.now = SECOND;
        store.expire(&mut context);
        assert!(context.effects.is_empty(), "answered reads do not expire");
    }

    #[test]
    fn keys_are_write_once_but_the_same_value_may_come_again() {
        let config = Config::default();
        let (mut store, mut context) = (KvStore::default(), context(&config));
        store.put(&mut context, "k".into(), vec![1]).unwrap();
        store.put(&mut context, "k".into(), vec![1]).unwrap();
        let error = store.put(&mut context, "k".into(), vec![2, 3]).unwrap_err();
        insta::assert_snapshot!(error, @r"
        key `k` is already written with a different value (1 bytes, now 2 bytes)
          hint: keys are write-once in a generation; use a different key for each value
        ");
    }

    #[test]
    fn reads_expire_at_their_own_deadline() {
        let config = Config::default();
        let (mut store, mut context) = (KvStore::default(), context(&config));
        store.get(&mut context, CallId(1), "a".into(), SECOND);
        store.get(&mut context, CallId(2), "a".into(), 3 * SECOND);
        assert_eq!(store.next_deadline(), Some(SECOND));
        context.at.now = SECOND;
        store.expire(&mut context);
        assert_eq!(
            answers(&context.effects),
            [(1, Err("no rank wrote key `a` within 1s".into()))]
        );
        assert_eq!(store.next_deadline(), Some(3 * SECOND));
        context.effects.clear();
        store.put(&mut context, "a".into(), vec![]).unwrap();
        assert_eq!(answers(&context.effects), [(2, Ok(vec![]))]);
    }

    #[test]
    fn everything_is_bounded() {
        let config = Config {
            kv: KvLimits {
                key_bytes: 4,
                value_bytes: 4,
                entries: 2,
                total_bytes: 10,
                entries_of_all: 100,
                bytes_of_all: 100,
                answer_bytes_of_all: 100,
                waiters: 1,
                waiters_of_all: 100,
                wait: SECOND,
            },
            ..Config::default()
        };
        let (mut store, mut context) = (KvStore::default(), context(&config));
        let mut put = |key: &str, len: usize| store.put(&mut context, key.into(), vec![0; len]);
        assert!(matches!(put("12345", 0), Err(KvError::TooMuch(_))));
        assert!(matches!(put("k", 5), Err(KvError::TooMuch(_))));
        put("a", 4).unwrap();
        assert!(
            matches!(put("b2345"[..4].as_ref(), 4), Err(KvError::TooMuch(_))),
            "bytes"
        );
        put("b", 4).unwrap();
        assert!(matches!(put("", 0), Err(KvError::TooMuch(_))), "entries");
        store.get(&mut context, CallId(1), "x".into(), 9 * SECOND);
        assert_eq!(
            store.next_deadline(),
            Some(SECOND),
            "no wait is longer than the bound"
        );
        store.get(&mut context, CallId(2), "x".into(), SECOND);
        assert!(matches!(
            context.effects.as_slice(),
            [Effect::Answer {
                call: CallId(2),
                result: Err(KvError::TooMuch(_))
            }]
        ));
    }

    /// An abandoned read kept its place for an hour.
    #[test]
    fn a_read_that_is_given_up_frees_its_place() {
        let config = Config {
            kv: KvLimits {
                waiters: 2,
                ..KvLimits::default()
            },
            ..Config::default()
        };
        let (mut store, mut context) = (KvStore::default(), context(&config));
        store.get(&mut context, CallId(1), "x".into(), SECOND);
        store.get(&mut context, CallId(2), "x".into(), SECOND);
        store.cancel(CallId(1));
        store.cancel(CallId(1));
        store.get(&mut context, CallId(3), "x".into(), SECOND);
        assert!(context.effects.is_empty());
        store.put(&mut context, "x".into(), vec![1]).unwrap();
        assert_eq!(answers(&context.effects), [(2, Ok(vec![1])), (3, Ok(vec![1]))]);
    }

    /// Each of them looked at all others: a member could keep the daemon from everything else for minutes.
    #[test]
    fn many_reads_of_one_key_or_prefix_end_without_a_look_at_all_of_them() {
        const READS: u64 = 65_536;
        let config = Config::default();
        let (mut store, mut context) = (KvStore::default(), context(&config));
        let step = Duration::from_micros(1);
        let read = |store: &mut KvStore, context: &mut ApplyContext<'_>| {
            for call in 0..READS / 2 {
                let timeout = SECOND + step * call as u32;
                store.get(context, CallId(2 * call), "key".into(), timeout);
                store.gather(context, 2 * call + 1, "of/", 10_000, timeout);
            }
        };
        read(&mut store, &mut context);
        assert!(context.effects.is_empty(), "all of them wait");
        // None of them is answered by that.
        for key in 0..5000 {
            store.put(&mut context, format!("of/{key}"), Vec::new()).unwrap();
        }
        for call in 0..READS {
            store.cancel(CallId(call));
        }
        assert_eq!(store.load().waiters, 0);
        assert!(store.deadlines.is_empty() && store.by_key.is_empty() && store.by_prefix.is_empty());
        read(&mut store, &mut context);
        for tick in 0..READS / 2 {
            context.at.now = SECOND + step * tick as u32;
            store.expire(&mut context);
        }
        assert_eq!(context.effects.len() as u64, READS);
        assert_eq!(store.next_deadline(), None);
        assert!(store.by_key.is_empty() && store.by_prefix.is_empty());
    }

    /// Callers that read nothing kept as many copies of the store as they had asked for.
    #[test]
    fn answers_that_are_not_taken_are_bounded() {
        let config = Config {
            kv: KvLimits {
                answer_bytes_of_all: 1,
                ..KvLimits::default()
            },
            ..Config::default()
        };
        let (mut store, mut context) = (KvStore::default(), context(&config));
        store.put(&mut context, "a".into(), vec![1]).unwrap();
        store.put(&mut context, "b".into(), vec![2]).unwrap();
        for (call, prefix) in [(1, "a"), (2, "a"), (3, "b")] {
            store.gather(&mut context, call, prefix, 0, SECOND);
        }
        let told = answers(&context.effects);
        assert!(told[..2].iter().all(|(_, answer)| keys(answer) == ["a"]));
        let refused = told[2].1.clone().unwrap_err();
        assert!(refused.starts_with("cannot gather keys with `b`"), "{refused}");
        // Its callers have taken it, and so has the store.
        context.effects.clear();
        store.put(&mut context, "a2".into(), vec![1]).unwrap();
        store.gather(&mut context, 4, "b", 0, SECOND);
        assert_eq!(keys(&answers(&context.effects)[0].1), ["b"]);
    }

    fn keys(answer: &Result<Vec<u8>, String>) -> Vec<String> {
        let entries = KvEntries::decode(answer.as_deref().unwrap()).unwrap().entries;
        entries.into_iter().map(|entry| entry.key).collect()
    }

    #[test]
    fn a_gather_is_answered_when_all_are_there_and_all_readers_share_one_buffer() {
        let config = Config::default();
        let (mut store, mut context) = (KvStore::default(), context(&config));
        store.put(&mut context, "rank/1".into(), vec![1]).unwrap();
        store.put(&mut context, "rank".into(), vec![9]).unwrap();

        store.gather(&mut context, 1, "rank/", 2, SECOND);
        store.gather(&mut context, 2, "rank/", 3, SECOND);
        store.gather(&mut context, 3, "rank/", 2, SECOND);
        store.gather(&mut context, 4, "rank/", 0, Duration::ZERO);
        assert_eq!(
            keys(&answers(&context.effects)[0].1),
            ["rank/1"],
            "with 0, at once"
        );
        context.effects.clear();
        store.put(&mut context, "rank/0".into(), vec![0]).unwrap();
        let told = answers(&context.effects);
        assert_eq!(told.iter().map(|(call, _)| *call).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(keys(&told[0].1), ["rank/0", "rank/1"]);
        let buffers = context.effects.iter().map(|effect| match effect {
            Effect::Answer {
                result: Ok(value), ..
            } => value.as_ptr(),
            other => panic!("unexpected effect: {other:?}"),
        });
        let buffers: Vec<_> = buffers.collect();
        assert_eq!(buffers[0], buffers[1]);
        context.effects.clear();
        context.at.now = SECOND;
        store.expire(&mut context);
        let words = "only 2 of 3 keys with `rank/` were written within 1s".to_owned();
        assert_eq!(answers(&context.effects), [(2, Err(words))]);
        context.effects.clear();
        store.put(&mut context, "rank/2".into(), vec![]).unwrap();
        assert!(context.effects.is_empty(), "it has been answered");
        store.gather(&mut context, 5, "rank/", 3, Duration::ZERO);
        assert_eq!(
            keys(&answers(&context.effects)[0].1),
            ["rank/0", "rank/1", "rank/2"]
        );
    }

    #[test]
    fn prefixes_that_are_waited_for_are_bounded_and_forgotten_with_the_last_call() {
        let config = Config::default();
        let (mut store, mut context) = (KvStore::default(), context(&config));
        let ask = |store: &mut KvStore, context: &mut ApplyContext<'_>, prefix: usize, count| {
            context.effects.clear();
            store.gather(context, prefix as u64, &prefix.to_string(), count, SECOND);
            answers(&context.effects)
                .first()
                .map(|(_, answer)| answer.is_ok())
        };
        // Nobody waits for what is there.
        for prefix in 0..2 * MAX_PREFIXES {
            assert_eq!(ask(&mut store, &mut context, prefix, 0), Some(true));
        }
        for prefix in 100..100 + MAX_PREFIXES {
            assert_eq!(ask(&mut store, &mut context, prefix, 1), None, "it waits");
        }
        assert_eq!(ask(&mut store, &mut context, 99, 1), Some(false));
        store.cancel(CallId(100));
        assert_eq!(ask(&mut store, &mut context, 99, 1), None);
        context.at.now = SECOND;
        store.expire(&mut context);
        assert!(store.by_prefix.is_empty());
        let long = "x".repeat(config.kv.key_bytes + 1);
        context.effects.clear();
        store.gather(&mut context, 1, &long, 0, SECOND);
        assert!(answers(&context.effects)[0].1.is_err());
    }

    #[test]
    fn the_end_of_a_generation_ends_the_reads() {
        let config = Config::default();
        let (mut store, mut context) = (KvStore::default(), context(&config));
        store.get(&mut context, CallId(1), "x".into(), SECOND);
        store.end(&mut context, "rank 1 (node `b`) died of SIGKILL");
        let words = "generation superseded: rank 1 (node `b`) died of SIGKILL".to_owned();
        assert_eq!(answers(&context.effects), [(1, Err(words))]);
        assert_eq!(store.next_deadline(), None);
    }
}
