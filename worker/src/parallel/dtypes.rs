//! Which type is used where: the one place where `train.precision` becomes types of arenas.
//!
//! | | `f32`, `tf32` | `bf16` |
//! |---|---|---|
//! | parameters that operations read, activations, what is gathered | f32 | bf16 |
//! | master weights and moments, on the rank that updates them | f32 (the parameters are the masters) | f32 |
//! | gradients on the wire, `parallel.reduce_dtype` | f32 | bf16 or f32 |
//! | gradients between the micro-batches of a step | f32 | f32; with one micro-batch, as on the wire |
//!
//! The ranks' contributions are added in f32 and in rank order, and the average is rounded once; with several copies of
//! the state (`parallel.shard_group`) the shards of groups are added as they are accumulated: in f32, or, with a single
//! micro-batch, as on the wire, and rounded once more. Several
//! micro-batches are added in f32 as well: whole gradients lie in an f32 arena and are narrowed, bucket by bucket, on
//! their way ([`super::Reducer`]); sharded ones are widened when they land in the shard. So a step of one micro-batch
//! costs 2 + 2 + 12 bytes a parameter, and one of several two bytes more where gradients are held.
//!
//! bf16 gradients on the wire beside f32 parameters do not exist: operations write gradients in the parameters' type
//! or wider, so a second copy would be needed for less traffic alone.

use crate::config::{Precision, ReduceDtype, TrainConfig};
use crate::device::DType;

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dtypes {
    /// Of parameters that operations read, and of activations.
    pub params: DType,
    /// Of gradients while they are reduced.
    pub reduced: DType,
    /// Of gradients while micro-batches are added, and of the averages that the update reads.
    pub accumulated: DType,
}

impl Dtypes {
    /// The types that a configuration asks for.
    #[must_use]
    pub fn of(config: &TrainConfig) -> Self {
        let params = match config.train.precision {
            Precision::F32 | Precision::Tf32 => DType::F32,
            Precision::Bf16 => DType::Bf16,
        };
        let reduced = match config.parallel.reduce_dtype {
            None => params,
            Some(ReduceDtype::F32) => DType::F32,
            Some(ReduceDtype::Bf16) => DType::Bf16,
        };
        Self {
            params,
            reduced,
            accumulated: match config.train.grad_accumulation {
                1 => reduced,
                _ => DType::F32,
            },
        }
    }

    /// True if the optimizer has masters of its own.
    #[must_use]
    pub fn has_masters(&self) -> bool {
        self.params != DType::F32
    }
}
