//! Element types of arenas.

use std::fmt;

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
    #[must_use]
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

/// A Rust type that is stored in arenas. Sealed: arenas rely on [`Element::DTYPE`] having the type's size.
pub trait Element: bytemuck::Pod + Send + Sync + sealed::Sealed {
    /// The type as data.
    const DTYPE: DType;
}

macro_rules! element {
    ($type:ty, $dtype:ident) => {
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
        const _: () = assert!(size_of::<$type>() == DType::$dtype.bytes());
    };
}

element!(f64, F64);
element!(f32, F32);
element!(half::bf16, Bf16);
element!(i32, I32);
element!(u8, U8);

mod sealed {
    /// Only the types above.
    pub trait Sealed {}
}
