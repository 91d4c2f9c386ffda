//! Muon (Jordan et al. 2024; as `torch.optim.Muon`): momentum of a matrix, made orthogonal by Newton–Schulz iterations.
//!
//! For the matrices of a model's blocks; AdamW updates all other parameters. `m = μm + (1−μ)g; d = (1−μ)g + μm`, or
//! `d = m` without Nesterov's momentum; `p −= lr·(0.2·√max(rows, columns)·orthogonal(d) + λp)`: with that factor (Liu et
//! al. 2025; PyTorch's `match_rms_adamw`) learning rate and weight decay are those of AdamW. The mean of the gradients
//! is AdamW's slot `exp_avg`; `exp_avg_sq` of a matrix stays zero.
//!
//! A shard of a matrix has no orthogonal form of its own: where ranks own parts of a matrix, they gather `d`, a unit of
//! the sharding at a time, and each rank that owns a part makes the whole orthogonal and updates its part. So the bits
//! are those of one rank. Everything is in f32; PyTorch iterates in bf16.

use std::ops::Range;
use std::sync::Arc;

use super::ParamGroups;
use super::rules::{StepMemory, muon_blend, muon_descend, muon_momentum};
use crate::collective::{Communicator, Launch, Traffic, Work};
use crate::config::OptimizerConfig;
use crate::device::{ArenaSpec, Buffer, DType, Device, DeviceError, Stream};
use crate::model::{Names, ParamId, ParamSpec};
use crate::ops::{
    CHUNK, ClipScale, LinearDweight, LinearForward, LinearShape, Op, Rates, Runs, SquaredNorm, Update,
    UpdateRule, WeightLayout,
};
use crate::parallel::{OwnPiece, ReduceError, Sharding};

/// Coefficients of the quintic polynomial `aX + (bA + cA²)X` with `A = XXᵀ`.
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];
/// Iterations of it.
const STEPS: usize = 5;
/// Least norm that a matrix is divided by.
const EPS: f32 = 1e-7;
/// Root mean square of AdamW's updates.
const ADAMW_RMS: f64 = 0.2;

/// True of the parameters that Muon updates: matrices of the blocks.
pub(super) fn is_hidden_matrix(spec: &ParamSpec) -> bool {
    spec.global_shape.len() == 2 && Names::are_of_a_layer(&spec.key)
}

/// The matrices of which this rank owns a part, and memory to make one of them orthogonal.
pub(super) struct Muon {
    device: Arc<dyn Device>,
    /// Ranks that own the other parts; none where this rank owns everything.
    comm: Option<Communicator>,
    momentum: Arc<UpdateRule>,
    gatherings: Vec<Gathering>,
    /// `d` of what is gathered together.
    direction: Buffer,
    orthogonal: Orthogonal,
}

/// Matrices whose `d` is gathered together: those of a unit of the sharding, or one that this rank has to itself.
struct Gathering {
    name: String,
    /// Elements, padding included.
    len: usize,
    matrices: Vec<GatheredMatrix>,
}

struct GatheredMatrix {
    /// Rows and columns.
    shape: [usize; 2],
    /// Its elements in what is gathered.
    home: Range<usize>,
    /// What this rank owns of it: which elements, and where they are.
    own: OwnPiece,
    rates: usize,
}

impl Muon {
    /// For the matrices among `params`. Every rank of `comm` must call it.
    pub(super) fn new(
        device: &Arc<dyn Device>,
        (comm, sharding): (&Communicator, &Sharding),
        (params, groups): (&[ParamSpec], &ParamGroups),
        config: &OptimizerConfig,
    ) -> Result<Self, ReduceError> {
        let is_sharded = sharding.world() > 1;
        let gatherings = gatherings(sharding, params, groups);
        let lens = gatherings.iter().map(|gathering| gathering.len);
        let most = lens.max().unwrap_or(0);
        let spec = ArenaSpec::on_node("directions of matrices", DType::F32, most);
        let direction = if is_sharded {
            comm.alloc_shared(device, &spec)?
        } else {
            device.alloc(&ArenaSpec::private(spec.name, DType::F32, most))?
        };
        let matrices = gatherings.iter().flat_map(|gathering| &gathering.matrices);
        Ok(Self {
            orthogonal: Orthogonal::new(device, matrices.map(|matrix| matrix.shape))?,
            device: device.clone(),
            comm: is_sharded.then(|| comm.clone()),
            momentum: muon_momentum(config.momentum(), config.nesterov()),
            gatherings,
            direction: direction.whole(),
        })
    }

    /// Puts the update of all matrices on the stream. Returns the exchanges that it waits for. Every rank must call it.
    pub(super) fn step(&self, stream: Stream, memory: &StepMemory<'_>) -> Vec<Work> {
        let mut exchanges = Vec::new();
        for gathering in &self.gatherings {
            let direction = self.direction.slice(0..gathering.len);
            let momenta = gathering.matrices.iter().map(|matrix| {
                let (place, elements) = (&matrix.own.place, &matrix.own.elements);
                let start = matrix.home.start;
                let runs = Runs::uniform(elements.len(), Rates::new(0.0, 0.0));
                let update = Update {
                    param: direction.slice(start + elements.start..start + elements.end),
                    copy: None,
                    ..memory.update(&self.momentum, place, runs)
                };
                update.into()
            });
            self.device.enqueue_all(stream, momenta.collect());
            if let Some(comm) = &self.comm {
                let ready = self.device.record(stream);
                let launch = Launch::after(ready, Traffic::Other, &gathering.name);
                let work = comm.all_gather(&direction, launch);
                work.wait_on(self.device.as_ref(), stream, comm.deadline());
                exchanges.push(work);
            }
            for matrix in &gathering.matrices {
                let direction = direction.slice(matrix.home.clone());
                let mut ops = self.orthogonal.of(&direction, matrix.shape);
                ops.push(self.update(matrix, memory).into());
                self.device.enqueue_all(stream, ops);
            }
        }
        exchanges
    }

    /// The update of what this rank owns of the orthogonalised matrix.
    fn update(&self, matrix: &GatheredMatrix, memory: &StepMemory<'_>) -> Update {
        let OwnPiece { elements, place, .. } = &matrix.own;
        let [rows, cols] = matrix.shape;
        let gain = ADAMW_RMS * (rows.max(cols) as f64).sqrt();
        let runs = Runs::uniform(elements.len(), memory.rates[matrix.rates]);
        Update {
            grad: self.orthogonal.x.slice(elements.clone()),
            ..memory.update(&muon_descend(gain as f32), place, runs)
        }
    }
}

/// The matrices of which this rank owns a part, by what is gathered together. A unit that has matrices is gathered by all
/// ranks, also by those that own none of them.
fn gatherings(sharding: &Sharding, params: &[ParamSpec], groups: &ParamGroups) -> Vec<Gathering> {
    let own = sharding.own_pieces();
    let mut gatherings = Vec::new();
    for unit in sharding.units() {
        let hidden = |id: &&ParamId| is_hidden_matrix(&params[id.0]);
        let mut matrices = Vec::new();
        for id in unit.params.iter().filter(hidden) {
            let Some(own) = own.iter().find(|piece| piece.param == *id) else {
                continue;
            };
            let spec = &params[id.0];
            matrices.push(GatheredMatrix {
                shape: [spec.global_shape[0], spec.global_shape[1]],
                home: sharding.unit_range(*id).1,
                own: own.clone(),
                rates: groups.index(id.0),
            });
        }
        if sharding.world() > 1 && unit.params.iter().any(|id| hidden(&id)) {
            let (name, len) = (format!("momentum of {}", unit.name), unit.whole.len());
            gatherings.push(Gathering { name, len, matrices });
        } else {
            gatherings.extend(matrices.into_iter().map(|matrix| {
                let len = matrix.home.len();
                let home = 0..len;
                let (name, matrices) = (String::new(), vec![GatheredMatrix { home, ..matrix }]);
                Gathering { name, len, matrices }
            }));
        }
    }
    gatherings
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
        let first = blend((0.0, &x), (1.0 / EPS, direction), &self.factor);
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
            blend((b, &square), (c, &fourth), &self.one),
            next.into(),
            blend((a, x), (1.0, &product), &self.one),
        ]
    }
}

/// `x = keep·x + add·scale·y`; without `keep` whatever `x` is.
fn blend((keep, x): (f32, &Buffer), (add, y): (f32, &Buffer), scale: &Buffer) -> Op {
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
    use crate::device::CpuDevice;
    use crate::model::{AxisRole, GroupId, Init};
    use crate::optim::{Optimizer, StateMemory, UpdateStep};
    use crate::parallel::{ArenaShare, GradSpec, GradientLayout, LayoutConfig};
    use crate::session::Cancel;

    #[test]
    fn the_matrices_of_the_layers_are_muons_in_every_kind_of_model() {
        for kind in [ModelKind::Gpt2, ModelKind::Llama, ModelKind::Mlp] {
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
                .filter(|spec| spec.global_shape.len() == 2)
                .count();
            // All but the embeddings and the head.
            let others = if kind == ModelKind::Gpt2 { 3 } else { 2 };
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
        let optimizer = Optimizer::new(home, (&solo(), &sharding), params, config).unwrap();
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

    fn weight(i: usize) -> f64 {
        (i % 7) as f64 * 0.25 - 0.5
    }

    fn grad(i: usize) -> f64 {
        (i * i % 23) as f64 - 9.0
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
