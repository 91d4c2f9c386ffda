//! Where each gradient lies in the arena, and which bucket it is reduced with.
//!
//! Gradients lie in the order in which backward finishes them, so a bucket is a contiguous range, reduced in place.
//! Within a group those of the same roles lie together, those of a [`super::StateGroup`] side by side, and what two
//! stages of a pipeline share comes last, as its sum waits for both. The layout is a pure function of sizes, roles, order,
//! bucket sizes and world size: right from step 0, never rebuilt from what one rank saw. All synchronisation modes share
//! it, so they add the same numbers in the same order.
//!
//! The order is cut into *pieces*: neighbours of one group and of the same roles, no more than a bucket may hold. Where a
//! piece begins and ends depends on its group and on the bucket size, never on what comes before. A piece begins a new
//! [`CHUNK`], a bucket consists of whole pieces of one [`super::StateGroup`], and is padded to a multiple of world size ×
//! [`CHUNK`] elements. So equal slices of a bucket, of a group or of the part of a bucket that belongs to one group are
//! whole chunks of the global norm; and a stage of a pipeline has the same chunks as the whole model
//! ([`GradientLayout::chunks_in`]). The norm does not depend on which rank holds what. Padding is zero and stays zero:
//! nothing writes it, and sums, moments and updates of zeros are zeros.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::ops::Range;

use super::{Dtypes, summed_over};
use crate::config::Parallel;
use crate::device::DType;
use crate::mesh::Axis;
use crate::model::{AxisRole, Model, ParamId};
use crate::ops::CHUNK;

const MIB: f64 = 1_048_576.0;

/// First byte of every gradient, relative to its arena: a cache line, and the widest vector.
const ALIGNMENT_BYTES: usize = 64;

/// One gradient, as the layout must know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GradSpec {
    /// Unique name, for errors.
    pub name: String,
    /// Shape of the parameter.
    pub shape: Vec<usize>,
    /// How many times it is reported in one micro-batch: once for each place where the parameter is used.
    pub contributions: usize,
    /// The blocks that report it, in forward order. Empty: not known, and no use is told from another.
    pub blocks: Vec<usize>,
    /// Group that the parameter is gathered with, where it is not held by every rank.
    pub group: usize,
    /// What the ranks along each of [`Axis::ALL`] hold of the parameter.
    pub roles: [AxisRole; Axis::ALL.len()],
}

impl GradSpec {
    /// A parameter that is used in one place, of group 0, all of it on every rank.
    pub fn new(name: impl Into<String>, shape: &[usize]) -> Self {
        Self {
            name: name.into(),
            shape: shape.to_vec(),
            contributions: 1,
            blocks: Vec::new(),
            group: 0,
            roles: AxisRole::replicated(),
        }
    }

    /// The gradients of a model, by parameter.
    pub fn of_model(model: &Model) -> Vec<Self> {
        let mut blocks = vec![Vec::new(); model.params.len()];
        for (index, block) in model.blocks.iter().enumerate() {
            for id in block.params() {
                blocks[id.0].push(index);
            }
        }
        let with_blocks = model.params.iter().zip(blocks);
        with_blocks
            .map(|(param, blocks)| Self {
                name: param.key.clone(),
                shape: param.local_shape(),
                contributions: blocks.len(),
                blocks,
                group: param.group.0,
                roles: param.roles,
            })
            .collect()
    }

    /// Two stages of a pipeline hold the parameter, and each has a part of its gradient: a tied embedding.
    pub fn is_shared_by_stages(&self) -> bool {
        self.roles[Axis::Pipeline as usize] == AxisRole::PartialGradients
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
    /// The order, cut.
    pieces: Vec<Vec<ParamId>>,
    ranges: Vec<Range<usize>>,
    buckets: Vec<Bucket>,
}

impl GradientLayout {
    /// Lays out the gradients `specs` (by parameter); `order` is that in which backward finishes them.
    pub fn new(specs: Vec<GradSpec>, order: &[ParamId], config: &LayoutConfig) -> Result<Self, LayoutError> {
        if specs.is_empty() || config.world_size == 0 {
            let empty = "a gradient layout needs at least one rank and one parameter";
            return Err(LayoutError(empty.into()));
        }
        check_order(&specs, order)?;
        let alignment = ALIGNMENT_BYTES / config.dtype.bytes();
        let order = memory_order(&specs, order);
        let pieces = pieces(&specs, &order, config);
        let mut ranges = vec![0..0; specs.len()];
        let mut buckets: Vec<Bucket> = Vec::new();
        for pieces in packed(&specs, &pieces, config) {
            let start = buckets.last().map_or(0, |b| b.range.end);
            let mut end = start;
            for piece in pieces {
                end = end.next_multiple_of(CHUNK);
                for id in piece {
                    ranges[id.0] = end..end + specs[id.0].len();
                    end = (end + specs[id.0].len()).next_multiple_of(alignment);
                }
            }
            let len = (end - start).next_multiple_of(config.world_size * CHUNK);
            buckets.push(Bucket {
                range: start..start + len,
                params: pieces.concat(),
            });
        }
        Ok(Self {
            specs,
            dtype: config.dtype,
            accumulated: config.accumulated,
            order,
            pieces,
            ranges,
            buckets,
        })
    }

    /// The layout of a model's gradients.
    pub fn of_model(model: &Model, config: &LayoutConfig) -> Result<Self, LayoutError> {
        Self::new(GradSpec::of_model(model), &model.backward_order(), config)
    }

    /// Number of parameters.
    pub fn params(&self) -> usize {
        self.specs.len()
    }

    /// What is known of a gradient.
    ///
    /// # Panics
    /// If there is no such parameter.
    pub fn spec(&self, id: ParamId) -> &GradSpec {
        &self.specs[id.0]
    }

    /// Elements of a gradient in the arena. Parameters and moments use the same ranges of theirs.
    ///
    /// # Panics
    /// If there is no such parameter.
    pub fn range(&self, id: ParamId) -> Range<usize> {
        self.ranges[id.0].clone()
    }

    /// Parameters in the order of their memory.
    pub fn order(&self) -> &[ParamId] {
        &self.order
    }

    /// Buckets in the order of their memory, which is the order in which they are reduced.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// By chunk: which one of `whole` it is. `whole` lays out all of the model of which this is a part, with the same
    /// buckets. None for padding, and for parameters that `counts` denies; it must say the same of those of the same
    /// roles.
    ///
    /// # Panics
    /// If `whole` lacks a piece.
    pub fn chunks_in(&self, whole: &Self, counts: impl Fn(ParamId) -> bool) -> Vec<Option<usize>> {
        let first_name = |layout: &Self, piece: &[ParamId]| layout.specs[piece[0].0].name.clone();
        let of_whole = whole.pieces.iter().map(|piece| (first_name(whole, piece), piece));
        let of_whole: HashMap<String, &Vec<ParamId>> = of_whole.collect();
        let mut chunks = vec![None; self.len() / CHUNK];
        for piece in self.pieces.iter().filter(|piece| counts(piece[0])) {
            let name = first_name(self, piece);
            let same = of_whole.get(&name).expect("the whole model has every piece");
            let (here, there) = (self.chunks_of_piece(piece), whole.chunks_of_piece(same));
            assert_eq!(here.len(), there.len(), "chunks of the piece from `{name}`");
            for (here, there) in here.zip(there) {
                chunks[here] = Some(there);
            }
        }
        chunks
    }

    fn chunks_of_piece(&self, piece: &[ParamId]) -> Range<usize> {
        let (first, last) = (piece[0], piece[piece.len() - 1]);
        self.ranges[first.0].start / CHUNK..self.ranges[last.0].end.div_ceil(CHUNK)
    }

    /// Index of the bucket of a parameter.
    pub fn bucket_of(&self, id: ParamId) -> Option<usize> {
        let range = self.ranges.get(id.0)?;
        Some(self.buckets.partition_point(|b| b.range.end <= range.start))
    }

    /// Type of the gradients while they are reduced.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Type of the gradients while micro-batches are added, and of the sums.
    pub fn accumulated(&self) -> DType {
        self.accumulated
    }

    /// Elements of the arena, padding included: a multiple of [`CHUNK`].
    pub fn len(&self) -> usize {
        self.buckets.last().map_or(0, |b| b.range.end)
    }

    /// Hash of all of it, for ranks to compare before the first step.
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

/// The order of memory, from that of backward: within a group those of the same roles together, and last what stages of a
/// pipeline share.
fn memory_order(specs: &[GradSpec], order: &[ParamId]) -> Vec<ParamId> {
    let (shared, own): (Vec<ParamId>, Vec<ParamId>) =
        order.iter().partition(|id| specs[id.0].is_shared_by_stages());
    let group = |id: &ParamId| specs[id.0].group;
    let is_one_group = |a: &ParamId, b: &ParamId| group(a) == group(b);
    let groups = own.chunk_by(is_one_group).chain(shared.chunk_by(is_one_group));
    groups.flat_map(|group| by_roles(specs, group)).collect()
}

/// Puts parameters of the same roles together, and those that are summed over the same axes, in the order in which
/// backward finishes the last one of each.
fn by_roles(specs: &[GradSpec], group: &[ParamId]) -> Vec<ParamId> {
    let is_alike = |a: &ParamId, b: &ParamId| specs[a.0].roles == specs[b.0].roles;
    let axes = |id: &ParamId| summed_over(&specs[id.0].roles);
    let mut ids = group.to_vec();
    ids.sort_by_key(|id| group.iter().rposition(|last| is_alike(last, id)));
    ids.sort_by_key(|id| group.iter().rposition(|last| axes(last) == axes(id)));
    ids
}

/// Cuts the order into pieces: neighbours of one group and of the same roles, as many as fit into a bucket; a larger
/// parameter alone.
fn pieces(specs: &[GradSpec], order: &[ParamId], config: &LayoutConfig) -> Vec<Vec<ParamId>> {
    let mut pieces: Vec<Vec<ParamId>> = Vec::new();
    let mut open_bytes = 0;
    for id in order {
        let spec = &specs[id.0];
        let bytes = spec.len() * config.dtype.bytes();
        let is_of = |piece: &[ParamId]| {
            let first = &specs[piece[0].0];
            (first.group, first.roles) == (spec.group, spec.roles)
        };
        match pieces.last_mut() {
            Some(open) if is_of(open) && open_bytes + bytes <= config.bucket_bytes => {
                open.push(*id);
                open_bytes += bytes;
            }
            _ => {
                pieces.push(vec![*id]);
                open_bytes = bytes;
            }
        }
    }
    pieces
}

/// Buckets of neighbouring pieces that are summed over the same axes: each as full as its size allows, a larger piece
/// alone.
fn packed<'a>(
    specs: &[GradSpec],
    pieces: &'a [Vec<ParamId>],
    config: &LayoutConfig,
) -> Vec<&'a [Vec<ParamId>]> {
    let bytes_of = |piece: &Vec<ParamId>| {
        let elements: usize = piece.iter().map(|id| specs[id.0].len()).sum();
        elements * config.dtype.bytes()
    };
    let axes = |piece: &[ParamId]| summed_over(&specs[piece[0].0].roles);
    let mut buckets = Vec::new();
    let mut start = 0;
    while start < pieces.len() {
        let capacity = match buckets.len() {
            0 => config.first_bucket_bytes,
            _ => config.bucket_bytes,
        };
        let mut bytes = bytes_of(&pieces[start]);
        let further = pieces[start + 1..].iter().take_while(|piece| {
            bytes += bytes_of(piece);
            bytes <= capacity && axes(piece) == axes(&pieces[start])
        });
        let end = start + 1 + further.count();
        buckets.push(&pieces[start..end]);
        start = end;
    }
    buckets
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

    /// Sizes and groups.
    fn grouped(sizes: &[(usize, usize)]) -> Vec<GradSpec> {
        let named = sizes.iter().enumerate();
        let spec = |(i, &(len, group)): (usize, &(usize, usize))| GradSpec {
            group,
            ..GradSpec::new(format!("p{i}"), &[len])
        };
        named.map(spec).collect()
    }

    /// By bucket.
    fn params(layout: &GradientLayout) -> Vec<Vec<usize>> {
        let buckets = layout.buckets().iter();
        buckets
            .map(|bucket| bucket.params.iter().map(|id| id.0).collect())
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
        fn buckets_are_contiguous_padded_and_as_full_of_pieces_as_they_may_be(
            sizes in prop::collection::vec((1_usize..60_000, 0_usize..2), 1..30),
            first in 0_usize..100_000,
            rest in 0_usize..400_000,
            world_size in 1_usize..9,
        ) {
            let order = reversed(sizes.len());
            let config = config(first, rest, world_size);
            let layout = GradientLayout::new(grouped(&sizes), &order, &config).unwrap();
            let bytes = |params: &[ParamId]| params.iter().map(|id| 4 * sizes[id.0].0).sum::<usize>();
            let mut pieces = layout.pieces.iter().peekable();
            let mut end = 0;
            for (i, bucket) in layout.buckets().iter().enumerate() {
                prop_assert_eq!(bucket.range.start, end);
                prop_assert_eq!(bucket.range.len() % (world_size * CHUNK), 0);
                end = bucket.range.end;
                let mut params = Vec::new();
                let mut count = 0;
                while params.len() < bucket.params.len() {
                    params.extend_from_slice(pieces.next().unwrap());
                    count += 1;
                }
                prop_assert_eq!(&params, &bucket.params, "a bucket has whole pieces");
                let capacity = if i == 0 { first } else { rest };
                prop_assert!(bytes(&params) <= capacity || count == 1);
                if let Some(next) = pieces.peek() {
                    prop_assert!(bytes(&params) + bytes(next) > capacity, "bucket {} ended early", i);
                }
            }
            prop_assert_eq!(pieces.next(), None);
            prop_assert_eq!(layout.pieces.concat(), order);
            prop_assert_eq!(end, layout.len());
        }

        #[test]
        fn pieces_are_of_one_group_and_begin_chunks(
            sizes in prop::collection::vec((1_usize..60_000, 0_usize..3), 1..30),
            rest in 0_usize..400_000,
        ) {
            let config = config(rest / 4, rest, 3);
            let layout = GradientLayout::new(grouped(&sizes), &reversed(sizes.len()), &config).unwrap();
            let mut end = 0;
            for piece in &layout.pieces {
                let range = layout.range(piece[0]);
                prop_assert!(range.start.is_multiple_of(CHUNK) && range.start >= end);
                prop_assert!(piece.iter().all(|id| sizes[id.0].1 == sizes[piece[0].0].1));
                let bytes: usize = piece.iter().map(|id| 4 * sizes[id.0].0).sum();
                prop_assert!(bytes <= rest || piece.len() == 1);
                end = layout.range(piece[piece.len() - 1]).end;
            }
        }

        /// Each stage packs its buckets afresh, with its own first bucket, and still has chunks of the whole model.
        #[test]
        fn stages_have_the_chunks_of_the_whole_model(
            groups in prop::collection::vec(prop::collection::vec(1_usize..60_000, 1..6), 1..9),
            rest in 0_usize..400_000,
            stages in 1_usize..4,
        ) {
            let config = config(rest / 7, rest, 2);
            let of_groups = |range: Range<usize>| {
                let sizes = range.clone().flat_map(|group| {
                    let sizes = groups[group].iter().enumerate();
                    sizes.map(move |(i, &len)| GradSpec {
                        group,
                        ..GradSpec::new(format!("{group}.{i}"), &[len])
                    })
                });
                let specs: Vec<GradSpec> = sizes.collect();
                (!specs.is_empty()).then(|| {
                    let order = reversed(specs.len());
                    GradientLayout::new(specs, &order, &config).unwrap()
                })
            };
            let whole = of_groups(0..groups.len()).unwrap();
            let mut seen = vec![0; whole.len() / CHUNK];
            for stage in 0..stages {
                let first = |stage: usize| stage * groups.len() / stages;
                let Some(layout) = of_groups(first(stage)..first(stage + 1)) else { continue };
                for chunk in layout.chunks_in(&whole, |_| true).into_iter().flatten() {
                    seen[chunk] += 1;
                }
            }
            let own = whole.chunks_in(&whole, |_| true);
            for (chunk, (seen, own)) in seen.into_iter().zip(own).enumerate() {
                prop_assert_eq!(own, (seen == 1).then_some(chunk));
                prop_assert!(seen <= 1);
            }
        }
    }

    #[test]
    fn a_parameter_larger_than_a_bucket_has_one_of_its_own() {
        let sizes = [1000, 200_000, 1000, 1000];
        let layout = GradientLayout::new(specs(&sizes), &reversed(4), &config(4000, 100_000, 2)).unwrap();
        // The first two are one piece, which is larger than the first bucket should be.
        assert_eq!(params(&layout), [vec![3, 2], vec![1], vec![0]]);
    }

    #[test]
    fn those_of_the_same_roles_lie_together_and_what_stages_share_comes_last() {
        let mut specs = grouped(&[(10, 0), (10, 1), (10, 1), (10, 1), (10, 2)]);
        let tensor = Axis::Tensor as usize;
        for cut in [1, 3] {
            specs[cut].roles[tensor] = AxisRole::Cut;
        }
        specs[4].roles[Axis::Pipeline as usize] = AxisRole::PartialGradients;
        let layout = GradientLayout::new(specs, &reversed(5), &config(1 << 20, 1 << 20, 1)).unwrap();
        assert_eq!(params(&layout), [[2, 3, 1, 0, 4]]);
        let starts = [2, 3, 1, 0, 4].map(|id| layout.range(ParamId(id)).start);
        assert_eq!(starts, [0, CHUNK, CHUNK + 16, 2 * CHUNK, 3 * CHUNK]);
    }

    #[test]
    fn the_signature_depends_on_everything() {
        let layout = |sizes: &[usize], first, world_size| {
            let order = reversed(sizes.len());
            // Blocks of their own: only between them is there a bucket's end.
            let blocks: Vec<(usize, usize)> = sizes.iter().copied().zip(0..).collect();
            GradientLayout::new(grouped(&blocks), &order, &config(first, 1 << 20, world_size)).unwrap()
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
