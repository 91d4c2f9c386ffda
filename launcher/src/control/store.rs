//! Key-value calls of the workers: forwarded to the daemon, reads shared by all workers of the node.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ddp_proto::client::{Client, ClientError};
use ddp_proto::control::MAX_VALUE_BYTES;
use ddp_proto::ids::Generation;
use tokio::sync::OnceCell;
use tokio::time::{Instant, timeout};

/// Pause before a call is repeated on a connection that broke.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// How long a put is repeated while the daemon cannot be reached.
const PUT_BOUND: Duration = Duration::from_secs(30);
/// Bytes kept of what the workers of this node wrote, for a daemon that has lost it.
const MAX_KEPT_BYTES: usize = 4 << 20;
/// Entries kept; the daemon bounds their number and size too.
const MAX_CACHED: usize = 4096;

type Cell = Arc<OnceCell<Arc<str>>>;

/// The store of one generation, as the workers of this node see it. Errors are words for the worker.
pub(crate) struct Store {
    client: Client,
    job_id: String,
    generation: Generation,
    /// Values as base64. Entries are write-once, so a value once read is right for ever.
    read: Mutex<HashMap<String, Cell>>,
    written: Mutex<Written>,
}

/// What the workers of this node wrote.
#[derive(Debug, Default)]
struct Written {
    entries: Vec<(String, Vec<u8>)>,
    bytes: usize,
}

impl Store {
    pub(crate) fn new(client: Client, job_id: String, generation: Generation) -> Self {
        Self {
            client,
            job_id,
            generation,
            read: Mutex::default(),
            written: Mutex::default(),
        }
    }

    /// Stores an entry; `value` is base64.
    pub(crate) async fn put(&self, key: &str, value: &str) -> Result<(), String> {
        let value = STANDARD
            .decode(value)
            .map_err(|error| format!("value of `{key}` is not base64: {error}"))?;
        if value.len() > MAX_VALUE_BYTES {
            let len = value.len();
            return Err(format!(
                "value of `{key}` has {len} bytes, more than {MAX_VALUE_BYTES}"
            ));
        }
        self.write(key, &value).await?;
        self.keep(key, value);
        Ok(())
    }

    /// Writes again what the workers of this node wrote: the daemon may be another one, which has lost it.
    pub(crate) async fn write_again(&self) {
        let entries = {
            let written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
            written.entries.clone()
        };
        for (key, value) in entries {
            if let Err(error) = self.write(&key, &value).await {
                tracing::debug!("`{key}` is not written again: {error}");
                return;
            }
        }
    }

    async fn write(&self, key: &str, value: &[u8]) -> Result<(), String> {
        let deadline = Instant::now() + PUT_BOUND;
        loop {
            let put = self
                .client
                .kv_put(&self.job_id, self.generation, key, value.to_vec());
            match put.await {
                Ok(()) => return Ok(()),
                Err(error) => self.pause_or_fail(error, deadline).await?,
            }
        }
    }

    fn keep(&self, key: &str, value: Vec<u8>) {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = written.bytes + key.len() + value.len();
        if bytes <= MAX_KEPT_BYTES {
            written.bytes = bytes;
            written.entries.push((key.to_owned(), value));
        }
    }

    /// Reads an entry as base64, waiting up to `bound` for somebody to write it.
    pub(crate) async fn get(&self, key: &str, bound: Duration) -> Result<Arc<str>, String> {
        // The first reader asks the daemon; the others wait for its answer, each within its own bound.
        let cell = self.cell(key);
        let read = cell.get_or_try_init(|| self.fetch(key, bound));
        match timeout(bound, read).await {
            Ok(value) => value.cloned(),
            Err(_) => Err(format!(
                "`{key}` was not written within {:.1} s",
                bound.as_secs_f64()
            )),
        }
    }

    fn cell(&self, key: &str) -> Cell {
        let mut cells = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cell) = cells.get(key) {
            return cell.clone();
        }
        let cell = Cell::default();
        if cells.len() < MAX_CACHED {
            cells.insert(key.to_owned(), cell.clone());
        }
        cell
    }

    async fn fetch(&self, key: &str, bound: Duration) -> Result<Arc<str>, String> {
        let deadline = Instant::now() + bound;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.client.kv_get(&self.job_id, self.generation, key, left).await {
                Ok(value) => return Ok(STANDARD.encode(value).into()),
                Err(error) => self.pause_or_fail(error, deadline).await?,
            }
        }
    }

    /// A broken connection is opened again by the client, and a daemon that was restarted is told of the generation by
    /// the agent; every other error is an answer.
    async fn pause_or_fail(&self, error: ClientError, deadline: Instant) -> Result<(), String> {
        let may_mend = error.is_broken() || matches!(error, ClientError::Forgotten { .. });
        if !may_mend || Instant::now() + RETRY_PAUSE >= deadline {
            return Err(error.to_string());
        }
        tokio::time::sleep(RETRY_PAUSE).await;
        Ok(())
    }
}
