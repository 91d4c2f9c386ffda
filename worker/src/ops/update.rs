//! The update of an optimizer, element by element: what all rules share. A rule ([`UpdateRule`]) is a formula of one
//! element; the operation goes through memory, rounds masters, and skips a step whose factor is not finite. On a GPU the
//! rule's kernel includes `update.cuh`.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::cpu::stored::Stored;
use super::cuda::plan::{
    Call, Plan, Scratch, WIDEST, element, elementwise_grid, expect_dtype, vec_define, width,
};
use super::{Cpu, Isa, Operation, expect_len};
use crate::cuda::{Define, KernelSource};
use crate::memory::{Buffer, DType, DeviceError};

/// The formula of an element-wise optimizer, as data.
#[derive(Clone, Debug)]
pub struct UpdateRule {
    /// Its name, and that of its CUDA kernel.
    pub name: &'static str,
    /// Names of its state in f32, as PyTorch's; at most [`MAX_SLOTS`].
    pub slots: &'static [&'static str],
    /// The file with its CUDA kernel, which includes `update.cuh`.
    pub source: &'static KernelSource,
    /// What both kernels are given beside the rates, in the order of the file; at most [`MAX_CONSTANTS`].
    pub constants: Vec<f32>,
    /// Decays of two moments whose bias is corrected. The corrections follow the constants.
    pub corrected: Option<[f32; 2]>,
    /// Its kernel on the CPU.
    pub kernel: UpdateKernel,
}

/// Updates the elements of a part on the CPU.
pub type UpdateKernel = for<'a> fn(Isa, UpdatePart<'a, f32>, UpdateNumbers<'a, f32>);

impl UpdateRule {
    /// Constants of the update of this number, from 1.
    fn constants_at(&self, step: u64) -> Vec<f32> {
        let updates = i32::try_from(step).unwrap_or(i32::MAX);
        let corrections = self.corrected.into_iter().flatten();
        let corrections = corrections.map(|beta| bias_correction(beta, updates));
        self.constants.iter().copied().chain(corrections).collect()
    }
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
pub struct UpdatePart<'a, T> {
    /// Read and written.
    pub param: &'a mut [T],
    /// Before it is multiplied by [`UpdateNumbers::scale`].
    pub grad: &'a [T],
    /// State, in the order of [`UpdateRule::slots`].
    pub slots: Vec<&'a mut [T]>,
}

/// Numbers that all elements of a part have in common.
#[derive(Clone, Copy, Debug)]
pub struct UpdateNumbers<'a, T> {
    /// Factor of the gradient.
    pub scale: T,
    /// Learning rate.
    pub lr: T,
    /// λ
    pub weight_decay: T,
    /// Those of the rule, and the bias corrections.
    pub constants: &'a [T],
}

impl<'a, T: Copy> UpdatePart<'a, T> {
    /// Parameters, gradients and the slots of a rule that has `N`.
    pub(crate) fn split<const N: usize>(self) -> (&'a mut [T], &'a [T], [&'a mut [T]; N]) {
        let slots = self.slots.try_into().ok();
        (
            self.param,
            self.grad,
            slots.expect("an update has the slots of its rule"),
        )
    }
}

impl<T: Copy> UpdateNumbers<'_, T> {
    /// The constants of a rule that has `N`.
    pub(crate) fn constants<const N: usize>(&self) -> [T; N] {
        let constants = self.constants.try_into();
        constants.expect("an update has the constants of its rule")
    }
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
    /// A learning rate and a weight decay.
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
    pub fn uniform(n: usize, rates: Rates) -> Self {
        Self::sparing(n, &[], rates)
    }

    /// No weight decay for `spared`, ranges in order of `n` elements.
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
    pub rule: Arc<UpdateRule>,
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

impl Operation for Update {
    const NAME: &'static str = "update";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        self.check()?;
        let mut copy = self.copy.as_ref().map(Buffer::host_mut::<bf16>).transpose()?;
        let (grad, scale) = (self.grad.host_bytes()?, self.scale.host::<f32>()?);
        self.on_host().run(cpu, &grad, copy.as_deref_mut(), &scale)
    }

    fn plan(&self) -> Result<Plan, DeviceError> {
        self.check()?;
        expect_dtype(DType::F32, &[&self.param, &self.scale])?;
        expect_dtype(DType::F32, &self.slots)?;
        expect_dtype(DType::Bf16, self.copy.as_slice())?;
        let calls = self.launches().iter().map(Self::call).collect::<Result<_, _>>()?;
        Ok(Scratch::default().plan(calls))
    }
}

impl Update {
    /// Refuses buffers whose sizes do not fit.
    fn check(&self) -> Result<(), DeviceError> {
        let (name, n) = (self.rule.name, self.param.len());
        let slots = self.rule.slots;
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
    rule: Arc<UpdateRule>,
    /// `[n]`, f32
    param: Buffer,
    /// `[n]` each, f32
    slots: Vec<Buffer>,
    /// Type of the gradient.
    grad: DType,
    runs: Runs,
    step: u64,
}

impl HostUpdate {
    /// `grad` is `[n]`, in bytes, aligned for its type, beside the copy if it is made here; `scale` is that of [`Update`].
    pub(crate) fn run(
        &self,
        cpu: &Cpu,
        grad: &[u8],
        copy: Option<&mut [bf16]>,
        scale: &[f32],
    ) -> Result<(), DeviceError> {
        match self.grad {
            DType::F32 => self.sweep::<f32>(cpu, bytemuck::cast_slice(grad), copy, scale),
            DType::Bf16 => self.sweep::<bf16>(cpu, bytemuck::cast_slice(grad), copy, scale),
            other => Err(DeviceError::Shape {
                op: self.rule.name,
                what: format!("takes gradients in f32 or bf16, not {other}"),
            }),
        }
    }

    fn sweep<G: Stored<Real = f32>>(
        &self,
        cpu: &Cpu,
        grad: &[G],
        mut copy: Option<&mut [bf16]>,
        scale: &[f32],
    ) -> Result<(), DeviceError> {
        if !scale[0].is_finite() {
            return Ok(());
        }
        let (isa, rule) = (cpu.isa(), &self.rule);
        let mut constants = rule.constants_at(self.step);
        if rule.corrected.is_some() && scale.len() == UPDATE_NUMBERS {
            constants[rule.constants.len()..].copy_from_slice(&scale[1..]);
        }
        for (elements, rates) in self.runs.iter() {
            let numbers = UpdateNumbers {
                scale: scale[0],
                lr: rates.lr,
                weight_decay: rates.weight_decay,
                constants: &constants,
            };
            let param = self.param.slice(elements.clone());
            let slots: Vec<Buffer> = self
                .slots
                .iter()
                .map(|slot| slot.slice(elements.clone()))
                .collect();
            let mut param = param.host_mut::<f32>()?;
            let slots = slots.iter().map(Buffer::host_mut::<f32>);
            let mut slots = slots.collect::<Result<Vec<_>, _>>()?;
            let mut slots: Vec<_> = slots.iter_mut().map(|slot| slot.chunks_mut(PART)).collect();
            let copy = copy.as_mut().map(|copy| &mut copy[elements.clone()]);
            let mut copies = copy.map(|copy| copy.chunks_mut(PART));
            let parts = param.chunks_mut(PART).zip(grad[elements].chunks(PART));
            let parts = parts.map(|(param, grad)| {
                let slots = slots.iter_mut().filter_map(Iterator::next).collect();
                (param, grad, slots, copies.as_mut().and_then(Iterator::next))
            });
            cpu.for_each_part(parts.collect(), |(param, grad, slots, copy): Part<'_, G>| {
                G::read(isa, grad, |grad| {
                    let part = UpdatePart {
                        param: &mut *param,
                        grad,
                        slots,
                    };
                    (rule.kernel)(isa, part, numbers);
                });
                if let Some(copy) = copy {
                    bf16::narrow(isa, param, copy);
                }
            });
        }
        Ok(())
    }
}

/// Parameters, gradients, slots and copy of a part.
type Part<'a, G> = (&'a mut [f32], &'a [G], Vec<&'a mut [f32]>, Option<&'a mut [bf16]>);

/// `1/(1 − βᵗ)` after so many updates, rounded once from f64.
pub(crate) fn bias_correction(beta: f32, updates: i32) -> f32 {
    (1.0 / (1.0 - f64::from(beta).powi(updates))) as f32
}

/// Runs of one launch: 114 blocks of a GPT-2. Arguments of a kernel are 4 KiB at most.
const MAX_RUNS: usize = 456;

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
        let grad = element(self.rule.name, &self.grad)?;
        let defines = defines(grad, self.copy.is_some(), self.slots.len(), width);
        let grid = elementwise_grid(n, width, 1);
        let call = Call::new(self.rule.source, self.rule.name, defines, grid)
            .write([&self.param])
            .read([&self.grad])
            .write_if(self.copy.as_ref());
        let slots = (0..MAX_SLOTS).map(|slot| self.slots.get(slot));
        let call = slots
            .fold(call, Call::write_if)
            .read([&self.scale])
            .flag(self.scale.len() == UPDATE_NUMBERS)
            .u64([n as u64])
            .table(self.table());
        Ok(call)
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
        let rates = self.runs.rates.iter();
        let mut rates: Vec<u64> = rates.map(|r| pair(r.lr, r.weight_decay)).collect();
        rates.resize(MAX_RATES, 0);
        let mut constants = self.rule.constants_at(self.step);
        constants.resize(MAX_CONSTANTS, 0.0);
        table.extend(rates);
        table.extend(constants.chunks(2).map(|two| pair(two[0], two[1])));
        table
    }
}

fn defines(grad: &'static str, copy: bool, slots: usize, width: usize) -> Vec<Define> {
    vec![
        Define::Word("GRAD", grad),
        Define::Number("COPY", i64::from(copy)),
        Define::Number("SLOTS", slots as i64),
        Define::Number("RUNS", MAX_RUNS as i64),
        Define::Number("RATES", MAX_RATES as i64),
        Define::Number("CONSTANTS", MAX_CONSTANTS as i64),
        vec_define(width),
    ]
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
