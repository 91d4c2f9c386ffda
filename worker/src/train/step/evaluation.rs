//! Validation: every rank computes the loss of its share of the held-out text, and all get the exact mean.

use std::ops::Range;
use std::time::Instant;

use crate::data::{Tokens, eval_blocks, fill_batch};
use crate::mesh::SAMPLES;
use crate::model::{GradSink, Hooks, NoHooks, sum_of_losses};
use crate::parallel::pipeline::Action;
use crate::session::Session;
use crate::train::TrainError;
use crate::train::rank_table::RankTable;
use crate::train::replica::{MicroBatch, Replica};
use crate::train::reporting::say;
use crate::train::row_state::RowPurpose;
use crate::train::run_row::{EnqueuedAction, NoGradients, RowCaller, run_row};

/// Time between two lines about a validation that takes long.
const PROGRESS_INTERVAL_S: u64 = 10;

/// Mean loss over all positions of all blocks of the held-out text. Shares may be uneven: every position weighs the same.
/// Every rank must call it.
pub(super) fn mean_loss(
    tokens: &Tokens,
    block_size: usize,
    session: &Session,
    replica: &mut Replica,
    rank_table: &RankTable,
) -> Result<f64, TrainError> {
    let (mesh, [rows, _]) = (&replica.world.mesh, replica.shape());
    let blocks = tokens.blocks(block_size);
    let ranks = mesh.size(&SAMPLES) as u64;
    let mine = eval_blocks(blocks, mesh.index(&SAMPLES) as u64, ranks);
    // Passes over the largest share. A rank with a smaller one still takes part in what all exchange in them.
    let needed = blocks.div_ceil(ranks).div_ceil(rows as u64);
    let mut row = EvaluationRow {
        tokens,
        block_size,
        stretches: replica.world.stretches(block_size),
        session,
        mine,
        rows: rows as u64,
        done: 0,
        total: 0.0,
        positions: 0,
        hooks: NoHooks,
        grads: NoGradients,
    };
    let (started, mut shown) = (Instant::now(), 0);
    while row.done < needed {
        // As many as a step has: so the memory of activations suffices.
        let count = (needed - row.done).min(replica.plan.micro_batches() as u64);
        run_row(replica, RowPurpose::Evaluation, count as usize, &mut row)?;
        row.done += count;
        let due = started.elapsed().as_secs() / PROGRESS_INTERVAL_S;
        if replica.world.rank() == 0 && due > shown && row.done < needed {
            shown = due;
            say(&format!("validation: {} of {needed} micro-batches", row.done));
        }
    }
    let shares = rank_table.gather("validation loss", [row.total, row.positions as f64])?;
    let sum = |column: usize| shares.iter().map(|share| share[column]).sum::<f64>();
    Ok(sum(0) / sum(1))
}

/// This rank's share of an evaluation.
struct EvaluationRow<'a> {
    tokens: &'a Tokens,
    block_size: usize,
    /// Positions of each block that this rank computes.
    stretches: Vec<Range<usize>>,
    session: &'a Session,
    /// The blocks of this rank.
    mine: Range<u64>,
    /// Blocks of a micro-batch.
    rows: u64,
    /// Micro-batches of earlier rows.
    done: u64,
    /// Sum of the losses so far.
    total: f64,
    /// Positions that it is over.
    positions: usize,
    hooks: NoHooks,
    grads: NoGradients,
}

impl EvaluationRow<'_> {
    /// The blocks of the micro-batch of an action; empty after the last block of this rank.
    fn blocks(&self, action: Action) -> Range<u64> {
        let next = self.mine.start + (self.done + action.micro_batch as u64) * self.rows;
        next..next + self.mine.end.saturating_sub(next).min(self.rows)
    }
}

impl RowCaller for EvaluationRow<'_> {
    fn before(&mut self, replica: &Replica, action: Action) -> Result<(), TrainError> {
        replica.world.check()?;
        self.session.still_alive();
        if replica.plan.placement().ranks() > 1 && action.kind.is_compute() {
            self.session.set_activity(|| replica.plan.in_words(action));
        }
        Ok(())
    }

    fn read(&mut self, _replica: &Replica, action: Action, batch: &mut MicroBatch) -> Result<(), TrainError> {
        let MicroBatch { inputs, targets } = batch;
        let starts = self.blocks(action).map(|block| block * self.block_size as u64);
        fill_batch(self.tokens, starts, &self.stretches, inputs, targets)?;
        Ok(())
    }

    fn sinks(&mut self) -> (&mut dyn Hooks, &mut dyn GradSink) {
        (&mut self.hooks, &mut self.grads)
    }

    fn after(&mut self, replica: &Replica, enqueued: EnqueuedAction) -> Result<(), TrainError> {
        if let Some(losses) = enqueued.losses.filter(|_| replica.counts_losses()) {
            self.total += sum_of_losses(&replica.world.compute, &losses)?;
            self.positions += enqueued.positions;
        }
        Ok(())
    }
}
