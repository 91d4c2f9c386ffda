//! Bytes and time of an all-reduce.

/// An all-reduce that moves as little as can be (Patarasuk & Yuan 2009): as a ring does, and the direct exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllReduce {
    /// Ranks that take part.
    pub ranks: u64,
    /// Size of the buffer: a multiple of `ranks` elements.
    pub bytes: u64,
}

impl AllReduce {
    /// Bytes that each rank moves: 2(N−1)/N·S, half of them for the sums and half for their results.
    #[must_use]
    pub const fn bytes_a_rank(&self) -> u64 {
        2 * (self.ranks - 1) * (self.bytes / self.ranks)
    }

    /// The least time it takes where each rank moves `bytes_per_s`, in seconds.
    #[must_use]
    pub fn seconds(&self, bytes_per_s: f64) -> f64 {
        self.bytes_a_rank() as f64 / bytes_per_s
    }

    /// `seconds` the other way round: bytes a second that each rank moved in so much time.
    #[must_use]
    pub fn rate(&self, seconds: f64) -> f64 {
        self.bytes_a_rank() as f64 / seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Milliseconds on 8 ranks, at 900 and at 50 GB/s.
    fn ms(bytes: u64) -> [f64; 2] {
        let all_reduce = AllReduce { ranks: 8, bytes };
        [900e9, 50e9].map(|rate| all_reduce.seconds(rate) * 1e3)
    }

    #[test]
    fn times_are_those_of_the_published_examples() {
        for (bytes, expected) in [
            (2_000_000_000, [3.9, 70.0]),
            (25 * MIB, [0.051, 0.92]),
            (64 * MIB, [0.130, 2.35]),
        ] {
            for (found, expected) in ms(bytes).iter().zip(expected) {
                assert!(
                    (found / expected - 1.0).abs() < 0.01,
                    "{bytes}: {found}, {expected}"
                );
            }
        }
    }

    #[test]
    fn eight_ranks_move_seven_quarters_of_the_buffer_each() {
        let all_reduce = AllReduce {
            ranks: 8,
            bytes: 64 * MIB,
        };
        assert_eq!(all_reduce.bytes_a_rank(), 117_440_512);
        assert!((all_reduce.rate(all_reduce.seconds(5e9)) - 5e9).abs() < 1.0);
        let alone = AllReduce {
            ranks: 1,
            ..all_reduce
        };
        assert_eq!(alone.bytes_a_rank(), 0);
    }
}
