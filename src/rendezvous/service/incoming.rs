//! Connections as they come: room for all nodes of a job at once, without haste where the system can open no more.

use std::io;
use std::net::SocketAddr;
use std::os::linux::net::SocketAddrExt as _;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use ddp_proto::trust::tls::{TlsError, TlsFiles, server_of_files, server_of_token};
use ddp_proto::trust::token::Token;
use nix::errno::Errno;
use tokio::net::{TcpListener, TcpSocket, UnixListener};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_rustls::rustls::ServerConfig;
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tokio_stream::{Stream, StreamExt as _};

use super::admission::Admission;
use super::connection::{Connection, Socket, admit};
use crate::rendezvous::config::Config;

/// How often an operator's files are looked at.
const RELOAD: Duration = Duration::from_secs(1);

/// Where a daemon listens.
#[derive(Debug)]
pub enum Listener {
    /// An abstract Unix socket, for processes of this user on this machine.
    Unix(UnixListener),
    /// A TCP port.
    Tcp(TcpListener, Transport),
}

/// What protects a TCP port.
#[derive(Clone, Debug)]
pub enum Transport {
    /// Nothing.
    Plain,
    /// TLS with the keys that follow from a token.
    Token(Arc<ServerConfig>),
    /// TLS with an operator's files, which are read again when they change.
    Files(Arc<OperatorTls>),
}

/// TLS by an operator's files.
#[derive(Debug)]
pub struct OperatorTls {
    files: TlsFiles,
    current: Mutex<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    config: Arc<ServerConfig>,
    looked: Instant,
    changed: Vec<Option<SystemTime>>,
}

impl Transport {
    /// For callers with this token.
    pub fn of_token(token: &Token) -> Result<Self, TlsError> {
        Ok(Self::Token(Arc::new(server_of_token(token)?)))
    }

    /// With an operator's files.
    pub fn of_files(files: TlsFiles) -> Result<Self, TlsError> {
        let current = Mutex::new(Loaded {
            config: Arc::new(server_of_files(&files)?),
            looked: Instant::now(),
            changed: changes(&files),
        });
        Ok(Self::Files(Arc::new(OperatorTls { files, current })))
    }

    pub(super) fn tls(&self) -> Option<Arc<ServerConfig>> {
        match self {
            Self::Plain => None,
            Self::Token(config) => Some(Arc::clone(config)),
            Self::Files(files) => Some(files.current()),
        }
    }
}

impl OperatorTls {
    /// The files as they are. While new ones do not fit together, the old ones count.
    fn current(&self) -> Arc<ServerConfig> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.looked.elapsed() >= RELOAD {
            current.looked = Instant::now();
            let changed = changes(&self.files);
            if changed != current.changed {
                match server_of_files(&self.files) {
                    Ok(config) => {
                        current.config = Arc::new(config);
                        current.changed = changed;
                        tracing::info!("the certificate has changed: new connections get the new one");
                    }
                    Err(error) => tracing::warn!("kept the certificate as it was: {error}"),
                }
            }
        }
        Arc::clone(&current.config)
    }
}

fn changes(files: &TlsFiles) -> Vec<Option<SystemTime>> {
    let files = [&files.cert, &files.key, &files.ca].into_iter().flatten();
    files
        .map(|file| file.metadata().and_then(|data| data.modified()).ok())
        .collect()
}

/// Listens at the abstract Unix socket of this name. Needs a tokio runtime.
pub fn listen_locally(name: &str) -> io::Result<UnixListener> {
    let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
    let listener = std::os::unix::net::UnixListener::bind_addr(&address)?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Accepts callers and passes on those that are let in, until nobody takes them. Handshakes take place side by side.
pub(super) async fn accept_all(
    listener: Listener,
    config: Config,
    admission: Arc<Admission>,
    admitted: mpsc::Sender<io::Result<Connection>>,
) {
    let (mut sockets, transport): (Pin<Box<dyn Stream<Item = io::Result<Socket>> + Send>>, _) = match listener
    {
        Listener::Tcp(tcp, transport) => {
            let sockets = TcpListenerStream::new(tcp).map(|tcp| tcp.map(Socket::Tcp));
            (Box::pin(unhurried(sockets)), transport)
        }
        Listener::Unix(unix) => {
            let sockets = UnixListenerStream::new(unix).map(|unix| unix.map(Socket::Unix));
            (Box::pin(unhurried(sockets)), Transport::Plain)
        }
    };
    let mut handshakes = JoinSet::new();
    loop {
        // Cancel safe: `next` of a listener and `join_next` lose nothing that they have not returned.
        tokio::select! {
            socket = sockets.next() => match socket {
                None => return,
                // It went away before it was accepted.
                Some(Err(_)) => {}
                Some(Ok(socket)) => {
                    handshakes.spawn(admit(socket, transport.clone(), Arc::clone(&admission), config.clone()));
                }
            },
            Some(shaken) = handshakes.join_next(), if !handshakes.is_empty() => {
                if let Ok(Some(connection)) = shaken
                    && admitted.send(Ok(connection)).await.is_err()
                {
                    return;
                }
            }
        }
    }
}

/// Connections that may wait to be accepted, if the system allows as many (`net.core.somaxconn`). The nodes of a job
/// come at the same time; one for which there is no room is looked at again a second later.
const WAITING_CONNECTIONS: u32 = 4096;

/// After a connection for which there is no room: the next try would be refused at once, and so on without an end.
const PAUSE: Duration = Duration::from_millis(200);

/// Listens at the first of the addresses where it can, as [`TcpListener::bind`] does, but for the room. Needs a tokio
/// runtime.
pub fn listen(addresses: &[SocketAddr]) -> io::Result<TcpListener> {
    let mut failed = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in addresses {
        match listen_at(*address) {
            Err(error) => failed = error,
            listener => return listener,
        }
    }
    Err(failed)
}

fn listen_at(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // Connections of a daemon that was here before do not keep its port.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(WAITING_CONNECTIONS)
}

/// The same connections and errors, the latter with a pause where they are the system's.
pub(super) fn unhurried<C: Send + 'static>(
    connections: impl Stream<Item = io::Result<C>>,
) -> impl Stream<Item = io::Result<C>> {
    let mut was_lacking = false;
    connections.then(move |connection| {
        let lack = connection.as_ref().err().filter(|error| is_lack(error));
        let is_lacking = lack.is_some();
        if let Some(error) = lack
            && !was_lacking
        {
            tracing::warn!("connecting nodes have to wait for free file descriptors (`ulimit -n`): {error}");
        }
        was_lacking = is_lacking;
        async move {
            if is_lacking {
                tokio::time::sleep(PAUSE).await;
            }
            connection
        }
    })
}

/// True if the system is short of something, so that the connection still waits to be accepted.
fn is_lack(error: &io::Error) -> bool {
    let lacks = [Errno::EMFILE, Errno::ENFILE, Errno::ENOBUFS, Errno::ENOMEM];
    error
        .raw_os_error()
        .is_some_and(|code| lacks.contains(&Errno::from_raw(code)))
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    /// With the usual 128 the others came a second later.
    #[tokio::test]
    async fn hundreds_of_nodes_connect_before_the_first_is_accepted() {
        const NODES: usize = 300;
        let most = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap();
        if most.trim().parse::<usize>().unwrap() < NODES {
            println!("SKIPPED: this system lets {} connections wait", most.trim());
            return;
        }
        let listener = listen(&["127.0.0.1:0".parse().unwrap()]).unwrap();
        let address = listener.local_addr().unwrap();
        let patience = Duration::from_secs(20);
        let connect = || std::net::TcpStream::connect_timeout(&address, patience).unwrap();
        let connected: Vec<_> = (0..NODES).map(|_| connect()).collect();
        assert_eq!(connected.len(), NODES);
    }

    /// The daemon once took a whole core for it.
    #[tokio::test]
    async fn a_lack_of_files_is_waited_out_and_other_errors_are_not() {
        let failing = |errno: Errno| move || Some(Err::<(), _>(io::Error::from(errno)));
        let looked_at = |errno| {
            let mut stream = pin!(unhurried(tokio_stream::iter(std::iter::from_fn(failing(errno)))));
            let mut next = pin!(stream.next());
            next.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        };
        assert!(looked_at(Errno::EMFILE).is_pending());
        assert!(matches!(
            looked_at(Errno::ECONNABORTED),
            Poll::Ready(Some(Err(_)))
        ));
        let mut stream = pin!(unhurried(tokio_stream::iter([
            Err(io::Error::from(Errno::EMFILE)),
            Ok(7)
        ])));
        assert!(stream.next().await.is_some_and(|first| first.is_err()));
        assert!(matches!(stream.next().await, Some(Ok(7))), "nothing is lost");
    }
}
