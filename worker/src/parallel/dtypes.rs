//! Which type is used where: the one place where `train.precision` becomes types of arenas.
//!
//! | | `f32`, `tf32` | `bf16` |
//! |---|---|---|
//! | parameters that operations read, activations, what is gathered | f32 | bf16 |
//! | master weights and moments, on the rank that updates them | f32 (the parameters are the masters) | f32 |
//! | gradients on the wire, `parallel.reduce_dtype` | f32 | f32, or bf16 if asked for |
//! | gradients between the micro-batches of a step | f32 | f32; with one micro-batch, as on the wire |
//!
//! In f32 a gradient is rounded to bf16 nowhere: products write it in f32, and it is added in f32. In bf16 each rank's
//! gradient is rounded before it is sent. In host memory the ranks' contributions are then added in f32, in rank order, and
//! the sum is rounded once; NCCL adds bf16 numbers, and rounds at each hop of its ring or tree, so that the error grows
//! with the ranks. With several copies of the state (`parallel.shard_group`) the shards of groups are added as they are
//! accumulated: in f32, or, with a single micro-batch, as on the wire, and rounded once more. Several micro-batches are
//! added in f32 in any case: to be reduced in bf16, whole gradients lie in an f32 arena and are narrowed, bucket by bucket,
//! on their way ([`super::Reducer`]); sharded ones are widened when they are stored in the shard.
//!
//! So a step costs 2 + 4 + 12 bytes a parameter, and bf16 on the wire saves two of them where gradients are held and no
//! micro-batch is added to another.
//!
//! bf16 gradients on the wire beside f32 parameters do not exist: operations write gradients in the parameters' type
//! or wider, so a second copy would be needed for less traffic alone.

use crate::config::{Precision, ReduceDtype, TrainConfig};
use crate::device::DType;

/// The types of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dtypes {
    /// Type of the parameters that operations read, and of activations.
    pub params: DType,
    /// Type of gradients while they are reduced.
    pub reduced: DType,
    /// Type of gradients while micro-batches are added, and of the sums that the update reads.
    pub accumulated: DType,
}

impl Dtypes {
    /// The types that a configuration asks for.
    pub fn of(config: &TrainConfig) -> Self {
        let reduced = match config.parallel.reduce_dtype {
            ReduceDtype::F32 => DType::F32,
            ReduceDtype::Bf16 => DType::Bf16,
        };
        Self {
            params: Self::params_in(config.train.precision),
            reduced,
            accumulated: match config.train.grad_accumulation {
                1 => reduced,
                _ => DType::F32,
            },
        }
    }

    /// [`Dtypes::params`] in a precision.
    pub fn params_in(precision: Precision) -> DType {
        match precision {
            Precision::F32 | Precision::Tf32 => DType::F32,
            Precision::Bf16 => DType::Bf16,
        }
    }

    /// True if the optimizer has masters of its own, as operations read narrower parameters.
    pub fn has_masters(&self) -> bool {
        self.params != DType::F32
    }
}
