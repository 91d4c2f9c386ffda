//! What a step of training asks of a GPU, for models of every width that kernels know: all that it launches, at its
//! sizes.

use std::ops::Range;
use std::sync::Arc;

use ddp_worker::config::{Model as ModelConfig, ModelKind, Recompute};
use ddp_worker::device::{Arena, ArenaSpec, Buffer, Compute, DType, Device};
use ddp_worker::model::{
    Activation, ActivationPool, ChunkState, Context, Keep, Model, NoHooks, ParamId, Params, Passes,
    SampleKey, build,
};
use ddp_worker::ops::{
    CHUNK, Cast, ClipScale, ColumnSum, Fill, LossSum, Rates, Runs, SquaredNorm, UPDATE_NUMBERS, Update,
    Updates,
};
use ddp_worker::optim;

use crate::local_model::LocalGrads;
use crate::op_cases::Types;

/// A model, and the samples of a micro-batch.
pub(crate) struct Job {
    pub(crate) name: &'static str,
    batch: usize,
    positions: usize,
    layers: usize,
    heads: usize,
    channels: usize,
    vocab: usize,
}

const fn job(name: &'static str, [batch, positions]: [usize; 2], model: [usize; 4]) -> Job {
    let [layers, heads, channels, vocab] = model;
    Job {
        name,
        batch,
        positions,
        layers,
        heads,
        channels,
        vocab,
    }
}

/// Heads of 64 channels, then of 128, 32, 80 and 144. All blocks of a model are alike: of the large ones there are few.
pub(crate) const JOBS: [Job; 8] = [
    job("GPT-2 124M", [32, 1024], [12, 12, 768, 50_304]),
    job("GPT-2 350M", [16, 1024], [24, 16, 1024, 50_257]),
    job("GPT-2 1.5B", [8, 1024], [2, 25, 1600, 50_257]),
    job("GPT-3 13B", [4, 2048], [2, 40, 5120, 50_304]),
    job("GPT-3 175B", [2, 2048], [2, 96, 12_288, 50_304]),
    job("a model of bytes", [64, 256], [4, 8, 256, 256]),
    job("GPT-3 2.7B", [4, 2048], [2, 32, 2560, 50_304]),
    job("heads of 144", [4, 512], [2, 8, 1152, 32_000]),
];

/// Heads as wide as the plain kernels take. Their backward is not for cards with 99 KiB of shared memory a block.
pub(crate) const WIDEST: Job = job("heads of 256", [4, 512], [2, 4, 1024, 32_000]);

/// Parameters without values.
struct Blank {
    arena: Arena,
    ranges: Vec<Range<usize>>,
}

impl Params for Blank {
    fn get(&self, id: ParamId) -> Buffer {
        self.arena.slice(self.ranges[id.0].clone())
    }
}

impl Job {
    fn model(&self, dropout: f32) -> Model {
        let config = ModelConfig {
            kind: ModelKind::Gpt2,
            n_layer: self.layers,
            n_head: self.heads,
            n_embd: self.channels,
            block_size: self.positions,
            vocab_size: None,
            dropout,
            ..ModelConfig::default()
        };
        build(&config, self.vocab).unwrap()
    }

    /// Puts a step on the device.
    pub(crate) fn step(&self, device: &Arc<dyn Device>, types: Types) {
        let model = self.model(0.0);
        self.passes(device, &model, types);
        self.passes(device, &self.model(0.1), types);
        update(device, &model, types);
        let rows = self.batch * self.positions;
        for accumulate in [false, true] {
            let sum = LossSum {
                losses: buffer(device, DType::F32, rows),
                total: buffer(device, DType::F64, 1),
                accumulate,
            };
            device.enqueue(device.stream(), sum.into());
        }
    }

    /// Forward, and backward twice: the second adds.
    fn passes(&self, device: &Arc<dyn Device>, model: &Model, types: Types) {
        let rows = self.batch * self.positions;
        let ids = || buffer(device, DType::I32, rows);
        let (targets, dloss) = (ids(), buffer(device, DType::F32, rows));
        let pool = ActivationPool::new(device.clone());
        let ranges = ranges(model);
        let arena = buffer(device, types.act, length(model)).arena().clone();
        let params = Blank { arena, ranges };
        let compute = Compute::new(device.clone());
        let ctx = Context {
            targets: Some(&targets),
            dloss: Some(&dloss),
            keep: Keep::ForBackward(Recompute::Norms),
            samples: Some(SampleKey::default()),
            ..Context::new(&compute, &pool, &params, [self.batch, self.positions], types.act)
        };
        let mut grads = LocalGrads::new(device.as_ref(), model, types.grad).unwrap();
        grads.start_step();
        let passes = Passes { model, ctx: &ctx };
        let tokens = Activation::borrowed(ids(), vec![self.batch, self.positions]);
        for _ in 0..2 {
            let mut flight = ChunkState::new(model.whole());
            passes.forward(&mut flight, &tokens, &mut NoHooks).unwrap();
            passes
                .backward(&mut flight, None, &mut NoHooks, &mut grads)
                .unwrap();
        }
    }
}

fn length(model: &Model) -> usize {
    ranges(model).last().map_or(0, |range| range.end)
}

fn ranges(model: &Model) -> Vec<Range<usize>> {
    let ends = model.params.iter().scan(0, |end, spec| {
        *end += spec.len();
        Some(*end - spec.len()..*end)
    });
    ends.collect()
}

fn buffer(device: &Arc<dyn Device>, dtype: DType, len: usize) -> Buffer {
    let spec = ArenaSpec::private("on paper", dtype, len);
    device.alloc(&spec).unwrap().whole()
}

/// All of a model at once: no rank has more. What sharded strategies add to that are sums of rows, fills and casts.
fn update(device: &Arc<dyn Device>, model: &Model, types: Types) {
    let n = length(model);
    let all = |dtype| buffer(device, dtype, n);
    let chunks = n.div_ceil(CHUNK);
    let sums = || buffer(device, DType::F64, chunks);
    let number = || buffer(device, DType::F32, 1);
    let clip = ClipScale {
        partials: sums(),
        order: Some(buffer(device, DType::I32, chunks)),
        witnesses: Some(buffer(device, DType::F64, 8)),
        max_norm: Some(1.0),
        norm: number(),
        scale: buffer(device, DType::F32, UPDATE_NUMBERS),
        updates: Some(Updates {
            count: buffer(device, DType::I32, 1),
            betas: [0.9, 0.95],
        }),
    };
    let shard = |accumulate| ColumnSum {
        x: all(types.act),
        out: all(types.grad),
        accumulate,
    };
    let ops = vec![
        SquaredNorm {
            x: all(types.grad),
            partials: sums(),
        }
        .into(),
        clip.into(),
        adamw(device, model, types).into(),
        shard(false).into(),
        shard(true).into(),
        Fill {
            out: all(types.grad),
            value: 0.0,
        }
        .into(),
        Cast {
            x: all(DType::F32),
            out: all(types.act),
        }
        .into(),
    ];
    device.enqueue_all(device.stream(), ops);
}

fn adamw(device: &Arc<dyn Device>, model: &Model, types: Types) -> Update {
    let all = |dtype| buffer(device, dtype, length(model));
    let spared = model
        .params
        .iter()
        .zip(ranges(model))
        .filter(|(spec, _)| !spec.decay);
    let spared: Vec<_> = spared.map(|(_, range)| range).collect();
    Update {
        rule: optim::adamw([0.9, 0.95], 1e-8),
        runs: Runs::sparing(length(model), &spared, Rates::new(1e-3, 0.1)),
        param: all(DType::F32),
        copy: (types.act == DType::Bf16).then(|| all(DType::Bf16)),
        grad: all(types.grad),
        slots: vec![all(DType::F32), all(DType::F32)],
        scale: buffer(device, DType::F32, UPDATE_NUMBERS),
        step: 1,
    }
}
