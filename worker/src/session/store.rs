//! The key-value store of one generation, as workers see it.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

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
