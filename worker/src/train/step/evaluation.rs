//! Validation: every rank computes the loss of its share of the held-out text, and all get the exact mean.

use crate::data::{Tokens, eval_blocks, fill_eval_batch};
use crate::device::{DeviceError, Event};
use crate::mesh::DATA;
use crate::model::{Activation, GradSink, GradSlot, NoHooks, ParamId, SampleKey};
use crate::session::Session;
use crate::train::TrainError;
use crate::train::rank_table::RankTable;
use crate::train::replica::{MicroBatch, Replica};
use crate::train::schedule::RowPurpose;
use crate::train::world::World;

/// The held-out text, cut into blocks.
pub(crate) struct Evaluation {
    tokens: Tokens,
    block_size: usize,
}

impl Evaluation {
    pub(crate) fn new(tokens: Tokens, block_size: usize) -> Self {
        Self { tokens, block_size }
    }

    /// Mean loss over all positions of all blocks. Shares may be uneven: every position weighs the same. Every rank
    /// must call it.
    pub(crate) fn mean_loss(
        &self,
        session: &Session,
        world: &World,
        replica: &mut Replica,
        rank_table: &RankTable,
    ) -> Result<f64, TrainError> {
        let mut batch = MicroBatch::new(replica.positions());
        let rows = replica.positions() / self.block_size;
        let blocks = self.tokens.blocks(self.block_size);
        let ranks = world.mesh.size(&DATA);
        let share = |rank: usize| eval_blocks(blocks, rank as u64, ranks as u64);
        let mine = share(world.mesh.index(&DATA));
        let passes = |share: std::ops::Range<u64>| (share.end - share.start).div_ceil(rows as u64);
        let needed = if replica.parameters.moves_together() {
            // A rank without blocks still takes part in gathering the parameters.
            (0..ranks).map(share).map(passes).max().unwrap_or(0)
        } else {
            passes(mine.clone())
        };
        let (mut total, mut positions) = (0.0, 0);
        let mut done = 0;
        while done < needed {
            // As many as a step has: so the memory of activations suffices.
            let count = (needed - done).min(replica.plan.micro_batches() as u64);
            let row = replica.row(RowPurpose::Evaluation, count as usize);
            replica.begin(&row, RowPurpose::Evaluation)?;
            for action in row {
                world.check()?;
                session.still_alive();
                if replica.plan.placement().ranks() > 1 && action.kind.is_compute() {
                    session.set_activity(|| replica.plan.in_words(action));
                }
                let m = done + action.micro_batch.unwrap_or_default() as u64;
                let next = mine.start + m * rows as u64;
                let taken = mine.end.saturating_sub(next).min(rows as u64) as usize;
                let takes_batch = replica.takes_batch(action);
                if takes_batch {
                    let rows = (&mut batch.inputs[..], &mut batch.targets[..]);
                    fill_eval_batch(&self.tokens, next..next + taken as u64, self.block_size, rows)?;
                }
                let batch = (takes_batch.then_some(&batch), SampleKey::default());
                let losses = replica.carry_out(action, batch, &mut NoHooks, &mut NoGradients)?;
                if let Some(losses) = losses.filter(|_| replica.counts_losses()) {
                    total += sum_of(world, &losses)?;
                    positions += taken * self.block_size;
                }
            }
            replica.finish()?;
            done += count;
        }
        let shares = rank_table.gather("validation loss", [total, positions as f64])?;
        let sum = |column: usize| shares.iter().map(|share| share[column]).sum::<f64>();
        Ok(sum(0) / sum(1))
    }
}

/// Sum of the losses of a micro-batch's positions, ignored ones not counted. Synchronises.
fn sum_of(world: &World, losses: &Activation) -> Result<f64, DeviceError> {
    let bytes = world.device.download(world.stream, losses.buffer())?;
    let losses = bytes
        .chunks_exact(size_of::<f32>())
        .map(bytemuck::pod_read_unaligned::<f32>);
    Ok(losses.map(f64::from).sum())
}

/// An evaluation has no backward.
struct NoGradients;

impl GradSink for NoGradients {
    fn grad(&mut self, _id: ParamId) -> Result<GradSlot, DeviceError> {
        unreachable!("an evaluation has no backward")
    }

    fn contributed(&mut self, _id: ParamId, _at: Event) -> Result<(), DeviceError> {
        unreachable!("an evaluation has no backward")
    }
}
