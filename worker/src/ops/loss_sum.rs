//! The sum of losses, which stays on the device until the host asks for the numbers of the step.

use super::{CpuKernel, expect_len};
use crate::device::{Buffer, Cpu, DType, DeviceError, Element};

/// `total += Σ losses[r]`, in f64; without `accumulate`, `total = Σ losses[r]`
#[derive(Clone, Debug)]
pub struct LossSum {
    /// `[R]`, f32 or f64: losses of [`super::CrossEntropy`]
    pub losses: Buffer,
    /// `[1]`, f64
    pub total: Buffer,
    /// Add to what is there.
    pub accumulate: bool,
}

impl CpuKernel for LossSum {
    const NAME: &'static str = "loss_sum";

    fn run(&self, _cpu: &Cpu) -> Result<(), DeviceError> {
        match self.losses.dtype() {
            DType::F64 => self.compute::<f64>(),
            // Any other type is refused there.
            _ => self.compute::<f32>(),
        }
    }
}

impl LossSum {
    fn compute<T: Element + Into<f64>>(&self) -> Result<(), DeviceError> {
        expect_len(Self::NAME, "total", self.total.len(), 1)?;
        let sum: f64 = self.losses.host::<T>()?.iter().map(|&loss| loss.into()).sum();
        let mut total = self.total.host_mut::<f64>()?;
        total[0] = if self.accumulate { total[0] + sum } else { sum };
        Ok(())
    }
}
