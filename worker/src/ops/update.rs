//! The update of an optimizer, element by element: what all rules share. A rule ([`UpdateRule`]) is a formula of one
//! element; the operation goes through memory, rounds masters, and skips a step whose factor is not finite. On a GPU the
//! rule's kernel includes `update.cuh`.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::cuda::plan::{
    Arg, Call, ELEMENT, ELEMENTWISE, Plan, Planned, WIDEST, element, elementwise_grid, expect_dtype,
    vec_define, width,
};
use super::stored::{Stored, narrow};
use super::{CpuKernel, expect_len};
use crate::device::cuda::{CompileUnit, Define, KernelSource};
use crate::device::{Buffer, Cpu, DType, DeviceError, Isa};

/// The formula of an element-wise optimizer.
pub trait UpdateRule: Debug + Send + Sync {
    /// Its name, and that of its CUDA kernel.
    fn name(&self) -> &'static str;

    /// Names of its state in f32, as PyTorch's; at most [`MAX_SLOTS`].
    fn slots(&self) -> &'static [&'static str];

    /// The file with its CUDA kernel, which includes `update.cuh`.
    fn source(&self) -> &'static KernelSource;

    /// What the kernel is given beside the rates, in the order of the file; at most [`MAX_CONSTANTS`]. `step` counts
    /// from 1.
    fn constants(&self, step: u64) -> Vec<f32>;

    /// Updates the elements of a part on the CPU.
    fn update(&self, isa: Isa, part: UpdatePart<'_>, numbers: &UpdateNumbers);
}

/// Most state slots of a rule.
pub const MAX_SLOTS: usize = 2;

/// Most constants of a rule.
pub const MAX_CONSTANTS: usize = 8;

/// Most pairs of learning rate and weight decay in one update.
pub const MAX_RATES: usize = 32;

/// Numbers of an update that the device computes: the factor of the gradient, and the bias corrections of both moments.
pub const UPDATE_NUMBERS: usize = 3;

/// Elements of one part of the work on the CPU.
const PART: usize = 16_384;

/// Equally many elements of everything that an update reads and writes.
#[derive(Debug)]
pub struct UpdatePart<'a> {
    /// Read and written.
    pub param: &'a mut [f32],
    /// Before it is multiplied by [`UpdateNumbers::scale`].
    pub grad: &'a [f32],
    /// State, in the order of [`UpdateRule::slots`].
    pub slots: Vec<&'a mut [f32]>,
}

/// Numbers that all elements of a part have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateNumbers {
    /// Factor of the gradient.
    pub scale: f32,
    /// Bias corrections of both moments, where the device counts the updates.
    pub corrections: Option<[f32; 2]>,
    /// Learning rate and weight decay.
    pub rates: Rates,
    /// From 1.
    pub step: u64,
}

/// Numbers that parameter groups differ in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Learning rate of the step.
    pub lr: f32,
    /// λ
    pub weight_decay: f32,
}

impl Rates {
    /// Of a learning rate and a weight decay.
    #[must_use]
    pub const fn new(lr: f32, weight_decay: f32) -> Self {
        Self { lr, weight_decay }
    }
}

/// Which elements have which rates.
#[derive(Clone, Debug, PartialEq)]
pub struct Runs {
    /// Neighbours with the same rates: their end, and the index of the rates. Ascending; the last end is the number of
    /// elements.
    pub ends: Arc<[(usize, usize)]>,
    /// At most [`MAX_RATES`].
    pub rates: Arc<[Rates]>,
}

impl Runs {
    /// The same rates for `n` elements.
    #[must_use]
    pub fn uniform(n: usize, rates: Rates) -> Self {
        Self::sparing(n, &[], rates)
    }

    /// No weight decay for `spared`, ranges in order of `n` elements.
    #[must_use]
    pub fn sparing(n: usize, spared: &[Range<usize>], rates: Rates) -> Self {
        let without = Rates {
            weight_decay: 0.0,
            ..rates
        };
        let ends = spared.iter().flat_map(|range| [(range.start, 0), (range.end, 1)]);
        let mut start = 0;
        let filled = ends.chain([(n, 0)]).filter(|&(end, _)| {
            let is_filled = end > start;
            start = end;
            is_filled
        });
        Self {
            ends: filled.collect(),
            rates: [rates, without].into(),
        }
    }

    /// Those of some of the elements.
    #[must_use]
    pub fn slice(&self, range: &Range<usize>) -> Self {
        let first = self.ends.partition_point(|(end, _)| *end <= range.start);
        let last = self.ends.partition_point(|(end, _)| *end < range.end);
        let of = |&(end, rates): &(usize, usize)| (end.min(range.end) - range.start, rates);
        let runs = self.ends.iter().take(last + 1).skip(first);
        Self {
            ends: runs.map(of).collect(),
            rates: self.rates.clone(),
        }
    }

    /// Elements with their rates, in order.
    fn iter(&self) -> impl Iterator<Item = (Range<usize>, Rates)> {
        let starts = [0].into_iter().chain(self.ends.iter().map(|(end, _)| *end));
        let runs = starts.zip(self.ends.iter());
        runs.map(|(start, &(end, rates))| (start..end, self.rates[rates]))
    }
}

/// Parameters and state become what the rule says of `scale · grad`. Nothing changes if `scale` is not finite: the step is
/// skipped.
#[derive(Clone, Debug)]
pub struct Update {
    /// The formula.
    pub rule: Arc<dyn UpdateRule>,
    /// `[n]`, f32: the parameter, or the master of one that is used in bf16.
    pub param: Buffer,
    /// `[n]`, bf16: becomes `param`, rounded to nearest even. State on the host takes f32 too.
    pub copy: Option<Buffer>,
    /// `[n]`, f32 or bf16
    pub grad: Buffer,
    /// `[n]` each, f32, in the order of [`UpdateRule::slots`].
    pub slots: Vec<Buffer>,
    /// `[1]` or `[3]`, f32: factor of the gradient, and bias corrections of both moments, computed on the device by
    /// [`super::ClipScale`].
    pub scale: Buffer,
    /// Learning rate and weight decay of `[n]`.
    pub runs: Runs,
    /// Number of the step, from 1: of the update too, where `scale` brings no bias corrections.
    pub step: u64,
}

impl CpuKernel for Update {
    const NAME: &'static str = "update";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        match self.grad.dtype() {
            DType::Bf16 => self.compute::<bf16>(cpu),
            // Any other type is refused there.
            _ => self.compute::<f32>(cpu),
        }
    }
}

impl Update {
    fn compute<G: Stored<Real = f32>>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        self.check()?;
        let mut copy = self.copy.as_ref().map(Buffer::host_mut::<bf16>).transpose()?;
        let (grad, scale) = (self.grad.host::<G>()?, self.scale.host::<f32>()?);
        self.on_host()
            .sweep::<G>(cpu, (&grad, copy.as_deref_mut()), &scale)
    }

    /// Refuses buffers whose sizes do not fit.
    fn check(&self) -> Result<(), DeviceError> {
        let (name, n) = (self.rule.name(), self.param.len());
        let slots = self.rule.slots();
        if self.slots.len() != slots.len() {
            let what = format!("{} state slots, expected {}", self.slots.len(), slots.len());
            return Err(DeviceError::Shape { op: name, what });
        }
        for (slot, buffer) in slots.iter().zip(&self.slots) {
            expect_len(name, slot, buffer.len(), n)?;
        }
        if let Some(copy) = &self.copy {
            expect_len(name, "copy", copy.len(), n)?;
        }
        expect_len(name, "grad", self.grad.len(), n)?;
        expect_len(name, "runs", self.runs.ends.last().map_or(0, |run| run.0), n)?;
        match self.scale.len() {
            UPDATE_NUMBERS => Ok(()),
            len => expect_len(name, "scale", len, 1),
        }
    }

    /// The update of some of the elements.
    #[must_use]
    pub fn slice(&self, range: &Range<usize>) -> Self {
        let of = |buffer: &Buffer| buffer.slice(range.clone());
        Self {
            rule: self.rule.clone(),
            param: of(&self.param),
            copy: self.copy.as_ref().map(of),
            grad: of(&self.grad),
            slots: self.slots.iter().map(of).collect(),
            scale: self.scale.clone(),
            runs: self.runs.slice(range),
            step: self.step,
        }
    }

    /// The same for a gradient and a factor that are brought to the host. The copy is left to the caller.
    pub(crate) fn on_host(&self) -> HostUpdate {
        HostUpdate {
            rule: self.rule.clone(),
            param: self.param.clone(),
            slots: self.slots.clone(),
            grad: self.grad.dtype(),
            runs: self.runs.clone(),
            step: self.step,
        }
    }
}

/// An update that knows only its memory on the host.
pub(crate) struct HostUpdate {
    rule: Arc<dyn UpdateRule>,
    /// `[n]`, f32
    param: Buffer,
    /// `[n]` each, f32
    slots: Vec<Buffer>,
    /// Type of the gradient.
    grad: DType,
    runs: Runs,
    step: u64,
}

/// What one call of a rule on the CPU reads and writes.
struct Slices<'a, G> {
    param: &'a mut [f32],
    grad: &'a [G],
    slots: Vec<&'a mut [f32]>,
    copy: Option<&'a mut [bf16]>,
}

impl HostUpdate {
    /// `grad` is `[n]`, in bytes, aligned for its type; `scale` is that of [`Update`].
    pub(crate) fn run(&self, cpu: &Cpu, grad: &[u8], scale: &[f32]) -> Result<(), DeviceError> {
        match self.grad {
            DType::Bf16 => self.sweep::<bf16>(cpu, (bytemuck::cast_slice(grad), None), scale),
            _ => self.sweep::<f32>(cpu, (bytemuck::cast_slice(grad), None), scale),
        }
    }

    fn sweep<G: Stored<Real = f32>>(
        &self,
        cpu: &Cpu,
        (grad, mut copy): (&[G], Option<&mut [bf16]>),
        scale: &[f32],
    ) -> Result<(), DeviceError> {
        if !scale[0].is_finite() {
            return Ok(());
        }
        let isa = cpu.isa();
        for (elements, rates) in self.runs.iter() {
            let numbers = UpdateNumbers {
                scale: scale[0],
                corrections: <[f32; 2]>::try_from(&scale[1..]).ok(),
                rates,
                step: self.step,
            };
            let (param, slots) = self.slice(&elements);
            let mut param = param.host_mut::<f32>()?;
            let slots = slots.iter().map(Buffer::host_mut::<f32>);
            let mut slots = slots.collect::<Result<Vec<_>, _>>()?;
            let mut slots: Vec<_> = slots.iter_mut().map(|slot| slot.chunks_mut(PART)).collect();
            let copy = copy.as_mut().map(|copy| &mut copy[elements.clone()]);
            let mut copies = copy.map(|copy| copy.chunks_mut(PART));
            let parts = param.chunks_mut(PART).zip(grad[elements].chunks(PART));
            let parts = parts.map(|(param, grad)| Slices {
                param,
                grad,
                slots: slots.iter_mut().filter_map(Iterator::next).collect(),
                copy: copies.as_mut().and_then(Iterator::next),
            });
            cpu.for_each_part(parts.collect(), |part: Slices<'_, G>| {
                let param = part.param;
                G::read(isa, part.grad, |grad| {
                    let (param, slots) = (&mut *param, part.slots);
                    (self.rule).update(isa, UpdatePart { param, grad, slots }, &numbers);
                });
                if let Some(copy) = part.copy {
                    narrow(isa, param, copy);
                }
            });
        }
        Ok(())
    }

    /// Parameter and state of some of the elements.
    fn slice(&self, range: &Range<usize>) -> (Buffer, Vec<Buffer>) {
        let of = |buffer: &Buffer| buffer.slice(range.clone());
        (of(&self.param), self.slots.iter().map(of).collect())
    }
}

/// `1/(1 − βᵗ)` after so many updates, rounded once from f64.
pub(crate) fn bias_correction(beta: f32, updates: i32) -> f32 {
    (1.0 / (1.0 - f64::from(beta).powi(updates))) as f32
}

/// Files that the file of a rule includes.
pub(crate) const HEADERS: &[(&str, &str)] = &[
    ELEMENT,
    ELEMENTWISE,
    ("update.cuh", include_str!("cuda/update.cuh")),
];

/// Runs of one launch: 114 blocks of a GPT-2. Arguments of a kernel are 4 KiB at most.
const MAX_RUNS: usize = 456;

impl Planned for Update {
    fn plan(&self) -> Result<Plan, DeviceError> {
        self.check()?;
        expect_dtype(DType::F32, &[&self.param, &self.scale])?;
        expect_dtype(DType::F32, &self.slots)?;
        if let Some(copy) = &self.copy {
            expect_dtype(DType::Bf16, &[copy])?;
        }
        let calls = self.launches().iter().map(Self::call).collect::<Result<_, _>>()?;
        Ok(Plan {
            scratch_bytes: 0,
            calls,
        })
    }
}

impl Update {
    /// The same update in parts whose runs fit into a table each: one, as a rule.
    fn launches(&self) -> Vec<Self> {
        let mut start = 0;
        let ends = self.runs.ends.chunks(MAX_RUNS).map(|runs| runs[runs.len() - 1].0);
        ends.map(|end| self.slice(&(std::mem::replace(&mut start, end)..end)))
            .collect()
    }

    fn call(&self) -> Result<Call, DeviceError> {
        let n = self.param.len();
        let mut buffers = vec![&self.param, &self.grad];
        buffers.extend(&self.slots);
        buffers.extend(&self.copy);
        let ends = &self.runs.ends;
        let packed = ends
            .iter()
            .all(|(end, _)| end.is_multiple_of(WIDEST) || *end == n);
        let width = if packed { width(0, &buffers) } else { 1 };
        let write = |buffer: Option<&Buffer>| buffer.cloned().map_or(Arg::Null, Arg::Write);
        let mut args = vec![
            Arg::Write(self.param.clone()),
            Arg::Read(self.grad.clone()),
            write(self.copy.as_ref()),
        ];
        args.extend((0..MAX_SLOTS).map(|slot| write(self.slots.get(slot))));
        args.extend([
            Arg::Read(self.scale.clone()),
            Arg::flag(self.scale.len() == UPDATE_NUMBERS),
            Arg::U64(n as u64),
            Arg::Table(self.table()),
        ]);
        Ok(Call {
            source: self.rule.source(),
            kernel: self.rule.name(),
            defines: defines(
                element(self.rule.name(), &self.grad)?,
                self.copy.is_some(),
                self.slots.len(),
                width,
            ),
            grid: elementwise_grid(n, width, 1),
            args,
        })
    }

    /// `Table` of `update.cuh`.
    fn table(&self) -> Vec<u64> {
        let pair = |low: f32, high: f32| u64::from(high.to_bits()) << 32 | u64::from(low.to_bits());
        let ends = &self.runs.ends;
        let mut table = vec![0; 1 + MAX_RUNS];
        table[0] = ends.len() as u64;
        for (entry, (end, rates)) in table[1..].iter_mut().zip(ends.iter()) {
            *entry = (*end as u64) << 8 | *rates as u64;
        }
        let mut rates: Vec<u64> = self
            .runs
            .rates
            .iter()
            .map(|r| pair(r.lr, r.weight_decay))
            .collect();
        rates.resize(MAX_RATES, 0);
        let mut constants = self.rule.constants(self.step);
        constants.resize(MAX_CONSTANTS, 0.0);
        table.extend(rates);
        table.extend(constants.chunks(2).map(|two| pair(two[0], two[1])));
        table
    }
}

fn defines(grad: &'static str, copy: bool, slots: usize, width: usize) -> Vec<Define> {
    vec![
        Define::word("GRAD", grad),
        Define::number("COPY", i64::from(copy)),
        Define::number("SLOTS", slots as i64),
        Define::number("RUNS", MAX_RUNS as i64),
        Define::number("RATES", MAX_RATES as i64),
        Define::number("CONSTANTS", MAX_CONSTANTS as i64),
        vec_define(width),
    ]
}

/// All that the kernel of a rule is compiled as.
pub(crate) fn units_of(rule: &dyn UpdateRule) -> Vec<CompileUnit> {
    let mut units = Vec::new();
    for grad in ["f32", "bf16"] {
        for copy in [false, true] {
            let of = |width| CompileUnit::new(rule.source(), &defines(grad, copy, rule.slots().len(), width));
            units.extend([8, 1].map(of));
        }
    }
    units
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_a_part_are_those_of_its_elements() {
        let rates = Rates {
            lr: 1.0,
            weight_decay: 0.1,
        };
        let runs = Runs::sparing(20, &[0..3, 10..15], rates);
        assert_eq!(runs.ends[..], [(3, 1), (10, 0), (15, 1), (20, 0)]);
        assert_eq!(runs.slice(&(3..10)).ends[..], [(7, 0)]);
        assert_eq!(runs.slice(&(2..16)).ends[..], [(1, 1), (8, 0), (13, 1), (14, 0)]);
        assert_eq!(runs.slice(&(0..20)), runs);
        let elements: Vec<_> = runs.iter().map(|(elements, _)| elements).collect();
        assert_eq!(elements, [0..3, 3..10, 10..15, 15..20]);
    }
}
