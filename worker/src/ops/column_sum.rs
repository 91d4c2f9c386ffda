//! The sum over rows: the gradient of a bias.

use super::kernel::{by_dtypes, kernel};
use super::matrix::Matrix;
use super::real::Real;
use super::stored::Stored;
use super::{CpuKernel, expect_len};
use crate::device::{Buffer, Cpu, DeviceError};

/// Columns that one part of the work sums.
const WIDTH: usize = 256;
/// Rows whose sum is formed on its own before it is added to the total: keeps the rounding error small.
const ROWS: usize = 64;

/// `out[c] = Σ_r x[r, c]`, or added to what is there
#[derive(Clone, Debug)]
pub struct ColumnSum {
    /// `[R, C]`
    pub x: Buffer,
    /// `[C]`, of type G
    pub out: Buffer,
    /// Add to `out` instead of overwriting it.
    pub accumulate: bool,
}

impl CpuKernel for ColumnSum {
    const NAME: &'static str = "column_sum";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtypes!(Self::NAME, self.x.dtype(), self.out.dtype(), (S, G) => self.compute::<S, G>(cpu))
    }
}

impl ColumnSum {
    fn compute<S: Stored, G: Stored<Real = S::Real>>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let columns = self.out.len();
        let rows = self.x.len() / columns.max(1);
        expect_len(Self::NAME, "x", self.x.len(), rows * columns)?;
        let x = self.x.host::<S>()?;
        let mut out = self.out.host_mut::<G>()?;
        let x = Matrix::dense(&x, rows, columns);
        let parts = out.chunks_mut(WIDTH).enumerate().collect();
        let isa = cpu.isa();
        cpu.for_each_part(parts, |(i, out): (usize, &mut [G])| {
            let x = x.cols(i * WIDTH..i * WIDTH + out.len());
            G::write(isa, out, self.accumulate, |out| {
                if !self.accumulate {
                    out.fill(G::Real::ZERO);
                }
                for first in (0..rows).step_by(ROWS) {
                    let block = x.rows(first..rows.min(first + ROWS));
                    S::read_matrix(isa, block, |block| add_rows(isa, block, out));
                }
            });
        });
        Ok(())
    }
}

kernel! {
    /// `out += Σ rows of x`, at most [`WIDTH`] columns. The sum of the rows is formed first.
    fn add_rows<'a, T>(x: Matrix<'a, T>, out: &'a mut [T]) -> () {
        let mut block = [T::ZERO; WIDTH];
        for row in 0..x.row_count() {
            for (sum, &x) in block.iter_mut().zip(x.row(row)) {
                *sum += x;
            }
        }
        for (out, &sum) in out.iter_mut().zip(&block) {
            *out += sum;
        }
    }
}
