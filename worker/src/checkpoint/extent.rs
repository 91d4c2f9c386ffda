//! What a file of a checkpoint is to hold of a tensor, before its bytes are there.

use std::ops::Range;

use super::CheckpointError;
use super::error::type_and_shape;
use super::manifest::{TensorKind, TensorName};
use crate::device::DType;
use crate::model::{ParamSpec, Region};

/// A range of the elements of a tensor's region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Name of the tensor.
    pub tensor: TensorName,
    /// Its global shape.
    pub shape: Vec<u64>,
    /// Type of its elements.
    pub dtype: DType,
    /// The box of the tensor.
    pub region: Region,
    /// Elements, in row-major order of the region.
    pub range: Range<u64>,
}

impl Extent {
    /// All elements of a parameter's tensor of some kind. Parameters are the f32 masters, so that a run may go on in
    /// another precision.
    #[must_use]
    pub fn whole(kind: &TensorKind, spec: &ParamSpec) -> Self {
        let shape = spec.shape_on_disk();
        let region = Region::whole(&shape);
        Self {
            tensor: kind.of(&spec.key),
            dtype: DType::F32,
            range: 0..region.elements().expect("a parameter that fits in memory"),
            region,
            shape,
        }
    }

    /// Size of the range.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.range.end.saturating_sub(self.range.start) * self.dtype.bytes() as u64
    }

    /// Name and shape of the entry in the file: a whole region has its shape, a part of one is flat.
    pub(super) fn entry(&self) -> Result<(String, Vec<usize>), CheckpointError> {
        let Range { start, end } = self.range;
        let is_counted = Region::whole(&self.shape).elements().is_some();
        let is_within = is_counted && self.region.is_within(&self.shape);
        let elements = self.region.elements().filter(|_| is_within);
        let is_countable = |n: u64| n.checked_mul(self.dtype.bytes() as u64).is_some();
        let fits = elements.is_some_and(|n| start <= end && end <= n && is_countable(n));
        if !fits || self.tensor.to_string().contains(['@', '[']) {
            return Err(CheckpointError::Misuse(format!(
                "elements {start}..{end} of region {} of tensor `{}`, {}",
                self.region,
                self.tensor,
                type_and_shape(self.dtype, &self.shape)
            )));
        }
        let mut name = self.tensor.to_string();
        if !self.region.is_whole(&self.shape) {
            name += &self.region.to_string();
        }
        if elements == Some(end - start) {
            let shape = self.region.shape();
            Ok((name, shape.iter().map(|d| *d as usize).collect()))
        } else {
            Ok((format!("{name}@{start}..{end}"), vec![(end - start) as usize]))
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
