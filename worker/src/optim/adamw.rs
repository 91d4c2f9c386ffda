//! AdamW (Loshchilov & Hutter 2019, algorithm 2): `m = β₁m + (1−β₁)g; v = β₂v + (1−β₂)g²; p −= lr·(m̂/(√v̂ + ε) + λp)`.

use crate::device::Isa;
use crate::device::cuda::KernelSource;
use crate::ops::cuda::UPDATE_HEADERS;
use crate::ops::{UpdateNumbers, UpdatePart, UpdateRule, bias_correction, kernel};

static SOURCE: KernelSource =
    KernelSource::with_headers("adamw.cu", include_str!("adamw.cu"), UPDATE_HEADERS);

/// The rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Decays of both moments.
    pub betas: [f32; 2],
    /// Added to the denominator.
    pub eps: f32,
}

impl UpdateRule for AdamW {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn slots(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn source(&self) -> &'static KernelSource {
        &SOURCE
    }

    fn constants(&self, step: u64) -> Vec<f32> {
        let Factors {
            betas,
            shares,
            eps,
            corrections,
            ..
        } = self.factors(step);
        let [first, second] = corrections;
        vec![betas[0], shares[0], betas[1], shares[1], eps, first, second]
    }

    fn update(&self, isa: Isa, part: UpdatePart<'_>, numbers: &UpdateNumbers) {
        let factors = self.factors(numbers.step);
        let factors = Factors {
            scale: numbers.scale,
            corrections: numbers.corrections.unwrap_or(factors.corrections),
            lr: numbers.rates.lr,
            weight_decay: numbers.rates.weight_decay,
            ..factors
        };
        let Ok([m, v]) = <[&mut [f32]; 2]>::try_from(part.slots) else {
            unreachable!("AdamW has two slots");
        };
        update(isa, part.param, part.grad, m, v, factors);
    }
}

/// Constants of one update, each rounded once from f64.
#[derive(Clone, Copy)]
struct Factors<T> {
    scale: T,
    betas: [T; 2],
    /// 1 − β
    shares: [T; 2],
    /// 1/(1 − βᵗ)
    corrections: [T; 2],
    eps: T,
    lr: T,
    weight_decay: T,
}

impl AdamW {
    /// Without factor and rates; bias corrections after so many updates.
    fn factors(&self, updates: u64) -> Factors<f32> {
        let updates = i32::try_from(updates).unwrap_or(i32::MAX);
        Factors {
            scale: f32::NAN,
            betas: self.betas,
            shares: self.betas.map(|beta| (1.0 - f64::from(beta)) as f32),
            corrections: self.betas.map(|beta| bias_correction(beta, updates)),
            eps: self.eps,
            lr: f32::NAN,
            weight_decay: f32::NAN,
        }
    }
}

kernel! {
    fn update<'a, T>(
        param: &'a mut [T],
        grad: &'a [T],
        m: &'a mut [T],
        v: &'a mut [T],
        f: Factors<T>,
    ) -> () {
        for ((p, &g), (m, v)) in param.iter_mut().zip(grad).zip(m.iter_mut().zip(v)) {
            let g = g * f.scale;
            *m = f.betas[0] * *m + f.shares[0] * g;
            *v = f.betas[1] * *v + f.shares[1] * g * g;
            let update = *m * f.corrections[0] / ((*v * f.corrections[1]).sqrt() + f.eps);
            *p = *p - f.lr * (update + f.weight_decay * *p);
        }
    }
}
