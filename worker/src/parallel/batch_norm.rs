//! Batch normalisation over the rows of all ranks of a communicator, as if one rank had them all.

use crate::collective::{Communicator, Launch, ReduceOp, Traffic, WorkError};
use crate::device::{Buffer, Compute};
use crate::ops::{BatchNormBackward, BatchNormBackwardSums, BatchNormForward, BatchNormSums};

/// Every rank must call each direction as often, with the same number of channels `C`; the number of rows `R` is each
/// rank's own, and may be 0. One exchange a direction: 2·C + 1 numbers in forward, 2·C in backward, f64.
///
/// Gradients of weight and bias are those of this rank's rows: whoever sums gradients over the ranks sums
/// these too.
pub struct SyncBatchNorm<'a> {
    /// The ranks whose rows are normalised together.
    pub comm: &'a Communicator,
    /// Holds them.
    pub compute: &'a Compute,
}

impl SyncBatchNorm<'_> {
    /// Puts the forward on the stream. `op.sums` is overwritten: it becomes the sums over all ranks, from which running
    /// means can be made, and backward needs it.
    pub fn forward(&self, op: BatchNormForward) -> Result<(), WorkError> {
        let sums = BatchNormSums {
            inp: op.inp.clone(),
            sums: op.sums.clone(),
        };
        self.compute.enqueue(sums);
        self.sum(&op.sums, "statistics of a batch")?;
        self.compute.enqueue(op);
        Ok(())
    }

    /// Puts the backward on the stream: `own` with this rank's sums in `own.dsums`, which become those of all ranks,
    /// then the gradient of the input, in `dinp`, with the `weight` of forward.
    pub fn backward(
        &self,
        own: BatchNormBackwardSums,
        weight: Buffer,
        dinp: Buffer,
    ) -> Result<(), WorkError> {
        let op = BatchNormBackward {
            dout: own.dout.clone(),
            inp: own.inp.clone(),
            sums: own.sums.clone(),
            dsums: own.dsums.clone(),
            weight,
            dinp,
        };
        self.compute.enqueue(own);
        self.sum(&op.dsums, "gradients of a batch's statistics")?;
        self.compute.enqueue(op);
        Ok(())
    }

    /// Sums over the ranks, in rank order. An error that is known already is returned.
    fn sum(&self, sums: &Buffer, what: &str) -> Result<(), WorkError> {
        let launch = Launch::after(self.compute.record(), Traffic::Other, what);
        let work = self.comm.all_reduce(sums, ReduceOp::Sum, launch);
        let deadline = self.comm.deadline();
        self.compute.wait_event(work.event(), deadline);
        if work.is_done() {
            work.wait(deadline)?;
        }
        Ok(())
    }
}
