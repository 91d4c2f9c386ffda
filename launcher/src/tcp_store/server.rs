//! The sockets of the store, on a thread of their own: the agent does not wait for what workers do to the store.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit};
use nix::sys::socket::{Shutdown, setsockopt, shutdown, sockopt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore, SemaphorePermit, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::store::{ClientId, Refused, Store};
use super::wire::{Command, Decoder, STOP_WAITING, WireError};
use crate::output::console::Console;
use crate::threads;

/// Connections at one time, and no more than a quarter of the descriptors of this process: a rendezvous may take half, and
/// workers need some. A rank has a few for each process group.
const MAX_CONNECTIONS: usize = 16 << 10;
/// Memory for commands that have not arrived yet and answers that have not left yet, over all connections.
const MAX_HELD_BYTES: usize = 1 << 30;
const STACK_BYTES: usize = 2 << 20;
/// How long a connection may take to prove that it is a client.
const VALIDATION_BOUND: Duration = Duration::from_mins(1);
/// How long a client may not read an answer.
const WRITE_BOUND: Duration = Duration::from_mins(5);
/// Pause after a failure to accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long no rank may use the store until people are told.
pub(crate) const UNUSED_BOUND: Duration = Duration::from_mins(1);

/// Why a connection was closed.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("all connections together hold {MAX_HELD_BYTES} bytes of unfinished commands and answers")]
    OutOfMemory,
    /// The client went away, or does not respond.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The store of one generation, open until it is closed or dropped.
#[derive(Debug)]
pub(crate) struct TcpStoreServer {
    listener: StdListener,
    /// Ends the thread when it is dropped.
    _open: oneshot::Sender<Infallible>,
}

impl TcpStoreServer {
    /// Serves an empty store. Says so if no rank has used it within `patience`.
    pub(crate) fn start(listener: StdListener, console: Console, patience: Duration) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let accepting = listener.try_clone()?;
        let (open, closed) = oneshot::channel();
        let serve = move || {
            let accepting = TcpListener::from_std(accepting)?;
            Ok(async move {
                let port = accepting.local_addr().map_or(0, |address| address.port());
                let hub = Arc::new(Hub::new(console));
                // Whichever is dropped, all that is served ends.
                tokio::select! {
                    _ = async { tokio::join!(accept(accepting, hub.clone()), hub.report_unused(port, patience)) } => {}
                    _ = closed => {}
                }
            })
        };
        threads::start_runtime("tcp-store", STACK_BYTES, serve)?;
        Ok(Self {
            listener,
            _open: open,
        })
    }

    /// Takes no connection from now on, and ends those that there are.
    pub(crate) fn close(self) {
        // The thread holds the socket for a moment, for which the next generation does not wait.
        if let Err(error) = shutdown(self.listener.as_raw_fd(), Shutdown::Both) {
            tracing::warn!("cannot shut the store down: {error}");
        }
    }
}

/// What all connections share.
struct Hub {
    shared: Mutex<Shared>,
    /// A permit for each byte of [`MAX_HELD_BYTES`].
    memory: Semaphore,
    console: Console,
    complained: AtomicBool,
    used: AtomicBool,
}

#[derive(Default)]
struct Shared {
    store: Store,
    /// Wakes a connection whose wait is over.
    wakers: HashMap<ClientId, Arc<Notify>>,
}

impl Hub {
    fn new(console: Console) -> Self {
        Self {
            shared: Mutex::default(),
            memory: Semaphore::new(MAX_HELD_BYTES),
            console,
            complained: AtomicBool::new(false),
            used: AtomicBool::new(false),
        }
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory for `bytes`, which is given back with what is returned.
    fn hold(&self, bytes: usize) -> Result<SemaphorePermit<'_>, ServeError> {
        let bytes = u32::try_from(bytes).map_err(|_| ServeError::OutOfMemory)?;
        let held = self.memory.try_acquire_many(bytes);
        held.map_err(|_| ServeError::OutOfMemory)
    }

    fn enter(&self, client: ClientId) -> Arc<Notify> {
        let waker = Arc::new(Notify::new());
        self.shared().wakers.insert(client, waker.clone());
        waker
    }

    fn leave(&self, client: ClientId) {
        let mut shared = self.shared();
        shared.wakers.remove(&client);
        shared.store.leave(client);
        shared.wake();
    }

    fn apply(&self, client: ClientId, command: Command) -> Result<Vec<u8>, Refused> {
        self.used.store(true, Ordering::Relaxed);
        let mut shared = self.shared();
        let answer = shared.store.apply(client, command);
        shared.wake();
        answer
    }

    /// Tells people if no rank has come after this time: those of a script that sets MASTER_PORT itself wait elsewhere.
    async fn report_unused(&self, port: u16, patience: Duration) {
        sleep(patience).await;
        if !self.used.load(Ordering::Relaxed) {
            self.console.say(&format!(
                "no rank has come to the store at MASTER_PORT {port} in {} s: if the ranks wait in `init_process_group`, the script \
                 uses a different address or port\n  hint: take MASTER_ADDR and MASTER_PORT from the environment, or give \
                 the script's own port as `--master-port`",
                patience.as_secs()
            ));
        }
    }

    /// Tells people of the first connection that was closed for what it said: it may be what the job fails of.
    fn complain(&self, peer: SocketAddr, error: &ServeError) {
        if matches!(error, ServeError::Io(_)) || self.complained.swap(true, Ordering::Relaxed) {
            return;
        }
        self.console.say(&format!(
            "closed a connection from `{peer}` to the store at MASTER_PORT: {error}\n  hint: with \
             `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` in the launcher's environment, rank 0 opens the store itself"
        ));
    }
}

impl Shared {
    fn wake(&mut self) {
        for client in self.store.take_woken() {
            if let Some(waker) = self.wakers.get(&client) {
                waker.notify_one();
            }
        }
    }
}

fn most_connections() -> usize {
    // A limit that cannot be read is none.
    let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
    MAX_CONNECTIONS.min(usize::try_from(files / 4).unwrap_or(usize::MAX))
}

async fn accept(listener: TcpListener, hub: Arc<Hub>) {
    let mut connections = JoinSet::new();
    let mut next_id = 0;
    let most = most_connections();
    loop {
        // Cancel safe: `accept` takes no connection it does not return, `join_next` likewise.
        tokio::select! {
            accepted = listener.accept(), if connections.len() < most => match accepted {
                Ok((stream, peer)) => {
                    next_id += 1;
                    connections.spawn(serve(next_id, stream, peer, hub.clone()));
                }
                Err(error) => {
                    // Out of descriptors, most likely: one of the connections has to end first.
                    tracing::warn!("the store cannot accept a connection: {error}");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn serve(client: ClientId, stream: TcpStream, peer: SocketAddr, hub: Arc<Hub>) {
    // Small answers are sent at once, and a client whose machine died is noticed.
    let options = stream
        .set_nodelay(true)
        .and_then(|()| Ok(setsockopt(&stream, sockopt::KeepAlive, &true)?));
    if let Err(error) = options {
        tracing::warn!("the store cannot set options of the connection from {peer}: {error}");
    }
    let waker = hub.enter(client);
    let serving = async {
        let connection = Connection {
            client,
            stream,
            hub: &hub,
            held: hub.hold(0)?,
        };
        connection.run(&waker).await
    };
    let ended = serving.await;
    hub.leave(client);
    if let Err(error) = ended {
        hub.complain(peer, &error);
    }
}

struct Connection<'a> {
    client: ClientId,
    stream: TcpStream,
    hub: &'a Hub,
    /// The connection's part of the memory that all may hold.
    held: SemaphorePermit<'a>,
}

impl Connection<'_> {
    /// Answers until the client leaves.
    async fn run(mut self, waker: &Notify) -> Result<(), ServeError> {
        let mut decoder = Decoder::default();
        let validated_by = Instant::now() + VALIDATION_BOUND;
        loop {
            // Cancel safe: `read_buf` has read nothing if another branch is taken, and `notified` keeps its notice.
            tokio::select! {
                read = self.stream.read_buf(decoder.space()) => {
                    if read? == 0 {
                        return Ok(());
                    }
                    self.hold(decoder.held_bytes())?;
                    while let Some(command) = decoder.next_command()? {
                        let answer = self.hub.apply(self.client, command)?;
                        self.write(&answer).await?;
                    }
                }
                () = waker.notified() => {
                    let is_over = self.hub.shared().store.take_over(self.client);
                    if is_over {
                        self.write(&[STOP_WAITING]).await?;
                    }
                }
                () = sleep_until(validated_by), if !decoder.is_validated() => return Ok(()),
            }
        }
    }

    async fn write(&mut self, answer: &[u8]) -> Result<(), ServeError> {
        let before = self.held.num_permits();
        self.hold(before + answer.len())?;
        timeout(WRITE_BOUND, self.stream.write_all(answer))
            .await
            .map_err(io::Error::from)??;
        self.hold(before)
    }

    /// Changes how much memory the connection holds.
    fn hold(&mut self, bytes: usize) -> Result<(), ServeError> {
        let held = self.held.num_permits();
        match bytes.checked_sub(held) {
            Some(more) => self.held.merge(self.hub.hold(more)?),
            None => drop(self.held.split(held - bytes)),
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
