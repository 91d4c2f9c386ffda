//! A linear layer. Its backward is two operations, so that the gradient of the input can go ahead of that of the
//! weight; the gradient of the bias is [`super::ColumnSum`].

use super::kernel::{by_dtype, kernel};
use super::matrix::{Matrix, MatrixMut, Tile, product};
use super::real::Real;
use super::{CpuKernel, expect_len};
use crate::device::{Buffer, Cpu, DeviceError, Isa};

/// How a weight lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightLayout {
    /// `[inputs, outputs]`, as GPT-2's published projections.
    InOut,
    /// `[outputs, inputs]`, as an embedding that is used as the head.
    OutIn,
}

/// Sizes of a linear layer, for all its operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearShape {
    /// Rows `R` of input and output.
    pub rows: usize,
    /// Features `I` of a row of the input.
    pub inputs: usize,
    /// Features `O` of a row of the output.
    pub outputs: usize,
    /// Layout of the weight.
    pub layout: WeightLayout,
}

impl LinearShape {
    /// The weight as a matrix of inputs × outputs.
    fn weight<'a, T: Real>(&self, weight: &'a [T]) -> Matrix<'a, T> {
        match self.layout {
            WeightLayout::InOut => Matrix::dense(weight, self.inputs, self.outputs),
            WeightLayout::OutIn => Matrix::dense(weight, self.outputs, self.inputs).transposed(),
        }
    }

    fn check(
        &self,
        op: &'static str,
        input: (&str, &Buffer),
        weight: (&str, &Buffer),
        output: (&str, &Buffer),
    ) -> Result<(), DeviceError> {
        expect_len(op, input.0, input.1.len(), self.rows * self.inputs)?;
        expect_len(op, weight.0, weight.1.len(), self.inputs * self.outputs)?;
        expect_len(op, output.0, output.1.len(), self.rows * self.outputs)
    }
}

/// `out = inp · weight + bias + residual`
#[derive(Clone, Debug)]
pub struct LinearForward {
    /// `[R, I]`
    pub inp: Buffer,
    /// `[I, O]` or `[O, I]`
    pub weight: Buffer,
    /// `[O]`
    pub bias: Option<Buffer>,
    /// `[R, O]`: the stream that the layer adds to.
    pub residual: Option<Buffer>,
    /// `[R, O]`
    pub out: Buffer,
    /// Sizes.
    pub shape: LinearShape,
}

impl CpuKernel for LinearForward {
    const NAME: &'static str = "linear_forward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtype!(Self::NAME, self.out.dtype(), T => self.compute::<T>(cpu))
    }
}

impl LinearForward {
    fn compute<T: Real>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let LinearShape {
            rows,
            inputs,
            outputs,
            ..
        } = self.shape;
        self.shape.check(
            Self::NAME,
            ("inp", &self.inp),
            ("weight", &self.weight),
            ("out", &self.out),
        )?;
        if let Some(bias) = &self.bias {
            expect_len(Self::NAME, "bias", bias.len(), outputs)?;
        }
        if let Some(residual) = &self.residual {
            expect_len(Self::NAME, "residual", residual.len(), rows * outputs)?;
        }
        let (inp, weight) = (self.inp.host::<T>()?, self.weight.host::<T>()?);
        let bias = self.bias.as_ref().map(Buffer::host::<T>).transpose()?;
        let residual = self.residual.as_ref().map(Buffer::host::<T>).transpose()?;
        let mut out = self.out.host_mut::<T>()?;

        let inp = Matrix::dense(&inp, rows, inputs);
        let weight = self.shape.weight(&weight);
        let (bias, residual) = (bias.as_deref(), residual.as_deref());
        let tiles = cut(MatrixMut::dense(&mut out, rows, outputs), rows, outputs);
        cpu.for_each_part(tiles, |mut tile| {
            let (lhs, rhs) = (inp.rows(tile.rows.clone()), weight.cols(tile.cols.clone()));
            product(&mut tile.out, lhs, rhs, T::ONE, false);
            // While the tile is in the cache.
            finish_tile(cpu.isa(), &mut tile, bias, residual, outputs);
        });
        Ok(())
    }
}

/// Adds bias and residual to a tile of the output.
fn finish_tile<T: Real>(
    isa: Isa,
    tile: &mut Tile<'_, T>,
    bias: Option<&[T]>,
    residual: Option<&[T]>,
    outputs: usize,
) {
    let bias = bias.map(|bias| &bias[tile.cols.clone()]);
    let rows = tile.rows.clone();
    for (i, row) in rows.enumerate() {
        let out = tile.out.row_mut(i);
        if let Some(bias) = bias {
            add_into(isa, bias, out);
        }
        if let Some(residual) = residual {
            add_into(isa, &residual[row * outputs..][tile.cols.clone()], out);
        }
    }
}

kernel! {
    /// `y[i] += x[i]`
    pub(super) fn add_into<'a, T>(x: &'a [T], y: &'a mut [T]) -> () {
        for (y, &x) in y.iter_mut().zip(x) {
            *y += x;
        }
    }
}

/// `dinp = dout · weightᵀ`
#[derive(Clone, Debug)]
pub struct LinearDinp {
    /// `[R, O]`
    pub dout: Buffer,
    /// `[I, O]` or `[O, I]`
    pub weight: Buffer,
    /// `[R, I]`
    pub dinp: Buffer,
    /// Sizes.
    pub shape: LinearShape,
}

impl CpuKernel for LinearDinp {
    const NAME: &'static str = "linear_dinp";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtype!(Self::NAME, self.dinp.dtype(), T => self.compute::<T>(cpu))
    }
}

impl LinearDinp {
    fn compute<T: Real>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let LinearShape {
            rows,
            inputs,
            outputs,
            ..
        } = self.shape;
        self.shape.check(
            Self::NAME,
            ("dinp", &self.dinp),
            ("weight", &self.weight),
            ("dout", &self.dout),
        )?;
        let (dout, weight) = (self.dout.host::<T>()?, self.weight.host::<T>()?);
        let mut dinp = self.dinp.host_mut::<T>()?;
        let dout = Matrix::dense(&dout, rows, outputs);
        let weight = self.shape.weight(&weight).transposed();
        let tiles = cut(MatrixMut::dense(&mut dinp, rows, inputs), rows, inputs);
        cpu.for_each_part(tiles, |mut tile| {
            product(
                &mut tile.out,
                dout.rows(tile.rows),
                weight.cols(tile.cols),
                T::ONE,
                false,
            );
        });
        Ok(())
    }
}

/// `dweight = inpᵀ · dout`, or added to what is there
#[derive(Clone, Debug)]
pub struct LinearDweight {
    /// `[R, I]`
    pub inp: Buffer,
    /// `[R, O]`
    pub dout: Buffer,
    /// `[I, O]` or `[O, I]`
    pub dweight: Buffer,
    /// Add to `dweight` instead of overwriting it.
    pub accumulate: bool,
    /// Sizes.
    pub shape: LinearShape,
}

impl CpuKernel for LinearDweight {
    const NAME: &'static str = "linear_dweight";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtype!(Self::NAME, self.dweight.dtype(), T => self.compute::<T>(cpu))
    }
}

impl LinearDweight {
    fn compute<T: Real>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let LinearShape {
            rows,
            inputs,
            outputs,
            layout,
        } = self.shape;
        self.shape.check(
            Self::NAME,
            ("inp", &self.inp),
            ("dweight", &self.dweight),
            ("dout", &self.dout),
        )?;
        let (inp, dout) = (self.inp.host::<T>()?, self.dout.host::<T>()?);
        let mut dweight = self.dweight.host_mut::<T>()?;
        let (inp, dout) = (
            Matrix::dense(&inp, rows, inputs),
            Matrix::dense(&dout, rows, outputs),
        );
        let (height, width, lhs, rhs) = match layout {
            WeightLayout::InOut => (inputs, outputs, inp.transposed(), dout),
            WeightLayout::OutIn => (outputs, inputs, dout.transposed(), inp),
        };
        let tiles = cut(MatrixMut::dense(&mut dweight, height, width), height, width);
        cpu.for_each_part(tiles, |mut tile| {
            product(
                &mut tile.out,
                lhs.rows(tile.rows),
                rhs.cols(tile.cols),
                T::ONE,
                self.accumulate,
            );
        });
        Ok(())
    }
}

/// Tiles of an output: large enough for the product's own blocking, small enough that there are several for
/// the threads, and a function of the sizes alone.
fn cut<T>(out: MatrixMut<'_, T>, rows: usize, cols: usize) -> Vec<Tile<'_, T>> {
    const HEIGHT: usize = 512;
    const WIDTH: usize = 4096;
    /// Tiles that an output is cut into where it is large enough.
    const TILES: usize = 4;
    /// Columns of a tile are a multiple of this, except for the last tile.
    const STEP: usize = 64;
    let height = HEIGHT.min(rows).max(1);
    let columns_wanted = TILES.div_ceil(rows.div_ceil(height).max(1));
    let width = cols
        .div_ceil(columns_wanted)
        .next_multiple_of(STEP)
        .clamp(STEP, WIDTH);
    out.tiles(height, width)
}
