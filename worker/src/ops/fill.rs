//! Constants: fill a buffer, scale a buffer in place.

use super::CpuKernel;
use super::kernel::kernel;
use super::stored::Stored;
use crate::device::{Buffer, Cpu, DType, DeviceError, Element};

/// Elements of one part of the work.
const PART: usize = 65_536;

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

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        match self.out.dtype() {
            DType::F64 => self.fill(cpu, self.value),
            DType::Bf16 => self.fill(cpu, half::bf16::from_f64(self.value)),
            // Any other type is refused there.
            _ => self.fill(cpu, self.value as f32),
        }
    }
}

impl Fill {
    fn fill<T: Element>(&self, cpu: &Cpu, value: T) -> Result<(), DeviceError> {
        let mut out = self.out.host_mut::<T>()?;
        cpu.for_each_part(out.chunks_mut(PART).collect(), |out: &mut [T]| out.fill(value));
        Ok(())
    }
}

/// `x[i] = x[i] · factor`
#[derive(Clone, Debug)]
pub struct Scale {
    /// `[n]`, f32 or bf16
    pub x: Buffer,
    /// The factor; the product is rounded to the type of `x`.
    pub factor: f32,
}

impl CpuKernel for Scale {
    const NAME: &'static str = "scale";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        match self.x.dtype() {
            DType::Bf16 => self.scale::<half::bf16>(cpu),
            // Any other type is refused there.
            _ => self.scale::<f32>(cpu),
        }
    }
}

impl Scale {
    fn scale<T: Stored<Real = f32>>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let (mut x, isa) = (self.x.host_mut::<T>()?, cpu.isa());
        cpu.for_each_part(x.chunks_mut(PART).collect(), |x: &mut [T]| {
            T::write(isa, x, true, |x| multiply(isa, x, self.factor));
        });
        Ok(())
    }
}

kernel! {
    /// `x[i] *= factor`
    fn multiply<'a, T>(x: &'a mut [T], factor: T) -> () {
        for x in x.iter_mut() {
            *x *= factor;
        }
    }
}
