//! How a scaled sum is done by NCCL: in one pass wherever its factor survives the type of the elements.

use std::collections::VecDeque;

use half::bf16;

use super::handle::Handle;
use super::library::CallError;
use super::sys::{DataType, RedOp};
use crate::collective::ReduceOp;
use crate::device::DType;

/// How elements are reduced.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Reduction {
    /// By an operation that NCCL has.
    Plain(RedOp),
    /// Every rank multiplies its elements by the factor on their way into the sum.
    PreMultiplied(f32),
    /// Summed, then multiplied in a pass of its own: NCCL would round the factor to the type of the elements.
    Rescaled(f32),
}

impl Reduction {
    /// Over so many ranks. `ncclAvg` multiplies by 1/ranks in the type of the elements, as the pre-multiplied sum
    /// does by any factor.
    pub(super) fn of(reduce: ReduceOp, dtype: DType, ranks: usize) -> Self {
        let scale = match reduce {
            ReduceOp::Max => return Self::Plain(RedOp::MAX),
            ReduceOp::Sum { scale } => scale,
        };
        let survives = dtype != DType::Bf16 || bf16::from_f32(scale).to_f32().to_bits() == scale.to_bits();
        // In f64, 1/ranks has more digits than a factor in f32.
        let averages = dtype != DType::F64 && scale.to_bits() == (1.0 / ranks as f32).to_bits();
        if scale == 1.0 {
            Self::Plain(RedOp::SUM)
        } else if !survives {
            Self::Rescaled(scale)
        } else if averages {
            Self::Plain(RedOp::AVG)
        } else {
            Self::PreMultiplied(scale)
        }
    }
}

/// Factors that are kept ready; a step needs one or two.
const KEPT: usize = 8;

/// Scaled sums that a communicator has made.
#[derive(Default)]
pub(super) struct ScaledSums(VecDeque<(DType, u32, RedOp)>);

impl ScaledSums {
    /// The one with this factor.
    pub(super) fn get(&mut self, handle: &mut Handle, factor: f32, dtype: DType) -> Result<RedOp, CallError> {
        let is_it = |sum: &&(DType, u32, RedOp)| (sum.0, sum.1) == (dtype, factor.to_bits());
        if let Some((.., op)) = self.0.iter().find(is_it) {
            return Ok(*op);
        }
        if self.0.len() == KEPT
            && let Some((.., op)) = self.0.pop_front()
        {
            handle.destroy_op(op)?;
        }
        let op = handle.pre_mul_sum(&mut scalar(factor, dtype), data_type(dtype))?;
        self.0.push_back((dtype, factor.to_bits(), op));
        Ok(op)
    }

    /// Frees all of them.
    pub(super) fn clear(&mut self, handle: &mut Handle) -> Result<(), CallError> {
        while let Some((.., op)) = self.0.pop_front() {
            handle.destroy_op(op)?;
        }
        Ok(())
    }
}

/// The type as NCCL numbers it.
pub(super) const fn data_type(dtype: DType) -> DataType {
    match dtype {
        DType::F64 => DataType::FLOAT64,
        DType::F32 => DataType::FLOAT32,
        DType::Bf16 => DataType::BFLOAT16,
        DType::I32 => DataType::INT32,
        DType::U8 => DataType::UINT8,
    }
}

/// A factor as one element of the type. Types of whole numbers have no scaled sum.
fn scalar(factor: f32, dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F64 => f64::from(factor).to_ne_bytes().to_vec(),
        DType::Bf16 => bf16::from_f32(factor).to_ne_bytes().to_vec(),
        DType::F32 | DType::I32 | DType::U8 => factor.to_ne_bytes().to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(scale: f32, dtype: DType, ranks: usize) -> Reduction {
        Reduction::of(ReduceOp::Sum { scale }, dtype, ranks)
    }

    #[test]
    fn a_mean_over_the_ranks_needs_no_pass_of_its_own() {
        for ranks in [2, 3, 8] {
            let mean = sum(1.0 / ranks as f32, DType::F32, ranks);
            assert_eq!(mean, Reduction::Plain(RedOp::AVG));
        }
        assert_eq!(sum(0.125, DType::Bf16, 8), Reduction::Plain(RedOp::AVG));
        assert_eq!(sum(1.0, DType::Bf16, 3), Reduction::Plain(RedOp::SUM));
        assert_eq!(
            Reduction::of(ReduceOp::Max, DType::U8, 3),
            Reduction::Plain(RedOp::MAX)
        );
    }

    #[test]
    fn other_factors_are_multiplied_in_where_they_are_exact() {
        assert_eq!(
            sum(1.0 / 12.0, DType::F32, 4),
            Reduction::PreMultiplied(1.0 / 12.0)
        );
        assert_eq!(sum(1.0 / 3.0, DType::F64, 3), Reduction::PreMultiplied(1.0 / 3.0));
        assert_eq!(
            sum(1.0 / 16.0, DType::Bf16, 4),
            Reduction::PreMultiplied(1.0 / 16.0)
        );
        // A third is no number of eight binary digits.
        assert_eq!(sum(1.0 / 3.0, DType::Bf16, 3), Reduction::Rescaled(1.0 / 3.0));
    }

    #[test]
    fn a_factor_has_the_type_of_the_elements() {
        assert_eq!(scalar(0.5, DType::Bf16), 0x3f00_u16.to_ne_bytes());
        assert_eq!(scalar(0.5, DType::F32), 0.5_f32.to_ne_bytes());
        assert_eq!(scalar(0.5, DType::F64), 0.5_f64.to_ne_bytes());
    }
}
