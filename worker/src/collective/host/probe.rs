//! Whether large frames reach the other nodes.
//!
//! Where a switch or a tunnel drops the frames that the interfaces send, without an ICMP answer, connections open and
//! short messages pass, but nothing else. So, once, each rank sends a [`Start`] and then a block of several frames to
//! each rank of another node. The start shows that the peer has begun. If the block does not follow it, the frames are
//! lost on the way. Each rank judges what it receives, so buffers of the kernel prove nothing, no answer is waited for,
//! and a peer that is slow to begin is not blamed.

use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::{SockaddrStorage, getpeername, getsockname, getsockopt, sockopt};

use super::sockets::Connection;
use super::topology::Topology;
use crate::collective::error::Failure;
use crate::collective::wait::{Wait, poll_once};

/// Fills several frames of every Ethernet, and one of the largest that IP has.
const BLOCK_BYTES: usize = 64 << 10;
/// Longest time without a byte of a block that has been started. TCP sends a lost frame again five times meanwhile.
const STALL_BOUND: Duration = Duration::from_secs(10);
/// Announces the block, in a frame of its own.
const START: [u8; 8] = *b"ddpprobe";
const TOTAL: usize = START.len() + BLOCK_BYTES;
/// TCP's own header and timestamps, and the IP header, less the headers of a `ping`: from a segment to what `ping -s`
/// takes, for IPv4 and IPv6.
const SEGMENT_TO_PING: u32 = 24;

/// Exchanges a block with all ranks on other nodes, which do the same; `connections` are by rank of the group.
pub(super) fn probe_paths(
    topology: &Topology,
    connections: &[Option<Connection>],
    wait: &Wait,
) -> Result<(), Failure> {
    let remote = topology.remote();
    let paths = remote.filter_map(|rank| Some(Path::new(topology, rank, connections[rank].as_ref()?)));
    exchange(paths.collect(), STALL_BOUND, wait)
}

fn exchange(mut paths: Vec<Path<'_>>, stall_bound: Duration, wait: &Wait) -> Result<(), Failure> {
    let mut block = vec![0; BLOCK_BYTES];
    loop {
        for path in &mut paths {
            path.send(&block)?;
        }
        for path in &mut paths {
            path.receive(&mut block)?;
        }
        paths.retain(|path| !path.is_done());
        if paths.is_empty() {
            return Ok(());
        }
        let mut fds: Vec<_> = paths
            .iter()
            .map(|path| PollFd::new(path.connection.as_fd(), path.events()))
            .collect();
        // What has arrived is read before the time is looked at: this process may have been stopped itself.
        if poll_once(&mut fds, wait.interval())? {
            continue;
        }
        if let Some(stalled) = paths.iter().find(|path| path.is_stalled(stall_bound)) {
            return Err(stalled.failure(stall_bound));
        }
        wait.check(|| paths.iter().map(|path| path.connection.peer()).collect())?;
    }
}

/// From this rank to one of another node, and back.
struct Path<'a> {
    connection: &'a Connection,
    /// This rank and that one.
    ends: [End; 2],
    sent: usize,
    received: usize,
    /// When the last of it came.
    last_received: Instant,
}

#[derive(Clone, Copy, Debug)]
struct End {
    rank: usize,
    node: usize,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (node {}", self.rank, self.node)
    }
}

impl<'a> Path<'a> {
    fn new(topology: &Topology, peer: usize, connection: &'a Connection) -> Self {
        let end = |rank: usize| {
            let member = topology.member(rank);
            End {
                rank: member.global,
                node: member.node,
            }
        };
        Self {
            connection,
            ends: [end(topology.rank()), end(peer)],
            sent: 0,
            received: 0,
            last_received: Instant::now(),
        }
    }

    fn is_done(&self) -> bool {
        self.sent == TOTAL && self.received == TOTAL
    }

    fn is_stalled(&self, bound: Duration) -> bool {
        (START.len()..TOTAL).contains(&self.received) && self.last_received.elapsed() >= bound
    }

    fn events(&self) -> PollFlags {
        let mut events = PollFlags::empty();
        events.set(PollFlags::POLLIN, self.received < TOTAL);
        events.set(PollFlags::POLLOUT, self.sent < TOTAL);
        events
    }

    /// Sends what the connection takes now. The start goes alone, so that it is a small frame.
    fn send(&mut self, block: &[u8]) -> Result<(), Failure> {
        while self.sent < TOTAL {
            let next = match self.sent.checked_sub(START.len()) {
                None => &START[self.sent..],
                Some(sent) => &block[sent..],
            };
            match self.connection.send(&[IoSlice::new(next)])? {
                0 => return Ok(()),
                sent => self.sent += sent,
            }
        }
        Ok(())
    }

    /// Receives what is there, and no byte of what follows the block.
    fn receive(&mut self, block: &mut [u8]) -> Result<(), Failure> {
        while self.received < TOTAL {
            let mut start = [0; START.len()];
            let room = match self.received.checked_sub(START.len()) {
                None => &mut start[self.received..],
                Some(received) => &mut block[received..],
            };
            let received = match self.connection.receive(&mut [IoSliceMut::new(room)])? {
                0 => return Ok(()),
                received => received,
            };
            let in_start = self.received..(self.received + received).min(START.len());
            if !in_start.is_empty() && start[in_start.clone()] != START[in_start] {
                return Err(Failure::Invalid(format!(
                    "rank {} does not test its connection\n  hint: install the same build of `ddp-run` on all nodes",
                    self.ends[1].rank
                )));
            }
            self.received += received;
            self.last_received = Instant::now();
        }
        Ok(())
    }

    fn failure(&self, bound: Duration) -> Failure {
        let fd = self.connection.as_fd().as_raw_fd();
        let address =
            |found: nix::Result<SockaddrStorage>| found.ok().and_then(|found| socket_address(&found));
        let [own, peer] = [address(getsockname(fd)), address(getpeername(fd))];
        let at =
            |address: Option<SocketAddr>| address.map_or(String::new(), |address| format!(", `{address}`"));
        let ping = getsockopt(&self.connection, sockopt::TcpMaxSeg).map_or(8972, |mss| mss + SEGMENT_TO_PING);
        let [me, other] = self.ends;
        Failure::System {
            what: format!(
                "large frames from {other}{}) do not reach {me}{}), but small ones do",
                at(peer),
                at(own)
            ),
            cause: format!(
                "{} of {BLOCK_BYTES} bytes came, none for {:.1} s\n  hint: the path may drop large frames: compare the \
                 MTU of both interfaces (`ip link`) with the path (`ping -M do -s {ping} {}`)",
                self.received - START.len(),
                bound.as_secs_f64(),
                peer.map_or_else(|| "ADDRESS".to_owned(), |peer| peer.ip().to_string())
            ),
        }
    }
}

fn socket_address(address: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| SocketAddr::V4((*v4).into()));
    v4.or_else(|| Some(SocketAddr::V6((*address.as_sockaddr_in6()?).into())))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::super::topology::Member;
    use super::*;
    use crate::session::Cancel;

    const PATIENCE: Duration = Duration::from_mins(1);

    /// Rank 0 of node 0, and its connection to rank 1 of node 1, which the stream stands for.
    fn pair() -> (Topology, [Option<Connection>; 2], TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        peer.set_read_timeout(Some(PATIENCE)).unwrap();
        let (own, _) = listener.accept().unwrap();
        let member = |rank| Member {
            global: rank,
            node: rank,
            local: 0,
        };
        let topology = Topology::new(vec![member(0), member(1)], 0);
        let connection = Connection::new(1, own.into(), false).unwrap();
        (topology, [None, Some(connection)], peer)
    }

    fn probe_within(bound: Duration, peer_sends: &[u8]) -> String {
        let (topology, connections, mut peer) = pair();
        peer.write_all(peer_sends).unwrap();
        let path = Path::new(&topology, 1, connections[1].as_ref().unwrap());
        let wait = Wait::new(Duration::from_secs(1), &Cancel::new());
        let failure = exchange(vec![path], bound, &wait).unwrap_err();
        let address = peer.local_addr().unwrap().to_string();
        let words = failure.to_string().replace(&address, "PEER");
        words.replace(&peer.peer_addr().unwrap().to_string(), "OWN")
    }

    #[test]
    fn a_block_that_does_not_follow_its_start_is_lost_on_the_way() {
        let bound = Duration::from_millis(100);
        let words = probe_within(bound, &START);
        let (words, ping) = words.split_once(" -s ").unwrap();
        assert_eq!(
            words,
            "large frames from rank 1 (node 1, `PEER`) do not reach rank 0 (node 0, `OWN`), but small ones do: 0 of \
             65536 bytes came, none for 0.1 s\n  hint: the path may drop large frames: compare the MTU of both \
             interfaces (`ip link`) with the path (`ping -M do"
        );
        assert!(ping.ends_with(" 127.0.0.1`)"), "{ping}");
        let words = probe_within(bound, &[&START[..], &[0; 100]].concat());
        assert!(
            words.contains(": 100 of 65536 bytes came, none for 0.1 s"),
            "{words}"
        );
    }

    #[test]
    fn a_peer_that_has_not_begun_is_waited_for() {
        let words = probe_within(Duration::ZERO, b"");
        assert!(
            words.starts_with("waited 1") && words.contains(" ms for rank 1\n"),
            "{words}"
        );
    }

    #[test]
    fn a_peer_of_a_build_without_probes_is_named() {
        let words = probe_within(PATIENCE, &[7; 64]);
        assert!(
            words.starts_with("rank 1 does not test its connection\n"),
            "{words}"
        );
    }

    #[test]
    fn what_follows_the_block_is_left_for_the_next_operation() {
        let (topology, connections, mut peer) = pair();
        let wait = Wait::new(PATIENCE, &Cancel::new());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                peer.write_all(&START).unwrap();
                peer.write_all(&vec![1; BLOCK_BYTES]).unwrap();
                peer.write_all(b"next").unwrap();
                let mut block = vec![1; TOTAL];
                peer.read_exact(&mut block).unwrap();
                assert_eq!(block[..START.len()], START);
            });
            probe_paths(&topology, &connections, &wait).unwrap();
        });
        let connection = connections[1].as_ref().unwrap();
        let mut next = [0; 8];
        while connection.receive(&mut [IoSliceMut::new(&mut next)]).unwrap() == 0 {
            wait.check(Vec::new).unwrap();
        }
        assert_eq!(&next, b"next\0\0\0\0");
    }
}
