//! Meshes of pipeline × data × tensor ranks: what a tied parameter costs and forbids, and which copies of a parameter
//! are compared.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::collective_world::{Rank, World, launch};
use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::WorldSize;
use ddp_worker::collective::Executor;
use ddp_worker::config::{self, Accumulate, ModelKind, Parallel, Pipeline, ShardGroup, Strategy};
use ddp_worker::device::{Compute, DType};
use ddp_worker::mesh::{Axis, Mesh, MeshShape};
use ddp_worker::model::{self, AxisRole, GroupId, Init, ModelPart, ParamId, ParamSpec};
use ddp_worker::parallel::{
    GradSpec, GradientLayout, LayoutConfig, Parameters, ReduceError, Reducer, ReducerConfig, ReplicaSet,
    ReshardPolicy, Sharding,
};

/// Blocks of the whole model: an embedding, layers, and a head with the embedding's matrix.
const BLOCKS: usize = 7;
const TIED: &str = "wte";

/// A mesh, and what its ranks hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    stages: usize,
    tensor: usize,
    replicate: usize,
    shard: usize,
    /// `parallel.expert`
    pub(crate) expert: usize,
    pub(crate) context: usize,
    pub(crate) strategy: Strategy,
    pub(crate) accumulate: Accumulate,
    micro_batches: usize,
}

impl Case {
    /// Data-parallel ranks alone.
    pub(crate) const fn of(strategy: Strategy, [replicate, shard]: [usize; 2]) -> Self {
        Self {
            stages: 1,
            tensor: 1,
            replicate,
            shard,
            expert: 1,
            context: 1,
            strategy,
            accumulate: Accumulate::Full,
            micro_batches: 3,
        }
    }

    pub(crate) fn ranks(&self) -> usize {
        self.stages * self.replicate * self.shard * self.expert.max(self.context) * self.tensor
    }

    pub(crate) fn mesh(&self) -> MeshShape {
        let parallel = Parallel {
            strategy: self.strategy,
            shard_group: Some(ShardGroup::Ranks(
                self.shard * (self.expert / self.context).max(1),
            )),
            expert: self.expert,
            context: self.context,
            tensor: self.tensor,
            pipeline: Pipeline {
                stages: self.stages,
                ..Pipeline::default()
            },
            ..Parallel::default()
        };
        let ranks = self.ranks() as u32;
        let env = WorkerEnv {
            world_size: WorldSize(ranks),
            local_world_size: ranks,
            ..WorkerEnv::single()
        };
        MeshShape::new(&parallel, &env).unwrap()
    }

    pub(crate) fn sharding(&self, layout: &GradientLayout, rank: usize) -> Sharding {
        match (self.strategy, self.accumulate) {
            (Strategy::Ddp, _) => Sharding::replicated(layout),
            (Strategy::Zero2, Accumulate::Sharded) => Sharding::of_parts(layout, self.mesh(), rank),
            (Strategy::Zero1 | Strategy::Zero2, _) => Sharding::of_buckets(layout, self.mesh(), rank),
            (Strategy::Zero3, _) => Sharding::of_groups(layout, self.mesh(), rank),
        }
    }

    /// What a rank of a stage holds; all blocks where there is one stage.
    fn part(&self, stage: usize) -> Part {
        let first = |stage: usize| stage * BLOCKS / self.stages;
        Part::of(first(stage)..first(stage + 1), self.stages > 1)
    }

    fn layout(&self, part: &Part) -> GradientLayout {
        let config = LayoutConfig {
            first_bucket_bytes: 30_000,
            bucket_bytes: 150_000,
            ..LayoutConfig::new(self.replicate * self.shard)
        };
        let order: Vec<ParamId> = part.order();
        GradientLayout::new(part.specs.clone(), &order, &config).unwrap()
    }
}

/// Parameters of some blocks.
struct Part {
    specs: Vec<GradSpec>,
    /// By block.
    blocks: Vec<(usize, Vec<ParamId>)>,
}

impl Part {
    fn of(blocks: std::ops::Range<usize>, is_stage: bool) -> Self {
        let mut part = Self {
            specs: Vec::new(),
            blocks: Vec::new(),
        };
        for block in blocks {
            let mut params = Vec::new();
            match block {
                0 => {
                    params.push(part.add(block, TIED, 21_000, AxisRole::Cut));
                    params.push(part.add(block, "wpe", 500, AxisRole::EqualGradients));
                }
                _ if block + 1 == BLOCKS => {
                    params.push(part.add(block, "ln_f", 40, AxisRole::PartialGradients));
                    params.push(part.add(block, TIED, 21_000, AxisRole::Cut));
                }
                layer => {
                    for (name, len, role) in [
                        ("ln", 90, AxisRole::PartialGradients),
                        ("w", 18_000 + layer * 1000, AxisRole::Cut),
                        ("bias", 33, AxisRole::EqualGradients),
                        ("proj", 9000, AxisRole::Cut),
                        ("proj.bias", 33, AxisRole::PartialGradients),
                    ] {
                        params.push(part.add(block, &format!("h.{layer}.{name}"), len, role));
                    }
                }
            }
            part.blocks.push((block, params));
        }
        for spec in part.specs.iter_mut().filter(|spec| is_stage && spec.name == TIED) {
            spec.roles[Axis::Pipeline as usize] = AxisRole::PartialGradients;
        }
        part
    }

    fn add(&mut self, block: usize, name: &str, len: usize, along_tensor: AxisRole) -> ParamId {
        if let Some(id) = self.specs.iter().position(|spec| spec.name == name) {
            self.specs[id].blocks.push(block);
            self.specs[id].contributions += 1;
            return ParamId(id);
        }
        let mut spec = GradSpec::new(name, &[len]);
        spec.blocks.push(block);
        spec.roles[Axis::Tensor as usize] = along_tensor;
        // The tied matrix is a group of its own.
        spec.group = if name == TIED { BLOCKS } else { block };
        self.specs.push(spec);
        ParamId(self.specs.len() - 1)
    }

    /// In which backward finishes them.
    fn order(&self) -> Vec<ParamId> {
        let mut order: Vec<ParamId> = Vec::new();
        for id in self.blocks.iter().flat_map(|(_, params)| params) {
            if !order.contains(id) {
                order.push(*id);
            }
        }
        order.reverse();
        order
    }

    fn params(&self) -> Vec<ParamSpec> {
        let param = |spec: &GradSpec| ParamSpec {
            key: spec.name.clone(),
            global_shape: spec.shape.clone(),
            cut: None,
            roles: spec.roles,
            dtype: DType::F32,
            init: Init::Constant(0.0),
            decay: true,
            group: GroupId(spec.group),
            projections: Vec::new(),
        };
        self.specs.iter().map(param).collect()
    }
}

/// A rank with its mesh.
struct Member {
    case: Case,
    rank: Rank,
    set: ReplicaSet,
    layout: Arc<GradientLayout>,
    sharding: Arc<Sharding>,
}

impl Member {
    fn new(case: Case, rank: Rank) -> Self {
        let shape = case.mesh();
        let at = |axis| shape.index(rank.rank(), &[axis]);
        let part = case.part(at(Axis::Pipeline));
        let mesh = Mesh::new(shape, rank.comm.clone(), Executor::Thread);
        let layout = case.layout(&part);
        Self {
            set: ReplicaSet::of(&mesh, &part.params(), &part.params()).unwrap(),
            sharding: Arc::new(case.sharding(&layout, rank.rank())),
            layout: Arc::new(layout),
            case,
            rank,
        }
    }

    fn reducer(&self) -> Result<Reducer, ReduceError> {
        let config = ReducerConfig {
            accumulate: self.case.accumulate,
            micro_batches: self.case.micro_batches,
            ..ReducerConfig::default()
        };
        let compute = Compute::new(self.rank.device.clone());
        Reducer::over(&self.set, &compute, self.layout.clone(), &self.sharding, config)
    }
}

#[test]
fn later_uses_of_a_tied_parameter_take_memory_where_micro_batches_are_added_up() {
    let world = World::of(&[1]);
    let bytes = |micro_batches, accumulate| {
        let case = Case {
            accumulate,
            micro_batches,
            ..Case::of(Strategy::Ddp, [1, 1])
        };
        let bytes = world.run(Executor::Inline, |rank| {
            let member = Member::new(case, rank);
            let reducer = member.reducer().unwrap();
            assert_eq!(reducer.sum_bytes(), 4 * member.layout.len());
            assert_eq!(reducer.in_flight_bytes(), 0);
            reducer.bytes() - reducer.sum_bytes()
        });
        bytes[0]
    };
    assert_eq!(bytes(1, Accumulate::Full), 0);
    assert_eq!(bytes(2, Accumulate::Full), 4 * 21_000);
}

#[test]
fn a_tied_parameter_of_two_stages_is_not_reduced_in_every_micro_batch() {
    let case = Case {
        stages: 2,
        accumulate: Accumulate::Sharded,
        ..Case::of(Strategy::Zero2, [1, 2])
    };
    let errors = World::of(&[4]).run(Executor::Thread, |rank| {
        Member::new(case, rank).reducer().err().unwrap().to_string()
    });
    for error in errors {
        assert_eq!(
            error,
            "two stages of the pipeline share `wte`, and its gradient cannot be reduced in every micro-batch\n  hint: set `parallel.accumulate: full`"
        );
    }
}

/// Makes one of four ranks differ in parameter `key`, and returns what each of them says.
fn differences(case: Case, policy: ReshardPolicy, (key, culprit): (&str, usize)) -> Vec<Option<String>> {
    let config = config::Model {
        kind: ModelKind::Gpt2,
        n_layer: 2,
        n_head: 2,
        n_embd: 8,
        block_size: 8,
        vocab_size: None,
        dropout: 0.0,
        ..config::Model::default()
    };
    World::of(&[4]).run(Executor::Thread, |rank| {
        let shape = case.mesh();
        let at = |axis| shape.index(rank.rank(), &[axis]);
        let blocks = [0..2, 2..4][at(Axis::Pipeline)].clone();
        let part = ModelPart {
            tensor: (at(Axis::Tensor), case.tensor),
            sequence: case.tensor > 1,
            experts: (0, 1),
            chunks: (case.stages > 1).then(|| vec![blocks]),
        };
        let model = model::build_part(&config, 4096, &part).unwrap();
        let mesh = Mesh::new(shape, rank.comm.clone(), Executor::Thread);
        let set = ReplicaSet::of(&mesh, &model.params, &model.all_params).unwrap();
        let config = LayoutConfig::new(case.replicate * case.shard);
        let layout = GradientLayout::of_model(&model, &config).unwrap();
        let sharding = Arc::new(case.sharding(&layout, rank.rank()));
        let compute = Compute::new(rank.device.clone());
        let parameters = Parameters::new(&set, &compute, &model, &sharding, policy.into()).unwrap();
        assert_eq!(parameters.difference(0).unwrap(), None);
        let mut own = sharding.own_pieces().into_iter();
        let place = own.find(|piece| model.params[piece.param.0].key == key);
        if let Some(piece) = place.filter(|_| rank.rank() == culprit) {
            let place = parameters.own().slice(&piece.place);
            place.host_mut::<f32>().unwrap()[0] = 1.0;
        }
        let difference = parameters.difference(5).unwrap();
        difference.map(|difference| difference.to_string())
    })
}

#[test]
fn copies_beyond_the_data_parallel_ranks_are_compared() {
    let release = ReshardPolicy::Release {
        after_forward: true,
        persist_below: 0,
    };
    let stages = Case {
        stages: 2,
        ..Case::of(Strategy::Ddp, [2, 1])
    };
    let tensor = Case {
        tensor: 2,
        ..Case::of(Strategy::Ddp, [2, 1])
    };
    let zero3 = |case| Case {
        strategy: Strategy::Zero3,
        replicate: 1,
        shard: 2,
        ..case
    };
    // Whose parameter is wrong, whom it is compared with, and who does not hold it.
    for (case, policy, key, [culprit, reference, other]) in [
        (stages, ReshardPolicy::KeepAll, "wte.weight", [3, 2, 0]),
        (zero3(stages), release, "wte.weight", [3, 1, 0]),
        (tensor, ReshardPolicy::KeepAll, "h.1.ln_2.weight", [3, 1, 0]),
        (zero3(tensor), release, "h.0.ln_1.bias", [3, 2, 0]),
    ] {
        let found = differences(case, policy, (key, culprit));
        let expected =
            format!("parameter `{key}` of rank {culprit} differs from rank {reference} after step 5");
        let of_culprit = found[culprit].as_ref().unwrap();
        assert!(of_culprit.starts_with(&expected), "{case:?}: {of_culprit}");
        assert_eq!(found[other], None, "{case:?}");
    }
}

/// As under `ddp`, where the ranks of one copy of the model are those of a tensor group.
#[test]
fn groups_of_the_same_ranks_for_two_uses_are_two() {
    let case = Case {
        tensor: 2,
        ..Case::of(Strategy::Ddp, [2, 1])
    };
    World::of(&[4]).run(Executor::Thread, |rank| {
        let mesh = Mesh::new(case.mesh(), rank.comm.clone(), Executor::Thread);
        let with_thread = mesh.group(&[Axis::Tensor]).unwrap();
        let inline = |name| mesh.group_inline(&[Axis::Tensor], name);
        let confused = catch_unwind(AssertUnwindSafe(|| inline("tensor").is_ok()));
        assert!(
            confused.is_err(),
            "of two uses, one would get the thread of the other"
        );
        let inline = inline("activations").unwrap();
        let buffer = rank.arena(false, &[1.0_f32]).whole();
        for _ in 0..8 {
            assert!(inline.barrier(&buffer, launch()).is_done());
        }
        assert_eq!(inline.members(), with_thread.members());
    });
}
