//! The AdamW update (Loshchilov & Hutter 2019, algorithm 2), with decoupled weight decay.

use super::{CpuKernel, expect_len};
use crate::device::{Buffer, Cpu, DeviceError};

/// Numbers of one optimizer step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the denominator.
    pub eps: f32,
    /// Step number, from 1, for the bias correction.
    pub step: u64,
}

/// `m = β₁m + (1−β₁)g; v = β₂v + (1−β₂)g²; p −= lr·(m̂/(√v̂ + ε) + λp)` with `g = scale·grad`.
#[derive(Clone, Debug)]
pub struct AdamW {
    /// `[n]`, f32
    pub param: Buffer,
    /// `[n]`, f32
    pub grad: Buffer,
    /// First moment, `[n]`, f32
    pub m: Buffer,
    /// Second moment, `[n]`, f32
    pub v: Buffer,
    /// `[1]`, f32: factor of the gradient (clipping), computed on the device.
    pub scale: Buffer,
    /// λ; 0 for norms and biases.
    pub weight_decay: f32,
    /// Numbers of the step.
    pub hyper: AdamWStep,
}

impl CpuKernel for AdamW {
    const NAME: &'static str = "adamw";

    fn run(&self, _cpu: &Cpu) -> Result<(), DeviceError> {
        let n = self.param.len();
        for (name, buffer) in [("grad", &self.grad), ("m", &self.m), ("v", &self.v)] {
            expect_len(Self::NAME, name, buffer.len(), n)?;
        }
        let scale = self.scale.host::<f32>()?[0];
        let mut param = self.param.host_mut::<f32>()?;
        let grad = self.grad.host::<f32>()?;
        let mut m = self.m.host_mut::<f32>()?;
        let mut v = self.v.host_mut::<f32>()?;
        let AdamWStep {
            lr,
            beta1,
            beta2,
            eps,
            step,
        } = self.hyper;
        let step = step.min(i32::MAX as u64) as i32;
        let m_correction = 1.0 / (1.0 - beta1.powi(step));
        let v_correction = 1.0 / (1.0 - beta2.powi(step));
        for i in 0..n {
            let g = grad[i] * scale;
            m[i] = beta1 * m[i] + (1.0 - beta1) * g;
            v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
            let update = m[i] * m_correction / ((v[i] * v_correction).sqrt() + eps);
            param[i] -= lr * (update + self.weight_decay * param[i]);
        }
        Ok(())
    }
}
