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

/// A Rust type that is stored in arenas.
pub trait Element: bytemuck::Pod + Send + Sync {
    /// The type as data.
    const DTYPE: DType;
}

impl Element for f64 {
    const DTYPE: DType = DType::F64;
}
impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for half::bf16 {
    const DTYPE: DType = DType::Bf16;
}
impl Element for i32 {
    const DTYPE: DType = DType::I32;
}
impl Element for u8 {
    const DTYPE: DType = DType::U8;
}
