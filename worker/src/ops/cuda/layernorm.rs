//! Launches of `layernorm.cu`, compiled for each number of channels that is met.

use super::column_sum::{Partials, Target};
use super::plan::{Arg, Call, ELEMENT, Plan, Planned, Scratch, WIDEST, count};
use super::plan::{element, expect_dtype, vec_define, width};
use crate::device::DeviceError;
use crate::device::cuda::{Define, Grid, Source, Unit};
use crate::ops::{CpuKernel, LayerNormBackward, LayerNormForward, expect_len};

const WARP: usize = 32;
/// Threads of a block in which each warp has a row of its own.
const WARPS_APART: usize = 256;
/// Most threads of a block.
const MOST: usize = 1024;
/// Packs of a row that one lane holds before the row goes to a whole block.
const LANE_PACKS: usize = 4;
/// Blocks of the backward that fill any GPU; each leaves partial sums.
const BLOCKS: usize = 1024;
/// Rows of a thread group that are worth a block of the backward.
const GROUP_ROWS: usize = 4;

static SOURCE: Source = Source::with_headers("layernorm.cu", include_str!("layernorm.cu"), &[ELEMENT]);

/// How the threads of a block share its rows.
#[derive(Clone, Copy)]
struct Rows {
    channels: usize,
    width: usize,
    /// Threads of one row: a warp, or the block.
    threads: usize,
}

impl Rows {
    /// Only the row itself is in registers.
    fn forward(channels: usize, width: usize) -> Self {
        let packs = channels / width;
        let threads = if packs <= WARP * LANE_PACKS {
            WARP
        } else {
            packs.div_ceil(2)
        };
        Self::with(channels, width, threads)
    }

    /// Three rows and two sums are: one pack of each a thread.
    fn backward(channels: usize, width: usize) -> Self {
        Self::with(channels, width, channels / width)
    }

    fn with(channels: usize, width: usize, threads: usize) -> Self {
        let threads = threads.next_multiple_of(WARP).clamp(WARP, MOST);
        Self {
            channels,
            width,
            threads,
        }
    }

    fn block_threads(&self) -> usize {
        if self.threads == WARP {
            WARPS_APART
        } else {
            self.threads
        }
    }

    /// Rows that a block works on at once.
    fn at_once(&self) -> usize {
        self.block_threads() / self.threads
    }

    fn grid(&self, op: &'static str, blocks: usize) -> Result<Grid, DeviceError> {
        Ok(Grid::linear(
            count(op, "blocks", blocks)?,
            self.block_threads() as u32,
        ))
    }

    fn defines(&self, act: &'static str) -> Vec<Define> {
        vec![
            Define::word("ACT", act),
            vec_define(self.width),
            Define::number("CHANNELS", self.channels as i64),
            Define::number("ROW_THREADS", self.threads as i64),
        ]
    }
}

impl Planned for LayerNormForward {
    fn plan(&self) -> Result<Plan, DeviceError> {
        let channels = self.weight.len();
        let rows = rows(Self::NAME, self.inp.len(), channels)?;
        expect_len(Self::NAME, "bias", self.bias.len(), channels)?;
        expect_len(Self::NAME, "out", self.out.len(), self.inp.len())?;
        let buffers = [&self.inp, &self.weight, &self.bias, &self.out];
        expect_dtype(self.inp.dtype(), &buffers)?;
        let shape = Rows::forward(channels, width(channels, &buffers));
        Ok(Plan::one(Call {
            source: &SOURCE,
            kernel: Self::NAME,
            defines: shape.defines(element(Self::NAME, &self.inp)?),
            grid: shape.grid(Self::NAME, rows.div_ceil(shape.at_once()))?,
            args: vec![
                Arg::Read(self.inp.clone()),
                Arg::Read(self.weight.clone()),
                Arg::Read(self.bias.clone()),
                Arg::Write(self.out.clone()),
                Arg::U32(count(Self::NAME, "rows", rows)?),
            ],
        }))
    }
}

impl Planned for LayerNormBackward {
    fn plan(&self) -> Result<Plan, DeviceError> {
        let channels = self.weight.len();
        let rows = rows(Self::NAME, self.inp.len(), channels)?;
        expect_len(Self::NAME, "dout", self.dout.len(), self.inp.len())?;
        expect_len(Self::NAME, "dinp", self.dinp.len(), self.inp.len())?;
        expect_len(Self::NAME, "dweight", self.dweight.len(), channels)?;
        expect_len(Self::NAME, "dbias", self.dbias.len(), channels)?;
        let buffers = [&self.dout, &self.inp, &self.weight, &self.dinp];
        expect_dtype(self.inp.dtype(), &buffers)?;
        expect_dtype(self.dweight.dtype(), &[&self.dbias])?;
        let act = element(Self::NAME, &self.inp)?;
        let shape = Rows::backward(channels, width(channels, &buffers));
        let block_rows = rows.div_ceil(BLOCKS).max(shape.at_once() * GROUP_ROWS);
        let blocks = rows.div_ceil(block_rows);
        let mut scratch = Scratch::default();
        let partials = Partials {
            offset: scratch.take(blocks * 2 * channels * size_of::<f32>()),
            parts: blocks,
            act,
        };
        let rows_back = Call {
            source: &SOURCE,
            kernel: Self::NAME,
            defines: shape.defines(act),
            grid: shape.grid(Self::NAME, blocks)?,
            args: vec![
                Arg::Read(self.dout.clone()),
                Arg::Read(self.inp.clone()),
                Arg::Read(self.weight.clone()),
                Arg::Write(self.dinp.clone()),
                Arg::Scratch(partials.offset),
                Arg::U32(count(Self::NAME, "rows", rows)?),
                Arg::U32(block_rows as u32),
                Arg::flag(self.accumulate_dinp),
            ],
        };
        let dweight = Target {
            out: &self.dweight,
            accumulate: self.accumulate_dweight,
        };
        let dbias = Target {
            out: &self.dbias,
            accumulate: self.accumulate_dbias,
        };
        Ok(Plan {
            scratch_bytes: scratch.bytes(),
            calls: vec![rows_back, partials.add(Self::NAME, dweight, Some(dbias))?],
        })
    }
}

fn rows(op: &'static str, len: usize, channels: usize) -> Result<usize, DeviceError> {
    if channels == 0 || !len.is_multiple_of(channels) {
        let what = format!("`inp` has {len} elements, which is no number of rows of {channels}");
        return Err(DeviceError::Shape { op, what });
    }
    Ok(len / channels)
}

/// For each way to share rows: a warp a row, a block a row, and nothing aligned.
pub(super) fn units() -> Vec<Unit> {
    let shapes = [(128, WIDEST), (768, WIDEST), (1600, WIDEST), (33, 1)];
    let mut units = Vec::new();
    for act in ["f32", "bf16"] {
        for (channels, width) in shapes {
            units.push(Unit::new(&SOURCE, &Rows::forward(channels, width).defines(act)));
            units.push(Unit::new(&SOURCE, &Rows::backward(channels, width).defines(act)));
        }
    }
    units
}
