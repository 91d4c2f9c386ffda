//! A request in NCCL's terms: addresses, counts and bytes. All operations work in place.

use std::ffi::{c_int, c_void};
use std::ops::Range;

use super::handle::What;
use super::sys::RedOp;
use crate::collective::partition::slice;
use crate::collective::plan::Job;
use crate::collective::{Failure, Operation, Request};
use crate::device::{Buffer, DType};

/// An operation of one rank of a group.
#[derive(Clone, Copy)]
pub(super) struct Share<'a> {
    pub(super) request: &'a Request,
    pub(super) rank: usize,
    pub(super) size: usize,
}

impl Share<'_> {
    /// An error if the group cannot do it.
    pub(super) fn check(&self) -> Result<(), Failure> {
        Job::of(self.request).check(self.size)?;
        match self.request.operation {
            Operation::Send { to: peer } | Operation::Recv { from: peer }
                if peer >= self.size || peer == self.rank =>
            {
                Err(Failure::Invalid(format!(
                    "rank {peer} is no other rank of a group of {}",
                    self.size
                )))
            }
            _ => Ok(()),
        }
    }

    /// Elements of the buffer that this rank gives: all of them, or its slice.
    pub(super) fn given(&self) -> Range<usize> {
        match self.request.operation {
            Operation::AllGather => self.slice(),
            _ => 0..self.request.buffer.len(),
        }
    }

    /// Elements of the buffer that this rank ends with.
    pub(super) fn taken(&self) -> Range<usize> {
        match self.request.operation {
            Operation::ReduceScatter => self.slice(),
            _ => 0..self.request.buffer.len(),
        }
    }

    /// Elements as NCCL counts them: of a slice, where each rank has one.
    pub(super) fn count(&self) -> usize {
        match self.request.operation {
            Operation::AllGather | Operation::ReduceScatter => self.slice().len(),
            // The token.
            Operation::Barrier => 1,
            _ => self.request.buffer.len(),
        }
    }

    /// Type of the elements.
    pub(super) fn dtype(&self) -> DType {
        match self.request.operation {
            Operation::Barrier => DType::I32,
            _ => self.request.buffer.dtype(),
        }
    }

    /// What carries the elements.
    pub(super) fn buffer<'b>(&'b self, token: &'b Buffer) -> &'b Buffer {
        match self.request.operation {
            Operation::Barrier => token,
            _ => &self.request.buffer,
        }
    }

    /// The operation, with the reduction that `reduction` makes where there is one.
    pub(super) fn what<E>(&self, reduction: impl FnOnce() -> Result<RedOp, E>) -> Result<What, E> {
        Ok(match self.request.operation {
            Operation::AllReduce => What::AllReduce(reduction()?),
            Operation::ReduceScatter => What::ReduceScatter(reduction()?),
            Operation::AllGather => What::AllGather,
            Operation::Broadcast { root } => What::Broadcast { root: root as c_int },
            // Nobody has the largest of all tokens before all have come.
            Operation::Barrier => What::AllReduce(RedOp::MAX),
            Operation::Send { to } => What::Send { to: to as c_int },
            Operation::Recv { from } => What::Recv { from: from as c_int },
        })
    }

    /// True if elements are reduced on the way.
    pub(super) fn reduces(&self) -> bool {
        matches!(
            self.request.operation,
            Operation::AllReduce | Operation::ReduceScatter
        )
    }

    /// Bytes on the wire, by the formulas of [`crate::collective::WireBytes`].
    pub(super) fn wire_bytes(&self) -> u64 {
        let (whole, own) = (self.request.buffer.len(), self.slice().len());
        let elements = match self.request.operation {
            // The others' parts of the own slice in, the sums of it out to the others.
            Operation::AllReduce => 2 * (self.size - 1) * own,
            Operation::ReduceScatter | Operation::AllGather => (self.size - 1) * own,
            Operation::Broadcast { root } if root != self.rank => whole,
            Operation::Recv { .. } => whole,
            Operation::Broadcast { .. } | Operation::Barrier | Operation::Send { .. } => 0,
        };
        (elements * self.request.buffer.dtype().bytes()) as u64
    }

    fn slice(&self) -> Range<usize> {
        slice(self.request.buffer.len(), self.size, self.rank)
    }
}

/// So many elements further.
pub(super) fn offset(base: *mut c_void, elements: usize, dtype: DType) -> *mut c_void {
    base.wrapping_byte_add(elements * dtype.bytes())
}
