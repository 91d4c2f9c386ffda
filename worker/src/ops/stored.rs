//! Elements as they lie in memory, and the type that they are computed in.
//!
//! Kernels compute in f32 or f64 ([`Real`]). bf16 is storage: a part of the work widens what it reads into scratch
//! memory, computes in f32, and rounds once when it stores. f32 and f64 are computed in place, and cost nothing.
//! Parts are cut by the problem's size alone, so the bits do not depend on threads; widening is exact and rounding is
//! defined, so they do not depend on the instruction set either.
//!
//! Scratch memory belongs to the thread and is kept. A part's is bounded by the sizes that are written beside its
//! operation, never by that of a whole weight or of all logits.

use half::bf16;

use super::kernel::Real;
use super::kernel::with_scratch;
use super::matrix::{Matrix, MatrixMut};
use crate::device::{Element, Isa, dtype as convert};

/// A type of the elements of buffers.
pub(crate) trait Stored: Element {
    /// What its elements are computed in.
    type Real: Real;
    /// True if that is the type itself: nothing needs scratch memory.
    const IN_PLACE: bool;

    /// Calls `work` with the numbers of `x`.
    fn read<R>(isa: Isa, x: &[Self], work: impl FnOnce(&[Self::Real]) -> R) -> R;

    /// Calls `work` with memory that becomes `x`, rounded once. With `keep` it begins as the numbers of `x`, else
    /// with arbitrary ones.
    fn write<R>(isa: Isa, x: &mut [Self], keep: bool, work: impl FnOnce(&mut [Self::Real]) -> R) -> R;

    /// [`Stored::read`] of a matrix, of its own size.
    fn read_matrix<R>(isa: Isa, x: Matrix<'_, Self>, work: impl FnOnce(Matrix<'_, Self::Real>) -> R) -> R;

    /// [`Stored::write`] of a matrix, of its own size.
    fn write_matrix<R>(
        isa: Isa,
        x: &mut MatrixMut<'_, Self>,
        keep: bool,
        work: impl FnOnce(&mut MatrixMut<'_, Self::Real>) -> R,
    ) -> R;

    /// `out[i] = x[i]`
    fn widen(isa: Isa, x: &[Self], out: &mut [Self::Real]);
}

macro_rules! stored_as_computed {
    ($($type:ty),*) => {
        $(impl Stored for $type {
            type Real = $type;
            const IN_PLACE: bool = true;

            fn read<R>(_isa: Isa, x: &[Self], work: impl FnOnce(&[Self]) -> R) -> R {
                work(x)
            }

            fn write<R>(_isa: Isa, x: &mut [Self], _keep: bool, work: impl FnOnce(&mut [Self]) -> R) -> R {
                work(x)
            }

            fn read_matrix<R>(
                _isa: Isa,
                x: Matrix<'_, Self>,
                work: impl FnOnce(Matrix<'_, Self>) -> R,
            ) -> R {
                work(x)
            }

            fn write_matrix<R>(
                _isa: Isa,
                x: &mut MatrixMut<'_, Self>,
                _keep: bool,
                work: impl FnOnce(&mut MatrixMut<'_, Self>) -> R,
            ) -> R {
                work(x)
            }

            fn widen(_isa: Isa, x: &[Self], out: &mut [Self]) {
                out.copy_from_slice(x);
            }
        })*
    };
}

stored_as_computed!(f32, f64);

impl Stored for bf16 {
    type Real = f32;
    const IN_PLACE: bool = false;

    fn read<R>(isa: Isa, x: &[Self], work: impl FnOnce(&[f32]) -> R) -> R {
        with_scratch(x.len(), |wide: &mut [f32]| {
            widen(isa, x, wide);
            work(wide)
        })
    }

    fn write<R>(isa: Isa, x: &mut [Self], keep: bool, work: impl FnOnce(&mut [f32]) -> R) -> R {
        with_scratch(x.len(), |wide: &mut [f32]| {
            if keep {
                widen(isa, x, wide);
            }
            let result = work(wide);
            narrow(isa, wide, x);
            result
        })
    }

    fn read_matrix<R>(isa: Isa, x: Matrix<'_, Self>, work: impl FnOnce(Matrix<'_, f32>) -> R) -> R {
        let transposed = !x.has_slices();
        let x = if transposed { x.transposed() } else { x };
        let (rows, cols) = (x.row_count(), x.col_count());
        with_scratch(rows * cols, |wide: &mut [f32]| {
            for (row, wide) in wide.chunks_exact_mut(cols.max(1)).enumerate() {
                widen(isa, x.row(row), wide);
            }
            let wide = Matrix::dense(wide, rows, cols);
            work(if transposed { wide.transposed() } else { wide })
        })
    }

    fn write_matrix<R>(
        isa: Isa,
        x: &mut MatrixMut<'_, Self>,
        keep: bool,
        work: impl FnOnce(&mut MatrixMut<'_, f32>) -> R,
    ) -> R {
        let (rows, cols) = (x.row_count(), x.col_count());
        with_scratch(rows * cols, |wide: &mut [f32]| {
            if keep {
                for (row, wide) in wide.chunks_exact_mut(cols.max(1)).enumerate() {
                    widen(isa, x.row_mut(row), wide);
                }
            }
            let result = work(&mut MatrixMut::dense(wide, rows, cols));
            for (row, wide) in wide.chunks_exact(cols.max(1)).enumerate() {
                narrow(isa, wide, x.row_mut(row));
            }
            result
        })
    }

    fn widen(isa: Isa, x: &[Self], out: &mut [f32]) {
        widen(isa, x, out);
    }
}

/// `out[i] = x[i]`, exactly
pub(super) fn widen(isa: Isa, x: &[bf16], out: &mut [f32]) {
    struct Widen<'a>(&'a [bf16], &'a mut [f32]);

    impl pulp::WithSimd for Widen<'_> {
        type Output = ();

        #[expect(clippy::inline_always, reason = "compiled for each instruction set")]
        #[inline(always)]
        fn with_simd<S: pulp::Simd>(self, _simd: S) {
            for (out, &x) in self.1.iter_mut().zip(self.0) {
                *out = convert::widen(x);
            }
        }
    }

    isa.dispatch(Widen(x, out));
}

/// `out[i] = x[i]`, to nearest even
pub(super) fn narrow(isa: Isa, x: &[f32], out: &mut [bf16]) {
    struct Narrow<'a>(&'a [f32], &'a mut [bf16]);

    impl pulp::WithSimd for Narrow<'_> {
        type Output = ();

        #[expect(clippy::inline_always, reason = "compiled for each instruction set")]
        #[inline(always)]
        fn with_simd<S: pulp::Simd>(self, _simd: S) {
            for (out, &x) in self.1.iter_mut().zip(self.0) {
                *out = convert::narrow(x);
            }
        }
    }

    isa.dispatch(Narrow(x, out));
}
