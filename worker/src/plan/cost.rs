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
mod tests {
    use super::*;
    use crate::config::Accumulate;
    use crate::device::DType;

    const GB: u64 = 1_000_000_000;
    const ALL: [Strategy; 4] = [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3];

    fn footprint(strategy: Strategy, ranks: u64, dtype: DType, parameters: u64) -> Footprint {
        Footprint::of(&Setting::simple(strategy, ranks, dtype), parameters)
    }

    #[test]
    fn ten_billion_parameters_in_bf16_on_8_ranks_take_160_55_37_and_20_gb() {
        let totals = ALL.map(|strategy| footprint(strategy, 8, DType::Bf16, 10 * GB).total());
        assert_eq!(totals, [160 * GB, 55 * GB, 37 * GB + GB / 2, 20 * GB]);
    }

    #[test]
    fn gradients_in_f32_take_two_bytes_more_where_they_are_held() {
        let totals = ALL.map(|strategy| {
            let mut setting = Setting::simple(strategy, 8, DType::Bf16);
            (setting.dtypes.reduced, setting.dtypes.accumulated) = (DType::F32, DType::F32);
            Footprint::of(&setting, 10 * GB).total()
        });
        assert_eq!(totals, [180 * GB, 75 * GB, 40 * GB, 22 * GB + GB / 2]);
    }

    #[test]
    fn the_published_sizes_in_bf16() {
        let total = |strategy, parameters| footprint(strategy, 8, DType::Bf16, parameters).total();
        assert_eq!(total(Strategy::Ddp, 7 * GB), 112 * GB);
        assert_eq!(total(Strategy::Ddp, 12 * GB), 192 * GB);
        assert_eq!(total(Strategy::Zero3, 12 * GB), 24 * GB);
    }

    #[test]
    fn seven_billion_parameters_in_f32_whole_and_sharded_over_4_and_8() {
        // Tenths of a GB of parameters, gradients and moments.
        for (strategy, ranks, tenths) in [
            (Strategy::Ddp, 8, [280, 280, 560]),
            (Strategy::Zero1, 4, [280, 280, 140]),
            (Strategy::Zero2, 4, [280, 70, 140]),
            (Strategy::Zero3, 4, [70, 70, 140]),
            (Strategy::Zero3, 8, [35, 35, 70]),
        ] {
            let [params, grads, optimizer] = tenths.map(|tenth: u64| tenth * GB / 10);
            let expected = Footprint {
                params,
                grads,
                optimizer,
            };
            let found = footprint(strategy, ranks, DType::F32, 7 * GB);
            assert_eq!(found, expected, "{strategy:?} over {ranks}");
        }
        assert_eq!(footprint(Strategy::Ddp, 1, DType::F32, 7 * GB).total(), 112 * GB);
        assert_eq!(footprint(Strategy::Zero3, 4, DType::F32, 7 * GB).total(), 28 * GB);
        assert_eq!(footprint(Strategy::Zero3, 8, DType::F32, 7 * GB).total(), 14 * GB);
    }

    #[test]
    fn gradients_that_are_added_up_in_f32_take_two_bytes_more() {
        let mut setting = Setting::simple(Strategy::Zero2, 8, DType::Bf16);
        setting.micro_batches = 4;
        setting.dtypes.accumulated = DType::F32;
        assert_eq!(Footprint::of(&setting, 8 * GB).grads, 4 * GB);
        setting.accumulate = Accumulate::Full;
        assert_eq!(
            Footprint::of(&setting, 8 * GB).grads,
            32 * GB,
            "the saving is given up"
        );
        setting.micro_batches = 1;
        assert_eq!(
            Footprint::of(&setting, 8 * GB).grads,
            4 * GB,
            "nothing is between"
        );
    }

    #[test]
    fn an_optimizer_with_less_state_takes_less() {
        let mut setting = Setting::simple(Strategy::Ddp, 1, DType::Bf16);
        let totals = [2, 1, 0].map(|slots| {
            setting.state_slots = slots;
            Footprint::of(&setting, GB).optimizer
        });
        assert_eq!(
            totals,
            [12 * GB, 8 * GB, 4 * GB],
            "AdamW; Lion, SGD; SGD without momentum"
        );
    }

    #[test]
    fn a_size_that_ranks_do_not_divide_is_rounded_up() {
        let found = footprint(Strategy::Zero3, 8, DType::F32, 17);
        assert_eq!((found.params, found.optimizer), (12, 24));
    }

    const RANKS: u64 = 8;
    const ELEMENTS: u64 = 1 << 20;

    /// (N−1)/N of all elements in f32.
    const UNIT: u64 = (RANKS - 1) * ELEMENTS / RANKS * 4;

    fn setting(
        strategy: Strategy,
        accumulate: Accumulate,
        reshard_after_forward: bool,
        micro_batches: u64,
    ) -> Setting {
        Setting {
            micro_batches,
            accumulate,
            reshard_after_forward,
            ..Setting::simple(strategy, RANKS, DType::F32)
        }
    }

    #[test]
    fn the_multiples_of_the_published_table() {
        use Accumulate::{Full, Sharded};
        use Strategy::{Ddp, Zero1, Zero2, Zero3};
        type Multiple = fn(u64) -> u64;
        let table: [(Strategy, Accumulate, bool, Multiple); 8] = [
            (Ddp, Sharded, true, |_| 2),
            (Zero1, Sharded, true, |_| 2),
            (Zero2, Sharded, true, |k| k + 1),
            (Zero2, Full, true, |_| 2),
            (Zero3, Sharded, true, |k| 3 * k),
            (Zero3, Sharded, false, |k| 2 * k),
            (Zero3, Full, true, |k| 2 * k + 1),
            (Zero3, Full, false, |k| k + 1),
        ];
        for (strategy, accumulate, reshard, multiple) in table {
            for k in [1, 4, 8] {
                let found = Traffic::of(&setting(strategy, accumulate, reshard, k), ELEMENTS);
                let what = format!("{strategy:?}, {accumulate:?}, reshard {reshard}, {k} micro-batches");
                assert_eq!(found.total(), multiple(k) * UNIT, "{what}");
            }
        }
    }

    #[test]
    fn gradients_and_parameters_count_in_their_own_types() {
        let mut setting = setting(Strategy::Zero3, Accumulate::Sharded, true, 4);
        setting.dtypes.params = DType::Bf16;
        let found = Traffic::of(&setting, ELEMENTS);
        assert_eq!((found.grads, found.params), (4 * UNIT, 8 * UNIT / 2));
        setting.dtypes.reduced = DType::Bf16;
        assert_eq!(Traffic::of(&setting, ELEMENTS).grads, 4 * UNIT / 2);
    }

    #[test]
    fn eight_micro_batches_save_seven_eighths_of_the_traffic_of_ddp() {
        let ddp = |k| Traffic::of(&setting(Strategy::Ddp, Accumulate::Sharded, true, k), ELEMENTS).total();
        assert_eq!(ddp(8), ddp(1), "one reduction a step");
        // So many samples take 8 steps of one micro-batch, or 1 step of 8.
        assert_eq!((8 * ddp(1) - ddp(8)) * 1000, 875 * 8 * ddp(1));
    }

    #[test]
    fn one_rank_moves_nothing() {
        let mut setting = setting(Strategy::Zero3, Accumulate::Sharded, true, 4);
        setting.ranks = 1;
        assert_eq!(Traffic::of(&setting, ELEMENTS), Traffic::default());
    }

    #[test]
    fn gpt2_124m_at_1024_positions() {
        let model = Model {
            kind: ModelKind::Gpt2,
            n_layer: 12,
            n_head: 12,
            n_embd: 768,
            block_size: 1024,
            vocab_size: None,
            init_from: None,
            dropout: 0.0,
        };
        let of = |recompute| Work::of(&model, 50_304, recompute);
        // The blocks' matrices have 84,934,656 parameters. A token sees 512.5 positions on average.
        let (blocks, attention) = (84_934_656, 4 * 12 * 768 * 1025 / 2);
        assert_eq!(
            of(Recompute::None).total(),
            6 * (blocks + 50_304 * 768) + 3 * attention
        );
        // Forward once more, of the blocks alone, without the last of their products: a third of the matrices.
        assert_eq!(of(Recompute::Full).repeated, 2 * blocks * 2 / 3 + attention);
        assert_eq!(of(Recompute::Selective).repeated * 3, 2 * blocks);
    }

    /// One layer, 128 wide, 4,096 positions: bound by attention and full of positions.
    #[test]
    fn neither_position_embeddings_nor_masked_positions_are_counted() {
        let model = Model {
            kind: ModelKind::Gpt2,
            n_layer: 1,
            n_head: 1,
            n_embd: 128,
            block_size: 4096,
            vocab_size: None,
            init_from: None,
            dropout: 0.0,
        };
        let products = 6 * (12 * 128 * 128 + 256 * 128);
        let scores_and_sums = 6 * 128 * 4097;
        assert_eq!(
            Work::of(&model, 256, Recompute::None).total(),
            products + scores_and_sums
        );
    }

    #[test]
    fn four_mi_tokens_are_32_micro_batches_of_4_on_8_ranks() {
        let batch = GlobalBatch {
            ranks: 8,
            accumulation: 32,
            micro_batch: 4,
            block_size: 4096,
        };
        assert_eq!((batch.samples(), batch.tokens()), (1024, 4_194_304));
    }
}
