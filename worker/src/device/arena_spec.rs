//! What an arena is to be, before there is memory for it.

use super::DType;

/// What to allocate.
#[derive(Clone, Debug)]
pub struct ArenaSpec {
    /// For errors and memory accounts.
    pub name: String,
    /// Type of the elements.
    pub dtype: DType,
    /// Number of elements.
    pub len: usize,
    /// Who must be able to reach it.
    pub sharing: Sharing,
}

/// Who can reach an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// This process only.
    Private,
    /// Other ranks of this node may map it (a memfd segment on the CPU).
    Node,
}

impl ArenaSpec {
    /// `len` elements that this process alone reaches.
    #[must_use]
    pub fn private(name: impl Into<String>, dtype: DType, len: usize) -> Self {
        Self {
            name: name.into(),
            dtype,
            len,
            sharing: Sharing::Private,
        }
    }

    /// `len` elements that other ranks of this node may map.
    #[must_use]
    pub fn on_node(name: impl Into<String>, dtype: DType, len: usize) -> Self {
        Self {
            sharing: Sharing::Node,
            ..Self::private(name, dtype, len)
        }
    }

    /// Size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.bytes()
    }
}
