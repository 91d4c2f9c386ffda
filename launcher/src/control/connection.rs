//! One connection of a worker.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ddp_proto::control::{
    KvRefusal, MAX_ACTIVITY_BYTES, MAX_CALLS, MAX_COLLECTIVES, MAX_LINE_BYTES, PROTOCOL, ToAgent, ToWorker,
    WorkerAssignment,
};
use ddp_proto::ids::{Generation, LocalRank};
use ddp_proto::printable;
use ddp_proto::rendezvous::KvEntry;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::hub::{ControlEvent, ControlNews, Hub, Member, WORKER_QUEUE, WorkerContext, encode};
use super::peer;
use super::store::{KvError, Store};

/// How long a connection may stay without its first line, or the worker unknown that it comes from.
const GREETING_BOUND: Duration = Duration::from_secs(10);
/// A worker that opens another connection closes this one then; how long the other may take to be known.
const REOPEN_BOUND: Duration = Duration::from_millis(100);
/// How long one message may take to be written.
const WRITE_BOUND: Duration = Duration::from_secs(30);
/// Longest blocking read that is waited for; then the answer to the worker is that no rank wrote it yet.
const MAX_GET: Duration = Duration::from_hours(24);
/// Entries of one answer to a gather, as they are in a line: the rest of the line is not more.
const MAX_PAGE_BYTES: usize = MAX_LINE_BYTES - 4096;

/// The part of a hello that says which generation the worker is of.
const GENERATION: &str = "generation";

/// Why a connection is ended by the agent. Only a worker's hello that does not fit is worth a line on the console:
/// a worker that cannot live without its connection says so itself.
#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error("process {pid} runs as user {uid}, not as the launcher's user")]
    OtherUser { pid: i32, uid: u32 },
    #[error("the first line of process {pid} is not a valid hello")]
    NoHello { pid: i32 },
    #[error("process {pid} says that its `{key}` is {theirs}")]
    BadHello {
        pid: i32,
        key: &'static str,
        theirs: u64,
        /// None: the local rank of the worker, if the process belongs to one.
        ours: Option<u64>,
    },
    #[error("the line is malformed or longer than {MAX_LINE_BYTES} bytes")]
    BadLine,
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl ConnectionError {
    /// What does not fit in the hello of a process that belongs to a worker, and that worker; none for a stranger.
    fn bad_hello(&self, hub: &Hub) -> Option<ControlEvent> {
        let Self::BadHello {
            pid,
            key,
            theirs,
            ours,
        } = *self
        else {
            return None;
        };
        let context = hub.context.borrow();
        let context = context.as_ref()?;
        let local_rank = peer::owner(pid, &context.pids)?;
        let ours = ours.unwrap_or(u64::from(local_rank.0));
        Some(ControlEvent {
            generation: context.generation,
            local_rank,
            news: ControlNews::Refused(format!("`{key}` of its hello is {theirs}, expected {ours}")),
        })
    }
}

/// Serves a connection until either side ends it.
pub(super) async fn serve(id: u64, stream: UnixStream, hub: Arc<Hub>) {
    let connection = match WorkerConnection::greet(id, stream, &hub).await {
        Ok(connection) => connection,
        Err(refusal) => {
            tracing::debug!("control connection {id} refused: {refusal}");
            if let Some(bad_hello) = refusal.bad_hello(&hub) {
                // The agent may be gone.
                let _ = hub.events.send(bad_hello).await;
            }
            return hub.leave(id);
        }
    };
    let disconnected = connection.event(ControlNews::Disconnected);
    let result = connection.run().await;
    hub.leave(id);
    if let Err(refusal) = result {
        tracing::debug!("control connection {id} ended: {refusal}");
    }
    sleep(REOPEN_BOUND).await;
    if !hub.has_connection_of(disconnected.local_rank) {
        // The agent may be gone.
        let _ = hub.events.send(disconnected).await;
    }
}

/// Tells a worker that is refused if the reason is that its generation is over.
async fn refuse(
    hub: &Hub,
    writer: &mut OwnedWriteHalf,
    generation: Generation,
    refusal: ConnectionError,
) -> ConnectionError {
    if matches!(refusal, ConnectionError::BadHello { key: GENERATION, .. })
        && let Some(cause) = over(hub, generation)
    {
        let line = encode(&ToWorker::GenerationOver { generation, cause });
        let _ = timeout(WRITE_BOUND, writer.write_all(&line)).await;
    }
    refusal
}

struct WorkerConnection<'a> {
    hub: &'a Hub,
    local_rank: LocalRank,
    generation: Generation,
    store: Arc<Store>,
    lines: Lines<OwnedReadHalf>,
    queue: mpsc::WeakSender<Arc<[u8]>>,
    writer: JoinSet<io::Result<()>>,
    calls: JoinSet<()>,
}

impl<'a> WorkerConnection<'a> {
    async fn greet(id: u64, stream: UnixStream, hub: &'a Hub) -> Result<Self, ConnectionError> {
        let credentials = stream.peer_cred()?;
        let (uid, pid) = (credentials.uid(), credentials.pid().unwrap_or(0));
        if uid != nix::unistd::geteuid().as_raw() {
            return Err(ConnectionError::OtherUser { pid, uid });
        }
        let (reader, mut writer) = stream.into_split();
        let mut lines = Lines::new(reader);
        let hello = timeout(GREETING_BOUND, lines.next())
            .await
            .map_err(|_| ConnectionError::NoHello { pid })??;
        let Some(Line::Message(ToAgent::Hello {
            protocol: 1..,
            local_rank,
            mut generation,
            pid: claimed,
            listens,
            outlives,
        })) = hello
        else {
            return Err(ConnectionError::NoHello { pid });
        };
        let local_rank = LocalRank(local_rank);
        if u32::try_from(pid) != Ok(claimed) {
            return Err(ConnectionError::BadHello {
                pid,
                key: "pid",
                theirs: claimed.into(),
                ours: u64::try_from(pid).ok(),
            });
        }
        let mut context = await_context(hub, pid, local_rank, generation).await;
        if outlives && context.is_ok() {
            generation = park(hub, pid, local_rank, generation, &mut lines).await?;
            context = await_context(hub, pid, local_rank, generation).await;
        }
        let (store, assignment) = match context {
            Ok(context) => context,
            Err(refusal) => return Err(refuse(hub, &mut writer, generation, refusal).await),
        };
        let (queue, outgoing) = mpsc::channel(WORKER_QUEUE);
        // The queue is empty: all that is put into it here fits.
        let _ = queue.try_send(assignment);
        let weak = queue.downgrade();
        let member = Member {
            local_rank,
            listens,
            queue: queue.clone(),
        };
        hub.connections().insert(id, member);
        if let Some(asked) = asked_to_stop(hub, generation) {
            let _ = queue.try_send(encode(&asked));
        }
        if let Some(cause) = over(hub, generation) {
            let _ = queue.try_send(encode(&ToWorker::GenerationOver { generation, cause }));
        }
        let mut writing = JoinSet::new();
        writing.spawn(write_all(writer, outgoing));
        Ok(Self {
            hub,
            local_rank,
            generation,
            store,
            lines,
            queue: weak,
            writer: writing,
            calls: JoinSet::new(),
        })
    }

    async fn run(mut self) -> Result<(), ConnectionError> {
        loop {
            // Cancel safe: `Lines::next` keeps what it has read of a line; `join_next` loses nothing.
            tokio::select! {
                line = self.lines.next() => match line? {
                    Some(Line::Message(message)) => self.take(message).await,
                    Some(Line::Unknown) => {}
                    None => return Ok(()),
                },
                Some(_) = self.writer.join_next() => return Ok(()),
                Some(_) = self.calls.join_next() => {}
            }
        }
    }

    async fn take(&mut self, mut message: ToAgent) {
        sanitize(&mut message);
        match message {
            // One greeting is enough.
            ToAgent::Hello { .. } => {}
            ToAgent::Heartbeat { .. } => {
                // The next one brings newer numbers.
                let _ = self
                    .hub
                    .events
                    .try_send(self.event(ControlNews::Message(message)));
            }
            ToAgent::Sizes(_)
            | ToAgent::State { .. }
            | ToAgent::PeerLost { .. }
            | ToAgent::Failure { .. } => {
                // Waits for the agent if need be; only this connection is held up.
                let _ = self
                    .hub
                    .events
                    .send(self.event(ControlNews::Message(message)))
                    .await;
            }
            ToAgent::KvPut { call, key, value } => {
                let store = self.store.clone();
                self.answer(call, async move {
                    store.put(&key, &value).await?;
                    Ok(kv_reply(call, None))
                });
            }
            ToAgent::KvGet {
                call,
                key,
                timeout_ms,
            } => {
                let store = self.store.clone();
                let bound = Duration::from_millis(timeout_ms).min(MAX_GET);
                self.answer(call, async move {
                    let value = store.get(&key, bound).await?;
                    Ok(kv_reply(call, Some(value.to_string())))
                });
            }
            ToAgent::KvGather {
                call,
                prefix,
                count,
                after,
                timeout_ms,
            } => {
                let store = self.store.clone();
                let bound = Duration::from_millis(timeout_ms).min(MAX_GET);
                self.answer(call, async move {
                    let entries = store.gather(&prefix, count, bound).await?;
                    let (entries, more) = page(&entries, &after);
                    Ok(ToWorker::KvEntries { call, entries, more })
                });
            }
        }
    }

    fn event(&self, news: ControlNews) -> ControlEvent {
        ControlEvent {
            generation: self.generation,
            local_rank: self.local_rank,
            news,
        }
    }

    /// Answers a call when `result` is there, or when the generation is over, whichever comes first.
    fn answer(
        &mut self,
        call: u64,
        result: impl Future<Output = Result<ToWorker, KvError>> + Send + 'static,
    ) {
        let Some(queue) = self.queue.upgrade() else {
            return;
        };
        // A worker that waits for an answer before it calls again must not be refused because of the one it has got.
        while self.calls.try_join_next().is_some() {}
        if self.calls.len() >= MAX_CALLS {
            let words = format!("{MAX_CALLS} calls are already in progress, the maximum");
            let refused = KvError::new(KvRefusal::Other, words);
            let _ = queue.try_send(reply(call, Err(refused)));
            return;
        }
        let mut context = self.hub.context.clone();
        let generation = self.generation;
        self.calls.spawn(async move {
            let superseded = context.wait_for(|context| ended(context.as_ref(), generation).is_some());
            // Cancel safe: an abandoned call is only asked again, and writes are idempotent.
            let result = tokio::select! {
                result = result => result,
                context = superseded => {
                    let cause = context.ok().and_then(|context| ended(context.as_ref(), generation));
                    let words = format!("generation superseded: {}", cause.unwrap_or_default());
                    Err(KvError::new(KvRefusal::Superseded, words))
                }
            };
            // Waits for the worker to read; ends with the connection.
            let _ = queue.send(reply(call, result)).await;
        });
    }
}

/// The answer to a call that was done.
fn kv_reply(call: u64, value: Option<String>) -> ToWorker {
    ToWorker::KvReply {
        call,
        value,
        error: None,
        refusal: None,
    }
}

fn reply(call: u64, result: Result<ToWorker, KvError>) -> Arc<[u8]> {
    let answer = result.unwrap_or_else(|refused| ToWorker::KvReply {
        call,
        value: None,
        error: Some(refused.words),
        refusal: Some(refused.why),
    });
    encode(&answer)
}

/// The entries after this key that fit one line, as base64, and whether more follow. An entry that alone is too long for
/// a line does not exist.
fn page(entries: &[KvEntry], after: &str) -> (BTreeMap<String, String>, bool) {
    let first = match after {
        "" => 0,
        after => entries.partition_point(|entry| entry.key.as_str() <= after),
    };
    let rest = &entries[first..];
    let mut room = MAX_PAGE_BYTES;
    let mut page = BTreeMap::new();
    for entry in rest {
        // A control character of a key takes six bytes; the value a third more.
        let bytes = entry.key.len() * 6 + entry.value.len() * 4 / 3 + 16;
        if !page.is_empty() && bytes > room {
            break;
        }
        room = room.saturating_sub(bytes);
        page.insert(entry.key.clone(), STANDARD.encode(&entry.value));
    }
    let more = page.len() < rest.len();
    (page, more)
}

/// Why `generation` is over, if it is.
fn ended(context: Option<&WorkerContext>, generation: Generation) -> Option<String> {
    match context {
        Some(context) if context.generation == generation => context.over.clone(),
        Some(context) => Some(format!("generation {} has started", context.generation)),
        None => None,
    }
}

/// How the workers of `generation` were asked to stop, if they were.
fn asked_to_stop(hub: &Hub, generation: Generation) -> Option<ToWorker> {
    let context = hub.context.borrow();
    let current = context
        .as_ref()
        .filter(|context| context.generation == generation)?;
    current.asked_to_stop.clone()
}

fn over(hub: &Hub, generation: Generation) -> Option<String> {
    ended(hub.context.borrow().as_ref(), generation)
}

/// Waits until the speaker is known to be the worker it claims to be: a fast worker may connect before the agent
/// knows that it was spawned.
async fn await_context(
    hub: &Hub,
    pid: i32,
    local_rank: LocalRank,
    theirs: Generation,
) -> Result<(Arc<Store>, Arc<[u8]>), ConnectionError> {
    let known = |context: &WorkerContext| peer::owner(pid, &context.pids) == Some(local_rank);
    let mut watch = hub.context.clone();
    let settled = watch.wait_for(|context| {
        context
            .as_ref()
            .is_none_or(|context| context.generation != theirs || context.spawned || known(context))
    });
    let bad_hello = |key, theirs, ours| ConnectionError::BadHello {
        pid,
        key,
        theirs,
        ours,
    };
    let stranger = || bad_hello("local_rank", local_rank.0.into(), None);
    let context = timeout(GREETING_BOUND, settled).await.map_err(|_| stranger())?;
    let context = context.map_err(|_| stranger())?;
    let context = context.as_ref().ok_or_else(stranger)?;
    if context.generation != theirs {
        return Err(bad_hello(GENERATION, theirs.0, Some(context.generation.0)));
    }
    let contract = context
        .contracts
        .get(local_rank.0 as usize)
        .filter(|_| known(context))
        .ok_or_else(stranger)?;
    let assignment = encode(&ToWorker::Assignment(WorkerAssignment {
        protocol: PROTOCOL,
        generation: theirs,
        env: contract.clone(),
        node_addr: context.node_addr.clone(),
        data_key: context.data_key.clone(),
    }));
    Ok((context.store.clone(), assignment))
}

/// Waits until `generation` is over, tells the agent that the worker lives on, and waits for the next generation.
async fn park(
    hub: &Hub,
    pid: i32,
    local_rank: LocalRank,
    generation: Generation,
    lines: &mut Lines<OwnedReadHalf>,
) -> Result<Generation, ConnectionError> {
    let mut watch = hub.context.clone();
    let left = watch.wait_for(|context| {
        context.as_ref().is_none_or(|context| {
            context.generation != generation || context.over.is_some() || context.asked_to_stop.is_some()
        })
    });
    // A worker may know before the agent that another one has failed.
    if !timeout(GREETING_BOUND, left)
        .await
        .is_ok_and(|context| context.is_ok())
    {
        return Err(ConnectionError::BadHello {
            pid,
            key: "outlives",
            theirs: 1,
            ours: Some(0),
        });
    }
    let parked = ControlEvent {
        generation,
        local_rank,
        news: ControlNews::Parked,
    };
    // The agent may be gone.
    let _ = hub.events.send(parked).await;
    let is_next = |context: &WorkerContext| context.generation != generation;
    let next = watch.wait_for(|context| context.as_ref().is_some_and(is_next));
    tokio::pin!(next);
    loop {
        // Cancel safe: `Lines::next` keeps what it has read of a line; the other is polled again.
        tokio::select! {
            context = &mut next => {
                let context = context.ok().and_then(|context| Some(context.as_ref()?.generation));
                return context.ok_or(ConnectionError::NoHello { pid });
            }
            line = lines.next() => if line?.is_none() {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
        }
    }
}

/// Reads what a worker might say; how many messages and lines of newer builds there were. For `tests/fuzz`.
pub async fn read_foreign_lines(reader: impl AsyncRead + Unpin) -> [usize; 2] {
    let (mut lines, mut counts) = (Lines::new(reader), [0, 0]);
    while let Ok(Some(line)) = lines.next().await {
        counts[usize::from(matches!(line, Line::Unknown))] += 1;
        if let Line::Message(mut message) = line {
            sanitize(&mut message);
        }
    }
    counts
}

/// Bounds what becomes a part of our own lines.
fn sanitize(message: &mut ToAgent) {
    match message {
        ToAgent::Heartbeat { activity, .. } => *activity = part_of_line(activity),
        ToAgent::State { collectives, .. } => {
            collectives.drain(..collectives.len().saturating_sub(MAX_COLLECTIVES));
            for collective in collectives {
                collective.group = part_of_line(&collective.group);
                collective.operation = part_of_line(&collective.operation);
            }
        }
        _ => {}
    }
}

/// A worker's words as a part of a line of ours: short, and without what moves a terminal's cursor.
fn part_of_line(words: &str) -> String {
    let words = &words[..words.floor_char_boundary(MAX_ACTIVITY_BYTES)];
    printable::line(words).into_owned()
}

async fn write_all(mut writer: OwnedWriteHalf, mut queue: mpsc::Receiver<Arc<[u8]>>) -> io::Result<()> {
    while let Some(line) = queue.recv().await {
        match timeout(WRITE_BOUND, writer.write_all(&line)).await {
            Ok(written) => written?,
            Err(_) => return Err(io::ErrorKind::TimedOut.into()),
        }
    }
    Ok(())
}

#[expect(clippy::large_enum_variant, reason = "a connection has one at a time")]
enum Line {
    Message(ToAgent),
    /// JSON, but of a newer build.
    Unknown,
}

/// Reads bounded lines.
struct Lines<R> {
    reader: BufReader<R>,
    /// The line so far: kept here, so that a cancelled [`Lines::next`] goes on where it stopped.
    line: Vec<u8>,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    fn new(reader: R) -> Self {
        Self {
            reader: BufReader::new(reader),
            line: Vec::new(),
        }
    }

    /// The next line; none at the end. Cancel safe.
    async fn next(&mut self) -> Result<Option<Line>, ConnectionError> {
        let room = (MAX_LINE_BYTES - self.line.len()) as u64;
        let read = (&mut self.reader)
            .take(room)
            .read_until(b'\n', &mut self.line)
            .await?;
        if read == 0 && self.line.is_empty() {
            return Ok(None);
        }
        if !self.line.ends_with(b"\n") {
            return Err(ConnectionError::BadLine);
        }
        let line = std::mem::take(&mut self.line);
        match serde_json::from_slice(&line) {
            Ok(message) => Ok(Some(Line::Message(message))),
            Err(_) if serde_json::from_slice::<serde_json::Value>(&line).is_ok() => Ok(Some(Line::Unknown)),
            Err(_) => Err(ConnectionError::BadLine),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gather_comes_in_lines_that_fit() {
        let entry = |i: usize| KvEntry {
            key: format!("rank/{i:04}"),
            value: vec![7; 100 << 10],
        };
        let entries: Vec<_> = (0..20).map(entry).collect();
        let (mut all, mut after, mut lines) = (Vec::new(), String::new(), 0);
        loop {
            let (entries, more) = page(&entries, &after);
            after.clone_from(entries.keys().next_back().unwrap());
            all.extend(entries.keys().cloned());
            let line = encode(&ToWorker::KvEntries {
                call: 1,
                entries,
                more,
            });
            assert!(line.len() <= MAX_LINE_BYTES, "{}", line.len());
            lines += 1;
            if !more {
                break;
            }
        }
        assert!(all.iter().eq(entries.iter().map(|entry| &entry.key)));
        assert!((3..6).contains(&lines), "{lines}");
        assert_eq!(page(&[], ""), (BTreeMap::new(), false));
    }
}
