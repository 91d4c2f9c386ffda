//! The sum over rows: the gradient of a bias. Its CUDA kernels are the second stage of `LayerNorm`'s backward too, and add
//! gradients to others.

use super::cuda::plan::{
    Arg, Call, ELEMENT, ELEMENTWISE, Plan, Planned, Scratch, THREADS, WIDEST, count, element,
    elementwise_grid, grad_defines, grad_units, width,
};
use super::kernel::{Real, by_dtypes, kernel};
use super::matrix::Matrix;
use super::stored::Stored;
use super::{CpuKernel, expect_len};
use crate::device::cuda::{CompileUnit, Grid, KernelSource};
use crate::device::{Buffer, Cpu, DeviceError};

/// Columns that one part of the work sums.
const WIDTH: usize = 256;
/// Rows whose sum is formed on its own before it is added to the total: keeps the rounding error small.
const ROWS: usize = 64;

/// `out[c] = Σ_r x[r, c]`, or added to what is there
#[derive(Clone, Debug)]
pub struct ColumnSum {
    /// `[R, C]`
    pub x: Buffer,
    /// `[C]`, of type G
    pub out: Buffer,
    /// Add to `out` instead of overwriting it.
    pub accumulate: bool,
}

impl CpuKernel for ColumnSum {
    const NAME: &'static str = "column_sum";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtypes!(Self::NAME, self.x.dtype(), self.out.dtype(), (S, G) => self.compute::<S, G>(cpu))
    }
}

impl ColumnSum {
    /// Rows and columns of `x`.
    fn sizes(&self) -> Result<(usize, usize), DeviceError> {
        let columns = self.out.len();
        let rows = self.x.len() / columns.max(1);
        expect_len(Self::NAME, "x", self.x.len(), rows * columns)?;
        Ok((rows, columns))
    }

    fn compute<S: Stored, G: Stored<Real = S::Real>>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let (rows, columns) = self.sizes()?;
        let x = self.x.host::<S>()?;
        let mut out = self.out.host_mut::<G>()?;
        let x = Matrix::dense(&x, rows, columns);
        let parts = out.chunks_mut(WIDTH).enumerate().collect();
        let isa = cpu.isa();
        cpu.for_each_part(parts, |(i, out): (usize, &mut [G])| {
            let x = x.cols(i * WIDTH..i * WIDTH + out.len());
            G::write(isa, out, self.accumulate, |out| {
                if !self.accumulate {
                    out.fill(G::Real::ZERO);
                }
                for first in (0..rows).step_by(ROWS) {
                    let block = x.rows(first..rows.min(first + ROWS));
                    S::read_matrix(isa, block, |block| add_rows(isa, block, out));
                }
            });
        });
        Ok(())
    }
}

kernel! {
    /// `out += Σ rows of x`, at most [`WIDTH`] columns. The sum of the rows is formed first.
    fn add_rows<'a, T>(x: Matrix<'a, T>, out: &'a mut [T]) -> () {
        let mut block = [T::ZERO; WIDTH];
        for row in 0..x.row_count() {
            for (sum, &x) in block.iter_mut().zip(x.row(row)) {
                *sum += x;
            }
        }
        for (out, &sum) in out.iter_mut().zip(&block) {
            *out += sum;
        }
    }
}

/// Lanes of a warp.
const WARP: usize = 32;
/// Blocks of the first stage that fill any GPU.
const BLOCKS: usize = 1024;
/// Rows that are worth a block of the first stage.
const SLAB_ROWS: usize = 64;
/// Threads of a block of the second stage.
const ADDING: u32 = 1024;

static SOURCE: KernelSource = KernelSource::with_headers(
    "column_sum.cu",
    include_str!("cuda/column_sum.cu"),
    &[ELEMENT, ELEMENTWISE],
);

impl Planned for ColumnSum {
    fn plan(&self) -> Result<Plan, DeviceError> {
        let (rows, columns) = self.sizes()?;
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
            defines: grad_defines(act, element(Self::NAME, &self.out)?, width),
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
            defines: grad_defines(act, grad, width),
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
            defines: grad_defines(self.act, element(op, first.out)?, WIDEST),
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

pub(super) fn units() -> Vec<CompileUnit> {
    grad_units(&SOURCE)
}
