//! Launches of `cross_entropy.cu`.

use super::plan::{Arg, Call, ELEMENT, Plan, Planned, count, element, expect_dtype};
use crate::device::cuda::{Define, Grid, Source, Unit};
use crate::device::{Buffer, DType, DeviceError};
use crate::ops::{CpuKernel, CrossEntropyBackward, CrossEntropyForward, expect_len};

const WARP: u32 = 32;
/// Threads of a block in which each warp has a row of its own.
const WARPS_APART: u32 = 256;

static SOURCE: Source =
    Source::with_headers("cross_entropy.cu", include_str!("cross_entropy.cu"), &[ELEMENT]);

impl Planned for CrossEntropyForward {
    fn plan(&self) -> Result<Plan, DeviceError> {
        let rows = Rows::of(Self::NAME, &self.logits, &self.targets)?;
        expect_len(Self::NAME, "losses", self.losses.len(), rows.count)?;
        expect_len(Self::NAME, "lse", self.lse.len(), rows.count)?;
        expect_dtype(DType::F32, &[&self.losses, &self.lse])?;
        let args = [
            Arg::Read(self.logits.clone()),
            Arg::Read(self.targets.clone()),
            Arg::Write(self.losses.clone()),
            Arg::Write(self.lse.clone()),
        ];
        rows.plan(Self::NAME, &args)
    }
}

impl Planned for CrossEntropyBackward {
    fn plan(&self) -> Result<Plan, DeviceError> {
        let rows = Rows::of(Self::NAME, &self.logits_dlogits, &self.targets)?;
        expect_len(Self::NAME, "dlosses", self.dlosses.len(), rows.count)?;
        expect_len(Self::NAME, "lse", self.lse.len(), rows.count)?;
        expect_dtype(DType::F32, &[&self.dlosses, &self.lse])?;
        let args = [
            Arg::Write(self.logits_dlogits.clone()),
            Arg::Read(self.targets.clone()),
            Arg::Read(self.lse.clone()),
            Arg::Read(self.dlosses.clone()),
        ];
        rows.plan(Self::NAME, &args)
    }
}

struct Rows {
    count: usize,
    vocab: usize,
    act: &'static str,
    /// Threads of one row: a warp, or the block.
    threads: u32,
}

impl Rows {
    fn of(op: &'static str, logits: &Buffer, targets: &Buffer) -> Result<Self, DeviceError> {
        let rows = targets.len();
        let vocab = logits.len() / rows.max(1);
        expect_len(op, "logits", logits.len(), rows * vocab)?;
        expect_dtype(DType::I32, &[targets])?;
        let act = element(op, logits)?;
        let threads = match vocab * logits.dtype().bytes() {
            0..=4096 => WARP,
            4097..=32_768 => 256,
            _ => 1024,
        };
        Ok(Self {
            count: rows,
            vocab,
            act,
            threads,
        })
    }

    fn plan(&self, op: &'static str, buffers: &[Arg]) -> Result<Plan, DeviceError> {
        let block = if self.threads == WARP {
            WARPS_APART
        } else {
            self.threads
        };
        let blocks = self.count.div_ceil((block / self.threads) as usize);
        let mut args = buffers.to_vec();
        args.push(Arg::U32(count(op, "rows", self.count)?));
        args.push(Arg::U32(count(op, "logits a row", self.vocab)?));
        Ok(Plan::one(Call {
            source: &SOURCE,
            kernel: op,
            defines: defines(self.act, self.threads),
            grid: Grid::linear(count(op, "blocks", blocks)?, block),
            args,
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
