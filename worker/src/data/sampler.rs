//! Which block is sample `n` of the run.

use super::permutation::Permutation;
use crate::config::Order;

/// Name of the rule by which `shuffled` orders the blocks; recorded in checkpoints, since a run can only
/// be resumed under the same one.
pub const ORDER_VERSION: &str = "feistel8-splitmix64/1";

/// The order of the global stream of samples: a pure function of its number, whatever the number of ranks.
/// Each epoch contains every block once; the stream runs on over the end of an epoch, also within a batch.
#[derive(Clone, Copy, Debug)]
pub struct Sampler {
    order: Order,
    seed: u64,
    blocks: u64,
}

impl Sampler {
    /// Over `blocks` blocks, of which there must be one.
    #[must_use]
    pub fn new(order: Order, seed: u64, blocks: u64) -> Self {
        assert!(blocks > 0, "a sampler needs a block");
        Self { order, seed, blocks }
    }

    /// Blocks of one epoch.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Epoch and block of sample `n` of the global stream.
    #[must_use]
    pub fn block(&self, n: u64) -> (u64, u64) {
        let (epoch, place) = (n / self.blocks, n % self.blocks);
        let block = match self.order {
            Order::Sequential => place,
            Order::Shuffled => Permutation::new(self.blocks, self.seed, epoch).at(place),
        };
        (epoch, block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffled_order_is_pinned() {
        // Changing these numbers changes the data order of every run: `ORDER_VERSION` must change too.
        let sampler = Sampler::new(Order::Shuffled, 1337, 100);
        let first: Vec<_> = (0..6).map(|n| sampler.block(n).1).collect();
        let second: Vec<_> = (100..106).map(|n| sampler.block(n)).collect();
        insta::assert_snapshot!(format!("{first:?} {second:?}"), @"[26, 87, 53, 17, 25, 39] [(1, 17), (1, 16), (1, 41), (1, 85), (1, 38), (1, 76)]");
    }

    #[test]
    fn epochs_and_seeds_have_their_own_order() {
        let order = |seed: u64, epoch: u64| {
            let sampler = Sampler::new(Order::Shuffled, seed, 50);
            (epoch * 50..(epoch + 1) * 50)
                .map(|n| sampler.block(n).1)
                .collect::<Vec<_>>()
        };
        assert_ne!(order(1, 0), order(1, 1));
        assert_ne!(order(1, 0), order(2, 0));
        assert_eq!(order(1, 0), order(1, 0));
    }
}
