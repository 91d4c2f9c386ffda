//! Memory of what a rank holds: the elements of all ranks, or only its own, and where each of them lies in it.

use std::ops::Range;

use crate::device::{Arena, Buffer};
use crate::model::ParamId;

/// A part of a parameter that this rank owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnPiece {
    /// Of which parameter.
    pub param: ParamId,
    /// Which of its elements, row-major.
    pub elements: Range<usize>,
    /// Where they are.
    pub place: Place,
}

/// The same elements in both arenas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// In the whole arena.
    pub whole: Range<usize>,
    /// In the shard.
    pub shard: Range<usize>,
}

/// Elements that a rank holds: of all ranks, or only its own.
#[derive(Clone, Debug)]
pub enum Portion {
    /// All units.
    Whole(Arena),
    /// This rank's slice of each.
    Shard(Arena),
}

impl Portion {
    /// The memory.
    #[must_use]
    pub fn arena(&self) -> &Arena {
        match self {
            Self::Whole(arena) | Self::Shard(arena) => arena,
        }
    }

    /// The elements at a place.
    #[must_use]
    pub fn slice(&self, place: &Place) -> Buffer {
        match self {
            Self::Whole(arena) => arena.slice(place.whole.clone()),
            Self::Shard(arena) => arena.slice(place.shard.clone()),
        }
    }
}
