//! Schedules of stages that lie in a loop, stage `s` on rank `s mod P`: GPipe, 1F1B, interleaved 1F1B and ZB-H1.

use std::iter;

use super::row_writer::RowWriter;
use super::shape::{PipelineShape, ShapeError};
use crate::parallel::pipeline::action::{Action, ActionKind, Schedule};
use crate::parallel::pipeline::stages::Placement;

/// All forwards, then all backwards (Huang et al. 2019, GPipe, section 2.2). With several chunks stage by stage
/// (Lamy-Poirier 2022, Breadth-first pipeline parallelism, arXiv 2211.05953).
pub fn gpipe(shape: PipelineShape) -> Result<Schedule, ShapeError> {
    shape.check("GPipe", None)?;
    let placement = Placement::looped(shape.ranks, shape.chunks);
    let row = |rank| {
        let mut row = RowWriter::new(rank);
        for stage in placement.stages_of(rank) {
            (0..shape.micro_batches).for_each(|_| row.write(stage, ActionKind::Forward));
        }
        for stage in placement.stages_of(rank).rev() {
            (0..shape.micro_batches).for_each(|_| row.write(stage, ActionKind::Backward));
        }
        row.into_actions()
    };
    Ok(shape.schedule(placement.clone(), row))
}

/// One forward, one backward (Narayanan et al. 2019, PipeDream, section 3.2; with a flush at the end of the step:
/// Narayanan et al. 2021, Megatron-LM, section 2.2.1).
pub fn one_f_one_b(shape: PipelineShape) -> Result<Schedule, ShapeError> {
    let reason = "1F1B has one chunk per rank; use interleaved 1F1B for several";
    shape.check("1F1B", (shape.chunks != 1).then_some(reason))?;
    Ok(alternating(shape, |rank| Alternation {
        warm_up: shape.ranks - 1 - rank,
        weight_delay: None,
    }))
}

/// One forward, one backward over several chunks per rank, in rounds (Narayanan et al. 2021,
/// section 2.2.2).
///
/// In the paper a round has P micro-batches. If M is not a multiple of P, there are ⌊M/P⌋ longer
/// rounds, at least one, as in PyTorch. If M is not a multiple of the number of rounds either, the
/// first rounds have one micro-batch more.
pub fn interleaved_1f1b(shape: PipelineShape) -> Result<Schedule, ShapeError> {
    let reason = "it needs at least 2 chunks per rank; use 1F1B for one";
    shape.check("interleaved 1F1B", (shape.chunks < 2).then_some(reason))?;
    Ok(alternating(shape, |rank| Alternation {
        warm_up: (shape.chunks - 1) * longest_round(shape) + 2 * (shape.ranks - 1 - rank),
        weight_delay: None,
    }))
}

/// 1F1B with I and W apart: W fills what would be a bubble, and memory is that of 1F1B (Qi et al. 2023, Zero bubble
/// pipeline parallelism, section 2.1). With several chunks it is PyTorch's interleaved zero bubble.
pub fn zb_h1(shape: PipelineShape) -> Result<Schedule, ShapeError> {
    shape.check("ZB-H1", None)?;
    Ok(alternating(shape, |rank| Alternation {
        warm_up: (shape.chunks - 1) * longest_round(shape) + shape.ranks - 1 - rank,
        weight_delay: Some(rank),
    }))
}

/// How a rank's row alternates.
struct Alternation {
    /// Forwards before the first backward is due.
    warm_up: usize,
    /// If I and W are separate: how many W are delayed before one follows each I.
    weight_delay: Option<usize>,
}

/// Forwards of the warm-up, then forwards and backwards alternating, then the remaining backwards.
fn alternating(shape: PipelineShape, of_rank: impl Fn(usize) -> Alternation) -> Schedule {
    let placement = Placement::looped(shape.ranks, shape.chunks);
    shape.schedule(placement, |rank| row(shape, rank, &of_rank(rank)))
}

fn row(shape: PipelineShape, rank: usize, alternation: &Alternation) -> Vec<Action> {
    let stage_of = |chunk: usize| chunk * shape.ranks + rank;
    let mut forwards = chunks(shape, false).map(stage_of);
    let mut row = RowWriter::new(rank);
    for stage in forwards.by_ref().take(alternation.warm_up) {
        row.write(stage, ActionKind::Forward);
    }
    for (number, stage) in chunks(shape, true).map(stage_of).enumerate() {
        if let Some(stage) = forwards.next() {
            row.write(stage, ActionKind::Forward);
        }
        match alternation.weight_delay {
            None => row.write(stage, ActionKind::Backward),
            Some(delay) => {
                row.write(stage, ActionKind::InputGradient);
                if number >= delay {
                    row.write_w(None);
                }
            }
        }
    }
    while row.write_w(None) {}
    row.into_actions()
}

/// The micro-batches of each round.
fn rounds(shape: PipelineShape) -> impl Iterator<Item = usize> {
    let rounds = (shape.micro_batches / shape.ranks).max(1);
    let (length, longer) = (shape.micro_batches / rounds, shape.micro_batches % rounds);
    (0..rounds).map(move |round| length + usize::from(round < longer))
}

fn longest_round(shape: PipelineShape) -> usize {
    rounds(shape).next().unwrap_or(0)
}

/// The chunks of a rank in the order in which they take micro-batches: each round passes all of them.
fn chunks(shape: PipelineShape, is_backward: bool) -> impl Iterator<Item = usize> {
    let pass = move |length: usize| {
        let of_number = move |number: usize| {
            if is_backward {
                shape.chunks - 1 - number
            } else {
                number
            }
        };
        (0..shape.chunks).flat_map(move |number| iter::repeat_n(of_number(number), length))
    };
    rounds(shape).flat_map(pass)
}
