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
use super::node_part::NodePart;

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

/// What is given to a peer's sum.
#[derive(Clone, Debug)]
pub(super) enum Contribution {
    /// It is there.
    Lies(Span),
    /// It is made as it is sent.
    Made(NodePart),
}

impl Contribution {
    /// Size of it, as it is sent.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Lies(span) => span.len,
            Self::Made(part) => part.bytes(),
        }
    }
}

/// What goes to and comes from one peer, but for the headers.
#[derive(Clone, Debug)]
pub(super) struct Script {
    /// Rank of the peer in the group.
    pub(super) rank: usize,
    /// What this rank, or this node, gives to the peer's sum.
    pub(super) contribution: Contribution,
    /// What the peer, or its node, gives to this rank's sum goes through the ring; this many bytes.
    pub(super) taken: usize,
    /// Size of one of its elements.
    pub(super) taken_element: usize,
    /// Result for the peer.
    pub(super) result_out: Span,
    /// Result of the peer.
    pub(super) result_in: Span,
    /// Where neighbours want it too.
    pub(super) result_copies: Vec<*mut u8>,
}

impl Script {
    /// Nothing but the headers.
    pub(super) fn header_only(rank: usize) -> Self {
        Self {
            rank,
            contribution: Contribution::Lies(Span::EMPTY),
            taken: 0,
            taken_element: 1,
            result_out: Span::EMPTY,
            result_in: Span::EMPTY,
            result_copies: Vec::new(),
        }
    }
}

/// A script as it is carried out.
pub(super) struct Flow<'a> {
    link: &'a mut Link,
    script: Script,
    ring: *mut u8,
    room: *mut u8,
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
        let room = match script.contribution {
            Contribution::Made(_) => link.room(),
            Contribution::Lies(_) => Span::EMPTY.start,
        };
        Self {
            link,
            script,
            ring,
            room,
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

    /// True if the peer gives something to this rank's sum.
    pub(super) fn contributes(&self) -> bool {
        self.script.taken > 0
    }

    /// Elements of the peer's contribution that have come.
    pub(super) fn elements(&self) -> usize {
        self.contributed() / self.script.taken_element
    }

    /// Elements of the peer's contribution that lie in one piece in the ring, from the first on and then again.
    pub(super) fn elements_in_ring(&self) -> usize {
        RING_BYTES / self.script.taken_element
    }

    /// Element `at` of the peer's contribution, in the ring.
    pub(super) fn contribution(&self, at: usize) -> *const u8 {
        self.ring
            .wrapping_add(at * self.script.taken_element % RING_BYTES)
    }

    /// Bytes of neighbours that went into what was sent, and that of what came went to neighbours; once it is done.
    pub(super) fn among_neighbours(&self) -> u64 {
        let given = match &self.script.contribution {
            Contribution::Lies(_) => 0,
            Contribution::Made(part) => part.foreign(),
        };
        let got = self.script.result_in.len * self.script.result_copies.len();
        given + got as u64
    }

    /// Bytes of the peer's contribution that have come.
    fn contributed(&self) -> usize {
        self.received.saturating_sub(HEADER_BYTES).min(self.script.taken)
    }

    /// Bytes of it that have been summed, if so many elements have.
    fn used(&self, summed: usize) -> usize {
        (summed * self.script.taken_element).min(self.script.taken)
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
        let given = self.script.contribution.bytes();
        let contribution = match &mut self.script.contribution {
            Contribution::Lies(span) => span.from(behind_header),
            // SAFETY: the contributions lie in buffers that the operation holds on all ranks of the node, and are replaced
            // by the result that depends on them; the room is this connection's.
            Contribution::Made(part) => unsafe { part.piece_at(behind_header.min(given), self.room) },
        };
        let result = if behind_header.min(given) + contribution.len == given {
            let ready = Span {
                len: self.script.result_out.len.min(ready),
                ..self.script.result_out
            };
            ready.from(behind_header.saturating_sub(given))
        } else {
            Span::EMPTY
        };
        // SAFETY: both lie in buffers that the operation holds, or in the room; nobody writes them before they are
        // sent: a slice of a contribution is replaced by the result that depends on it, and a result is final.
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
        let first_of_result = HEADER_BYTES + given;
        let before = self.sent.max(first_of_result);
        self.sent += sent;
        Ok((sent, self.sent.saturating_sub(before)))
    }

    /// Receives what has come, as far as the ring has room: `summed` elements of the contribution have been summed.
    /// Returns the bytes received, and those of them that belong to the result.
    pub(super) fn receive(&mut self, summed: usize, ours: &Header) -> Result<(usize, usize), Failure> {
        if !self.receivable(summed) {
            return Ok((0, 0));
        }
        let used = self.used(summed);
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
        let from = before.max(first_of_result);
        let of_result = self.received.saturating_sub(from);
        if of_result > 0 {
            // SAFETY: so much of the result has come just now.
            unsafe { self.hand_on(from - first_of_result, of_result) };
        }
        Ok((received, of_result))
    }

    /// Copies a part of the peer's result to the neighbours that want it.
    ///
    /// # Safety
    /// It must have come.
    unsafe fn hand_on(&self, at: usize, len: usize) {
        let source = self.script.result_in.start.wrapping_add(at);
        for copy in &self.script.result_copies {
            // SAFETY: the same part of other held buffers, in which only this rank writes it.
            unsafe { std::ptr::copy_nonoverlapping(source, copy.wrapping_add(at), len) };
        }
    }

    /// The descriptor, and the events that would let the flow go on.
    pub(super) fn interest(&self, ready: usize, summed: usize) -> Option<(BorrowedFd<'_>, PollFlags)> {
        let mut events = PollFlags::empty();
        events.set(PollFlags::POLLOUT, self.sent < self.sendable(ready));
        events.set(PollFlags::POLLIN, self.receivable(summed));
        (!events.is_empty()).then(|| (self.link.fd(), events))
    }

    fn receivable(&self, summed: usize) -> bool {
        let contributed = self.contributed();
        let ring_full = contributed < self.script.taken && contributed - self.used(summed) == RING_BYTES;
        self.received < self.incoming() && !ring_full
    }

    fn sendable(&self, ready: usize) -> usize {
        HEADER_BYTES + self.script.contribution.bytes() + self.script.result_out.len.min(ready)
    }

    fn outgoing(&self) -> usize {
        self.sendable(usize::MAX)
    }

    fn incoming(&self) -> usize {
        HEADER_BYTES + self.script.taken + self.script.result_in.len
    }
}
