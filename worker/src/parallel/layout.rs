//! Where each gradient lies in the arena, and which bucket it is reduced with.
//!
//! Gradients lie in the order in which backward finishes them, so a bucket is a contiguous range, reduced in place.
//! The layout is a pure function of sizes, order, bucket sizes and world size: right from step 0, never rebuilt from
//! what one rank saw. All synchronisation modes share it, so they add the same numbers in the same order.
//!
//! A bucket is padded to a multiple of world size × [`CHUNK`] elements, and within a bucket every group begins a new
//! chunk. Equal slices of a bucket or of a group, one a rank, are therefore whole chunks of the global norm, and the
//! norm does not depend on who holds what. Padding is zero and stays zero: nobody writes it, and sums, moments and
//! updates of zeros are zeros.

use std::fmt::Write as _;
use std::ops::Range;

use super::Dtypes;
use crate::config::Parallel;
use crate::device::DType;
use crate::model::{Model, ParamId};
use crate::ops::CHUNK;

const MIB: f64 = 1_048_576.0;

/// First byte of every gradient, relative to its arena: a cache line, and the widest vector.
const ALIGNMENT_BYTES: usize = 64;

/// One gradient, as the layout must know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GradSpec {
    /// For errors; unique.
    pub name: String,
    /// Shape of the parameter.
    pub shape: Vec<usize>,
    /// How many times it is reported in one micro-batch: once for each place where the parameter is used.
    pub contributions: usize,
    /// Group that the parameter is gathered with, where it is not held by every rank.
    pub group: usize,
}

impl GradSpec {
    /// A parameter that is used in one place, of group 0.
    pub fn new(name: impl Into<String>, shape: &[usize]) -> Self {
        Self {
            name: name.into(),
            shape: shape.to_vec(),
            contributions: 1,
            group: 0,
        }
    }

    /// The gradients of a model, by parameter.
    #[must_use]
    pub fn of_model(model: &Model) -> Vec<Self> {
        let with_uses = model.params.iter().zip(model.uses());
        with_uses
            .map(|(param, contributions)| Self {
                name: param.key.clone(),
                shape: param.local_shape(),
                contributions,
                group: param.group.0,
            })
            .collect()
    }

    /// Its elements.
    fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Sizes of buckets, and for whom they are cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutConfig {
    /// Size of the first bucket: small, so that communication starts early.
    pub first_bucket_bytes: usize,
    /// Size of the others: large, so that few operations carry much.
    pub bucket_bytes: usize,
    /// Ranks over which a bucket can be cut into equal slices.
    pub world_size: usize,
    /// Type of the gradients while they are reduced, which bucket sizes count in.
    pub dtype: DType,
    /// Type of the gradients while micro-batches are added, and of the sums: the same or wider.
    pub accumulated: DType,
}

impl LayoutConfig {
    /// 1 MiB, then 25 MiB, of f32.
    #[must_use]
    pub const fn new(world_size: usize) -> Self {
        Self {
            first_bucket_bytes: 1 << 20,
            bucket_bytes: 25 << 20,
            world_size,
            dtype: DType::F32,
            accumulated: DType::F32,
        }
    }

    /// The sizes of a `train.yaml`.
    #[must_use]
    pub fn of(parallel: &Parallel, world_size: usize) -> Self {
        Self {
            first_bucket_bytes: (parallel.first_bucket_mb * MIB) as usize,
            bucket_bytes: (parallel.bucket_mb * MIB) as usize,
            ..Self::new(world_size)
        }
    }

    /// The same sizes for gradients of other types.
    #[must_use]
    pub fn with_dtypes(self, dtypes: Dtypes) -> Self {
        Self {
            dtype: dtypes.reduced,
            accumulated: dtypes.accumulated,
            ..self
        }
    }
}

/// A contiguous range of gradients that are reduced together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Elements of the arena, padding included.
    pub range: Range<usize>,
    /// Its gradients, in the order of their memory.
    pub params: Vec<ParamId>,
}

/// What cannot be laid out: the order does not name every parameter exactly once, or nobody computes a gradient.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct LayoutError(String);

/// Where each gradient lies, and which bucket it is reduced with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GradientLayout {
    specs: Vec<GradSpec>,
    dtype: DType,
    accumulated: DType,
    order: Vec<ParamId>,
    ranges: Vec<Range<usize>>,
    buckets: Vec<Bucket>,
}

impl GradientLayout {
    /// Lays out the gradients `specs` (by parameter) in `order`.
    pub fn new(specs: Vec<GradSpec>, order: &[ParamId], config: &LayoutConfig) -> Result<Self, LayoutError> {
        if specs.is_empty() || config.world_size == 0 {
            let empty = "a gradient layout needs at least one rank and one parameter";
            return Err(LayoutError(empty.into()));
        }
        check_order(&specs, order)?;
        let alignment = ALIGNMENT_BYTES / config.dtype.bytes();
        let mut ranges = vec![0..0; specs.len()];
        let mut buckets: Vec<Bucket> = Vec::new();
        for params in group(&specs, order, config) {
            let start = buckets.last().map_or(0, |b| b.range.end);
            let mut end = start;
            let mut group = specs[params[0].0].group;
            for id in &params {
                if std::mem::replace(&mut group, specs[id.0].group) != group {
                    end = end.next_multiple_of(CHUNK);
                }
                ranges[id.0] = end..end + specs[id.0].len();
                end = (end + specs[id.0].len()).next_multiple_of(alignment);
            }
            let len = (end - start).next_multiple_of(config.world_size * CHUNK);
            buckets.push(Bucket {
                range: start..start + len,
                params,
            });
        }
        Ok(Self {
            specs,
            dtype: config.dtype,
            accumulated: config.accumulated,
            order: order.to_vec(),
            ranges,
            buckets,
        })
    }

    /// The layout of a model's gradients.
    pub fn of_model(model: &Model, config: &LayoutConfig) -> Result<Self, LayoutError> {
        Self::new(GradSpec::of_model(model), &model.backward_order(), config)
    }

    /// Number of parameters.
    #[must_use]
    pub fn params(&self) -> usize {
        self.specs.len()
    }

    /// What is known of a gradient.
    ///
    /// # Panics
    /// If there is no such parameter.
    #[must_use]
    pub fn spec(&self, id: ParamId) -> &GradSpec {
        &self.specs[id.0]
    }

    /// Elements of a gradient in the arena. Parameters and moments use the same ranges of theirs.
    ///
    /// # Panics
    /// If there is no such parameter.
    #[must_use]
    pub fn range(&self, id: ParamId) -> Range<usize> {
        self.ranges[id.0].clone()
    }

    /// Parameters in the order of their memory.
    #[must_use]
    pub fn order(&self) -> &[ParamId] {
        &self.order
    }

    /// Buckets in the order of their memory, which is the order in which they are reduced.
    #[must_use]
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// Index of the bucket of a parameter.
    #[must_use]
    pub fn bucket_of(&self, id: ParamId) -> Option<usize> {
        let range = self.ranges.get(id.0)?;
        Some(self.buckets.partition_point(|b| b.range.end <= range.start))
    }

    /// Type of the gradients while they are reduced.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Type of the gradients while micro-batches are added, and of the sums.
    #[must_use]
    pub fn accumulated(&self) -> DType {
        self.accumulated
    }

    /// Elements of the arena, padding included: a multiple of [`CHUNK`].
    #[must_use]
    pub fn len(&self) -> usize {
        self.buckets.last().map_or(0, |b| b.range.end)
    }

    /// Never: a layout has at least one parameter.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Hash of all of it, for ranks to compare before the first step.
    #[must_use]
    pub fn signature(&self) -> String {
        let mut text = format!("{} {}\n", self.dtype, self.accumulated);
        for id in &self.order {
            let (spec, range) = (&self.specs[id.0], &self.ranges[id.0]);
            let _ = writeln!(
                text,
                "{} {} {:?} {} {range:?}",
                id.0, spec.name, spec.shape, spec.contributions
            );
        }
        for bucket in &self.buckets {
            let _ = writeln!(text, "{:?}", bucket.range);
        }
        blake3::hash(text.as_bytes()).to_hex()[..16].to_owned()
    }
}

fn check_order(specs: &[GradSpec], order: &[ParamId]) -> Result<(), LayoutError> {
    const HINT: &str = "hint: a parameter that no block uses cannot be trained";
    let refused = |what: String| Err(LayoutError(what));
    let mut seen = vec![false; specs.len()];
    for ParamId(id) in order {
        match seen.get_mut(*id) {
            Some(seen) if !*seen => *seen = true,
            Some(_) => {
                let name = &specs[*id].name;
                return refused(format!(
                    "parameter `{name}` is in the order of backward more than once"
                ));
            }
            None => {
                let count = specs.len();
                return refused(format!(
                    "the order of backward names parameter {id}, but there are {count}"
                ));
            }
        }
    }
    for (
        GradSpec {
            name, contributions, ..
        },
        seen,
    ) in specs.iter().zip(seen)
    {
        if !seen {
            return refused(format!(
                "parameter `{name}` is not in the order of backward\n  {HINT}"
            ));
        }
        if *contributions == 0 {
            return refused(format!(
                "parameter `{name}` has 0 contributions to its gradient\n  {HINT}"
            ));
        }
    }
    Ok(())
}

/// Cuts the order into buckets: each as full as its size allows, a larger parameter alone.
fn group(specs: &[GradSpec], order: &[ParamId], config: &LayoutConfig) -> Vec<Vec<ParamId>> {
    let mut groups: Vec<Vec<ParamId>> = Vec::new();
    let mut open_bytes = 0;
    for id in order {
        let bytes = specs[id.0].len() * config.dtype.bytes();
        let capacity = |group: usize| match group {
            0 => config.first_bucket_bytes,
            _ => config.bucket_bytes,
        };
        match groups.len().checked_sub(1) {
            Some(open) if open_bytes + bytes <= capacity(open) => {
                groups[open].push(*id);
                open_bytes += bytes;
            }
            _ => {
                groups.push(vec![*id]);
                open_bytes = bytes;
            }
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn specs(sizes: &[usize]) -> Vec<GradSpec> {
        let named = sizes.iter().enumerate();
        named
            .map(|(i, &len)| GradSpec::new(format!("p{i}"), &[len]))
            .collect()
    }

    fn reversed(count: usize) -> Vec<ParamId> {
        (0..count).rev().map(ParamId).collect()
    }

    fn config(first: usize, rest: usize, world_size: usize) -> LayoutConfig {
        LayoutConfig {
            first_bucket_bytes: first,
            bucket_bytes: rest,
            ..LayoutConfig::new(world_size)
        }
    }

    proptest! {
        #[test]
        fn gradients_lie_in_order_aligned_and_apart(
            sizes in prop::collection::vec(1_usize..60_000, 1..30),
            first in 0_usize..100_000,
            rest in 0_usize..400_000,
            world_size in 1_usize..9,
        ) {
            let order = reversed(sizes.len());
            let layout = GradientLayout::new(specs(&sizes), &order, &config(first, rest, world_size)).unwrap();
            let mut end = 0;
            for id in &order {
                let range = layout.range(*id);
                prop_assert!(range.start >= end, "{range:?} begins before {end}");
                prop_assert_eq!(range.len(), sizes[id.0]);
                prop_assert_eq!(range.start * 4 % ALIGNMENT_BYTES, 0);
                let bucket = layout.bucket_of(*id).unwrap();
                prop_assert!(layout.buckets()[bucket].params.contains(id));
                end = range.end;
            }
            prop_assert!(layout.len() >= end);
        }

        #[test]
        fn buckets_are_contiguous_padded_and_as_full_as_they_may_be(
            sizes in prop::collection::vec(1_usize..60_000, 1..30),
            first in 0_usize..100_000,
            rest in 0_usize..400_000,
            world_size in 1_usize..9,
        ) {
            let order = reversed(sizes.len());
            let layout = GradientLayout::new(specs(&sizes), &order, &config(first, rest, world_size)).unwrap();
            let mut end = 0;
            for (i, bucket) in layout.buckets().iter().enumerate() {
                prop_assert_eq!(bucket.range.start, end);
                prop_assert_eq!(bucket.range.len() % (world_size * CHUNK), 0);
                end = bucket.range.end;
                let bytes: usize = bucket.params.iter().map(|id| 4 * sizes[id.0]).sum();
                let capacity = if i == 0 { first } else { rest };
                prop_assert!(bytes <= capacity || bucket.params.len() == 1);
                if let Some(next) = layout.buckets().get(i + 1) {
                    prop_assert!(bytes + 4 * sizes[next.params[0].0] > capacity, "bucket {} ended early", i);
                }
            }
            let all: Vec<ParamId> = layout.buckets().iter().flat_map(|b| b.params.clone()).collect();
            prop_assert_eq!(all, order);
            prop_assert_eq!(end, layout.len());
        }
    }

    #[test]
    fn a_parameter_larger_than_a_bucket_has_one_of_its_own() {
        let sizes = [1000, 200_000, 1000, 1000];
        let layout = GradientLayout::new(specs(&sizes), &reversed(4), &config(4000, 100_000, 2)).unwrap();
        let params: Vec<Vec<usize>> = layout
            .buckets()
            .iter()
            .map(|b| b.params.iter().map(|p| p.0).collect())
            .collect();
        assert_eq!(params, [vec![3], vec![2], vec![1], vec![0]]);
    }

    #[test]
    fn the_signature_depends_on_everything() {
        let layout = |sizes: &[usize], first, world_size| {
            let order = reversed(sizes.len());
            GradientLayout::new(specs(sizes), &order, &config(first, 1 << 20, world_size)).unwrap()
        };
        let base = layout(&[10, 20], 1 << 20, 2).signature();
        assert_eq!(base, layout(&[10, 20], 1 << 20, 2).signature());
        assert_ne!(base, layout(&[20, 10], 1 << 20, 2).signature());
        assert_ne!(base, layout(&[10, 20], 0, 2).signature());
        assert_ne!(base, layout(&[10, 20], 1 << 20, 4).signature());
    }

    #[test]
    fn a_gradient_without_contributions_is_named() {
        let mut specs = specs(&[1, 1]);
        specs[1].contributions = 0;
        let error = GradientLayout::new(specs, &reversed(2), &config(1, 1, 1)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "parameter `p1` has 0 contributions to its gradient\n  hint: a parameter that no block uses cannot be trained"
        );
    }

    #[test]
    fn a_wrong_order_is_named() {
        let error = |order: &[usize]| {
            let order: Vec<ParamId> = order.iter().map(|&i| ParamId(i)).collect();
            let layout = GradientLayout::new(specs(&[1, 1]), &order, &config(1, 1, 1));
            layout.unwrap_err().to_string()
        };
        assert_eq!(
            error(&[0]),
            "parameter `p1` is not in the order of backward\n  hint: a parameter that no block uses cannot be trained"
        );
        assert_eq!(
            error(&[0, 1, 0]),
            "parameter `p0` is in the order of backward more than once"
        );
        assert_eq!(
            error(&[0, 7]),
            "the order of backward names parameter 7, but there are 2"
        );
    }
}
