//! Linear layers as matrix products of cuBLASLt.

use crate::device::cuda::{CudaKernel, Epilogue, Launch, Operand, Product};
use crate::device::{Buffer, DType, DeviceError};
use crate::ops::{CpuKernel, LinearDinp, LinearDweight, LinearForward, WeightLayout, expect_len};

/// A matrix as it is stored.
fn stored(cx: &Launch<'_>, buffer: &Buffer, dtype: DType, stride: usize) -> Result<Operand, DeviceError> {
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
    pub(super) fn product(&self, cx: &Launch<'_>) -> Result<Product, DeviceError> {
        let (shape, dtype) = (self.shape, self.out.dtype());
        shape.check(
            Self::NAME,
            ("inp", &self.inp),
            ("weight", &self.weight),
            ("out", &self.out),
        )?;
        if let Some(bias) = &self.bias {
            expect_len(Self::NAME, "bias", bias.len(), shape.outputs)?;
        }
        if let Some(residual) = &self.residual {
            expect_len(Self::NAME, "residual", residual.len(), self.out.len())?;
        }
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
    fn launch(&self, cx: &mut Launch<'_>) -> Result<(), DeviceError> {
        self.product(cx)?.launch(cx)
    }
}

impl LinearDinp {
    /// The product that it is.
    pub(super) fn product(&self, cx: &Launch<'_>) -> Result<Product, DeviceError> {
        let (shape, dtype) = (self.shape, self.dinp.dtype());
        shape.check(
            Self::NAME,
            ("dinp", &self.dinp),
            ("weight", &self.weight),
            ("dout", &self.dout),
        )?;
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
    fn launch(&self, cx: &mut Launch<'_>) -> Result<(), DeviceError> {
        self.product(cx)?.launch(cx)
    }
}

impl CudaKernel for LinearDweight {
    fn launch(&self, cx: &mut Launch<'_>) -> Result<(), DeviceError> {
        let (shape, dtype, out_dtype) = (self.shape, self.inp.dtype(), self.dweight.dtype());
        shape.check(
            Self::NAME,
            ("inp", &self.inp),
            ("dweight", &self.dweight),
            ("dout", &self.dout),
        )?;
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
        product.launch(cx)
    }
}
