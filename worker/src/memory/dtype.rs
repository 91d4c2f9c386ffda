//! Element types of arenas, and the conversions between bf16 and f32 in the form that compilers vectorise.
#![expect(
    clippy::inline_always,
    reason = "so that it is compiled for each instruction set"
)]

use std::fmt;

use half::bf16;

/// Type of the elements of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE 754 double precision: gradient checks and norms.
    F64,
    /// IEEE 754 single precision.
    F32,
    /// The upper half of an `f32`. Storage only on the CPU: arithmetic is in `f32`.
    Bf16,
    /// Token ids.
    I32,
    /// Bytes.
    U8,
}

impl DType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::Bf16 => 2,
            Self::U8 => 1,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::I32 => "i32",
            Self::U8 => "u8",
        })
    }
}

/// A Rust type that is stored in arenas, which refuse to compile where [`Element::DTYPE`] has another size.
pub trait Element: bytemuck::Pod + Send + Sync {
    /// The type as data.
    const DTYPE: DType;
}

macro_rules! element {
    ($type:ty, $dtype:ident) => {
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
    };
}

element!(f64, F64);
element!(f32, F32);
element!(bf16, Bf16);
element!(i32, I32);
element!(u8, U8);

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
