//! The rules of optimizers: the formula of one element on the CPU, its state slots and constants. Each is the formula of
//! the `.cu` file of its name, which is given the same constants.

use std::sync::Arc;

use crate::config::{OptimizerConfig, OptimizerKind};
use crate::cuda::KernelSource;
use crate::device::Buffer;
use crate::ops::cuda::kernels;
use crate::ops::{Rates, Runs, Update, UpdateNumbers, UpdatePart, UpdateRule, kernel};
use crate::parallel::{ArenaRanges, ArenaShare};

/// The rule that a configuration asks for.
pub fn rule(config: &OptimizerConfig) -> Arc<UpdateRule> {
    match config.kind {
        // Of what is no matrix of a block: `muon` updates these.
        OptimizerKind::Adamw | OptimizerKind::Muon => adamw(config.betas(), config.eps),
        OptimizerKind::Lion => lion(config.betas()),
        OptimizerKind::Sgd => sgd(config.momentum(), config.nesterov()),
    }
}

/// What the updates of a step read and write.
pub(super) struct StepMemory<'a> {
    /// f32: the masters, or the parameters.
    pub(super) params: &'a ArenaShare,
    /// The parameters, where there are masters.
    pub(super) copies: Option<&'a ArenaShare>,
    pub(super) grads: &'a ArenaShare,
    pub(super) slots: &'a [ArenaShare],
    /// As [`Update::scale`].
    pub(super) scale: &'a Buffer,
    /// One for each parameter group.
    pub(super) rates: Arc<[Rates]>,
    /// Number of the step, from 1.
    pub(super) number: u64,
}

impl StepMemory<'_> {
    /// The update of a place by a rule, which has the first of the slots.
    pub(super) fn update(&self, rule: &Arc<UpdateRule>, place: &ArenaRanges, runs: Runs) -> Update {
        let slots = self.slots.iter().take(rule.slots.len());
        Update {
            rule: rule.clone(),
            param: self.params.slice(place),
            copy: self.copies.map(|copies| copies.slice(place)),
            grad: self.grads.slice(place),
            slots: slots.map(|slot| slot.slice(place)).collect(),
            scale: self.scale.clone(),
            runs,
            step: self.number,
        }
    }
}

/// 1 − β, rounded once from f64.
fn share(beta: f32) -> f32 {
    (1.0 - f64::from(beta)) as f32
}

/// A constant that is 0 or 1.
fn flag(value: bool) -> f32 {
    f32::from(u8::from(value))
}

static ADAMW: KernelSource = kernels("adamw.cu", include_str!("adamw.cu"));

/// AdamW (Loshchilov & Hutter 2019, algorithm 2) with the decays of both moments and what is added to the denominator:
/// `m = β₁m + (1−β₁)g; v = β₂v + (1−β₂)g²; p −= lr·(m̂/(√v̂ + ε) + λp)`.
pub fn adamw(betas: [f32; 2], eps: f32) -> Arc<UpdateRule> {
    let [first, second] = betas;
    Arc::new(UpdateRule {
        name: "adamw",
        slots: &["exp_avg", "exp_avg_sq"],
        source: &ADAMW,
        constants: vec![first, share(first), second, share(second), eps],
        corrected: Some(betas),
        kernel: adamw_kernel,
    })
}

kernel! {
    fn adamw_kernel<'a, T>(part: UpdatePart<'a, T>, numbers: UpdateNumbers<'a, T>) -> () {
        let UpdateNumbers { scale, lr, weight_decay, .. } = numbers;
        let [beta1, share1, beta2, share2, eps, correction1, correction2] = numbers.constants();
        let (param, grad, [m, v]) = part.split();
        for ((p, &g), (m, v)) in param.iter_mut().zip(grad).zip(m.iter_mut().zip(v)) {
            let g = g * scale;
            *m = beta1 * *m + share1 * g;
            *v = beta2 * *v + share2 * g * g;
            let update = *m * correction1 / ((*v * correction2).sqrt() + eps);
            *p = *p - lr * (update + weight_decay * *p);
        }
    }
}

static LION: KernelSource = kernels("lion.cu", include_str!("lion.cu"));

/// Lion (Chen et al. 2023, algorithm 2) with the decays of the mean that gives the sign, and of the mean that is kept:
/// `c = β₁m + (1−β₁)g; p −= lr·(sign(c) + λp); m = β₂m + (1−β₂)g`.
pub fn lion([first, second]: [f32; 2]) -> Arc<UpdateRule> {
    Arc::new(UpdateRule {
        name: "lion",
        slots: &["exp_avg"],
        source: &LION,
        constants: vec![first, share(first), second, share(second)],
        corrected: None,
        kernel: lion_kernel,
    })
}

kernel! {
    fn lion_kernel<'a, T>(part: UpdatePart<'a, T>, numbers: UpdateNumbers<'a, T>) -> () {
        let UpdateNumbers { scale, lr, weight_decay, .. } = numbers;
        let [beta1, share1, beta2, share2] = numbers.constants();
        let (param, grad, [m]) = part.split();
        for ((p, &g), m) in param.iter_mut().zip(grad).zip(m) {
            let g = g * scale;
            let c = beta1 * *m + share1 * g;
            let up = if c > T::ZERO { T::ONE } else { T::ZERO };
            let down = if c < T::ZERO { T::ONE } else { T::ZERO };
            *p = *p - lr * (up - down + weight_decay * *p);
            *m = beta2 * *m + share2 * g;
        }
    }
}

static SGD: KernelSource = kernels("sgd.cu", include_str!("sgd.cu"));

/// SGD with momentum μ, as `torch.optim.SGD` without dampening: `g += λp; b = μb + g; p −= lr·b`, or with Nesterov's
/// momentum `p −= lr·(g + μb)`. Weight decay is a part of the gradient (L2), not decoupled. Without momentum there is no
/// state.
pub fn sgd(momentum: f32, nesterov: bool) -> Arc<UpdateRule> {
    let has_momentum = momentum > 0.0;
    Arc::new(UpdateRule {
        name: "sgd",
        slots: if has_momentum { &["momentum_buffer"] } else { &[] },
        source: &SGD,
        constants: vec![momentum, flag(nesterov)],
        corrected: None,
        kernel: if has_momentum {
            sgd_kernel
        } else {
            plain_sgd_kernel
        },
    })
}

kernel! {
    fn sgd_kernel<'a, T>(part: UpdatePart<'a, T>, numbers: UpdateNumbers<'a, T>) -> () {
        let UpdateNumbers { scale, lr, weight_decay, .. } = numbers;
        let [momentum, nesterov] = numbers.constants();
        let nesterov = nesterov != T::ZERO;
        let (param, grad, [buffer]) = part.split();
        for ((p, &g), b) in param.iter_mut().zip(grad).zip(buffer) {
            let g = g * scale + weight_decay * *p;
            *b = momentum * *b + g;
            let update = if nesterov { g + momentum * *b } else { *b };
            *p = *p - lr * update;
        }
    }
}

kernel! {
    fn plain_sgd_kernel<'a, T>(part: UpdatePart<'a, T>, numbers: UpdateNumbers<'a, T>) -> () {
        let UpdateNumbers { scale, lr, weight_decay, .. } = numbers;
        let (param, grad, []) = part.split();
        for (p, &g) in param.iter_mut().zip(grad) {
            *p = *p - lr * (g * scale + weight_decay * *p);
        }
    }
}

static MUON: KernelSource = kernels("muon.cu", include_str!("muon.cu"));

/// `m = μm + (1−μ)g`, and the parameter, which is not read, becomes Muon's `d`.
pub fn muon_momentum(momentum: f32, nesterov: bool) -> Arc<UpdateRule> {
    Arc::new(UpdateRule {
        name: "muon_momentum",
        slots: &["exp_avg"],
        source: &MUON,
        constants: vec![momentum, share(momentum), flag(nesterov)],
        corrected: None,
        kernel: muon_momentum_kernel,
    })
}

kernel! {
    fn muon_momentum_kernel<'a, T>(part: UpdatePart<'a, T>, numbers: UpdateNumbers<'a, T>) -> () {
        let [momentum, share, nesterov] = numbers.constants();
        let nesterov = nesterov != T::ZERO;
        let (direction, grad, [m]) = part.split();
        for ((d, &g), m) in direction.iter_mut().zip(grad).zip(m) {
            let g = g * numbers.scale;
            *m = momentum * *m + share * g;
            *d = if nesterov { share * g + momentum * *m } else { *m };
        }
    }
}

/// `p = keep·p + add·scale·g`; without `keep` whatever `p` is.
pub fn muon_blend(keep: f32, add: f32) -> Arc<UpdateRule> {
    Arc::new(UpdateRule {
        name: "muon_blend",
        slots: &[],
        source: &MUON,
        constants: vec![keep, add],
        corrected: None,
        kernel: muon_blend_kernel,
    })
}

kernel! {
    fn muon_blend_kernel<'a, T>(part: UpdatePart<'a, T>, numbers: UpdateNumbers<'a, T>) -> () {
        let [keep, add] = numbers.constants();
        let (x, y, []) = part.split();
        for (x, &y) in x.iter_mut().zip(y) {
            let kept = if keep == T::ZERO { T::ZERO } else { keep * *x };
            *x = kept + add * (y * numbers.scale);
        }
    }
}

/// `p −= lr·(g + λp)`, whatever the factor of the gradient is, if it is finite.
pub fn muon_descend() -> Arc<UpdateRule> {
    Arc::new(UpdateRule {
        name: "muon_descend",
        slots: &[],
        source: &MUON,
        constants: Vec::new(),
        corrected: None,
        kernel: muon_descend_kernel,
    })
}

kernel! {
    fn muon_descend_kernel<'a, T>(part: UpdatePart<'a, T>, numbers: UpdateNumbers<'a, T>) -> () {
        let UpdateNumbers { lr, weight_decay, .. } = numbers;
        let (param, direction, []) = part.split();
        for (p, &g) in param.iter_mut().zip(direction) {
            *p = *p - lr * (g + weight_decay * *p);
        }
    }
}
