//! Philox4x32-10: a counter-based random function (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
//! SC 2011). There is no state: the same counter and key give the same four words anywhere, in any order.

const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Key increments: the golden ratio and √3 − 1 (Weyl sequence).
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Four random words for a counter under a key.
#[must_use]
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let [high0, low0] = wide_product(MULTIPLIERS[0], counter[0]);
        let [high1, low1] = wide_product(MULTIPLIERS[1], counter[2]);
        counter = [
            high1 ^ counter[1] ^ key[0],
            low1,
            high0 ^ counter[3] ^ key[1],
            low0,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

/// Both halves of a product, the high one first.
const fn wide_product(a: u32, b: u32) -> [u32; 2] {
    let product = a as u64 * b as u64;
    [(product >> 32) as u32, product as u32]
}

#[cfg(test)]
mod tests {
    use super::philox;

    /// The known answers published with Random123 (`kat_vectors`, `philox4x32 10`).
    #[test]
    fn known_answers() {
        let ones = u32::MAX;
        assert_eq!(
            philox([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox([ones; 4], [ones; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(
            philox(pi, [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }
}
