//! Bytes that a rank sends in a step under the sharded strategies, by its terms.

use super::{Dtypes, Sharding};

/// What a step consists of, for who sends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepTraffic {
    /// Elements of the whole arena, padding included.
    pub whole: usize,
    /// Ranks that it is cut over.
    pub ranks: usize,
    /// Copies of the state, over which each rank's shard of the gradients is summed.
    pub copies: usize,
    /// Elements of parameters that are gathered, each counted as often as it is gathered.
    pub gathered: usize,
    /// Of what crosses the wire.
    pub dtypes: Dtypes,
}

impl StepTraffic {
    /// Under a sharding in so many copies, with so many elements gathered.
    #[must_use]
    pub fn of(sharding: &Sharding, copies: usize, gathered: usize, dtypes: Dtypes) -> Self {
        Self {
            whole: sharding.whole_len(),
            ranks: sharding.world(),
            copies,
            gathered,
            dtypes,
        }
    }

    /// Bytes of gradients in each reduction: reduce-scattered within a copy, in the type that they are reduced in.
    #[must_use]
    pub fn reduction(&self) -> u64 {
        ((self.whole - self.whole / self.ranks) * self.dtypes.reduced.bytes()) as u64
    }

    /// Bytes of gradients over the copies: a shard, all-reduced once a step in the type that it is accumulated in.
    #[must_use]
    pub fn over_copies(&self) -> u64 {
        let shard = self.whole / self.ranks;
        (2 * (self.copies - 1) * shard / self.copies * self.dtypes.accumulated.bytes()) as u64
    }

    /// Bytes of parameters in a step.
    #[must_use]
    pub fn params(&self) -> u64 {
        (self.gathered / self.ranks * (self.ranks - 1) * self.dtypes.params.bytes()) as u64
    }

    /// Bytes of a step in which gradients are reduced so many times within a copy.
    #[must_use]
    pub fn step(&self, reductions: usize) -> u64 {
        self.params() + reductions as u64 * self.reduction() + self.over_copies()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DType;

    /// In units of (N − 1)/N · bytes, ZeRO-2 sends k + 1, or 2; ZeRO-3 3k, or 2k + 1.
    #[test]
    fn the_terms_add_up_to_the_known_multiples() {
        const MICRO_BATCHES: usize = 4;
        let f32s = Dtypes {
            params: DType::F32,
            reduced: DType::F32,
            accumulated: DType::F32,
        };
        let mut traffic = StepTraffic {
            whole: 1 << 20,
            ranks: 8,
            copies: 1,
            gathered: 1 << 20,
            dtypes: f32s,
        };
        let unit = 7 * (1 << 20) / 8 * 4;
        assert_eq!(traffic.step(MICRO_BATCHES), 5 * unit);
        assert_eq!(traffic.step(1), 2 * unit);
        traffic.gathered = (2 * MICRO_BATCHES) << 20;
        assert_eq!(traffic.step(MICRO_BATCHES), 12 * unit);
        assert_eq!(traffic.step(1), 9 * unit);
        assert_eq!(traffic.over_copies(), 0);
        // 2 · (R − 1)/R of a shard, once a step.
        traffic.copies = 4;
        assert_eq!(traffic.over_copies(), 2 * 3 * (1 << 20) / 8);
        assert_eq!(traffic.step(MICRO_BATCHES), 12 * unit + traffic.over_copies());
        // Reduced in bf16 and accumulated in f32.
        traffic.dtypes.reduced = DType::Bf16;
        assert_eq!(traffic.reduction(), unit / 2);
        assert_eq!(traffic.over_copies(), 2 * 3 * (1 << 20) / 8);
    }
}
