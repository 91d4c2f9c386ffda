//! The AdamW update (Loshchilov & Hutter 2019, algorithm 2), with decoupled weight decay.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::kernel::kernel;
use super::stored::{Stored, narrow};
use super::{CpuKernel, expect_len};
use crate::device::{Buffer, Cpu, DType, DeviceError};

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

/// `m = β₁m + (1−β₁)g; v = β₂v + (1−β₂)g²; p −= lr·(m̂/(√v̂ + ε) + λp)` with `g = scale·grad`. Nothing changes if `scale` is
/// not finite: the step is skipped.
#[derive(Clone, Debug)]
pub struct AdamW {
    /// `[n]`, f32: the parameter, or the master of one that is used in bf16.
    pub param: Buffer,
    /// `[n]`, bf16: becomes `param`, rounded to nearest even. [`crate::optim::HostBacked`] takes f32 too.
    pub copy: Option<Buffer>,
    /// `[n]`, f32 or bf16
    pub grad: Buffer,
    /// First moment, `[n]`, f32
    pub m: Buffer,
    /// Second moment, `[n]`, f32
    pub v: Buffer,
    /// `[1]`, f32: factor of the gradient, computed on the device by [`super::ClipScale`].
    pub scale: Buffer,
    /// λ
    pub weight_decay: f32,
    /// Elements that do not decay, those of norms and biases: in order, none twice.
    pub spared: Arc<[Range<usize>]>,
    /// Numbers of the step.
    pub hyper: AdamWStep,
}

impl CpuKernel for AdamW {
    const NAME: &'static str = "adamw";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        match self.grad.dtype() {
            DType::Bf16 => self.compute::<bf16>(cpu),
            // Any other type is refused there.
            _ => self.compute::<f32>(cpu),
        }
    }
}

impl AdamW {
    fn compute<G: Stored<Real = f32>>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let n = self.param.len();
        if let Some(copy) = &self.copy {
            expect_len(Self::NAME, "copy", copy.len(), n)?;
        }
        for (name, buffer) in [("grad", &self.grad), ("m", &self.m), ("v", &self.v)] {
            expect_len(Self::NAME, name, buffer.len(), n)?;
        }
        expect_len(Self::NAME, "scale", self.scale.len(), 1)?;
        let scale = self.scale.host::<f32>()?[0];
        let mut copy = self.copy.as_ref().map(Buffer::host_mut::<bf16>).transpose()?;
        let grad = self.grad.host::<G>()?;
        self.runs().iter().try_for_each(|run| {
            let copy = copy.as_mut().map(|copy| &mut copy[run.elements.clone()]);
            sweep(
                cpu,
                [&self.param, &self.m, &self.v],
                (&grad, copy),
                run,
                Factors::new(self, scale),
            )
        })
    }

    /// Neighbours that decay alike, in order.
    fn runs(&self) -> Vec<Run> {
        let mut runs = Vec::new();
        let mut end = 0;
        let mut push = |elements: Range<usize>, weight_decay| {
            if !elements.is_empty() {
                runs.push(Run {
                    elements,
                    weight_decay,
                });
            }
        };
        for spared in self.spared.iter() {
            push(end..spared.start, self.weight_decay);
            push(spared.clone(), 0.0);
            end = spared.end;
        }
        push(end..self.param.len(), self.weight_decay);
        runs
    }

    /// The update of some of the elements.
    #[must_use]
    pub fn slice(&self, range: &Range<usize>) -> Self {
        let of = |buffer: &Buffer| buffer.slice(range.clone());
        let within = |at: usize| at.clamp(range.start, range.end) - range.start;
        let spared = self
            .spared
            .iter()
            .map(|spared| within(spared.start)..within(spared.end));
        Self {
            spared: spared.filter(|spared| !spared.is_empty()).collect(),
            param: of(&self.param),
            copy: self.copy.as_ref().map(of),
            grad: of(&self.grad),
            m: of(&self.m),
            v: of(&self.v),
            ..self.clone()
        }
    }

    /// The same for a gradient and a factor that are brought to the host. The copy is left to the caller.
    pub(crate) fn on_host(&self) -> HostUpdate {
        HostUpdate {
            state: [&self.param, &self.m, &self.v].map(Buffer::clone),
            grad: self.grad.dtype(),
            runs: self.runs(),
            // The factor comes later.
            factors: Factors::new(self, f32::NAN),
        }
    }
}

/// An update that knows only its memory on the host.
pub(crate) struct HostUpdate {
    /// Parameter and both moments, `[n]`, f32.
    state: [Buffer; 3],
    /// Type of the gradient.
    grad: DType,
    runs: Vec<Run>,
    factors: Factors<f32>,
}

impl HostUpdate {
    /// `grad` is `[n]`, in bytes, aligned for its type.
    pub(crate) fn run(&self, cpu: &Cpu, grad: &[u8], scale: f32) -> Result<(), DeviceError> {
        let factors = Factors {
            scale,
            ..self.factors
        };
        let state = self.state.each_ref();
        self.runs.iter().try_for_each(|run| match self.grad {
            DType::Bf16 => sweep::<bf16>(cpu, state, (bytemuck::cast_slice(grad), None), run, factors),
            _ => sweep::<f32>(cpu, state, (bytemuck::cast_slice(grad), None), run, factors),
        })
    }
}

/// Elements of an update that have the same λ.
struct Run {
    elements: Range<usize>,
    weight_decay: f32,
}

/// Updates parameter and moments of a run, and its copy if there is one. State and gradient are those of all runs.
fn sweep<G: Stored<Real = f32>>(
    cpu: &Cpu,
    state: [&Buffer; 3],
    (grad, copy): (&[G], Option<&mut [bf16]>),
    run: &Run,
    factors: Factors<f32>,
) -> Result<(), DeviceError> {
    if !factors.scale.is_finite() {
        return Ok(());
    }
    let factors = Factors {
        weight_decay: run.weight_decay,
        ..factors
    };
    let grad = &grad[run.elements.clone()];
    let [param, m, v] = state.map(|buffer| buffer.slice(run.elements.clone()));
    let mut param = param.host_mut::<f32>()?;
    let mut m = m.host_mut::<f32>()?;
    let mut v = v.host_mut::<f32>()?;
    let mut copies = copy.map(|copy| copy.chunks_mut(PART));
    let parts = param
        .chunks_mut(PART)
        .zip(grad.chunks(PART))
        .zip(m.chunks_mut(PART).zip(v.chunks_mut(PART)))
        .map(|((param, grad), (m, v))| (param, grad, m, v, copies.as_mut().and_then(Iterator::next)))
        .collect();
    let isa = cpu.isa();
    cpu.for_each_part(parts, |(param, grad, m, v, copy): Slices<'_, G>| {
        G::read(isa, grad, |grad| update(isa, Part { param, grad, m, v }, factors));
        if let Some(copy) = copy {
            narrow(isa, param, copy);
        }
    });
    Ok(())
}

/// Elements of one part of the work.
const PART: usize = 16_384;

/// Parameter, gradient, both moments and copy of one part.
type Slices<'a, G> = (
    &'a mut [f32],
    &'a [G],
    &'a mut [f32],
    &'a mut [f32],
    Option<&'a mut [bf16]>,
);

struct Part<'a, T> {
    param: &'a mut [T],
    grad: &'a [T],
    m: &'a mut [T],
    v: &'a mut [T],
}

/// Constants of one update, each rounded once from f64.
#[derive(Clone, Copy)]
pub(super) struct Factors<T> {
    pub(super) scale: T,
    pub(super) betas: [T; 2],
    /// 1 − β
    pub(super) shares: [T; 2],
    /// 1/(1 − βᵗ)
    pub(super) corrections: [T; 2],
    pub(super) eps: T,
    pub(super) lr: T,
    pub(super) weight_decay: T,
}

impl Factors<f32> {
    pub(super) fn new(op: &AdamW, scale: f32) -> Self {
        let AdamWStep {
            lr,
            beta1,
            beta2,
            eps,
            step,
        } = op.hyper;
        let betas = [beta1, beta2];
        let exponent = i32::try_from(step).unwrap_or(i32::MAX);
        Self {
            scale,
            betas,
            shares: betas.map(|beta| (1.0 - f64::from(beta)) as f32),
            corrections: betas.map(|beta| (1.0 / (1.0 - f64::from(beta).powi(exponent))) as f32),
            eps,
            lr,
            weight_decay: op.weight_decay,
        }
    }
}

kernel! {
    fn update<'a, T>(part: Part<'a, T>, f: Factors<T>) -> () {
        let Part { param, grad, m, v } = part;
        for ((p, &g), (m, v)) in param.iter_mut().zip(grad).zip(m.iter_mut().zip(v)) {
            let g = g * f.scale;
            *m = f.betas[0] * *m + f.shares[0] * g;
            *v = f.betas[1] * *v + f.shares[1] * g * g;
            let update = *m * f.corrections[0] / ((*v * f.corrections[1]).sqrt() + f.eps);
            *p = *p - f.lr * (update + f.weight_decay * *p);
        }
    }
}
