//! What the store holds, and who waits for what. No I/O.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use super::wire::{
    Command, Key, MAX_MESSAGE_BYTES, NOT_READY, READY, STOP_WAITING, Value, WAIT_CANCELED, put_bytes,
    put_number,
};

/// All keys, values and waits together.
const MAX_BYTES: usize = 1 << 30;
/// What an entry takes beyond its key and value.
const ENTRY_BYTES: usize = 128;

pub(super) type ClientId = u64;

/// Why a client's command is not carried out: its connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refused {
    #[error("the store is full: it holds {MAX_BYTES} bytes")]
    Full,
    #[error("the value of a counter is no whole number")]
    NotANumber,
    #[error("the answer is longer than {MAX_MESSAGE_BYTES} bytes")]
    AnswerTooLong,
}

/// The keys of one generation.
#[derive(Debug, Default)]
pub(super) struct Store {
    values: HashMap<Key, Value>,
    queues: HashMap<Key, VecDeque<Value>>,
    waits: HashMap<ClientId, Wait>,
    /// Clients that wait for a key, in the order in which they began.
    waiters: HashMap<Key, BTreeMap<u64, ClientId>>,
    /// Waits that are over, and of which the client was not told yet.
    over: HashSet<ClientId>,
    /// Clients that were woken for a value of a queue and have not taken it yet.
    offered: HashMap<ClientId, Key>,
    /// Clients to be woken after this command.
    woken: Vec<ClientId>,
    waits_begun: u64,
    bytes: usize,
}

/// A client's wait.
#[derive(Debug)]
struct Wait {
    number: u64,
    /// Keys that are still missing.
    missing: HashSet<Key>,
}

impl Store {
    /// Carries out a client's command. Returns the answer, which is empty for some commands and for a wait that begins.
    pub(super) fn apply(&mut self, client: ClientId, command: Command) -> Result<Vec<u8>, Refused> {
        self.pass_on_unless(
            client,
            |key| matches!(&command, Command::QueuePop(taken) if taken == key),
        );
        let mut answer = Vec::new();
        match command {
            Command::Ping(nonce) => answer.extend(nonce.to_le_bytes()),
            Command::Set(key, value) => self.set(&key, value)?,
            Command::MultiSet(pairs) => {
                for (key, value) in pairs {
                    self.set(&key, value)?;
                }
            }
            Command::CompareSet {
                key,
                expected,
                desired,
            } => put_bytes(&mut answer, &self.compare_set(&key, expected, desired)?),
            Command::Get(key) => put_bytes(&mut answer, self.get(&key)),
            Command::MultiGet(keys) => {
                for key in keys {
                    let value = self.get(&key);
                    bound(answer.len() + value.len())?;
                    put_bytes(&mut answer, value);
                }
            }
            Command::Add(key, delta) => {
                let sum = self.counter(&key)?.wrapping_add(delta);
                self.set(&key, sum.to_string().into_bytes())?;
                put_number(&mut answer, sum);
            }
            Command::Append(key, value) => {
                let mut whole = self.get(&key).to_vec();
                bound(whole.len() + value.len())?;
                whole.extend(value);
                self.set(&key, whole)?;
            }
            Command::Check(keys) => {
                let ready = keys.iter().all(|key| self.is_ready(key));
                answer.push(if ready { READY } else { NOT_READY });
            }
            Command::Wait(keys) => {
                let missing = keys.into_iter().filter(|key| !self.is_ready(key)).collect();
                return self.wait(client, missing);
            }
            Command::CancelWait => {
                self.end_wait(client);
                answer.push(WAIT_CANCELED);
            }
            Command::Barrier { key, world_size } => return self.barrier(client, key, world_size),
            Command::CountKeys => put_number(&mut answer, self.values.len() as i64),
            Command::Delete(key) => put_number(&mut answer, i64::from(self.delete(&key))),
            Command::ListKeys => {
                bound(self.values.keys().map(|key| key.len() + 8).sum())?;
                put_number(&mut answer, self.values.len() as i64);
                for key in self.values.keys() {
                    put_bytes(&mut answer, key);
                }
            }
            Command::QueuePush(key, value) => self.queue_push(&key, value)?,
            Command::QueuePop(key) => self.queue_pop(&key, &mut answer),
            Command::QueueLength(key) => {
                let length = self.queues.get(&key).map_or(0, VecDeque::len);
                put_number(&mut answer, length as i64);
            }
        }
        Ok(answer)
    }

    /// A client is gone.
    pub(super) fn leave(&mut self, client: ClientId) {
        self.end_wait(client);
        self.pass_on_unless(client, |_| false);
    }

    /// Clients whose waits have ended since the last call; [`Store::take_over`] says whether that still holds.
    pub(super) fn take_woken(&mut self) -> Vec<ClientId> {
        std::mem::take(&mut self.woken)
    }

    /// True, once, if the wait of the client is over and it must be notified.
    pub(super) fn take_over(&mut self, client: ClientId) -> bool {
        self.over.remove(&client)
    }

    fn get(&self, key: &[u8]) -> &[u8] {
        self.values.get(key).map_or(&[], Vec::as_slice)
    }

    fn set(&mut self, key: &[u8], value: Value) -> Result<(), Refused> {
        self.store(key, value)?;
        self.wake_all(key);
        Ok(())
    }

    fn store(&mut self, key: &[u8], value: Value) -> Result<(), Refused> {
        let freed = self.values.get(key).map_or(0, |old| size_of_entry(key, old));
        self.take_room(size_of_entry(key, &value), freed)?;
        self.values.insert(key.to_vec(), value);
        Ok(())
    }

    fn delete(&mut self, key: &[u8]) -> bool {
        let Some(value) = self.values.remove(key) else {
            return false;
        };
        self.bytes -= size_of_entry(key, &value);
        true
    }

    /// Returns the value after it. A key that does not exist has the expected value if that is empty; otherwise the
    /// client gets back what it expected, as from PyTorch's own server.
    fn compare_set(&mut self, key: &[u8], expected: Value, desired: Value) -> Result<Value, Refused> {
        match self.values.get(key) {
            Some(value) if *value != expected => return Ok(value.clone()),
            None if !expected.is_empty() => return Ok(expected),
            _ => {}
        }
        self.set(key, desired.clone())?;
        Ok(desired)
    }

    /// The number that a value begins with; 0 if the key does not exist.
    fn counter(&self, key: &[u8]) -> Result<i64, Refused> {
        let Some(value) = self.values.get(key) else {
            return Ok(0);
        };
        let text = value.trim_ascii_start();
        let sign = usize::from(matches!(text.first(), Some(b'+' | b'-')));
        let digits = text[sign..]
            .iter()
            .take_while(|byte| byte.is_ascii_digit())
            .count();
        let number = std::str::from_utf8(&text[..sign + digits]).ok();
        number
            .and_then(|text| text.parse().ok())
            .ok_or(Refused::NotANumber)
    }

    fn is_ready(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || self.queues.contains_key(key)
    }

    fn barrier(&mut self, client: ClientId, key: Key, world_size: i64) -> Result<Vec<u8>, Refused> {
        let arrived = self.counter(&key)?.saturating_add(1);
        self.store(&key, arrived.to_string().into_bytes())?;
        if arrived >= world_size {
            self.wake_all(&key);
            return Ok(vec![STOP_WAITING]);
        }
        self.wait(client, HashSet::from([key]))
    }

    /// A client has one wait at a time.
    fn wait(&mut self, client: ClientId, missing: HashSet<Key>) -> Result<Vec<u8>, Refused> {
        self.end_wait(client);
        if missing.is_empty() {
            return Ok(vec![STOP_WAITING]);
        }
        self.take_room(missing.iter().map(|key| size_of_entry(key, key)).sum(), 0)?;
        self.waits_begun += 1;
        let number = self.waits_begun;
        for key in &missing {
            self.waiters
                .entry(key.clone())
                .or_default()
                .insert(number, client);
        }
        self.waits.insert(client, Wait { number, missing });
        Ok(Vec::new())
    }

    fn end_wait(&mut self, client: ClientId) {
        self.over.remove(&client);
        let Some(wait) = self.waits.remove(&client) else {
            return;
        };
        for key in &wait.missing {
            self.bytes -= size_of_entry(key, key);
            if let Some(waiters) = self.waiters.get_mut(key) {
                waiters.remove(&wait.number);
                if waiters.is_empty() {
                    self.waiters.remove(key);
                }
            }
        }
    }

    fn wake_all(&mut self, key: &[u8]) {
        let waiters = self.waiters.remove(key).unwrap_or_default();
        for client in waiters.into_values() {
            self.key_came(client, key);
        }
    }

    /// Wakes the client that has waited longest for a value of this queue, if there is one for it.
    fn offer(&mut self, key: &[u8]) {
        let length = self.queues.get(key).map_or(0, VecDeque::len);
        while let Some(waiters) = self.waiters.get_mut(key) {
            if self.offered.values().filter(|offered| *offered == key).count() >= length {
                return;
            }
            let first = waiters.pop_first();
            if waiters.is_empty() {
                self.waiters.remove(key);
            }
            if let Some((_, client)) = first
                && self.key_came(client, key)
            {
                self.offered.insert(client, key.to_vec());
                return;
            }
        }
    }

    /// One of the keys that a client waits for is there. True if it was the last; it is no longer among the waiters.
    fn key_came(&mut self, client: ClientId, key: &[u8]) -> bool {
        let Some(wait) = self.waits.get_mut(&client) else {
            return false;
        };
        if wait.missing.remove(key) {
            self.bytes -= size_of_entry(key, key);
        }
        let is_over = wait.missing.is_empty();
        if is_over {
            self.waits.remove(&client);
            self.over.insert(client);
            self.woken.push(client);
        }
        is_over
    }

    /// A value that was offered to this client goes to the next one that waits for it, unless the client takes it.
    fn pass_on_unless(&mut self, client: ClientId, is_taken: impl FnOnce(&Key) -> bool) {
        if let Some(key) = self.offered.remove(&client)
            && !is_taken(&key)
        {
            self.offer(&key);
        }
    }

    fn queue_push(&mut self, key: &[u8], value: Value) -> Result<(), Refused> {
        self.take_room(size_of_entry(key, &value), 0)?;
        self.queues.entry(key.to_vec()).or_default().push_back(value);
        self.offer(key);
        Ok(())
    }

    /// Answers how many values there are, and the first of them. An empty queue takes no memory.
    fn queue_pop(&mut self, key: &[u8], answer: &mut Vec<u8>) {
        let Some(queue) = self.queues.get_mut(key) else {
            put_number(answer, 0);
            return;
        };
        put_number(answer, queue.len() as i64);
        if let Some(value) = queue.pop_front() {
            self.bytes -= size_of_entry(key, &value);
            put_bytes(answer, &value);
        }
        if queue.is_empty() {
            self.queues.remove(key);
        }
    }

    fn take_room(&mut self, needed: usize, freed: usize) -> Result<(), Refused> {
        let bytes = self.bytes - freed + needed;
        if bytes > MAX_BYTES {
            return Err(Refused::Full);
        }
        self.bytes = bytes;
        Ok(())
    }
}

fn size_of_entry(key: &[u8], value: &[u8]) -> usize {
    key.len() + value.len() + ENTRY_BYTES
}

fn bound(answer_bytes: usize) -> Result<(), Refused> {
    if answer_bytes > MAX_MESSAGE_BYTES {
        return Err(Refused::AnswerTooLong);
    }
    Ok(())
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
