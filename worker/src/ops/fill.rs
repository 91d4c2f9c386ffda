//! Constants: fill a buffer, scale a buffer in place.

use super::CpuKernel;
use crate::device::{Buffer, Cpu, DType, DeviceError};

/// `out[i] = value`
#[derive(Clone, Debug)]
pub struct Fill {
    /// `[n]`, f32, bf16 or f64
    pub out: Buffer,
    /// Rounded to the type of `out`.
    pub value: f64,
}

impl CpuKernel for Fill {
    const NAME: &'static str = "fill";

    fn run(&self, _cpu: &Cpu) -> Result<(), DeviceError> {
        match self.out.dtype() {
            DType::F64 => self.out.host_mut::<f64>()?.fill(self.value),
            DType::Bf16 => self
                .out
                .host_mut::<half::bf16>()?
                .fill(half::bf16::from_f64(self.value)),
            _ => self.out.host_mut::<f32>()?.fill(self.value as f32),
        }
        Ok(())
    }
}

/// `x[i] = x[i] · factor`
#[derive(Clone, Debug)]
pub struct Scale {
    /// `[n]`, f32
    pub x: Buffer,
    /// The factor.
    pub factor: f32,
}

impl CpuKernel for Scale {
    const NAME: &'static str = "scale";

    fn run(&self, _cpu: &Cpu) -> Result<(), DeviceError> {
        for x in self.x.host_mut::<f32>()?.iter_mut() {
            *x *= self.factor;
        }
        Ok(())
    }
}
