//! Launches of `fill.cu`.

use half::bf16;

use super::plan::{
    Arg, Call, ELEMENT, ELEMENTWISE, Plan, Planned, element, elementwise_grid, vec_define, width,
};
use crate::device::cuda::{Define, Grid, Source, Unit};
use crate::device::{DType, DeviceError};
use crate::ops::{CpuKernel, Fill, Scale};

/// Bytes that a thread writes.
const BYTES: usize = 16;

static SOURCE: Source = Source::with_headers("fill.cu", include_str!("fill.cu"), &[ELEMENT, ELEMENTWISE]);

impl Planned for Fill {
    fn plan(&self) -> Result<Plan, DeviceError> {
        let twice = |bits: u32| u64::from(bits) << 32 | u64::from(bits);
        let pattern = match self.out.dtype() {
            DType::F64 => self.value.to_bits(),
            DType::F32 => twice((self.value as f32).to_bits()),
            DType::Bf16 => {
                let bits = u32::from(bf16::from_f64(self.value).to_bits());
                twice(bits << 16 | bits)
            }
            other => {
                let what = format!("cannot fill {other}");
                return Err(DeviceError::Shape { op: Self::NAME, what });
            }
        };
        let bytes = self.out.bytes();
        Ok(Plan::one(Call {
            source: &SOURCE,
            kernel: Self::NAME,
            defines: defines("f32", width(0, &[&self.out])),
            grid: Grid::covering(bytes.div_ceil(BYTES), super::plan::THREADS),
            args: vec![
                Arg::Write(self.out.clone()),
                Arg::U64(pattern),
                Arg::U64(bytes as u64),
            ],
        }))
    }
}

impl Planned for Scale {
    fn plan(&self) -> Result<Plan, DeviceError> {
        let (n, width) = (self.x.len(), width(0, &[&self.x]));
        Ok(Plan::one(Call {
            source: &SOURCE,
            kernel: Self::NAME,
            defines: defines(element(Self::NAME, &self.x)?, width),
            grid: elementwise_grid(n, width, 2),
            args: vec![
                Arg::Write(self.x.clone()),
                Arg::F32(self.factor),
                Arg::U64(n as u64),
            ],
        }))
    }
}

fn defines(act: &'static str, width: usize) -> Vec<Define> {
    vec![Define::word("ACT", act), vec_define(width)]
}

pub(super) fn units() -> Vec<Unit> {
    let units = ["f32", "bf16"].map(|act| [8, 1].map(|width| Unit::new(&SOURCE, &defines(act, width))));
    units.concat()
}
