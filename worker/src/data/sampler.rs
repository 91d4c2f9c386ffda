//! Which block is sample `n` of the run: a permutation that needs no table, any element of which costs the same.

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

/// Rounds of the network. Four suffice against distinguishers (Luby & Rackoff 1988); small domains get
/// more, since their halves have few bits.
const ROUNDS: u64 = 8;

/// A keyed permutation of `0..n`: a Feistel network over the next even number of bits, walked along its
/// cycle until it lands inside (Black & Rogaway 2002). The network's domain is less than four times `n`,
/// so that fewer than four tries are expected, and `4n` is a bound.
#[derive(Clone, Copy, Debug)]
struct Permutation {
    n: u64,
    half_bits: u32,
    key: u64,
}

impl Permutation {
    /// The permutation of `0..n` named by `(seed, epoch)`.
    pub(super) fn new(n: u64, seed: u64, epoch: u64) -> Self {
        let bits = u64::BITS - n.saturating_sub(1).leading_zeros();
        Self {
            n,
            half_bits: bits.div_ceil(2).max(1),
            key: mix(seed ^ mix(epoch)),
        }
    }

    /// Where `x` goes; `x` must be below `n`.
    pub(super) fn at(&self, x: u64) -> u64 {
        debug_assert!(x < self.n, "{x} of {}", self.n);
        let mut y = x;
        loop {
            y = self.network(y);
            // Ends: `y` runs along a cycle that contains `x` itself, which is inside.
            if y < self.n {
                return y;
            }
        }
    }

    fn network(&self, x: u64) -> u64 {
        let mask = (1_u64 << self.half_bits) - 1;
        let (mut left, mut right) = (x >> self.half_bits, x & mask);
        for round in 0..ROUNDS {
            let f = mix(self.key ^ mix(right ^ (round << 56))) & mask;
            (left, right) = (right, left ^ f);
        }
        left << self.half_bits | right
    }
}

/// The finaliser of SplitMix64 (Steele, Lea & Flood 2014).
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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

    proptest! {
        #[test]
        fn every_element_occurs_once(n in 1_u64..5000, seed: u64, epoch: u64) {
            let permutation = Permutation::new(n, seed, epoch);
            let mut all: Vec<u64> = (0..n).map(|x| permutation.at(x)).collect();
            all.sort_unstable();
            prop_assert!(all.into_iter().eq(0..n));
        }

        #[test]
        fn huge_domains_stay_inside(n in 1_u64.., x: u64, seed: u64) {
            let x = x % n;
            prop_assert!(Permutation::new(n, seed, 0).at(x) < n);
        }
    }

    #[test]
    fn no_place_is_preferred() {
        // Where does element 0 of 10 go, over many keys? Each place within 5 standard deviations.
        let (n, keys) = (10_u64, 10_000_u64);
        let mut places = vec![0_u64; n as usize];
        for epoch in 0..keys {
            places[Permutation::new(n, 1, epoch).at(0) as usize] += 1;
        }
        let (expected, deviation) = (1000.0, (10_000.0_f64 * 0.1 * 0.9).sqrt());
        for (place, &count) in places.iter().enumerate() {
            assert!(
                (count as f64 - expected).abs() < 5.0 * deviation,
                "place {place}: {count}"
            );
        }
    }
}
