//! Samples of one optimizer step.

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
