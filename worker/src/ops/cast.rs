//! Conversion between element types; also a plain copy.

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
        match (self.x.dtype(), self.out.dtype()) {
            (DType::F32, DType::Bf16) => {
                let (x, mut out) = (self.x.host::<f32>()?, self.out.host_mut::<bf16>()?);
                let parts = x.chunks(PART).zip(out.chunks_mut(PART)).collect();
                cpu.for_each_part(parts, |(x, out): (&[f32], &mut [bf16])| {
                    narrow(cpu.isa(), x, out);
                });
            }
            (DType::Bf16, DType::F32) => {
                let (x, mut out) = (self.x.host::<bf16>()?, self.out.host_mut::<f32>()?);
                let parts = x.chunks(PART).zip(out.chunks_mut(PART)).collect();
                cpu.for_each_part(parts, |(x, out): (&[bf16], &mut [f32])| {
                    widen(cpu.isa(), x, out);
                });
            }
            (from, to) if from == to => {
                let (x, mut out) = (self.x.host_bytes()?, self.out.host_bytes_mut()?);
                let parts = x.chunks(PART).zip(out.chunks_mut(PART)).collect();
                cpu.for_each_part(parts, |(x, out): (&[u8], &mut [u8])| out.copy_from_slice(x));
            }
            (from, to) => {
                let what = format!("cannot cast {from} to {to}");
                return Err(DeviceError::Shape { op: Self::NAME, what });
            }
        }
        Ok(())
    }
}

/// Elements of one part of the work.
const PART: usize = 65_536;
