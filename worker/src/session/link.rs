//! The control socket to the agent: connecting, its lines of bounded length, and the two threads that read and write it.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ddp_proto::control::{KvRefusal, MAX_LINE_BYTES, PROTOCOL, ToAgent, ToWorker, WorkerAssignment};
use ddp_proto::env::{EnvError, WorkerEnv};
use ddp_proto::ids::Generation;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike as _};
use parking_lot::Mutex;

use super::outbox::{Outbox, to_line};
use super::store::{Answered, GRACE, RemoteStore};
use super::{Cancel, StopRequest, cancel, stacks};

/// How long [`Link::shutdown`] waits for queued lines.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);
/// Longest wait for the next generation. The agent ends it where no generation follows.
const PARKED_TIMEOUT: Duration = Duration::from_hours(24);
/// Longest text of an answer to a question of the agent; a line holds more, with its quotes.
const MAX_ANSWER_BYTES: usize = 256 << 10;
/// Bytes that are read at once.
const CHUNK_BYTES: usize = 16 << 10;

/// A worker could not take its place in the job. The sentences say what to do.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The environment contract is incomplete or contradicts itself.
    #[error(transparent)]
    Env(#[from] EnvError),
    /// What launched the worker must change, so that another attempt fails too.
    #[error("{0}")]
    Refused(String),
    /// The agent is out of reach, or the generation is over. Another attempt may succeed.
    #[error("{0}")]
    Lost(String),
}

/// Times of a link, shorter in tests.
#[derive(Clone, Copy)]
pub(super) struct Times {
    /// From the connection to the assignment.
    pub(super) handshake: Duration,
    /// Between repetitions of the last heartbeat; the contract asks for one every 2 seconds.
    pub(super) heartbeat: Duration,
    /// From the deadline of a key-value call to the last moment for its answer.
    pub(super) grace: Duration,
}

/// Those of programs.
pub(super) const TIMES: Times = Times {
    handshake: Duration::from_secs(30),
    heartbeat: Duration::from_secs(1),
    grace: GRACE,
};

/// A connection to the agent.
pub(super) struct Link {
    pub(super) shared: Arc<Shared>,
    stream: UnixStream,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What the threads of a link and its users share.
pub(super) struct Shared {
    pub(super) outbox: Arc<Outbox>,
    pub(super) store: Arc<RemoteStore>,
    pub(super) cancel: Cancel,
    pub(super) stop: StopRequest,
    generation: OnceLock<Generation>,
}

impl Shared {
    fn new(times: Times) -> Arc<Self> {
        let cancel = Cancel::new();
        let outbox = Arc::new(Outbox::new(times.heartbeat, &cancel));
        let store = Arc::new(RemoteStore::new(&outbox, &cancel, times.grace));
        // A blocked get must see at once that the generation is over, whichever side sends it.
        let calls = Arc::downgrade(&store);
        cancel.on_cancel(move || {
            if let Some(calls) = calls.upgrade() {
                calls.end_calls();
            }
        });
        Arc::new(Self {
            outbox,
            store,
            cancel,
            stop: StopRequest::default(),
            generation: OnceLock::new(),
        })
    }
}

impl Link {
    /// Connects, says hello, waits for the assignment, and starts the threads. A worker that outlives its generation, which
    /// is that of `env`, waits for the next one.
    pub(super) fn connect(
        address: &str,
        env: &WorkerEnv,
        times: Times,
        outlives: bool,
    ) -> Result<(Self, WorkerAssignment), SessionError> {
        let patience = if outlives { PARKED_TIMEOUT } else { times.handshake };
        let deadline = Instant::now() + patience;
        let no_assignment =
            |cause: &str| SessionError::Lost(format!("the agent at `{address}` sent no assignment: {cause}"));
        let mut link = Self {
            stream: open(address, times.handshake)?,
            shared: Shared::new(times),
            threads: Mutex::default(),
        };
        let hello = to_line(&ToAgent::Hello {
            protocol: PROTOCOL,
            local_rank: env.local_rank.get(),
            generation: env.generation,
            pid: std::process::id(),
            listens: true,
            outlives,
        });
        // From here on a write may block for as long as the agent does not read: only the writer thread
        // writes, and a shutdown of the socket wakes it.
        let sent = link.stream.write_all(&hello);
        sent.and_then(|()| link.stream.set_write_timeout(None))
            .map_err(|e| no_assignment(&format!("the connection was lost: {e}")))?;

        let (sender, assignment) = channel();
        link.start("ddp-control-in", move |shared, stream| {
            shared.read(stream, &sender);
        })?;
        let cause = || link.shared.cancel.cause().unwrap_or_default();
        let left = deadline.saturating_duration_since(Instant::now());
        let assigned = match assignment.recv_timeout(left) {
            Ok(Some(assigned)) => assigned,
            Ok(None) => {
                let words = format!(
                    "the launcher stopped the workers before this one had started: {}",
                    cause()
                );
                return Err(SessionError::Lost(words));
            }
            Err(RecvTimeoutError::Timeout) => return Err(no_assignment("it did not answer in time")),
            // The reader has ended.
            Err(RecvTimeoutError::Disconnected) => {
                return Err(no_assignment(cause().trim_start_matches("the agent is gone: ")));
            }
        };
        if assigned.protocol != PROTOCOL {
            return Err(SessionError::Refused(format!(
                "the agent uses version {} of the control protocol, this worker {PROTOCOL}\n  hint: start the worker with `ddp-run` of the same release",
                assigned.protocol
            )));
        }
        link.start("ddp-control-out", Shared::write)?;
        Ok((link, assigned))
    }

    fn start(
        &self,
        name: &'static str,
        run: impl FnOnce(&Shared, UnixStream) + Send + 'static,
    ) -> Result<(), SessionError> {
        let shared = Arc::clone(&self.shared);
        let builder = std::thread::Builder::new().name(name.into());
        let started = self.stream.try_clone();
        let started = started.and_then(|stream| builder.spawn(move || run(&shared, stream)));
        let failed = |e| SessionError::Lost(format!("cannot start thread `{name}`: {e}"));
        self.threads.lock().push(started.map_err(failed)?);
        Ok(())
    }

    /// Writes what is queued, within a bound, then closes the socket and ends the threads.
    pub(super) fn shutdown(&self) {
        self.shared.outbox.flush(Instant::now() + SHUTDOWN_TIMEOUT);
        self.close();
        for thread in self.threads.lock().drain(..) {
            // The socket is shut down, so that both threads are on their way out of their loops.
            let _ = thread.join();
        }
    }

    fn close(&self) {
        self.shared.outbox.close();
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    /// Takes what the agent sends. The first assignment is handed over; `None` if the generation is over before it.
    fn read(&self, stream: UnixStream, assigned: &Sender<Option<WorkerAssignment>>) {
        let mut lines = BufReader::with_capacity(CHUNK_BYTES, stream);
        let why = loop {
            let line = match next_line(&mut lines) {
                Ok(Some(line)) => line,
                Ok(None) => break "the agent is gone: it closed the control socket".into(),
                Err(e) => break format!("the agent is gone: {e}"),
            };
            match self.take(&line) {
                // The session has begun, or was given up.
                Ok(found) if found.is_some() || self.cancel.cause().is_some() => drop(assigned.send(found)),
                Ok(_) => {}
                Err(problem) => break format!("the agent's message cannot be read: {problem}"),
            }
        };
        self.lost(why);
    }

    fn write(&self, mut stream: UnixStream) {
        while let Some(line) = self.outbox.next() {
            if let Err(e) = stream.write_all(&line) {
                return self.lost(format!("the agent is gone: {e}"));
            }
        }
    }

    fn lost(&self, why: String) {
        // First, because a caller that the outbox refuses asks for the cause. A connection that this side closed has none.
        if !self.outbox.is_closed() {
            self.cancel.cancel(why);
        }
        self.outbox.close();
    }

    /// Takes one line; an assignment is handed back.
    fn take(&self, line: &[u8]) -> Result<Option<WorkerAssignment>, serde_json::Error> {
        let value: serde_json::Value = serde_json::from_slice(line)?;
        let message: ToWorker = match serde_json::from_value(value) {
            Ok(message) => message,
            Err(error) => {
                tracing::debug!(%error, "skipped a control message of another build");
                return Ok(None);
            }
        };
        match message {
            ToWorker::Assignment(assignment) => {
                let _ = self.generation.set(assignment.generation);
                return Ok(Some(assignment));
            }
            ToWorker::StopAtStepBoundary { cause, stay } => self.stop.ask(cause, stay),
            ToWorker::GenerationOver { generation, cause } => {
                // The end of an earlier generation says nothing about ours.
                if self.generation.get().is_none_or(|ours| generation >= *ours) {
                    self.cancel.cancel(cause);
                }
            }
            ToWorker::Describe => {
                let (outbox, cancel) = (Arc::clone(&self.outbox), self.cancel.clone());
                // In a thread of its own: the message that the generation is over must not wait for it. Without a
                // thread, or room in the queue, there is no answer, which the agent does not count on.
                let thread = std::thread::Builder::new().name("ddp-describe".into());
                let _ = thread.spawn(move || outbox.push(&state(&cancel)));
            }
            ToWorker::KvReply {
                call,
                value,
                error,
                refusal,
            } => {
                let refused = |words| Err((refusal.unwrap_or(KvRefusal::Other), words));
                let value = value.map(Answered::Value);
                self.store.answer(call, error.map_or(Ok(value), refused));
            }
            ToWorker::KvEntries { call, entries, more } => {
                self.store
                    .answer(call, Ok(Some(Answered::Entries(entries, more))));
            }
        }
        Ok(None)
    }
}

/// What this process waits for and where its threads are.
fn state(cancel: &Cancel) -> ToAgent {
    let mut text = cancel::in_words(&cancel.waits()) + &stacks::capture();
    text.truncate(text.floor_char_boundary(MAX_ANSWER_BYTES));
    ToAgent::State {
        text,
        collectives: Vec::new(),
    }
}

/// Connects to `@name` (abstract) or to a path, and checks that the listener runs under our user.
fn open(address: &str, timeout: Duration) -> Result<UnixStream, SessionError> {
    let failed = |e: nix::Error| {
        SessionError::Lost(format!(
            "cannot connect to the agent at `{address}`: {}\n  hint: `DDP_CONTROL` is valid only for workers of the `ddp-run` that set it",
            e.desc()
        ))
    };
    let to = match address.strip_prefix('@') {
        Some(name) => UnixAddr::new_abstract(name.as_bytes()),
        None => UnixAddr::new(address),
    }
    .map_err(failed)?;
    let fd: OwnedFd = socket(
        AddressFamily::Unix,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC,
        None,
    )
    .map_err(failed)?;
    // Also bounds the connect, which waits while the listener's backlog is full.
    let timeout = TimeVal::milliseconds(timeout.as_millis() as i64);
    setsockopt(&fd, sockopt::SendTimeout, &timeout).map_err(failed)?;
    connect(fd.as_raw_fd(), &to).map_err(failed)?;

    if let Some(peer) = other_user(&fd).map_err(failed)? {
        let ours = nix::unistd::geteuid();
        return Err(SessionError::Refused(format!(
            "the agent at `{address}` runs as user id {peer}, this worker as {ours}: refused"
        )));
    }
    Ok(UnixStream::from(fd))
}

/// The user at the other end of a Unix socket, if that is neither ours nor root.
pub(crate) fn other_user(socket: &impl AsFd) -> Result<Option<u32>, nix::Error> {
    let peer = getsockopt(&socket.as_fd(), sockopt::PeerCredentials)?.uid();
    let is_trusted = peer == 0 || peer == nix::unistd::geteuid().as_raw();
    Ok((!is_trusted).then_some(peer))
}

/// The next line without its newline; `None` at the end, where a line that was cut off is no line. Waits for ever: only
/// a shutdown of the socket, by either side, ends the wait.
fn next_line(lines: &mut BufReader<UnixStream>) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    lines.take(MAX_LINE_BYTES as u64).read_until(b'\n', &mut line)?;
    if line.pop_if(|last| *last == b'\n').is_some() {
        Ok(Some(line))
    } else if line.len() < MAX_LINE_BYTES {
        Ok(None)
    } else {
        let words = format!("a line is longer than {MAX_LINE_BYTES} bytes");
        Err(io::Error::new(io::ErrorKind::InvalidData, words))
    }
}
