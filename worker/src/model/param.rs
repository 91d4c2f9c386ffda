//! Parameters as data.

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
    /// Unique in the model, as in GPT-2's published checkpoints: `h.0.attn.c_attn.weight`.
    pub name: String,
    /// Global shape, before any sharding.
    pub shape: Vec<usize>,
    /// Type in the parameter arena.
    pub dtype: DType,
    /// How element `i` gets its first value, from (seed, parameter, element) alone.
    pub init: Init,
    /// Weight decay applies: matrices yes, norms and biases no.
    pub decay: bool,
    /// Group that it is gathered with.
    pub group: GroupId,
    /// How the parameter itself is cut over a mesh; none: whole on every rank.
    pub shard: Option<Shard>,
}

impl ParamSpec {
    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shape.iter().product()
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
    /// Normal with mean 0, by Philox keyed with (seed, parameter, element).
    Normal {
        /// Standard deviation.
        std: f32,
    },
}

/// A parameter cut over one dimension of a device mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Axis of the shape that is cut.
    pub axis: usize,
    /// Dimension of the mesh over which it is cut.
    pub mesh_dim: usize,
}

/// Parameters that are gathered and released together. A tied weight is a group of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamGroup {
    /// For traces and errors: `h.0`.
    pub name: String,
    /// Members, in forward order.
    pub params: Vec<ParamId>,
}
