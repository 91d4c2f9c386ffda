//! Softmax and cross-entropy in one, and the gradient with them: the probabilities exist only as the gradient.
//!
//! The factor of a row's gradient is known before its loss, so that one operation makes both while the row is in the
//! caches: memory is read and written once.

use super::kernel::{by_dtype, kernel};
use super::real::{Real, ln, max_of, sum_map};
use super::stored::Stored;
use super::{CpuKernel, expect_len};
use crate::device::{Buffer, Cpu, DeviceError, Isa};

/// Rows of one part of the work: few, because a row may have 50,000 exponentials.
const ROWS: usize = 4;

/// `losses[r] = ln Σ_v e^logits[r, v] − logits[r, targets[r]]`; 0 where the target is negative. With `dlosses` the logits
/// become their gradients,
/// `dlogits[r, v] = (softmax(logits[r])[v] − [v = targets[r]]) · dlosses[r]`, in place; 0 where the target is negative.
#[derive(Clone, Debug)]
pub struct CrossEntropy {
    /// `[R, V]`: `logits`, becomes `dlogits` if there are `dlosses`
    pub logits: Buffer,
    /// `[R]`, i32
    pub targets: Buffer,
    /// `[R]`, f32 (f64 if the logits are)
    pub losses: Buffer,
    /// `[R]`, as `losses`: factors of the gradients, for training. None leaves the logits as they are.
    pub dlosses: Option<Buffer>,
}

impl CpuKernel for CrossEntropy {
    const NAME: &'static str = "cross_entropy";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtype!(Self::NAME, self.logits.dtype(), S => self.compute::<S>(cpu))
    }
}

impl CrossEntropy {
    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let targets = self.targets.host::<i32>()?;
        let vocab = vocabulary(Self::NAME, &self.logits, &targets)?;
        expect_len(Self::NAME, "losses", self.losses.len(), targets.len())?;
        let mut losses = self.losses.host_mut::<S::Real>()?;
        let rows = targets.chunks(ROWS).zip(losses.chunks_mut(ROWS));
        let isa = cpu.isa();
        let Some(dlosses) = &self.dlosses else {
            let logits = self.logits.host::<S>()?;
            let parts = rows.zip(logits.chunks(ROWS * vocab)).collect();
            cpu.for_each_part(parts, |((targets, losses), logits): (Rows<'_, S>, &[S])| {
                let logits = logits.chunks_exact(vocab);
                for ((logits, &target), loss) in logits.zip(targets).zip(losses) {
                    // A row at a time: that much is widened.
                    S::read(isa, logits, |logits| *loss = loss_of(isa, logits, target));
                }
            });
            return Ok(());
        };
        expect_len(Self::NAME, "dlosses", dlosses.len(), targets.len())?;
        let dlosses = dlosses.host::<S::Real>()?;
        let mut logits = self.logits.host_mut::<S>()?;
        let logits = logits.chunks_mut(ROWS * vocab).zip(dlosses.chunks(ROWS));
        let parts = rows.zip(logits).collect();
        cpu.for_each_part(
            parts,
            |((targets, losses), (logits, dlosses)): (Rows<'_, S>, Differentiated<'_, S>)| {
                let logits = logits.chunks_exact_mut(vocab).zip(dlosses);
                for (((logits, &dloss), &target), loss) in logits.zip(targets).zip(losses) {
                    S::write(isa, logits, true, |logits| {
                        *loss = differentiate(isa, logits, target, dloss);
                    });
                }
            },
        );
        Ok(())
    }
}

/// Targets and losses of some rows.
type Rows<'a, S> = (&'a [i32], &'a mut [<S as Stored>::Real]);

/// Their logits, and the factors of their gradients.
type Differentiated<'a, S> = (&'a mut [S], &'a [<S as Stored>::Real]);

/// The loss of a row.
fn loss_of<T: Real>(isa: Isa, logits: &[T], target: i32) -> T {
    usize::try_from(target).map_or(T::ZERO, |target| log_sum(isa, logits) - logits[target])
}

/// The same loss, of a row that becomes its gradient.
fn differentiate<T: Real>(isa: Isa, logits: &mut [T], target: i32, dloss: T) -> T {
    let Ok(target) = usize::try_from(target) else {
        logits.fill(T::ZERO);
        return T::ZERO;
    };
    let lse = log_sum(isa, logits);
    let loss = lse - logits[target];
    probabilities(isa, logits, lse, dloss);
    logits[target] = logits[target] - dloss;
    loss
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
