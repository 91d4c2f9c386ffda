//! Conversion between bf16 and f32, in the form that compilers vectorise.

#![expect(
    clippy::inline_always,
    reason = "so that it is compiled for each instruction set"
)]

use half::bf16;

/// Exactly: the bits become the upper half.
#[inline(always)]
pub(crate) fn widen(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Rounds to nearest, ties to even; a NaN stays one. Without a branch.
#[inline(always)]
pub(crate) fn narrow(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    bf16::from_bits(if x.is_nan() { quiet } else { rounded } as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_as_the_half_crate_does() {
        // Steps through all exponents and through mantissas around ties.
        for bits in (0..=u32::MAX).step_by(0x0fff) {
            let wide = f32::from_bits(bits);
            assert_eq!(
                narrow(wide).to_bits(),
                bf16::from_f32(wide).to_bits(),
                "{bits:08x}"
            );
        }
        for bits in 0..=u16::MAX {
            let x = bf16::from_bits(bits);
            let same = widen(x).to_bits() == x.to_f32().to_bits();
            assert!(same || (x.is_nan() && widen(x).is_nan()), "{bits:04x}");
        }
    }
}
