//! The control socket to the agent: connecting, its lines of bounded length, and the two threads that read and write it.

use std::collections::BTreeMap;
use std::io::{self, Read, Write as _};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ddp_proto::control::{KvRefusal, MAX_LINE_BYTES, PROTOCOL, Phase, ToAgent, ToWorker};
use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::Generation;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike as _};

use super::outbox::Outbox;
use super::store::Calls;
use super::store::GRACE;
use super::{Cancel, SessionError, StopRequest, cancel, stacks};

/// How long [`Link::shutdown`] waits for queued lines and for each thread.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the answer to a question of the agent may wait in the queue.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Longest text of an answer; a line holds more, with its quotes.
const MAX_ANSWER_BYTES: usize = 256 << 10;

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

impl Default for Times {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(30),
            heartbeat: Duration::from_secs(1),
            grace: GRACE,
        }
    }
}

/// What the agent answered to the hello.
#[derive(Debug)]
pub(super) struct Assigned {
    pub(super) generation: Generation,
    pub(super) vars: BTreeMap<String, String>,
    pub(super) node_addrs: Vec<String>,
}

/// A connection to the agent.
pub(super) struct Link {
    pub(super) shared: Arc<Shared>,
    stream: UnixStream,
    threads: Vec<JoinHandle<()>>,
}

/// What the threads of a link and its users share.
pub(super) struct Shared {
    pub(super) outbox: Arc<Outbox>,
    pub(super) calls: Arc<Calls>,
    pub(super) cancel: Cancel,
    pub(super) stop: StopRequest,
    generation: OnceLock<Generation>,
    closing: AtomicBool,
}

impl Link {
    /// Connects, says hello, waits for the assignment, and starts the threads.
    pub(super) fn connect(
        address: &str,
        env: &WorkerEnv,
        times: Times,
    ) -> Result<(Self, Assigned), SessionError> {
        let deadline = Instant::now() + times.handshake;
        let mut stream = open(address, times.handshake)?;
        let lost = |e: &io::Error| no_assignment(address, &format!("the connection was lost: {e}"));
        let hello = ToAgent::Hello {
            protocol: PROTOCOL,
            local_rank: env.local_rank.get(),
            generation: env.generation,
            pid: std::process::id(),
            listens: true,
        };
        let mut line = serde_json::to_vec(&hello).expect("control messages serialise");
        line.push(b'\n');
        stream.write_all(&line).map_err(|e| lost(&e))?;
        // From here on a write may block for as long as the agent does not read: only the writer thread
        // does so, and a shutdown of the socket wakes it.
        stream.set_write_timeout(None).map_err(|e| lost(&e))?;

        let first = ToAgent::Heartbeat {
            step: 0,
            phase: Phase::Starting,
            quiet_ms: 0,
            progress: None,
            waits: Vec::new(),
        };
        let cancel = Cancel::new();
        let shared = Arc::new(Shared {
            outbox: Arc::new(Outbox::new(first, times.heartbeat, &cancel)),
            calls: Arc::default(),
            cancel,
            stop: StopRequest::default(),
            generation: OnceLock::new(),
            closing: AtomicBool::new(false),
        });
        let mut lines = LineReader::new(stream.try_clone().map_err(|e| lost(&e))?);
        let assigned = await_assignment(&mut lines, &shared, address, deadline)?;

        // A blocked get must see at once that the generation is over, whichever side says so.
        let calls = Arc::downgrade(&shared.calls);
        shared.cancel.on_cancel(move || {
            if let Some(calls) = calls.upgrade() {
                calls.wake();
            }
        });
        let mut link = Self {
            shared,
            stream,
            threads: Vec::new(),
        };
        link.start(lines)?;
        Ok((link, assigned))
    }

    fn start(&mut self, lines: LineReader) -> Result<(), SessionError> {
        let thread = |name: &'static str, cause: &io::Error| SessionError::Thread {
            name,
            cause: cause.to_string(),
        };
        let shared = Arc::clone(&self.shared);
        let name = "ddp-control-in";
        let builder = std::thread::Builder::new().name(name.into());
        let reader = builder
            .spawn(move || shared.read(lines))
            .map_err(|e| thread(name, &e))?;
        self.threads.push(reader);

        let shared = Arc::clone(&self.shared);
        let name = "ddp-control-out";
        let stream = self.stream.try_clone().map_err(|e| thread(name, &e))?;
        let builder = std::thread::Builder::new().name(name.into());
        let writer = builder
            .spawn(move || shared.write(stream))
            .map_err(|e| thread(name, &e))?;
        self.threads.push(writer);
        Ok(())
    }

    /// Writes what is queued, within a bound, then closes the socket and ends the threads.
    pub(super) fn shutdown(mut self) {
        self.shared.outbox.flush(Instant::now() + SHUTDOWN_TIMEOUT);
        self.close();
        for thread in self.threads.drain(..) {
            // The socket is shut down, so that both threads are on their way out of their loops.
            let _ = thread.join();
        }
    }

    fn close(&self) {
        self.shared.closing.store(true, Ordering::Release);
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
    fn read(&self, mut lines: LineReader) {
        let why = loop {
            match lines.next(None) {
                Ok(Some(line)) => {
                    if let Err(problem) = self.take(&line) {
                        break format!("the agent's message cannot be read: {problem}");
                    }
                }
                Ok(None) => break "the agent is gone: it closed the control socket".into(),
                Err(e) => break format!("the agent is gone: {e}"),
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

    /// Answers from a thread of its own: the word that the generation is over must not wait for it.
    fn describe(&self) {
        let (outbox, cancel) = (Arc::clone(&self.outbox), self.cancel.clone());
        let thread = std::thread::Builder::new().name("ddp-describe".into());
        // Without a thread there is no answer, which the agent does not count on.
        let _ = thread.spawn(move || outbox.push(&state(&cancel), Instant::now() + ANSWER_TIMEOUT));
    }

    fn lost(&self, why: String) {
        // First: who is refused by the outbox asks for the cause.
        if !self.closing.load(Ordering::Acquire) {
            self.cancel.cancel(why);
        }
        self.outbox.close();
    }

    /// Takes one line; an assignment is handed back.
    fn take(&self, line: &[u8]) -> Result<Option<ToWorker>, serde_json::Error> {
        let value: serde_json::Value = serde_json::from_slice(line)?;
        let message: ToWorker = match serde_json::from_value(value) {
            Ok(message) => message,
            Err(error) => {
                tracing::debug!(%error, "skipped a control message of another build");
                return Ok(None);
            }
        };
        match message {
            ToWorker::Assignment { .. } => return Ok(Some(message)),
            ToWorker::StopAtStepBoundary { cause } => {
                self.stop.ask(cause);
            }
            ToWorker::GenerationOver { generation, cause } => {
                // The end of an earlier generation says nothing about ours.
                if self.generation.get().is_none_or(|ours| generation >= *ours) {
                    self.cancel.cancel(cause);
                }
            }
            ToWorker::Describe => self.describe(),
            ToWorker::KvReply {
                call,
                value,
                error,
                refusal,
            } => {
                let refused = |words| Err((refusal.unwrap_or(KvRefusal::Other), words));
                self.calls.answer(call, error.map_or(Ok(value), refused));
            }
        }
        Ok(None)
    }
}

/// What this process waits for and where its threads are.
fn state(cancel: &Cancel) -> ToAgent {
    let mut text = cancel::in_words(&cancel.waits());
    text.push_str(&stacks::capture());
    let end = (0..=text.len().min(MAX_ANSWER_BYTES))
        .rev()
        .find(|&i| text.is_char_boundary(i));
    text.truncate(end.unwrap_or(0));
    ToAgent::State { text }
}

fn await_assignment(
    lines: &mut LineReader,
    shared: &Shared,
    address: &str,
    deadline: Instant,
) -> Result<Assigned, SessionError> {
    loop {
        let line = match lines.next(Some(deadline)) {
            Ok(Some(line)) => line,
            Ok(None) => return Err(no_assignment(address, "it closed the control socket")),
            Err(e) if e.kind() == io::ErrorKind::TimedOut => {
                return Err(no_assignment(address, "it did not answer in time"));
            }
            Err(e) => return Err(no_assignment(address, &e.to_string())),
        };
        let message = shared
            .take(&line)
            .map_err(|e| no_assignment(address, &e.to_string()))?;
        if let Some(cause) = shared.cancel.cause() {
            return Err(SessionError::Superseded(cause.to_owned()));
        }
        let Some(ToWorker::Assignment {
            protocol,
            generation,
            env: vars,
            node_addrs,
        }) = message
        else {
            continue;
        };
        if protocol != PROTOCOL {
            return Err(SessionError::Protocol {
                found: protocol,
                expected: PROTOCOL,
            });
        }
        let _ = shared.generation.set(generation);
        return Ok(Assigned {
            generation,
            vars,
            node_addrs,
        });
    }
}

fn no_assignment(address: &str, cause: &str) -> SessionError {
    SessionError::NoAssignment {
        address: address.to_owned(),
        cause: cause.to_owned(),
    }
}

/// Connects to `@name` (abstract) or to a path, and checks that the listener runs under our user.
fn open(address: &str, timeout: Duration) -> Result<UnixStream, SessionError> {
    let failed = |e: nix::Error| SessionError::Connect {
        address: address.to_owned(),
        cause: e.desc().to_owned(),
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

    let peer = getsockopt(&fd.as_fd(), sockopt::PeerCredentials).map_err(failed)?;
    let ours = nix::unistd::geteuid().as_raw();
    if peer.uid() != ours && peer.uid() != 0 {
        return Err(SessionError::Stranger {
            address: address.to_owned(),
            found: peer.uid(),
            expected: ours,
        });
    }
    Ok(UnixStream::from(fd))
}

const CHUNK_BYTES: usize = 16 << 10;

/// Splits what the agent says into lines.
struct LineReader {
    stream: UnixStream,
    /// Bytes that were read and not yet handed out.
    buffer: Vec<u8>,
    /// No newline in `buffer[..searched]`.
    searched: usize,
}

impl LineReader {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            buffer: Vec::new(),
            searched: 0,
        }
    }

    /// The next line without its newline; `None` at the end. Waits for ever without a deadline: then only
    /// a shutdown of the socket, by either side, ends the wait.
    pub(super) fn next(&mut self, deadline: Option<Instant>) -> io::Result<Option<Vec<u8>>> {
        loop {
            if let Some(at) = self.buffer[self.searched..].iter().position(|&b| b == b'\n') {
                let end = self.searched + at;
                let rest = self.buffer.split_off(end + 1);
                let mut line = std::mem::replace(&mut self.buffer, rest);
                line.truncate(end);
                self.searched = 0;
                return Ok(Some(line));
            }
            self.searched = self.buffer.len();
            if self.buffer.len() >= MAX_LINE_BYTES {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("a line is longer than {MAX_LINE_BYTES} bytes"),
                ));
            }
            if !self.fill(deadline)? {
                return Ok(None);
            }
        }
    }

    /// Reads once. False at the end of the stream; a line that was cut off there is no line.
    fn fill(&mut self, deadline: Option<Instant>) -> io::Result<bool> {
        let mut chunk = [0; CHUNK_BYTES];
        loop {
            let left = match deadline.map(|d| d.saturating_duration_since(Instant::now())) {
                Some(Duration::ZERO) => return Err(io::ErrorKind::TimedOut.into()),
                left => left,
            };
            self.stream.set_read_timeout(left)?;
            match self.stream.read(&mut chunk) {
                Ok(0) => return Ok(false),
                Ok(n) => {
                    self.buffer.extend_from_slice(&chunk[..n]);
                    return Ok(true);
                }
                // A timeout of the socket shows as `WouldBlock`; the loop's own clock decides.
                Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
                Err(e) => return Err(e),
            }
        }
    }
}
