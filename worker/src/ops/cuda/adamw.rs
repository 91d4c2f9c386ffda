//! Launches of `adamw.cu`.

use super::plan::{Arg, Call, ELEMENT, ELEMENTWISE, Plan, Planned, WIDEST};
use super::plan::{element, elementwise_grid, expect_dtype, vec_define, width};
use crate::device::cuda::{Define, Source, Unit};
use crate::device::{DType, DeviceError};
use crate::ops::adamw::Factors;
use crate::ops::{AdamW, CpuKernel, expect_len};

static SOURCE: Source = Source::with_headers("adamw.cu", include_str!("adamw.cu"), &[ELEMENT, ELEMENTWISE]);

/// Starts and ends of what does not decay, of one launch: 57 blocks of a GPT-2. Arguments of a kernel are 4 KiB at most.
const BOUNDS: usize = 456;

impl Planned for AdamW {
    fn plan(&self) -> Result<Plan, DeviceError> {
        let n = self.param.len();
        for (name, buffer) in [("grad", &self.grad), ("m", &self.m), ("v", &self.v)] {
            expect_len(Self::NAME, name, buffer.len(), n)?;
        }
        expect_len(Self::NAME, "scale", self.scale.len(), 1)?;
        expect_dtype(DType::F32, &[&self.param, &self.m, &self.v, &self.scale])?;
        if let Some(copy) = &self.copy {
            expect_len(Self::NAME, "copy", copy.len(), n)?;
            expect_dtype(DType::Bf16, &[copy])?;
        }
        let calls = self.launches().iter().map(Self::call).collect::<Result<_, _>>()?;
        Ok(Plan {
            scratch_bytes: 0,
            calls,
        })
    }
}

impl AdamW {
    /// The same update in parts whose bounds fit into a table each: one, as a rule.
    fn launches(&self) -> Vec<Self> {
        let later = self.spared.chunks(BOUNDS / 2).skip(1);
        let ends = later.map(|spared| spared[0].start).chain([self.param.len()]);
        let mut parts = Vec::new();
        let mut start = 0;
        for end in ends {
            parts.push(self.slice(&(start..end)));
            start = end;
        }
        parts
    }

    fn call(&self) -> Result<Call, DeviceError> {
        let n = self.param.len();
        let mut buffers = vec![&self.param, &self.grad, &self.m, &self.v];
        buffers.extend(&self.copy);
        let bounds: Vec<usize> = self
            .spared
            .iter()
            .flat_map(|spared| [spared.start, spared.end])
            .collect();
        let packed = bounds
            .iter()
            .all(|bound| bound.is_multiple_of(WIDEST) || *bound == n);
        let width = if packed { width(0, &buffers) } else { 1 };
        // The factor of the gradient is read on the device.
        let f = Factors::new(self, 1.0);
        let copy = self.copy.clone().map_or(Arg::Null, Arg::Write);
        let mut args = vec![
            Arg::Write(self.param.clone()),
            Arg::Read(self.grad.clone()),
            Arg::Write(self.m.clone()),
            Arg::Write(self.v.clone()),
            copy,
            Arg::Read(self.scale.clone()),
        ];
        for moment in 0..2 {
            let factors = [f.betas[moment], f.shares[moment], f.corrections[moment]];
            args.extend(factors.map(Arg::F32));
        }
        args.extend([f.eps, f.lr, f.weight_decay].map(Arg::F32));
        args.push(Arg::U64(n as u64));
        let mut table = vec![0; 1 + BOUNDS];
        table[0] = bounds.len() as u64;
        for (entry, bound) in table[1..].iter_mut().zip(bounds) {
            *entry = bound as u64;
        }
        args.push(Arg::Table(table));
        Ok(Call {
            source: &SOURCE,
            kernel: Self::NAME,
            defines: defines(element(Self::NAME, &self.grad)?, self.copy.is_some(), width),
            grid: elementwise_grid(n, width, 1),
            args,
        })
    }
}

fn defines(grad: &'static str, copy: bool, width: usize) -> Vec<Define> {
    vec![
        Define::word("GRAD", grad),
        Define::number("COPY", i64::from(copy)),
        Define::number("BOUNDS", BOUNDS as i64),
        vec_define(width),
    ]
}

pub(super) fn units() -> Vec<Unit> {
    let mut units = Vec::new();
    for grad in ["f32", "bf16"] {
        for copy in [false, true] {
            units.extend([8, 1].map(|width| Unit::new(&SOURCE, &defines(grad, copy, width))));
        }
    }
    units
}
