//! A linear layer of each expert over its rows. Where these lie is read on the device.
//!
//! An expert has all its rows on one rank, or rows of each rank's tokens on that rank: as many as there are. So the bits of
//! a row must not depend on how many rows its expert has. On a CPU that takes two precautions, since `gemm` adds up a few
//! elements, and a long inner dimension, in an order of its own for their number: the inner dimension is divided here, and
//! a product of few elements is computed with rows of zeros behind its own.

use super::super::cpu::kernel::{Real, runs_in};
use super::super::cpu::matrix::{Matrix, MatrixMut, Tile, product};
use super::super::cpu::stored::Stored;
use super::super::cuda::plan::{Call, Plan, count, element, expect_dtype, grad_defines, kernels};
use super::super::linear::multiply;
use super::super::{Cpu, Isa, Operation, WeightLayout, expect_lens};
use crate::cuda::{Grid, KernelSource};
use crate::memory::{Buffer, DType, DeviceError};

/// Rows and columns of a tile of an output.
const TILE: [usize; 2] = [512, 256];
/// Columns of a tile are a multiple of this. The last tile has as many at least, where there are several.
const STEP: usize = 16;
/// Most elements of an output for which `gemm` sums in a different order.
const FEW: usize = 256;
/// Length of an inner dimension. `gemm` cuts a longer one.
const DEPTH: usize = 512;
/// Rows and columns of a block's tile on a GPU.
const CUDA_TILE: usize = 64;

/// Refuses rows of inputs and outputs, weights and offsets of other sizes; the number `M` of rows.
fn expect_rows(
    op: &'static str,
    [inp, out, weight, offsets]: [&Buffer; 4],
    [inputs, outputs]: [usize; 2],
) -> Result<usize, DeviceError> {
    let (rows, groups) = (inp.len() / inputs.max(1), offsets.len().saturating_sub(1));
    let sizes = [
        ("rows of inputs", inp, rows * inputs),
        ("rows of outputs", out, rows * outputs),
        ("weights", weight, groups * inputs * outputs),
        ("offsets", offsets, groups + 1),
    ];
    expect_lens(op, &sizes)?;
    offsets.expect_dtype(DType::I32)?;
    count(op, "rows", rows).map(|_| rows)
}

/// Rows of each expert. Refuses offsets that do not ascend, or end behind the last row.
fn rows_of_groups(op: &'static str, offsets: &Buffer, rows: usize) -> Result<Vec<usize>, DeviceError> {
    let offsets = offsets.host::<i32>()?;
    let offsets: &[i32] = &offsets;
    if offsets[0] == 0 && offsets.is_sorted() && offsets[offsets.len() - 1] as usize <= rows {
        let rows = offsets.windows(2).map(|pair| (pair[1] - pair[0]) as usize);
        return Ok(rows.collect());
    }
    let what = format!("`offsets` do not ascend from 0 to at most {rows} rows: {offsets:?}");
    Err(DeviceError::Shape { op, what })
}

/// `out[m] = inp[m] · weight[expert of m]`; 0 behind the last row. The gradient of the input is that of the output times the
/// same weights in the other layout.
#[derive(Clone, Debug)]
pub struct GroupedLinear {
    /// `[M, I]`
    pub inp: Buffer,
    /// `[G, I, O]` or `[G, O, I]`
    pub weight: Buffer,
    /// `[G + 1]`, i32: the first row of each expert, and behind the last row
    pub offsets: Buffer,
    /// `[M, O]`
    pub out: Buffer,
    /// `I` and `O`.
    pub features: [usize; 2],
    /// Layout of each expert's weight.
    pub layout: WeightLayout,
}

impl Operation for GroupedLinear {
    const NAME: &'static str = "grouped_linear";

    runs_in!(out);

    fn plan(&self) -> Result<Plan, DeviceError> {
        let (op, rows, groups) = (Self::NAME, self.check()?, self.offsets.len() - 1);
        let [_, outputs] = self.features;
        expect_dtype(self.out.dtype(), &[&self.inp, &self.weight])?;
        let act = element(op, &self.out)?;
        // Each expert's last tile may be short, and so may what lies behind the last row.
        let row_tiles = rows.div_ceil(CUDA_TILE) + groups + 1;
        let grid = tile_grid([row_tiles, outputs.div_ceil(CUDA_TILE), 1]);
        let call = Call::new(&SOURCE, op, grad_defines(act, act, 1), grid)
            .read([&self.inp, &self.weight, &self.offsets])
            .write([&self.out])
            .u32([rows as u32, groups as u32])
            .u32(self.features.map(|features| features as u32));
        Ok(call.flag(self.layout == WeightLayout::OutIn).into())
    }
}

impl GroupedLinear {
    fn check(&self) -> Result<usize, DeviceError> {
        let buffers = [&self.inp, &self.out, &self.weight, &self.offsets];
        expect_rows(Self::NAME, buffers, self.features)
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let groups = rows_of_groups(Self::NAME, &self.offsets, self.check()?)?;
        let ([inputs, outputs], isa) = (self.features, cpu.isa());
        let (inp, weights) = (self.inp.host::<S>()?, self.weight.host::<S>()?);
        let mut out = self.out.host_mut::<S>()?;
        let (mut inp, mut rest, mut parts) = (&*inp, &mut *out, Vec::new());
        for (group, rows) in groups.into_iter().enumerate() {
            let (own, own_out);
            (own, inp) = inp.split_at(rows * inputs);
            (own_out, rest) = rest.split_at_mut(rows * outputs);
            let weight = &weights[group * inputs * outputs..][..inputs * outputs];
            let weight = match self.layout {
                WeightLayout::InOut => Matrix::dense(weight, inputs, outputs),
                WeightLayout::OutIn => Matrix::dense(weight, outputs, inputs).transposed(),
            };
            let own = Matrix::dense(own, rows, inputs);
            let tiles = tiles(MatrixMut::dense(own_out, rows, outputs)).into_iter();
            parts.extend(tiles.map(|tile| (own.rows(tile.rows), weight.cols(tile.cols), tile.out)));
        }
        rest.fill(S::zeroed());
        cpu.for_each_part(parts, |(inp, weight, mut out)| {
            rows_product(isa, &mut out, inp, weight);
        });
        Ok(())
    }
}

/// Tiles of an output, by its size alone.
fn tiles<T>(out: MatrixMut<'_, T>) -> Vec<Tile<'_, T>> {
    let (width, mut step) = (out.col_count(), TILE[1]);
    while step < width && (1..STEP).contains(&(width % step)) {
        step += STEP;
    }
    out.tiles(TILE[0], step)
}

/// A tile of the products of an expert's rows.
fn rows_product<S: Stored>(isa: Isa, out: &mut MatrixMut<'_, S>, inp: Matrix<'_, S>, weight: Matrix<'_, S>) {
    let (rows, cols, inner) = (out.row_count(), out.col_count(), inp.col_count());
    let least = FEW / cols + 2;
    if rows >= least {
        return S::write_matrix(isa, out, false, |out| by_depth(isa, out, inp, weight));
    }
    let [mut longer, mut products] = [inner, cols].map(|cols| vec![S::zeroed(); least * cols]);
    for row in 0..rows {
        longer[row * inner..][..inner].copy_from_slice(inp.row(row));
    }
    let mut all = MatrixMut::dense(&mut products, least, cols);
    let longer = Matrix::dense(&longer, least, inner);
    S::write_matrix(isa, &mut all, false, |all| by_depth(isa, all, longer, weight));
    for row in 0..rows {
        out.row_mut(row).copy_from_slice(&products[row * cols..][..cols]);
    }
}

/// `out = lhs · rhs`, in equal parts of the inner dimension. An inner dimension of 0 gives 0.
fn by_depth<S: Stored>(isa: Isa, out: &mut MatrixMut<'_, S::Real>, lhs: Matrix<'_, S>, rhs: Matrix<'_, S>) {
    let inner = lhs.col_count();
    let parts = inner.div_ceil(DEPTH).max(1);
    let depth = inner.div_ceil(parts);
    for first in (0..parts).map(|part| part * depth) {
        let part = first..inner.min(first + depth);
        S::read_matrix(isa, lhs.cols(part.clone()), |lhs| {
            S::read_matrix(isa, rhs.rows(part), |rhs| {
                product(out, lhs, rhs, S::Real::ONE, first > 0);
            });
        });
    }
}

/// `out[g] = Σ lhs[m]ᵀ · rhs[m]` over the rows of expert `g`, or added to what is there: the gradient of the weights. These
/// are `[G, I, O]` where `lhs` is the input and `rhs` the gradient of the output, else `[G, O, I]`.
#[derive(Clone, Debug)]
pub struct GroupedDweight {
    /// `[M, I]`, or `[M, O]`
    pub lhs: Buffer,
    /// `[M, O]`, or `[M, I]`
    pub rhs: Buffer,
    /// `[G + 1]`, i32: the first row of each expert, and behind the last row
    pub offsets: Buffer,
    /// `[G, I, O]`, or `[G, O, I]`, of type G
    pub out: Buffer,
    /// Features of a row of `lhs` and of `rhs`.
    pub features: [usize; 2],
    /// Add to `out` instead of overwriting it.
    pub accumulate: bool,
}

impl Operation for GroupedDweight {
    const NAME: &'static str = "grouped_dweight";

    runs_in!(lhs, out);

    fn plan(&self) -> Result<Plan, DeviceError> {
        let (op, [height, width]) = (Self::NAME, self.features);
        self.check()?;
        let defines = grad_defines(element(op, &self.lhs)?, element(op, &self.out)?, 1);
        expect_dtype(self.lhs.dtype(), &[&self.rhs])?;
        let groups = self.offsets.len() - 1;
        let grid = tile_grid([height.div_ceil(CUDA_TILE), width.div_ceil(CUDA_TILE), groups]);
        let call = Call::new(&SOURCE, op, defines, grid).read([&self.lhs, &self.rhs, &self.offsets]);
        let call = call.write([&self.out]).u32([height as u32, width as u32]);
        Ok(call.flag(self.accumulate).into())
    }
}

impl GroupedDweight {
    fn check(&self) -> Result<usize, DeviceError> {
        let buffers = [&self.lhs, &self.rhs, &self.out, &self.offsets];
        expect_rows(Self::NAME, buffers, self.features)
    }

    fn compute<S: Stored, G: Stored<Real = S::Real>>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let ([height, width], isa) = (self.features, cpu.isa());
        let groups = rows_of_groups(Self::NAME, &self.offsets, self.check()?)?;
        let (lhs, rhs) = (self.lhs.host::<S>()?, self.rhs.host::<S>()?);
        let mut out = self.out.host_mut::<G>()?;
        let (mut first, mut parts) = (0, Vec::new());
        let outs = out.chunks_exact_mut((height * width).max(1));
        for (rows, out) in groups.into_iter().zip(outs) {
            let lhs = Matrix::dense(&lhs[first * height..], rows, height).transposed();
            let rhs = Matrix::dense(&rhs[first * width..], rows, width);
            first += rows;
            let tiles = tiles(MatrixMut::dense(out, height, width)).into_iter();
            parts.extend(tiles.map(|tile| (lhs.rows(tile.rows), rhs.cols(tile.cols), tile.out)));
        }
        cpu.for_each_part(parts, |(lhs, rhs, mut out)| {
            G::write_matrix(isa, &mut out, self.accumulate, |out| {
                multiply(isa, out, lhs, rhs, self.accumulate);
            });
        });
        Ok(())
    }
}

/// A block for each tile.
fn tile_grid(tiles: [usize; 3]) -> Grid {
    Grid::of(tiles.map(|tiles| tiles as u32), 256)
}

static SOURCE: KernelSource = kernels("grouped.cu", include_str!("../cuda/grouped.cu"));
