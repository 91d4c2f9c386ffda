//! Sizes of a pipeline, and the error for sizes that a schedule does not support.

use ddp_proto::words::counted;

use crate::parallel::pipeline::action::{Action, Schedule};
use crate::parallel::pipeline::stages::Placement;

/// Sizes of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PipelineShape {
    /// Ranks along the pipeline's axis, P.
    pub ranks: usize,
    /// Stages of each rank, v.
    pub chunks: usize,
    /// Micro-batches of a step, M.
    pub micro_batches: usize,
}

/// A schedule does not support these sizes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{schedule} does not support {}, {} per rank and {}: {reason}",
    counted(shape.ranks, "rank"),
    counted(shape.chunks, "chunk"),
    counted(shape.micro_batches, "micro-batch")
)]
pub struct ShapeError {
    /// Name of the schedule.
    pub schedule: &'static str,
    /// The sizes.
    pub shape: PipelineShape,
    /// What the schedule needs.
    pub reason: &'static str,
}

impl PipelineShape {
    /// Number of stages.
    pub fn stages(self) -> usize {
        self.ranks * self.chunks
    }

    /// Refuses sizes that no schedule supports, and for the reason `unsuitable` those that this one
    /// does not support.
    pub(super) fn check(
        self,
        schedule: &'static str,
        unsuitable: Option<&'static str>,
    ) -> Result<(), ShapeError> {
        let has_zero = self.ranks == 0 || self.chunks == 0 || self.micro_batches == 0;
        let zero = has_zero.then_some("each must be at least 1");
        match zero.or(unsuitable) {
            None => Ok(()),
            Some(reason) => Err(ShapeError {
                schedule,
                shape: self,
                reason,
            }),
        }
    }

    /// The rows that `row` makes for each rank.
    pub(super) fn schedule(self, placement: Placement, row: impl FnMut(usize) -> Vec<Action>) -> Schedule {
        let rows = (0..self.ranks).map(row).collect();
        Schedule::new(placement, self.micro_batches, rows)
    }
}
