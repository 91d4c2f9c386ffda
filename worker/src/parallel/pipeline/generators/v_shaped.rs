//! Schedules of stages that lie in a V, the first and the last stage on rank 0: ZBV and DualPipeV.

use super::greedy::greedy;
use super::row_writer::RowWriter;
use super::shape::{PipelineShape, ShapeError};
use crate::parallel::pipeline::action::{ActionKind, Cell, Schedule};
use crate::parallel::pipeline::stages::Placement;

use ActionKind::{Backward, Forward, InputGradient};

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

fn zbv_row(shape: PipelineShape, rank: usize) -> Vec<Cell> {
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
    row.into_cells()
}

/// DualPipe cut in half: forward of one direction overlaps with backward of the other, so that the communication of
/// experts hides behind computation (DeepSeek-AI 2024, DeepSeek-V3, section 3.2.1; as a V in DeepSeek's repository DualPipe).
pub fn dual_pipe_v(shape: PipelineShape) -> Result<Schedule, ShapeError> {
    let least = 2 * shape.ranks;
    let fits = shape.chunks == 2 && shape.micro_batches >= least;
    let reason =
        format!("it needs 2 chunks per rank, and at least {least} micro-batches (2 × pipeline ranks)");
    shape.check("DualPipeV", (!fits).then_some(&reason))?;
    let placement = Placement::v_shaped(shape.ranks, 2);
    Ok(shape.schedule(placement, |rank| dual_pipe_v_row(shape, rank)))
}

fn dual_pipe_v_row(shape: PipelineShape, rank: usize) -> Vec<Cell> {
    let (first, second) = (rank, shape.stages() - 1 - rank);
    let behind = shape.ranks - 1 - rank;
    let mut row = RowWriter::new(rank);
    (0..2 * behind).for_each(|_| row.write(first, Forward));
    for _ in 0..=rank {
        row.write(first, Forward);
        row.write(second, Forward);
    }
    for _ in 0..behind {
        row.write(second, InputGradient);
        row.write_w(None);
        row.write(second, Forward);
    }
    for number in 0..=shape.micro_batches + rank - 2 * shape.ranks {
        if number == 0 && behind == 0 {
            // The last rank runs its first backward without delay.
            row.write(first, Forward);
            row.write(second, Backward);
        } else {
            row.write_overlapped(first, second);
        }
        row.write_overlapped(second, first);
    }
    for _ in 0..behind {
        row.write(second, Backward);
        row.write_overlapped(second, first);
    }
    // The flush. From half way on, W is delayed to fill the bubbles that follow.
    for number in 0..=2 * rank + 1 {
        let kind = if number > rank { InputGradient } else { Backward };
        row.write(if number % 2 == 0 { second } else { first }, kind);
    }
    for _ in 0..behind {
        row.write_w(None);
        row.write(first, InputGradient);
    }
    while row.write_w(None) {}
    row.into_cells()
}
