//! What the formulas of memory and traffic depend on.

use crate::config::{Accumulate, Strategy};
use crate::parallel::Dtypes;

/// A strategy on some ranks, in some types: everything but the size of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// What is sharded.
    pub strategy: Strategy,
    /// Ranks over which it is, N.
    pub ranks: u64,
    /// Micro-batches of a step, k.
    pub micro_batches: u64,
    /// What `zero2` and `zero3` hold of the gradients between them.
    pub accumulate: Accumulate,
    /// `zero3`: parameters are released between forward and backward.
    pub reshard_after_forward: bool,
    /// Types of parameters and gradients.
    pub dtypes: Dtypes,
    /// Numbers in f32 that the optimizer keeps of each parameter: 2 of AdamW.
    pub state_slots: u64,
}

impl Setting {
    /// True if gradients exist only as shards: `zero2` and `zero3`, unless whole ones are held between micro-batches.
    #[must_use]
    pub fn shards_gradients(&self) -> bool {
        let holds_whole = self.accumulate == Accumulate::Full && self.micro_batches > 1;
        matches!(self.strategy, Strategy::Zero2 | Strategy::Zero3) && !holds_whole
    }

    /// How often all gradients are reduced in a step.
    #[must_use]
    pub fn reductions(&self) -> u64 {
        if self.shards_gradients() {
            self.micro_batches
        } else {
            1
        }
    }

    /// How often all parameters are gathered in a step.
    #[must_use]
    pub fn gatherings(&self) -> u64 {
        match (self.strategy, self.reshard_after_forward) {
            (Strategy::Ddp, _) => 0,
            (Strategy::Zero1 | Strategy::Zero2, _) => 1,
            (Strategy::Zero3, false) => self.micro_batches,
            (Strategy::Zero3, true) => 2 * self.micro_batches,
        }
    }
}

#[cfg(test)]
impl Setting {
    /// Of tests: one micro-batch on so many ranks, in bf16 or in f32.
    pub(super) fn simple(strategy: Strategy, ranks: u64, dtype: crate::device::DType) -> Self {
        Self {
            strategy,
            ranks,
            micro_batches: 1,
            accumulate: Accumulate::Sharded,
            reshard_after_forward: true,
            dtypes: Dtypes {
                params: dtype,
                reduced: dtype,
                accumulated: dtype,
            },
            state_slots: 2,
        }
    }
}
