//! Validation: every rank computes the loss of its share of the held-out text, and all get the exact mean.

use crate::data::{IGNORED, Tokens, eval_blocks};
use crate::mesh::DATA;
use crate::session::Session;
use crate::train::TrainError;
use crate::train::rank_table::RankTable;
use crate::train::replica::{MicroBatch, Replica};
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
        let mut next = mine.start;
        for _ in 0..needed {
            world.check()?;
            session.still_alive();
            let taken = (mine.end - next).min(rows as u64);
            self.fill(&mut batch, next, taken as usize)?;
            total += replica.total_loss(&batch)?;
            positions += taken as usize * self.block_size;
            next += taken;
        }
        let shares = rank_table.gather("validation loss", [total, positions as f64])?;
        let sum = |column: usize| shares.iter().map(|share| share[column]).sum::<f64>();
        Ok(sum(0) / sum(1))
    }

    /// The first `taken` rows are blocks from `first` on, the others are ignored.
    fn fill(&self, batch: &mut MicroBatch, first: u64, taken: usize) -> Result<(), TrainError> {
        let inputs = batch.inputs.chunks_mut(self.block_size);
        let rows = inputs.zip(batch.targets.chunks_mut(self.block_size));
        for (row, (inputs, targets)) in rows.enumerate() {
            if row < taken {
                self.tokens.read_block(first + row as u64, inputs, targets)?;
            } else {
                inputs.fill(0);
                targets.fill(IGNORED);
            }
        }
        Ok(())
    }
}
