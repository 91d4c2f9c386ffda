//! A parameter that its block does not use: named at once, or trained with zeros, and nobody hangs.

use std::sync::Arc;
use std::time::Instant;

use crate::collective_world::{PATIENCE, Rank, World};
use crate::local_model::LocalParams;
use ddp_worker::collective::Executor;
use ddp_worker::config::{self, Accumulate, ModelKind, Unused};
use ddp_worker::device::{ArenaSpec, Buffer, DType, DeviceError, Event, Stream};
use ddp_worker::model::{
    self, Activation, ActivationPool, Block, Context, Flight, GradSink, GradSlot, Model, NoHooks, ParamId,
    Passes, Saved,
};
use ddp_worker::parallel::{
    GradientLayout, LayoutConfig, ReduceError, Reducer, ReducerConfig, ReplicaSet, Sharding,
};

/// What is not used, of block `h.1`.
const SKIPPED: &str = "h.1.mlp.c_fc.weight";

/// A block that computes the gradient of one of its parameters, and keeps it to itself.
struct Forgetful {
    inner: Arc<dyn Block>,
    forgets: ParamId,
    memory: Buffer,
}

struct Forgetting<'a> {
    grads: &'a mut dyn GradSink,
    block: &'a Forgetful,
}

impl GradSink for Forgetting<'_> {
    fn grad(&mut self, id: ParamId) -> Result<GradSlot, DeviceError> {
        if id != self.block.forgets {
            return self.grads.grad(id);
        }
        Ok(GradSlot {
            buffer: self.block.memory.clone(),
            accumulate: false,
        })
    }

    fn contributed(&mut self, id: ParamId, at: Event) -> Result<(), DeviceError> {
        if id == self.block.forgets {
            return Ok(());
        }
        self.grads.contributed(id, at)
    }
}

impl Block for Forgetful {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn params(&self) -> &[ParamId] {
        self.inner.params()
    }

    fn forward(
        &self,
        ctx: &Context<'_>,
        input: &Activation,
        saved: &mut Saved,
    ) -> Result<Activation, DeviceError> {
        self.inner.forward(ctx, input, saved)
    }

    fn backward(
        &self,
        ctx: &Context<'_>,
        saved: &mut Saved,
        dout: &Activation,
        grads: &mut dyn GradSink,
    ) -> Result<Option<Activation>, DeviceError> {
        let mut grads = Forgetting { grads, block: self };
        self.inner.backward(ctx, saved, dout, &mut grads)
    }
}

fn model(rank: &Rank, forgets: bool) -> (Model, ParamId) {
    let config = config::Model {
        kind: ModelKind::Gpt2,
        n_layer: 2,
        n_head: 2,
        n_embd: 32,
        block_size: 8,
        vocab_size: None,
        dropout: 0.0,
        ..config::Model::default()
    };
    let mut model = model::build(&config, 64).unwrap();
    let skipped = model.params.iter().position(|p| p.key == SKIPPED).unwrap();
    if forgets {
        let memory = ArenaSpec::private("forgotten", DType::F32, model.params[skipped].len());
        let block = model.blocks.iter_mut().find(|b| b.name() == "h.1").unwrap();
        *block = Arc::new(Forgetful {
            inner: block.clone(),
            forgets: ParamId(skipped),
            memory: rank.device.alloc(&memory).unwrap().whole(),
        });
    }
    (model, ParamId(skipped))
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Ddp,
    Sharded(Accumulate),
}

const KINDS: [Kind; 3] = [
    Kind::Ddp,
    Kind::Sharded(Accumulate::Full),
    Kind::Sharded(Accumulate::Sharded),
];

/// Sums that a rank owns: parameter, its first element, the elements.
type Sums = Vec<(ParamId, usize, Vec<f32>)>;

fn reducer(
    rank: &Rank,
    stream: Stream,
    (kind, unused): (Kind, Unused),
    layout: &Arc<GradientLayout>,
) -> (Arc<Sharding>, Reducer) {
    let config = ReducerConfig {
        unused,
        accumulate: match kind {
            Kind::Ddp => Accumulate::Full,
            Kind::Sharded(accumulate) => accumulate,
        },
        ..ReducerConfig::default()
    };
    let sharding = Arc::new(match kind {
        Kind::Ddp => Sharding::replicated(layout),
        Kind::Sharded(_) => Sharding::of_groups(layout, rank.comm.size(), rank.rank()),
    });
    let set = ReplicaSet::of_all(rank.comm.clone());
    let reducer = Reducer::over(&set, (&rank.device, stream), layout.clone(), &sharding, config);
    (sharding, reducer.unwrap())
}

/// A step of two micro-batches; the ranks of `forgetful` do not use the parameter.
fn step(rank: &Rank, kind: Kind, unused: Unused, forgetful: &[usize]) -> Result<Sums, ReduceError> {
    let (model, _) = model(rank, forgetful.contains(&rank.rank()));
    let config = LayoutConfig {
        first_bucket_bytes: 8 << 10,
        ..LayoutConfig::new(rank.comm.size())
    };
    let layout = Arc::new(GradientLayout::of_model(&model, &config).unwrap());
    let (device, stream) = (&rank.device, rank.device.stream());
    let (sharding, mut reducer) = reducer(rank, stream, (kind, unused), &layout);
    let params = LocalParams::new(device.as_ref(), &model, DType::F32, 7)?;
    let pool = ActivationPool::new(device.clone());
    let tokens: Vec<i32> = (0..16).map(|i| (i * 5 + rank.rank() as i32 * 3) % 64).collect();
    let tokens = rank.arena(false, &tokens).whole();
    let factors = rank.arena(false, &[1.0_f32 / 16.0; 16]).whole();
    let ctx = Context {
        device: device.as_ref(),
        stream,
        pool: &pool,
        params: &params,
        targets: &tokens,
        dloss: Some(&factors),
        shape: [2, 8],
        dtype: DType::F32,
        samples: None,
        tensor: None,
        timeline: None,
    };
    let passes = Passes {
        model: &model,
        ctx: &ctx,
    };
    let mut grads = reducer.step(2)?;
    for _ in 0..2 {
        let input = Activation::borrowed(tokens.clone(), vec![2, 8]);
        let mut flight = Flight::over(model.whole());
        passes.forward(&mut flight, &input, &mut NoHooks)?;
        let done = passes.backward(&mut flight, None, &mut NoHooks, &mut grads);
        if let Err(error) = done {
            return Err(grads.failure().cloned().unwrap_or(ReduceError::Device(error)));
        }
    }
    let reduced = grads.finish(Instant::now() + PATIENCE)?;
    device.synchronize(stream)?;
    let portion = reduced.portion();
    let own = sharding.own_pieces().into_iter().map(|piece| {
        let elements = portion.slice(&piece.place).host::<f32>().unwrap().to_vec();
        (piece.param, piece.elements.start, elements)
    });
    Ok(own.collect())
}

/// All elements of the sums, by parameter.
fn sums(kind: Kind, forgetful: &[usize]) -> (Vec<Vec<f32>>, ParamId) {
    let results = World::of(&[2]).run(Executor::Thread, |rank| {
        let sums = step(&rank, kind, Unused::Zero, forgetful).unwrap();
        (sums, model(&rank, false))
    });
    let (model, skipped) = &results[0].1;
    let mut all: Vec<Vec<f32>> = model.params.iter().map(|p| vec![f32::NAN; p.len()]).collect();
    for (id, start, elements) in results.iter().flat_map(|(sums, _)| sums) {
        all[id.0][*start..start + elements.len()].copy_from_slice(elements);
    }
    (all, *skipped)
}

#[test]
fn zeros_stand_for_what_a_rank_does_not_use() {
    let (used, skipped) = sums(Kind::Ddp, &[]);
    assert!(used[skipped.0].iter().any(|g| *g != 0.0));
    let (by_one, _) = sums(Kind::Ddp, &[1]);
    let (by_other, _) = sums(Kind::Ddp, &[0]);
    for (id, used) in used.iter().enumerate() {
        if id != skipped.0 {
            assert_eq!(used, &by_one[id], "parameter {id}");
            continue;
        }
        for ((one, other), used) in by_one[id].iter().zip(&by_other[id]).zip(used) {
            let error = (one + other - used).abs();
            assert!(
                error <= 1e-5 * (one.abs() + other.abs()),
                "{one} + {other}: {used}"
            );
        }
    }
    let (by_none, _) = sums(Kind::Ddp, &[0, 1]);
    assert!(by_none[skipped.0].iter().all(|g| *g == 0.0));
    for kind in KINDS {
        for (forgetful, expected) in [(&[1][..], &by_one), (&[0, 1], &by_none)] {
            let (found, _) = sums(kind, forgetful);
            for (found, expected) in found.iter().zip(expected) {
                let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * b.abs().max(1e-3);
                assert!(found.iter().zip(expected).all(close), "{kind:?} {forgetful:?}");
            }
        }
    }
}

#[test]
fn an_error_names_parameter_block_and_rank_and_nobody_hangs() {
    for kind in KINDS {
        for forgetful in [&[1][..], &[0, 1]] {
            let world = World::of(&[2]);
            let errors = world.run(Executor::Thread, |rank| {
                let error = step(&rank, kind, Unused::Error, forgetful).unwrap_err();
                world.cancel.cancel(format!("rank {} failed", rank.rank()));
                error.to_string()
            });
            for &rank in forgetful {
                let expected = format!(
                    "rank {rank}: parameter `{SKIPPED}` took no part in the backward of block `h.1`\n  hint: "
                );
                assert!(errors[rank].starts_with(&expected), "{kind:?}: {}", errors[rank]);
            }
        }
    }
}
