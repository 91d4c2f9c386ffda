//! Boxes of a tensor: how a parameter is cut into them, and what two of them share.
//!
//! A checkpoint describes every layout with boxes ("regions") of the global shape, so that any layout reads what any
//! other wrote. All orders are row-major.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A box of a tensor: first element and one beyond the last, along each dimension.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Region(Vec<[u64; 2]>);

impl Region {
    /// A box with these bounds.
    pub const fn new(bounds: Vec<[u64; 2]>) -> Self {
        Self(bounds)
    }

    /// All of a tensor.
    pub fn whole(shape: &[u64]) -> Self {
        Self(shape.iter().map(|&len| [0, len]).collect())
    }

    /// First element and one beyond the last, along each dimension.
    pub fn bounds(&self) -> &[[u64; 2]] {
        &self.0
    }

    /// Length of each dimension. The region must be within a shape.
    pub fn shape(&self) -> Vec<u64> {
        self.0.iter().map(|[start, end]| end - start).collect()
    }

    /// Number of elements; `None` where it does not fit, or an end comes before its start.
    pub fn elements(&self) -> Option<u64> {
        let mut lens = self.0.iter().map(|[start, end]| end.checked_sub(*start));
        lens.try_fold(1_u64, |product, len| product.checked_mul(len?))
    }

    /// True if it is a box of a tensor of this shape.
    pub fn is_within(&self, shape: &[u64]) -> bool {
        let fits = |(&[start, end], &len): (&[u64; 2], &u64)| start <= end && end <= len;
        self.0.len() == shape.len() && self.0.iter().zip(shape).all(fits)
    }

    /// True if it is all of a tensor of this shape.
    pub fn is_whole(&self, shape: &[u64]) -> bool {
        *self == Self::whole(shape)
    }
}

/// `[0..3, 8..16]`
impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bounds: Vec<String> = self
            .0
            .iter()
            .map(|[start, end]| format!("{start}..{end}"))
            .collect();
        write!(f, "[{}]", bounds.join(", "))
    }
}

/// What two regions of one tensor share: rows of elements that are neighbours in both.
pub(crate) struct Overlap {
    /// Elements of a row.
    row: u64,
    rows: u64,
    /// Lengths of the dimensions that count the rows, last one first, with the strides of both regions along each.
    outer: Vec<(u64, [u64; 2])>,
    /// Element of each region at which the first row begins.
    base: [u64; 2],
}

/// Elements that are neighbours in two regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SharedRun {
    /// First of them in the one region, and in the other.
    pub(crate) starts: [u64; 2],
    /// How many.
    pub(crate) len: u64,
}

impl Overlap {
    /// The elements of both regions of the same tensor; `None` where there are none. The number of elements of each
    /// region must fit.
    pub(crate) fn of(one: &Region, other: &Region) -> Option<Self> {
        let mut overlap = Self {
            row: 1,
            rows: 1,
            outer: Vec::new(),
            base: [0, 0],
        };
        if one.0.iter().chain(&other.0).any(|[start, end]| start >= end) {
            return None;
        }
        let mut strides = [1, 1];
        let mut is_one_row = true;
        for (a, b) in one.0.iter().zip(&other.0).rev() {
            let (start, end) = (a[0].max(b[0]), a[1].min(b[1]));
            let len = end.checked_sub(start).filter(|len| *len > 0)?;
            if is_one_row {
                overlap.row *= len;
            } else {
                overlap.rows *= len;
                overlap.outer.push((len, strides));
            }
            // Rows of the next dimension are neighbours only where this one is whole in both.
            is_one_row &= [start, end] == *a && a == b;
            for (side, bounds) in [a, b].into_iter().enumerate() {
                overlap.base[side] += (start - bounds[0]) * strides[side];
                strides[side] *= bounds[1] - bounds[0];
            }
        }
        Some(overlap)
    }

    /// The elements that are in a range of each region, ascending in both.
    pub(crate) fn runs(&self, [one, other]: [Range<u64>; 2]) -> impl Iterator<Item = SharedRun> {
        // Starts ascend with the row.
        let is_before = |row: u64| {
            let [a, b] = self.starts(row);
            a + self.row <= one.start || b + self.row <= other.start
        };
        let (mut first, mut behind) = (0, self.rows);
        while first < behind {
            let middle = first + (behind - first) / 2;
            if is_before(middle) {
                first = middle + 1;
            } else {
                behind = middle;
            }
        }
        let clipped = move |row| {
            let [a, b] = self.starts(row);
            let skipped = one.start.saturating_sub(a).max(other.start.saturating_sub(b));
            let end = self
                .row
                .min(one.end.checked_sub(a)?)
                .min(other.end.checked_sub(b)?);
            let len = end.checked_sub(skipped).filter(|len| *len > 0)?;
            Some(SharedRun {
                starts: [a + skipped, b + skipped],
                len,
            })
        };
        (first..self.rows).map_while(clipped)
    }

    /// Element of each region at which a row begins.
    fn starts(&self, row: u64) -> [u64; 2] {
        let mut starts = self.base;
        let mut rest = row;
        for (len, strides) in &self.outer {
            let index = rest % len;
            rest /= len;
            starts = [starts[0] + index * strides[0], starts[1] + index * strides[1]];
        }
        starts
    }
}

/// One dimension of a parameter, divided over the ranks of a group. It consists of stretches that are divided one by one:
/// GPT-2's fused q, k and v are three, and a rank has a part of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    dim: usize,
    /// Lengths, each divisible by `parts`.
    stretches: Vec<usize>,
    parts: usize,
    index: usize,
    /// This rank's experts, where the first dimension counts experts, of which each rank has some. The other dimensions are cut
    /// within an expert.
    experts: Option<Range<usize>>,
}

impl Cut {
    /// Part `index` of `parts` of each stretch of dimension `dim` of `shape`.
    ///
    /// # Panics
    /// If there is no such part, or the stretches do not make up the dimension or cannot be divided evenly.
    pub fn new(shape: &[usize], dim: usize, stretches: &[usize], index: usize, parts: usize) -> Self {
        assert!(index < parts, "there is no part {index} of {parts}");
        assert!(
            shape.get(dim) == Some(&stretches.iter().sum()),
            "stretches {stretches:?} do not make up dimension {dim} of shape {shape:?}"
        );
        assert!(
            stretches.iter().all(|len| len.is_multiple_of(parts)),
            "{stretches:?} cannot be divided into {parts} equal parts"
        );
        Self {
            dim,
            stretches: stretches.to_vec(),
            parts,
            index,
            experts: None,
        }
    }

    /// The same of some experts, whose first dimension counts them.
    ///
    /// # Panics
    /// If that is the dimension that is cut.
    #[must_use]
    pub fn of_experts(self, experts: Range<usize>) -> Self {
        assert!(self.dim > 0, "the dimension that counts experts is not cut");
        let experts = Some(experts);
        Self { experts, ..self }
    }

    /// Shape of this rank's part.
    pub fn local_shape(&self, shape: &[usize]) -> Vec<usize> {
        let mut local = shape.to_vec();
        local[self.dim] /= self.parts;
        if let Some(experts) = &self.experts {
            local[0] = experts.len();
        }
        local
    }

    /// The boxes that this rank's part consists of, one a stretch, in order.
    pub fn regions(&self, shape: &[usize]) -> Vec<Region> {
        let mut whole: Vec<[u64; 2]> = shape.iter().map(|&len| [0, len as u64]).collect();
        if let Some(experts) = &self.experts {
            whole[0] = [experts.start as u64, experts.end as u64];
        }
        let own = self.own().into_iter().map(|range| {
            let mut bounds = whole.clone();
            bounds[self.dim] = [range.start as u64, range.end as u64];
            Region::new(bounds)
        });
        own.collect()
    }

    /// This rank's part of each stretch, along the dimension.
    fn own(&self) -> Vec<Range<usize>> {
        let mut start = 0;
        let own = self.stretches.iter().map(|len| {
            let part = len / self.parts;
            let first = start + self.index * part;
            start += len;
            first..first + part
        });
        own.collect()
    }

    /// Elements `range` of this rank's part, in order, as runs.
    pub(super) fn runs(&self, shape: &[usize], range: Range<usize>) -> Vec<Run> {
        let inner: usize = shape[self.dim + 1..].iter().product();
        let (whole, local) = (shape[self.dim] * inner, shape[self.dim] / self.parts * inner);
        let own = self.own();
        let before = self.experts.as_ref().map_or(0, |experts| {
            experts.start * shape[1..self.dim].iter().product::<usize>()
        });
        let mut runs = Vec::new();
        if range.is_empty() {
            return runs;
        }
        for row in range.start / local..range.end.div_ceil(local) {
            let mut at = row * local;
            for (region, part) in own.iter().enumerate() {
                let len = part.len() * inner;
                let (start, end) = (at.max(range.start), (at + len).min(range.end));
                if start < end {
                    runs.push(Run {
                        local: start..end,
                        region,
                        in_region: row * len + (start - at),
                        global: (before + row) * whole + part.start * inner + (start - at),
                    });
                }
                at += len;
            }
        }
        runs
    }
}

/// Elements of a parameter that are neighbours in memory, in their region, and in the whole tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Which elements of this rank's part.
    pub local: Range<usize>,
    /// Number of the region, of those of the parameter.
    pub region: usize,
    /// The first one's number in the region.
    pub in_region: usize,
    /// The first one's number in the whole tensor.
    pub global: usize,
}

#[cfg(test)]
#[path = "region_tests.rs"]
mod tests;
