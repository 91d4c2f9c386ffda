//! SGD with momentum, as `torch.optim.SGD` without dampening: `g += λp; b = μb + g; p −= lr·b`, or with Nesterov's
//! momentum `p −= lr·(g + μb)`. Weight decay is a part of the gradient (L2), not decoupled. Without momentum there is no
//! state.

use crate::device::Isa;
use crate::device::cuda::KernelSource;
use crate::ops::cuda::UPDATE_HEADERS;
use crate::ops::{UpdateNumbers, UpdatePart, UpdateRule, kernel};

static SOURCE: KernelSource = KernelSource::with_headers("sgd.cu", include_str!("sgd.cu"), UPDATE_HEADERS);

/// The rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// μ
    pub momentum: f32,
    /// Nesterov's momentum.
    pub nesterov: bool,
}

impl UpdateRule for Sgd {
    fn name(&self) -> &'static str {
        "sgd"
    }

    fn slots(&self) -> &'static [&'static str] {
        if self.momentum > 0.0 {
            &["momentum_buffer"]
        } else {
            &[]
        }
    }

    fn source(&self) -> &'static KernelSource {
        &SOURCE
    }

    fn constants(&self, _step: u64) -> Vec<f32> {
        vec![self.momentum, f32::from(u8::from(self.nesterov))]
    }

    fn update(&self, isa: Isa, mut part: UpdatePart<'_>, numbers: &UpdateNumbers) {
        let factors = Factors {
            scale: numbers.scale,
            momentum: self.momentum,
            nesterov: self.nesterov,
            lr: numbers.rates.lr,
            weight_decay: numbers.rates.weight_decay,
        };
        match part.slots.pop() {
            Some(momentum) => with_momentum(isa, part.param, part.grad, momentum, factors),
            None => without_momentum(isa, part.param, part.grad, factors),
        }
    }
}

#[derive(Clone, Copy)]
struct Factors<T> {
    scale: T,
    momentum: T,
    nesterov: bool,
    lr: T,
    weight_decay: T,
}

kernel! {
    fn with_momentum<'a, T>(param: &'a mut [T], grad: &'a [T], buffer: &'a mut [T], f: Factors<T>) -> () {
        for ((p, &g), b) in param.iter_mut().zip(grad).zip(buffer) {
            let g = g * f.scale + f.weight_decay * *p;
            *b = f.momentum * *b + g;
            let update = if f.nesterov { g + f.momentum * *b } else { *b };
            *p = *p - f.lr * update;
        }
    }
}

kernel! {
    fn without_momentum<'a, T>(param: &'a mut [T], grad: &'a [T], f: Factors<T>) -> () {
        for (p, &g) in param.iter_mut().zip(grad) {
            *p = *p - f.lr * (g * f.scale + f.weight_decay * *p);
        }
    }
}
