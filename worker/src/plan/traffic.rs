//! Bytes that a rank moves in a step.

use super::Setting;
use crate::config::Strategy;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Accumulate;
    use crate::device::DType;

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
}
