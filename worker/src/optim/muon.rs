//! Muon (Jordan et al. 2024; as `torch.optim.Muon`): momentum of a matrix, made orthogonal by Newton–Schulz iterations.
//!
//! For the matrices of a model's blocks; AdamW updates all other parameters. `m = μm + (1−μ)g; d = (1−μ)g + μm`, or
//! `d = m` without Nesterov's momentum; `p −= lr·(0.2·√max(rows, columns)·orthogonal(d) + λp)`: with that factor (Liu et
//! al. 2025; PyTorch's `match_rms_adamw`) learning rate and weight decay are those of AdamW. The mean of the gradients
//! is AdamW's slot `exp_avg`; `exp_avg_sq` of a matrix stays zero. Of a parameter that fuses projections
//! ([`ParamSpec::projections`]), each is a matrix of its own. Everything is in f32; PyTorch iterates in bf16.
//!
//! The bits of a product depend on the processor. So one rank makes a matrix orthogonal and sends it to all that hold it
//! or a part of it: those of a block at a time, each by another rank. Where ranks own parts of the matrices, they gather
//! `d` first, a unit of the sharding at a time.

use std::ops::Range;
use std::sync::Arc;

use super::ParamGroups;
use super::rules::{StepMemory, muon_blend, muon_descend, muon_momentum};
use crate::collective::{Communicator, Launch, Traffic, Work};
use crate::config::OptimizerConfig;
use crate::device::{ArenaSpec, Buffer, DType, Device, DeviceError, Stream};
use crate::model::{Names, ParamId, ParamSpec, ROUTER};
use crate::ops::{
    CHUNK, ClipScale, LinearDweight, LinearForward, LinearShape, Op, Rates, Runs, SquaredNorm, Update,
    UpdateRule, WeightLayout,
};
use crate::parallel::{OwnPiece, ReduceError, ReplicaSet, Sharding};

/// Coefficients of the quintic polynomial `aX + (bA + cA²)X` with `A = XXᵀ`.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];
/// Iterations of it.
const STEPS: usize = 5;
/// Least norm that a matrix is divided by.
const EPS: f32 = 1e-7;
/// Root mean square of AdamW's updates.
const ADAMW_RMS: f64 = 0.2;

/// True of the parameters that Muon updates: matrices of the blocks, those of experts one by one. A router has, as the head,
/// a row for each choice, and is AdamW's.
pub(super) fn is_hidden_matrix(spec: &ParamSpec) -> bool {
    spec.global_shape.len() > 1 && Names::are_of_a_layer(&spec.key) && !spec.key.contains(ROUTER)
}

/// The matrices of the blocks, and memory to make one of them orthogonal.
pub(super) struct Muon {
    device: Arc<dyn Device>,
    momentum: Arc<UpdateRule>,
    gatherings: Vec<Gathering>,
    /// `d` of what is gathered together, and then the update.
    direction: Buffer,
    orthogonal: Orthogonal,
}

/// Matrices that are updated together: those of a unit of the sharding, or of a block.
struct Gathering {
    name: String,
    /// The ranks that hold the same matrices or parts of them.
    holders: Communicator,
    /// The ranks that own the parts of one copy; none where this rank owns everything.
    shards: Option<Communicator>,
    /// Elements, padding included.
    len: usize,
    matrices: Vec<GatheredMatrix>,
}

struct GatheredMatrix {
    /// Rows and columns of each projection.
    shapes: Vec<[usize; 2]>,
    /// Its elements in what is gathered.
    home: Range<usize>,
    /// The rank among the holders that makes it orthogonal.
    owner: usize,
    /// What this rank updates of it: which elements, and where they are. None: it owns no part.
    own: Option<OwnPiece>,
    rates: usize,
}

impl Muon {
    /// For the matrices among `params`. Every rank of `set` must call it.
    pub(super) fn new(
        device: &Arc<dyn Device>,
        set: &ReplicaSet,
        sharding: &Sharding,
        params: &[ParamSpec],
        config: &OptimizerConfig,
    ) -> Result<Self, ReduceError> {
        let groups = ParamGroups::of(config, params);
        let gatherings = gatherings(sharding, set, params, &groups);
        let lens = gatherings.iter().map(|gathering| gathering.len);
        let spec = ArenaSpec::on_node("directions of matrices", DType::F32, lens.max().unwrap_or(0));
        let matrices = gatherings.iter().flat_map(|gathering| &gathering.matrices);
        let shapes = matrices.flat_map(|matrix| matrix.shapes.iter().copied());
        Ok(Self {
            orthogonal: Orthogonal::new(device, shapes)?,
            direction: set.all.alloc_shared(device, &spec)?.whole(),
            device: device.clone(),
            momentum: muon_momentum(config.momentum(), config.nesterov()),
            gatherings,
        })
    }

    /// Puts the update of all matrices on the stream. Returns the exchanges that it waits for. Every rank must call it.
    pub(super) fn step(&self, stream: Stream, memory: &StepMemory<'_>) -> Vec<Work> {
        let mut exchanges = Vec::new();
        for gathering in &self.gatherings {
            let Gathering {
                name, len, holders, ..
            } = gathering;
            let (matrices, rank) = (&gathering.matrices, holders.rank());
            let direction = self.direction.slice(0..*len);
            let own = |matrix: &GatheredMatrix| {
                let OwnPiece { elements, place, .. } = matrix.own.clone()?;
                let start = matrix.home.start;
                Some((
                    direction.slice(start + elements.start..start + elements.end),
                    place,
                ))
            };
            let momenta = matrices.iter().filter_map(own).map(|(direction, place)| {
                let runs = Runs::uniform(direction.len(), Rates::new(0.0, 0.0));
                let update = Update {
                    param: direction,
                    copy: None,
                    ..memory.update(&self.momentum, &place, runs)
                };
                update.into()
            });
            self.device.enqueue_all(stream, momenta.collect());
            let launch = || Launch::after(self.device.record(stream), Traffic::Other, name);
            let shards = gathering.shards.iter();
            let gathered = shards.map(|shards| shards.all_gather(&direction, launch()));
            exchanges.extend(self.awaited(stream, gathered.collect(), holders));
            for matrix in matrices.iter().filter(|matrix| matrix.owner == rank) {
                let direction = direction.slice(matrix.home.clone());
                let ops = self.orthogonal.replace(&direction, &matrix.shapes);
                self.device.enqueue_all(stream, ops);
            }
            if holders.size() > 1 {
                let sent = matrices.iter().map(|GatheredMatrix { home, owner, .. }| {
                    let direction = direction.slice(home.clone());
                    holders.broadcast(&direction, *owner, launch())
                });
                exchanges.extend(self.awaited(stream, sent.collect(), holders));
            }
            let updates = matrices.iter().filter_map(|matrix| {
                let (direction, place) = own(matrix)?;
                let runs = Runs::uniform(direction.len(), memory.rates[matrix.rates]);
                let update = Update {
                    grad: direction,
                    ..memory.update(&muon_descend(), &place, runs)
                };
                Some(update.into())
            });
            self.device.enqueue_all(stream, updates.collect());
        }
        exchanges
    }

    /// Exchanges that are under way: what follows on the stream comes after them.
    fn awaited(&self, stream: Stream, exchanges: Vec<Work>, holders: &Communicator) -> Vec<Work> {
        for work in &exchanges {
            (self.device).wait_event(stream, work.event(), holders.deadline());
        }
        exchanges
    }
}

/// The matrices by what is updated together, alike on all ranks that hold them.
fn gatherings(
    sharding: &Sharding,
    set: &ReplicaSet,
    params: &[ParamSpec],
    groups: &ParamGroups,
) -> Vec<Gathering> {
    let own = sharding.own_pieces();
    let (mut gatherings, mut owners) = (Vec::new(), 0..);
    for unit in sharding.units() {
        let (is_sharded, state) = (unit.ranks > 1, set.group(&unit.axes));
        let is_hidden = |id: &ParamId| is_hidden_matrix(&params[id.0]);
        let hidden: Vec<ParamId> = unit.params.iter().copied().filter(is_hidden).collect();
        let is_together = |a: &ParamId, b: &ParamId| is_sharded || params[a.0].group == params[b.0].group;
        for ids in hidden.chunk_by(is_together) {
            let home = |id: ParamId| sharding.unit_range(id).1;
            let all = if is_sharded {
                0..unit.whole.len()
            } else {
                home(ids[0]).start..home(ids[ids.len() - 1]).end
            };
            let matrices = ids.iter().zip(&mut owners).map(|(&id, owner)| GatheredMatrix {
                shapes: shapes(&params[id.0]),
                home: home(id).start - all.start..home(id).end - all.start,
                owner: owner % state.all.size(),
                own: own.iter().find(|piece| piece.param == id).cloned(),
                rates: groups.index(id.0),
            });
            gatherings.push(Gathering {
                name: format!("momentum from `{}`", params[ids[0].0].key),
                holders: state.all.clone(),
                shards: is_sharded.then(|| state.shard.clone()),
                len: all.len(),
                matrices: matrices.collect(),
            });
        }
    }
    gatherings
}

/// Rows and columns of the projections of a parameter, or its own; of each expert that this rank holds.
fn shapes(spec: &ParamSpec) -> Vec<[usize; 2]> {
    let shape = spec.local_shape();
    let (experts, matrix) = shape.split_at(shape.len() - 2);
    let rows = match &spec.projections[..] {
        [] => &matrix[..1],
        projections => projections,
    };
    let shapes: Vec<_> = rows.iter().map(|rows| [*rows, matrix[1]]).collect();
    shapes.repeat(experts.iter().product())
}

/// Memory of the Newton–Schulz iterations.
struct Orthogonal {
    /// The matrix, and what comes of it.
    x: Buffer,
    /// The next one.
    product: Buffer,
    /// `A`, then `bA + cA²`.
    square: Buffer,
    /// `A²`
    fourth: Buffer,
    partials: Buffer,
    norm: Buffer,
    factor: Buffer,
    one: Buffer,
}

impl Orthogonal {
    /// For matrices of these rows and columns.
    fn new(device: &Arc<dyn Device>, shapes: impl Iterator<Item = [usize; 2]>) -> Result<Self, DeviceError> {
        let (mut most, mut side) = (0, 0);
        for [rows, cols] in shapes {
            most = most.max(rows * cols);
            side = side.max(rows.min(cols));
        }
        let alloc = |name, dtype, len| {
            let arena = device.alloc(&ArenaSpec::private(name, dtype, len))?;
            Ok::<_, DeviceError>(arena.whole())
        };
        let scratch = |name, len| alloc(name, DType::F32, len);
        let one = scratch("one", 1)?;
        let stream = device.stream();
        device.upload(stream, &one, bytemuck::bytes_of(&1.0_f32));
        device.synchronize(stream)?;
        Ok(Self {
            x: scratch("orthogonal matrix", most)?,
            product: scratch("next orthogonal matrix", most)?,
            square: scratch("square of a matrix", side * side)?,
            fourth: scratch("fourth power of a matrix", side * side)?,
            partials: alloc("partial norms of a matrix", DType::F64, most.div_ceil(CHUNK))?,
            norm: scratch("norm of a matrix", 1)?,
            factor: scratch("factor of a matrix", 1)?,
            one,
        })
    }

    /// What replaces each projection of a parameter by its orthogonal form, times its gain.
    fn replace(&self, parameter: &Buffer, projections: &[[usize; 2]]) -> Vec<Op> {
        let (mut ops, mut end) = (Vec::new(), 0);
        for &[rows, cols] in projections {
            let start = end;
            end += rows * cols;
            let projection = parameter.slice(start..end);
            ops.extend(self.of(&projection, [rows, cols]));
            let gain = ADAMW_RMS * (rows.max(cols) as f64).sqrt();
            let x = self.x.slice(0..rows * cols);
            ops.push(blend(0.0, &projection, gain as f32, &x, &self.one));
        }
        ops
    }

    /// What leaves the orthogonal form of `direction`, `[rows, cols]`, in `x`.
    fn of(&self, direction: &Buffer, [rows, cols]: [usize; 2]) -> Vec<Op> {
        let n = rows * cols;
        let x = self.x.slice(0..n);
        let partials = self.partials.slice(0..n.div_ceil(CHUNK));
        let measure = SquaredNorm {
            x: direction.clone(),
            partials: partials.clone(),
        };
        // The norm is at most EPS then, and 1 once the matrix is divided by EPS.
        let normalize = ClipScale {
            partials,
            order: None,
            witnesses: None,
            max_norm: Some(EPS),
            norm: self.norm.clone(),
            scale: self.factor.clone(),
            updates: None,
        };
        let first = blend(0.0, &x, 1.0 / EPS, direction, &self.factor);
        let mut ops = vec![measure.into(), normalize.into(), first];
        for _ in 0..STEPS {
            ops.extend(self.iteration(&x, [rows, cols]));
        }
        ops
    }

    /// `x = a·x + (b·A + c·A²)·x` with `A = x·xᵀ`, or `x·(b·A + c·A²)` with `A = xᵀ·x` where that is smaller.
    fn iteration(&self, x: &Buffer, [rows, cols]: [usize; 2]) -> Vec<Op> {
        let [a, b, c] = COEFFICIENTS;
        let (side, is_wide) = (rows.min(cols), rows <= cols);
        let [square, fourth] = [&self.square, &self.fourth].map(|m| m.slice(0..side * side));
        let product = self.product.slice(0..rows * cols);
        let multiply = |inp: &Buffer, weight: &Buffer, out: &Buffer, shape| LinearForward {
            inp: inp.clone(),
            weight: weight.clone(),
            bias: None,
            residual: None,
            out: out.clone(),
            shape,
            exact: false,
        };
        let shape = |rows, inputs, outputs, layout| LinearShape {
            rows,
            inputs,
            outputs,
            layout,
        };
        let in_out = |rows, inputs, outputs| shape(rows, inputs, outputs, WeightLayout::InOut);
        let (gram, next): (Op, _) = if is_wide {
            let gram = multiply(x, x, &square, shape(rows, cols, rows, WeightLayout::OutIn));
            let next = multiply(&square, x, &product, in_out(rows, rows, cols));
            (gram.into(), next)
        } else {
            let gram = LinearDweight {
                inp: x.clone(),
                dout: x.clone(),
                dweight: square.clone(),
                accumulate: false,
                shape: in_out(rows, cols, cols),
            };
            let next = multiply(x, &square, &product, in_out(rows, cols, cols));
            (gram.into(), next)
        };
        vec![
            gram,
            multiply(&square, &square, &fourth, in_out(side, side, side)).into(),
            blend(b, &square, c, &fourth, &self.one),
            next.into(),
            blend(a, x, 1.0, &product, &self.one),
        ]
    }
}

/// `x = keep·x + add·scale·y`; without `keep` whatever `x` is.
fn blend(keep: f32, x: &Buffer, add: f32, y: &Buffer, scale: &Buffer) -> Op {
    let update = Update {
        rule: muon_blend(keep, add),
        param: x.clone(),
        copy: None,
        grad: y.clone(),
        slots: Vec::new(),
        scale: scale.clone(),
        runs: Runs::uniform(x.len(), Rates::new(0.0, 0.0)),
        step: 0,
    };
    update.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::{Executor, SingleRank};
    use crate::config::ModelKind;
    use crate::config::OptimizerKind;
    use crate::device::{CpuDevice, StateMemory};
    use crate::model::{AxisRole, GroupId, Init, ParamId};
    use crate::optim::{Optimizer, UpdateStep};
    use crate::parallel::{ArenaShare, GradSpec, GradientLayout, LayoutConfig};
    use crate::session::Cancel;

    #[test]
    fn the_matrices_of_the_layers_are_muons_in_every_kind_of_model() {
        for kind in [
            ModelKind::Gpt2,
            ModelKind::Llama,
            ModelKind::Mlp,
            ModelKind::Mixtral,
        ] {
            let config = crate::config::Model {
                kind,
                n_layer: 2,
                n_embd: 8,
                block_size: 4,
                tied: Some(false),
                ..crate::config::Model::default()
            };
            let model = crate::model::build(&config, 16).unwrap();
            let hidden = model.params.iter().filter(|spec| is_hidden_matrix(spec)).count();
            let matrices = model
                .params
                .iter()
                .filter(|spec| spec.global_shape.len() > 1)
                .count();
            // All but the embeddings and the head, and the router of each layer.
            let others = match kind {
                ModelKind::Gpt2 => 3,
                ModelKind::Mixtral => 4,
                _ => 2,
            };
            assert_eq!(hidden, matrices - others, "{kind:?}");
        }
    }

    /// Row-major.
    #[derive(Clone)]
    struct Wide {
        rows: usize,
        cols: usize,
        at: Vec<f64>,
    }

    impl Wide {
        fn new(rows: usize, cols: usize, value: impl Fn(usize) -> f64) -> Self {
            let at = (0..rows * cols).map(value).collect();
            Self { rows, cols, at }
        }

        fn map(&self, value: impl Fn(f64) -> f64) -> Self {
            let at = self.at.iter().map(|x| value(*x)).collect();
            Self { at, ..*self }
        }

        fn plus(&self, other: &Self) -> Self {
            let at = self.at.iter().zip(&other.at).map(|(x, y)| x + y).collect();
            Self { at, ..*self }
        }

        fn times(&self, other: &Self) -> Self {
            Self::new(self.rows, other.cols, |i| {
                let (row, col) = (i / other.cols, i % other.cols);
                let terms =
                    (0..self.cols).map(|k| self.at[row * self.cols + k] * other.at[k * other.cols + col]);
                terms.sum()
            })
        }

        fn transposed(&self) -> Self {
            Self::new(self.cols, self.rows, |i| {
                self.at[i % self.rows * self.cols + i / self.rows]
            })
        }

        /// `_zeropower_via_newtonschulz` of `torch.optim`, in f64.
        fn orthogonal(&self) -> Self {
            let norm = self
                .at
                .iter()
                .map(|x| x * x)
                .sum::<f64>()
                .sqrt()
                .max(f64::from(EPS));
            let [a, b, c] = COEFFICIENTS.map(f64::from);
            let mut x = self.map(|x| x / norm);
            if self.rows > self.cols {
                x = x.transposed();
            }
            for _ in 0..STEPS {
                let gram = x.times(&x.transposed());
                let update = gram.map(|x| b * x).plus(&gram.times(&gram).map(|x| c * x));
                x = x.map(|x| a * x).plus(&update.times(&x));
            }
            if self.rows > self.cols { x.transposed() } else { x }
        }
    }

    fn solo() -> Communicator {
        let timeout = std::time::Duration::from_secs(10);
        let transport = Box::new(SingleRank::new(0));
        Communicator::new("solo", transport, Executor::Inline, timeout, &Cancel::default())
    }

    fn spec(name: &str, shape: &[usize]) -> ParamSpec {
        ParamSpec {
            key: name.to_owned(),
            global_shape: shape.to_vec(),
            cut: None,
            roles: AxisRole::replicated(),
            dtype: DType::F32,
            init: Init::Constant(0.0),
            decay: true,
            group: GroupId(0),
            projections: Vec::new(),
        }
    }

    /// Parameters before and after two steps.
    fn trained(params: &[ParamSpec], config: &OptimizerConfig) -> [Vec<Vec<f64>>; 2] {
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new(1).unwrap());
        let stream = device.stream();
        let specs = params
            .iter()
            .map(|spec| GradSpec::new(&spec.key, &spec.global_shape));
        let order: Vec<ParamId> = (0..params.len()).map(ParamId).collect();
        let layout = GradientLayout::new(specs.collect(), &order, &LayoutConfig::new(1)).unwrap();
        let sharding = Sharding::replicated(&layout);
        let home = StateMemory::on_device(device.clone());
        let set = ReplicaSet::of_all(solo());
        let optimizer = Optimizer::new(home, &set, &sharding, params, config).unwrap();
        let alloc = |name: &str, len| device.alloc(&ArenaSpec::private(name, DType::F32, len)).unwrap();
        let [weights, grads] = ["parameters", "gradients"].map(|name| alloc(name, layout.len()));
        let scale = alloc("scale", 1).whole();
        scale.host_mut::<f32>().unwrap()[0] = SCALE as f32;
        let values = |arena: &crate::device::Arena| -> Vec<Vec<f64>> {
            let of = |id: &ParamId| arena.slice(layout.range(*id)).host::<f32>().unwrap().to_vec();
            let wide = |values: Vec<f32>| values.into_iter().map(f64::from).collect();
            order.iter().map(|id| wide(of(id))).collect()
        };
        for id in &order {
            let (weights, grads) = (weights.slice(layout.range(*id)), grads.slice(layout.range(*id)));
            for (i, x) in weights.host_mut::<f32>().unwrap().iter_mut().enumerate() {
                *x = weight(i) as f32;
            }
            for (i, x) in grads.host_mut::<f32>().unwrap().iter_mut().enumerate() {
                *x = grad(i) as f32;
            }
        }
        let before = values(&weights);
        for number in 1..=2 {
            let step = UpdateStep {
                scale: scale.clone(),
                lr: LR as f32,
                number,
            };
            let (params, grads) = (
                ArenaShare::Whole(weights.clone()),
                ArenaShare::Whole(grads.clone()),
            );
            assert!(optimizer.step(stream, &params, &grads, &step).is_empty());
        }
        device.synchronize(stream).unwrap();
        [before, values(&weights)]
    }

    const LR: f64 = 0.125;
    const DECAY: f64 = 0.5;
    const SCALE: f64 = 0.5;

    /// Numbers from -1 to below 1, exact in f32, which `tests/parity/make_muon.py` computes too.
    fn hash(i: usize) -> f64 {
        ((i * 2_654_435_761) >> 16) as u16 as f64 / 32_768.0 - 1.0
    }

    fn weight(i: usize) -> f64 {
        hash(i) * 0.25
    }

    fn grad(i: usize) -> f64 {
        hash(i + 1_000_000)
    }

    #[test]
    fn two_steps_follow_pytorch() {
        for (rows, cols) in [(6, 40), (40, 6), (9, 9)] {
            for nesterov in [true, false] {
                let config = OptimizerConfig {
                    kind: OptimizerKind::Muon,
                    weight_decay: DECAY as f32,
                    nesterov: Some(nesterov),
                    ..OptimizerConfig::default()
                };
                let [_, found] = trained(&[spec("h.0.w", &[rows, cols])], &config);
                let (g, mut m) = (
                    Wide::new(rows, cols, |i| SCALE * grad(i)),
                    Wide::new(rows, cols, |_| 0.0),
                );
                let mut p = Wide::new(rows, cols, weight);
                for _ in 0..2 {
                    m = m.map(|x| 0.95 * x).plus(&g.map(|x| 0.05 * x));
                    let lerp = g.map(|x| 0.05 * x).plus(&m.map(|x| 0.95 * x));
                    let direction = if nesterov { lerp } else { m.clone() };
                    let gain = 0.2 * (rows.max(cols) as f64).sqrt();
                    p = p.map(|x| x * (1.0 - LR * DECAY));
                    p = p.plus(&direction.orthogonal().map(|x| -LR * gain * x));
                }
                for (found, expected) in found[0].iter().zip(&p.at) {
                    assert!(
                        (found - expected).abs() < 1e-4,
                        "{rows} × {cols}: {found} instead of {expected}"
                    );
                }
            }
        }
    }

    /// Made by `tests/parity/make_muon.py`.
    #[test]
    fn layers_of_gpt2_and_llama_are_updated_as_by_pytorch() {
        let golden = include_str!("../../../tests/parity/muon.json");
        let golden: serde_json::Value = serde_json::from_str(golden).unwrap();
        for (kind, name) in [(ModelKind::Gpt2, "gpt2"), (ModelKind::Llama, "llama")] {
            let model = crate::config::Model {
                kind,
                n_layer: 1,
                n_head: if kind == ModelKind::Llama { 4 } else { 2 },
                n_kv_head: (kind == ModelKind::Llama).then_some(2),
                n_inner: (kind == ModelKind::Llama).then_some(12),
                n_embd: 8,
                block_size: 4,
                ..crate::config::Model::default()
            };
            let params = crate::model::build(&model, 16).unwrap().params;
            let config = OptimizerConfig {
                kind: OptimizerKind::Muon,
                weight_decay: DECAY as f32,
                ..OptimizerConfig::default()
            };
            let [_, found] = trained(&params, &config);
            let golden = golden[name].as_object().unwrap();
            let hidden = params
                .iter()
                .zip(&found)
                .filter(|(spec, _)| is_hidden_matrix(spec));
            assert_eq!(hidden.clone().count(), golden.len());
            for (spec, found) in hidden {
                let expected: Vec<f64> = serde_json::from_value(golden[&spec.key].clone()).unwrap();
                let differences = found
                    .iter()
                    .step_by(11)
                    .zip(&expected)
                    .map(|(a, b)| (a - b).abs());
                let worst = differences.fold(0.0, f64::max);
                assert!(worst < 1e-5, "{name}, `{}`: {worst}", spec.key);
            }
        }
    }

    #[test]
    fn what_is_no_matrix_of_a_block_is_updated_by_adamw() {
        let params = [
            spec("wte", &[8, 4]),
            spec("h.0.w", &[4, 4]),
            spec("h.0.b", &[4]),
            spec("h.1.w", &[2, 3]),
        ];
        let config = |kind| OptimizerConfig {
            kind,
            ..OptimizerConfig::default()
        };
        let [before, muon] = trained(&params, &config(OptimizerKind::Muon));
        let [_, adamw] = trained(&params, &config(OptimizerKind::Adamw));
        let is_same = [0, 1, 2, 3].map(|param| muon[param] == adamw[param]);
        assert_eq!(is_same, [true, false, true, false]);
        assert!((0..4).all(|param| muon[param] != before[param]));
    }
}
