//! Softmax and cross-entropy in one: the probabilities exist only as the gradient.

use super::kernel::{by_dtype, kernel};
use super::real::{Real, ln, max_of, sum_map};
use super::stored::Stored;
use super::{CpuKernel, expect_len};
use crate::device::{Buffer, Cpu, DeviceError, Isa};

/// Rows of one part of the work.
const ROWS: usize = 16;

/// `loss[r] = ln Σ_v e^logits[r, v] − logits[r, targets[r]]`; 0 where the target is negative
#[derive(Clone, Debug)]
pub struct CrossEntropyForward {
    /// `[R, V]`
    pub logits: Buffer,
    /// `[R]`, i32
    pub targets: Buffer,
    /// `[R]`, f32 (f64 if the logits are)
    pub losses: Buffer,
    /// `[R]`, as `losses`: ln Σ e^logits, for backward
    pub lse: Buffer,
}

impl CpuKernel for CrossEntropyForward {
    const NAME: &'static str = "cross_entropy_forward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtype!(Self::NAME, self.logits.dtype(), S => self.compute::<S>(cpu))
    }
}

impl CrossEntropyForward {
    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let targets = self.targets.host::<i32>()?;
        let vocab = vocabulary(Self::NAME, &self.logits, &targets)?;
        expect_len(Self::NAME, "losses", self.losses.len(), targets.len())?;
        expect_len(Self::NAME, "lse", self.lse.len(), targets.len())?;
        let logits = self.logits.host::<S>()?;
        let (mut losses, mut lse) = (
            self.losses.host_mut::<S::Real>()?,
            self.lse.host_mut::<S::Real>()?,
        );
        let parts = logits
            .chunks(ROWS * vocab)
            .zip(targets.chunks(ROWS))
            .zip(losses.chunks_mut(ROWS).zip(lse.chunks_mut(ROWS)))
            .collect();
        let isa = cpu.isa();
        cpu.for_each_part(parts, |((logits, targets), (losses, lse)): Rows<'_, S>| {
            let rows = logits.chunks_exact(vocab).zip(targets);
            for ((logits, &target), (loss, lse)) in rows.zip(losses.iter_mut().zip(lse)) {
                // A row at a time: that much is widened.
                S::read(isa, logits, |logits| {
                    *lse = log_sum(isa, logits);
                    let target = usize::try_from(target).ok();
                    *loss = target.map_or(S::Real::ZERO, |target| *lse - logits[target]);
                });
            }
        });
        Ok(())
    }
}

/// Logits, targets, losses and logarithms of some rows.
type Rows<'a, S> = (
    (&'a [S], &'a [i32]),
    (&'a mut [<S as Stored>::Real], &'a mut [<S as Stored>::Real]),
);

/// `dlogits[r, v] = (softmax(logits[r])[v] − [v = targets[r]]) · dlosses[r]`, in place; 0 where the target is negative
#[derive(Clone, Debug)]
pub struct CrossEntropyBackward {
    /// `[R, V]`: `logits`, becomes `dlogits`
    pub logits_dlogits: Buffer,
    /// `[R]`, i32
    pub targets: Buffer,
    /// `[R]`, f32 (f64 if the logits are): of forward
    pub lse: Buffer,
    /// `[R]`, as `lse`
    pub dlosses: Buffer,
}

impl CpuKernel for CrossEntropyBackward {
    const NAME: &'static str = "cross_entropy_backward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtype!(Self::NAME, self.logits_dlogits.dtype(), S => self.compute::<S>(cpu))
    }
}

impl CrossEntropyBackward {
    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let targets = self.targets.host::<i32>()?;
        let vocab = vocabulary(Self::NAME, &self.logits_dlogits, &targets)?;
        expect_len(Self::NAME, "dlosses", self.dlosses.len(), targets.len())?;
        expect_len(Self::NAME, "lse", self.lse.len(), targets.len())?;
        let (lse, dlosses) = (self.lse.host::<S::Real>()?, self.dlosses.host::<S::Real>()?);
        let mut logits = self.logits_dlogits.host_mut::<S>()?;
        let (targets, lse, dlosses) = (&*targets, &*lse, &*dlosses);
        let parts = logits.chunks_mut(vocab).enumerate().collect();
        let isa = cpu.isa();
        cpu.for_each_part(parts, |(row, logits): (usize, &mut [S])| {
            S::write(isa, logits, true, |logits| {
                row_back(isa, logits, targets[row], lse[row], dlosses[row]);
            });
        });
        Ok(())
    }
}

fn row_back<T: Real>(isa: Isa, logits: &mut [T], target: i32, lse: T, dloss: T) {
    match usize::try_from(target) {
        Ok(target) => {
            probabilities(isa, logits, lse, dloss);
            logits[target] = logits[target] - dloss;
        }
        Err(_) => logits.fill(T::ZERO),
    }
}

kernel! {
    /// `ln Σ e^logits[v]`
    fn log_sum<'a, T>(logits: &'a [T]) -> T {
        let max = max_of(logits);
        max + T::of(ln(sum_map(logits, |x| (x - max).exp()).to_f64()))
    }
}

kernel! {
    /// `x[v] = e^(x[v] − lse) · factor`
    fn probabilities<'a, T>(x: &'a mut [T], lse: T, factor: T) -> () {
        for x in x.iter_mut() {
            *x = (*x - lse).exp() * factor;
        }
    }
}

/// Size of the vocabulary; refuses targets outside it.
fn vocabulary(op: &'static str, logits: &Buffer, targets: &[i32]) -> Result<usize, DeviceError> {
    let vocab = logits.len() / targets.len().max(1);
    expect_len(op, "logits", logits.len(), targets.len() * vocab)?;
    super::expect_tokens(op, "targets", targets, i32::MIN, vocab)?;
    Ok(vocab.max(1))
}
