//! Launches of the kernels of an [`UpdateRule`]: files that include `update.cuh`.

use super::plan::{Arg, Call, ELEMENT, ELEMENTWISE, Plan, Planned, WIDEST};
use super::plan::{element, elementwise_grid, expect_dtype, vec_define, width};
use crate::device::cuda::{Define, Unit};
use crate::device::{Buffer, DType, DeviceError};
use crate::ops::{MAX_CONSTANTS, MAX_RATES, MAX_SLOTS, UPDATE_NUMBERS, Update, UpdateRule};

/// Files that the file of a rule includes.
pub(crate) const HEADERS: &[(&str, &str)] =
    &[ELEMENT, ELEMENTWISE, ("update.cuh", include_str!("update.cuh"))];

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
pub(crate) fn units_of(rule: &dyn UpdateRule) -> Vec<Unit> {
    let mut units = Vec::new();
    for grad in ["f32", "bf16"] {
        for copy in [false, true] {
            let of = |width| Unit::new(rule.source(), &defines(grad, copy, rule.slots().len(), width));
            units.extend([8, 1].map(of));
        }
    }
    units
}
