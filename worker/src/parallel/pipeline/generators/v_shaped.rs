//! Schedules of stages that lie in a V, the first and the last stage on rank 0: ZBV.

use super::greedy::greedy;
use super::row_writer::RowWriter;
use super::shape::{PipelineShape, ShapeError};
use crate::parallel::pipeline::action::{Action, ActionKind, Schedule};
use crate::parallel::pipeline::stages::Placement;

use ActionKind::{Forward, InputGradient};

/// ZB-V: if F, I and W take equally long, the only bubble is that of the start. It needs the memory
/// of 1F1B (Qi et al. 2023, Zero bubble pipeline parallelism, section 6).
///
/// The pattern needs 2P − 1 micro-batches; for fewer this is [`greedy`].
pub fn zbv(shape: PipelineShape) -> Result<Schedule, ShapeError> {
    let reason = "it needs 2 chunks per rank";
    shape.check("ZBV", (shape.chunks != 2).then_some(reason))?;
    if shape.micro_batches < 2 * shape.ranks - 1 {
        return greedy(shape);
    }
    let placement = Placement::v_shaped(shape.ranks, 2);
    Ok(shape.schedule(placement, |rank| zbv_row(shape, rank)))
}

fn zbv_row(shape: PipelineShape, rank: usize) -> Vec<Action> {
    let (first, second) = (rank, shape.stages() - 1 - rank);
    let behind = shape.ranks - rank;
    let mut row = RowWriter::new(rank);
    let split_backward = |row: &mut RowWriter, stage: usize| {
        row.write(stage, InputGradient);
        row.write_w(Some(stage));
    };
    // First until a micro-batch returns in the second chunk, then until the later ranks have
    // enough.
    (0..2 * behind - 1).for_each(|_| row.write(first, Forward));
    for _ in 0..rank {
        row.write(second, Forward);
        row.write(first, Forward);
    }
    for _ in 0..behind {
        row.write(second, Forward);
        split_backward(&mut row, second);
    }
    while row.forwards(second) < shape.micro_batches {
        if row.forwards(first) < shape.micro_batches {
            row.write(first, Forward);
        }
        split_backward(&mut row, first);
        row.write(second, Forward);
        split_backward(&mut row, second);
    }
    // No forwards are left: I first, because other ranks wait for it, then W.
    for _ in 0..rank {
        row.write(first, InputGradient);
        row.write(second, InputGradient);
    }
    for _ in 0..behind {
        split_backward(&mut row, first);
    }
    while row.write_w(Some(second)) {}
    while row.write_w(Some(first)) {}
    row.into_actions()
}
