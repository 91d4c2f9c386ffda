//! Views of matrices inside slices, and their product.
//!
//! A view is a rectangle with strides: a block of rows, the channels of one head, a transpose. Views for writing
//! are cut into views that do not overlap, so the tiles of one output go to different threads.
#![allow(
    unsafe_code,
    reason = "strided rectangles of a slice that do not overlap, and the `gemm` call"
)]

use std::marker::PhantomData;
use std::ops::Range;

use super::kernel::Real;

/// A matrix for reading.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, T> {
    ptr: *const T,
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
    _data: PhantomData<&'a [T]>,
}

// SAFETY: it stands for `&'a [T]` (elements of it), which can be sent and shared where `T` can be shared.
unsafe impl<T: Sync> Send for Matrix<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Matrix<'_, T> {}

impl<'a, T> Matrix<'a, T> {
    /// `rows × cols` elements, rows `stride` apart.
    #[inline]
    pub(crate) fn new(data: &'a [T], rows: usize, cols: usize, stride: usize) -> Self {
        assert_fits(data.len(), rows, cols, stride);
        Self {
            ptr: data.as_ptr(),
            rows,
            cols,
            row_stride: stride,
            col_stride: 1,
            _data: PhantomData,
        }
    }

    /// A matrix without gaps.
    #[inline]
    pub(crate) fn dense(data: &'a [T], rows: usize, cols: usize) -> Self {
        Self::new(data, rows, cols, cols)
    }

    /// Rows and columns exchanged.
    #[inline]
    pub(crate) fn transposed(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }

    /// Some of the rows.
    #[inline]
    pub(crate) fn rows(self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.rows,
            "rows {range:?} of {}",
            self.rows
        );
        Self {
            // In the slice, or at most at the end of it where no element remains.
            ptr: self.ptr.wrapping_add(range.start * self.row_stride),
            rows: range.len(),
            ..self
        }
    }

    /// Some of the columns.
    #[inline]
    pub(crate) fn cols(self, range: Range<usize>) -> Self {
        self.transposed().rows(range).transposed()
    }

    /// Number of rows.
    #[inline]
    pub(crate) fn row_count(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    #[inline]
    pub(crate) fn col_count(&self) -> usize {
        self.cols
    }

    /// True if [`Matrix::row`] can be called.
    #[inline]
    pub(crate) fn has_slices(&self) -> bool {
        self.col_stride == 1
    }

    /// True if the rows are slices without gaps between them.
    #[inline]
    pub(crate) fn is_dense(&self) -> bool {
        self.has_slices() && self.row_stride == self.cols
    }

    /// One row as a slice.
    #[inline]
    pub(crate) fn row(&self, row: usize) -> &'a [T] {
        assert!(
            row < self.rows && self.col_stride == 1,
            "row {row} of {}",
            self.rows
        );
        // SAFETY: the row was within the slice at construction, with its elements side by side, and `'a` borrows
        // the slice.
        unsafe { std::slice::from_raw_parts(self.ptr.add(row * self.row_stride), self.cols) }
    }
}

/// A matrix for writing. Its elements are its own: no other view has any of them.
pub(crate) struct MatrixMut<'a, T> {
    ptr: *mut T,
    rows: usize,
    cols: usize,
    row_stride: usize,
    _data: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for `&'a mut [T]` (elements of it).
unsafe impl<T: Send> Send for MatrixMut<'_, T> {}

impl<'a, T> MatrixMut<'a, T> {
    /// `rows × cols` elements, rows `stride` apart.
    #[inline]
    pub(crate) fn new(data: &'a mut [T], rows: usize, cols: usize, stride: usize) -> Self {
        assert_fits(data.len(), rows, cols, stride);
        Self {
            ptr: data.as_mut_ptr(),
            rows,
            cols,
            row_stride: stride,
            _data: PhantomData,
        }
    }

    /// A matrix without gaps.
    #[inline]
    pub(crate) fn dense(data: &'a mut [T], rows: usize, cols: usize) -> Self {
        Self::new(data, rows, cols, cols)
    }

    /// Number of rows.
    #[inline]
    pub(crate) fn row_count(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    #[inline]
    pub(crate) fn col_count(&self) -> usize {
        self.cols
    }

    /// One row as a slice.
    #[inline]
    pub(crate) fn row_mut(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: the row was within the slice at construction; no other view has its elements, and `&mut self`
        // makes this the only slice of them.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(row * self.row_stride), self.cols) }
    }

    /// A shorter borrow of all of it.
    #[inline]
    pub(crate) fn whole_mut(&mut self) -> MatrixMut<'_, T> {
        self.rows_mut(0..self.rows)
    }

    /// A shorter borrow of some of the rows.
    #[inline]
    pub(crate) fn rows_mut(&mut self, range: Range<usize>) -> MatrixMut<'_, T> {
        assert!(
            range.start <= range.end && range.end <= self.rows,
            "rows {range:?} of {}",
            self.rows
        );
        MatrixMut {
            ptr: self.ptr.wrapping_add(range.start * self.row_stride),
            rows: range.len(),
            ..*self
        }
    }

    /// Cut into tiles of at most `height × width`, by rows, then columns.
    pub(crate) fn tiles(self, height: usize, width: usize) -> Vec<Tile<'a, T>> {
        assert!(height > 0 && width > 0, "empty tiles");
        let mut tiles = Vec::with_capacity(self.rows.div_ceil(height) * self.cols.div_ceil(width));
        for top in (0..self.rows).step_by(height) {
            for left in (0..self.cols).step_by(width) {
                let rows = top..self.rows.min(top + height);
                let cols = left..self.cols.min(left + width);
                // Different (row, column) are different elements, as `row_stride ≥ cols`: tiles do not overlap.
                let out = MatrixMut {
                    ptr: self.ptr.wrapping_add(top * self.row_stride + left),
                    rows: rows.len(),
                    cols: cols.len(),
                    ..self
                };
                tiles.push(Tile { rows, cols, out });
            }
        }
        tiles
    }
}

/// A part of a matrix for writing, and where it lies in the whole.
pub(crate) struct Tile<'a, T> {
    /// Rows of the whole.
    pub(crate) rows: Range<usize>,
    /// Columns of the whole.
    pub(crate) cols: Range<usize>,
    /// The part.
    pub(crate) out: MatrixMut<'a, T>,
}

fn assert_fits(len: usize, rows: usize, cols: usize, stride: usize) {
    assert!(stride >= cols, "rows of {cols} elements, {stride} apart");
    let end = match rows.checked_sub(1) {
        None => Some(0),
        Some(last) => last.checked_mul(stride).and_then(|start| start.checked_add(cols)),
    };
    assert!(
        end.is_some_and(|end| end <= len),
        "{rows} × {cols} elements in a slice of {len}"
    );
}

/// `out = factor · lhs · rhs`, or `out += …` where `accumulate`. Runs in the calling thread: the order of the
/// additions depends on the sizes alone.
pub(crate) fn product<T: Real>(
    out: &mut MatrixMut<'_, T>,
    lhs: Matrix<'_, T>,
    rhs: Matrix<'_, T>,
    factor: T,
    accumulate: bool,
) {
    assert_eq!(
        (out.rows, out.cols, lhs.cols),
        (lhs.rows, rhs.cols, rhs.rows),
        "sizes of a product"
    );
    let stride = out.row_stride as isize;
    // `gemm` writes columns: where rows lie apart, it is given the transposed of all three.
    let ((lhs, rhs), (out_rs, out_cs)) = if stride > 1 {
        ((rhs.transposed(), lhs.transposed()), (1, stride))
    } else {
        ((lhs, rhs), (stride, 1))
    };
    // SAFETY: each pointer with its strides and sizes stays within the slice that its view was made of (checked at
    // construction), and `out` shares no element with the others, since it is borrowed for writing.
    unsafe {
        T::gemm()(
            lhs.rows,
            rhs.cols,
            lhs.cols,
            out.ptr,
            out_cs,
            out_rs,
            accumulate,
            lhs.ptr,
            lhs.col_stride as isize,
            lhs.row_stride as isize,
            rhs.ptr,
            rhs.col_stride as isize,
            rhs.row_stride as isize,
            T::ONE,
            factor,
            false,
            false,
            false,
            gemm_common::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_of_strided_views() {
        // a: 2×3 inside rows of 4; b: 2×3, used transposed.
        let a = [1.0, 2.0, 3.0, 9.0, 4.0, 5.0, 6.0_f64];
        let b = [1.0, 0.0, 2.0, 0.0, 1.0, 1.0];
        let mut out = [0.5; 5];
        let mut view = MatrixMut::new(&mut out, 2, 2, 3);
        let (a, b) = (Matrix::new(&a, 2, 3, 4), Matrix::dense(&b, 2, 3).transposed());
        product(&mut view, a, b, 1.0, false);
        assert_eq!(out, [7.0, 5.0, 0.5, 16.0, 11.0]);
        product(&mut MatrixMut::new(&mut out, 2, 2, 3), a, b, 2.0, true);
        assert_eq!(out, [21.0, 15.0, 0.5, 48.0, 33.0]);
    }

    #[test]
    fn tiles_cover_a_matrix_once() {
        let mut data = vec![0; 7 * 10];
        for tile in MatrixMut::new(&mut data, 7, 9, 10).tiles(3, 4) {
            let mut out = tile.out;
            for row in 0..out.row_count() {
                out.row_mut(row).iter_mut().for_each(|x| *x += 1);
            }
        }
        for (i, &count) in data.iter().enumerate() {
            assert_eq!(count, i32::from(i % 10 != 9), "element {i}");
        }
    }

    #[test]
    #[should_panic(expected = "in a slice of")]
    fn a_view_beyond_its_slice_is_refused() {
        let _ = Matrix::new(&[0.0; 11], 3, 4, 4);
    }

    #[test]
    #[should_panic(expected = "in a slice of")]
    fn a_view_whose_end_cannot_be_counted_is_refused() {
        let _ = Matrix::new(&[0.0; 11], 3, 4, usize::MAX / 2 + 1);
    }
}
