//! Launches of `cross_entropy.cu`.

use super::plan::{Arg, Call, ELEMENT, Plan, Planned, count, element, expect_dtype};
use crate::device::cuda::{Define, Grid, Source, Unit};
use crate::device::{DType, DeviceError};
use crate::ops::{CpuKernel, CrossEntropy, expect_len};

const WARP: u32 = 32;
/// Threads of a block in which each warp has a row of its own.
const WARPS_APART: u32 = 256;

static SOURCE: Source =
    Source::with_headers("cross_entropy.cu", include_str!("cross_entropy.cu"), &[ELEMENT]);

impl Planned for CrossEntropy {
    fn plan(&self) -> Result<Plan, DeviceError> {
        let rows = self.targets.len();
        let vocab = self.logits.len() / rows.max(1);
        expect_len(Self::NAME, "logits", self.logits.len(), rows * vocab)?;
        expect_len(Self::NAME, "losses", self.losses.len(), rows)?;
        expect_dtype(DType::I32, &[&self.targets])?;
        expect_dtype(DType::F32, &[&self.losses])?;
        let logits = match &self.dlosses {
            None => Arg::Read(self.logits.clone()),
            Some(dlosses) => {
                expect_len(Self::NAME, "dlosses", dlosses.len(), rows)?;
                expect_dtype(DType::F32, &[dlosses])?;
                Arg::Write(self.logits.clone())
            }
        };
        // A row is a warp's or a block's.
        let (threads, block) = match vocab * self.logits.dtype().bytes() {
            0..=4096 => (WARP, WARPS_APART),
            4097..=32_768 => (256, 256),
            _ => (1024, 1024),
        };
        let blocks = rows.div_ceil((block / threads) as usize);
        Ok(Plan::one(Call {
            source: &SOURCE,
            kernel: Self::NAME,
            defines: defines(element(Self::NAME, &self.logits)?, threads),
            grid: Grid::linear(count(Self::NAME, "blocks", blocks)?, block),
            args: vec![
                logits,
                Arg::Read(self.targets.clone()),
                Arg::Write(self.losses.clone()),
                Arg::read_if(self.dlosses.as_ref()),
                Arg::U32(count(Self::NAME, "rows", rows)?),
                Arg::U32(count(Self::NAME, "logits a row", vocab)?),
            ],
        }))
    }
}

fn defines(act: &'static str, threads: u32) -> Vec<Define> {
    vec![
        Define::word("ACT", act),
        Define::number("ROW_THREADS", i64::from(threads)),
    ]
}

pub(super) fn units() -> Vec<Unit> {
    let units = ["f32", "bf16"].map(|act| [WARP, 256, 1024].map(|n| Unit::new(&SOURCE, &defines(act, n))));
    units.concat()
}
