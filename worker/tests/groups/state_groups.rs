//! A model with two state groups: every data-parallel rank has a part of most gradients, but the ranks along one
//! data-parallel axis hold different experts. Whoever owns what, training has the bits of one rank with all experts.
//!
//! A sample's gradient is a multiple of 2⁻¹³ for each element, so that sums have no rounding error in any order.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use ddp_worker::collective::Executor;
use ddp_worker::config::{Accumulate, OptimizerConfig, OptimizerKind, Recompute, Strategy, Train};
use ddp_worker::device::{Buffer, Compute, DType, DeviceError, Event, StateMemory};
use ddp_worker::mesh::{Axis, GRADIENTS, Mesh};
use ddp_worker::model::{
    Activation, AxisRole, Backward, Block, Context, GroupId, Init, Model, ModelPart, ParamId, ParamSpec,
    Params as _, Pass, Saved,
};
use ddp_worker::optim::{Clip, Optimizer, UpdateStep};
use ddp_worker::parallel::{
    ArenaShare, GradientLayout, LayoutConfig, NormOrder, OwnPiece, Parameters, Reducer, ReducerConfig,
    ReplicaSet, ReshardPolicy, Sharding, is_counted, one_copy,
};

use crate::collective_world::{PATIENCE, Rank, World, read};
use crate::mesh_ranks::Case;

const EXPERTS: usize = 2;
const LAYERS: usize = 2;
const STEPS: u64 = 3;
/// Of a step.
const SAMPLE_COUNT: usize = 8;

/// A weight, its rank's experts and a bias: what is summed alike is apart in the order of backward.
struct Layer(Vec<ParamId>);

impl Block for Layer {
    fn name(&self) -> &'static str {
        "layer"
    }

    fn params(&self) -> &[ParamId] {
        &self.0
    }

    fn forward(&self, _: &Context<'_>, _: &Activation, _: &mut Saved) -> Result<Activation, DeviceError> {
        unreachable!("the test computes gradients itself")
    }

    fn backward(&self, _: &mut Backward<'_>, _: &Activation) -> Result<Option<Activation>, DeviceError> {
        unreachable!("the test computes gradients itself")
    }
}

/// A rank's part of the model: all of it but for the experts, of which the ranks along `cut` hold different ones.
fn model(experts: Range<usize>, cut: Axis) -> Model {
    let (mut params, mut blocks) = (Vec::new(), Vec::new());
    for layer in 0..LAYERS {
        let experts = experts
            .clone()
            .map(|e| (format!("experts.{e}.weight"), vec![132, 140], true));
        let weights = [("up.weight".to_owned(), vec![130, 140], false)].into_iter();
        let bias = [("down.bias".to_owned(), vec![33], false)];
        let first = params.len();
        for (name, global_shape, is_expert) in weights.chain(experts).chain(bias) {
            let mut roles = AxisRole::replicated();
            if is_expert {
                roles[cut as usize] = AxisRole::Cut;
            }
            params.push(ParamSpec {
                key: format!("h.{layer}.{name}"),
                decay: global_shape.len() > 1,
                global_shape,
                cut: None,
                roles,
                dtype: DType::F32,
                init: Init::Constant(0.0),
                group: GroupId(layer),
                projections: Vec::new(),
            });
        }
        let layer = Layer((first..params.len()).map(ParamId).collect());
        blocks.push(Arc::new(layer) as Arc<dyn Block>);
    }
    let all_params = match experts.len() {
        EXPERTS => params.clone().into(),
        _ => model(0..EXPERTS, cut).all_params,
    };
    Model {
        name: "experts".into(),
        params,
        all_params,
        blocks,
        chunks: vec![0..LAYERS],
        holds_embedding: true,
        holds_head: true,
        part: ModelPart::WHOLE,
        recompute: Recompute::Nothing,
    }
}

/// The expert that a sample's tokens go to.
fn route(sample: usize) -> usize {
    sample / 3 % EXPERTS
}

/// Distance of each element from what a sample wants it to be: a multiple of 2⁻⁶.
fn distances<'a>(key: &str, sample: usize, values: &'a [f32]) -> impl Iterator<Item = f32> + 'a {
    let mix = |seed: usize, byte| (seed * 31 + usize::from(byte)) % 65_521;
    let seed = key.bytes().fold(sample * 7919, mix);
    values.iter().enumerate().map(move |(i, value)| {
        let wanted = ((seed + i * 104_729) % 257) as f32 / 64.0 - 2.0;
        (value * 64.0).round().clamp(-256.0, 256.0) / 64.0 - wanted
    })
}

/// What a rank has after some steps.
#[derive(Default)]
struct Trained {
    /// Of each step: what the rank's samples, and its experts' samples, contribute to the loss.
    losses: Vec<f64>,
    /// Bits of the norm of each step.
    norms: Vec<u32>,
    /// What it owns of the parameters.
    own: Vec<(String, Range<usize>, Vec<f32>)>,
}

/// A rank at work.
struct Worker {
    case: Case,
    cut: Axis,
    rank: Rank,
    compute: Compute,
    model: Model,
    sharding: Arc<Sharding>,
    parameters: Parameters,
    optimizer: Optimizer,
    clip: Clip,
}

impl Worker {
    fn new(rank: Rank, case: Case, cut: Axis, kind: OptimizerKind) -> (Self, Reducer) {
        let model = model_of(case, cut, rank.rank());
        let layout = Arc::new(layout_of(case, &model));
        let sharding = Arc::new(case.sharding(&layout, rank.rank()));
        let mesh = Mesh::new(case.mesh(), rank.comm.clone(), Executor::Thread);
        let mut set = ReplicaSet::of(&mesh, &model.params, &model.all_params).unwrap();
        set.gather_apart(&mesh).unwrap();
        let policy = match case.strategy {
            Strategy::Zero3 => ReshardPolicy::Release {
                after_forward: true,
                persist_below: 0,
            },
            _ => ReshardPolicy::KeepAll,
        };
        let reduction = ReducerConfig {
            accumulate: case.accumulate,
            micro_batches: SAMPLE_COUNT / case.ranks(),
            ..ReducerConfig::default()
        };
        let config = Train {
            grad_clip: Some(0.5),
            optimizer: OptimizerConfig {
                kind,
                ..OptimizerConfig::default()
            },
            ..Train::default()
        };
        let compute = Compute::new(rank.device.clone());
        let reducer = Reducer::over(&set, &compute, layout, &sharding, reduction).unwrap();
        let home = StateMemory::on_device(rank.device.clone());
        let order = norm_order(case, cut, rank.rank());
        let worker = Self {
            parameters: Parameters::new(&set, &compute, &model, &sharding, policy.into()).unwrap(),
            optimizer: Optimizer::new(home, &set, &sharding, &model.params, &config.optimizer).unwrap(),
            clip: Clip::new(&set, &compute, &sharding, &order, &config).unwrap(),
            case,
            cut,
            rank,
            compute,
            model,
            sharding,
        };
        (worker, reducer)
    }

    /// What the rank owns of the parameters.
    fn own(&self) -> Vec<(Buffer, OwnPiece)> {
        let pieces = self.sharding.own_pieces().into_iter();
        let place = |piece: &OwnPiece| self.parameters.own().slice(&piece.place);
        pieces.map(|piece| (place(&piece), piece)).collect()
    }

    /// The samples of a micro-batch that contribute to the gradient of a parameter here: this rank's own; to an expert's,
    /// those that the ranks along `cut` send it.
    fn samples_of(&self, key: &str, micro_batch: usize) -> Vec<usize> {
        let (shape, rank) = (self.case.mesh(), self.rank.rank());
        let sample = |rank| micro_batch * self.case.ranks() + shape.index(rank, &GRADIENTS);
        let Some((_, expert)) = key.split_once("experts.") else {
            return vec![sample(rank)];
        };
        let samples = shape.members(rank, &[self.cut]).into_iter().map(sample);
        samples
            .filter(|&n| expert.starts_with(&route(n).to_string()))
            .collect()
    }

    /// Forward and backward of all micro-batches. Returns their loss, and the sums of the gradients.
    fn passes(&self, reducer: &mut Reducer) -> (f64, ArenaShare) {
        let (mut loss, micro_batches) = (0.0, SAMPLE_COUNT / self.case.ranks());
        let mut step = reducer.step(micro_batches).unwrap();
        for micro_batch in 0..micro_batches {
            for block in 0..LAYERS {
                self.parameters.unshard(block, Pass::Forward).unwrap();
                self.parameters.reshard(block, Pass::Forward);
            }
            for block in (0..LAYERS).rev() {
                self.parameters.unshard(block, Pass::Backward).unwrap();
                for id in self.model.blocks[block].params().iter().rev() {
                    let key = &self.model.params[id.0].key;
                    let values: Vec<f32> = read(&self.parameters.get(*id));
                    let mut grad = step.grad_mut::<f32>(*id).unwrap();
                    for sample in self.samples_of(key, micro_batch) {
                        for (grad, distance) in grad.iter_mut().zip(distances(key, sample, &values)) {
                            *grad += distance / 128.0;
                            loss += f64::from(distance).powi(2);
                        }
                    }
                    drop(grad);
                    step.ready(*id, Event::reached()).unwrap();
                }
                self.parameters.reshard(block, Pass::Backward);
            }
        }
        (loss, step.finish(Instant::now() + PATIENCE).unwrap().sums())
    }

    fn train(&self, mut reducer: Reducer) -> Trained {
        for (buffer, piece) in self.own() {
            let mut values = buffer.host_mut::<f32>().unwrap();
            for (value, i) in values.iter_mut().zip(piece.elements) {
                *value = (i % 97) as f32 / 97.0;
            }
        }
        self.parameters.updated().unwrap();
        let mut trained = Trained::default();
        for number in 1..=STEPS {
            let (loss, grads) = self.passes(&mut reducer);
            if let Some(work) = self.clip.measure(self.optimizer.home(), &grads) {
                work.wait(Instant::now() + PATIENCE).unwrap();
            }
            self.clip.finish(None);
            let update = UpdateStep {
                scale: self.clip.scale(),
                lr: 0.05,
                number,
            };
            let _ = (self.optimizer).step(self.compute.stream, self.parameters.own(), &grads, &update);
            self.parameters.updated().unwrap();
            trained.losses.push(loss);
            let norm = read::<f32>(&self.clip.norm());
            trained.norms.push(norm[0].to_bits());
        }
        self.parameters.drain().unwrap();
        assert_eq!(self.parameters.difference(STEPS).unwrap(), None);
        trained.own = (self.own().into_iter())
            .map(|(buffer, piece)| {
                let key = self.model.params[piece.param.0].key.clone();
                (key, piece.elements, read(&buffer))
            })
            .collect();
        trained
    }
}

/// What a rank holds of the model.
fn model_of(case: Case, cut: Axis, rank: usize) -> Model {
    let (index, each) = (
        case.mesh().index(rank, &[cut]),
        EXPERTS / case.mesh().size(&[cut]),
    );
    model(index * each..(index + 1) * each, cut)
}

fn layout_of(case: Case, model: &Model) -> GradientLayout {
    let config = LayoutConfig {
        first_bucket_bytes: 50_000,
        bucket_bytes: 100_000,
        ..LayoutConfig::new(case.ranks())
    };
    GradientLayout::of_model(model, &config).unwrap()
}

/// That of the model with all experts.
fn norm_order(case: Case, cut: Axis, rank: usize) -> NormOrder {
    let (shape, all) = (case.mesh(), model(0..EXPERTS, cut));
    let (whole, one_copy) = (layout_of(case, &all), one_copy(&all.params, shape.sharded()));
    let chunks = shape.members(rank, &one_copy).into_iter().map(|member| {
        let layout = layout_of(case, &model_of(case, cut, member));
        let sharding = case.sharding(&layout, member);
        let counts = |id| is_counted(&layout.spec(id).roles, &one_copy, &shape, member);
        NormOrder::chunks(&sharding, member, &layout.chunks_in(&whole, counts))
    });
    NormOrder::new(&chunks.collect::<Vec<_>>())
}

fn train(case: Case, cut: Axis, kind: OptimizerKind) -> Vec<Trained> {
    World::of(&[case.ranks()]).run(Executor::Thread, |rank| {
        let (worker, reducer) = Worker::new(rank, case, cut, kind);
        worker.train(reducer)
    })
}

fn check(case: Case, cut: Axis, kind: OptimizerKind) {
    let what = format!("{case:?}, experts differ along {cut:?}, {kind:?}");
    let expected = &train(Case::of(Strategy::Ddp, [1, 1]), cut, kind)[0];
    let values: BTreeMap<&String, &Vec<f32>> = expected
        .own
        .iter()
        .map(|(key, _, values)| (key, values))
        .collect();
    let mut owned = BTreeMap::new();
    let ranks = train(case, cut, kind);
    for rank in &ranks {
        assert_eq!(rank.norms, expected.norms, "{what}: norms");
        for (key, elements, found) in &rank.own {
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(
                bits(found),
                bits(&values[key][elements.clone()]),
                "{what}: `{key}`"
            );
            *owned.entry(key).or_insert(0) += elements.len();
        }
    }
    for step in 0..STEPS as usize {
        let loss: f64 = ranks.iter().map(|rank| rank.losses[step]).sum();
        assert_eq!(
            loss.to_bits(),
            expected.losses[step].to_bits(),
            "{what}: loss of step {step}"
        );
    }
    assert!(expected.losses[0] > expected.losses[2], "{:?}", expected.losses);
    let copies = |key: &str| owned[&key.to_owned()] as f64 / values[&key.to_owned()].len() as f64;
    let held_by = |is_held_alike: &dyn Fn(&Axis) -> bool| {
        let [mut all, mut shards] = [GRADIENTS.to_vec(), case.mesh().sharded().to_vec()];
        all.retain(is_held_alike);
        shards.retain(is_held_alike);
        (case.mesh().size(&all) / case.mesh().size(&shards)) as f64
    };
    assert_eq!(
        [copies("h.0.up.weight"), copies("h.1.experts.1.weight")],
        [held_by(&|_| true), held_by(&|axis| *axis != cut)],
        "{what}: copies of the state"
    );
}

#[test]
fn experts_that_fewer_ranks_sum_train_as_on_one_rank() {
    for (strategy, accumulate, degrees, cut) in [
        (Strategy::Ddp, Accumulate::Full, [2, 1], Axis::Replicate),
        (Strategy::Zero1, Accumulate::Full, [2, 2], Axis::Shard),
        (Strategy::Zero1, Accumulate::Full, [2, 2], Axis::Replicate),
        (Strategy::Zero2, Accumulate::Sharded, [2, 2], Axis::Shard),
        (Strategy::Zero2, Accumulate::Sharded, [2, 2], Axis::Replicate),
        (Strategy::Zero3, Accumulate::Sharded, [2, 2], Axis::Shard),
        (Strategy::Zero3, Accumulate::Full, [2, 2], Axis::Replicate),
        (Strategy::Zero3, Accumulate::Sharded, [1, 2], Axis::Shard),
    ] {
        let mut case = Case::of(strategy, degrees);
        case.accumulate = accumulate;
        check(case, cut, OptimizerKind::Adamw);
    }
    for strategy in [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3] {
        let mut case = Case::of(strategy, if strategy == Strategy::Ddp { [2, 1] } else { [1, 2] });
        case.expert = 2;
        check(case, Axis::Expert, OptimizerKind::Adamw);
        case.context = 2;
        check(case, Axis::Context, OptimizerKind::Adamw);
    }
}

#[test]
fn muon_makes_experts_orthogonal_among_the_ranks_that_hold_them() {
    for cut in [Axis::Shard, Axis::Replicate] {
        check(Case::of(Strategy::Zero3, [2, 2]), cut, OptimizerKind::Muon);
    }
    let mut case = Case::of(Strategy::Zero3, [1, 2]);
    case.expert = 2;
    check(case, Axis::Expert, OptimizerKind::Muon);
}
