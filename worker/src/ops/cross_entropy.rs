//! Softmax and cross-entropy in one, and the gradient with them: the probabilities exist only as the gradient. The sum of
//! the losses stays on the device until the host asks for the numbers of the step.
//!
//! The factor of a row's gradient is known before its loss, so that one operation makes both while the row is in the
//! caches: memory is read and written once.
//!
//! Where the ranks of a tensor group hold a part of each row's logits (vocabulary parallelism, Shoeybi et al. 2019,
//! section 3), it is two operations, with one gather of three numbers a row between them: [`CrossEntropyPartial`] and
//! [`CrossEntropyCombine`]. Logits are never gathered.

use super::cpu::kernel::{Real, kernel, ln, max_of, runs_in, sum_map};
use super::cpu::stored::Stored;
use super::cuda::plan::{Call, Plan, count, element, expect_dtype, kernels};
use super::{Cpu, Isa, Operation, VocabularyPart, expect_indices, expect_len};
use crate::cuda::{Define, Grid, KernelSource};
use crate::memory::{Buffer, DType, DeviceError};

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

    runs_in!(logits);

    fn plan(&self) -> Result<Plan, DeviceError> {
        let rows = self.targets.len();
        let vocab = self.vocabulary()?;
        expect_dtype(DType::I32, &[&self.targets])?;
        expect_dtype(DType::F32, &[&self.losses])?;
        expect_dtype(DType::F32, self.dlosses.as_slice())?;
        let call = call_by_rows(Self::NAME, &self.logits, [rows, vocab])?;
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
        expect_indices(Self::NAME, "targets", &targets, i32::MIN, vocab)?;
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

/// Targets of some rows, and their losses or statistics.
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

/// `ln Σ e^logits[v]`
fn log_sum<T: Real>(isa: Isa, logits: &[T]) -> T {
    let [max, sum] = max_and_sum(isa, logits);
    max + T::of(ln(sum.to_f64()))
}

kernel! {
    /// The greatest of the logits, and `Σ e^(logits[v] − greatest)`.
    fn max_and_sum<'a, T>(logits: &'a [T]) -> [T; 2] {
        let max = max_of(logits);
        [max, sum_map(logits, |x| (x - max).exp())]
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

/// Numbers of a row and a part of its logits: the maximum, `Σ e^(x − maximum)`, and the target's logit.
const STATISTICS: usize = 3;

/// What [`CrossEntropyCombine`] needs of this rank's part of the logits: of each row the maximum, `Σ_v e^(logits[r, v] −
/// maximum)`, and the target's logit, which is 0 where another rank has it. All three are 0 where the target is negative.
#[derive(Clone, Debug)]
pub struct CrossEntropyPartial {
    /// `[R, held]`: the logits of `part`
    pub logits: Buffer,
    /// `[R]`, i32: tokens of the whole vocabulary
    pub targets: Buffer,
    /// `[R, 3]`, f32 (f64 if the logits are): this rank's of the group's `[P, R, 3]`
    pub statistics: Buffer,
    /// Which tokens the logits are of.
    pub part: VocabularyPart,
}

impl Operation for CrossEntropyPartial {
    const NAME: &'static str = "cross_entropy_partial";

    runs_in!(logits);

    fn plan(&self) -> Result<Plan, DeviceError> {
        let rows = self.rows()?;
        expect_dtype(DType::I32, &[&self.targets])?;
        expect_dtype(DType::F32, &[&self.statistics])?;
        let call = call_by_rows(Self::NAME, &self.logits, [rows, self.part.held])?;
        let call = call.read([&self.logits, &self.targets]).write([&self.statistics]);
        let call = call.u32([count(Self::NAME, "rows", rows)?]);
        Ok(call.u32(self.part.counts(Self::NAME)?).into())
    }
}

impl CrossEntropyPartial {
    /// Statistics of a row.
    pub const STATISTICS: usize = STATISTICS;

    /// Refuses sizes that do not fit each other.
    fn rows(&self) -> Result<usize, DeviceError> {
        let rows = self.targets.len();
        expect_part(Self::NAME, &self.logits, rows, self.part)?;
        expect_len(Self::NAME, "statistics", self.statistics.len(), STATISTICS * rows)?;
        Ok(rows)
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let targets = self.targets.host::<i32>()?;
        self.rows()?;
        let part = self.part;
        expect_indices(Self::NAME, "targets", &targets, i32::MIN, part.whole)?;
        let logits = self.logits.host::<S>()?;
        let mut statistics = self.statistics.host_mut::<S::Real>()?;
        let rows = targets.chunks(ROWS).zip(statistics.chunks_mut(ROWS * STATISTICS));
        let parts = rows.zip(logits.chunks(ROWS * part.held)).collect();
        let isa = cpu.isa();
        cpu.for_each_part(parts, |((targets, statistics), logits): (Rows<'_, S>, &[S])| {
            let rows = logits.chunks_exact(part.held).zip(targets);
            for ((logits, &target), out) in rows.zip(statistics.chunks_exact_mut(STATISTICS)) {
                if target < 0 {
                    out.fill(S::Real::ZERO);
                    continue;
                }
                S::read(isa, logits, |logits| {
                    let [max, sum] = max_and_sum(isa, logits);
                    let chosen = part.place(target).map_or(S::Real::ZERO, |place| logits[place]);
                    out.copy_from_slice(&[max, sum, chosen]);
                });
            }
        });
        Ok(())
    }
}

/// [`CrossEntropy`] of logits of which this rank has a part, from the statistics of all parts. They are combined in rank
/// order, so that all ranks have the same losses, bit by bit: with `m` the greatest maximum,
/// `losses[r] = m + ln Σ_p sum_p · e^(maximum_p − m) − Σ_p logit_p` (Milakov & Gimelshein 2018).
#[derive(Clone, Debug)]
pub struct CrossEntropyCombine {
    /// `[R, held]`: the logits of `part`, become their gradients if there are `dlosses`
    pub logits: Buffer,
    /// `[P, R, 3]`, f32 (f64 if the logits are): what [`CrossEntropyPartial`] made of all `P` parts, in rank order
    pub statistics: Buffer,
    /// `[R]`, i32: tokens of the whole vocabulary; negative: loss and gradient are 0
    pub targets: Buffer,
    /// `[R]`, as `statistics`
    pub losses: Buffer,
    /// `[R]`, as `statistics`: factors of the gradients, for training. None leaves the logits as they are.
    pub dlosses: Option<Buffer>,
    /// Which tokens the logits are of.
    pub part: VocabularyPart,
}

impl Operation for CrossEntropyCombine {
    const NAME: &'static str = "cross_entropy_combine";

    runs_in!(logits);

    fn plan(&self) -> Result<Plan, DeviceError> {
        let [rows, parts] = self.sizes()?;
        expect_dtype(DType::I32, &[&self.targets])?;
        expect_dtype(DType::F32, &[&self.statistics, &self.losses])?;
        expect_dtype(DType::F32, self.dlosses.as_slice())?;
        // A warp has little to do where no logits are read.
        let width = self.dlosses.as_ref().map_or(0, |_| self.part.held);
        let call = call_by_rows(Self::NAME, &self.logits, [rows, width])?;
        let call = match &self.dlosses {
            None => call.read([&self.logits]),
            Some(_) => call.write([&self.logits]),
        };
        let (rows, parts) = (
            count(Self::NAME, "rows", rows)?,
            count(Self::NAME, "parts", parts)?,
        );
        let call = call
            .read([&self.statistics, &self.targets])
            .write([&self.losses])
            .read_if(self.dlosses.as_ref());
        let [first, held, _] = self.part.counts(Self::NAME)?;
        Ok(call.u32([rows, parts, first, held]).into())
    }
}

impl CrossEntropyCombine {
    /// Rows, and parts of the vocabulary.
    fn sizes(&self) -> Result<[usize; 2], DeviceError> {
        let (op, rows) = (Self::NAME, self.targets.len());
        expect_part(op, &self.logits, rows, self.part)?;
        let parts = (self.statistics.len() / (STATISTICS * rows).max(1)).max(1);
        expect_len(op, "statistics", self.statistics.len(), parts * STATISTICS * rows)?;
        expect_len(op, "losses", self.losses.len(), rows)?;
        if let Some(dlosses) = &self.dlosses {
            expect_len(op, "dlosses", dlosses.len(), rows)?;
        }
        Ok([rows, parts])
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let targets = self.targets.host::<i32>()?;
        let ([rows, _], part, isa) = (self.sizes()?, self.part, cpu.isa());
        expect_indices(Self::NAME, "targets", &targets, i32::MIN, part.whole)?;
        let (targets, statistics) = (&*targets, self.statistics.host::<S::Real>()?);
        let statistics = &*statistics;
        let mut losses = self.losses.host_mut::<S::Real>()?;
        for (row, (loss, &target)) in losses.iter_mut().zip(targets).enumerate() {
            let [lse, chosen] = combine(isa, statistics, [rows, row]);
            *loss = if target < 0 { S::Real::ZERO } else { lse - chosen };
        }
        let Some(dlosses) = &self.dlosses else {
            return Ok(());
        };
        let dlosses = dlosses.host::<S::Real>()?;
        let dlosses = &*dlosses;
        let mut logits = self.logits.host_mut::<S>()?;
        let parts = logits.chunks_mut(ROWS * part.held).enumerate().collect();
        cpu.for_each_part(parts, |(index, logits): (usize, &mut [S])| {
            for (i, logits) in logits.chunks_exact_mut(part.held).enumerate() {
                let row = index * ROWS + i;
                if targets[row] < 0 {
                    logits.fill(S::zeroed());
                    continue;
                }
                let ([lse, _], dloss) = (combine(isa, statistics, [rows, row]), dlosses[row]);
                S::write(isa, logits, true, |logits| {
                    probabilities(isa, logits, lse, dloss);
                    if let Some(place) = part.place(targets[row]) {
                        logits[place] = logits[place] - dloss;
                    }
                });
            }
        });
        Ok(())
    }
}

/// Refuses logits of other sizes than `[rows, part]`.
fn expect_part(
    op: &'static str,
    logits: &Buffer,
    rows: usize,
    part: VocabularyPart,
) -> Result<(), DeviceError> {
    VocabularyPart::of(Some(part), op, "logits", part.held)?;
    expect_len(op, "logits", logits.len(), rows * part.held)
}

kernel! {
    /// `ln Σ_v e^logits[r, v]` of all parts, and the target's logit, of row `r` of `[P, R, 3]`.
    fn combine<'a, T>(statistics: &'a [T], row_of: [usize; 2]) -> [T; 2] {
        let [rows, row] = row_of;
        let parts = || statistics.chunks_exact(rows * STATISTICS).map(|part| &part[row * STATISTICS..]);
        let greater = |a: T, b: T| if b > a { b } else { a };
        let max = parts().fold(T::LEAST, |max, numbers| greater(max, numbers[0]));
        let (mut sum, mut chosen) = (T::ZERO, T::ZERO);
        for numbers in parts() {
            sum += numbers[1] * (numbers[0] - max).exp();
            chosen += numbers[2];
        }
        [max + T::of(ln(sum.to_f64())), chosen]
    }
}

const WARP: u32 = 32;
/// Threads of a block in which each warp has a row of its own.
const WARPS_APART: u32 = 256;

/// A kernel on `rows` of `width` logits each, without arguments yet. A warp or a block shares a row.
fn call_by_rows(op: &'static str, logits: &Buffer, [rows, width]: [usize; 2]) -> Result<Call, DeviceError> {
    let (threads, block) = match width * logits.dtype().bytes() {
        0..=4096 => (WARP, WARPS_APART),
        4097..=32_768 => (256, 256),
        _ => (1024, 1024),
    };
    let blocks = rows.div_ceil((block / threads) as usize);
    let grid = Grid::linear(count(op, "blocks", blocks)?, block);
    Ok(Call::new(
        &SOURCE,
        op,
        defines(element(op, logits)?, threads),
        grid,
    ))
}

static SOURCE: KernelSource = kernels("cross_entropy.cu", include_str!("cuda/cross_entropy.cu"));

fn defines(act: &'static str, threads: u32) -> Vec<Define> {
    vec![
        Define::Word("ACT", act),
        Define::Number("ROW_THREADS", i64::from(threads)),
    ]
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

    runs_in!(losses);

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
    fn compute<S: Stored>(&self, _: &Cpu) -> Result<(), DeviceError> {
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
