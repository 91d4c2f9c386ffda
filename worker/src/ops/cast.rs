//! Conversion between element types; also a plain copy.

use bytemuck::{cast_slice, cast_slice_mut};
use half::bf16;

use super::stored::{narrow, widen};
use super::{CpuKernel, expect_len};
use crate::device::{Buffer, Cpu, DType, DeviceError};

/// `out[i] = x[i]`, rounded to nearest even where the type of `out` is narrower.
#[derive(Clone, Debug)]
pub struct Cast {
    /// `[n]`, f32 or bf16
    pub x: Buffer,
    /// `[n]`, f32 or bf16
    pub out: Buffer,
}

impl CpuKernel for Cast {
    const NAME: &'static str = "cast";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        expect_len(Self::NAME, "out", self.out.len(), self.x.len())?;
        let (from, to) = (self.x.dtype(), self.out.dtype());
        cast_bytes(
            cpu,
            (from, &self.x.host_bytes()?[..]),
            (to, &mut self.out.host_bytes_mut()?[..]),
        )
    }
}

/// [`Cast`] of memory that is no buffer's: as many elements of `from` and `to`, aligned for them.
pub(crate) fn cast_bytes(
    cpu: &Cpu,
    (from, x): (DType, &[u8]),
    (to, out): (DType, &mut [u8]),
) -> Result<(), DeviceError> {
    let isa = cpu.isa();
    match (from, to) {
        (DType::F32, DType::Bf16) => {
            let (x, out): (&[f32], &mut [bf16]) = (cast_slice(x), cast_slice_mut(out));
            let parts = x.chunks(PART).zip(out.chunks_mut(PART)).collect();
            cpu.for_each_part(parts, |(x, out): (&[f32], &mut [bf16])| narrow(isa, x, out));
        }
        (DType::Bf16, DType::F32) => {
            let (x, out): (&[bf16], &mut [f32]) = (cast_slice(x), cast_slice_mut(out));
            let parts = x.chunks(PART).zip(out.chunks_mut(PART)).collect();
            cpu.for_each_part(parts, |(x, out): (&[bf16], &mut [f32])| widen(isa, x, out));
        }
        (from, to) if from == to => {
            let parts = x.chunks(PART).zip(out.chunks_mut(PART)).collect();
            cpu.for_each_part(parts, |(x, out): (&[u8], &mut [u8])| out.copy_from_slice(x));
        }
        (from, to) => {
            return Err(DeviceError::Shape {
                op: Cast::NAME,
                what: format!("cannot cast {from} to {to}"),
            });
        }
    }
    Ok(())
}

/// Elements of one part of the work.
const PART: usize = 65_536;
