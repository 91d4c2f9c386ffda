//! Matrix products, by cuBLASLt.
//!
//! A [`Product`] is in row-major terms; the library counts by columns, where a row-major matrix is its own transpose, so
//! it is asked for `outᵀ = rhsᵀ · lhsᵀ`. Which algorithm it takes is asked once for each shape, types and alignment.
//! Sums are f32 in a fixed order: the same inputs give the same bits. Where something is added to a product of type bf16,
//! the library may round the product, and each sum, to bf16 on the way; it did so on an H200 at small sizes.
#![allow(unsafe_code, reason = "matrix products are enqueued by a C library")]

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::cublaslt::{Attribute, Call, Candidate, Compute, CublasLt, Owned, type_number};
use super::{DevicePtr, Launch};
use crate::device::{DType, DeviceError};

/// Scratch memory that an algorithm may use, as NVIDIA recommends for Hopper; others need less.
const WORKSPACE_BYTES: usize = 32 << 20;

/// Alignment beyond which none is faster.
const BEST_ALIGNMENT: u32 = 256;

/// A matrix in device memory, row-major.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// Its first element.
    pub at: DevicePtr,
    /// Elements from one row to the next, as it is stored.
    pub stride: usize,
    /// What is stored is the transpose of what is multiplied.
    pub transposed: bool,
}

/// What is done with a product before it is stored.
#[derive(Clone, Copy, Debug)]
pub enum Epilogue {
    /// Nothing.
    None,
    /// `+ bias[column]`; elements as the output's.
    Bias(DevicePtr),
    /// `aux = product + bias[column]`, `out = gelu(aux)` in the tanh form; `aux` lies as the output does.
    BiasGelu {
        /// Of each column.
        bias: DevicePtr,
        /// Written.
        aux: DevicePtr,
    },
    /// `out = product ⊙ gelu′(aux)`; `aux` lies as the output does.
    GeluBackward {
        /// Input of the GELU.
        aux: DevicePtr,
    },
}

impl Epilogue {
    /// `cublasLtEpilogue_t`
    const fn number(self) -> u32 {
        match self {
            Self::None => 1,
            Self::Bias(_) => 4,
            Self::BiasGelu { .. } => 32 | 4 | 128,
            Self::GeluBackward { .. } => 64 | 128,
        }
    }

    const fn bias(self) -> DevicePtr {
        match self {
            Self::Bias(bias) | Self::BiasGelu { bias, .. } => bias,
            _ => DevicePtr::NULL,
        }
    }

    const fn aux(self) -> DevicePtr {
        match self {
            Self::BiasGelu { aux, .. } | Self::GeluBackward { aux } => aux,
            _ => DevicePtr::NULL,
        }
    }
}

/// `out[rows, cols] = epilogue(lhs[rows, inner] · rhs[inner, cols] + addend)`
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// Rows of the output.
    pub rows: usize,
    /// Columns of the output.
    pub cols: usize,
    /// Length of the sums.
    pub inner: usize,
    /// Type of the operands: f32 or bf16.
    pub dtype: DType,
    /// Left operand.
    pub lhs: Operand,
    /// Right operand.
    pub rhs: Operand,
    /// Type of output and addend: that of the operands, or f32.
    pub out_dtype: DType,
    /// Output; not transposed.
    pub out: DevicePtr,
    /// Elements from one row of the output to the next.
    pub out_stride: usize,
    /// Added to the product; lies as the output does, and may be the output itself.
    pub addend: Option<DevicePtr>,
    /// The rest.
    pub epilogue: Epilogue,
}

impl Product {
    /// Puts it on the stream.
    pub fn launch(&self, cx: &mut Launch<'_>) -> Result<(), DeviceError> {
        if self.rows == 0 || self.cols == 0 {
            return Ok(());
        }
        let products = cx.attached(Products::open)?;
        let workspace = cx.scratch(WORKSPACE_BYTES)?;
        products.enqueue(self, workspace, cx)
    }

    /// Puts it on the stream if the library can do it; if not, says so once, and false from then on: for epilogues
    /// that not every version has for every shape, and that can be done otherwise.
    pub fn try_launch(&self, cx: &mut Launch<'_>) -> Result<bool, DeviceError> {
        let products = cx.attached(Products::open)?;
        let shape = self.shape(self.compute(cx));
        if products.refused().contains(&shape) {
            return Ok(false);
        }
        let Err(error) = self.launch(cx) else {
            return Ok(true);
        };
        tracing::warn!(
            "operation `{}` takes more than one pass, {} × {} by {}: {error}",
            cx.op(),
            self.rows,
            self.inner,
            self.cols
        );
        products.refused().insert(shape);
        Ok(false)
    }

    fn compute(&self, cx: &Launch<'_>) -> Compute {
        if cx.tf32() && self.dtype == DType::F32 {
            Compute::Tf32
        } else {
            Compute::F32
        }
    }

    /// Of A, B, C and D.
    fn addresses(&self) -> [DevicePtr; 4] {
        let addend = self.addend.unwrap_or(self.out);
        [self.rhs.at, self.lhs.at, addend, self.out]
    }

    fn shape(&self, compute: Compute) -> Shape {
        Shape {
            sizes: [self.rows, self.cols, self.inner],
            strides: [self.lhs.stride, self.rhs.stride, self.out_stride],
            transposed: [self.lhs.transposed, self.rhs.transposed],
            dtypes: [self.dtype, self.out_dtype],
            compute,
            epilogue: self.epilogue.number(),
            adds: self.addend.is_some(),
            alignments: self.addresses().map(alignment),
            extra_alignments: [self.epilogue.bias(), self.epilogue.aux()].map(alignment),
        }
    }
}

/// The greatest power of two that divides an address, up to where it matters.
fn alignment(at: DevicePtr) -> u32 {
    1 << at.raw().trailing_zeros().min(BEST_ALIGNMENT.trailing_zeros())
}

/// All that the choice of an algorithm depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    sizes: [usize; 3],
    strides: [usize; 3],
    transposed: [bool; 2],
    dtypes: [DType; 2],
    compute: Compute,
    epilogue: u32,
    adds: bool,
    alignments: [u32; 4],
    extra_alignments: [u32; 2],
}

/// A shape with its descriptions and its algorithm.
#[derive(Debug)]
struct Prepared {
    operation: Owned,
    rhs: Owned,
    lhs: Owned,
    out: Owned,
    candidate: Candidate,
}

/// Matrix products of one device.
#[derive(Debug)]
struct Products {
    cublaslt: CublasLt,
    prepared: Mutex<HashMap<Shape, Prepared>>,
    /// What the library cannot do.
    refused: Mutex<HashSet<Shape>>,
}

impl Products {
    fn open() -> Result<Self, DeviceError> {
        Ok(Self {
            cublaslt: CublasLt::open()?,
            prepared: Mutex::default(),
            refused: Mutex::default(),
        })
    }

    fn refused(&self) -> MutexGuard<'_, HashSet<Shape>> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enqueue(&self, product: &Product, workspace: DevicePtr, cx: &Launch<'_>) -> Result<(), DeviceError> {
        let shape = product.shape(product.compute(cx));
        // Held while the operation has this product's pointers.
        let mut known = self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
        let prepared = match known.entry(shape) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(self.prepare(product, &shape, cx.op())?),
        };
        self.point(&prepared.operation, product)?;
        let [rhs, lhs, addend, out] = product.addresses().map(DevicePtr::as_ptr);
        let call = Call {
            operation: &prepared.operation,
            matrices: [
                (rhs, &prepared.rhs),
                (lhs, &prepared.lhs),
                (addend, &prepared.out),
                (out, &prepared.out),
            ],
            beta: f32::from(u8::from(shape.adds)),
            candidate: &prepared.candidate,
            workspace: workspace.as_ptr(),
            stream: cx.raw_stream().cast(),
        };
        // SAFETY: the operation that asks checked its buffers against the shape; they, the workspace and the stream
        // are the launching device's, whose context is current.
        unsafe { self.cublaslt.enqueue(&call) }?;
        Ok(())
    }

    fn prepare(&self, product: &Product, shape: &Shape, op: &'static str) -> Result<Prepared, DeviceError> {
        let [rows, cols, inner] = shape.sizes;
        let [lhs_stride, rhs_stride, out_stride] = shape.strides;
        let [lhs_transposed, rhs_transposed] = shape.transposed;
        let number = |dtype: DType| {
            type_number(dtype).ok_or_else(|| DeviceError::Shape {
                op,
                what: format!("matrices of {dtype}, a GPU multiplies f32 and bf16"),
            })
        };
        let lt = &self.cublaslt;
        let operation = lt.operation(shape.compute)?;
        lt.set(&operation, Attribute::TransposeA, i32::from(rhs_transposed))?;
        lt.set(&operation, Attribute::TransposeB, i32::from(lhs_transposed))?;
        lt.set(&operation, Attribute::Epilogue, shape.epilogue)?;
        if product.epilogue.aux() != DevicePtr::NULL {
            lt.set(&operation, Attribute::AuxStride, out_stride as i64)?;
        }
        self.point(&operation, product)?;
        // As stored, row-major [rows, cols] is column-major [cols, rows].
        let stored = |rows: usize, cols: usize, transposed: bool, stride: usize, dtype: DType| {
            let (rows, cols) = if transposed { (rows, cols) } else { (cols, rows) };
            Ok::<_, DeviceError>(lt.matrix(number(dtype)?, rows, cols, stride)?)
        };
        let [dtype, out_dtype] = shape.dtypes;
        let rhs = stored(inner, cols, rhs_transposed, rhs_stride, dtype)?;
        let lhs = stored(rows, inner, lhs_transposed, lhs_stride, dtype)?;
        let out = stored(rows, cols, false, out_stride, out_dtype)?;
        let candidate = lt.best(
            &operation,
            [&rhs, &lhs, &out, &out],
            shape.alignments,
            WORKSPACE_BYTES,
        )?;
        Ok(Prepared {
            operation,
            rhs,
            lhs,
            out,
            candidate,
        })
    }

    /// Gives the operation the pointers of one product's epilogue.
    fn point(&self, operation: &Owned, product: &Product) -> Result<(), DeviceError> {
        let [bias, aux] = [product.epilogue.bias(), product.epilogue.aux()];
        for (attribute, pointer) in [(Attribute::BiasPointer, bias), (Attribute::AuxPointer, aux)] {
            if pointer != DevicePtr::NULL {
                self.cublaslt.set(operation, attribute, pointer.as_ptr())?;
            }
        }
        Ok(())
    }
}
