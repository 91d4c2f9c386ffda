//! A greedy schedule for stages in a V. It works with fewer micro-batches than the pattern of ZBV
//! needs.

use super::row_writer::RowWriter;
use super::shape::{PipelineShape, ShapeError};
use crate::parallel::pipeline::action::{Action, ActionKind, Schedule};
use crate::parallel::pipeline::stages::Placement;

use ActionKind::{Forward, InputGradient};

/// The two chunks of a rank.
#[derive(Clone, Copy)]
enum Chunk {
    /// From the first rank to the last one.
    First,
    /// From the last rank to the first one.
    Second,
}

use Chunk::{First, Second};

/// What a rank may do in a tick instead of W.
type Choice = (ActionKind, Chunk);

const F1: Choice = (Forward, First);
const F2: Choice = (Forward, Second);
const I1: Choice = (InputGradient, First);
const I2: Choice = (InputGradient, Second);

/// Orders of preference that are tried. For P up to 8 and M up to 2P + 3, none of the other 17
/// orders is better than the best of these. For larger sizes one seldom is.
const PREFERENCES: [[Choice; 4]; 7] = [
    [F2, F1, I1, I2],
    [F2, F1, I2, I1],
    [F2, I1, F1, I2],
    [F2, I2, F1, I1],
    [I1, F2, F1, I2],
    [I1, I2, F2, F1],
    [I2, F2, I1, F1],
];

/// At every tick, each rank runs the action that it prefers among those that are ready, or W if
/// none is. The result is the shortest schedule of several orders of preference (after the
/// heuristic of Qi et al. 2023, Zero bubble pipeline parallelism, section 3.1).
///
/// It assumes that F, I and W take equally long. No rank keeps more than P micro-batches of its
/// share. For M from P on, the length is ZBV's, 3M + (P − 1)/2, up to 6 ranks, at most 1 more up to
/// 8, and less than a tenth more beyond.
pub fn greedy(shape: PipelineShape) -> Result<Schedule, ShapeError> {
    let reason = "it needs 2 chunks per rank";
    shape.check("the greedy schedule", (shape.chunks != 2).then_some(reason))?;
    let runs = PREFERENCES
        .iter()
        .map(|preference| Run::new(shape).finish(preference));
    let (_, rows) = runs
        .min_by_key(|(ticks, _)| *ticks)
        .expect("there are preferences");
    let placement = Placement::v_shaped(shape.ranks, 2);
    Ok(Schedule::new(placement, shape.micro_batches, rows))
}

/// A schedule that is being made.
struct Run {
    shape: PipelineShape,
    rows: Vec<RowWriter>,
    /// Micro-batches whose F, I is done, by stage.
    done: Vec<[usize; 2]>,
    /// Micro-batches between F and W on each rank, in its stages.
    kept: Vec<usize>,
}

impl Run {
    fn new(shape: PipelineShape) -> Self {
        Self {
            shape,
            rows: (0..shape.ranks).map(RowWriter::new).collect(),
            done: vec![[0, 0]; shape.stages()],
            kept: vec![0; shape.ranks],
        }
    }

    /// Ticks until all is done, and the rows.
    fn finish(mut self, preference: &[Choice]) -> (usize, Vec<Vec<Action>>) {
        let mut ticks = 0;
        // F, I and W of each micro-batch in both chunks.
        let length = 6 * self.shape.micro_batches;
        let is_done = |row: &RowWriter| row.actions().len() == length;
        while !self.rows.iter().all(is_done) {
            let chosen: Vec<_> = (0..self.shape.ranks)
                .map(|rank| self.choose(rank, preference))
                .collect();
            for (rank, choice) in chosen.into_iter().enumerate() {
                self.carry_out(rank, choice);
            }
            ticks += 1;
        }
        let rows = self.rows.into_iter().map(RowWriter::into_actions).collect();
        (ticks, rows)
    }

    fn stage(&self, rank: usize, chunk: Chunk) -> usize {
        match chunk {
            First => rank,
            Second => self.shape.stages() - 1 - rank,
        }
    }

    /// What a rank does in this tick other than W.
    fn choose(&self, rank: usize, preference: &[Choice]) -> Option<(ActionKind, usize)> {
        let mut choices = preference.iter();
        let &(kind, chunk) = choices.find(|&&(kind, chunk)| self.is_ready(rank, kind, chunk))?;
        Some((kind, self.stage(rank, chunk)))
    }

    fn is_ready(&self, rank: usize, kind: ActionKind, chunk: Chunk) -> bool {
        let stage = self.stage(rank, chunk);
        let [forwards, gradients] = self.done[stage];
        if kind == Forward {
            // The last place is kept for the second chunk: its backward comes first, and frees places.
            let places = 2 * self.shape.ranks - usize::from(matches!(chunk, First));
            let available = match stage.checked_sub(1) {
                Some(before) => self.done[before][0],
                None => self.shape.micro_batches,
            };
            self.kept[rank] < places && forwards < available
        } else {
            let available = self.done.get(stage + 1).map_or(forwards, |next| next[1]);
            gradients < available.min(forwards)
        }
    }

    fn carry_out(&mut self, rank: usize, choice: Option<(ActionKind, usize)>) {
        let row = &mut self.rows[rank];
        match choice {
            Some((kind, stage)) => {
                row.write(stage, kind);
                self.kept[rank] += usize::from(kind == Forward);
                self.done[stage][usize::from(kind != Forward)] += 1;
            }
            None => self.kept[rank] -= usize::from(row.write_w(None)),
        }
    }
}
