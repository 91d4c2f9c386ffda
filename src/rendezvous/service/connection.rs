//! A connection from the listener to the first call: who is there, and TLS, within one deadline.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::linux::net::SocketAddrExt as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use ddp_proto::trust::tls::{TlsError, server_of_token};
use ddp_proto::trust::token::Token;
use nix::errno::Errno;
use nix::sys::socket::{setsockopt, sockopt};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, Sleep, sleep, sleep_until, timeout_at};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::{Error as Tls, PeerIncompatible, ServerConfig};
use tonic::codegen::BoxFuture;
use tonic::transport::server::Connected;

use super::connection_limits::{Connection, ConnectionLimits};
use crate::rendezvous::config::Config;
use crate::rendezvous::event::Peer;

/// Connections that may wait to be accepted, if the system allows as many (`net.core.somaxconn`). The nodes of a job
/// come at the same time; one for which there is no room is looked at again a second later.
const WAITING_CONNECTIONS: u32 = 4096;
/// After the system lacked something for a connection: the next try would fail at once, and so on without an end.
const PAUSE: Duration = Duration::from_millis(200);
/// How often a connection that is in use is looked at.
const LOOK: Duration = Duration::from_secs(30);
/// The two ends of a connection on a Unix socket.
const HERE: Peer = Peer {
    remote: IpAddr::V4(Ipv4Addr::LOCALHOST),
    local: IpAddr::V4(Ipv4Addr::LOCALHOST),
};
/// The first byte of a TLS handshake.
const TLS_HANDSHAKE: u8 = 22;

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
}

impl Transport {
    /// For callers with this token.
    pub fn of_token(token: &Token) -> Result<Self, TlsError> {
        Ok(Self::Token(Arc::new(server_of_token(token)?)))
    }
}

/// Listens at the abstract Unix socket of this name. Needs a tokio runtime.
pub fn listen_locally(name: &str) -> io::Result<UnixListener> {
    let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
    let listener = std::os::unix::net::UnixListener::bind_addr(&address)?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Listens at the first of the addresses where it can, as [`TcpListener::bind`] does, but with more room for connections
/// that wait. Needs a tokio runtime.
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

/// The next connection of a listener. Where the system lacks something, the connection still waits, and the next try
/// comes after a pause.
pub(super) async fn next_connection<C, F>(mut accept: impl FnMut() -> F) -> C
where
    F: Future<Output = io::Result<C>>,
{
    let mut has_warned = false;
    loop {
        match accept().await {
            Ok(connection) => return connection,
            Err(error) if is_lack(&error) => {
                if !has_warned {
                    tracing::warn!(
                        "connecting nodes have to wait for free file descriptors (`ulimit -n`): {error}"
                    );
                }
                has_warned = true;
                sleep(PAUSE).await;
            }
            // It went away before it was accepted.
            Err(_) => {}
        }
    }
}

/// True if the system is short of something.
fn is_lack(error: &io::Error) -> bool {
    let lacks = [Errno::EMFILE, Errno::ENFILE, Errno::ENOBUFS, Errno::ENOMEM];
    error
        .raw_os_error()
        .is_some_and(|code| lacks.contains(&Errno::from_raw(code)))
}

/// The two ends of a TCP connection.
pub(super) fn peer_of(stream: &TcpStream) -> io::Result<Peer> {
    let ip = |address: SocketAddr| address.ip().to_canonical();
    Ok(Peer {
        remote: ip(stream.peer_addr()?),
        local: ip(stream.local_addr()?),
    })
}

/// Accepts connections for ever, and passes on those that have shaken hands. Handshakes take place side by side.
pub(super) async fn accept_all(
    listener: Listener,
    config: Config,
    limits: Arc<ConnectionLimits>,
    admitted: mpsc::Sender<io::Result<LimitedStream>>,
) {
    let mut handshakes = JoinSet::new();
    loop {
        let (peer, handshake): (_, Handshake) = match &listener {
            Listener::Tcp(listener, transport) => {
                let (tcp, _) = next_connection(|| listener.accept()).await;
                // Without addresses it is gone already, and must not pass for a caller of this machine.
                let Ok(peer) = peer_of(&tcp) else { continue };
                (
                    peer,
                    Box::pin(shake_hands(tcp, transport.clone(), config.tcp_keepalive)),
                )
            }
            Listener::Unix(listener) => {
                let (unix, _) = next_connection(|| listener.accept()).await;
                if let Err(why) = check_user(&unix) {
                    limits.refused("this machine", why);
                    continue;
                }
                let stream: Box<dyn Stream> = Box::new(unix);
                (HERE, Box::pin(std::future::ready(Ok(Some(stream)))))
            }
        };
        while handshakes.try_join_next().is_some() {}
        let slot = match limits.enter(peer.remote) {
            Ok(slot) => slot,
            Err(why) => {
                limits.refused(peer.remote, why);
                continue;
            }
        };
        slot.has_place().await;
        let connection = Connection::new(peer, slot, &config);
        let (config, admitted) = (config.clone(), admitted.clone());
        handshakes.spawn(async move {
            if let Some(stream) = admit(handshake, connection, &config).await {
                // An error means that the daemon is stopping.
                let _ = admitted.send(Ok(stream)).await;
            }
        });
    }
}

/// An abstract socket is open to every user of the machine: the daemon serves only its own and root.
fn check_user(unix: &UnixStream) -> Result<(), String> {
    let user = unix.peer_cred().map_err(|error| error.to_string())?.uid();
    let own = nix::unistd::geteuid().as_raw();
    if user == own || user == 0 {
        return Ok(());
    }
    Err(format!("user {user} is not the user of this launcher ({own})"))
}

/// What comes of a handshake: none for a caller that closes the connection before it says anything, as probes of a port
/// do.
type Handshake = BoxFuture<Option<Box<dyn Stream>>, String>;

/// Waits for a handshake until the deadline of the connection. It counts and ends a connection that fails.
async fn admit(handshake: Handshake, connection: Arc<Connection>, config: &Config) -> Option<LimitedStream> {
    let deadline = Instant::now() + config.join_wait;
    let late = || format!("no handshake within {:.1} s", config.join_wait.as_secs_f64());
    // Cancel safe: whichever comes first, the handshake is over.
    let shaken = tokio::select! {
        done = timeout_at(deadline, handshake) => done.unwrap_or_else(|_| Err(late())),
        why = connection.slot.displaced() => Err(why.to_owned()),
    };
    connection.slot.keep();
    match shaken {
        Ok(stream) => {
            connection.trust_if_authenticated(config.callers);
            Some(LimitedStream {
                stream: stream?,
                expiry: Box::pin(sleep_until(deadline)),
                connection,
            })
        }
        Err(why) => {
            connection.refused(why);
            None
        }
    }
}

async fn shake_hands(
    tcp: TcpStream,
    transport: Transport,
    keepalive: Duration,
) -> Result<Option<Box<dyn Stream>>, String> {
    set_up(&tcp, keepalive).map_err(|error| error.to_string())?;
    let mut first = [0];
    if matches!(tcp.peek(&mut first).await, Ok(0) | Err(_)) {
        return Ok(None);
    }
    match transport {
        Transport::Token(tls) => match TlsAcceptor::from(tls).accept(tcp).await {
            Ok(stream) => Ok(Some(Box::new(stream))),
            Err(error) => Err(words_of(&error)),
        },
        Transport::Plain if first == [TLS_HANDSHAKE] => {
            Err("it speaks TLS, which this daemon does not without a token".to_owned())
        }
        Transport::Plain => Ok(Some(Box::new(tcp))),
    }
}

fn set_up(tcp: &TcpStream, keepalive: Duration) -> io::Result<()> {
    tcp.set_nodelay(true)?;
    setsockopt(tcp, sockopt::KeepAlive, &true)?;
    let idle = u32::try_from(keepalive.as_secs()).unwrap_or(u32::MAX);
    setsockopt(tcp, sockopt::TcpKeepIdle, &idle.max(1))?;
    Ok(())
}

/// Explains a failed handshake, for people on the side of the daemon.
fn words_of(error: &io::Error) -> String {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Tls>());
    match inner {
        Some(
            Tls::NoCertificatesPresented
            | Tls::PeerIncompatible(PeerIncompatible::IncorrectCertificateTypeExtension),
        ) => "it has no token".into(),
        Some(Tls::InvalidCertificate(_) | Tls::AlertReceived(_)) => "it has a different token".into(),
        Some(Tls::InvalidMessage(_)) => "it speaks no TLS".into(),
        Some(other) => format!("the TLS handshake failed: {other}"),
        None => format!("the handshake failed: {error}"),
    }
}

/// Bytes in both directions.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// The bytes of a connection, which end when it [expires](Connection::expires).
pub(super) struct LimitedStream {
    stream: Box<dyn Stream>,
    expiry: Pin<Box<Sleep>>,
    connection: Arc<Connection>,
}

impl Connected for LimitedStream {
    type ConnectInfo = Arc<Connection>;

    fn connect_info(&self) -> Self::ConnectInfo {
        Arc::clone(&self.connection)
    }
}

impl LimitedStream {
    fn poll_expired(&mut self, context: &mut Context<'_>) -> Poll<()> {
        while self.expiry.as_mut().poll(context).is_ready() {
            let now = Instant::now();
            let look = now + LOOK;
            let end = self.connection.expires().map(Instant::from_std);
            let next = end.map_or(look, |end| end.min(look));
            if next <= now {
                return Poll::Ready(());
            }
            self.expiry.as_mut().reset(next);
        }
        Poll::Pending
    }

    /// Ends a write that waits for a caller that reads nothing, when the connection has expired: while HTTP/2 writes, it
    /// does not read, so the check in `poll_read` does not run.
    fn or_expired<T>(
        &mut self,
        written: Poll<io::Result<T>>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        if written.is_pending() && self.poll_expired(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        written
    }
}

impl AsyncRead for LimitedStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.poll_expired(context).is_ready() {
            // As if the caller had closed it.
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut this.stream).poll_read(context, buf)
    }
}

impl AsyncWrite for LimitedStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(context, buf);
        this.or_expired(written, context)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_flush(context);
        this.or_expired(written, context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_shutdown(context);
        this.or_expired(written, context)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::Waker;

    use tokio::io::AsyncWriteExt as _;

    use super::super::connection_limits::tests::connection_of;
    use super::*;

    /// A caller that sent pings and read no answer kept its connection for ever: nothing was read from it any more.
    #[tokio::test]
    async fn a_caller_that_reads_nothing_is_cut_while_the_daemon_writes_to_it() {
        const TIME: Duration = Duration::from_millis(50);
        let (own, _other) = UnixStream::pair().unwrap();
        let config = Config {
            join_wait: TIME,
            ..Config::default()
        };
        let mut stream = LimitedStream {
            stream: Box::new(own),
            expiry: Box::pin(sleep_until(Instant::now() + TIME)),
            connection: connection_of(&config),
        };
        let flood = async {
            loop {
                if let Err(error) = stream.write_all(&[0; 4096]).await {
                    break error;
                }
            }
        };
        let ended = tokio::time::timeout(Duration::from_mins(1), flood).await;
        assert_eq!(ended.expect("it is cut").kind(), io::ErrorKind::TimedOut);
    }

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
        let comes_at_once = |errno: Errno| {
            let mut accepted = [Err(io::Error::from(errno)), Ok(7)].into_iter();
            let next = next_connection(move || std::future::ready(accepted.next().expect("asked twice")));
            pin!(next).poll(&mut Context::from_waker(Waker::noop())) == Poll::Ready(7)
        };
        assert!(comes_at_once(Errno::ECONNABORTED), "nothing is lost");
        assert!(!comes_at_once(Errno::EMFILE));
    }
}
