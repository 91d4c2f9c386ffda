//! The global norm of the gradients, and the factor that clips it. Both stay on the device.

use super::kernel::kernel;
use super::real::{LANES, sum_lanes};
use super::{CpuKernel, expect_len};
use crate::device::{Buffer, Cpu, DeviceError};

/// Elements of an arena whose squares are summed together, in f64. Shards align to it, so that the norm does
/// not depend on who owns what.
pub const CHUNK: usize = 16_384;

/// `partials[c] = Σ x[i]²` over chunk `c`, in f64
#[derive(Clone, Debug)]
pub struct SquaredNorm {
    /// `[n]`, f32; starts at a multiple of [`CHUNK`] in its arena
    pub x: Buffer,
    /// `[⌈n / CHUNK⌉]`, f64
    pub partials: Buffer,
}

impl CpuKernel for SquaredNorm {
    const NAME: &'static str = "squared_norm";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let x = self.x.host::<f32>()?;
        expect_len(
            Self::NAME,
            "partials",
            self.partials.len(),
            x.len().div_ceil(CHUNK),
        )?;
        let mut partials = self.partials.host_mut::<f64>()?;
        let parts = partials.iter_mut().zip(x.chunks(CHUNK)).collect();
        cpu.for_each_part(parts, |(partial, chunk)| *partial = squared_sum(cpu.isa(), chunk));
        Ok(())
    }
}

kernel! {
    /// `Σ x[i]²`, the squares and their sum in f64.
    fn squared_sum<'a, T>(x: &'a [T]) -> f64 {
        let mut lanes = [0.0; LANES];
        let mut chunks = x.chunks_exact(LANES);
        for chunk in &mut chunks {
            let mut wide = [0.0; LANES];
            for (wide, x) in wide.iter_mut().zip(chunk) {
                *wide = x.to_f64();
            }
            for (lane, wide) in lanes.iter_mut().zip(wide) {
                *lane += wide * wide;
            }
        }
        for (lane, x) in lanes.iter_mut().zip(chunks.remainder()) {
            *lane += x.to_f64() * x.to_f64();
        }
        sum_lanes(lanes)
    }
}

/// `norm = √Σ partials; scale = min(1, max_norm / norm)`, summed in chunk order
#[derive(Clone, Debug)]
pub struct ClipScale {
    /// `[chunks]`, f64, of [`SquaredNorm`]
    pub partials: Buffer,
    /// Largest norm that is let through; none: only measure.
    pub max_norm: Option<f32>,
    /// `[1]`, f32
    pub norm: Buffer,
    /// `[1]`, f32, for [`super::AdamW`]
    pub scale: Buffer,
}

impl CpuKernel for ClipScale {
    const NAME: &'static str = "clip_scale";

    fn run(&self, _cpu: &Cpu) -> Result<(), DeviceError> {
        let sum: f64 = self.partials.host::<f64>()?.iter().sum();
        let norm = sum.sqrt();
        self.norm.host_mut::<f32>()?[0] = norm as f32;
        let clip = |max: f32| {
            if norm > f64::from(max) {
                (f64::from(max) / norm) as f32
            } else {
                1.0
            }
        };
        self.scale.host_mut::<f32>()?[0] = self.max_norm.map_or(1.0, clip);
        Ok(())
    }
}
