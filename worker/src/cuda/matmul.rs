//! Matrix products, by cuBLASLt.
//!
//! A [`Product`] is in row-major terms; the library counts by columns, where a row-major matrix is its own transpose, so
//! it is asked for `outᵀ = rhsᵀ · lhsᵀ`. Which algorithm it takes is asked once for each shape, types and alignment.
//! Sums are f32 in a fixed order: the same inputs give the same bits. Where something is added to a product of type bf16,
//! the library may round the product, and each sum, to bf16 on the way; it did so on an H200 at small sizes.
//!
//! Handles are opaque and attributes are set by number, so one table of functions fits CUDA 12 and 13. The numbers are
//! those of the library's public header.
#![allow(unsafe_code, reason = "matrix products are enqueued by a C library")]

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use cudarc::driver::sys::CUstream;
use parking_lot::Mutex;

use super::memory::DevicePtr;
use crate::libraries::{Library, LibraryError, LibraryKind, table};
use crate::memory::{DType, DeviceError};

/// Scratch memory that an algorithm may use, as NVIDIA recommends for Hopper; others need less.
pub(crate) const WORKSPACE_BYTES: usize = 32 << 20;

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

/// `out[rows, cols] = lhs[rows, inner] · rhs[inner, cols] + addend + bias`
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
    /// `[cols]`: added to each row of the output, of its type.
    pub bias: Option<DevicePtr>,
    /// Operands in f32 are never rounded to tf32.
    pub exact: bool,
}

impl Product {
    /// Addresses of the library's A, B, C and D.
    fn addresses(&self) -> [DevicePtr; 4] {
        let addend = self.addend.unwrap_or(self.out);
        [self.rhs.at, self.lhs.at, addend, self.out]
    }

    /// Bytes that the largest of its matrices takes, at most.
    pub(crate) fn extent(&self) -> usize {
        let stored = |side: Operand, rows, cols| side.stride * if side.transposed { cols } else { rows };
        let operands = stored(self.lhs, self.rows, self.inner).max(stored(self.rhs, self.inner, self.cols));
        let bytes = self.dtype.bytes().max(self.out_dtype.bytes());
        operands.max(self.rows * self.out_stride) * bytes
    }
}

/// The greatest power of two that divides an address, up to where it matters.
fn alignment(at: DevicePtr) -> u32 {
    1 << at.raw().trailing_zeros().min(BEST_ALIGNMENT.trailing_zeros())
}

/// All that the choice of an algorithm depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ProductShape {
    sizes: [usize; 3],
    strides: [usize; 3],
    transposed: [bool; 2],
    dtypes: [DType; 2],
    compute: Compute,
    adds: bool,
    alignments: [u32; 4],
    bias_alignment: Option<u32>,
}

/// A shape with its descriptions and its algorithm.
#[derive(Debug)]
struct Prepared {
    operation: Owned,
    rhs: Owned,
    lhs: Owned,
    out: Owned,
    candidate: HeuristicResult,
}

/// The library with its context on one device, and the matrix products that it was asked for.
#[derive(Debug)]
pub(crate) struct Products {
    library: Library,
    functions: Functions,
    context: Handle,
    /// Products of f32 may round their inputs to tf32.
    tf32: bool,
    prepared: Mutex<HashMap<ProductShape, Prepared>>,
}

// SAFETY: a context of cuBLASLt may be used by several threads at once, by its documentation.
unsafe impl Send for Products {}
// SAFETY: as above.
unsafe impl Sync for Products {}

impl Products {
    /// Opens the library on the device whose context is current. The library's context lives as long as the process.
    pub(crate) fn open(tf32: bool) -> Result<Self, DeviceError> {
        let library = Library::open(LibraryKind::CublasLt)?;
        // Its first call would fail with a status that does not name versions.
        if let Some(newer) = library.newer_than_driver() {
            return Err(newer.into());
        }
        let mut opened = Self::of(library, tf32)?;
        // SAFETY: the function writes one pointer.
        let status = unsafe { (opened.functions.create)(&raw mut opened.context) };
        opened.check("has no context", status)?;
        Ok(opened)
    }

    /// Without a context, which needs a GPU.
    fn of(library: Library, tf32: bool) -> Result<Self, LibraryError> {
        Ok(Self {
            functions: Functions::load(&library)?,
            library,
            context: ptr::null_mut(),
            tf32,
            prepared: Mutex::default(),
        })
    }

    fn shape(&self, product: &Product) -> ProductShape {
        let may_round = self.tf32 && product.dtype == DType::F32 && !product.exact;
        ProductShape {
            sizes: [product.rows, product.cols, product.inner],
            strides: [product.lhs.stride, product.rhs.stride, product.out_stride],
            transposed: [product.lhs.transposed, product.rhs.transposed],
            dtypes: [product.dtype, product.out_dtype],
            compute: if may_round { Compute::Tf32 } else { Compute::F32 },
            adds: product.addend.is_some(),
            alignments: product.addresses().map(alignment),
            bias_alignment: product.bias.map(alignment),
        }
    }

    /// Puts a product on a stream of the device, whose context is current. The workspace has [`WORKSPACE_BYTES`] bytes.
    pub(crate) fn enqueue(
        &self,
        product: &Product,
        workspace: DevicePtr,
        stream: CUstream,
        op: &'static str,
    ) -> Result<(), DeviceError> {
        let shape = self.shape(product);
        // The lock is held while the operation has this product's pointers.
        let mut known = self.prepared.lock();
        let prepared = match known.entry(shape) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(self.prepare(product, &shape, op)?),
        };
        self.point(&prepared.operation, product)?;
        let [rhs, lhs, addend, out] = product.addresses().map(DevicePtr::as_ptr);
        let (alpha, beta) = (1.0_f32, f32::from(u8::from(product.addend.is_some())));
        // SAFETY: handles are alive, α and β are read during the call. The operation that asks checked its buffers
        // against the shape; they, the workspace and the stream are the launching device's, whose context is current.
        let status = unsafe {
            (self.functions.matmul)(
                self.context,
                prepared.operation.0,
                (&raw const alpha).cast(),
                rhs,
                prepared.rhs.0,
                lhs,
                prepared.lhs.0,
                (&raw const beta).cast(),
                addend,
                prepared.out.0,
                out,
                prepared.out.0,
                &raw const prepared.candidate.algorithm,
                workspace.as_ptr(),
                prepared.candidate.workspace_bytes,
                stream.cast(),
            )
        };
        Ok(self.check("cannot multiply", status)?)
    }

    fn prepare(
        &self,
        product: &Product,
        shape: &ProductShape,
        op: &'static str,
    ) -> Result<Prepared, DeviceError> {
        let [rows, cols, inner] = shape.sizes;
        let [lhs_stride, rhs_stride, out_stride] = shape.strides;
        let [lhs_transposed, rhs_transposed] = shape.transposed;
        let operation = self.operation(shape.compute)?;
        self.set(&operation, Attribute::TransposeA, i32::from(rhs_transposed))?;
        self.set(&operation, Attribute::TransposeB, i32::from(lhs_transposed))?;
        let epilogue = if product.bias.is_some() {
            EPILOGUE_BIAS
        } else {
            EPILOGUE_DEFAULT
        };
        self.set(&operation, Attribute::Epilogue, epilogue)?;
        self.point(&operation, product)?;
        // As stored, row-major [rows, cols] is column-major [cols, rows].
        let stored = |rows: usize, cols: usize, transposed: bool, stride: usize, dtype: DType| {
            let (rows, cols) = if transposed { (rows, cols) } else { (cols, rows) };
            Ok::<_, DeviceError>(self.matrix(matrix_type(dtype, op)?, rows, cols, stride)?)
        };
        let [dtype, out_dtype] = shape.dtypes;
        let rhs = stored(inner, cols, rhs_transposed, rhs_stride, dtype)?;
        let lhs = stored(rows, inner, lhs_transposed, lhs_stride, dtype)?;
        let out = stored(rows, cols, false, out_stride, out_dtype)?;
        let candidate = self.candidate(&operation, [&rhs, &lhs, &out], shape.alignments)?;
        Ok(Prepared {
            operation,
            rhs,
            lhs,
            out,
            candidate,
        })
    }

    /// Gives the operation the address of one product's bias.
    fn point(&self, operation: &Owned, product: &Product) -> Result<(), LibraryError> {
        product.bias.map_or(Ok(()), |bias| {
            self.set(operation, Attribute::BiasPointer, bias.as_ptr())
        })
    }

    fn check(&self, problem: &str, status: Status) -> Result<(), LibraryError> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: the function gives a constant string for every number.
        let name = unsafe { (self.functions.status_name)(status) };
        let name = if name.is_null() {
            format!("status {status}")
        } else {
            // SAFETY: not null, and ends in a zero.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        };
        let version = self.library.version()?;
        Err(self
            .library
            .unusable(format!("(cuBLASLt {version}) {problem}: {name}")))
    }

    /// What the library makes, to be given back by `destroy`.
    fn make(
        &self,
        what: &str,
        destroy: unsafe extern "C" fn(Handle) -> Status,
        create: impl FnOnce(*mut Handle) -> Status,
    ) -> Result<Owned, LibraryError> {
        let mut raw = ptr::null_mut();
        let status = create(&raw mut raw);
        self.check(&format!("refuses {what}"), status)?;
        Ok(Owned(raw, destroy))
    }

    /// An operation in f32 or tf32, with f32 α and β.
    fn operation(&self, compute: Compute) -> Result<Owned, LibraryError> {
        let functions = &self.functions;
        self.make("an operation", functions.desc_destroy, |raw| {
            // SAFETY: the function writes one pointer.
            unsafe { (functions.desc_create)(raw, compute as c_int, 0) }
        })
    }

    fn set<T: Copy>(&self, operation: &Owned, attribute: Attribute, value: T) -> Result<(), LibraryError> {
        let (set, from) = (self.functions.desc_set, (&raw const value).cast());
        // SAFETY: the operation is alive; `value` has the size that is passed.
        let status = unsafe { set(operation.0, attribute as c_int, from, size_of::<T>()) };
        self.check(&format!("refuses {attribute:?}"), status)
    }

    /// A matrix that lies by columns.
    fn matrix(&self, number: c_int, rows: usize, cols: usize, stride: usize) -> Result<Owned, LibraryError> {
        let functions = &self.functions;
        self.make("a matrix", functions.layout_destroy, |raw| {
            // SAFETY: the function writes one pointer.
            unsafe { (functions.layout_create)(raw, number, rows as u64, cols as u64, stride as i64) }
        })
    }

    /// The best algorithm by the library's own judgement, for A, B, C and D whose addresses are multiples of so many bytes
    /// each; D lies as C does.
    fn candidate(
        &self,
        operation: &Owned,
        [a, b, c]: [&Owned; 3],
        alignments: [u32; 4],
    ) -> Result<HeuristicResult, LibraryError> {
        let preference = self.preference(alignments)?;
        let (mut found, mut count) = (HeuristicResult::default(), 0);
        // SAFETY: all handles are alive; the function writes at most one candidate, and the count.
        let status = unsafe {
            (self.functions.heuristic)(
                self.context,
                operation.0,
                a.0,
                b.0,
                c.0,
                c.0,
                preference.0,
                1,
                &raw mut found,
                &raw mut count,
            )
        };
        self.check("knows no algorithm", status)?;
        self.check("knows no algorithm", if count < 1 { -1 } else { found.state })?;
        Ok(found)
    }

    /// What an algorithm may rely on and use.
    fn preference(&self, [a, b, c, d]: [u32; 4]) -> Result<Owned, LibraryError> {
        let functions = &self.functions;
        let preference = self.make("a preference", functions.preference_destroy, |raw| {
            // SAFETY: the function writes one pointer.
            unsafe { (functions.preference_create)(raw) }
        })?;
        self.prefer(&preference, Preference::WorkspaceBytes, WORKSPACE_BYTES)?;
        for (which, value) in [
            (Preference::ReductionSchemes, REDUCTION_IN_COMPUTE_TYPE),
            (Preference::AlignmentA, a),
            (Preference::AlignmentB, b),
            (Preference::AlignmentC, c),
            (Preference::AlignmentD, d),
        ] {
            self.prefer(&preference, which, value)?;
        }
        Ok(preference)
    }

    fn prefer<T: Copy>(&self, preference: &Owned, which: Preference, value: T) -> Result<(), LibraryError> {
        let (set, from) = (self.functions.preference_set, (&raw const value).cast());
        // SAFETY: the preference is alive; `value` has the size that is passed.
        let status = unsafe { set(preference.0, which as c_int, from, size_of::<T>()) };
        self.check(&format!("refuses {which:?}"), status)
    }
}

/// `cublasStatus_t`
type Status = c_int;
/// Any of the library's pointers to what it keeps.
type Handle = *mut c_void;

const SUCCESS: Status = 0;

/// `cublasLtMatmulAlgo_t`: copied as it is.
type Algorithm = [u64; 8];

/// `cublasLtMatmulHeuristicResult_t`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct HeuristicResult {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

table! {
    /// What of cuBLASLt is called.
    struct Functions {
        /// A context of the library on the current device.
        create: fn(*mut Handle) -> Status = "cublasLtCreate";
        /// `CUBLAS_STATUS_NOT_SUPPORTED`, say.
        status_name: fn(Status) -> *const c_char = "cublasLtGetStatusName";
        /// Operation: compute type, type of α and β.
        desc_create: fn(*mut Handle, c_int, c_int) -> Status = "cublasLtMatmulDescCreate";
        /// Operation: attribute, value, bytes.
        desc_set: fn(Handle, c_int, *const c_void, usize) -> Status = "cublasLtMatmulDescSetAttribute";
        /// Operation.
        desc_destroy: fn(Handle) -> Status = "cublasLtMatmulDescDestroy";
        /// Matrix by columns: type, rows, columns, leading dimension.
        layout_create: fn(*mut Handle, c_int, u64, u64, i64) -> Status = "cublasLtMatrixLayoutCreate";
        /// Matrix.
        layout_destroy: fn(Handle) -> Status = "cublasLtMatrixLayoutDestroy";
        /// What an algorithm may use.
        preference_create: fn(*mut Handle) -> Status = "cublasLtMatmulPreferenceCreate";
        /// What an algorithm may use: attribute, value, bytes.
        preference_set: fn(Handle, c_int, *const c_void, usize) -> Status = "cublasLtMatmulPreferenceSetAttribute";
        /// What an algorithm may use.
        preference_destroy: fn(Handle) -> Status = "cublasLtMatmulPreferenceDestroy";
        /// Context, operation, A, B, C, D, preference, wanted, found, how many.
        heuristic: fn(Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut HeuristicResult, *mut c_int) -> Status
            = "cublasLtMatmulAlgoGetHeuristic";
        /// Context, operation, α, A, its layout, B, its layout, β, C, its layout, D, its layout, algorithm, workspace,
        /// its bytes, stream.
        matmul: fn(
            Handle, Handle, *const c_void, *const c_void, Handle, *const c_void, Handle, *const c_void, *const c_void,
            Handle, *mut c_void, Handle, *const Algorithm, *mut c_void, usize, *mut c_void,
        ) -> Status = "cublasLtMatmul";
    }
}

/// `cublasComputeType_t`: how products of f32 or bf16 are made; sums are f32 in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
enum Compute {
    /// `CUBLAS_COMPUTE_32F`
    F32 = 68,
    /// `CUBLAS_COMPUTE_32F_FAST_TF32`
    Tf32 = 77,
}

/// `CUDA_R_32F` and its like.
fn matrix_type(dtype: DType, op: &'static str) -> Result<c_int, DeviceError> {
    match dtype {
        DType::F32 => Ok(0),
        DType::Bf16 => Ok(14),
        _ => Err(DeviceError::Shape {
            op,
            what: format!("matrices of {dtype}, a GPU multiplies f32 and bf16"),
        }),
    }
}

/// `cublasLtMatmulDescAttributes_t`
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
enum Attribute {
    TransposeA = 3,
    TransposeB = 4,
    Epilogue = 7,
    BiasPointer = 8,
}

/// `CUBLASLT_EPILOGUE_DEFAULT`: nothing is added to the product.
const EPILOGUE_DEFAULT: u32 = 1;
/// `CUBLASLT_EPILOGUE_BIAS`
const EPILOGUE_BIAS: u32 = 4;

/// `cublasLtMatmulPreferenceAttributes_t`
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
enum Preference {
    WorkspaceBytes = 1,
    ReductionSchemes = 3,
    AlignmentA = 5,
    AlignmentB = 6,
    AlignmentC = 7,
    AlignmentD = 8,
}

/// Parts of a sum are added in f32 and in one order: neither atomically in place, nor in the output's type.
const REDUCTION_IN_COMPUTE_TYPE: u32 = 2;

/// Something of the library's, given back at the end.
#[derive(Debug)]
struct Owned(Handle, unsafe extern "C" fn(Handle) -> Status);

// SAFETY: plain data behind the pointer, which the library does not tie to a thread.
unsafe impl Send for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: created by the library's function of the same kind, destroyed once.
        let _ = unsafe { (self.1)(self.0) };
    }
}

/// The real library, as far as it goes without a GPU. Without one on the search path of the process the tests say so and
/// pass, unless `DDP_REQUIRE_CUBLASLT` is set.
#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Without a context, which would need a GPU.
    fn cublaslt() -> Option<Products> {
        match Library::open(LibraryKind::CublasLt) {
            Ok(library) => Some(Products::of(library, false).unwrap()),
            Err(error @ LibraryError::NotFound { .. }) => {
                assert!(std::env::var_os("DDP_REQUIRE_CUBLASLT").is_none(), "{error}");
                eprintln!("SKIPPED, cuBLASLt was not tested: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn all_functions_are_there_and_an_error_names_the_version() {
        if let Some(lt) = cublaslt() {
            let version = lt.library.version().unwrap();
            assert!(version.major >= 12, "{version}");
            let error = lt.check("cannot", 7).unwrap_err().to_string();
            let expected = format!("(cuBLASLt {version}) cannot: CUBLAS_STATUS_INVALID_VALUE");
            assert!(error.contains(&expected), "{error}");
        }
    }

    /// The library itself takes any epilogue.
    #[test]
    fn the_numbers_are_those_of_its_header() {
        let Some(lt) = cublaslt() else { return };
        let folder = lt.library.path().parent().and_then(Path::parent);
        let header = folder.map(|folder| folder.join("include/cublasLt.h"));
        let Some(text) = header.and_then(|path| std::fs::read_to_string(path).ok()) else {
            assert!(std::env::var_os("DDP_REQUIRE_CUBLASLT").is_none(), "no header");
            eprintln!("SKIPPED: no header beside the library");
            return;
        };
        let expect = |name: &str, number: u32| {
            let lines = text.lines().map(str::trim);
            let mut values = lines.filter_map(|line| line.strip_prefix(&format!("CUBLASLT_{name} = ")));
            let value = values.next().unwrap_or_else(|| panic!("no {name}"));
            assert_eq!(value.trim_end_matches(','), number.to_string(), "{name}");
        };
        expect("EPILOGUE_DEFAULT", EPILOGUE_DEFAULT);
        expect("EPILOGUE_BIAS", EPILOGUE_BIAS);
        for (name, attribute) in [
            ("TRANSA", Attribute::TransposeA),
            ("TRANSB", Attribute::TransposeB),
            ("EPILOGUE", Attribute::Epilogue),
            ("BIAS_POINTER", Attribute::BiasPointer),
        ] {
            expect(&format!("MATMUL_DESC_{name}"), attribute as u32);
        }
    }

    #[test]
    fn an_exact_product_is_not_rounded_to_tf32() {
        let Some(lt) = cublaslt() else { return };
        let lt = Products { tf32: true, ..lt };
        let operand = Operand {
            at: DevicePtr::NULL,
            stride: 8,
            transposed: false,
        };
        let compute = |exact, dtype| {
            let product = Product {
                rows: 8,
                cols: 8,
                inner: 8,
                dtype,
                lhs: operand,
                rhs: operand,
                out_dtype: DType::F32,
                out: DevicePtr::NULL,
                out_stride: 8,
                addend: None,
                bias: None,
                exact,
            };
            lt.shape(&product).compute
        };
        assert_eq!(compute(false, DType::F32), Compute::Tf32);
        assert_eq!(compute(true, DType::F32), Compute::F32);
        assert_eq!(compute(false, DType::Bf16), Compute::F32);
    }

    /// Our attributes and the sizes of their values, which the library checks.
    #[test]
    fn it_takes_all_that_describes_a_product() {
        let Some(lt) = cublaslt() else { return };
        for compute in [Compute::F32, Compute::Tf32] {
            let operation = lt.operation(compute).unwrap();
            lt.set(&operation, Attribute::TransposeA, 1_i32).unwrap();
            lt.set(&operation, Attribute::TransposeB, 0_i32).unwrap();
            lt.set(&operation, Attribute::Epilogue, 1_u32).unwrap();
            let nowhere = ptr::null_mut::<c_void>();
            lt.set(&operation, Attribute::BiasPointer, nowhere).unwrap();
            let error = lt.set(&operation, Attribute::BiasPointer, 0_i32).unwrap_err();
            let error = error.to_string();
            assert!(
                error.contains("refuses BiasPointer: CUBLAS_STATUS_INVALID_VALUE"),
                "{error}"
            );
        }
        for dtype in [DType::F32, DType::Bf16] {
            let number = matrix_type(dtype, "test").unwrap();
            lt.matrix(number, 768, 1024, 768).unwrap();
        }
        lt.preference([16, 16, 256, 2]).unwrap();
    }
}
