//! A permutation of `0..n` that needs no table: any element of it costs the same.

/// Rounds of the network. Four suffice against distinguishers (Luby & Rackoff 1988); small domains get
/// more, since their halves have few bits.
const ROUNDS: u64 = 8;

/// A keyed permutation of `0..n`: a Feistel network over the next even number of bits, walked along its
/// cycle until it lands inside (Black & Rogaway 2002). The network's domain is less than four times `n`,
/// so that fewer than four tries are expected, and `4n` is a bound.
#[derive(Clone, Copy, Debug)]
pub(super) struct Permutation {
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
    use proptest::prelude::*;

    use super::*;

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
