//! The memory of a shared arena: this rank's segment, and where those of the neighbours are mapped.
#![allow(unsafe_code, reason = "the promise of `Memory`, passed on")]

use std::any::Any;
use std::ptr::NonNull;

use crate::device::{Buffer, HostMemory, Memory};

/// See the module. All are unmapped with the arena.
#[derive(Debug)]
pub(super) struct SharedSegment {
    number: u64,
    own: HostMemory,
    neighbours: Vec<(usize, HostMemory)>,
}

impl SharedSegment {
    /// `number` is the same on all ranks, and not 0; `neighbours` are by global rank.
    pub(super) fn new(number: u64, own: HostMemory, neighbours: Vec<(usize, HostMemory)>) -> Self {
        Self {
            number,
            own,
            neighbours,
        }
    }

    /// The segment behind a buffer, if it is one.
    pub(super) fn behind(buffer: &Buffer) -> Option<&Self> {
        buffer.arena().memory().as_any().downcast_ref()
    }

    /// Number of the arena.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// First of `bytes` bytes at `offset` in the segment of a neighbour, if they are mapped here.
    pub(super) fn of_neighbour(&self, global: usize, offset: u64, bytes: usize) -> Option<*mut u8> {
        let (_, memory) = self.neighbours.iter().find(|(rank, _)| *rank == global)?;
        let offset = usize::try_from(offset).ok()?;
        let fits = offset.checked_add(bytes)? <= memory.len();
        fits.then(|| memory.ptr().as_ptr().wrapping_add(offset))
    }
}

// SAFETY: what is said is said of `own`, which keeps the promise and lives as long as `self`. Other processes map it
// too, and write it only while an operation of this rank holds the range (`Held`).
unsafe impl Memory for SharedSegment {
    fn bytes(&self) -> usize {
        self.own.len()
    }

    fn host_ptr(&self) -> Option<NonNull<u8>> {
        Some(self.own.ptr())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
