//! Memory of a rank.

use std::ops::{Add, Sub};

use super::Setting;
use crate::config::Strategy;
use crate::device::DType;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Accumulate;

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
}
