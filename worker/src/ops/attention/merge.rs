//! Attention over the keys of several stretches, one stretch after the other: blockwise attention (Liu et al. 2023, Ring
//! attention with blockwise transformers), by the logarithms of the softmax's denominators.
//!
//! [`AttentionForward`](super::AttentionForward) over a stretch leaves its output and `lse`; [`AttentionMerge`] joins them
//! with those over the stretches before. [`AttentionBackward`](super::AttentionBackward) with the joined output and `lse`
//! then gives the stretch's share of the gradients.

use super::causal::heads_of;
use super::shape::AttentionShape;
use crate::cuda::{Define, Grid, KernelSource};
use crate::memory::{Buffer, DType, DeviceError};
use crate::ops::cpu::kernel::{kernel, ln, runs_in, update};
use crate::ops::cpu::matrix::{Matrix, MatrixMut, Tile};
use crate::ops::cpu::stored::Stored;
use crate::ops::cuda::plan::{Call, Plan, THREADS, count, element, expect_dtype, kernels};
use crate::ops::{Cpu, Operation};

/// `out = (e^lse·out + e^part_lse·part) / (e^lse + e^part_lse)` and `lse = ln(e^lse + e^part_lse)`, for each query and head.
#[derive(Clone, Debug)]
pub struct AttentionMerge {
    /// `[B, T, H·D]`: over some keys
    pub part: Buffer,
    /// `[B, H, T]`, f32 (f64 if `out` is)
    pub part_lse: Buffer,
    /// `[B, T, H·D]`: over other keys, becomes that over both
    pub out: Buffer,
    /// `[B, H, T]`: as `out`
    pub lse: Buffer,
    /// Sizes.
    pub shape: AttentionShape,
}

impl Operation for AttentionMerge {
    const NAME: &'static str = "attention_merge";

    runs_in!(out);

    fn plan(&self) -> Result<Plan, DeviceError> {
        let (op, shape, n) = (Self::NAME, self.shape, self.lse.len());
        self.check()?;
        expect_dtype(self.out.dtype(), &[&self.part])?;
        expect_dtype(DType::F32, &[&self.lse, &self.part_lse])?;
        let defines = vec![Define::Word("ACT", element(op, &self.out)?)];
        // A warp for each query of a head.
        let threads = count(op, "threads", 32 * n)? as usize;
        let call = Call::new(&SOURCE, op, defines, Grid::covering(threads, THREADS));
        let call = call
            .read([&self.part, &self.part_lse])
            .write([&self.out, &self.lse]);
        let sizes = [shape.positions, shape.heads, shape.head_size, n];
        Ok(call.u32(sizes.map(|size| size as u32)).into())
    }
}

impl AttentionMerge {
    fn check(&self) -> Result<(), DeviceError> {
        let (channels, heads) = (self.shape.channels(), self.shape.heads);
        let buffers = [
            ("part", &self.part, channels),
            ("part_lse", &self.part_lse, heads),
            ("out", &self.out, channels),
            ("lse", &self.lse, heads),
        ];
        self.shape.check(Self::NAME, &buffers)
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        self.check()?;
        let (isa, shape) = (cpu.isa(), self.shape);
        let (part, part_lse) = (self.part.host::<S>()?, self.part_lse.host::<S::Real>()?);
        let (mut out, mut lse) = (self.out.host_mut::<S>()?, self.lse.host_mut::<S::Real>()?);
        let (part, part_lse, positions) = (&*part, &*part_lse, shape.positions);
        let outs = heads_of(shape, &mut out);
        let parts = outs.zip(lse.chunks_mut(positions)).enumerate().collect();
        cpu.for_each_part(parts, |(i, (mut out, lse)): (usize, (Tile<'_, S>, _))| {
            let part = shape.head(part, [i / shape.heads, i % shape.heads]);
            let part_lse = &part_lse[i * positions..][..positions];
            S::read_matrix(isa, part, |part| {
                S::write_matrix(isa, &mut out.out, true, |out| {
                    merge(isa, part_lse, lse, part, out.whole_mut());
                });
            });
        });
        Ok(())
    }
}

kernel! {
    /// The rows of one head of one sample.
    fn merge<'a, T>(part_lse: &'a [T], lse: &'a mut [T], part: Matrix<'a, T>, out: MatrixMut<'a, T>) -> () {
        let mut out = out;
        for (row, (other, lse)) in part_lse.iter().zip(lse).enumerate() {
            let top = if *lse > *other { *lse } else { *other };
            let (own_weight, other_weight) = ((*lse - top).exp(), (*other - top).exp());
            let sum = own_weight + other_weight;
            *lse = top + T::of(ln(sum.to_f64()));
            let (own_share, other_share) = (own_weight / sum, other_weight / sum);
            update(out.row_mut(row), part.row(row), |out, part| {
                *out = *out * own_share + part * other_share;
            });
        }
    }
}

static SOURCE: KernelSource = kernels("attention_merge.cu", include_str!("../cuda/attention_merge.cu"));
