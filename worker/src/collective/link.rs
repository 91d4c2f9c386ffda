//! The TCP connections to the ranks of other nodes.

use std::io::{ErrorKind, IoSlice, IoSliceMut, Read};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, sendmsg};

use super::Failure;
use super::node_part::PIECE_BYTES;

/// Bytes of a peer's contribution that wait to be summed; more stay in the kernel. A multiple of every element.
pub(super) const RING_BYTES: usize = 512 << 10;

/// One connection. It does not block.
#[derive(Debug)]
pub(super) struct Link {
    global: usize,
    stream: TcpStream,
    ring: Vec<u64>,
    room: Vec<u64>,
}

impl Link {
    /// Wraps a connected stream to a global rank.
    pub(super) fn new(global: usize, socket: OwnedFd) -> Result<Self, Failure> {
        let stream = TcpStream::from(socket);
        let prepared = stream
            .set_nonblocking(true)
            .and_then(|()| stream.set_nodelay(true));
        prepared.map_err(|error| Failure::System {
            what: format!("preparing the connection to rank {global}"),
            cause: error.to_string(),
        })?;
        Ok(Self {
            global,
            stream,
            ring: Vec::new(),
            room: Vec::new(),
        })
    }

    /// Global rank of the peer.
    pub(super) fn global(&self) -> usize {
        self.global
    }

    /// For `poll`.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// The ring, allocated at its first use.
    pub(super) fn ring(&mut self) -> *mut u8 {
        self.ring.resize(RING_BYTES / size_of::<u64>(), 0);
        self.ring.as_mut_ptr().cast()
    }

    /// Room for what is made before it is sent, allocated at its first use.
    pub(super) fn room(&mut self) -> *mut u8 {
        self.room.resize(PIECE_BYTES / size_of::<u64>(), 0);
        self.room.as_mut_ptr().cast()
    }

    /// Sends what the connection takes now; 0 if nothing.
    pub(super) fn send(&self, parts: &[IoSlice<'_>]) -> Result<usize, Failure> {
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        match sendmsg::<()>(self.stream.as_raw_fd(), parts, &[], flags, None) {
            Ok(sent) => Ok(sent),
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(0),
            Err(error) => Err(self.lost(&error.desc().to_lowercase())),
        }
    }

    /// Receives what has come; 0 if nothing.
    pub(super) fn receive(&self, parts: &mut [IoSliceMut<'_>]) -> Result<usize, Failure> {
        match (&self.stream).read_vectored(parts) {
            Ok(0) => Err(self.lost("its process closed the connection")),
            Ok(received) => Ok(received),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
            Err(error) => Err(self.lost(&error.to_string().to_lowercase())),
        }
    }

    fn lost(&self, how: &str) -> Failure {
        Failure::PeerLost {
            rank: self.global,
            how: how.to_owned(),
        }
    }
}
