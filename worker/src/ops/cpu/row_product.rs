//! One row times a matrix, which generation computes for each token. That takes as long as the matrix takes to be read:
//! each of its elements is read once, beside its neighbours, and bf16 is widened in registers.
#![expect(
    clippy::inline_always,
    reason = "so that it is compiled for each instruction set"
)]

use super::processor::Isa;
use pulp::{Simd, WithSimd};

use super::kernel::{LANES, Real, sum_lanes, update};
use super::matrix::Matrix;
use super::stored::Stored;

/// Rows of the matrix that are added at a time: a single one leaves half of the memory's speed unused.
const ROWS: usize = 4;

/// `out[j] = Σ row[i]·rhs[i, j]`, or `out[j] += …` where `accumulate`. Where the rows of the matrix lie side by side, the
/// terms are added in their order; where its columns do, in lanes.
pub(in crate::ops) fn row_product<S: Stored>(
    isa: Isa,
    out: &mut [S::Real],
    row: &[S::Real],
    rhs: Matrix<'_, S>,
    accumulate: bool,
) {
    assert_eq!(
        (rhs.row_count(), rhs.col_count()),
        (row.len(), out.len()),
        "sizes of a product"
    );
    if !accumulate {
        out.fill(S::Real::ZERO);
    }
    if rhs.has_slices() {
        isa.dispatch(AddRows { out, row, rhs });
    } else {
        let columns = rhs.transposed();
        isa.dispatch(AddDots { out, row, columns });
    }
}

/// `out += row[i]·rhs[i, ..]`, one `i` after the other.
struct AddRows<'a, S: Stored> {
    out: &'a mut [S::Real],
    row: &'a [S::Real],
    rhs: Matrix<'a, S>,
}

impl<S: Stored> WithSimd for AddRows<'_, S> {
    type Output = ();

    #[inline(always)]
    fn with_simd<I: Simd>(self, _simd: I) {
        let Self { out, row, rhs } = self;
        let cols = out.len();
        let whole = row.len() / ROWS * ROWS;
        for first in (0..whole).step_by(ROWS) {
            let x: [S::Real; ROWS] = std::array::from_fn(|i| row[first + i]);
            let terms: [&[S]; ROWS] = std::array::from_fn(|i| &rhs.row(first + i)[..cols]);
            for j in 0..cols {
                let mut sum = out[j];
                for i in 0..ROWS {
                    sum += x[i] * terms[i][j].real();
                }
                out[j] = sum;
            }
        }
        for (i, &x) in row.iter().enumerate().skip(whole) {
            update(out, rhs.row(i), |out, term| *out += x * term.real());
        }
    }
}

/// `out[j] += Σ row[i]·columns[j, i]`, each sum in lanes.
struct AddDots<'a, S: Stored> {
    out: &'a mut [S::Real],
    row: &'a [S::Real],
    columns: Matrix<'a, S>,
}

impl<S: Stored> WithSimd for AddDots<'_, S> {
    type Output = ();

    #[inline(always)]
    fn with_simd<I: Simd>(self, _simd: I) {
        let Self { out, row, columns } = self;
        for (j, out) in out.iter_mut().enumerate() {
            let mut lanes = [S::Real::ZERO; LANES];
            let column = columns.row(j);
            let whole = row.len() - row.len() % LANES;
            for start in (0..whole).step_by(LANES) {
                let (x, y) = (&row[start..start + LANES], &column[start..start + LANES]);
                for i in 0..LANES {
                    lanes[i] += x[i] * y[i].real();
                }
            }
            for i in whole..row.len() {
                lanes[i - whole] += row[i] * column[i].real();
            }
            *out += sum_lanes(lanes);
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    /// Where an element of a matrix of some inputs and outputs is.
    type Place = fn(usize, usize, [usize; 2]) -> usize;

    /// Small whole numbers, whose sums are exact in any order.
    fn numbers<S: Stored>(seed: usize, len: usize) -> Vec<S> {
        (0..len)
            .map(|i| S::of(((i * 7 + seed * 5) % 11) as f64 - 5.0))
            .collect()
    }

    fn check<S: Stored>() {
        // More and less than the rows and lanes at a time, and none.
        for (inputs, outputs) in [(1, 1), (3, 5), (4, 64), (35, 70), (129, 3), (0, 2)] {
            let row: Vec<S::Real> = numbers::<S>(1, inputs).into_iter().map(S::real).collect();
            let weight = numbers::<S>(2, inputs * outputs);
            let in_out = Matrix::dense(&weight, inputs, outputs);
            let out_in = Matrix::dense(&weight, outputs, inputs).transposed();
            let at: [Place; 2] = [
                |i, j, [_, outputs]| i * outputs + j,
                |i, j, [inputs, _]| j * inputs + i,
            ];
            for (rhs, at) in [in_out, out_in].into_iter().zip(at) {
                for isa in Isa::available() {
                    for accumulate in [false, true] {
                        let mut out = vec![S::Real::of(3.0); outputs];
                        row_product(isa, &mut out, &row, rhs, accumulate);
                        for (j, found) in out.into_iter().enumerate() {
                            let term =
                                |i: usize| row[i].to_f64() * weight[at(i, j, [inputs, outputs])].to_f64();
                            let sum: f64 = (0..inputs).map(term).sum();
                            let expected = if accumulate { sum + 3.0 } else { sum };
                            assert!(
                                (found.to_f64() - expected).abs() == 0.0,
                                "{inputs} × {outputs}, {j}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_times_a_matrix_of_either_layout() {
        check::<f32>();
        check::<f64>();
        check::<bf16>();
    }
}
