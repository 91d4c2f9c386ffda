//! What any number of ranks writes, whoever owns what, any other number reads.

use std::collections::{BTreeMap, BTreeSet};

use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::WorldSize;
use proptest::prelude::*;
use proptest::strategy::Strategy as _;
use tempfile::TempDir;

use super::*;
use crate::checkpoint::{Rng, State, Which, Writer, file_stem};
use crate::config::{self, Accumulate, Parallel, Pipeline, ShardGroup, Strategy, Train};
use crate::mesh::{Axis, GRADIENTS, MeshShape};
use crate::model::{self, AxisRole, Model, ModelPart};
use crate::parallel::{GradientLayout, LayoutConfig};
use crate::train::strategy::ShardingStrategy;

const SIZES: [usize; 5] = [1, 2, 3, 4, 8];

/// Who owns what.
#[derive(Clone, Copy, Debug)]
enum Owners {
    /// Everybody everything: `ddp`.
    All,
    /// Each a slice of each bucket: `zero1`, and `zero2` with whole gradients.
    Buckets,
    /// Of each part of a bucket: `zero2`.
    Parts,
    /// Of each group: `zero3`.
    Groups,
    /// The same of parts and of groups, where as many ranks as [`ranks_of_a_copy`] says hold a copy together.
    CopiesOfParts,
    CopiesOfGroups,
}

const OWNERS: [Owners; 6] = [
    Owners::All,
    Owners::Buckets,
    Owners::Parts,
    Owners::Groups,
    Owners::CopiesOfParts,
    Owners::CopiesOfGroups,
];

/// Half of the ranks, or one.
fn ranks_of_a_copy(ranks: usize) -> usize {
    if ranks.is_multiple_of(2) { ranks / 2 } else { 1 }
}

/// Large enough that pieces end within tensors: units are cut at 16,384 elements.
fn config() -> config::Model {
    config::Model {
        kind: config::ModelKind::Gpt2,
        n_layer: 2,
        n_head: 2,
        n_embd: 48,
        block_size: 12,
        vocab_size: None,
        dropout: 0.0,
        ..config::Model::default()
    }
}

fn model() -> Model {
    model::build(&config(), 256).unwrap()
}

fn sharding(model: &Model, owners: Owners, rank: usize, ranks: usize) -> Sharding {
    let config = LayoutConfig {
        first_bucket_bytes: 60_000,
        bucket_bytes: 200_000,
        ..LayoutConfig::new(ranks)
    };
    let layout = GradientLayout::of_model(model, &config).unwrap();
    let copy = ranks_of_a_copy(ranks);
    match owners {
        Owners::All => Sharding::replicated(&layout),
        Owners::Buckets => Sharding::of_buckets(&layout, MeshShape::of_shards(ranks), rank),
        Owners::Parts => Sharding::of_parts(&layout, MeshShape::of_shards(ranks), rank),
        Owners::Groups => Sharding::of_groups(&layout, MeshShape::of_shards(ranks), rank),
        Owners::CopiesOfParts => Sharding::of_parts(&layout, MeshShape::of_shards(copy), rank % copy),
        Owners::CopiesOfGroups => Sharding::of_groups(&layout, MeshShape::of_shards(copy), rank % copy),
    }
}

/// What `rank` of `ranks` writes.
fn written(model: &Model, owners: Owners, rank: usize, ranks: usize) -> Vec<OwnPiece> {
    let sharding = sharding(model, owners, rank, ranks);
    let (copy, copies) = (rank / sharding.world(), ranks / sharding.world());
    written_by(&sharding, |_| true, copy, copies)
}

/// Bytes that belong to these elements and to no others.
fn bytes_of(extent: &Extent) -> Vec<u8> {
    let tensor = blake3::hash(extent.tensor.to_string().as_bytes());
    let seed = u32::from_le_bytes(tensor.as_bytes()[..4].try_into().unwrap());
    let element = |i: u64| (seed ^ (i as u32).wrapping_mul(2_654_435_761)).to_le_bytes();
    extent.range.clone().flat_map(element).collect()
}

fn kinds() -> Vec<TensorKind> {
    TensorKind::with_slots(&["exp_avg", "exp_avg_sq"])
}

fn save(model: &Model, owners: Owners, ranks: usize) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut stems = Vec::new();
    let writers: Vec<Writer> = (0..ranks)
        .map(|rank| match rank {
            0 => Writer::begin(folder.path(), 5, 1).unwrap(),
            _ => Writer::join(folder.path(), 5, 1).unwrap(),
        })
        .collect();
    for (rank, writer) in writers.iter().enumerate() {
        let own = written(model, owners, rank, ranks);
        for kind in kinds() {
            let extents = own.iter().flat_map(|piece| extents(&kind, piece, &model.params));
            let extents: Vec<Extent> = extents.map(|(extent, _)| extent).collect();
            let bytes: Vec<Vec<u8>> = extents.iter().map(bytes_of).collect();
            let pieces: Vec<(Extent, &[u8])> =
                extents.into_iter().zip(bytes.iter().map(Vec::as_slice)).collect();
            let stem = file_stem(&kind, rank, ranks);
            writer.write(&stem, &pieces).unwrap();
            stems.push(stem);
        }
    }
    writers[0].commit(&state(), &stems).unwrap();
    folder
}

fn state() -> State {
    State {
        step: 5,
        consumed_samples: 80,
        skipped: 0,
        batch: None,
        rng: Rng {
            seed: 1,
            data_order: "test/1".into(),
        },
        config: serde_json::Value::Null,
        data: String::new(),
        val_data: None,
    }
}

#[test]
fn every_number_of_ranks_reads_what_every_other_wrote_whoever_owns_what() {
    let model = model();
    for writers in SIZES {
        for wrote in OWNERS {
            let folder = save(&model, wrote, writers);
            let reader = Reader::open(folder.path(), Which::Latest).unwrap();
            for readers in SIZES {
                for reads in OWNERS {
                    for rank in 0..readers {
                        let own = sharding(&model, reads, rank, readers).own_pieces();
                        for (kind, piece) in
                            kinds().iter().flat_map(|kind| own.iter().map(move |p| (kind, p)))
                        {
                            for (extent, _) in extents(kind, piece, &model.params) {
                                let found = reader.read(&extent).unwrap();
                                assert!(
                                    found == bytes_of(&extent),
                                    "{extent:?}, {wrote:?} on {writers} to {reads:?} on {readers}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }
}

/// A mesh on which a model is trained.
#[derive(Clone, Debug)]
struct Trained {
    model: config::Model,
    parallel: Parallel,
    /// The ranks along them hold different parameters of the key [`EXPERT`].
    cut: Vec<Axis>,
    ranks: usize,
}

const EXPERT: &str = "h.1.mlp.c_fc.weight";
const EXPERTS: [Axis; 2] = [Axis::Expert, Axis::Context];

/// Up to three stages, and two of everything else.
fn trained() -> impl proptest::strategy::Strategy<Value = Trained> {
    let kind = prop::sample::select(vec![config::ModelKind::Gpt2, config::ModelKind::Mlp]);
    let strategy = prop::sample::select(vec![
        Strategy::Ddp,
        Strategy::Zero1,
        Strategy::Zero2,
        Strategy::Zero3,
    ]);
    let degrees = (1_usize..4, 1_usize..3, 1_usize..3, 1_usize..3, 1_usize..3);
    let cut = prop::sample::select(vec![
        vec![],
        vec![Axis::Replicate],
        vec![Axis::Shard],
        EXPERTS.to_vec(),
    ]);
    (kind, strategy, any::<bool>(), any::<bool>(), degrees, cut).prop_map(
        |(kind, strategy, is_full, sequence, (stages, replicate, shard, context, tensor), cut)| Trained {
            model: config::Model { kind, ..config() },
            parallel: Parallel {
                strategy,
                shard_group: Some(ShardGroup::Ranks(2 * shard)),
                context,
                expert: if cut == EXPERTS { 2 * context } else { 1 },
                accumulate: if is_full {
                    Accumulate::Full
                } else {
                    Accumulate::Sharded
                },
                tensor,
                sequence: sequence && tensor > 1,
                pipeline: Pipeline {
                    stages,
                    ..Pipeline::default()
                },
                bucket_mb: 0.15,
                first_bucket_mb: 0.05,
                ..Parallel::default()
            },
            ranks: stages * replicate * 2 * shard * context * tensor,
            cut,
        },
    )
}

impl Trained {
    /// Elements of each parameter that a rank writes, as ranges of the whole parameter.
    fn written(&self, mesh: MeshShape, rank: usize) -> Vec<(String, Range<usize>)> {
        let at = |axis| mesh.index(rank, &[axis]);
        let stages = mesh.size(&[Axis::Pipeline]);
        let blocks = model::block_count(&self.model);
        let first = |stage: usize| stage * blocks / stages;
        let stage = at(Axis::Pipeline);
        let part = ModelPart {
            tensor: (at(Axis::Tensor), mesh.size(&[Axis::Tensor])),
            sequence: self.parallel.sequence,
            experts: (0, 1),
            chunks: (stages > 1).then(|| vec![first(stage)..first(stage + 1)]),
        };
        let mut model = model::build_part(&self.model, 1024, &part).unwrap();
        let experts = model.params.iter_mut().filter(|spec| spec.key == EXPERT);
        experts
            .for_each(|spec| (self.cut.iter()).for_each(|&axis| spec.roles[axis as usize] = AxisRole::Cut));
        let config = LayoutConfig::of(&self.parallel, mesh.size(&GRADIENTS));
        let layout = GradientLayout::of_model(&model, &config).unwrap();
        let strategy = ShardingStrategy::new(&self.parallel, &Train::default().offload, 2, mesh);
        let sharding = strategy.sharding(&layout, rank);
        let roles = |id: ParamId| &model.params[id.0].roles;
        let groups: BTreeSet<Vec<usize>> = (model.params.iter())
            .map(|spec| {
                summed_over(&spec.roles)
                    .into_iter()
                    .map(|axis| axis as usize)
                    .collect()
            })
            .collect();
        let pieces = groups.into_iter().flat_map(|group| {
            let axes: Vec<Axis> = group.into_iter().map(|axis| Axis::ALL[axis]).collect();
            let is_copied = |axis: &&Axis| !mesh.sharded().contains(axis);
            let copied: Vec<Axis> = axes.iter().filter(is_copied).copied().collect();
            let is_written =
                |id| summed_over(roles(id)) == axes && is_counted(roles(id), &MODEL_AXES, &mesh, rank);
            written_by(
                &sharding,
                is_written,
                mesh.index(rank, &copied),
                mesh.size(&copied),
            )
        });
        let written = pieces.flat_map(|piece| {
            let spec = &model.params[piece.param.0];
            let range = |run: Run| run.global..run.global + run.local.len();
            let runs = spec.runs(piece.elements).into_iter();
            runs.map(move |run| (spec.key.clone(), range(run)))
        });
        written.collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn every_element_is_written_once_whatever_the_mesh(trained in trained()) {
        let env = WorkerEnv {
            world_size: WorldSize(trained.ranks as u32),
            local_world_size: trained.ranks as u32,
            ..WorkerEnv::single()
        };
        let mesh = MeshShape::new(&trained.parallel, &env).unwrap();
        let whole = model::build(&trained.model, 1024).unwrap();
        let times = whole.params.iter().map(|spec| (spec.key.clone(), vec![0; spec.len()]));
        let mut times: BTreeMap<String, Vec<u8>> = times.collect();
        for rank in 0..trained.ranks {
            for (key, range) in trained.written(mesh, rank) {
                times.get_mut(&key).unwrap()[range].iter_mut().for_each(|n| *n += 1);
            }
        }
        for (key, times) in times {
            let parameters = if key == EXPERT { mesh.size(&trained.cut) } else { 1 };
            prop_assert!(times.iter().all(|&n| usize::from(n) == parameters), "`{key}`");
        }
    }
}

#[test]
fn copies_share_the_writing() {
    let model = model();
    for owners in [Owners::CopiesOfParts, Owners::CopiesOfGroups] {
        for ranks in [2, 4, 8] {
            let copy = ranks_of_a_copy(ranks);
            let writes = |rank| -> usize {
                let own = written(&model, owners, rank, ranks);
                own.iter().map(|piece| piece.elements.len()).sum()
            };
            for rank in 0..copy {
                let (one, other) = (writes(rank), writes(rank + copy));
                assert!(
                    one.abs_diff(other) <= 1,
                    "{owners:?}, {rank} of {ranks}: {one}, {other}"
                );
            }
        }
    }
}

#[test]
fn ranks_with_the_same_state_write_equal_parts_of_it() {
    let model = model();
    let total: usize = model.params.iter().map(ParamSpec::len).sum();
    for ranks in SIZES {
        for rank in 0..ranks {
            let own = written(&model, Owners::All, rank, ranks);
            let elements: usize = own.iter().map(|piece| piece.elements.len()).sum();
            assert!(elements.abs_diff(total / ranks) <= 1, "rank {rank} of {ranks}");
            for piece in own {
                assert_eq!(piece.place.whole.len(), piece.elements.len());
                assert_eq!(piece.place.shard, piece.place.whole);
            }
        }
    }
}
