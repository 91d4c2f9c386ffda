//! The sum over rows: the gradient of a bias.

use super::kernel::{by_dtype, kernel};
use super::matrix::Matrix;
use super::real::Real;
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
    /// `[C]`
    pub out: Buffer,
    /// Add to `out` instead of overwriting it.
    pub accumulate: bool,
}

impl CpuKernel for ColumnSum {
    const NAME: &'static str = "column_sum";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtype!(Self::NAME, self.out.dtype(), T => self.compute::<T>(cpu))
    }
}

impl ColumnSum {
    fn compute<T: Real>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let columns = self.out.len();
        let rows = self.x.len() / columns.max(1);
        expect_len(Self::NAME, "x", self.x.len(), rows * columns)?;
        let x = self.x.host::<T>()?;
        let mut out = self.out.host_mut::<T>()?;
        let x = Matrix::dense(&x, rows, columns);
        let parts = out.chunks_mut(WIDTH).enumerate().collect();
        cpu.for_each_part(parts, |(i, out): (usize, &mut [T])| {
            let x = x.cols(i * WIDTH..i * WIDTH + out.len());
            sum_rows(cpu.isa(), x, rows, out, self.accumulate);
        });
        Ok(())
    }
}

kernel! {
    /// `out = Σ rows of x`, at most [`WIDTH`] columns.
    fn sum_rows<'a, T>(x: Matrix<'a, T>, rows: usize, out: &'a mut [T], accumulate: bool) -> () {
        if !accumulate {
            out.fill(T::ZERO);
        }
        for first in (0..rows).step_by(ROWS) {
            let mut block = [T::ZERO; WIDTH];
            for row in first..rows.min(first + ROWS) {
                for (sum, &x) in block.iter_mut().zip(x.row(row)) {
                    *sum += x;
                }
            }
            for (out, &sum) in out.iter_mut().zip(&block) {
                *out += sum;
            }
        }
    }
}
