//! Ranges of tensors: what a file of a checkpoint is to hold, before its bytes are there.

use std::ops::Range;

use super::CheckpointError;
use super::error::type_and_shape;
use crate::device::DType;

/// A range of a tensor's elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Name of the tensor.
    pub tensor: String,
    /// Its global shape.
    pub shape: Vec<u64>,
    /// Type of its elements.
    pub dtype: DType,
    /// Elements, in row-major order of the whole tensor.
    pub range: Range<u64>,
}

impl Extent {
    /// Size of the range.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.range.end.saturating_sub(self.range.start) * self.dtype.bytes() as u64
    }

    /// Name and shape of the entry in the file: a whole tensor has its own, a part of one is flat.
    pub(super) fn entry(&self) -> Result<(String, Vec<usize>), CheckpointError> {
        let elements = self.shape.iter().try_fold(1_u64, |n, d| n.checked_mul(*d));
        let Range { start, end } = self.range;
        let is_countable = |n: u64| n.checked_mul(self.dtype.bytes() as u64).is_some();
        let fits = elements.is_some_and(|n| start <= end && end <= n && is_countable(n));
        if !fits || self.tensor.contains('@') {
            return Err(CheckpointError::Misuse(format!(
                "elements {start}..{end} of tensor `{}`, {}",
                self.tensor,
                type_and_shape(self.dtype, &self.shape)
            )));
        }
        if elements == Some(end - start) {
            let shape = self.shape.iter().map(|d| *d as usize).collect();
            Ok((self.tensor.clone(), shape))
        } else {
            let name = format!("{}@{start}..{end}", self.tensor);
            Ok((name, vec![(end - start) as usize]))
        }
    }
}

/// Share `index` of `shares` of a row of extents: which of them, and which elements of each. Shares are equal to an
/// element, and in order; together they are the whole row.
///
/// # Panics
/// If there is no such share.
#[must_use]
pub fn share_of(extents: &[Range<u64>], index: usize, shares: usize) -> Vec<(usize, Range<u64>)> {
    assert!(index < shares, "share {index} of {shares}");
    let total: u64 = extents.iter().map(|range| range.end - range.start).sum();
    let cut = |i: usize| (u128::from(total) * i as u128 / shares as u128) as u64;
    let (from, to) = (cut(index), cut(index + 1));
    let mut own = Vec::new();
    let mut first = 0;
    for (i, range) in extents.iter().enumerate() {
        let last = first + (range.end - range.start);
        let (start, end) = (first.max(from), last.min(to));
        if start < end {
            own.push((i, range.start + (start - first)..range.start + (end - first)));
        }
        first = last;
    }
    own
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn shares_are_equal_in_order_and_whole(
            extents in prop::collection::vec((0_u64..50, 0_u64..2000), 0..12),
            shares in 1_usize..9,
        ) {
            let extents: Vec<Range<u64>> = extents.iter().map(|&(start, len)| start..start + len).collect();
            let total: u64 = extents.iter().map(|r| r.end - r.start).sum();
            let all = |row: &mut dyn Iterator<Item = (usize, Range<u64>)>| -> Vec<(usize, u64)> {
                row.flat_map(|(i, range)| range.map(move |element| (i, element))).collect()
            };
            let mut joined = (0..shares).flat_map(|index| share_of(&extents, index, shares));
            prop_assert_eq!(all(&mut joined), all(&mut extents.iter().cloned().enumerate()));
            for index in 0..shares {
                let len: u64 = share_of(&extents, index, shares).iter().map(|(_, r)| r.end - r.start).sum();
                prop_assert!(len.abs_diff(total / shares as u64) <= 1);
            }
        }
    }
}
