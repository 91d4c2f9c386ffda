//! What one remote peer and this rank send each other in one operation.
//!
//! Each direction carries a header, then the sender's contribution to the sum that the receiver makes, then a
//! result. Both may be empty.
#![allow(unsafe_code, reason = "parts of held buffers as slices")]

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::BorrowedFd;

use nix::poll::PollFlags;

use super::Failure;
use super::header::{HEADER_BYTES, Header};
use super::link::{Link, RING_BYTES};

/// A range of memory: first byte and length.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    /// First byte.
    pub(super) start: *mut u8,
    /// Bytes.
    pub(super) len: usize,
}

impl Span {
    /// Nothing.
    pub(super) const EMPTY: Self = Self {
        start: std::ptr::NonNull::dangling().as_ptr(),
        len: 0,
    };

    /// What is left of it behind the first `at` bytes.
    fn from(self, at: usize) -> Self {
        let at = at.min(self.len);
        Self {
            start: self.start.wrapping_add(at),
            len: self.len - at,
        }
    }
}

/// What goes to and comes from one peer, but for the headers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Script {
    /// Rank of the peer in the group.
    pub(super) rank: usize,
    /// What this rank gives to the peer's sum.
    pub(super) contribution: Span,
    /// What the peer gives to this rank's sum goes through the ring; this many bytes.
    pub(super) taken: usize,
    /// Result for the peer.
    pub(super) result_out: Span,
    /// Result of the peer.
    pub(super) result_in: Span,
}

impl Script {
    /// Nothing but the headers.
    pub(super) fn header_only(rank: usize) -> Self {
        Self {
            rank,
            contribution: Span::EMPTY,
            taken: 0,
            result_out: Span::EMPTY,
            result_in: Span::EMPTY,
        }
    }
}

/// A script as it is carried out.
pub(super) struct Flow<'a> {
    link: &'a mut Link,
    script: Script,
    ring: *mut u8,
    header_out: [u8; HEADER_BYTES],
    header_in: [u8; HEADER_BYTES],
    sent: usize,
    received: usize,
}

impl<'a> Flow<'a> {
    /// Begins.
    pub(super) fn new(link: &'a mut Link, script: Script, header: &Header) -> Self {
        let ring = if script.taken > 0 {
            link.ring()
        } else {
            Span::EMPTY.start
        };
        Self {
            link,
            script,
            ring,
            header_out: header.encode(),
            header_in: [0; HEADER_BYTES],
            sent: 0,
            received: 0,
        }
    }

    /// Rank of the peer in the group.
    pub(super) fn rank(&self) -> usize {
        self.script.rank
    }

    /// Global rank of the peer.
    pub(super) fn global(&self) -> usize {
        self.link.global()
    }

    /// Bytes of the peer's contribution that have come.
    pub(super) fn contributed(&self) -> usize {
        self.received.saturating_sub(HEADER_BYTES).min(self.script.taken)
    }

    /// Byte `at` of the peer's contribution, in the ring.
    pub(super) fn contribution(&self, at: usize) -> *const u8 {
        self.ring.wrapping_add(at % RING_BYTES)
    }

    /// How far the peer is behind, for errors: nothing heard, contribution missing, result missing.
    pub(super) fn lag(&self) -> Option<u8> {
        match self.received {
            n if n < HEADER_BYTES => Some(0),
            n if n < HEADER_BYTES + self.script.taken => Some(1),
            n if n < self.incoming() => Some(2),
            _ => (self.sent < self.outgoing()).then_some(3),
        }
    }

    /// True when all is sent and received.
    pub(super) fn done(&self) -> bool {
        self.sent == self.outgoing() && self.received == self.incoming()
    }

    /// Sends what the connection takes of the header, the contribution and the first `ready` bytes of the
    /// result. Returns the bytes sent, and those of them that belong to the result.
    pub(super) fn send(&mut self, ready: usize) -> Result<(usize, usize), Failure> {
        if self.sent == self.sendable(ready) {
            return Ok((0, 0));
        }
        let behind_header = self.sent.saturating_sub(HEADER_BYTES);
        let contribution = self.script.contribution.from(behind_header);
        let result = Span {
            len: self.script.result_out.len.min(ready),
            ..self.script.result_out
        };
        let result = result.from(behind_header.saturating_sub(self.script.contribution.len));
        // SAFETY: both lie in buffers that the operation holds; nobody writes them before they are sent: a
        // slice of a contribution is replaced by the result that depends on it, and a result is final.
        let (contribution, result) = unsafe {
            (
                std::slice::from_raw_parts(contribution.start, contribution.len),
                std::slice::from_raw_parts(result.start, result.len),
            )
        };
        let header = &self.header_out[self.sent.min(HEADER_BYTES)..];
        let parts = [
            IoSlice::new(header),
            IoSlice::new(contribution),
            IoSlice::new(result),
        ];
        let sent = self.link.send(&parts)?;
        let first_of_result = HEADER_BYTES + self.script.contribution.len;
        let before = self.sent.max(first_of_result);
        self.sent += sent;
        Ok((sent, self.sent.saturating_sub(before)))
    }

    /// Receives what has come, as far as the ring has room: `used` bytes of the contribution have been summed.
    /// Returns the bytes received, and those of them that belong to the result.
    pub(super) fn receive(&mut self, used: usize, ours: &Header) -> Result<(usize, usize), Failure> {
        if !self.receivable(used) {
            return Ok((0, 0));
        }
        let behind_header = self.received.saturating_sub(HEADER_BYTES);
        let contributed = self.contributed();
        let to_wrap = RING_BYTES - contributed % RING_BYTES;
        let room = (RING_BYTES - (contributed - used))
            .min(self.script.taken - contributed)
            .min(to_wrap);
        let result = if contributed + room == self.script.taken {
            self.script
                .result_in
                .from(behind_header.saturating_sub(self.script.taken))
        } else {
            Span::EMPTY
        };
        let at = contributed % RING_BYTES;
        // SAFETY: the free part of the ring, which is ours alone; and a part of a held buffer that only its
        // owner's result, which this is, may replace.
        let (ring, result) = unsafe {
            (
                std::slice::from_raw_parts_mut(self.ring.wrapping_add(at), room),
                std::slice::from_raw_parts_mut(result.start, result.len),
            )
        };
        let header_left = self.received.min(HEADER_BYTES);
        let mut parts = [
            IoSliceMut::new(&mut self.header_in[header_left..]),
            IoSliceMut::new(ring),
            IoSliceMut::new(result),
        ];
        let received = self.link.receive(&mut parts)?;
        let (before, first_of_result) = (self.received, HEADER_BYTES + self.script.taken);
        self.received += received;
        if before < HEADER_BYTES && self.received >= HEADER_BYTES {
            ours.agree(&Header::decode(&self.header_in), self.link.global())?;
        }
        Ok((
            received,
            self.received.saturating_sub(before.max(first_of_result)),
        ))
    }

    /// The descriptor, and the events that would let the flow go on.
    pub(super) fn interest(&self, ready: usize, used: usize) -> Option<(BorrowedFd<'_>, PollFlags)> {
        let mut events = PollFlags::empty();
        events.set(PollFlags::POLLOUT, self.sent < self.sendable(ready));
        events.set(PollFlags::POLLIN, self.receivable(used));
        (!events.is_empty()).then(|| (self.link.fd(), events))
    }

    fn receivable(&self, used: usize) -> bool {
        let contributed = self.contributed();
        let ring_full = contributed < self.script.taken && contributed - used == RING_BYTES;
        self.received < self.incoming() && !ring_full
    }

    fn sendable(&self, ready: usize) -> usize {
        HEADER_BYTES + self.script.contribution.len + self.script.result_out.len.min(ready)
    }

    fn outgoing(&self) -> usize {
        self.sendable(usize::MAX)
    }

    fn incoming(&self) -> usize {
        HEADER_BYTES + self.script.taken + self.script.result_in.len
    }
}
