//! Launches of `column_sum.cu`: the bias of a linear layer, the second stage of LayerNorm's backward, and gradients that
//! are added to others.

use super::plan::{
    Arg, Call, ELEMENT, ELEMENTWISE, Plan, Planned, Scratch, THREADS, count, element, elementwise_grid,
    vec_define, width,
};
use crate::device::cuda::{Define, Grid, Source, Unit};
use crate::device::{Buffer, DeviceError};
use crate::ops::{ColumnSum, CpuKernel, expect_len};

/// Lanes of a warp.
const WARP: usize = 32;
/// Blocks of the first stage that fill any GPU.
const BLOCKS: usize = 1024;
/// Rows that are worth a block of the first stage.
const SLAB_ROWS: usize = 64;
/// Threads of a block of the second stage.
const ADDING: u32 = 1024;

static SOURCE: Source = Source::with_headers(
    "column_sum.cu",
    include_str!("column_sum.cu"),
    &[ELEMENT, ELEMENTWISE],
);

impl Planned for ColumnSum {
    fn plan(&self) -> Result<Plan, DeviceError> {
        let columns = self.out.len();
        let rows = self.x.len() / columns.max(1);
        expect_len(Self::NAME, "x", self.x.len(), rows * columns)?;
        if rows == 1 {
            return self.plan_of_a_row();
        }
        let width = width(columns, &[&self.x]);
        let tiles = columns.div_ceil(WARP * width);
        let slabs = (BLOCKS / tiles.max(1)).clamp(1, rows.div_ceil(SLAB_ROWS).max(1));
        let slab_rows = rows.div_ceil(slabs).max(1);
        let slabs = rows.div_ceil(slab_rows);
        let mut scratch = Scratch::default();
        let partials = scratch.take(slabs * columns * size_of::<f32>());
        let act = element(Self::NAME, &self.x)?;
        let sums = Call {
            source: &SOURCE,
            kernel: "column_partials",
            defines: defines(act, element(Self::NAME, &self.out)?, width),
            grid: Grid {
                blocks: [
                    count(Self::NAME, "columns", tiles)?,
                    count(Self::NAME, "rows", slabs)?,
                    1,
                ],
                ..Grid::linear(1, THREADS)
            },
            args: vec![
                Arg::Read(self.x.clone()),
                Arg::Scratch(partials),
                Arg::U32(count(Self::NAME, "rows", rows)?),
                Arg::U32(count(Self::NAME, "columns", columns)?),
                Arg::U32(slab_rows as u32),
            ],
        };
        let first = Target {
            out: &self.out,
            accumulate: self.accumulate,
        };
        let partials = Partials {
            offset: partials,
            parts: slabs,
            act,
        };
        Ok(Plan {
            scratch_bytes: scratch.bytes(),
            calls: vec![sums, partials.add(Self::NAME, first, None)?],
        })
    }
}

impl ColumnSum {
    /// An element-wise kernel: a shard of the gradients is one row as long as the shard.
    fn plan_of_a_row(&self) -> Result<Plan, DeviceError> {
        let (act, grad) = (element(Self::NAME, &self.x)?, element(Self::NAME, &self.out)?);
        let (n, width) = (self.x.len(), width(0, &[&self.x, &self.out]));
        Ok(Plan::one(Call {
            source: &SOURCE,
            kernel: "single_row",
            defines: defines(act, grad, width),
            grid: elementwise_grid(n, width, 2),
            args: vec![
                Arg::Read(self.x.clone()),
                Arg::Write(self.out.clone()),
                Arg::U64(n as u64),
                Arg::flag(self.accumulate),
            ],
        }))
    }
}

/// Where sums over columns go.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
    /// `[C]`
    pub(super) out: &'a Buffer,
    /// Add to what is there.
    pub(super) accumulate: bool,
}

/// Sums that are to be added: `[parts, C]` f32, or `[parts, 2, C]` where they go to two targets.
pub(super) struct Partials {
    /// Bytes from the start of the scratch memory.
    pub(super) offset: usize,
    /// How many.
    pub(super) parts: usize,
    /// Type of the activations that they come from.
    pub(super) act: &'static str,
}

impl Partials {
    /// The kernel that adds them in order.
    pub(super) fn add(
        &self,
        op: &'static str,
        first: Target<'_>,
        second: Option<Target<'_>>,
    ) -> Result<Call, DeviceError> {
        let columns = first.out.len();
        let total = if second.is_some() { 2 * columns } else { columns };
        let (out, accumulate) = second.map_or((Arg::Null, false), |second| {
            (Arg::Write(second.out.clone()), second.accumulate)
        });
        Ok(Call {
            source: &SOURCE,
            kernel: "add_partials",
            defines: defines(self.act, element(op, first.out)?, super::plan::WIDEST),
            grid: Grid::linear(count(op, "columns", total)?.div_ceil(WARP as u32), ADDING),
            args: vec![
                Arg::Scratch(self.offset),
                Arg::Write(first.out.clone()),
                out,
                Arg::U32(count(op, "partial sums", self.parts)?),
                Arg::U32(count(op, "columns", columns)?),
                Arg::flag(first.accumulate),
                Arg::flag(accumulate),
            ],
        })
    }
}

fn defines(act: &'static str, grad: &'static str, width: usize) -> Vec<Define> {
    vec![
        Define::word("ACT", act),
        Define::word("GRAD", grad),
        vec_define(width),
    ]
}

pub(super) fn units() -> Vec<Unit> {
    let types = [("f32", "f32"), ("bf16", "bf16"), ("bf16", "f32")];
    let units = types.map(|(act, grad)| [8, 1].map(|width| Unit::new(&SOURCE, &defines(act, grad, width))));
    units.concat()
}
