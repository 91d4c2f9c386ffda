//! Numbers that are the same for the same seed.

/// In [−1, 1).
pub(crate) fn numbers(seed: u64, len: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / f64::from(1 << 30) / f64::from(1 << 22) - 1.0
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// In [0, 1).
pub(super) fn positive(seed: u64, len: usize) -> Vec<f64> {
    numbers(seed, len).into_iter().map(f64::abs).collect()
}

/// Whole numbers below `end`. Small ones are frequent, as common tokens are.
pub(super) fn tokens(seed: u64, len: usize, end: usize) -> Vec<f64> {
    let each = positive(seed, len).into_iter();
    each.map(|x| (x * x * x * end as f64).floor()).collect()
}
