//! What a run costs by its sizes: memory of a rank, bytes on the wire, arithmetic of a token, samples of a step.

use std::ops::{Add, Sub};

use crate::config::{Accumulate, Model, ModelKind, Recompute, Strategy};
use crate::device::DType;
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
    fn simple(strategy: Strategy, ranks: u64, dtype: crate::device::DType) -> Self {
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

/// Bytes that a rank holds for as long as it trains. Activations come on top.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Parameters.
    pub params: u64,
    /// Gradients.
    pub grads: u64,
    /// State of the optimizer, and master weights where parameters are not f32.
    pub optimizer: u64,
}

impl Footprint {
    /// What so many parameters take: everything on every rank, or 1/N of what the strategy shards (Rajbhandari et al.
    /// 2020). Of a size that the ranks do not divide, this is the larger shard.
    ///
    /// In bf16 with f32 masters and AdamW, for Ψ parameters: `ddp` 18Ψ, `zero1` 6Ψ + 12Ψ/N, `zero2` 2Ψ + 16Ψ/N, `zero3` 18Ψ/N. With
    /// gradients in bf16, as the published sizes have them: `ddp` 16Ψ, `zero1` 4Ψ + 12Ψ/N, `zero2` 2Ψ + 14Ψ/N, `zero3` 16Ψ/N.
    #[must_use]
    pub fn of(setting: &Setting, parameters: u64) -> Self {
        let (strategy, dtypes) = (setting.strategy, setting.dtypes);
        let held = |is_sharded: bool, each: u64| {
            let elements = if is_sharded {
                parameters.div_ceil(setting.ranks)
            } else {
                parameters
            };
            elements * each
        };
        let masters = u64::from(dtypes.has_masters());
        Self {
            params: held(strategy == Strategy::Zero3, bytes(dtypes.params)),
            grads: held(setting.shards_gradients(), bytes(dtypes.accumulated)),
            optimizer: held(
                strategy != Strategy::Ddp,
                (setting.state_slots + masters) * bytes(DType::F32),
            ),
        }
    }

    /// All of it.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.params + self.grads + self.optimizer
    }
}

const fn bytes(dtype: DType) -> u64 {
    dtype.bytes() as u64
}

impl Add for Footprint {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            params: self.params + other.params,
            grads: self.grads + other.grads,
            optimizer: self.optimizer + other.optimizer,
        }
    }
}

impl Sub for Footprint {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            params: self.params - other.params,
            grads: self.grads - other.grads,
            optimizer: self.optimizer - other.optimizer,
        }
    }
}

/// Bytes of a step by what they carry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Gradients, in the type in which they are reduced.
    pub grads: u64,
    /// Parameters, in the type that operations read.
    pub params: u64,
}

impl Traffic {
    /// What a rank moves between itself and others for so many elements, padding included: a multiple of the ranks.
    ///
    /// In units of (N−1)/N of all gradients or parameters: an all-reduce 2, a reduce-scatter or an all-gather 1.
    /// For k micro-batches `ddp` and `zero1` 2; `zero2` k+1, or 2 with whole gradients held between them; `zero3`
    /// 3k, or 2k if parameters stay gathered from forward to backward, and 2k+1 or k+1 with whole gradients. That is
    /// an upper bound for `zero3` with resharding: what backward begins with is still there from forward, and what it
    /// does not read is not gathered again.
    #[must_use]
    pub fn of(setting: &Setting, elements: u64) -> Self {
        let once = |each: usize| (setting.ranks - 1) * (elements / setting.ranks) * each as u64;
        let passes = match setting.strategy {
            Strategy::Ddp => 2,
            _ => setting.reductions(),
        };
        Self {
            grads: passes * once(setting.dtypes.reduced.bytes()),
            params: setting.gatherings() * once(setting.dtypes.params.bytes()),
        }
    }

    /// All of it.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.grads + self.params
    }
}

/// Which ranks take part in a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Among {
    /// Those that hold one copy of the state together.
    Shards,
    /// Those that hold the same part of it, one of each copy; where nothing is sharded, all ranks.
    Copies,
}

/// A collective over all gradients or all parameters of a step: its buckets or groups together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// Bytes of the buffer that is reduced or gathered, padding included.
    pub bytes: u64,
    /// How often a step moves it: a reduce-scatter and an all-gather count 1, an all-reduce 2.
    pub times: u64,
    /// Who takes part.
    pub among: Among,
}

impl Exchange {
    /// Bytes that each of `ranks` ranks moves: `times` · (N − 1)/N · S.
    #[must_use]
    pub const fn bytes_a_rank(&self, ranks: u64) -> u64 {
        self.times * (ranks - 1) * (self.bytes / ranks)
    }
}

/// Floating-point operations of one token of training that no implementation can leave out; a multiply-add is two.
///
/// Products alone count, each once in forward and twice in backward: the blocks' matrices and the head's, and in attention
/// the scores and the weighted sum over the positions up to the token's own, (positions + 1)/2 on average. Embeddings are
/// looked up, and the masked half of attention need not be computed. The usual 6Ψ + 12·layers·width·positions (Chowdhery
/// et al. 2022, appendix B) counts both, and is no lower bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Of forward and backward.
    pub model: u64,
    /// What recomputation does again.
    pub repeated: u64,
}

impl Work {
    /// Of a model with a vocabulary of so many tokens.
    #[must_use]
    pub fn of(model: &Model, vocabulary: u64, recompute: Recompute) -> Self {
        let [layers, width, positions] = [model.n_layer, model.n_embd, model.block_size].map(|n| n as u64);
        // 4·width² of attention, if it has any, and 8·width² of the feed-forward layer, half of it in each of two products.
        let square = layers * width * width;
        let (matrices, attention) = match model.kind {
            ModelKind::Gpt2 => (12 * square, 2 * layers * width * (positions + 1)),
            ModelKind::Mlp => (8 * square, 0),
        };
        Self {
            model: 3 * (2 * (matrices + vocabulary * width) + attention),
            repeated: match recompute {
                Recompute::None => 0,
                // The first of the feed-forward layer's two products.
                Recompute::Selective => 2 * 4 * square,
                // All but the second one, whose output nobody reads.
                Recompute::Full => 2 * (matrices - 4 * square) + attention,
            },
        }
    }

    /// All that the device does.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.model + self.repeated
    }
}

/// The factors of a global batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalBatch {
    /// Data-parallel ranks.
    pub ranks: u64,
    /// Micro-batches of one step on one rank.
    pub accumulation: u64,
    /// Samples of one micro-batch.
    pub micro_batch: u64,
    /// Tokens of one sample.
    pub block_size: u64,
}

impl GlobalBatch {
    /// Samples of one step, over all ranks.
    #[must_use]
    pub const fn samples(&self) -> u64 {
        self.ranks * self.accumulation * self.micro_batch
    }

    /// Tokens of one step, over all ranks.
    #[must_use]
    pub const fn tokens(&self) -> u64 {
        self.samples() * self.block_size
    }
}

#[cfg(test)]
#[path = "cost_tests.rs"]
mod tests;
