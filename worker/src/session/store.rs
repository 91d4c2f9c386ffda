//! The key-value store of one generation, as workers see it.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Write-once keys, blocking reads.
pub trait KeyValue: Send + Sync {
    /// Writes a key; writing the same value again succeeds.
    fn put(&self, key: &str, value: &[u8]) -> Result<(), StoreError>;

    /// Waits for a key.
    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>, StoreError>;
}

/// Why a key-value call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// Nobody wrote the key in time.
    #[error("nobody wrote key `{key}` within {waited_ms} ms")]
    TimedOut {
        /// The key.
        key: String,
        /// How long it was waited for.
        waited_ms: u64,
    },
    /// Somebody wrote another value before.
    #[error("key `{0}` was written before with another value")]
    Conflict(String),
    /// The generation is over.
    #[error("generation superseded: {0}")]
    Superseded(String),
    /// The agent cannot be reached, or refused.
    #[error("key-value store: {0}")]
    Unavailable(String),
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
    fn put(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
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

    fn get(&self, key: &str, deadline: Instant) -> Result<Vec<u8>, StoreError> {
        let started = Instant::now();
        let mut entries = self.0.entries.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(value) = entries.get(key) {
                return Ok(value.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                let waited_ms = started.elapsed().as_millis() as u64;
                return Err(StoreError::TimedOut {
                    key: key.to_owned(),
                    waited_ms,
                });
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
