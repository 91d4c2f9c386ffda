//! Lion (Chen et al. 2023, algorithm 2): `c = β₁m + (1−β₁)g; p −= lr·(sign(c) + λp); m = β₂m + (1−β₂)g`.

use crate::device::Isa;
use crate::device::cuda::KernelSource;
use crate::ops::cuda::UPDATE_HEADERS;
use crate::ops::{UpdateNumbers, UpdatePart, UpdateRule, kernel};

static SOURCE: KernelSource = KernelSource::with_headers("lion.cu", include_str!("lion.cu"), UPDATE_HEADERS);

/// The rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    /// Decay of the mean that gives the sign, and of the mean that is kept.
    pub betas: [f32; 2],
}

impl UpdateRule for Lion {
    fn name(&self) -> &'static str {
        "lion"
    }

    fn slots(&self) -> &'static [&'static str] {
        &["exp_avg"]
    }

    fn source(&self) -> &'static KernelSource {
        &SOURCE
    }

    fn constants(&self, _step: u64) -> Vec<f32> {
        let [first, second] = self.shares();
        vec![self.betas[0], first, self.betas[1], second]
    }

    fn update(&self, isa: Isa, part: UpdatePart<'_>, numbers: &UpdateNumbers) {
        let factors = Factors {
            scale: numbers.scale,
            betas: self.betas,
            shares: self.shares(),
            lr: numbers.rates.lr,
            weight_decay: numbers.rates.weight_decay,
        };
        let Ok([m]) = <[&mut [f32]; 1]>::try_from(part.slots) else {
            unreachable!("Lion has one slot");
        };
        update(isa, part.param, part.grad, m, factors);
    }
}

impl Lion {
    /// 1 − β, rounded once from f64.
    fn shares(self) -> [f32; 2] {
        self.betas.map(|beta| (1.0 - f64::from(beta)) as f32)
    }
}

#[derive(Clone, Copy)]
struct Factors<T> {
    scale: T,
    betas: [T; 2],
    shares: [T; 2],
    lr: T,
    weight_decay: T,
}

kernel! {
    fn update<'a, T>(param: &'a mut [T], grad: &'a [T], m: &'a mut [T], f: Factors<T>) -> () {
        for ((p, &g), m) in param.iter_mut().zip(grad).zip(m) {
            let g = g * f.scale;
            let c = f.betas[0] * *m + f.shares[0] * g;
            let up = if c > T::ZERO { T::ONE } else { T::ZERO };
            let down = if c < T::ZERO { T::ONE } else { T::ZERO };
            *p = *p - f.lr * (up - down + f.weight_decay * *p);
            *m = f.betas[1] * *m + f.shares[1] * g;
        }
    }
}
