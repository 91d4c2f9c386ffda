//! How a buffer that peers cannot reach goes through the stages, piece by piece.
//!
//! A round takes a part of the buffer that is itself a small operation of the same kind: a run of elements, or,
//! where the buffer is one slice a rank, the same run of every slice.
#![allow(unsafe_code, reason = "copies between a held buffer and a stage")]

use std::ops::Range;

use super::board::STAGE_BYTES;
use super::group::Group;
use super::partition::slice;
use super::plan::Job;
use super::{Failure, Operation};

/// The rounds of one operation.
pub(super) struct Rounds {
    job: Job,
    base: *mut u8,
    /// Slices of the buffer: one a rank, or one in all.
    slices: usize,
    /// Elements of a slice in a round.
    each: usize,
}

impl Rounds {
    /// The rounds of an operation on the buffer at `base`.
    pub(super) fn new(job: Job, base: *mut u8, group: &Group) -> Result<Self, Failure> {
        let element = job.dtype.bytes();
        let (slices, multiple) = match job.operation {
            Operation::ReduceScatter | Operation::AllGather => (group.size(), 1),
            // Cut where the ranks' parts of a round are equal, so that the bytes are the bound's.
            Operation::AllReduce => (1, group.size()),
            _ => (1, 1),
        };
        let each = STAGE_BYTES / (slices * element) / multiple * multiple;
        if each == 0 {
            return Err(Failure::Invalid(format!(
                "a group of {} is too large for a stage",
                group.size()
            )));
        }
        Ok(Self {
            job,
            base,
            slices,
            each,
        })
    }

    /// Number of rounds.
    pub(super) fn count(&self) -> usize {
        (self.job.len / self.slices).div_ceil(self.each)
    }

    /// The operation of one round.
    pub(super) fn job(&self, round: usize) -> Job {
        Job {
            len: self.run(round).len() * self.slices,
            ..self.job
        }
    }

    /// Copies what this rank gives in a round to its stage.
    ///
    /// # Safety
    /// The stage must have room and nobody else may access it; the buffer must be held.
    pub(super) unsafe fn fill(&self, round: usize, stage: *mut u8, group: &Group) {
        let slices = match self.job.operation {
            Operation::AllGather => group.me()..group.me() + 1,
            Operation::Broadcast { root } if root != group.me() => 0..0,
            _ => 0..self.slices,
        };
        for (in_buffer, in_stage, len) in self.pieces(round, slices) {
            // SAFETY: the caller's promise; both ranges are within the buffer and the stage.
            unsafe { std::ptr::copy_nonoverlapping(self.base.add(in_buffer), stage.add(in_stage), len) };
        }
    }

    /// Copies what this rank gets in a round from its stage.
    ///
    /// # Safety
    /// As [`Rounds::fill`].
    pub(super) unsafe fn empty(&self, round: usize, stage: *const u8, group: &Group) {
        let slices = match self.job.operation {
            Operation::ReduceScatter => group.me()..group.me() + 1,
            Operation::Broadcast { root } if root == group.me() => 0..0,
            _ => 0..self.slices,
        };
        for (in_buffer, in_stage, len) in self.pieces(round, slices) {
            // SAFETY: the caller's promise; both ranges are within the buffer and the stage.
            unsafe { std::ptr::copy_nonoverlapping(stage.add(in_stage), self.base.add(in_buffer), len) };
        }
    }

    fn run(&self, round: usize) -> Range<usize> {
        let len = self.job.len / self.slices;
        let start = (round * self.each).min(len);
        start..(start + self.each).min(len)
    }

    /// Byte offsets in the buffer and in the stage, and lengths, of some slices' parts of a round.
    fn pieces(&self, round: usize, slices: Range<usize>) -> impl Iterator<Item = (usize, usize, usize)> {
        let element = self.job.dtype.bytes();
        let run = self.run(round);
        let (len, count) = (self.job.len, self.slices);
        slices.map(move |index| {
            let in_buffer = slice(len, count, index).start + run.start;
            (
                in_buffer * element,
                index * run.len() * element,
                run.len() * element,
            )
        })
    }
}
