//! Connections between ranks: TCP between nodes, Unix sockets within a node, and the handshake of both.
//!
//! Of each pair the higher rank connects and the lower one listens. The first bytes of a connection are a [`Hello`] with
//! the token that the listener has published to the ranks of its job, the generation and the connecting rank. A
//! connection without the token is closed. Through a Unix socket ranks of a node pass descriptors ([`FdChannel`]).
#![allow(unsafe_code, reason = "descriptors that the kernel hands over")]

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::task::Poll;
use std::time::Duration;

use nix::cmsg_space;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, SockaddrLike,
    SockaddrStorage, UnixAddr, accept4, bind, connect, getsockopt, listen, recv, recvmsg, send, sendmsg,
    socket, socketpair, sockopt,
};

use crate::collective::error::Failure;
use crate::collective::wait::{Wait, hung_up, system_failure};

/// Connections whose hello has not come yet; the oldest gives way to a new one.
const PENDING_BOUND: usize = 256;
/// Room in a TCP backlog for connections that are not of this job.
const FOREIGN_CONNECTIONS: usize = 128;
/// Longest wait for a TCP connection to a rank that listens: a firewall may drop packets without an answer.
const CONNECT_BOUND: Duration = Duration::from_secs(10);
const HELLO_BYTES: usize = 48;
const MAGIC: u64 = 0x6464_7072_756e_0001;

/// Who opens a connection, and to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// That of the listener.
    pub(super) token: u128,
    /// Generation of the connecting rank.
    pub(super) generation: u64,
    /// Global rank of the connecting rank.
    pub(super) rank: usize,
}

impl Hello {
    /// To the listener that has published this token, in hexadecimal.
    pub(super) fn with_token(self, token: &str) -> Option<Self> {
        let token = u128::from_str_radix(token, 16).ok()?;
        Some(Self { token, ..self })
    }

    fn encode(self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..24].copy_from_slice(&self.token.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.generation.to_le_bytes());
        bytes[32..40].copy_from_slice(&(self.rank as u64).to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; HELLO_BYTES]) -> Option<Self> {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let token = u128::from(word(8)) | u128::from(word(16)) << 64;
        (word(0) == MAGIC).then_some(Self {
            token,
            generation: word(24),
            rank: word(32) as usize,
        })
    }
}

/// A token that cannot be guessed: `rand`'s own generator is a cryptographic one, seeded by the system.
pub(super) fn new_token() -> u128 {
    rand::random()
}

/// A listening socket, for one family of peers.
#[derive(Debug)]
pub(super) struct Listener {
    socket: OwnedFd,
    local: bool,
}

impl Listener {
    /// Listens on an abstract Unix address.
    pub(super) fn unix(name: &str, peers: usize) -> Result<Self, Failure> {
        let refused = |e| system_failure(format!("listening on the abstract Unix address `{name}`"), e);
        let address = UnixAddr::new_abstract(name.as_bytes()).map_err(refused)?;
        let socket = unix_socket().map_err(refused)?;
        bind(socket.as_raw_fd(), &address).map_err(refused)?;
        listen(&socket, backlog_for(peers)).map_err(refused)?;
        Ok(Self { socket, local: true })
    }

    /// Listens on a free port of an address, with room for `peers` that connect before they are accepted.
    pub(super) fn tcp(host: IpAddr, peers: usize) -> Result<(Self, SocketAddr), Failure> {
        let refused = |error: std::io::Error| Failure::System {
            what: format!("listening on `{host}`"),
            cause: format!("{error}\n  hint: it must be an address of this node that the other nodes reach"),
        };
        let listener = TcpListener::bind((host, 0)).map_err(refused)?;
        listener.set_nonblocking(true).map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        let socket = OwnedFd::from(listener);
        listen(&socket, backlog_for(peers + FOREIGN_CONNECTIONS)).map_err(|errno| refused(errno.into()))?;
        Ok((Self { socket, local: false }, address))
    }

    /// Waits for the connections of these global ranks. `expected` has the token and the generation of their hellos.
    pub(super) fn accept(
        &self,
        ranks: &[usize],
        expected: Hello,
        wait: &Wait,
    ) -> Result<BTreeMap<usize, OwnedFd>, Failure> {
        let mut accepted = BTreeMap::new();
        let mut pending: Vec<PendingPeer> = Vec::new();
        while accepted.len() < ranks.len() {
            let sockets = std::iter::once(&self.socket).chain(pending.iter().map(|peer| &peer.socket));
            let mut fds: Vec<_> = sockets
                .map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN))
                .collect();
            let missing = || ranks.iter().copied().filter(|rank| !accepted.contains_key(rank));
            wait.until_ready(&mut fds, || missing().collect())?;
            for mut peer in std::mem::take(&mut pending) {
                match peer.receive_hello() {
                    Poll::Ready(Some(hello)) => {
                        let rank = hello.rank;
                        if ranks.contains(&rank) && hello == (Hello { rank, ..expected }) {
                            accepted.entry(rank).or_insert(peer.socket);
                        }
                    }
                    Poll::Ready(None) => {}
                    Poll::Pending => pending.push(peer),
                }
            }
            while let Some(socket) = self.next_socket()? {
                if pending.len() == PENDING_BOUND {
                    pending.remove(0);
                }
                pending.push(PendingPeer {
                    socket,
                    bytes: [0; HELLO_BYTES],
                    len: 0,
                });
            }
        }
        Ok(accepted)
    }

    /// The next connection. Unix connections from other users are closed.
    fn next_socket(&self) -> Result<Option<OwnedFd>, Failure> {
        loop {
            let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
            let socket = match accept4(self.socket.as_raw_fd(), flags) {
                // SAFETY: the kernel has just made this descriptor for us; it has no other owner.
                Ok(raw) => unsafe { OwnedFd::from_raw_fd(raw) },
                Err(Errno::EAGAIN) => return Ok(None),
                Err(error) if is_of_one_peer(error) => continue,
                Err(error) => return Err(system_failure("accepting a peer", error)),
            };
            if !self.local || is_same_user(&socket) {
                return Ok(Some(socket));
            }
        }
    }
}

/// The system also has a bound (`net.core.somaxconn`).
fn backlog_for(peers: usize) -> Backlog {
    let peers = i32::try_from(peers).unwrap_or(i32::MAX).clamp(1, 4096);
    Backlog::new(peers).unwrap_or(Backlog::MAXCONN)
}

/// True for an error of the connection that was about to be accepted, not of this socket: accept(2) passes those on, and
/// says to try again.
fn is_of_one_peer(error: Errno) -> bool {
    matches!(
        error,
        Errno::EINTR
            | Errno::ECONNABORTED
            | Errno::ENETDOWN
            | Errno::EPROTO
            | Errno::ENOPROTOOPT
            | Errno::EHOSTDOWN
            | Errno::ENONET
            | Errno::EHOSTUNREACH
            | Errno::EOPNOTSUPP
            | Errno::ENETUNREACH
    )
}

fn is_same_user(socket: &OwnedFd) -> bool {
    getsockopt(socket, sockopt::PeerCredentials)
        .is_ok_and(|peer| peer.uid() == nix::unistd::geteuid().as_raw())
}

/// A connection whose hello has not come yet.
struct PendingPeer {
    socket: OwnedFd,
    bytes: [u8; HELLO_BYTES],
    len: usize,
}

impl PendingPeer {
    /// Reads what has come. Ready with none: it is no hello.
    fn receive_hello(&mut self) -> Poll<Option<Hello>> {
        let rest = &mut self.bytes[self.len..];
        match recv(self.socket.as_raw_fd(), rest, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => Poll::Ready(None),
            Ok(n) => {
                self.len += n;
                match self.len {
                    HELLO_BYTES => Poll::Ready(Hello::decode(&self.bytes)),
                    _ => Poll::Pending,
                }
            }
            Err(Errno::EAGAIN | Errno::EINTR) => Poll::Pending,
            Err(_) => Poll::Ready(None),
        }
    }
}

/// Connects to the abstract Unix address of a global rank of this node.
pub(super) fn connect_unix(name: &str, rank: usize, hello: Hello, wait: &Wait) -> Result<OwnedFd, Failure> {
    let refused = |e| {
        system_failure(
            format!("connecting to rank {rank} at the abstract Unix address `{name}`"),
            e,
        )
    };
    let address = UnixAddr::new_abstract(name.as_bytes()).map_err(refused)?;
    let socket = unix_socket().map_err(refused)?;
    loop {
        match connect(socket.as_raw_fd(), &address) {
            Ok(()) => break,
            // The backlog is full: the listener is slow.
            Err(Errno::EAGAIN) => {
                wait.check(|| vec![rank])?;
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(Errno::EINTR) => {}
            Err(error) => return Err(refused(error)),
        }
    }
    greet(socket, rank, hello)
}

/// Connects to a global rank of another node, which listens already: within [`CONNECT_BOUND`].
pub(super) fn connect_tcp(
    address: SocketAddr,
    rank: usize,
    hello: Hello,
    wait: &Wait,
) -> Result<OwnedFd, Failure> {
    let refused = |cause: &str| Failure::System {
        what: format!("cannot reach rank {rank} at `{address}`"),
        cause: format!(
            "{cause}\n  hint: are ports between the nodes open? workers connect to free ports of each other's addresses; \
             `--local-addr` sets the address under which other nodes reach a node"
        ),
    };
    let by_system = |errno: Errno| refused(&errno.desc().to_lowercase());
    let target = SockaddrStorage::from(address);
    let family = target.family().unwrap_or(AddressFamily::Inet);
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(family, SockType::Stream, flags, None).map_err(by_system)?;
    match connect(socket.as_raw_fd(), &target) {
        Ok(()) => {}
        Err(Errno::EINPROGRESS | Errno::EINTR) => {
            let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLOUT)];
            wait.within(CONNECT_BOUND)
                .until_ready(&mut fds, || vec![rank])
                .map_err(|failure| match failure {
                    Failure::TimedOut { waited_ms, .. } => {
                        refused(&format!("no answer within {:.1} s", waited_ms as f64 / 1000.0))
                    }
                    other => other,
                })?;
            let error = getsockopt(&socket, sockopt::SocketError).map_err(by_system)?;
            if error != 0 {
                return Err(by_system(Errno::from_raw(error)));
            }
        }
        Err(error) => return Err(by_system(error)),
    }
    greet(socket, rank, hello)
}

/// The hello fits into the empty buffer of a new connection, so it never waits.
fn greet(socket: OwnedFd, rank: usize, hello: Hello) -> Result<OwnedFd, Failure> {
    match send(socket.as_raw_fd(), &hello.encode(), MsgFlags::MSG_NOSIGNAL) {
        Ok(HELLO_BYTES) => Ok(socket),
        Ok(_) => Err(system_failure(format!("greeting rank {rank}"), Errno::EMSGSIZE)),
        Err(error) => Err(system_failure(format!("greeting rank {rank}"), error)),
    }
}

fn unix_socket() -> Result<OwnedFd, Errno> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)
}

/// One end of a Unix connection to a rank of this node, through which descriptors are passed; when it closes, the other
/// process has ended. It keeps message boundaries (`SOCK_SEQPACKET`) and does not block.
#[derive(Debug)]
pub(super) struct FdChannel {
    peer: usize,
    socket: OwnedFd,
}

impl FdChannel {
    /// Over a connected socket to a global rank.
    pub(super) fn new(peer: usize, socket: OwnedFd) -> Self {
        Self { peer, socket }
    }

    /// Both ends of a new connection.
    pub(super) fn pair() -> Result<(OwnedFd, OwnedFd), Failure> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)
            .map_err(|e| system_failure("opening a Unix connection", e))
    }

    /// Global rank of the peer.
    pub(super) fn peer(&self) -> usize {
        self.peer
    }

    /// True if the peer's end is closed.
    pub(super) fn is_closed(&self) -> bool {
        hung_up(&self.socket)
    }

    /// Passes a descriptor to the peer, with a number that says what it is.
    pub(super) fn send(&self, label: u64, fd: BorrowedFd<'_>, wait: &Wait) -> Result<(), Failure> {
        let bytes = label.to_le_bytes();
        let fds = [fd.as_raw_fd()];
        let rights = [ControlMessage::ScmRights(&fds)];
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        loop {
            match sendmsg::<()>(
                self.socket.as_raw_fd(),
                &[IoSlice::new(&bytes)],
                &rights,
                flags,
                None,
            ) {
                Ok(_) => return Ok(()),
                Err(Errno::EAGAIN) => self.until(PollFlags::POLLOUT, wait)?,
                Err(Errno::EINTR) => {}
                Err(Errno::EPIPE | Errno::ECONNRESET) => return Err(self.lost()),
                Err(error) => {
                    let what = format!("passing a descriptor to rank {}", self.peer);
                    return Err(system_failure(what, error));
                }
            }
        }
    }

    /// Receives the descriptor that the peer passes with this number.
    pub(super) fn receive(&self, label: u64, wait: &Wait) -> Result<OwnedFd, Failure> {
        let peer = self.peer;
        loop {
            self.until(PollFlags::POLLIN, wait)?;
            let mut bytes = [0; 8];
            return match receive_fd(self.socket.as_fd(), &mut bytes) {
                Err(Errno::EAGAIN | Errno::EINTR) => continue,
                Err(Errno::ECONNRESET) | Ok((0, _)) => Err(self.lost()),
                Err(error) => Err(system_failure(
                    format!("taking a descriptor from rank {peer}"),
                    error,
                )),
                Ok((8, Some(fd))) if u64::from_le_bytes(bytes) == label => Ok(fd),
                Ok(_) => Err(Failure::Invalid(format!(
                    "rank {peer} passed something unexpected"
                ))),
            };
        }
    }

    fn until(&self, events: PollFlags, wait: &Wait) -> Result<(), Failure> {
        wait.until_ready(&mut [PollFd::new(self.socket.as_fd(), events)], || {
            vec![self.peer]
        })
    }

    fn lost(&self) -> Failure {
        Failure::PeerLost {
            rank: self.peer,
            how: "its process closed the connection".to_owned(),
        }
    }
}

fn receive_fd(fd: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<(usize, Option<OwnedFd>), Errno> {
    let mut control = cmsg_space!([RawFd; 1]);
    let mut slices = [IoSliceMut::new(bytes)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT;
    let message = recvmsg::<()>(fd.as_raw_fd(), &mut slices, Some(&mut control), flags)?;
    let mut found = None;
    for part in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(fds) = part {
            for raw in fds {
                // SAFETY: the kernel has just made this descriptor for us; it has no other owner.
                found = Some(unsafe { OwnedFd::from_raw_fd(raw) });
            }
        }
    }
    Ok((message.bytes, found))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::session::Cancel;

    #[test]
    fn a_descriptor_goes_through_and_a_closed_channel_is_seen() {
        let (left, right) = FdChannel::pair().unwrap();
        let (left, right) = (FdChannel::new(1, left), FdChannel::new(0, right));
        let wait = Wait::new(Duration::from_secs(10), &Cancel::new());
        let file = tempfile::tempfile().unwrap();
        left.send(5, file.as_fd(), &wait).unwrap();
        assert!(right.receive(5, &wait).is_ok());
        assert!(!left.is_closed());
        drop(right);
        assert!(left.is_closed());
        assert_eq!(left.receive(6, &wait).unwrap_err(), left.lost());
    }

    #[test]
    fn a_wait_for_a_descriptor_names_the_rank() {
        let (left, _right) = FdChannel::pair().unwrap();
        let left = FdChannel::new(3, left);
        let wait = Wait::new(Duration::from_millis(5), &Cancel::new());
        let error = left.receive(1, &wait).unwrap_err();
        assert!(matches!(error, Failure::TimedOut { waiting_for, .. } if waiting_for == [3]));
    }
}
