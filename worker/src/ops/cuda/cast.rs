//! Launches of `cast.cu`.

use super::plan::{
    Arg, Call, ELEMENT, ELEMENTWISE, Plan, Planned, element, elementwise_grid, vec_define, width,
};
use crate::device::DeviceError;
use crate::device::cuda::{Define, Source, Unit};
use crate::ops::{Cast, CpuKernel, expect_len};

static SOURCE: Source = Source::with_headers("cast.cu", include_str!("cast.cu"), &[ELEMENT, ELEMENTWISE]);

impl Planned for Cast {
    fn plan(&self) -> Result<Plan, DeviceError> {
        let n = self.x.len();
        expect_len(Self::NAME, "out", self.out.len(), n)?;
        let (from, to) = (element(Self::NAME, &self.x)?, element(Self::NAME, &self.out)?);
        let width = width(0, &[&self.x, &self.out]);
        Ok(Plan::one(Call {
            source: &SOURCE,
            kernel: Self::NAME,
            defines: defines(from, to, width),
            grid: elementwise_grid(n, width, 2),
            args: vec![
                Arg::Read(self.x.clone()),
                Arg::Write(self.out.clone()),
                Arg::U64(n as u64),
            ],
        }))
    }
}

fn defines(from: &'static str, to: &'static str, width: usize) -> Vec<Define> {
    vec![
        Define::word("FROM", from),
        Define::word("TO", to),
        vec_define(width),
    ]
}

pub(super) fn units() -> Vec<Unit> {
    let mut units = Vec::new();
    for from in ["f32", "bf16"] {
        for to in ["f32", "bf16"] {
            units.extend([8, 1].map(|width| Unit::new(&SOURCE, &defines(from, to, width))));
        }
    }
    units
}
