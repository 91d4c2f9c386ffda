//! One connection to the daemon: over TCP or a Unix socket, with or without TLS.

use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, BufWriter, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::codegen::http::Uri;
use tower_service::Service;

use crate::look_up::look_up;
use crate::trust::tls::{self, SERVER_NAME, TlsError};
use crate::trust::token::Token;

/// What an endpoint begins with that is an abstract Unix socket of this machine: `unix:@NAME`.
pub const UNIX_PREFIX: &str = "unix:@";

/// Longest single attempt to open a connection.
pub const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes that wait for more before they become a TLS record. HTTP/2 writes its preface and its settings apart.
const SMALL_WRITES: usize = 256;

/// First byte of a TLS alert: what a daemon with TLS says to a caller without.
const TLS_ALERT: u8 = 0x15;

/// What both sides of a connection to the daemon prove.
#[derive(Clone, Debug, Default)]
pub enum Access {
    /// Nothing: on a Unix socket, where the kernel tells who is there, or with `--insecure`.
    #[default]
    Open,
    /// That they have the token.
    Token(Token),
}

impl Access {
    /// The token of the job.
    pub const fn token(&self) -> Option<&Token> {
        match self {
            Self::Open => None,
            Self::Token(token) => Some(token),
        }
    }
}

/// Opens connections to one daemon.
#[derive(Clone)]
pub(super) enum Connector {
    /// To a name or an address.
    Tcp {
        host: String,
        port: u16,
        tls: Option<TlsConnector>,
    },
    /// To an abstract socket.
    Unix(String),
}

impl Connector {
    pub(super) fn tcp(host: &str, port: u16, access: &Access) -> Result<Self, TlsError> {
        let tls = access.token().map(tls::client_of_token).transpose()?;
        Ok(Self::Tcp {
            host: host.to_owned(),
            port,
            tls: tls.map(|config| TlsConnector::from(Arc::new(config))),
        })
    }

    async fn open(self) -> Result<Connection, tonic::codegen::StdError> {
        let (stream, tls) = match self {
            Self::Tcp { host, port, tls } => (open_tcp(&host, port).await?, tls),
            Self::Unix(name) => return Ok(Connection::Unix(open_unix(&name)?)),
        };
        let Some(tls) = tls else {
            let is_first = true;
            return Ok(Connection::Tcp { stream, is_first });
        };
        // It is never looked up.
        let name = ServerName::try_from(SERVER_NAME)?;
        match tls.connect(name, stream).await {
            Ok(stream) => Ok(Connection::Tls(Box::new(BufWriter::with_capacity(
                SMALL_WRITES,
                stream,
            )))),
            Err(error) => Err(tls::words_of(&error).into()),
        }
    }
}

/// Tries the addresses of a host in order. Each has its part of the time of an attempt.
async fn open_tcp(host: &str, port: u16) -> Result<TcpStream, tonic::codegen::StdError> {
    let addresses = look_up(host, port).await?;
    let patience = ATTEMPT_TIMEOUT / addresses.len() as u32;
    let mut failure = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in addresses {
        match tokio::time::timeout(patience, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Ok(Err(error)) => failure = error,
            Err(_) => {
                failure = io::Error::new(io::ErrorKind::TimedOut, format!("`{address}` does not answer"));
            }
        }
    }
    Err(failure.into())
}

fn open_unix(name: &str) -> io::Result<UnixStream> {
    let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
    // The kernel connects it at once, or not at all.
    let stream = std::os::unix::net::UnixStream::connect_addr(&address)?;
    stream.set_nonblocking(true)?;
    let stream = UnixStream::from_std(stream)?;
    // Both ends of a pair are ours.
    let own = UnixStream::pair()?.0.peer_cred()?.uid();
    check_user(stream.peer_cred()?.uid(), own)?;
    Ok(stream)
}

/// The name of an abstract socket is anybody's who takes it first: only the own user and root are spoken to.
fn check_user(user: u32, own: u32) -> io::Result<()> {
    if user == own || user == 0 {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!("user {user} listens there, who is not the user of this launcher ({own})"),
    ))
}

impl Service<Uri> for Connector {
    type Response = TokioIo<Connection>;
    type Error = tonic::codegen::StdError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let connecting = self.clone().open();
        Box::pin(async move { connecting.await.map(TokioIo::new) })
    }
}

fn expects_tls() -> io::Error {
    io::Error::other("the daemon there expects TLS, and this node was started with `--insecure`")
}

/// Bytes to and from the daemon.
pub(super) enum Connection {
    Tcp { stream: TcpStream, is_first: bool },
    Unix(UnixStream),
    Tls(Box<BufWriter<TlsStream<TcpStream>>>),
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp { stream, is_first } => {
                let before = buf.filled().len();
                let read = Pin::new(stream).poll_read(context, buf);
                if let (true, Some(&first)) = (*is_first, buf.filled().get(before)) {
                    *is_first = false;
                    if first == TLS_ALERT {
                        return Poll::Ready(Err(expects_tls()));
                    }
                }
                read
            }
            Self::Unix(stream) => Pin::new(stream).poll_read(context, buf),
            Self::Tls(stream) => Pin::new(stream).poll_read(context, buf),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp { stream, is_first } => {
                let written = Pin::new(&mut *stream).poll_write(context, buf);
                if !*is_first || !matches!(written, Poll::Ready(Err(_))) {
                    return written;
                }
                // The connection was reset, and the reason may lie unread: the socket is readable now, or will be.
                let mut first = [0];
                let mut unread = ReadBuf::new(&mut first);
                match Pin::new(stream).poll_read(context, &mut unread) {
                    Poll::Pending => Poll::Pending,
                    Poll::Ready(Ok(())) if *unread.filled() == [TLS_ALERT] => Poll::Ready(Err(expects_tls())),
                    Poll::Ready(_) => written,
                }
            }
            Self::Unix(stream) => Pin::new(stream).poll_write(context, buf),
            Self::Tls(stream) => left_to_read(Pin::new(stream).poll_write(context, buf), buf.len()),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp { stream, .. } => Pin::new(stream).poll_flush(context),
            Self::Unix(stream) => Pin::new(stream).poll_flush(context),
            Self::Tls(stream) => left_to_read(Pin::new(stream).poll_flush(context), ()),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp { stream, .. } => Pin::new(stream).poll_shutdown(context),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

/// Lets a write to a connection that the daemon has closed look successful: HTTP/2 then reads what the daemon sent last,
/// and the end after it. After an error it would read neither.
fn left_to_read<T>(written: Poll<io::Result<T>>, success: T) -> Poll<io::Result<T>> {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    match written {
        Poll::Ready(Err(error)) if matches!(error.kind(), BrokenPipe | ConnectionReset) => {
            Poll::Ready(Ok(success))
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_of_the_own_user_is_spoken_to_and_one_of_another_user_is_not() {
        let name = format!("ddp-connector-test-{}", std::process::id());
        let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap();
        let _listener = std::os::unix::net::UnixListener::bind_addr(&address).unwrap();
        open_unix(&name).unwrap();
        check_user(0, 1000).unwrap();
        let refused = check_user(1001, 1000).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "user 1001 listens there, who is not the user of this launcher (1000)"
        );
    }
}
