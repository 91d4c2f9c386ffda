//! A linear layer. Its backward is two operations, so that the gradient of the input can go ahead of that of the
//! weight; the gradient of the bias is [`super::ColumnSum`]. On a GPU the products are cuBLASLt's.
//!
//! The layer with the GELU behind it, and its way back, are one operation each: where it is asked for and cuBLASLt knows
//! one, a single pass applies the GELU while the product is still in registers. Elsewhere they are the two operations, bit
//! for bit.

use std::ops::Range;

use super::kernel::{Real, by_dtype, by_dtypes, kernel};
use super::matrix::{Matrix, MatrixMut, Tile, product};
use super::stored::Stored;
use super::{CpuKernel, GeluBackward, GeluForward, expect_len};
use crate::device::cuda::{CudaKernel, DevicePtr, Epilogue, LaunchContext, Operand, Product};
use crate::device::{Buffer, Cpu, DType, DeviceError, Isa};

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
    fn weight<'a, T>(&self, weight: &'a [T]) -> Matrix<'a, T> {
        match self.layout {
            WeightLayout::InOut => Matrix::dense(weight, self.inputs, self.outputs),
            WeightLayout::OutIn => Matrix::dense(weight, self.outputs, self.inputs).transposed(),
        }
    }

    /// Refuses buffers whose sizes do not fit.
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
        by_dtype!(Self::NAME, self.out.dtype(), S => self.compute::<S>(cpu))
    }
}

impl LinearForward {
    fn check(&self) -> Result<(), DeviceError> {
        self.shape.check(
            Self::NAME,
            ("inp", &self.inp),
            ("weight", &self.weight),
            ("out", &self.out),
        )?;
        if let Some(bias) = &self.bias {
            expect_len(Self::NAME, "bias", bias.len(), self.shape.outputs)?;
        }
        if let Some(residual) = &self.residual {
            expect_len(Self::NAME, "residual", residual.len(), self.out.len())?;
        }
        Ok(())
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let LinearShape {
            rows,
            inputs,
            outputs,
            ..
        } = self.shape;
        self.check()?;
        let (inp, weight) = (self.inp.host::<S>()?, self.weight.host::<S>()?);
        let bias = self.bias.as_ref().map(Buffer::host::<S>).transpose()?;
        let residual = self.residual.as_ref().map(Buffer::host::<S>).transpose()?;
        let mut out = self.out.host_mut::<S>()?;

        let inp = Matrix::dense(&inp, rows, inputs);
        let weight = self.shape.weight(&weight);
        let terms = Terms {
            bias: bias.as_deref(),
            residual: residual.as_deref().map(|r| Matrix::dense(r, rows, outputs)),
        };
        let isa = cpu.isa();
        let tiles = cut::<S, _>(MatrixMut::dense(&mut out, rows, outputs));
        cpu.for_each_part(tiles, |Tile { rows, cols, mut out }| {
            S::write_matrix(isa, &mut out, false, |out| {
                multiply(isa, out, inp.rows(rows.clone()), weight.cols(cols.clone()), false);
                // While the tile is in the cache.
                terms.add_to(isa, out, rows, cols);
            });
        });
        Ok(())
    }
}

/// What is added to the product.
struct Terms<'a, S> {
    /// `[O]`
    bias: Option<&'a [S]>,
    /// `[R, O]`
    residual: Option<Matrix<'a, S>>,
}

impl<S: Stored> Terms<'_, S> {
    /// Adds their parts to a tile of the output.
    fn add_to(&self, isa: Isa, out: &mut MatrixMut<'_, S::Real>, rows: Range<usize>, cols: Range<usize>) {
        // Nothing to add where there is no bias.
        let bias = self.bias.map_or(&[][..], |bias| &bias[cols.clone()]);
        S::read(isa, bias, |bias| {
            for (i, row) in rows.enumerate() {
                let out = out.row_mut(i);
                add_into(isa, bias, out);
                if let Some(residual) = &self.residual {
                    let residual = &residual.row(row)[cols.clone()];
                    S::read(isa, residual, |residual| add_into(isa, residual, out));
                }
            }
        });
    }
}

/// `out = lhs · rhs`, or `out += …` where `accumulate`. What must be widened is so by blocks of the inner dimension.
fn multiply<S: Stored>(
    isa: Isa,
    out: &mut MatrixMut<'_, S::Real>,
    lhs: Matrix<'_, S>,
    rhs: Matrix<'_, S>,
    accumulate: bool,
) {
    let inner = lhs.col_count();
    let block = if S::IN_PLACE { inner } else { WIDENED };
    let mut first = 0;
    // Once even if there is nothing to add up: the product is zero then.
    loop {
        let part = first..inner.min(first + block);
        S::read_matrix(isa, lhs.cols(part.clone()), |lhs| {
            S::read_matrix(isa, rhs.rows(part.clone()), |rhs| {
                product(out, lhs, rhs, S::Real::ONE, accumulate || first > 0);
            });
        });
        first = part.end;
        if first >= inner {
            break;
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
        by_dtype!(Self::NAME, self.dinp.dtype(), S => self.compute::<S>(cpu))
    }
}

impl LinearDinp {
    fn check(&self) -> Result<(), DeviceError> {
        self.shape.check(
            Self::NAME,
            ("dinp", &self.dinp),
            ("weight", &self.weight),
            ("dout", &self.dout),
        )
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let LinearShape {
            rows,
            inputs,
            outputs,
            ..
        } = self.shape;
        self.check()?;
        let (dout, weight) = (self.dout.host::<S>()?, self.weight.host::<S>()?);
        let mut dinp = self.dinp.host_mut::<S>()?;
        let dout = Matrix::dense(&dout, rows, outputs);
        let weight = self.shape.weight(&weight).transposed();
        let isa = cpu.isa();
        let tiles = cut::<S, _>(MatrixMut::dense(&mut dinp, rows, inputs));
        cpu.for_each_part(tiles, |Tile { rows, cols, mut out }| {
            S::write_matrix(isa, &mut out, false, |out| {
                multiply(isa, out, dout.rows(rows), weight.cols(cols), false);
            });
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
    /// `[I, O]` or `[O, I]`, of type G
    pub dweight: Buffer,
    /// Add to `dweight` instead of overwriting it.
    pub accumulate: bool,
    /// Sizes.
    pub shape: LinearShape,
}

impl CpuKernel for LinearDweight {
    const NAME: &'static str = "linear_dweight";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtypes!(Self::NAME, self.inp.dtype(), self.dweight.dtype(), (S, G) => self.compute::<S, G>(cpu))
    }
}

impl LinearDweight {
    fn check(&self) -> Result<(), DeviceError> {
        self.shape.check(
            Self::NAME,
            ("inp", &self.inp),
            ("dweight", &self.dweight),
            ("dout", &self.dout),
        )
    }

    fn compute<S: Stored, G: Stored<Real = S::Real>>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let LinearShape {
            rows,
            inputs,
            outputs,
            layout,
        } = self.shape;
        self.check()?;
        let (inp, dout) = (self.inp.host::<S>()?, self.dout.host::<S>()?);
        let mut dweight = self.dweight.host_mut::<G>()?;
        let (inp, dout) = (
            Matrix::dense(&inp, rows, inputs),
            Matrix::dense(&dout, rows, outputs),
        );
        let (height, width, lhs, rhs) = match layout {
            WeightLayout::InOut => (inputs, outputs, inp.transposed(), dout),
            WeightLayout::OutIn => (outputs, inputs, dout.transposed(), inp),
        };
        let isa = cpu.isa();
        let tiles = cut::<S, _>(MatrixMut::dense(&mut dweight, height, width));
        cpu.for_each_part(tiles, |Tile { rows, cols, mut out }| {
            G::write_matrix(isa, &mut out, self.accumulate, |out| {
                multiply(isa, out, lhs.rows(rows), rhs.cols(cols), self.accumulate);
            });
        });
        Ok(())
    }
}

/// Elements of the inner dimension, and columns of a tile, that are widened at a time: with [`HEIGHT`] rows, 8 MiB a
/// thread for both factors and the tile. A factor is widened once for each row or column of tiles, which is little
/// beside the product.
const WIDENED: usize = 1024;
/// Rows of a tile.
const HEIGHT: usize = 512;

/// Tiles of an output of factors `S`: large enough for the product's own blocking, small enough that there are several
/// for the threads, and a function of the sizes alone.
fn cut<S: Stored, T>(out: MatrixMut<'_, T>) -> Vec<Tile<'_, T>> {
    /// Columns of a tile that needs no scratch memory.
    const WIDTH: usize = 4096;
    /// Tiles that an output is cut into where it is large enough.
    const TILES: usize = 4;
    /// Columns of a tile are a multiple of this, except for the last tile.
    const STEP: usize = 64;
    let height = HEIGHT.min(out.row_count()).max(1);
    let columns_wanted = TILES.div_ceil(out.row_count().div_ceil(height).max(1));
    let width = out
        .col_count()
        .div_ceil(columns_wanted)
        .next_multiple_of(STEP)
        .clamp(STEP, if S::IN_PLACE { WIDTH } else { WIDENED });
    out.tiles(height, width)
}

/// A matrix as it is stored.
fn stored(
    cx: &LaunchContext<'_>,
    buffer: &Buffer,
    dtype: DType,
    stride: usize,
) -> Result<Operand, DeviceError> {
    Ok(Operand {
        at: cx.ptr(buffer, dtype)?,
        stride,
        transposed: false,
    })
}

/// The transpose of what is stored.
fn transposed(operand: Operand) -> Operand {
    Operand {
        transposed: true,
        ..operand
    }
}

impl LinearForward {
    /// The product that it is.
    fn product(&self, cx: &LaunchContext<'_>) -> Result<Product, DeviceError> {
        let (shape, dtype) = (self.shape, self.out.dtype());
        self.check()?;
        let rhs = match shape.layout {
            WeightLayout::InOut => stored(cx, &self.weight, dtype, shape.outputs)?,
            WeightLayout::OutIn => transposed(stored(cx, &self.weight, dtype, shape.inputs)?),
        };
        let bias = self.bias.as_ref().map(|bias| cx.ptr(bias, dtype)).transpose()?;
        let residual = self.residual.as_ref().map(|residual| cx.ptr(residual, dtype));
        Ok(Product {
            rows: shape.rows,
            cols: shape.outputs,
            inner: shape.inputs,
            dtype,
            lhs: stored(cx, &self.inp, dtype, shape.inputs)?,
            rhs,
            out_dtype: dtype,
            out: cx.ptr(&self.out, dtype)?,
            out_stride: shape.outputs,
            addend: residual.transpose()?,
            epilogue: bias.map_or(Epilogue::None, Epilogue::Bias),
        })
    }
}

impl CudaKernel for LinearForward {
    fn launch(&self, cx: &mut LaunchContext<'_>) -> Result<(), DeviceError> {
        let product = self.product(cx)?;
        cx.multiply(&product)
    }
}

impl LinearDinp {
    /// The product that it is.
    fn product(&self, cx: &LaunchContext<'_>) -> Result<Product, DeviceError> {
        let (shape, dtype) = (self.shape, self.dinp.dtype());
        self.check()?;
        let rhs = match shape.layout {
            WeightLayout::InOut => transposed(stored(cx, &self.weight, dtype, shape.outputs)?),
            WeightLayout::OutIn => stored(cx, &self.weight, dtype, shape.inputs)?,
        };
        Ok(Product {
            rows: shape.rows,
            cols: shape.inputs,
            inner: shape.outputs,
            dtype,
            lhs: stored(cx, &self.dout, dtype, shape.outputs)?,
            rhs,
            out_dtype: dtype,
            out: cx.ptr(&self.dinp, dtype)?,
            out_stride: shape.inputs,
            addend: None,
            epilogue: Epilogue::None,
        })
    }
}

impl CudaKernel for LinearDinp {
    fn launch(&self, cx: &mut LaunchContext<'_>) -> Result<(), DeviceError> {
        let product = self.product(cx)?;
        cx.multiply(&product)
    }
}

impl CudaKernel for LinearDweight {
    fn launch(&self, cx: &mut LaunchContext<'_>) -> Result<(), DeviceError> {
        let (shape, dtype, out_dtype) = (self.shape, self.inp.dtype(), self.dweight.dtype());
        self.check()?;
        if out_dtype != dtype && out_dtype != DType::F32 {
            let what = format!("`dweight` holds {out_dtype}, expected {dtype} or f32");
            return Err(DeviceError::Shape { op: Self::NAME, what });
        }
        let inp = stored(cx, &self.inp, dtype, shape.inputs)?;
        let dout = stored(cx, &self.dout, dtype, shape.outputs)?;
        let (rows, cols, lhs, rhs) = match shape.layout {
            WeightLayout::InOut => (shape.inputs, shape.outputs, transposed(inp), dout),
            WeightLayout::OutIn => (shape.outputs, shape.inputs, transposed(dout), inp),
        };
        let out = cx.ptr(&self.dweight, out_dtype)?;
        let product = Product {
            rows,
            cols,
            inner: shape.rows,
            dtype,
            lhs,
            rhs,
            out_dtype,
            out,
            out_stride: cols,
            addend: self.accumulate.then_some(out),
            epilogue: Epilogue::None,
        };
        cx.multiply(&product)
    }
}

/// `wide = inp · weight + bias`, `out = gelu(wide)`
#[derive(Clone, Debug)]
pub struct LinearGeluForward {
    /// `[R, I]`
    pub inp: Buffer,
    /// `[I, O]` or `[O, I]`
    pub weight: Buffer,
    /// `[O]`
    pub bias: Buffer,
    /// `[R, O]`: written, for backward.
    pub wide: Buffer,
    /// `[R, O]`
    pub out: Buffer,
    /// Sizes.
    pub shape: LinearShape,
}

impl LinearGeluForward {
    /// The two operations that it stands for, in order.
    fn parts(&self) -> Result<(LinearForward, GeluForward), DeviceError> {
        expect_len(Self::NAME, "out", self.out.len(), self.wide.len())?;
        let linear = LinearForward {
            inp: self.inp.clone(),
            weight: self.weight.clone(),
            bias: Some(self.bias.clone()),
            residual: None,
            out: self.wide.clone(),
            shape: self.shape,
        };
        let gelu = GeluForward {
            inp: self.wide.clone(),
            out: self.out.clone(),
        };
        Ok((linear, gelu))
    }
}

impl CpuKernel for LinearGeluForward {
    const NAME: &'static str = "linear_gelu_forward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let (linear, gelu) = self.parts()?;
        linear.run(cpu)?;
        gelu.run(cpu)
    }
}

/// `dwide = (dout · weightᵀ) ⊙ gelu′(wide)` through the layer behind the GELU, and `wide` becomes `gelu(wide)`, that
/// layer's input, which need not be kept from forward to backward.
#[derive(Clone, Debug)]
pub struct LinearGeluBackward {
    /// `[R, O]`
    pub dout: Buffer,
    /// `[I, O]` or `[O, I]`
    pub weight: Buffer,
    /// `[R, I]`: `wide`, becomes `gelu(wide)`
    pub wide_active: Buffer,
    /// `[R, I]`
    pub dwide: Buffer,
    /// Sizes of the layer behind the GELU.
    pub shape: LinearShape,
}

impl LinearGeluBackward {
    /// The two operations that it stands for, in order.
    fn parts(&self) -> Result<(LinearDinp, GeluBackward), DeviceError> {
        expect_len(Self::NAME, "wide", self.wide_active.len(), self.dwide.len())?;
        let linear = LinearDinp {
            dout: self.dout.clone(),
            weight: self.weight.clone(),
            dinp: self.dwide.clone(),
            shape: self.shape,
        };
        let gelu = GeluBackward {
            inp_out: self.wide_active.clone(),
            dout_dinp: self.dwide.clone(),
        };
        Ok((linear, gelu))
    }
}

impl CpuKernel for LinearGeluBackward {
    const NAME: &'static str = "linear_gelu_backward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let (linear, gelu) = self.parts()?;
        linear.run(cpu)?;
        gelu.run(cpu)
    }
}

/// Elements that the library wants a row of the GELU's input to be a multiple of.
const ROW_STEP: usize = 8;

/// Bytes that it wants the address of the GELU's input to be a multiple of.
const ALIGNMENT: usize = 16;

/// Whether the library is asked for one pass. It saves the GELU a pass over its input, but the product then has two
/// outputs, and whether that is faster is to be measured: so it is the user's choice. Only on Hopper, and not in f32,
/// where products are what costs.
fn is_one_pass(cx: &LaunchContext<'_>, dtype: DType, width: usize, wide: DevicePtr) -> bool {
    cx.fuses_gelu() && dtype == DType::Bf16 && width.is_multiple_of(ROW_STEP) && wide.is_aligned(ALIGNMENT)
}

impl CudaKernel for LinearGeluForward {
    fn launch(&self, cx: &mut LaunchContext<'_>) -> Result<(), DeviceError> {
        let (linear, gelu) = self.parts()?;
        let dtype = self.out.dtype();
        let aux = cx.ptr(&self.wide, dtype)?;
        if is_one_pass(cx, dtype, self.shape.outputs, aux) {
            let bias = cx.ptr(&self.bias, dtype)?;
            let product = Product {
                out: cx.ptr(&self.out, dtype)?,
                epilogue: Epilogue::BiasGelu { bias, aux },
                ..linear.product(cx)?
            };
            if cx.try_multiply(&product)? {
                return Ok(());
            }
        }
        linear.launch(cx)?;
        gelu.launch(cx)
    }
}

impl CudaKernel for LinearGeluBackward {
    fn launch(&self, cx: &mut LaunchContext<'_>) -> Result<(), DeviceError> {
        let (linear, gelu) = self.parts()?;
        let dtype = self.dwide.dtype();
        let aux = cx.ptr(&self.wide_active, dtype)?;
        if is_one_pass(cx, dtype, self.shape.inputs, aux) {
            let product = Product {
                epilogue: Epilogue::GeluBackward { aux },
                ..linear.product(cx)?
            };
            if cx.try_multiply(&product)? {
                let in_place = GeluForward {
                    inp: self.wide_active.clone(),
                    out: self.wide_active.clone(),
                };
                return in_place.launch(cx);
            }
        }
        linear.launch(cx)?;
        gelu.launch(cx)
    }
}
