//! Connections between ranks: TCP between nodes, Unix sockets within a node; how a group makes them, and their sockets.
//!
//! In each pair, the higher rank connects and the lower one listens. Before anything else, both prove that they belong to the
//! generation (`handshake`). Through a Unix socket ranks of a node also pass descriptors.
#![allow(unsafe_code, reason = "descriptors that the kernel hands over")]

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::sync::Arc;
use std::time::Duration;

use ddp_proto::ports::PortRange;
use nix::cmsg_space;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, SockaddrLike,
    SockaddrStorage, UnixAddr as AbstractAddr, accept4, connect, getsockopt, listen, recvmsg, sendmsg,
    setsockopt, socket, sockopt,
};
use serde::{Deserialize, Serialize};

use super::topology::RankInfo;
use crate::collective::error::Failure;
use crate::collective::wait::{Wait, system_failure};
use crate::session::other_user;

/// Room in a TCP backlog for connections that are not of this job.
const FOREIGN_CONNECTIONS: usize = 128;
/// Longest wait for a TCP connection to a rank that listens: a firewall may drop packets without an answer.
const CONNECT_BOUND: Duration = Duration::from_secs(10);
/// Between two tries to connect to a rank whose backlog is full.
const BACKLOG_PAUSE: Duration = Duration::from_millis(1);
/// Without a key this rank could not tell the ranks of other nodes from other programs.
const NO_KEY: &str = "the assignment has no key for the connections between nodes\n  hint: the rendezvous daemon is of an \
                      older release: start it from the release of the nodes";
/// Where a rank listens for the higher ranks of a group, as it publishes it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Address {
    /// Abstract Unix address, for the ranks of its node.
    unix: String,
    /// TCP address for the ranks of other nodes, if there are some.
    tcp: Option<SocketAddr>,
}

/// The sockets at which a rank listens for one group.
#[derive(Debug)]
pub(super) struct Listener {
    unix: OwnedFd,
    tcp: Option<OwnedFd>,
}

impl Listener {
    /// Listens for `local` ranks of this node and `remote` ranks of others; so many can connect before they are accepted.
    pub(super) fn open(info: &RankInfo, local: usize, remote: usize) -> Result<(Self, Address), Failure> {
        if remote > 0 && info.data_key.is_none() {
            return Err(Failure::Invalid(NO_KEY.into()));
        }
        let unix = format!("ddp-{:032x}", rand::random::<u128>());
        let listener = listen_unix(&unix, local)?;
        let tcp = (remote > 0).then(|| listen_tcp(info, remote)).transpose()?;
        let (tcp, address) = tcp.unzip();
        let address = Address { unix, tcp: address };
        Ok((Self { unix: listener, tcp }, address))
    }

    /// The sockets, and whether their peers are of this node.
    pub(super) fn sockets(&self) -> impl Iterator<Item = (&OwnedFd, bool)> {
        let tcp = self.tcp.as_ref().map(|tcp| (tcp, false));
        std::iter::once((&self.unix, true)).chain(tcp)
    }
}

/// Listens on an abstract Unix address.
fn listen_unix(name: &str, peers: usize) -> Result<OwnedFd, Failure> {
    let refused =
        |e: io::Error| system_failure(format!("listening on the abstract Unix address `{name}`"), e);
    let address = UnixAddr::from_abstract_name(name).map_err(refused)?;
    let listener = UnixListener::bind_addr(&address).map_err(refused)?;
    listener.set_nonblocking(true).map_err(refused)?;
    let socket = OwnedFd::from(listener);
    listen(&socket, backlog_for(peers)).map_err(|errno| refused(errno.into()))?;
    Ok(socket)
}

/// Listens at the address of this node, for `peers` ranks of other nodes.
fn listen_tcp(info: &RankInfo, peers: usize) -> Result<(OwnedFd, SocketAddr), Failure> {
    let host = info.host_addr;
    let refused = |error: io::Error| Failure::System {
        what: format!("listening on `{host}`"),
        cause: format!("{error}\n  hint: it must be an address of this node that the other nodes can reach"),
    };
    let listener = match info.ports {
        None => TcpListener::bind((host, 0)).map_err(refused)?,
        Some(ports) => {
            let listener = listen_within(ports, host, info.local_rank).map_err(refused)?;
            listener.ok_or_else(|| none_free(ports, info))?
        }
    };
    listener.set_nonblocking(true).map_err(refused)?;
    let address = listener.local_addr().map_err(refused)?;
    let socket = OwnedFd::from(listener);
    listen(&socket, backlog_for(peers + FOREIGN_CONNECTIONS)).map_err(|errno| refused(errno.into()))?;
    Ok((socket, address))
}

/// Listens on the first free port, beginning at another one for each rank of the node. `None` if all are taken.
/// The library sets `SO_REUSEADDR`, so connections of the last generation are not in the way.
fn listen_within(ports: PortRange, host: IpAddr, local_rank: usize) -> io::Result<Option<TcpListener>> {
    // Of two ranks that try a port at the same moment, the kernel may refuse both: hence the second round.
    for port in ports.starting_at(local_rank).chain(ports.starting_at(local_rank)) {
        match TcpListener::bind((host, port)) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            listener => return listener.map(Some),
        }
    }
    Ok(None)
}

fn none_free(ports: PortRange, info: &RankInfo) -> Failure {
    Failure::System {
        what: format!(
            "rank {} on node {} cannot listen at `{}`",
            info.rank, info.node_rank, info.host_addr
        ),
        cause: format!(
            "no port of `--worker-ports {ports}` is free\n  hint: choose a larger range, or see who has the ports \
             (`ss -ltnp`): each rank needs one of its own"
        ),
    }
}

/// The system also has a bound (`net.core.somaxconn`).
fn backlog_for(peers: usize) -> Backlog {
    let peers = i32::try_from(peers).unwrap_or(i32::MAX).clamp(1, 4096);
    Backlog::new(peers).unwrap_or(Backlog::MAXCONN)
}

/// The result of accepting one connection.
#[derive(Debug)]
pub(super) enum Accepted {
    /// A connection.
    One(OwnedFd),
    /// A connection that is closed by now: another user has called, or the caller is gone.
    Refused,
    /// No caller waits.
    None,
    /// A caller waits, but this process has no descriptor left.
    NoRoom,
}

/// Accepts the next connection. Closes Unix connections from other users. It accepts one at most, so a caller that connects
/// again and again does not block anything else.
pub(super) fn next_socket(listener: &OwnedFd, is_local: bool) -> Result<Accepted, Failure> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = match accept4(listener.as_raw_fd(), flags) {
        // SAFETY: the kernel has just made this descriptor for us; it has no other owner.
        Ok(raw) => unsafe { OwnedFd::from_raw_fd(raw) },
        Err(Errno::EAGAIN) => return Ok(Accepted::None),
        Err(Errno::EMFILE | Errno::ENFILE) => return Ok(Accepted::NoRoom),
        Err(error) if is_of_one_peer(error) => return Ok(Accepted::Refused),
        Err(error) => return Err(system_failure("accepting a peer", error)),
    };
    if !is_local || other_user(&socket) == Ok(None) {
        Ok(Accepted::One(socket))
    } else {
        Ok(Accepted::Refused)
    }
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

impl Address {
    /// Connects to the global rank that listens here.
    pub(super) fn connect(&self, rank: usize, is_local: bool, wait: &Wait) -> Result<OwnedFd, Failure> {
        if is_local {
            return connect_unix(&self.unix, rank, wait);
        }
        let malformed = || Failure::Invalid(format!("rank {rank} published a malformed address"));
        connect_tcp(self.tcp.ok_or_else(malformed)?, rank, wait)
    }

    /// The address itself, for people.
    pub(super) fn shown(&self, is_local: bool) -> String {
        match self.tcp {
            Some(tcp) if !is_local => tcp.to_string(),
            _ => self.unix.clone(),
        }
    }
}

/// Connects to the abstract Unix address of a global rank of this node. Another user may listen there if the rank has ended.
fn connect_unix(name: &str, rank: usize, wait: &Wait) -> Result<OwnedFd, Failure> {
    let what = || format!("connecting to rank {rank} at the abstract Unix address `{name}`");
    let refused = |errno: Errno| system_failure(what(), errno);
    let address = AbstractAddr::new_abstract(name.as_bytes()).map_err(refused)?;
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None).map_err(refused)?;
    loop {
        match connect(socket.as_raw_fd(), &address) {
            Ok(()) => break,
            // The backlog is full: the listener is slow.
            Err(Errno::EAGAIN) => {
                wait.check(|| vec![rank])?;
                std::thread::sleep(BACKLOG_PAUSE);
            }
            Err(Errno::EINTR) => {}
            Err(Errno::ECONNREFUSED) => {
                return Err(Failure::PeerLost {
                    rank,
                    how: "its process left or died before this rank had connected to it".to_owned(),
                });
            }
            Err(error) => return Err(refused(error)),
        }
    }
    match other_user(&socket).map_err(refused)? {
        None => Ok(socket),
        Some(user) => Err(Failure::System {
            what: what(),
            cause: format!("user {user} listens there, who is not the user of this job"),
        }),
    }
}

/// Connects to a rank that listens already, within [`CONNECT_BOUND`].
fn connect_tcp(address: SocketAddr, rank: usize, wait: &Wait) -> Result<OwnedFd, Failure> {
    let refused = |cause: &str| Failure::System {
        what: format!("cannot reach rank {rank} at `{address}`"),
        cause: format!(
            "{cause}\n  hint: check that the ports between the nodes are open: workers connect to free ports at \
             each other's addresses, which `--worker-ports` limits to a range; `--local-addr` sets the address at which other nodes reach a node"
        ),
    };
    let by_system = |errno: Errno| match (errno, refused(&errno.desc().to_lowercase())) {
        // It has listened there.
        (Errno::ECONNREFUSED, refused) => Failure::PeerLost {
            rank,
            how: refused.to_string(),
        },
        (_, refused) => refused,
    };
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
    Ok(socket)
}

/// One connection to a global rank. It does not block. When a Unix one closes, the process of the rank has ended.
#[derive(Debug)]
pub(super) struct Connection {
    peer: usize,
    socket: Arc<OwnedFd>,
    /// Room for what the peer contributes to a sum.
    pub(super) ring: Vec<u64>,
    /// Room for a piece of a sum that the peer gets.
    pub(super) out: Vec<u64>,
}

impl Connection {
    pub(super) fn new(peer: usize, socket: OwnedFd, is_local: bool) -> Result<Self, Failure> {
        if !is_local {
            let failed = |errno| system_failure(format!("preparing the connection to rank {peer}"), errno);
            setsockopt(&socket, sockopt::TcpNoDelay, &true).map_err(failed)?;
        }
        Ok(Self {
            peer,
            socket: Arc::new(socket),
            ring: Vec::new(),
            out: Vec::new(),
        })
    }

    /// Global rank of the peer.
    pub(super) fn peer(&self) -> usize {
        self.peer
    }

    /// For [`hung_up`].
    pub(super) fn socket(&self) -> Arc<OwnedFd> {
        self.socket.clone()
    }

    /// Sends what the connection accepts now; 0 if nothing.
    pub(super) fn send(&self, parts: &[IoSlice<'_>]) -> Result<usize, Failure> {
        let sent = self.send_with(parts, &[]);
        sent.map_err(|error| self.lost(&error.desc().to_lowercase()))
    }

    /// Receives what is there; 0 if nothing.
    pub(super) fn receive(&self, parts: &mut [IoSliceMut<'_>]) -> Result<usize, Failure> {
        let message = recvmsg::<()>(self.socket.as_raw_fd(), parts, None, MsgFlags::MSG_DONTWAIT);
        match message.map(|message| message.bytes) {
            Ok(0) => Err(self.lost_by_closing()),
            Ok(received) => Ok(received),
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(0),
            Err(error) => Err(self.lost(&error.desc().to_lowercase())),
        }
    }

    /// Passes a descriptor to a peer of this node, with a number that says what it is.
    pub(super) fn send_fd(&self, label: u64, fd: BorrowedFd<'_>, wait: &Wait) -> Result<(), Failure> {
        let (bytes, fds) = (label.to_le_bytes(), [fd.as_raw_fd()]);
        let rights = [ControlMessage::ScmRights(&fds)];
        loop {
            match self.send_with(&[IoSlice::new(&bytes)], &rights) {
                Ok(0) => self.until(PollFlags::POLLOUT, wait)?,
                Ok(_) => return Ok(()),
                Err(Errno::EPIPE | Errno::ECONNRESET) => return Err(self.lost_by_closing()),
                Err(error) => {
                    let what = format!("passing a descriptor to rank {}", self.peer);
                    return Err(system_failure(what, error));
                }
            }
        }
    }

    /// Receives the descriptor that a peer of this node passes with this number.
    pub(super) fn receive_fd(&self, label: u64, wait: &Wait) -> Result<OwnedFd, Failure> {
        let peer = self.peer;
        loop {
            self.until(PollFlags::POLLIN, wait)?;
            let mut bytes = [0; 8];
            return match receive_fd(self.socket.as_fd(), &mut bytes) {
                Err(Errno::EAGAIN | Errno::EINTR) => continue,
                Err(Errno::ECONNRESET) | Ok((0, _)) => Err(self.lost_by_closing()),
                Err(error) => Err(system_failure(
                    format!("receiving a descriptor from rank {peer}"),
                    error,
                )),
                Ok((8, Some(fd))) if u64::from_le_bytes(bytes) == label => Ok(fd),
                Ok(_) => Err(Failure::Invalid(format!(
                    "rank {peer} passed something unexpected"
                ))),
            };
        }
    }

    fn send_with(&self, parts: &[IoSlice<'_>], rights: &[ControlMessage<'_>]) -> Result<usize, Errno> {
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        match sendmsg::<()>(self.socket.as_raw_fd(), parts, rights, flags, None) {
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(0),
            sent => sent,
        }
    }

    fn until(&self, events: PollFlags, wait: &Wait) -> Result<(), Failure> {
        wait.until_ready(&mut [PollFd::new(self.socket.as_fd(), events)], || {
            vec![self.peer]
        })
    }

    fn lost(&self, how: &str) -> Failure {
        Failure::PeerLost {
            rank: self.peer,
            how: how.to_owned(),
        }
    }

    fn lost_by_closing(&self) -> Failure {
        self.lost("its process closed the connection")
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn receive_fd(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<(usize, Option<OwnedFd>), Errno> {
    let mut control = cmsg_space!([RawFd; 1]);
    let mut slices = [IoSliceMut::new(bytes)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT;
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut slices, Some(&mut control), flags)?;
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
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::collective::wait::hung_up;
    use crate::session::Cancel;

    /// Both ends of a connection between ranks 0 and `peer` of a node.
    fn pair(peer: usize) -> (Connection, Connection) {
        let (left, right) = UnixStream::pair().unwrap();
        let end = |peer, socket: UnixStream| Connection::new(peer, socket.into(), true).unwrap();
        (end(peer, left), end(0, right))
    }

    #[test]
    fn a_descriptor_goes_through_and_a_closed_channel_is_seen() {
        let (left, right) = pair(1);
        let wait = Wait::new(Duration::from_secs(10), &Cancel::new());
        let file = tempfile::tempfile().unwrap();
        left.send_fd(5, file.as_fd(), &wait).unwrap();
        assert!(right.receive_fd(5, &wait).is_ok());
        assert!(!hung_up(&left.socket()));
        drop(right);
        assert!(hung_up(&left.socket()));
        assert_eq!(left.receive_fd(6, &wait).unwrap_err(), left.lost_by_closing());
    }

    #[test]
    fn a_wait_for_a_descriptor_names_the_rank() {
        let (left, _right) = pair(3);
        let wait = Wait::new(Duration::from_millis(5), &Cancel::new());
        let error = left.receive_fd(1, &wait).unwrap_err();
        assert!(matches!(error, Failure::TimedOut { waiting_for, .. } if waiting_for == [3]));
    }

    #[test]
    fn a_port_of_the_range_that_is_taken_is_skipped_and_none_left_is_said() {
        let host = IpAddr::from([127, 0, 0, 1]);
        // Free ports in a row.
        let taken = TcpListener::bind((host, 0)).unwrap();
        let first = taken.local_addr().unwrap().port();
        let ports: PortRange = format!("{first}-{}", first.saturating_add(9)).parse().unwrap();
        let info = |rank| RankInfo {
            ports: Some(ports),
            ..RankInfo::on_one_node(rank, 40)
        };
        let mut open = Vec::new();
        let full = loop {
            match listen_tcp(&info(open.len()), 1) {
                Ok((socket, address)) => {
                    assert!(
                        ports.contains(address.port()) && address.port() != first,
                        "{address}"
                    );
                    open.push(socket);
                }
                Err(full) => break full,
            }
        };
        let rank = open.len();
        assert!((1..10).contains(&rank), "{rank} listen");
        assert_eq!(
            full.to_string(),
            format!(
                "rank {rank} on node 0 cannot listen at `127.0.0.1`: no port of `--worker-ports {ports}` is free\n  \
                 hint: choose a larger range, or see who has the ports (`ss -ltnp`): each rank needs one of its own"
            )
        );
    }

    #[test]
    fn connections_of_the_last_generation_do_not_keep_a_port() {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let info = RankInfo {
            ports: Some(format!("{port}-{port}").parse().unwrap()),
            ..RankInfo::on_one_node(0, 2)
        };
        for _ in 0..2 {
            let (listener, address) = listen_tcp(&info, 1).unwrap();
            let peer = std::net::TcpStream::connect(address).unwrap();
            let wait = Wait::new(Duration::from_secs(10), &Cancel::new());
            wait.until_ready(&mut [PollFd::new(listener.as_fd(), PollFlags::POLLIN)], Vec::new)
                .unwrap();
            let Accepted::One(accepted) = next_socket(&listener, false).unwrap() else {
                panic!("nobody connects");
            };
            // This end closes first, so its port is in TIME_WAIT.
            drop(accepted);
            drop(peer);
        }
    }

    /// Runs `what` as another user: in a thread, because the kernel keeps users by thread. None if it cannot.
    fn as_another_user<T: Send>(what: impl FnOnce() -> T + Send) -> Option<T> {
        const OTHER: u32 = 65_534;
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                // SAFETY: it changes the user of this thread, which ends below.
                let changed = unsafe { libc::syscall(libc::SYS_setresuid, OTHER, OTHER, OTHER) };
                (changed == 0).then(what)
            });
            let done = thread.join().expect("no panic");
            if done.is_none() {
                eprintln!("SKIPPED: only root can be another user");
            }
            done
        })
    }

    /// Another user that kept calling kept a rank in one call, which no deadline ended.
    #[test]
    fn callers_of_another_user_are_sent_away_one_at_a_time() {
        let name = format!("ddp-sockets-strangers-{}", std::process::id());
        let listener = listen_unix(&name, 8).unwrap();
        let address = UnixAddr::from_abstract_name(&name).unwrap();
        let call = || UnixStream::connect_addr(&address).unwrap();
        let Some(_strangers) = as_another_user(|| [call(), call()]) else {
            return;
        };
        let _own = call();
        let next = || next_socket(&listener, true).unwrap();
        assert!(matches!(next(), Accepted::Refused));
        assert!(matches!(next(), Accepted::Refused));
        assert!(matches!(next(), Accepted::One(_)));
        assert!(matches!(next(), Accepted::None));
    }

    #[test]
    fn a_rank_that_listens_no_longer_is_lost() {
        let wait = Wait::new(Duration::from_secs(10), &Cancel::new());
        let name = format!("ddp-sockets-gone-{}", std::process::id());
        drop(listen_unix(&name, 1).unwrap());
        let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let errors = [
            connect_unix(&name, 3, &wait).unwrap_err(),
            connect_tcp(gone, 3, &wait).unwrap_err(),
        ];
        let is_lost = |error: &Failure| matches!(error, Failure::PeerLost { rank: 3, .. });
        assert!(errors.iter().all(is_lost), "{errors:?}");
        let [_, words] = errors.map(|error| error.to_string());
        let first = words.lines().next().unwrap();
        assert_eq!(
            first,
            format!("lost rank 3: cannot reach rank 3 at `{gone}`: connection refused")
        );
    }

    #[test]
    fn another_user_that_listens_in_the_place_of_a_rank_is_not_spoken_to() {
        let name = format!("ddp-sockets-impostor-{}", std::process::id());
        let Some(_listener) = as_another_user(|| listen_unix(&name, 1).unwrap()) else {
            return;
        };
        let wait = Wait::new(Duration::from_secs(10), &Cancel::new());
        let error = connect_unix(&name, 3, &wait).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "connecting to rank 3 at the abstract Unix address `{name}`: user 65534 listens there, who is not the \
                 user of this job"
            )
        );
    }

    #[test]
    fn a_rank_of_this_node_that_accepts_no_connection_is_named_when_the_time_is_over() {
        let name = format!("ddp-sockets-test-{}", std::process::id());
        let _listener = listen_unix(&name, 1).unwrap();
        let wait = Wait::new(Duration::from_millis(50), &Cancel::new());
        // As many as the backlog has room for come through at once.
        let connections: Result<Vec<_>, _> = (0..16).map(|_| connect_unix(&name, 3, &wait)).collect();
        let error = connections.unwrap_err();
        assert!(matches!(error, Failure::TimedOut { waiting_for, .. } if waiting_for == [3]));
    }
}
