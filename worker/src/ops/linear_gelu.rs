//! A linear layer with the GELU behind it, and its way back, each as one operation: a GPU can do both while a product
//! is still in its registers. Elsewhere they are the operations of [`super::linear`] and [`super::gelu`], bit for bit.

use super::{CpuKernel, GeluBackward, GeluForward, LinearDinp, LinearForward, LinearShape, expect_len};
use crate::device::{Buffer, Cpu, DeviceError};

/// `wide = inp · weight + bias`, `out = gelu(wide)`
#[derive(Clone, Debug)]
pub struct LinearGeluForward {
    /// `[R, I]`
    pub inp: Buffer,
    /// `[I, O]` or `[O, I]`
    pub weight: Buffer,
    /// `[O]`
    pub bias: Buffer,
    /// `[R, O]`: written, for backward.
    pub wide: Buffer,
    /// `[R, O]`
    pub out: Buffer,
    /// Sizes.
    pub shape: LinearShape,
}

impl LinearGeluForward {
    /// The two operations that it stands for, in order.
    pub(super) fn parts(&self) -> (LinearForward, GeluForward) {
        let linear = LinearForward {
            inp: self.inp.clone(),
            weight: self.weight.clone(),
            bias: Some(self.bias.clone()),
            residual: None,
            out: self.wide.clone(),
            shape: self.shape,
        };
        let gelu = GeluForward {
            inp: self.wide.clone(),
            out: self.out.clone(),
        };
        (linear, gelu)
    }
}

impl CpuKernel for LinearGeluForward {
    const NAME: &'static str = "linear_gelu_forward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        expect_len(Self::NAME, "out", self.out.len(), self.wide.len())?;
        let (linear, gelu) = self.parts();
        linear.run(cpu)?;
        gelu.run(cpu)
    }
}

/// `dwide = (dout · weightᵀ) ⊙ gelu′(wide)` through the layer behind the GELU, and `wide` becomes `gelu(wide)`, that
/// layer's input, which need not be kept from forward to backward.
#[derive(Clone, Debug)]
pub struct LinearGeluBackward {
    /// `[R, O]`
    pub dout: Buffer,
    /// `[I, O]` or `[O, I]`
    pub weight: Buffer,
    /// `[R, I]`: `wide`, becomes `gelu(wide)`
    pub wide_active: Buffer,
    /// `[R, I]`
    pub dwide: Buffer,
    /// Sizes of the layer behind the GELU.
    pub shape: LinearShape,
}

impl LinearGeluBackward {
    /// The two operations that it stands for, in order.
    pub(super) fn parts(&self) -> (LinearDinp, GeluBackward) {
        let linear = LinearDinp {
            dout: self.dout.clone(),
            weight: self.weight.clone(),
            dinp: self.dwide.clone(),
            shape: self.shape,
        };
        let gelu = GeluBackward {
            inp_out: self.wide_active.clone(),
            dout_dinp: self.dwide.clone(),
        };
        (linear, gelu)
    }
}

impl CpuKernel for LinearGeluBackward {
    const NAME: &'static str = "linear_gelu_backward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        expect_len(Self::NAME, "wide", self.wide_active.len(), self.dwide.len())?;
        let (linear, gelu) = self.parts();
        linear.run(cpu)?;
        gelu.run(cpu)
    }
}
