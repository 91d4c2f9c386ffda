//! What this rank exchanges with one other rank over their connection.
//!
//! Each direction carries a header, then the sender's contribution to the sum that the receiver makes, then a
//! result. Both may be empty. A contribution is received into a ring, from which it is summed. Where a node has several
//! ranks, one of them sends the sum of their contributions ([`NodeSum`]), so that it crosses the network once.
#![allow(unsafe_code, reason = "parts of held buffers as slices")]

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};

use bytemuck::{Zeroable, bytes_of, bytes_of_mut};
use nix::poll::PollFlags;

use super::header::{HEADER_BYTES, OperationHeader};
use super::sockets::Connection;
use crate::collective::error::Failure;
use crate::collective::reduction::Reduction;

/// Bytes of a peer's contribution that wait to be summed; more stay in the kernel. A multiple of every element.
const RING_BYTES: usize = 512 << 10;

/// Bytes of a [`NodeSum`] that are made at a time: they are still in the second-level cache when they are sent.
const PIECE_BYTES: usize = 128 << 10;

/// A range of memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemoryRange {
    pub(super) start: *mut u8,
    /// In bytes.
    pub(super) len: usize,
}

impl MemoryRange {
    const EMPTY: Self = Self::new(std::ptr::NonNull::dangling().as_ptr(), 0);

    pub(super) const fn new(start: *mut u8, len: usize) -> Self {
        Self { start, len }
    }

    /// The rest after the first `at` bytes.
    fn from(self, at: usize) -> Self {
        let at = at.min(self.len);
        Self::new(self.start.wrapping_add(at), self.len - at)
    }
}

/// The contribution to a peer's sum.
#[derive(Clone, Debug)]
pub(super) enum Contribution {
    InMemory(MemoryRange),
    /// It is summed as it is sent.
    Summed(NodeSum),
}

impl Contribution {
    /// Size on the connection.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::InMemory(range) => range.len,
            Self::Summed(part) => part.bytes(),
        }
    }
}

/// What goes to and comes from one peer, besides the headers.
#[derive(Clone, Debug)]
pub(super) struct Transfer {
    /// Rank of the peer in the group.
    pub(super) rank: usize,
    /// What this rank, or this node, contributes to the peer's sum.
    pub(super) contribution: Contribution,
    /// Bytes that the peer, or its node, contributes to this rank's sum.
    pub(super) taken: usize,
    /// Size of one element of them.
    pub(super) taken_element: usize,
    /// Result for the peer.
    pub(super) result_out: MemoryRange,
    /// Result of the peer.
    pub(super) result_in: MemoryRange,
    /// The same range of other buffers of this node, to which it is copied.
    pub(super) result_copies: Vec<*mut u8>,
}

impl Transfer {
    pub(super) fn header_only(rank: usize) -> Self {
        Self {
            rank,
            contribution: Contribution::InMemory(MemoryRange::EMPTY),
            taken: 0,
            taken_element: 1,
            result_out: MemoryRange::EMPTY,
            result_in: MemoryRange::EMPTY,
            result_copies: Vec::new(),
        }
    }
}

/// The sum of the contributions of this node to a sum that is made on another node. Made piece by piece, as it is sent.
#[derive(Clone, Debug)]
pub(super) struct NodeSum {
    reduction: Reduction,
    /// The contributions, in the order of the sum.
    ranks: Vec<*const u8>,
    elements: usize,
    /// The piece that is in `out`: its first byte, and the one behind it.
    piece: (usize, usize),
}

impl NodeSum {
    /// `elements` is that of each rank.
    pub(super) fn new(reduction: Reduction, ranks: Vec<*const u8>, elements: usize) -> Self {
        Self {
            reduction,
            ranks,
            elements,
            piece: (0, 0),
        }
    }

    fn bytes(&self) -> usize {
        self.elements * self.reduction.partial_bytes()
    }

    /// Bytes of other ranks that go into it.
    fn foreign(&self) -> u64 {
        let given = self.elements * self.reduction.element_bytes();
        (given * (self.ranks.len() - 1)) as u64
    }

    /// The rest of the piece that has byte `at`, or the next piece if all of it was sent: empty at the end only.
    ///
    /// # Safety
    /// The contributions must be valid, and not be written before they are summed; `out` must have [`PIECE_BYTES`], be
    /// aligned for every element, the same in all calls, and not be used elsewhere.
    unsafe fn piece_at(&mut self, at: usize, out: *mut u8) -> MemoryRange {
        let (start, end) = self.piece;
        let end_of_all = self.bytes();
        if at == end && end < end_of_all {
            let next = (end + PIECE_BYTES).min(end_of_all);
            let first = end / self.reduction.partial_bytes();
            let elements = (next - end) / self.reduction.partial_bytes();
            let skipped = first * self.reduction.element_bytes();
            let ranks: Vec<_> = self.ranks.iter().map(|rank| rank.wrapping_add(skipped)).collect();
            // SAFETY: the caller's promise; `out` has room for so many elements.
            unsafe { self.reduction.partial(&ranks, out, elements) };
            self.piece = (end, next);
            return MemoryRange::new(out, next - end);
        }
        MemoryRange::new(out.wrapping_add(at - start), end - at)
    }
}

/// A [`Transfer`] as it is carried out.
pub(super) struct PeerExchange<'a> {
    connection: &'a mut Connection,
    transfer: Transfer,
    ring: *mut u8,
    out: *mut u8,
    header_out: OperationHeader,
    header_in: OperationHeader,
    sent: usize,
    received: usize,
}

impl<'a> PeerExchange<'a> {
    pub(super) fn new(connection: &'a mut Connection, transfer: Transfer, header: &OperationHeader) -> Self {
        // Allocated at their first use.
        if transfer.taken > 0 {
            connection.ring.resize(RING_BYTES / size_of::<u64>(), 0);
        }
        if matches!(transfer.contribution, Contribution::Summed(_)) {
            connection.out.resize(PIECE_BYTES / size_of::<u64>(), 0);
        }
        let (ring, out) = (
            connection.ring.as_mut_ptr().cast(),
            connection.out.as_mut_ptr().cast(),
        );
        let header_out = header.with_part(transfer.result_out.len);
        Self {
            connection,
            transfer,
            ring,
            out,
            header_out,
            header_in: OperationHeader::zeroed(),
            sent: 0,
            received: 0,
        }
    }

    /// Rank of the peer in the group.
    pub(super) fn rank(&self) -> usize {
        self.transfer.rank
    }

    /// Global rank of the peer.
    pub(super) fn global(&self) -> usize {
        self.connection.peer()
    }

    /// True if the peer contributes to this rank's sum.
    pub(super) fn contributes(&self) -> bool {
        self.transfer.taken > 0
    }

    /// Elements of the peer's contribution that were received.
    pub(super) fn elements(&self) -> usize {
        self.contributed() / self.transfer.taken_element
    }

    /// Elements that fit into the ring.
    pub(super) fn elements_in_ring(&self) -> usize {
        RING_BYTES / self.transfer.taken_element
    }

    /// Element `at` of the peer's contribution, in the ring.
    pub(super) fn contribution(&self, at: usize) -> *const u8 {
        self.ring
            .wrapping_add(at * self.transfer.taken_element % RING_BYTES)
    }

    /// Bytes that this rank read from others of the node for what it sent, and wrote to them of what it received; once it
    /// is done.
    pub(super) fn within_node(&self) -> u64 {
        let given = match &self.transfer.contribution {
            Contribution::InMemory(_) => 0,
            Contribution::Summed(part) => part.foreign(),
        };
        let got = self.transfer.result_in.len * self.transfer.result_copies.len();
        given + got as u64
    }

    /// Bytes of the peer's contribution that were received.
    fn contributed(&self) -> usize {
        self.received
            .saturating_sub(HEADER_BYTES)
            .min(self.transfer.taken)
    }

    /// Bytes of `summed` elements of it.
    fn used(&self, summed: usize) -> usize {
        (summed * self.transfer.taken_element).min(self.transfer.taken)
    }

    /// What is missing, for errors, the first first: the header, the contribution, the result, or room to send.
    pub(super) fn lag(&self) -> Option<u8> {
        match self.received {
            n if n < HEADER_BYTES => Some(0),
            n if n < HEADER_BYTES + self.transfer.taken => Some(1),
            n if n < self.incoming() => Some(2),
            _ => (self.sent < self.outgoing()).then_some(3),
        }
    }

    /// True when all is sent and received.
    pub(super) fn done(&self) -> bool {
        self.sent == self.outgoing() && self.received == self.incoming()
    }

    /// Sends what the connection accepts of the header, the contribution and the first `ready` bytes of the
    /// result. Returns the bytes sent, and those of them that belong to the result.
    pub(super) fn send(&mut self, ready: usize) -> Result<(usize, usize), Failure> {
        if self.sent == self.sendable(ready) {
            return Ok((0, 0));
        }
        let behind_header = self.sent.saturating_sub(HEADER_BYTES);
        let given = self.transfer.contribution.bytes();
        let contribution = match &mut self.transfer.contribution {
            Contribution::InMemory(range) => range.from(behind_header),
            // SAFETY: the contributions are in buffers that the operation holds on all ranks of the node, and are replaced
            // by the result that depends on them; `out` is this connection's.
            Contribution::Summed(part) => unsafe { part.piece_at(behind_header.min(given), self.out) },
        };
        let result = if behind_header.min(given) + contribution.len == given {
            let MemoryRange { start, len } = self.transfer.result_out;
            MemoryRange::new(start, len.min(ready)).from(behind_header.saturating_sub(given))
        } else {
            MemoryRange::EMPTY
        };
        // SAFETY: both are in buffers that the operation holds, or in `out`; no rank writes them before they are sent: a
        // slice of a contribution is replaced by the result that depends on it, and a result is final.
        let (contribution, result) = unsafe {
            (
                std::slice::from_raw_parts(contribution.start, contribution.len),
                std::slice::from_raw_parts(result.start, result.len),
            )
        };
        let header = &bytes_of(&self.header_out)[self.sent.min(HEADER_BYTES)..];
        let parts = [
            IoSlice::new(header),
            IoSlice::new(contribution),
            IoSlice::new(result),
        ];
        let sent = self.connection.send(&parts)?;
        let first_of_result = HEADER_BYTES + given;
        let before = self.sent.max(first_of_result);
        self.sent += sent;
        Ok((sent, self.sent.saturating_sub(before)))
    }

    /// Receives what is there, as far as the ring has room: `summed` elements of the contribution have been summed.
    /// Returns the bytes received, and those of them that belong to the result.
    pub(super) fn receive(&mut self, summed: usize) -> Result<(usize, usize), Failure> {
        if !self.receivable(summed) {
            return Ok((0, 0));
        }
        let used = self.used(summed);
        let behind_header = self.received.saturating_sub(HEADER_BYTES);
        let contributed = self.contributed();
        let to_wrap = RING_BYTES - contributed % RING_BYTES;
        let room = (RING_BYTES - (contributed - used))
            .min(self.transfer.taken - contributed)
            .min(to_wrap);
        let result = if contributed + room == self.transfer.taken {
            self.transfer
                .result_in
                .from(behind_header.saturating_sub(self.transfer.taken))
        } else {
            MemoryRange::EMPTY
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
            IoSliceMut::new(&mut bytes_of_mut(&mut self.header_in)[header_left..]),
            IoSliceMut::new(ring),
            IoSliceMut::new(result),
        ];
        let received = self.connection.receive(&mut parts)?;
        let (before, first_of_result) = (self.received, HEADER_BYTES + self.transfer.taken);
        self.received += received;
        if before < HEADER_BYTES && self.received >= HEADER_BYTES {
            let (peer, part) = (self.connection.peer(), self.transfer.result_in.len);
            self.header_out.with_part(part).agree(&self.header_in, peer)?;
        }
        let from = before.max(first_of_result);
        let of_result = self.received.saturating_sub(from);
        if of_result > 0 {
            // SAFETY: so much of the result was just received.
            unsafe { self.copy_result(from - first_of_result, of_result) };
        }
        Ok((received, of_result))
    }

    /// Copies a part of the peer's result to the other buffers.
    ///
    /// # Safety
    /// It must have been received.
    unsafe fn copy_result(&self, at: usize, len: usize) {
        let source = self.transfer.result_in.start.wrapping_add(at);
        for copy in &self.transfer.result_copies {
            // SAFETY: the same part of other held buffers, in which only this rank writes it.
            unsafe { std::ptr::copy_nonoverlapping(source, copy.wrapping_add(at), len) };
        }
    }

    /// The descriptor, and the events after which something can be sent or received.
    pub(super) fn interest(&self, ready: usize, summed: usize) -> Option<(BorrowedFd<'_>, PollFlags)> {
        let mut events = PollFlags::empty();
        events.set(PollFlags::POLLOUT, self.sent < self.sendable(ready));
        events.set(PollFlags::POLLIN, self.receivable(summed));
        (!events.is_empty()).then(|| (self.connection.as_fd(), events))
    }

    fn receivable(&self, summed: usize) -> bool {
        let contributed = self.contributed();
        let ring_full = contributed < self.transfer.taken && contributed - self.used(summed) == RING_BYTES;
        self.received < self.incoming() && !ring_full
    }

    fn sendable(&self, ready: usize) -> usize {
        HEADER_BYTES + self.transfer.contribution.bytes() + self.transfer.result_out.len.min(ready)
    }

    fn outgoing(&self) -> usize {
        self.sendable(usize::MAX)
    }

    fn incoming(&self) -> usize {
        HEADER_BYTES + self.transfer.taken + self.transfer.result_in.len
    }
}
