//! Elements as they lie in memory, and the type that they are computed in.
//!
//! Kernels compute in f32 or f64 ([`Real`]). bf16 is storage: a part of the work widens what it reads into scratch
//! memory, computes in f32, and rounds once when it stores. f32 and f64 are computed in place, and cost nothing.
//! How parts are cut makes no difference to the bits, so these do not depend on threads; widening is exact and rounding
//! is defined, so they do not depend on the instruction set either.
//!
//! Scratch memory belongs to the thread and is kept. A part's is bounded by the sizes that are written beside its
//! operation, never by that of a whole weight or of all logits.

use super::processor::Isa;
use half::bf16;

use super::kernel::{Real, update, with_scratch};
use super::matrix::{Matrix, MatrixMut};
use crate::memory::{Element, dtype as convert};

/// A type of the elements of buffers.
pub(crate) trait Stored: Element {
    /// What its elements are computed in.
    type Real: Real;
    /// True if that is the type itself: nothing needs scratch memory.
    const IN_PLACE: bool = size_of::<Self>() == size_of::<Self::Real>();

    /// The nearest value.
    fn of(x: f64) -> Self;

    /// Exactly.
    fn to_f64(self) -> f64;

    /// Exactly.
    fn real(self) -> Self::Real;

    /// `out[i] = x[i]`, exactly
    fn widen(isa: Isa, x: &[Self], out: &mut [Self::Real]);

    /// `out[i] = x[i]`, to nearest even
    fn narrow(isa: Isa, x: &[Self::Real], out: &mut [Self]);

    /// The matrix itself, if its elements are computed in their own type.
    fn in_place(x: Matrix<'_, Self>) -> Option<Matrix<'_, Self::Real>>;

    /// As [`Stored::in_place`].
    fn in_place_mut(x: MatrixMut<'_, Self>) -> Option<MatrixMut<'_, Self::Real>>;

    /// Calls `work` with the numbers of `x`.
    #[inline]
    fn read<R>(isa: Isa, x: &[Self], work: impl FnOnce(&[Self::Real]) -> R) -> R {
        if Self::IN_PLACE {
            return work(bytemuck::cast_slice(x));
        }
        with_scratch(x.len(), |wide: &mut [Self::Real]| {
            Self::widen(isa, x, wide);
            work(wide)
        })
    }

    /// Calls `work` with memory that becomes `x`, rounded once. With `keep` it begins as the numbers of `x`, else
    /// with arbitrary ones.
    #[inline]
    fn write<R>(isa: Isa, x: &mut [Self], keep: bool, work: impl FnOnce(&mut [Self::Real]) -> R) -> R {
        if Self::IN_PLACE {
            return work(bytemuck::cast_slice_mut(x));
        }
        with_scratch(x.len(), |wide: &mut [Self::Real]| {
            if keep {
                Self::widen(isa, x, wide);
            }
            let result = work(wide);
            Self::narrow(isa, wide, x);
            result
        })
    }

    /// [`Stored::read`] of a matrix, of its own size.
    #[inline]
    fn read_matrix<R>(isa: Isa, x: Matrix<'_, Self>, work: impl FnOnce(Matrix<'_, Self::Real>) -> R) -> R {
        if let Some(x) = Self::in_place(x) {
            return work(x);
        }
        let transposed = !x.has_slices();
        let x = if transposed { x.transposed() } else { x };
        let (rows, cols) = (x.row_count(), x.col_count());
        with_scratch(rows * cols, |wide: &mut [Self::Real]| {
            for (row, wide) in wide.chunks_exact_mut(cols.max(1)).enumerate() {
                Self::widen(isa, x.row(row), wide);
            }
            let wide = Matrix::dense(wide, rows, cols);
            work(if transposed { wide.transposed() } else { wide })
        })
    }

    /// [`Stored::write`] of a matrix, of its own size.
    #[inline]
    fn write_matrix<R>(
        isa: Isa,
        x: &mut MatrixMut<'_, Self>,
        keep: bool,
        work: impl FnOnce(&mut MatrixMut<'_, Self::Real>) -> R,
    ) -> R {
        if let Some(mut x) = Self::in_place_mut(x.whole_mut()) {
            return work(&mut x);
        }
        Self::write_copy(isa, x, keep, work)
    }

    /// [`Stored::write_matrix`], but through memory without gaps even where nothing is rounded.
    fn write_copy<R>(
        isa: Isa,
        x: &mut MatrixMut<'_, Self>,
        keep: bool,
        work: impl FnOnce(&mut MatrixMut<'_, Self::Real>) -> R,
    ) -> R {
        let (rows, cols) = (x.row_count(), x.col_count());
        with_scratch(rows * cols, |wide: &mut [Self::Real]| {
            if keep {
                for (row, wide) in wide.chunks_exact_mut(cols.max(1)).enumerate() {
                    Self::widen(isa, x.row_mut(row), wide);
                }
            }
            let result = work(&mut MatrixMut::dense(wide, rows, cols));
            for (row, wide) in wide.chunks_exact(cols.max(1)).enumerate() {
                Self::narrow(isa, wide, x.row_mut(row));
            }
            result
        })
    }
}

macro_rules! stored {
    ($type:ty as $real:ty, of: $of:expr, widen: $widen:expr, narrow: $narrow:expr, in_place: $in_place:expr) => {
        impl Stored for $type {
            type Real = $real;

            fn of(x: f64) -> Self {
                $of(x)
            }

            fn to_f64(self) -> f64 {
                self.into()
            }

            #[inline(always)]
            fn real(self) -> $real {
                ($widen)(self)
            }

            #[inline]
            fn in_place(x: Matrix<'_, Self>) -> Option<Matrix<'_, $real>> {
                $in_place(x)
            }

            #[inline]
            fn in_place_mut(x: MatrixMut<'_, Self>) -> Option<MatrixMut<'_, $real>> {
                $in_place(x)
            }

            #[inline]
            fn widen(isa: Isa, x: &[Self], out: &mut [$real]) {
                isa.dispatch(Convert(x, out, $widen));
            }

            #[inline]
            fn narrow(isa: Isa, x: &[$real], out: &mut [Self]) {
                isa.dispatch(Convert(x, out, $narrow));
            }
        }
    };
}

stored!(f32 as f32, of: |x| x as Self, widen: |x| x, narrow: |x| x, in_place: Some);
stored!(f64 as f64, of: |x| x, widen: |x| x, narrow: |x| x, in_place: Some);
stored!(bf16 as f32, of: Self::from_f64, widen: convert::widen, narrow: convert::narrow, in_place: |_| None);

/// Slices of one length, and what makes an element of the second of one of the first.
struct Convert<'a, X, Y, F>(&'a [X], &'a mut [Y], F);

impl<X: Copy, Y, F: Fn(X) -> Y> pulp::WithSimd for Convert<'_, X, Y, F> {
    type Output = ();

    #[expect(clippy::inline_always, reason = "compiled for each instruction set")]
    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _simd: S) {
        update(self.1, self.0, |out, x| *out = (self.2)(x));
    }
}
