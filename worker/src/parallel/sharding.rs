//! Which rank owns which elements: the one map that reduction, optimizer, norm, gathering and checkpoints share.
//!
//! Memory is cut into *units*, which are communicated whole: buckets of the gradients (ZeRO-1), the parts of buckets
//! that belong to one group (ZeRO-2), or groups of parameters (ZeRO-3). A unit is padded to ranks × [`CHUNK`]
//! elements and cut into equal slices, one a rank. The parameters of a unit are of one [`super::StateGroup`]; along an axis
//! whose ranks hold different parameters of it, a unit is not cut further.
//! An element lies in the same chunk of the layout whatever the units are, so the global norm, which is summed by
//! chunk, has the same bits under every strategy.
//!
//! Two arenas follow from the map: the *whole* one, all units in a row, and the *shard*, this rank's slice of each.

use std::ops::Range;

use super::{Bucket, GradientLayout, summed_over};
use crate::device::{Arena, Buffer};
use crate::mesh::{Axis, MeshShape};
use crate::model::ParamId;
use crate::ops::CHUNK;

/// Elements that are reduced and gathered together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardUnit {
    /// Its parameters, in the order of their memory.
    pub params: Vec<ParamId>,
    /// Name in errors and traces.
    pub name: String,
    /// Its elements in the whole arena, padding included: a multiple of `ranks` × [`CHUNK`] of them.
    pub whole: Range<usize>,
    /// The data-parallel axes over which its gradients are summed.
    pub axes: Vec<Axis>,
    /// Ranks that it is cut over.
    pub ranks: usize,
    /// This rank's slice in the shard.
    shard: Range<usize>,
    /// First chunk of the layout that it covers.
    first_chunk: usize,
    /// Chunks of the layout that it covers; chunks behind them are padding.
    chunks: usize,
}

/// The map from elements to ranks, as one rank sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharding {
    mesh: MeshShape,
    rank: usize,
    units: Vec<ShardUnit>,
    /// By parameter: its unit, and its elements within the unit.
    unit_ranges: Vec<(usize, Range<usize>)>,
}

impl Sharding {
    /// Everything on every rank.
    pub fn replicated(layout: &GradientLayout) -> Self {
        let axes = |bucket: &Bucket| summed_over(&layout.spec(bucket.params[0]).roles);
        let groups = layout.buckets().chunk_by(|a, b| axes(a) == axes(b));
        let all = groups.map(|buckets| {
            let params: Vec<_> = buckets.iter().map(|bucket| &bucket.params[..]).collect();
            let range = buckets[0].range.start..buckets[buckets.len() - 1].range.end;
            (range, params.concat(), "all gradients".to_owned())
        });
        Self::new(layout, MeshShape::of_shards(1), 0, all)
    }

    /// Buckets, each cut over the ranks that hold one copy of the state, as `rank` of the mesh sees it.
    pub fn of_buckets(layout: &GradientLayout, mesh: MeshShape, rank: usize) -> Self {
        let buckets = layout.buckets().iter().enumerate().map(|(i, bucket)| {
            let first = &layout.spec(bucket.params[0]).name;
            let name = format!("bucket {i}, from `{first}`");
            (bucket.range.clone(), bucket.params.clone(), name)
        });
        Self::new(layout, mesh, rank, buckets)
    }

    /// Buckets, cut where a group of parameters begins, each part cut over these ranks. What is in flight is then as
    /// large as a block and no larger than a bucket, and a tied weight delays only itself.
    pub fn of_parts(layout: &GradientLayout, mesh: MeshShape, rank: usize) -> Self {
        let parts = layout.buckets().iter().enumerate().flat_map(|(i, bucket)| {
            by_group(layout, &bucket.params).map(move |params| {
                let name = format!("part of bucket {i}, from `{}`", layout.spec(params[0]).name);
                (chunks_around(layout, params), params.to_vec(), name)
            })
        });
        Self::new(layout, mesh, rank, parts)
    }

    /// Groups of parameters, each cut over these ranks.
    pub fn of_groups(layout: &GradientLayout, mesh: MeshShape, rank: usize) -> Self {
        let groups = by_group(layout, layout.order()).map(|params| {
            let name = format!("group of `{}`", layout.spec(params[params.len() - 1]).name);
            (chunks_around(layout, params), params.to_vec(), name)
        });
        Self::new(layout, mesh, rank, groups)
    }

    fn new(
        layout: &GradientLayout,
        mesh: MeshShape,
        rank: usize,
        ranges: impl IntoIterator<Item = (Range<usize>, Vec<ParamId>, String)>,
    ) -> Self {
        let mut units: Vec<ShardUnit> = Vec::new();
        let mut unit_ranges = vec![(0, 0..0); layout.params()];
        for (range, params, name) in ranges {
            assert_eq!(range.start % CHUNK, 0, "{name} begins within a chunk");
            for id in &params {
                let at = layout.range(*id);
                unit_ranges[id.0] = (units.len(), at.start - range.start..at.end - range.start);
            }
            let axes = summed_over(&layout.spec(params[0]).roles);
            let ranks = mesh.size(&mesh.sharded_along(&axes));
            let start = units.last().map_or(0, |unit| unit.whole.end);
            let shard = units.last().map_or(0, |unit| unit.shard.end);
            let len = range.len().next_multiple_of(ranks * CHUNK);
            units.push(ShardUnit {
                params,
                name,
                whole: start..start + len,
                shard: shard..shard + len / ranks,
                axes,
                ranks,
                first_chunk: range.start / CHUNK,
                chunks: range.len().div_ceil(CHUNK),
            });
        }
        Self {
            mesh,
            rank,
            units,
            unit_ranges,
        }
    }

    /// Units in the order of their memory.
    pub fn units(&self) -> &[ShardUnit] {
        &self.units
    }

    /// Ranks that units of parameters are cut over that every rank holds alike.
    pub fn world(&self) -> usize {
        self.mesh.size(self.mesh.sharded())
    }

    /// Unit of a parameter, and its elements within the unit.
    ///
    /// # Panics
    /// If there is no such parameter.
    pub fn unit_range(&self, id: ParamId) -> (usize, Range<usize>) {
        self.unit_ranges[id.0].clone()
    }

    /// Units of some parameters, each once, in the order of their memory.
    pub(super) fn units_of(&self, params: &[ParamId]) -> Vec<usize> {
        let mut units: Vec<usize> = params.iter().map(|id| self.unit_range(*id).0).collect();
        units.sort_unstable();
        units.dedup();
        units
    }

    /// Elements of a parameter in the whole arena.
    ///
    /// # Panics
    /// If there is no such parameter.
    pub fn whole_range(&self, id: ParamId) -> Range<usize> {
        let (unit, range) = self.unit_range(id);
        let start = self.units[unit].whole.start;
        start + range.start..start + range.end
    }

    /// Elements of the whole arena.
    pub fn whole_len(&self) -> usize {
        self.units.last().map_or(0, |unit| unit.whole.end)
    }

    /// Elements of a rank's shard.
    pub fn shard_len(&self) -> usize {
        self.units.last().map_or(0, |unit| unit.shard.end)
    }

    /// This rank's slice within a unit.
    pub fn own(&self, unit: usize) -> Range<usize> {
        self.slice(&self.units[unit], self.rank)
    }

    /// This rank's slice of a unit in both arenas.
    pub fn own_ranges(&self, unit: usize) -> ArenaRanges {
        let (own, unit) = (self.own(unit), &self.units[unit]);
        let start = unit.whole.start;
        ArenaRanges {
            shard: unit.shard.clone(),
            whole: start + own.start..start + own.end,
        }
    }

    /// All that this rank owns, in the order of memory.
    pub fn own_pieces(&self) -> Vec<OwnPiece> {
        let mut pieces = Vec::new();
        for (index, unit) in self.units.iter().enumerate() {
            let (own, place) = (self.own(index), self.own_ranges(index));
            for id in &unit.params {
                let range = &self.unit_ranges[id.0].1;
                let (start, end) = (range.start.max(own.start), range.end.min(own.end));
                if start >= end {
                    continue;
                }
                let (from, to) = (start - own.start, end - own.start);
                pieces.push(OwnPiece {
                    param: *id,
                    elements: start - range.start..end - range.start,
                    place: ArenaRanges {
                        whole: place.whole.start + from..place.whole.start + to,
                        shard: place.shard.start + from..place.shard.start + to,
                    },
                });
            }
        }
        pieces
    }

    /// Elements of a unit that belong to no parameter.
    pub fn gaps(&self, unit: usize) -> Vec<Range<usize>> {
        let unit = &self.units[unit];
        let mut gaps = Vec::new();
        let mut end = 0;
        for id in &unit.params {
            let range = &self.unit_ranges[id.0].1;
            if range.start > end {
                gaps.push(end..range.start);
            }
            end = range.end;
        }
        if end < unit.whole.len() {
            gaps.push(end..unit.whole.len());
        }
        gaps
    }

    /// For each chunk of the shard of `rank`, in order, its chunk in the layout; `None` for padding.
    pub fn chunks_of(&self, rank: usize) -> Vec<Option<usize>> {
        let of_unit = |unit: &ShardUnit| {
            let (own, first, count) = (self.slice(unit, rank), unit.first_chunk, unit.chunks);
            (own.start / CHUNK..own.end / CHUNK).map(move |i| (i < count).then_some(first + i))
        };
        self.units.iter().flat_map(of_unit).collect()
    }

    /// The slice of a unit that a rank owns.
    fn slice(&self, unit: &ShardUnit, rank: usize) -> Range<usize> {
        let index = self.mesh.index(rank, &self.mesh.sharded_along(&unit.axes));
        let each = unit.shard.len();
        index * each..(index + 1) * each
    }
}

/// A part of a parameter that this rank owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnPiece {
    /// The parameter.
    pub param: ParamId,
    /// Its elements that this rank owns, row-major.
    pub elements: Range<usize>,
    /// The same elements in the arenas.
    pub place: ArenaRanges,
}

/// Where the same elements are in the whole arena and in the shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaRanges {
    /// Elements of the whole arena.
    pub whole: Range<usize>,
    /// Elements of the shard.
    pub shard: Range<usize>,
}

/// The memory of a rank: the elements of all ranks, or only its own.
#[derive(Clone, Debug)]
pub enum ArenaShare {
    /// All units.
    Whole(Arena),
    /// This rank's slice of each.
    Shard(Arena),
}

impl ArenaShare {
    /// The memory.
    pub fn arena(&self) -> &Arena {
        match self {
            Self::Whole(arena) | Self::Shard(arena) => arena,
        }
    }

    /// The elements at a place.
    pub fn slice(&self, place: &ArenaRanges) -> Buffer {
        match self {
            Self::Whole(arena) => arena.slice(place.whole.clone()),
            Self::Shard(arena) => arena.slice(place.shard.clone()),
        }
    }
}

/// Cuts parameters into neighbours of the same group.
fn by_group<'a>(layout: &'a GradientLayout, params: &'a [ParamId]) -> impl Iterator<Item = &'a [ParamId]> {
    let group = move |id: &ParamId| (layout.spec(*id).group, summed_over(&layout.spec(*id).roles));
    params.chunk_by(move |a, b| group(a) == group(b))
}

/// Whole chunks of the layout that hold neighbouring parameters, of which the first begins a chunk.
fn chunks_around(layout: &GradientLayout, params: &[ParamId]) -> Range<usize> {
    let (first, last) = (params[0], params[params.len() - 1]);
    layout.range(first).start..layout.range(last).end.next_multiple_of(CHUNK)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::parallel::{GradSpec, LayoutConfig};

    fn layout(sizes: &[(usize, usize)], bucket_bytes: usize, world_size: usize) -> GradientLayout {
        let specs: Vec<GradSpec> = sizes
            .iter()
            .enumerate()
            .map(|(i, &(len, group))| GradSpec {
                group,
                ..GradSpec::new(format!("p{i}"), &[len])
            })
            .collect();
        let order: Vec<ParamId> = (0..sizes.len()).rev().map(ParamId).collect();
        let config = LayoutConfig {
            first_bucket_bytes: bucket_bytes / 4,
            bucket_bytes,
            ..LayoutConfig::new(world_size)
        };
        GradientLayout::new(specs, &order, &config).unwrap()
    }

    proptest! {
        #[test]
        fn every_element_has_one_owner_and_every_chunk_too(
            sizes in prop::collection::vec((1_usize..60_000, 0_usize..5), 1..20),
            bucket_bytes in 0_usize..400_000,
            world in 1_usize..6,
        ) {
            let layout = layout(&sizes, bucket_bytes, world);
            for sharding_of in [Sharding::of_buckets, Sharding::of_parts, Sharding::of_groups] {
                let mut owned = sizes.iter().map(|&(len, _)| vec![0; len]).collect::<Vec<_>>();
                let mut chunks = vec![0; layout.len() / CHUNK];
                for rank in 0..world {
                    let sharding = sharding_of(&layout, MeshShape::of_shards(world), rank);
                    prop_assert_eq!(sharding.shard_len() * world, sharding.whole_len());
                    let mut end = 0;
                    for piece in sharding.own_pieces() {
                        prop_assert!(piece.place.shard.start >= end);
                        prop_assert_eq!(piece.place.whole.len(), piece.elements.len());
                        prop_assert_eq!(piece.place.shard.len(), piece.elements.len());
                        let range = sharding.whole_range(piece.param);
                        prop_assert_eq!(range.start + piece.elements.start, piece.place.whole.start);
                        end = piece.place.shard.end;
                        owned[piece.param.0][piece.elements].iter_mut().for_each(|n| *n += 1);
                    }
                    prop_assert!(end <= sharding.shard_len());
                    for chunk in sharding.chunks_of(rank).into_iter().flatten() {
                        chunks[chunk] += 1;
                    }
                }
                prop_assert!(owned.iter().flatten().all(|&n| n == 1));
                // A chunk that no unit covers is padding between buckets.
                prop_assert!(chunks.iter().all(|&n| n <= 1));
                for id in layout.order() {
                    let range = layout.range(*id);
                    prop_assert!((range.start / CHUNK..range.end.div_ceil(CHUNK)).all(|c| chunks[c] == 1));
                }
            }
        }

        #[test]
        fn gaps_are_what_no_parameter_has(
            sizes in prop::collection::vec((1_usize..60_000, 0_usize..3), 1..12),
            world in 1_usize..4,
        ) {
            let layout = layout(&sizes, 100_000, world);
            let sharding = Sharding::of_groups(&layout, MeshShape::of_shards(world), 0);
            for (index, unit) in sharding.units().iter().enumerate() {
                let gaps: usize = sharding.gaps(index).iter().map(ExactSizeIterator::len).sum();
                let params: usize = unit.params.iter().map(|id| sizes[id.0].0).sum();
                prop_assert_eq!(gaps + params, unit.whole.len());
            }
        }
    }

    #[test]
    fn parts_are_no_larger_than_their_bucket_or_their_group() {
        let sizes = [(40_000, 0), (30_000, 1), (30_000, 1), (50_000, 1), (70_000, 2)];
        let layout = layout(&sizes, 400_000, 2);
        let two = MeshShape::of_shards(2);
        let params = |sharding: &Sharding| -> Vec<Vec<usize>> {
            let units = sharding.units().iter();
            units
                .map(|unit| unit.params.iter().map(|id| id.0).collect())
                .collect()
        };
        assert_eq!(
            params(&Sharding::of_buckets(&layout, two, 0)),
            [vec![4], vec![3, 2], vec![1, 0]]
        );
        assert_eq!(
            params(&Sharding::of_groups(&layout, two, 0)),
            [vec![4], vec![3, 2, 1], vec![0]]
        );
        let parts = [vec![4], vec![3, 2], vec![1], vec![0]];
        assert_eq!(params(&Sharding::of_parts(&layout, two, 0)), parts);
    }

    #[test]
    fn replicas_have_the_layout_itself() {
        let layout = layout(&[(100, 0), (20_000, 1), (7, 1)], 50_000, 3);
        let sharding = Sharding::replicated(&layout);
        assert_eq!(sharding.whole_len(), layout.len());
        for id in layout.order() {
            assert_eq!(sharding.whole_range(*id), layout.range(*id));
        }
        let chunks: Vec<usize> = sharding.chunks_of(0).into_iter().flatten().collect();
        assert_eq!(chunks, (0..layout.len() / CHUNK).collect::<Vec<_>>());
    }
}
