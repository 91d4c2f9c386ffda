//! Connections between ranks: who dials, who listens, and how strangers are told apart.
//!
//! The higher rank of a pair dials, the lower listens. The first bytes of a connection are a hello with the token
//! that the listener published to its job's ranks, the generation and the caller's rank. Whoever does not know
//! the token is dropped without a word.
#![allow(unsafe_code, reason = "descriptors that the kernel hands over")]

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::{
    AddressFamily, Backlog, MsgFlags, SockFlag, SockType, SockaddrLike, SockaddrStorage, UnixAddr, accept4,
    bind, connect, getsockopt, listen, recv, send, socket, sockopt,
};

use super::patience::{system, until_ready};
use super::{Failure, Wait};

/// Connections whose hello has not come yet; the oldest gives way to a new one.
const PENDING_BOUND: usize = 256;
const HELLO_BYTES: usize = 48;
const MAGIC: u64 = 0x6464_7072_756e_0001;

/// Says to whom a connection belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// The listener's secret.
    pub(super) token: u128,
    /// The generation of the caller.
    pub(super) generation: u64,
    /// Global rank of the caller.
    pub(super) rank: usize,
}

impl Hello {
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

/// A number that strangers cannot guess: `rand`'s own generator is a cryptographic one, seeded by the system.
pub(super) fn secret() -> u128 {
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
        let refused = |e| system(format!("listening on the abstract Unix address `{name}`"), e);
        let address = UnixAddr::new_abstract(name.as_bytes()).map_err(refused)?;
        let socket = unix_socket().map_err(refused)?;
        bind(socket.as_raw_fd(), &address).map_err(refused)?;
        let backlog = Backlog::new(i32::try_from(peers).unwrap_or(i32::MAX).clamp(1, 4096));
        listen(&socket, backlog.unwrap_or(Backlog::MAXCONN)).map_err(refused)?;
        Ok(Self { socket, local: true })
    }

    /// Listens on a free port of an address.
    pub(super) fn tcp(host: std::net::IpAddr) -> Result<(Self, SocketAddr), Failure> {
        let refused = |error: std::io::Error| Failure::System {
            what: format!("listening on `{host}`"),
            cause: format!("{error}\n  hint: it must be an address of this node that the other nodes reach"),
        };
        let listener = TcpListener::bind((host, 0)).map_err(refused)?;
        listener.set_nonblocking(true).map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        let socket = OwnedFd::from(listener);
        Ok((Self { socket, local: false }, address))
    }

    /// Waits for the connections of these global ranks. `expected` says what their hello must be.
    pub(super) fn accept(
        &self,
        ranks: &[usize],
        expected: Hello,
        wait: &Wait,
    ) -> Result<BTreeMap<usize, OwnedFd>, Failure> {
        let mut come = BTreeMap::new();
        let mut pending: Vec<Caller> = Vec::new();
        while come.len() < ranks.len() {
            let mut fds = vec![PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
            fds.extend(
                pending
                    .iter()
                    .map(|c| PollFd::new(c.socket.as_fd(), PollFlags::POLLIN)),
            );
            until_ready(&mut fds, wait, || missing(ranks, &come))?;
            let mut waiting = Vec::new();
            for mut caller in pending {
                match caller.listen() {
                    Heard::Hello(hello) if is_expected(hello, expected, ranks) => {
                        come.entry(hello.rank).or_insert(caller.socket);
                    }
                    Heard::Hello(_) | Heard::Nonsense => {}
                    Heard::Nothing => waiting.push(caller),
                }
            }
            pending = waiting;
            while let Some(socket) = self.next_caller()? {
                if pending.len() == PENDING_BOUND {
                    pending.remove(0);
                }
                pending.push(Caller::new(socket));
            }
        }
        Ok(come)
    }

    /// The next connection; connections from other users are dropped.
    fn next_caller(&self) -> Result<Option<OwnedFd>, Failure> {
        loop {
            let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
            let socket = match accept4(self.socket.as_raw_fd(), flags) {
                // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
                Ok(raw) => unsafe { OwnedFd::from_raw_fd(raw) },
                Err(Errno::EAGAIN) => return Ok(None),
                Err(error) if is_of_one_caller(error) => continue,
                Err(error) => return Err(system("accepting a peer", error)),
            };
            if !self.local || is_same_user(&socket) {
                return Ok(Some(socket));
            }
        }
    }
}

/// True for an error of a connection that was about to be accepted, not of this socket: accept(2) passes those on, and
/// says to treat them as if nobody had called.
fn is_of_one_caller(error: Errno) -> bool {
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

fn is_expected(hello: Hello, expected: Hello, ranks: &[usize]) -> bool {
    let Hello {
        token,
        generation,
        rank,
    } = hello;
    token == expected.token && generation == expected.generation && ranks.contains(&rank)
}

fn missing(ranks: &[usize], come: &BTreeMap<usize, OwnedFd>) -> Vec<usize> {
    ranks
        .iter()
        .copied()
        .filter(|rank| !come.contains_key(rank))
        .collect()
}

fn is_same_user(socket: &OwnedFd) -> bool {
    getsockopt(socket, sockopt::PeerCredentials)
        .is_ok_and(|peer| peer.uid() == nix::unistd::geteuid().as_raw())
}

/// A connection whose hello has not come yet.
struct Caller {
    socket: OwnedFd,
    bytes: [u8; HELLO_BYTES],
    len: usize,
}

enum Heard {
    Hello(Hello),
    Nothing,
    Nonsense,
}

impl Caller {
    fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            bytes: [0; HELLO_BYTES],
            len: 0,
        }
    }

    fn listen(&mut self) -> Heard {
        match recv(
            self.socket.as_raw_fd(),
            &mut self.bytes[self.len..],
            MsgFlags::MSG_DONTWAIT,
        ) {
            Ok(0) => Heard::Nonsense,
            Ok(n) => {
                self.len += n;
                match (self.len, Hello::decode(&self.bytes)) {
                    (HELLO_BYTES, Some(hello)) => Heard::Hello(hello),
                    (HELLO_BYTES, None) => Heard::Nonsense,
                    _ => Heard::Nothing,
                }
            }
            Err(Errno::EAGAIN | Errno::EINTR) => Heard::Nothing,
            Err(_) => Heard::Nonsense,
        }
    }
}

/// Connects to the abstract Unix address of a global rank of this node.
pub(super) fn dial_unix(name: &str, rank: usize, hello: Hello, wait: &Wait) -> Result<OwnedFd, Failure> {
    let refused = |e| {
        system(
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
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            Err(Errno::EINTR) => {}
            Err(error) => return Err(refused(error)),
        }
    }
    greet(socket, rank, hello)
}

/// Connects to a global rank of another node.
pub(super) fn dial_tcp(
    address: SocketAddr,
    rank: usize,
    hello: Hello,
    wait: &Wait,
) -> Result<OwnedFd, Failure> {
    let refused = |e| system(format!("connecting to rank {rank} at `{address}`"), e);
    let target = SockaddrStorage::from(address);
    let family = target.family().unwrap_or(AddressFamily::Inet);
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(family, SockType::Stream, flags, None).map_err(refused)?;
    match connect(socket.as_raw_fd(), &target) {
        Ok(()) => {}
        Err(Errno::EINPROGRESS | Errno::EINTR) => {
            let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLOUT)];
            until_ready(&mut fds, wait, || vec![rank])?;
            let error = getsockopt(&socket, sockopt::SocketError).map_err(refused)?;
            if error != 0 {
                return Err(refused(Errno::from_raw(error)));
            }
        }
        Err(error) => return Err(refused(error)),
    }
    greet(socket, rank, hello)
}

/// The hello fits into the empty buffer of a new connection, so it never waits.
fn greet(socket: OwnedFd, rank: usize, hello: Hello) -> Result<OwnedFd, Failure> {
    match send(socket.as_raw_fd(), &hello.encode(), MsgFlags::MSG_NOSIGNAL) {
        Ok(HELLO_BYTES) => Ok(socket),
        Ok(_) => Err(system(format!("greeting rank {rank}"), Errno::EMSGSIZE)),
        Err(error) => Err(system(format!("greeting rank {rank}"), error)),
    }
}

fn unix_socket() -> Result<OwnedFd, Errno> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)
}
