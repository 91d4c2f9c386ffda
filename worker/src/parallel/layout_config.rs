//! Sizes of buckets, and for whom they are cut.

use super::Dtypes;
use crate::config::Parallel;
use crate::device::DType;

const MIB: f64 = 1_048_576.0;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutConfig {
    /// Size of the first bucket: small, so that communication starts early.
    pub first_bucket_bytes: usize,
    /// Size of the others: large, so that few operations carry much.
    pub bucket_bytes: usize,
    /// Ranks over which a bucket can be cut into equal slices.
    pub world_size: usize,
    /// Type of the gradients while they are reduced, which bucket sizes count in.
    pub dtype: DType,
    /// Type of the gradients while micro-batches are added, and of the sums: the same or wider.
    pub accumulated: DType,
}

impl LayoutConfig {
    /// 1 MiB, then 25 MiB, of f32.
    #[must_use]
    pub const fn new(world_size: usize) -> Self {
        Self {
            first_bucket_bytes: 1 << 20,
            bucket_bytes: 25 << 20,
            world_size,
            dtype: DType::F32,
            accumulated: DType::F32,
        }
    }

    /// The sizes of a `train.yaml`.
    #[must_use]
    pub fn of(parallel: &Parallel, world_size: usize) -> Self {
        Self {
            first_bucket_bytes: (parallel.first_bucket_mb * MIB) as usize,
            bucket_bytes: (parallel.bucket_mb * MIB) as usize,
            ..Self::new(world_size)
        }
    }

    /// The same sizes for gradients of other types.
    #[must_use]
    pub fn with_dtypes(self, dtypes: Dtypes) -> Self {
        Self {
            dtype: dtypes.reduced,
            accumulated: dtypes.accumulated,
            ..self
        }
    }
}
