//! The Unix connection between two ranks of one node: descriptors go through it, and its end tells of a death.
#![allow(unsafe_code, reason = "descriptors that the kernel hands over")]

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::cmsg_space;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg, sendmsg,
    socketpair,
};

use super::patience::{hung_up, system, until_ready};
use super::{Failure, Wait};

/// One end. The connection keeps message boundaries (`SOCK_SEQPACKET`) and does not block.
#[derive(Debug)]
pub(super) struct Door(OwnedFd);

impl Door {
    /// Wraps a connected socket.
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self(socket)
    }

    /// Both ends of a new connection.
    pub(super) fn pair() -> Result<(Self, OwnedFd), Failure> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)
            .map_err(|e| system("opening a Unix connection", e))?;
        Ok((Self(ours), theirs))
    }

    /// True if the peer's end is closed: it left or died.
    pub(super) fn is_closed(&self) -> bool {
        hung_up(&self.0)
    }

    /// Hands a descriptor to the peer, with a number that says what it is.
    pub(super) fn give(
        &self,
        label: u64,
        fd: BorrowedFd<'_>,
        peer: usize,
        wait: &Wait,
    ) -> Result<(), Failure> {
        let bytes = label.to_le_bytes();
        let fds = [fd.as_raw_fd()];
        loop {
            let rights = [ControlMessage::ScmRights(&fds)];
            let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
            match sendmsg::<()>(self.0.as_raw_fd(), &[IoSlice::new(&bytes)], &rights, flags, None) {
                Ok(_) => return Ok(()),
                Err(Errno::EAGAIN) => self.until(PollFlags::POLLOUT, peer, wait)?,
                Err(Errno::EINTR) => {}
                Err(Errno::EPIPE | Errno::ECONNRESET) => return Err(gone(peer)),
                Err(error) => return Err(system(format!("passing a descriptor to rank {peer}"), error)),
            }
        }
    }

    /// Takes the descriptor that the peer gives under this number.
    pub(super) fn take(&self, label: u64, peer: usize, wait: &Wait) -> Result<OwnedFd, Failure> {
        loop {
            self.until(PollFlags::POLLIN, peer, wait)?;
            let mut bytes = [0; 8];
            let received = match receive(self.0.as_fd(), &mut bytes) {
                Ok(received) => received,
                Err(Errno::EAGAIN | Errno::EINTR) => continue,
                Err(Errno::ECONNRESET) => return Err(gone(peer)),
                Err(error) => return Err(system(format!("taking a descriptor from rank {peer}"), error)),
            };
            return match received {
                (0, _) => Err(gone(peer)),
                (8, Some(fd)) if u64::from_le_bytes(bytes) == label => Ok(fd),
                _ => Err(Failure::Invalid(format!(
                    "rank {peer} passed something unexpected"
                ))),
            };
        }
    }

    fn until(&self, events: PollFlags, peer: usize, wait: &Wait) -> Result<(), Failure> {
        until_ready(&mut [PollFd::new(self.0.as_fd(), events)], wait, || vec![peer])
    }
}

fn gone(rank: usize) -> Failure {
    Failure::PeerLost {
        rank,
        how: "its process closed the connection".to_owned(),
    }
}

fn receive(fd: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<(usize, Option<OwnedFd>), Errno> {
    let mut control = cmsg_space!([std::os::fd::RawFd; 1]);
    let mut slices = [IoSliceMut::new(bytes)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT;
    let message = recvmsg::<()>(fd.as_raw_fd(), &mut slices, Some(&mut control), flags)?;
    let mut found = None;
    for part in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(fds) = part {
            for raw in fds {
                // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
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
    fn a_descriptor_goes_through_and_a_closed_door_is_seen() {
        let (left, right) = Door::pair().unwrap();
        let right = Door::new(right);
        let wait = Wait::new(Duration::from_secs(10), &Cancel::new());
        let file = tempfile::tempfile().unwrap();
        left.give(5, file.as_fd(), 1, &wait).unwrap();
        assert!(right.take(5, 0, &wait).is_ok());
        assert!(!left.is_closed());
        drop(right);
        assert!(left.is_closed());
        assert_eq!(left.take(6, 1, &wait).unwrap_err(), gone(1));
    }

    #[test]
    fn a_wait_for_a_descriptor_names_the_rank() {
        let (left, _right) = Door::pair().unwrap();
        let wait = Wait::new(Duration::from_millis(5), &Cancel::new());
        let error = left.take(1, 3, &wait).unwrap_err();
        assert!(matches!(error, Failure::TimedOut { waiting_for, .. } if waiting_for == [3]));
    }
}
