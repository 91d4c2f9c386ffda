//! A linear layer. Its backward is two operations, so that the gradient of the input can go ahead of that of the
//! weight. On a GPU cuBLASLt computes the products.

use super::cpu::kernel::{Real, add_into, by_dtypes};
use super::cpu::matrix::{Matrix, MatrixMut, Tile, product};
use super::cpu::row_product::row_product;
use super::cpu::stored::Stored;
use super::{Cpu, Isa, Operation, expect_len, expect_lens};
use crate::cuda::{LaunchContext, Operand, Product};
use crate::memory::{Buffer, DType, DeviceError};

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
    /// `[R, I]`
    fn input<'a>(&self, name: &'static str, buffer: &'a Buffer) -> Factor<'a> {
        Factor::new(name, buffer, [self.rows, self.inputs])
    }

    /// `[R, O]`
    fn output<'a>(&self, name: &'static str, buffer: &'a Buffer) -> Factor<'a> {
        Factor::new(name, buffer, [self.rows, self.outputs])
    }

    /// The weight as a matrix of inputs × outputs.
    fn weight<'a>(&self, name: &'static str, buffer: &'a Buffer) -> Factor<'a> {
        match self.layout {
            WeightLayout::InOut => Factor::new(name, buffer, [self.inputs, self.outputs]),
            WeightLayout::OutIn => Factor::new(name, buffer, [self.outputs, self.inputs]).transposed(),
        }
    }
}

/// A matrix in a buffer, or its transpose.
#[derive(Clone, Copy)]
struct Factor<'a> {
    name: &'static str,
    buffer: &'a Buffer,
    /// Rows and columns as they are stored.
    stored: [usize; 2],
    transposed: bool,
}

impl<'a> Factor<'a> {
    fn new(name: &'static str, buffer: &'a Buffer, stored: [usize; 2]) -> Self {
        Self {
            name,
            buffer,
            stored,
            transposed: false,
        }
    }

    fn transposed(self) -> Self {
        Self {
            transposed: !self.transposed,
            ..self
        }
    }

    /// A view of its elements.
    fn matrix<'b, T>(&self, elements: &'b [T]) -> Matrix<'b, T> {
        let [rows, cols] = self.stored;
        let stored = Matrix::dense(elements, rows, cols);
        if self.transposed {
            stored.transposed()
        } else {
            stored
        }
    }

    fn operand(&self, cx: &LaunchContext<'_>, dtype: DType) -> Result<Operand, DeviceError> {
        Ok(Operand {
            at: cx.ptr(self.buffer, dtype)?,
            stride: self.stored[1],
            transposed: self.transposed,
        })
    }
}

/// `out = lhs · rhs + bias + residual`, or `out += …`: what the operations of a layer are, on any device.
struct LinearProduct<'a> {
    op: &'static str,
    /// Type of the factors.
    dtype: DType,
    lhs: Factor<'a>,
    rhs: Factor<'a>,
    /// Has the type of the factors, or f32; not transposed.
    out: Factor<'a>,
    accumulate: bool,
    /// `[columns]`, of the type of `out`.
    bias: Option<&'a Buffer>,
    /// Has type and shape of `out`.
    residual: Option<&'a Buffer>,
    exact: bool,
}

impl<'a> LinearProduct<'a> {
    /// Of factors of one type, with nothing added.
    fn new(op: &'static str, lhs: Factor<'a>, rhs: Factor<'a>, out: Factor<'a>) -> Self {
        Self {
            op,
            dtype: lhs.buffer.dtype(),
            lhs,
            rhs,
            out,
            accumulate: false,
            bias: None,
            residual: None,
            exact: false,
        }
    }

    /// Refuses buffers whose sizes do not fit.
    fn check(&self) -> Result<(), DeviceError> {
        for Factor {
            name, buffer, stored, ..
        } in [self.lhs, self.rhs, self.out]
        {
            expect_len(self.op, name, buffer.len(), stored[0] * stored[1])?;
        }
        let bias = self.bias.map(|bias| ("bias", bias, self.out.stored[1]));
        let residual = self
            .residual
            .map(|residual| ("residual", residual, self.out.buffer.len()));
        expect_lens(self.op, bias.as_slice())?;
        expect_lens(self.op, residual.as_slice())
    }

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtypes!(self.op, self.dtype, self.out.buffer.dtype(), (S, G) => self.compute::<S, G>(cpu))
    }

    fn compute<S: Stored, G: Stored<Real = S::Real>>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        self.check()?;
        let (lhs, rhs) = (self.lhs.buffer.host::<S>()?, self.rhs.buffer.host::<S>()?);
        let bias = self.bias.map(Buffer::host::<G>).transpose()?;
        let residual = self.residual.map(Buffer::host::<G>).transpose()?;
        let mut out = self.out.buffer.host_mut::<G>()?;

        let (lhs, rhs) = (self.lhs.matrix(&lhs), self.rhs.matrix(&rhs));
        // Nothing to add where there is no bias.
        let bias = bias.as_deref().unwrap_or_default();
        let residual = residual.as_deref().map(|residual| self.out.matrix(residual));
        let isa = cpu.isa();
        let [height, width] = self.out.stored;
        let tiles = cut::<S, _>(MatrixMut::dense(&mut out, height, width), cpu.threads());
        cpu.for_each_part(tiles, |Tile { rows, cols, mut out }| {
            G::write_matrix(isa, &mut out, self.accumulate, |out| {
                let (lhs, rhs) = (lhs.rows(rows.clone()), rhs.cols(cols.clone()));
                multiply(isa, out, lhs, rhs, self.accumulate);
                // While the tile is in the cache.
                let bias = bias.get(cols.clone()).unwrap_or_default();
                add_terms(isa, out, bias, residual.map(|all| all.rows(rows).cols(cols)));
            });
        });
        Ok(())
    }

    /// For a GPU.
    fn product(&self, cx: &LaunchContext<'_>) -> Result<Product, DeviceError> {
        self.check()?;
        let (name, out_dtype) = (self.out.name, self.out.buffer.dtype());
        if out_dtype != self.dtype && out_dtype != DType::F32 {
            let what = format!("`{name}` holds {out_dtype}, expected {} or f32", self.dtype);
            return Err(DeviceError::Shape { op: self.op, what });
        }
        let out = cx.ptr(self.out.buffer, out_dtype)?;
        let term = |term: Option<&Buffer>| term.map(|term| cx.ptr(term, out_dtype)).transpose();
        Ok(Product {
            rows: self.out.stored[0],
            cols: self.out.stored[1],
            inner: self.lhs.stored[usize::from(!self.lhs.transposed)],
            dtype: self.dtype,
            lhs: self.lhs.operand(cx, self.dtype)?,
            rhs: self.rhs.operand(cx, self.dtype)?,
            out_dtype,
            out,
            out_stride: self.out.stored[1],
            addend: term(self.residual)?.or(self.accumulate.then_some(out)),
            bias: term(self.bias)?,
            exact: self.exact,
        })
    }

    fn launch(&self, cx: &mut LaunchContext<'_>) -> Result<(), DeviceError> {
        let product = self.product(cx)?;
        cx.multiply(&product)
    }
}

/// Adds a row, and a matrix of the size of `out`, to a product.
fn add_terms<S: Stored>(
    isa: Isa,
    out: &mut MatrixMut<'_, S::Real>,
    bias: &[S],
    residual: Option<Matrix<'_, S>>,
) {
    S::read(isa, bias, |bias| {
        for row in 0..out.row_count() {
            let out = out.row_mut(row);
            add_into(isa, bias, out);
            if let Some(residual) = residual {
                S::read(isa, residual.row(row), |residual| add_into(isa, residual, out));
            }
        }
    });
}

/// `out = lhs · rhs`, or `out += …` where `accumulate`. What must be widened is so by blocks of the inner dimension.
pub(super) fn multiply<S: Stored>(
    isa: Isa,
    out: &mut MatrixMut<'_, S::Real>,
    lhs: Matrix<'_, S>,
    rhs: Matrix<'_, S>,
    accumulate: bool,
) {
    if out.row_count() == 1 && lhs.has_slices() {
        let row = |row: &[S::Real]| row_product(isa, out.row_mut(0), row, rhs, accumulate);
        return S::read(isa, lhs.row(0), row);
    }
    let inner = lhs.col_count();
    let block = if S::IN_PLACE { inner } else { WIDENED };
    let mut first = 0;
    // Once even if there is nothing to add up: the product is zero then.
    loop {
        let part = first..inner.min(first + block);
        S::read_matrix(isa, lhs.cols(part.clone()), |lhs| {
            S::read_matrix(isa, rhs.rows(part.clone()), |rhs| {
                multiply_blocks(out, lhs, rhs, accumulate || first > 0);
            });
        });
        first = part.end;
        if first >= inner {
            break;
        }
    }
}

/// `out = lhs · rhs`, or `out += …` where `accumulate`. The gradient of a weight sums over all rows of a batch: it is
/// computed in blocks of rows, whose parts of both factors stay in the second cache.
fn multiply_blocks<T: Real>(
    out: &mut MatrixMut<'_, T>,
    lhs: Matrix<'_, T>,
    rhs: Matrix<'_, T>,
    accumulate: bool,
) {
    /// Rows of a block.
    const DEPTH: usize = 256;
    let inner = lhs.col_count();
    if lhs.has_slices() || inner <= DEPTH {
        return product(out, lhs, rhs, T::ONE, accumulate);
    }
    for first in (0..inner).step_by(DEPTH) {
        let part = first..inner.min(first + DEPTH);
        let (lhs, rhs) = (lhs.cols(part.clone()), rhs.rows(part));
        product(out, lhs, rhs, T::ONE, accumulate || first > 0);
    }
}

/// Elements of the inner dimension, and columns of a tile, that are widened at a time: with [`HEIGHT`] rows, 8 MiB a
/// thread for both factors and the tile. A factor is widened once for each row or column of tiles, which is little
/// beside the product.
const WIDENED: usize = 1024;
/// Rows of a tile whose factors are widened; elsewhere the fewest where an output is shared by threads.
const HEIGHT: usize = 512;

/// Tiles of an output of factors `S`: large enough for the product's own blocking, small enough that all threads have
/// some. `gemm` adds up small outputs, single rows and single columns in other orders. So low outputs are cut by their
/// sizes alone, and others are never cut into a tile so small: each element is added up in the same order whatever the
/// tiles are.
fn cut<S: Stored, T>(out: MatrixMut<'_, T>, threads: usize) -> Vec<Tile<'_, T>> {
    /// Rows and columns of a tile that needs no scratch memory.
    const LARGEST: [usize; 2] = [2048, 4096];
    /// Tiles that a low output is cut into where it is wide enough.
    const TILES: usize = 4;
    /// Columns of a tile are so many at least, where the output has as many.
    const NARROWEST: usize = 64;
    /// Columns of a tile are a multiple of this. The last tile has as many at least, where there are several.
    const STEP: usize = 16;
    /// An output with at most this many rows is low: `gemm` divides the inner dimension of at most 64 × 64 in its own way.
    const LOW: usize = 64;
    let (height, width) = (out.row_count(), out.col_count());
    if height == 1 {
        return cut_row(out);
    }
    // Each tile copies its part of the factors together: a thread works best on one large tile.
    let tiles = if height <= LOW { TILES } else { threads };
    let [most_rows, most_cols] = if S::IN_PLACE {
        [height.div_ceil(tiles).clamp(HEIGHT, LARGEST[0]), LARGEST[1]]
    } else {
        [HEIGHT, WIDENED]
    };
    let down = height.div_ceil(most_rows).max(1);
    let across = tiles.div_ceil(down).min(width / NARROWEST);
    let across = across.max(width.div_ceil(most_cols)).max(1);
    let mut step = width.div_ceil(across).next_multiple_of(STEP).max(1);
    while step < width && (1..STEP).contains(&(width % step)) {
        step += STEP;
    }
    out.tiles(height.div_ceil(down).max(1), step)
}

/// Tiles of an output with one row: each column of the right factor is read once, by all threads together.
fn cut_row<T>(out: MatrixMut<'_, T>) -> Vec<Tile<'_, T>> {
    const TILES: usize = 16;
    /// Columns of a tile are a multiple of this, except for the last tile.
    const STEP: usize = 64;
    /// Least and most columns of a tile.
    const WIDTHS: [usize; 2] = [128, 512];
    let width = (out.col_count() / TILES).next_multiple_of(STEP);
    out.tiles(1, width.clamp(WIDTHS[0], WIDTHS[1]))
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
    /// `[R, O]`, of the type of `inp` or f32
    pub out: Buffer,
    /// Sizes.
    pub shape: LinearShape,
    /// Factors in f32 are never rounded to tf32.
    pub exact: bool,
}

impl LinearForward {
    fn product(&self) -> LinearProduct<'_> {
        let (inp, out) = (
            self.shape.input("inp", &self.inp),
            self.shape.output("out", &self.out),
        );
        LinearProduct {
            bias: self.bias.as_ref(),
            residual: self.residual.as_ref(),
            exact: self.exact,
            ..LinearProduct::new(Self::NAME, inp, self.shape.weight("weight", &self.weight), out)
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

impl LinearDinp {
    fn product(&self) -> LinearProduct<'_> {
        let weight = self.shape.weight("weight", &self.weight).transposed();
        let (dout, dinp) = (
            self.shape.output("dout", &self.dout),
            self.shape.input("dinp", &self.dinp),
        );
        LinearProduct::new(Self::NAME, dout, weight, dinp)
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

impl LinearDweight {
    fn product(&self) -> LinearProduct<'_> {
        let (inp, dout) = (
            self.shape.input("inp", &self.inp),
            self.shape.output("dout", &self.dout),
        );
        let dweight = self.shape.weight("dweight", &self.dweight);
        let (lhs, rhs, out) = if dweight.transposed {
            (dout.transposed(), inp, dweight.transposed())
        } else {
            (inp.transposed(), dout, dweight)
        };
        LinearProduct {
            accumulate: self.accumulate,
            ..LinearProduct::new(Self::NAME, lhs, rhs, out)
        }
    }
}

macro_rules! are_products {
    ($($op:ident is $name:literal),*) => {$(
        impl Operation for $op {
            const NAME: &'static str = $name;

            fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
                self.product().run(cpu)
            }

            fn launch(&self, cx: &mut LaunchContext<'_>) -> Result<(), DeviceError> {
                self.product().launch(cx)
            }
        }
    )*};
}

are_products!(LinearForward is "linear_forward", LinearDinp is "linear_dinp", LinearDweight is "linear_dweight");
