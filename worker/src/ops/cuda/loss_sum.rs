//! Launches of `loss_sum.cu`.

use super::plan::{Arg, Call, ELEMENT, Plan, Planned, count, expect_dtype};
use crate::device::cuda::{Grid, Source, Unit};
use crate::device::{DType, DeviceError};
use crate::ops::{CpuKernel, LossSum, expect_len};

/// Threads of the one block.
const THREADS: u32 = 1024;

static SOURCE: Source = Source::with_headers("loss_sum.cu", include_str!("loss_sum.cu"), &[ELEMENT]);

impl Planned for LossSum {
    fn plan(&self) -> Result<Plan, DeviceError> {
        expect_len(Self::NAME, "total", self.total.len(), 1)?;
        expect_dtype(DType::F32, &[&self.losses])?;
        expect_dtype(DType::F64, &[&self.total])?;
        Ok(Plan::one(Call {
            source: &SOURCE,
            kernel: Self::NAME,
            defines: Vec::new(),
            grid: Grid::linear(1, THREADS),
            args: vec![
                Arg::Read(self.losses.clone()),
                Arg::Write(self.total.clone()),
                Arg::U32(count(Self::NAME, "losses", self.losses.len())?),
                Arg::flag(self.accumulate),
            ],
        }))
    }
}

pub(super) fn units() -> Vec<Unit> {
    vec![Unit::new(&SOURCE, &[])]
}
