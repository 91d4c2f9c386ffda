//! What the ranks of this node give to a sum that a rank of another node makes: added up here, so that it crosses the
//! network once. Made piece by piece, as it is sent.
#![allow(unsafe_code, reason = "memory that other ranks map")]

use super::flow::Span;
use super::kernel::Reduction;

/// Bytes that are made at a time: what is sent is still in the second-level cache.
pub(super) const PIECE_BYTES: usize = 128 << 10;

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct NodePart {
    reduction: Reduction,
    /// The contributions, in the order of the sum.
    ranks: Vec<*const u8>,
    elements: usize,
    /// First byte of the piece that is in the room, and the one behind it.
    piece: (usize, usize),
}

impl NodePart {
    /// Of so many elements of each rank.
    pub(super) fn new(reduction: Reduction, ranks: Vec<*const u8>, elements: usize) -> Self {
        Self {
            reduction,
            ranks,
            elements,
            piece: (0, 0),
        }
    }

    /// Size of it.
    pub(super) fn bytes(&self) -> usize {
        self.elements * self.reduction.part_bytes()
    }

    /// Bytes of other ranks that go into it.
    pub(super) fn foreign(&self) -> u64 {
        let given = self.elements * self.reduction.element_bytes();
        (given * (self.ranks.len() - 1)) as u64
    }

    /// The rest of the piece that has byte `at`, or the next piece if all of it was sent: empty at the end only.
    ///
    /// # Safety
    /// The contributions must be valid, and not written by anyone before they are summed; `room` must have
    /// [`PIECE_BYTES`], be aligned for every element, the same in all calls, and used by nobody else.
    pub(super) unsafe fn piece_at(&mut self, at: usize, room: *mut u8) -> Span {
        let (start, end) = self.piece;
        let end_of_all = self.bytes();
        if at == end && end < end_of_all {
            let next = (end + PIECE_BYTES).min(end_of_all);
            let first = end / self.reduction.part_bytes();
            let elements = (next - end) / self.reduction.part_bytes();
            let skipped = first * self.reduction.element_bytes();
            let ranks: Vec<_> = self.ranks.iter().map(|rank| rank.wrapping_add(skipped)).collect();
            // SAFETY: the caller's promise; the room has a piece of so many elements.
            unsafe { self.reduction.part(&ranks, room, elements) };
            self.piece = (end, next);
            return Span {
                start: room,
                len: next - end,
            };
        }
        Span {
            start: room.wrapping_add(at - start),
            len: end - at,
        }
    }
}
