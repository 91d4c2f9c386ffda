//! Linear layers with a GELU: a product and a kernel of ours; where it is asked for and cuBLASLt knows one, one pass.

use crate::device::cuda::{CudaKernel, DevicePtr, Epilogue, Launch, Product};
use crate::device::{DType, DeviceError};
use crate::ops::{CpuKernel, GeluForward, LinearGeluBackward, LinearGeluForward, expect_len};

/// Elements that the library wants a row of the GELU's input to be a multiple of.
const ROW_STEP: usize = 8;

/// Bytes that it wants the address of the GELU's input to be a multiple of.
const ALIGNMENT: usize = 16;

/// Whether the library is asked for one pass. It saves the GELU a pass over its input, but the product then has two
/// outputs, and whether that is faster is to be measured: so it is the user's choice. Only on Hopper, and not in f32,
/// where products are what costs.
fn is_one_pass(cx: &Launch<'_>, dtype: DType, width: usize, wide: DevicePtr) -> bool {
    cx.fused_gelu()
        && cx.is_hopper()
        && dtype == DType::Bf16
        && width.is_multiple_of(ROW_STEP)
        && wide.is_aligned(ALIGNMENT)
}

impl CudaKernel for LinearGeluForward {
    fn launch(&self, cx: &mut Launch<'_>) -> Result<(), DeviceError> {
        expect_len(Self::NAME, "out", self.out.len(), self.wide.len())?;
        let (linear, gelu) = self.parts();
        let dtype = self.out.dtype();
        let aux = cx.ptr(&self.wide, dtype)?;
        if is_one_pass(cx, dtype, self.shape.outputs, aux) {
            let bias = cx.ptr(&self.bias, dtype)?;
            let product = Product {
                out: cx.ptr(&self.out, dtype)?,
                epilogue: Epilogue::BiasGelu { bias, aux },
                ..linear.product(cx)?
            };
            if product.try_launch(cx)? {
                return Ok(());
            }
        }
        linear.launch(cx)?;
        gelu.launch(cx)
    }
}

impl CudaKernel for LinearGeluBackward {
    fn launch(&self, cx: &mut Launch<'_>) -> Result<(), DeviceError> {
        expect_len(Self::NAME, "wide", self.wide_active.len(), self.dwide.len())?;
        let (linear, gelu) = self.parts();
        let dtype = self.dwide.dtype();
        let aux = cx.ptr(&self.wide_active, dtype)?;
        if is_one_pass(cx, dtype, self.shape.inputs, aux) {
            let product = Product {
                epilogue: Epilogue::GeluBackward { aux },
                ..linear.product(cx)?
            };
            if product.try_launch(cx)? {
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
