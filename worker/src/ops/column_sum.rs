//! Biases: a row that is added to all rows, and the sum over rows, which is its gradient. The CUDA
//! kernels of the sum are also the second stage of `LayerNorm`'s backward, and they add gradients
//! to other gradients.

use super::cpu::kernel::{Real, add_into, kernel, runs_in, update};
use super::cpu::matrix::Matrix;
use super::cpu::stored::Stored;
use super::cuda::plan::{
    Call, Plan, Scratch, THREADS, WIDEST, count, element, elementwise_grid, expect_dtype, grad_defines,
    kernels, width,
};
use super::{Cpu, Operation, expect_len};
use crate::cuda::{Grid, KernelSource};
use crate::memory::{Buffer, DeviceError};

/// Columns that one part of the work sums.
const WIDTH: usize = 256;
/// Rows that are summed separately before their sum is added to the total. This keeps the rounding
/// error small.
const ROWS: usize = 64;

/// `out[r, c] = (inp[r, c] + bias[c]) + residual[r, c]`, in this order and rounded once.
/// [`super::LinearForward`] adds the same to its product; this operation is for a layer whose
/// product is a sum over ranks. The gradients of `inp` and `residual` equal the gradient of `out`;
/// the gradient of the bias is its [`ColumnSum`].
#[derive(Clone, Debug)]
pub struct AddBiasResidual {
    /// `[R, C]`; may be `out`
    pub inp: Buffer,
    /// `[C]`
    pub bias: Option<Buffer>,
    /// `[R, C]`
    pub residual: Option<Buffer>,
    /// `[R, C]`
    pub out: Buffer,
}

impl Operation for AddBiasResidual {
    const NAME: &'static str = "add_bias_residual";

    runs_in!(out);

    fn plan(&self) -> Result<Plan, DeviceError> {
        let (op, n) = (Self::NAME, self.out.len());
        let columns = self.columns()?;
        let mut buffers = vec![&self.out, &self.inp];
        buffers.extend(self.bias.iter().chain(&self.residual));
        expect_dtype(self.out.dtype(), &buffers)?;
        let (act, width) = (element(op, &self.out)?, width(columns, &buffers));
        let grid = elementwise_grid(n, width, 1);
        let call = Call::new(&SOURCE, op, grad_defines(act, act, width), grid)
            .read([&self.inp])
            .read_if(self.bias.as_ref())
            .read_if(self.residual.as_ref())
            .write([&self.out])
            .u32([count(op, "columns", columns)?]);
        Ok(call.u64([n as u64]).into())
    }
}

impl AddBiasResidual {
    /// Columns of the bias; 0 without a bias.
    fn columns(&self) -> Result<usize, DeviceError> {
        let (op, n) = (Self::NAME, self.out.len());
        expect_len(op, "inp", self.inp.len(), n)?;
        if let Some(residual) = &self.residual {
            expect_len(op, "residual", residual.len(), n)?;
        }
        let columns = self.bias.as_ref().map_or(0, Buffer::len);
        if self.bias.is_some() && (columns == 0 || !n.is_multiple_of(columns)) {
            let what = format!("{n} elements cannot be divided into rows of {columns}, the length of `bias`");
            return Err(DeviceError::Shape { op, what });
        }
        Ok(columns)
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        // Without a bias rows may end anywhere.
        let columns = self.columns()?.max(1);
        let in_place = self.inp.same(&self.out);
        let [inp, bias, residual] = [
            (!in_place).then_some(&self.inp),
            self.bias.as_ref(),
            self.residual.as_ref(),
        ]
        .map(|buffer| buffer.map(Buffer::host::<S>).transpose());
        let (inp, bias, residual) = (inp?, bias?, residual?);
        let (inp, residual) = (inp.as_deref(), residual.as_deref());
        // Without a bias, nothing is added.
        let bias = bias.as_deref().unwrap_or_default();
        let mut out = self.out.host_mut::<S>()?;
        let len = (PART / columns).max(1) * columns;
        let parts = out.chunks_mut(len).enumerate().collect();
        let isa = cpu.isa();
        cpu.for_each_part(parts, |(part, out): (usize, &mut [S])| {
            let range = part * len..part * len + out.len();
            S::write(isa, out, in_place, |out| {
                if let Some(inp) = inp {
                    S::widen(isa, &inp[range.clone()], out);
                }
                if !bias.is_empty() {
                    S::read(isa, bias, |bias| {
                        for row in out.chunks_exact_mut(columns) {
                            add_into(isa, bias, row);
                        }
                    });
                }
                if let Some(residual) = residual {
                    S::read(isa, &residual[range], |residual| add_into(isa, residual, out));
                }
            });
        });
        Ok(())
    }
}

/// Approximate number of elements of one part of the addition.
const PART: usize = 16_384;

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

impl Operation for ColumnSum {
    const NAME: &'static str = "column_sum";

    runs_in!(x, out);

    fn plan(&self) -> Result<Plan, DeviceError> {
        let (rows, columns) = self.sizes()?;
        let act = element(Self::NAME, &self.x)?;
        let grad = element(Self::NAME, &self.out)?;
        if rows == 1 {
            return Ok(self.single_row(act, grad).into());
        }
        let width = width(columns, &[&self.x]);
        let tiles = columns.div_ceil(WARP * width);
        let slabs = (BLOCKS / tiles.max(1)).clamp(1, rows.div_ceil(SLAB_ROWS).max(1));
        let slab_rows = rows.div_ceil(slabs).max(1);
        let slabs = rows.div_ceil(slab_rows);
        let mut scratch = Scratch::default();
        let partials = Partials {
            offset: scratch.take(slabs * columns * size_of::<f32>()),
            parts: slabs,
            act,
        };
        let tiles = count(Self::NAME, "columns", tiles)?;
        let slabs = count(Self::NAME, "rows", slabs)?;
        let rows = count(Self::NAME, "rows", rows)?;
        let columns = count(Self::NAME, "columns", columns)?;
        let grid = Grid::of([tiles, slabs, 1], THREADS);
        let sums = Call::new(&SOURCE, "column_partials", grad_defines(act, grad, width), grid)
            .read([&self.x])
            .scratch([partials.offset])
            .u32([rows, columns, slab_rows as u32]);
        let total = partials.add(Self::NAME, &[(&self.out, self.accumulate)])?;
        Ok(scratch.plan(vec![sums, total]))
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
            update(&mut block, x.row(row), |sum, x| *sum += x);
        }
        update(out, &block, |out, sum| *out += sum);
    }
}

/// Lanes of a warp.
const WARP: usize = 32;
/// Blocks of the first stage that fill any GPU.
const BLOCKS: usize = 1024;
/// Fewest rows for which a block of the first stage pays.
const SLAB_ROWS: usize = 64;
/// Threads of a block of the second stage.
const ADDING: u32 = 1024;

static SOURCE: KernelSource = kernels("column_sum.cu", include_str!("cuda/column_sum.cu"));

impl ColumnSum {
    /// An element-wise kernel: a shard of the gradients is one row as long as the shard.
    fn single_row(&self, act: &'static str, grad: &'static str) -> Call {
        let (n, width) = (self.x.len(), width(0, &[&self.x, &self.out]));
        let (defines, grid) = (grad_defines(act, grad, width), elementwise_grid(n, width, 2));
        let call = Call::new(&SOURCE, "single_row", defines, grid);
        let call = call.read([&self.x]).write([&self.out]);
        call.u64([n as u64]).flag(self.accumulate)
    }
}

/// Partial sums: `[parts, C]` f32, or `[parts, 2, C]` for two targets.
pub(super) struct Partials {
    /// Bytes from the start of the scratch memory.
    pub(super) offset: usize,
    /// How many.
    pub(super) parts: usize,
    /// Type of the activations that were summed.
    pub(super) act: &'static str,
}

impl Partials {
    /// The kernel that adds the partial sums in order, to one or two targets, `[C]`, each with whether to add to what it
    /// holds.
    pub(super) fn add(&self, op: &'static str, targets: &[(&Buffer, bool)]) -> Result<Call, DeviceError> {
        let ((first, accumulate_first), second) = (targets[0], targets.get(1));
        let columns = first.len();
        let defines = grad_defines(self.act, element(op, first)?, WIDEST);
        let total = count(op, "columns", targets.len() * columns)?;
        let grid = Grid::linear(total.div_ceil(WARP as u32), ADDING);
        let (parts, columns) = (
            count(op, "partial sums", self.parts)?,
            count(op, "columns", columns)?,
        );
        let call = Call::new(&SOURCE, "add_partials", defines, grid)
            .scratch([self.offset])
            .write([first])
            .write_if(second.map(|(out, _)| *out))
            .u32([parts, columns])
            .flag(accumulate_first)
            .flag(second.is_some_and(|(_, accumulate)| *accumulate));
        Ok(call)
    }
}
