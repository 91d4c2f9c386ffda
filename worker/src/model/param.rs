//! Parameters as data.

use std::ops::Range;

use super::{Cut, Region, Run};
use crate::device::DType;

/// Index of a parameter in its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParamId(pub usize);

/// Index of a parameter group in its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub usize);

/// All that is known of a parameter before it exists.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Unique in the model and the same under every layout, as in GPT-2's published checkpoints:
    /// `h.0.attn.c_attn.weight`. It seeds the first values, and names the tensors of a checkpoint.
    pub key: String,
    /// Shape of the whole parameter.
    pub global_shape: Vec<usize>,
    /// How the parameter is divided over ranks; none: all of it is on every rank.
    pub cut: Option<Cut>,
    /// Type in the parameter arena.
    pub dtype: DType,
    /// How an element gets its first value, from (seed, key, global element) alone.
    pub init: Init,
    /// Weight decay applies: matrices yes, norms and biases no.
    pub decay: bool,
    /// Group that it is gathered with.
    pub group: GroupId,
}

impl ParamSpec {
    /// Shape of this rank's part.
    #[must_use]
    pub fn local_shape(&self) -> Vec<usize> {
        match &self.cut {
            Some(cut) => cut.local_shape(&self.global_shape),
            None => self.global_shape.clone(),
        }
    }

    /// Number of elements of this rank's part.
    #[must_use]
    pub fn len(&self) -> usize {
        self.local_shape().iter().product()
    }

    /// The boxes of the whole parameter that this rank's part consists of.
    #[must_use]
    pub fn regions(&self) -> Vec<Region> {
        match &self.cut {
            Some(cut) => cut.regions(&self.global_shape),
            None => vec![Region::whole(&self.shape_on_disk())],
        }
    }

    /// Elements `range` of this rank's part, in order, as runs of neighbours.
    #[must_use]
    pub fn runs(&self, range: Range<usize>) -> Vec<Run> {
        match &self.cut {
            Some(cut) => cut.runs(&self.global_shape, range),
            None => vec![Run {
                region: 0,
                in_region: range.start,
                global: range.start,
                local: range,
            }],
        }
    }

    /// The global shape as files have it.
    pub(crate) fn shape_on_disk(&self) -> Vec<u64> {
        self.global_shape.iter().map(|&len| len as u64).collect()
    }

    /// True if it has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// First value of the elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All the same.
    Constant(f32),
    /// Normal with mean 0, by Philox of (seed, key, global element).
    Normal {
        /// Standard deviation.
        std: f32,
    },
}

/// Parameters that are gathered and released together. A tied weight is a group of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamGroup {
    /// For traces and errors: `h.0`.
    pub name: String,
    /// Members, in forward order.
    pub params: Vec<ParamId>,
}
