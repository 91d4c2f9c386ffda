//! The keys of a head, and its values, as [`product`] reads them fastest: transposed, or copied without gaps, once a head
//! instead of once a tile of queries.

use std::ops::Range;

use crate::ops::cpu::kernel::{Real, with_scratch};
use crate::ops::cpu::matrix::{Matrix, MatrixMut, product};

/// Keys of a panel: as many as `gemm` computes at a time with AVX-512. A panel of 64 channels in f32 fits the first cache
/// with the queries of a product.
const PANEL: usize = 64;

/// Queries of one product: up to six times eight, `gemm` reads whole panels where they are and copies nothing.
const ROWS: usize = 48;

/// Fewer queries than this do not repay a transpose or a copy.
const FEW: usize = 8;

/// Keys or values of a head, `[T, D]`, for products with their transpose.
#[derive(Clone, Copy)]
pub(super) enum Keys<'a, T> {
    /// The elements as they are stored.
    Plain(Matrix<'a, T>),
    /// Panels of [`PANEL`] keys, each transposed and without gaps, and the number of channels. The last panel may be filled
    /// in its first columns only.
    Panels(&'a [T], usize),
}

/// Calls `work` with keys or values, transposed if there are queries enough.
pub(super) fn with_keys<T: Real>(queries: usize, keys: Matrix<'_, T>, work: impl FnOnce(Keys<'_, T>)) {
    if queries < FEW {
        return work(Keys::Plain(keys));
    }
    let (rows, channels) = (keys.row_count(), keys.col_count());
    with_scratch(rows.next_multiple_of(PANEL) * channels, |panels| {
        transpose(keys, panels);
        work(Keys::Panels(panels, channels));
    });
}

/// Calls `work` with the matrices, each copied if it has gaps and there are queries enough. Rows that lie far apart miss the
/// caches one by one where a product reads them, and fall on one another in the first; a copy reads many at once.
pub(super) fn with_copies<T: Real, const N: usize>(
    queries: usize,
    matrices: [Matrix<'_, T>; N],
    work: impl FnOnce([Matrix<'_, T>; N]),
) {
    let size_of = |x: &Matrix<'_, T>| {
        if queries < FEW || x.is_dense() {
            0
        } else {
            x.row_count() * x.col_count()
        }
    };
    with_scratch(matrices.iter().map(size_of).sum(), |mut free| {
        work(matrices.map(|x| match size_of(&x) {
            0 => x,
            size => copied(x, free.split_off_mut(..size).expect("room for all")),
        }));
    });
}

fn copied<'a, T: Real>(x: Matrix<'_, T>, copy: &'a mut [T]) -> Matrix<'a, T> {
    let (rows, channels) = (x.row_count(), x.col_count());
    for (row, copy) in copy.chunks_exact_mut(channels).enumerate() {
        copy.copy_from_slice(x.row(row));
    }
    Matrix::dense(copy, rows, channels)
}

fn transpose<T: Real>(keys: Matrix<'_, T>, panels: &mut [T]) {
    /// Rows that are read together.
    const GROUP: usize = 4;
    let (rows, channels) = (keys.row_count(), keys.col_count());
    for (panel, first) in panels
        .chunks_exact_mut(PANEL * channels)
        .zip((0..rows).step_by(PANEL))
    {
        let mut row = first;
        let end = rows.min(first + PANEL);
        while row + GROUP <= end {
            let [a, b, c, d] = [0, 1, 2, 3].map(|i| &keys.row(row + i)[..channels]);
            for (i, line) in panel.chunks_exact_mut(PANEL).enumerate() {
                // As one array, so that the compiler can store it at once.
                let group: &mut [T; GROUP] =
                    line[row - first..].first_chunk_mut().expect("rows of the panel");
                *group = [a[i], b[i], c[i], d[i]];
            }
            row += GROUP;
        }
        for row in row..end {
            for (line, &x) in panel.chunks_exact_mut(PANEL).zip(keys.row(row)) {
                line[row - first] = x;
            }
        }
    }
}

/// `out = factor · queries · keysᵀ`, a row each, with room behind it. `span` begins at the last key that the first query
/// sees, and ends behind those that any sees; beyond the keys that a query sees, its row holds anything.
pub(super) fn scores<T: Real>(
    out: &mut [T],
    span: Range<usize>,
    queries: Matrix<'_, T>,
    keys: Keys<'_, T>,
    factor: T,
) {
    let (count, end) = (queries.row_count(), span.end);
    let stride = out.len() / count;
    let (panels, channels) = match keys {
        Keys::Plain(keys) => {
            let keys = keys.rows(0..end).transposed();
            let mut out = MatrixMut::new(out, count, end, stride);
            return product(&mut out, queries, keys, factor, false);
        }
        Keys::Panels(panels, channels) => (panels, channels),
    };
    for (panel, left) in panels.chunks_exact(PANEL * channels).zip((0..end).step_by(PANEL)) {
        for top in (0..count).step_by(ROWS) {
            let bottom = count.min(top + ROWS);
            let seen = end.min(span.start + bottom);
            let width = seen.saturating_sub(left).min(PANEL);
            if width == 0 {
                continue;
            }
            let mut out = MatrixMut::new(&mut out[top * stride + left..], bottom - top, width, stride);
            let panel = Matrix::new(panel, channels, width, PANEL);
            product(&mut out, queries.rows(top..bottom), panel, factor, false);
        }
    }
}

/// `out = weights · values`, or added to it. Rows of `weights` are queries, of which the first sees the keys up to `first`; a query has
/// weight 0 for later ones.
pub(super) fn weighted<T: Real>(
    out: &mut MatrixMut<'_, T>,
    first: usize,
    weights: Matrix<'_, T>,
    values: Matrix<'_, T>,
    adds: bool,
) {
    let (count, end) = (weights.row_count(), weights.col_count());
    for top in (0..count).step_by(ROWS) {
        let bottom = count.min(top + ROWS);
        let seen = end.min(first + bottom);
        let weights = weights.rows(top..bottom).cols(0..seen);
        let mut out = out.rows_mut(top..bottom);
        product(&mut out, weights, values.rows(0..seen), T::ONE, adds);
    }
}
