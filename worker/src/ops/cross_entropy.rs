//! Softmax and cross-entropy in one, and the gradient with them: the probabilities exist only as the gradient. The sum of
//! the losses stays on the device until the host asks for the numbers of the step.
//!
//! The factor of a row's gradient is known before its loss, so that one operation makes both while the row is in the
//! caches: memory is read and written once.

use super::cuda::plan::{Call, Plan, count, element, expect_dtype, kernels, units_with};
use super::kernel::{Real, by_dtype, kernel, ln, max_of, sum_map};
use super::stored::Stored;
use super::{Operation, expect_len, expect_tokens};
use crate::device::cuda::{CompileUnit, Define, Grid, KernelSource};
use crate::device::{Buffer, Cpu, DType, DeviceError, Isa};

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

impl Operation for CrossEntropy {
    const NAME: &'static str = "cross_entropy";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtype!(Self::NAME, self.logits.dtype(), S => self.compute::<S>(cpu))
    }

    fn plan(&self) -> Result<Plan, DeviceError> {
        let rows = self.targets.len();
        let vocab = self.vocabulary()?;
        expect_dtype(DType::I32, &[&self.targets])?;
        expect_dtype(DType::F32, &[&self.losses])?;
        expect_dtype(DType::F32, self.dlosses.as_slice())?;
        // A row is a warp's or a block's.
        let (threads, block) = match vocab * self.logits.dtype().bytes() {
            0..=4096 => (WARP, WARPS_APART),
            4097..=32_768 => (256, 256),
            _ => (1024, 1024),
        };
        let blocks = rows.div_ceil((block / threads) as usize);
        let defines = defines(element(Self::NAME, &self.logits)?, threads);
        let grid = Grid::linear(count(Self::NAME, "blocks", blocks)?, block);
        let call = Call::new(&SOURCE, Self::NAME, defines, grid);
        let call = match &self.dlosses {
            None => call.read([&self.logits]),
            Some(_) => call.write([&self.logits]),
        };
        let (rows, vocab) = (
            count(Self::NAME, "rows", rows)?,
            count(Self::NAME, "logits a row", vocab)?,
        );
        let call = call.read([&self.targets]).write([&self.losses]);
        Ok(call.read_if(self.dlosses.as_ref()).u32([rows, vocab]).into())
    }
}

impl CrossEntropy {
    /// Size of the vocabulary.
    fn vocabulary(&self) -> Result<usize, DeviceError> {
        let rows = self.targets.len();
        let vocab = self.logits.len() / rows.max(1);
        expect_len(Self::NAME, "logits", self.logits.len(), rows * vocab)?;
        expect_len(Self::NAME, "losses", self.losses.len(), rows)?;
        if let Some(dlosses) = &self.dlosses {
            expect_len(Self::NAME, "dlosses", dlosses.len(), rows)?;
        }
        Ok(vocab)
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let targets = self.targets.host::<i32>()?;
        let vocab = self.vocabulary()?;
        expect_tokens(Self::NAME, "targets", &targets, i32::MIN, vocab)?;
        let vocab = vocab.max(1);
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

const WARP: u32 = 32;
/// Threads of a block in which each warp has a row of its own.
const WARPS_APART: u32 = 256;

static SOURCE: KernelSource = kernels("cross_entropy.cu", include_str!("cuda/cross_entropy.cu"));

fn defines(act: &'static str, threads: u32) -> Vec<Define> {
    vec![
        Define::word("ACT", act),
        Define::number("ROW_THREADS", i64::from(threads)),
    ]
}

pub(super) fn units() -> Vec<CompileUnit> {
    let all = ["f32", "bf16"].map(|act| [WARP, 256, 1024].map(|threads| defines(act, threads)));
    let mut units = units_with(&SOURCE, all.into_iter().flatten());
    units.push(CompileUnit::new(&LOSS_SUM_SOURCE, &[]));
    units
}

/// `total += Σ losses[r]`, in f64; without `accumulate`, `total = Σ losses[r]`
#[derive(Clone, Debug)]
pub struct LossSum {
    /// `[R]`, f32 or f64: losses of [`super::CrossEntropy`]
    pub losses: Buffer,
    /// `[1]`, f64
    pub total: Buffer,
    /// Add to what is there.
    pub accumulate: bool,
}

impl Operation for LossSum {
    const NAME: &'static str = "loss_sum";

    fn run(&self, _cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtype!(Self::NAME, self.losses.dtype(), S => self.compute::<S>())
    }

    fn plan(&self) -> Result<Plan, DeviceError> {
        expect_len(Self::NAME, "total", self.total.len(), 1)?;
        expect_dtype(DType::F32, &[&self.losses])?;
        expect_dtype(DType::F64, &[&self.total])?;
        let losses = count(Self::NAME, "losses", self.losses.len())?;
        let grid = Grid::linear(1, LOSS_SUM_THREADS);
        let call = Call::new(&LOSS_SUM_SOURCE, Self::NAME, Vec::new(), grid);
        let call = call.read([&self.losses]).write([&self.total]);
        Ok(call.u32([losses]).flag(self.accumulate).into())
    }
}

impl LossSum {
    fn compute<S: Stored>(&self) -> Result<(), DeviceError> {
        expect_len(Self::NAME, "total", self.total.len(), 1)?;
        let sum: f64 = self.losses.host::<S>()?.iter().map(|loss| loss.to_f64()).sum();
        let mut total = self.total.host_mut::<f64>()?;
        total[0] = if self.accumulate { total[0] + sum } else { sum };
        Ok(())
    }
}

/// Threads of the one block.
const LOSS_SUM_THREADS: u32 = 1024;

static LOSS_SUM_SOURCE: KernelSource = kernels("loss_sum.cu", include_str!("cuda/loss_sum.cu"));
