//! Conversion between element types; also a plain copy.

use half::bf16;
use half::slice::HalfFloatSliceExt;

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

    fn run(&self, _cpu: &Cpu) -> Result<(), DeviceError> {
        expect_len(Self::NAME, "out", self.out.len(), self.x.len())?;
        match (self.x.dtype(), self.out.dtype()) {
            (DType::F32, DType::Bf16) => {
                self.out
                    .host_mut::<bf16>()?
                    .convert_from_f32_slice(&self.x.host::<f32>()?);
            }
            (DType::Bf16, DType::F32) => {
                self.x
                    .host::<bf16>()?
                    .convert_to_f32_slice(&mut self.out.host_mut::<f32>()?);
            }
            (from, to) if from == to => {
                self.out.host_bytes_mut()?.copy_from_slice(&self.x.host_bytes()?);
            }
            (from, to) => {
                return Err(DeviceError::Shape {
                    op: Self::NAME,
                    what: format!("cannot cast {from} to {to}"),
                });
            }
        }
        Ok(())
    }
}
