//! Key-value calls of the workers: forwarded to the daemon, reads shared by all workers of the node.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ddp_proto::client::{CallError, Client, ClientError, KvScope};
use ddp_proto::control::{ANSWER_GRACE, KvRefusal, MAX_VALUE_BYTES, PUT_BOUND};
use ddp_proto::rendezvous::KvEntry;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

/// Pause before a call is repeated on a connection that broke.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// Bytes kept of what the workers of this node wrote, for a daemon that has lost it.
const MAX_KEPT_BYTES: usize = 4 << 20;
/// Entries kept; the daemon bounds their number and size too.
const MAX_CACHED: usize = 4096;
/// Answers to gathers that are kept, each of which may be as large as the daemon's store.
const MAX_GATHERED: usize = 4;
/// Longest single wait at the daemon for the entries of a gather.
const GATHER_BOUND: Duration = Duration::from_mins(1);
/// How long one answer about the present entries serves all workers: they report missing ranks with it.
const SNAPSHOT_AGE: Duration = Duration::from_secs(2);

/// Why a call was not done.
#[derive(Debug)]
pub(crate) struct KvError {
    /// For the worker's program.
    pub(crate) why: KvRefusal,
    /// For people.
    pub(crate) words: String,
}

impl KvError {
    pub(crate) fn new(why: KvRefusal, words: String) -> Self {
        Self { why, words }
    }
}

/// One key that workers of this node read.
#[derive(Default)]
struct Cell {
    /// As base64. Entries are write-once, so a value once read is right for ever.
    value: OnceLock<Arc<str>>,
    /// Held by the reader that waits at the daemon: one is enough.
    turn: tokio::sync::Mutex<()>,
}

/// Entries with one prefix that workers of this node gather.
#[derive(Default)]
struct Gathered {
    /// In order of their keys, when there were as many as were asked for: one answer for all workers.
    entries: OnceLock<Entries>,
    /// Held by the caller that waits for the daemon's answer.
    asking: tokio::sync::Mutex<Asking>,
    /// The last attempt found no daemon.
    is_away: Arc<AtomicBool>,
}

type Entries = Arc<[KvEntry]>;

/// What a node asks the daemon of one prefix. It goes on when the caller gives up: nothing is transferred twice.
#[derive(Default)]
struct Asking {
    task: JoinSet<Result<Entries, KvError>>,
    /// The last answer of what was there, and when it came.
    snapshot: Option<(Instant, Entries)>,
}

/// The store of one generation, as the workers of this node see it.
pub(crate) struct Store {
    client: Client,
    scope: KvScope,
    read: Mutex<HashMap<String, Arc<Cell>>>,
    /// By prefix and number of entries.
    gathered: Mutex<HashMap<(String, u32), Arc<Gathered>>>,
    written: Mutex<Written>,
}

/// What the workers of this node wrote.
#[derive(Debug, Default)]
struct Written {
    entries: Vec<(String, Vec<u8>)>,
    bytes: usize,
}

impl Store {
    pub(crate) fn new(client: Client, scope: KvScope) -> Self {
        Self {
            client,
            scope,
            read: Mutex::default(),
            gathered: Mutex::default(),
            written: Mutex::default(),
        }
    }

    /// Stores an entry; `value` is base64. Tried for [`PUT_BOUND`] while the daemon is away.
    pub(crate) async fn put(&self, key: &str, value: &str) -> Result<(), KvError> {
        let invalid = |words| KvError::new(KvRefusal::Other, words);
        let value = STANDARD
            .decode(value)
            .map_err(|error| invalid(format!("value of `{key}` is not base64: {error}")))?;
        if value.len() > MAX_VALUE_BYTES {
            let len = value.len();
            return Err(invalid(format!(
                "value of `{key}` has {len} bytes, more than {MAX_VALUE_BYTES}"
            )));
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
                tracing::debug!("cannot write `{key}` again: {}", error.words);
                return;
            }
        }
    }

    async fn write(&self, key: &str, value: &[u8]) -> Result<(), KvError> {
        let deadline = Instant::now() + PUT_BOUND;
        let write = async {
            loop {
                match self.client.kv_put(&self.scope, key, value.to_vec()).await {
                    Ok(()) => return Ok(()),
                    Err(error) => pause_or_refuse(error, deadline).await?,
                }
            }
        };
        let written = timeout_at(deadline, write).await;
        written.unwrap_or_else(|_| Err(no_answer(key, PUT_BOUND)))
    }

    fn keep(&self, key: &str, value: Vec<u8>) {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = written.bytes + key.len() + value.len();
        if bytes <= MAX_KEPT_BYTES {
            written.bytes = bytes;
            written.entries.push((key.to_owned(), value));
        }
    }

    /// Reads an entry as base64, waiting up to `bound` until a rank writes it; looks at least once.
    pub(crate) async fn get(&self, key: &str, bound: Duration) -> Result<Arc<str>, KvError> {
        let deadline = Instant::now() + bound;
        let cell = shared(&self.read, key.to_owned(), MAX_CACHED);
        // A reader that waited in vain for its turn looks itself: "not written" holds at the deadline, not when another
        // reader asked.
        let turn = timeout_at(deadline, cell.turn.lock()).await;
        if let Some(value) = cell.value.get() {
            return Ok(value.clone());
        }
        let fetched = timeout_at(deadline + ANSWER_GRACE, self.fetch(key, bound, deadline)).await;
        let value = fetched.unwrap_or_else(|_| Err(no_answer(key, bound + ANSWER_GRACE)))?;
        // One that looked for itself may have been faster than the one that waits.
        let _ = cell.value.set(value.clone());
        drop(turn);
        Ok(value)
    }

    /// Gathers all entries whose keys begin with `prefix`, waiting up to `bound` until there are `count` of them; with 0,
    /// those that are there now or were a moment ago. The workers of this node share one answer.
    pub(crate) async fn gather(&self, prefix: &str, count: u32, bound: Duration) -> Result<Entries, KvError> {
        let deadline = Instant::now() + bound;
        // What is there is not waited for, but transferred.
        let deadline = if count == 0 {
            deadline + ANSWER_GRACE
        } else {
            deadline
        };
        let gathered = shared(&self.gathered, (prefix.to_owned(), count), MAX_GATHERED);
        let in_vain = || {
            if count == 0 || gathered.is_away.load(Ordering::Relaxed) {
                no_answer(prefix, bound)
            } else {
                too_few(prefix, bound)
            }
        };
        let mut asking = timeout_at(deadline, gathered.asking.lock())
            .await
            .map_err(|_| in_vain())?;
        if let Some(entries) = gathered.entries.get() {
            return Ok(entries.clone());
        }
        if let Some((_, entries)) = asking
            .snapshot
            .as_ref()
            .filter(|(at, _)| at.elapsed() < SNAPSHOT_AGE)
        {
            return Ok(entries.clone());
        }
        if asking.task.is_empty() {
            let (client, scope, prefix) = (self.client.clone(), self.scope.clone(), prefix.to_owned());
            let is_away = gathered.is_away.clone();
            asking
                .task
                .spawn(async move { fetch_all(&client, &scope, &prefix, count, &is_away).await });
        }
        let answer = timeout_at(deadline, asking.task.join_next())
            .await
            .map_err(|_| in_vain())?;
        let entries = match answer {
            Some(Ok(entries)) => entries?,
            // It was there, and panics are errors of ours.
            Some(Err(_)) | None => return Err(no_answer(prefix, bound)),
        };
        if count == 0 {
            asking.snapshot = Some((Instant::now(), entries.clone()));
            return Ok(entries);
        }
        Ok(gathered.entries.get_or_init(|| entries).clone())
    }

    async fn fetch(&self, key: &str, bound: Duration, deadline: Instant) -> Result<Arc<str>, KvError> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.client.kv_get(&self.scope, key, left).await {
                Ok(Some(value)) => return Ok(STANDARD.encode(value).into()),
                // The daemon has a longest wait of its own.
                Ok(None) if Instant::now() < deadline => {}
                Ok(None) => {
                    let words = format!("no rank wrote `{key}` within {:.1} s", bound.as_secs_f64());
                    return Err(KvError::new(KvRefusal::NotWritten, words));
                }
                Err(error) => pause_or_refuse(error, deadline + ANSWER_GRACE).await?,
            }
        }
    }
}

/// The value of a key, which callers share while there is room for `most`.
fn shared<K: Eq + Hash, V: Default>(all: &Mutex<HashMap<K, Arc<V>>>, key: K, most: usize) -> Arc<V> {
    let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(value) = all.get(&key) {
        return value.clone();
    }
    let value = Arc::<V>::default();
    if all.len() >= most {
        all.retain(|_, value| Arc::strong_count(value) > 1);
    }
    if all.len() < most {
        all.insert(key, value.clone());
    }
    value
}

/// Asks until there is an answer; it ends with the generation's store.
async fn fetch_all(
    client: &Client,
    scope: &KvScope,
    prefix: &str,
    count: u32,
    is_away: &AtomicBool,
) -> Result<Entries, KvError> {
    loop {
        let answer = client.kv_gather(scope, prefix, count, GATHER_BOUND).await;
        is_away.store(answer.is_err(), Ordering::Relaxed);
        match answer {
            Ok(Some(found)) => return Ok(found.entries.into()),
            Ok(None) => {}
            Err(error) => pause_or_refuse(error, Instant::now() + GATHER_BOUND).await?,
        }
    }
}

fn too_few(prefix: &str, waited: Duration) -> KvError {
    let waited = waited.as_secs_f64();
    let words = format!("not all ranks wrote a key with `{prefix}` within {waited:.1} s");
    KvError::new(KvRefusal::NotWritten, words)
}

fn no_answer(key: &str, waited: Duration) -> KvError {
    let waited = waited.as_secs_f64();
    let words = format!("the rendezvous daemon did not answer for `{key}` within {waited:.1} s");
    KvError::new(KvRefusal::Unavailable, words)
}

/// The client opens a broken connection again, and a daemon that was restarted learns of the generation from
/// the agent. Every other error is an answer.
async fn pause_or_refuse(error: ClientError, deadline: Instant) -> Result<(), KvError> {
    let why = match &error {
        ClientError::Superseded { .. } => KvRefusal::Superseded,
        ClientError::Call { why, .. } => match why {
            CallError::Conflict => KvRefusal::Conflict,
            CallError::Forgotten | CallError::TimedOut => KvRefusal::Unavailable,
            _ => KvRefusal::Other,
        },
        error if error.is_broken() => KvRefusal::Unavailable,
        _ => KvRefusal::Other,
    };
    if why != KvRefusal::Unavailable || Instant::now() + RETRY_PAUSE >= deadline {
        return Err(KvError::new(why, error.to_string()));
    }
    tokio::time::sleep(RETRY_PAUSE).await;
    Ok(())
}
