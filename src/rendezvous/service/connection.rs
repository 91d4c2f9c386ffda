//! A connection from its acceptance to the first call: who is there, TLS, and the preface of HTTP/2, within one
//! deadline; and its end, if nobody joins on it.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use nix::sys::socket::{setsockopt, sockopt};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::{Error as Tls, PeerIncompatible};
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use super::admission::{Admission, Caller};
use super::incoming::Transport;
use crate::rendezvous::config::Config;
use crate::rendezvous::event::Peer;

/// What a client of HTTP/2 says first.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// How long a caller may take nothing of the replies that are there for it.
const UNSENT_TIMEOUT: Duration = Duration::from_mins(1);
/// How often a connection that is in use is looked at.
const LOOK: Duration = Duration::from_secs(30);

/// What was accepted.
pub(super) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// Why a caller was sent away.
enum Refusal {
    /// It has not said a word, as probes of a port do.
    Silent,
    Because(String),
}

/// Takes a caller in. Whoever is not taken is counted, and disconnected.
pub(super) async fn admit(
    socket: Socket,
    transport: Transport,
    admission: Arc<Admission>,
    config: Config,
) -> Option<Connection> {
    let deadline = Instant::now() + config.join_wait;
    // Without addresses it is gone already, and must not pass for a caller of this machine.
    let peer = peer_of(&socket).ok()?;
    if let Err(why) = check_user(&socket) {
        admission.refused("this machine", why);
        return None;
    }
    let place = match admission.enter(peer.remote) {
        Ok(place) => place,
        Err(why) => {
            admission.refused(peer.remote, why);
            return None;
        }
    };
    let caller = Caller::new(peer, place);
    let shaken = timeout_at(deadline, shake_hands(socket, transport, &config)).await;
    let late = || {
        Refusal::Because(format!(
            "no handshake within {:.1} s",
            config.join_wait.as_secs_f64()
        ))
    };
    match shaken.unwrap_or_else(|_| Err(late())) {
        Ok(wire) => Some(Connection {
            wire,
            replayed: 0,
            expiry: Box::pin(sleep_until(deadline)),
            idle_limit: config.join_wait,
            caller,
        }),
        Err(Refusal::Silent) => None,
        Err(Refusal::Because(why)) => {
            caller.refused(why);
            None
        }
    }
}

/// The two ends. On a Unix socket both are this machine.
fn peer_of(socket: &Socket) -> io::Result<Peer> {
    let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let ip = |address: SocketAddr| address.ip().to_canonical();
    Ok(match socket {
        Socket::Tcp(tcp) => Peer {
            remote: ip(tcp.peer_addr()?),
            local: ip(tcp.local_addr()?),
        },
        Socket::Unix(_) => Peer {
            remote: here,
            local: here,
        },
    })
}

/// An abstract socket is open to every user of the machine: only the own one and root are served.
fn check_user(socket: &Socket) -> Result<(), String> {
    let Socket::Unix(unix) = socket else {
        return Ok(());
    };
    let user = unix.peer_cred().map_err(|error| error.to_string())?.uid();
    let own = nix::unistd::geteuid().as_raw();
    if user == own || user == 0 {
        return Ok(());
    }
    Err(format!("user {user} is not the user of this launcher ({own})"))
}

async fn shake_hands(socket: Socket, transport: Transport, config: &Config) -> Result<Wire, Refusal> {
    let mut wire = match socket {
        Socket::Unix(unix) => Wire::Unix(unix),
        Socket::Tcp(tcp) => {
            set_up(&tcp, config).map_err(|error| Refusal::Because(error.to_string()))?;
            match transport.tls() {
                None => Wire::Tcp(tcp),
                Some(tls) => {
                    let mut first = [0];
                    if matches!(tcp.peek(&mut first).await, Ok(0) | Err(_)) {
                        return Err(Refusal::Silent);
                    }
                    let accepted = TlsAcceptor::from(tls).accept(tcp).await;
                    Wire::Tls(Box::new(
                        accepted.map_err(|error| Refusal::Because(words_of(&error)))?,
                    ))
                }
            }
        }
    };
    let mut preface = [0; PREFACE.len()];
    match wire.read(&mut preface[..1]).await {
        Ok(1) => {}
        Ok(_) => return Err(Refusal::Silent),
        Err(error) => return Err(Refusal::Because(words_of(&error))),
    }
    let rest = wire.read_exact(&mut preface[1..]).await;
    rest.map_err(|error| Refusal::Because(words_of(&error)))?;
    if &preface != PREFACE {
        // Of a record of TLS: a handshake.
        let why = match preface[0] {
            22 => "it speaks TLS, which this daemon does not without a token",
            _ => "it does not speak HTTP/2",
        };
        return Err(Refusal::Because(why.into()));
    }
    Ok(wire)
}

fn set_up(tcp: &TcpStream, config: &Config) -> io::Result<()> {
    tcp.set_nodelay(true)?;
    setsockopt(tcp, sockopt::KeepAlive, &true)?;
    let idle = u32::try_from(config.tcp_keepalive.as_secs())
        .unwrap_or(u32::MAX)
        .max(1);
    setsockopt(tcp, sockopt::TcpKeepIdle, &idle)?;
    Ok(())
}

/// What a failed handshake means, for people on the side of the daemon.
fn words_of(error: &io::Error) -> String {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Tls>());
    match inner {
        Some(Tls::NoCertificatesPresented) => "it has no certificate".into(),
        Some(Tls::PeerIncompatible(PeerIncompatible::IncorrectCertificateTypeExtension)) => {
            "it has no token where one is needed, or a token instead of a certificate".into()
        }
        Some(Tls::InvalidCertificate(_) | Tls::AlertReceived(_)) => {
            "it has a different token or certificate".into()
        }
        Some(Tls::InvalidMessage(_)) => "it speaks no TLS".into(),
        Some(other) => format!("the TLS handshake failed: {other}"),
        None => format!("the handshake failed: {error}"),
    }
}

enum Wire {
    Tcp(TcpStream),
    Unix(UnixStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// A connection that has begun to speak HTTP/2. It ends when nothing goes on there for a while.
pub(super) struct Connection {
    wire: Wire,
    /// How much of the preface was given on: it was read already.
    replayed: usize,
    expiry: Pin<Box<Sleep>>,
    idle_limit: Duration,
    caller: Arc<Caller>,
}

impl Connected for Connection {
    type ConnectInfo = Arc<Caller>;

    fn connect_info(&self) -> Self::ConnectInfo {
        Arc::clone(&self.caller)
    }
}

impl Connection {
    /// Ready when the connection has been idle for too long, or its caller reads nothing.
    fn poll_expired(&mut self, context: &mut Context<'_>) -> Poll<()> {
        while self.expiry.as_mut().poll(context).is_ready() {
            let now = Instant::now();
            let idle = self.caller.idle_since().map(|since| since + self.idle_limit);
            let unsent = self.caller.unsent_since().map(|since| since + UNSENT_TIMEOUT);
            let ends = idle.into_iter().chain(unsent).min();
            let next = ends.map_or(now + LOOK, |end| Instant::from_std(end).min(now + LOOK));
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

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.replayed < PREFACE.len() {
            let rest = &PREFACE[this.replayed..];
            let part = &rest[..rest.len().min(buf.remaining())];
            buf.put_slice(part);
            this.replayed += part.len();
            return Poll::Ready(Ok(()));
        }
        if this.poll_expired(context).is_ready() {
            // As if the caller had closed it.
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut this.wire).poll_read(context, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.wire).poll_write(context, buf);
        this.or_expired(written, context)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.wire).poll_flush(context);
        this.or_expired(written, context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.wire).poll_shutdown(context);
        this.or_expired(written, context)
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(context, buf),
            Self::Unix(stream) => Pin::new(stream).poll_read(context, buf),
            Self::Tls(stream) => Pin::new(stream).poll_read(context, buf),
        }
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(context, buf),
            Self::Unix(stream) => Pin::new(stream).poll_write(context, buf),
            Self::Tls(stream) => Pin::new(stream).poll_write(context, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(context),
            Self::Unix(stream) => Pin::new(stream).poll_flush(context),
            Self::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::super::metrics::Metrics;
    use super::*;

    /// One that sent pings and read no answer kept its place for ever: nothing was read from it any more.
    #[tokio::test]
    async fn who_reads_nothing_is_cut_while_it_is_written_to() {
        const TIME: Duration = Duration::from_millis(50);
        let (own, _other) = UnixStream::pair().unwrap();
        let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let admission = Admission::new(&Config::default(), Arc::new(Metrics::new()), false);
        let peer = Peer {
            remote: here,
            local: here,
        };
        let mut connection = Connection {
            wire: Wire::Unix(own),
            replayed: 0,
            expiry: Box::pin(sleep_until(Instant::now() + TIME)),
            idle_limit: TIME,
            caller: Caller::new(peer, admission.enter(here).unwrap()),
        };
        let flood = async {
            loop {
                if let Err(error) = connection.write_all(&[0; 4096]).await {
                    break error;
                }
            }
        };
        let ended = tokio::time::timeout(Duration::from_mins(1), flood).await;
        assert_eq!(ended.expect("it is cut").kind(), io::ErrorKind::TimedOut);
    }
}
