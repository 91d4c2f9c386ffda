//! Networks as a whole: schedules of micro-batches, memory, what they can see, that they learn.

use ddp_worker::config::{self, ModelKind};
use ddp_worker::device::{DType, DeviceError, Event};
use ddp_worker::model::{ChunkState, Context, GradSink, GradSlot, NoHooks, ParamId, SampleKey, build};

use super::rig::{Rank, Rig, config, mean, values};
use crate::local_model::LocalGrads;

const KINDS: [ModelKind; 2] = [ModelKind::Gpt2, ModelKind::Mlp];

fn rank(kind: ModelKind, dtype: DType, batches: usize) -> Rank {
    Rank::new(
        Rig::new(),
        build(&config(kind), 11).unwrap(),
        dtype,
        [batches, 2, 6],
    )
}

/// Notes when each parameter gets its last contribution.
struct Finished {
    grads: LocalGrads,
    uses: Vec<usize>,
    order: Vec<ParamId>,
}

impl GradSink for Finished {
    fn grad(&mut self, id: ParamId) -> Result<GradSlot, DeviceError> {
        self.grads.grad(id)
    }

    fn contributed(&mut self, id: ParamId, at: Event) -> Result<(), DeviceError> {
        self.grads.contributed(id, at)?;
        if self.grads.contributions()[id.0] == self.uses[id.0] {
            self.order.push(id);
        }
        Ok(())
    }
}

#[test]
fn gradients_are_finished_in_the_order_of_their_memory() {
    for kind in KINDS {
        let rank = rank(kind, DType::F32, 1);
        let (_, mut flight) = rank.forward(0);
        let mut grads = Finished {
            grads: rank.grads.clone(),
            uses: rank.model.uses(),
            order: Vec::new(),
        };
        let ctx = rank.context(0);
        rank.passes(&ctx)
            .backward(&mut flight, None, &mut NoHooks, &mut grads)
            .unwrap();
        assert_eq!(grads.order, rank.model.backward_order());
    }
}

#[test]
fn memory_stops_growing_after_the_first_step() {
    for kind in KINDS {
        let mut rank = rank(kind, DType::F32, 1);
        rank.step(0);
        let first = rank.pool.allocated_bytes();
        for _ in 0..3 {
            rank.step(0);
        }
        assert_eq!(rank.pool.allocated_bytes(), first);
        assert!(rank.pool.peak_bytes() <= first);
    }
}

#[test]
fn evaluation_gives_the_same_losses_in_less_memory() {
    let mut config = config(ModelKind::Gpt2);
    config.n_layer = 8;
    let model = build(&config, 11).unwrap();
    let make = || Rank::new(Rig::new(), model.clone(), DType::F32, [1, 2, 6]);
    let (training, evaluating) = (make(), make());
    let (losses, _flight) = training.forward(0);
    let ctx = evaluating.context(0);
    let passes = evaluating.passes(&ctx);
    let tokens = &evaluating.batches[0].tokens;
    let same = passes.evaluate(model.whole(), tokens, &mut NoHooks).unwrap();
    assert_eq!(values::<f32>(losses.buffer()), values::<f32>(same.buffer()));
    assert!(2 * evaluating.pool.peak_bytes() < training.pool.peak_bytes());
}

#[test]
fn the_first_loss_is_that_of_a_uniform_guess() {
    for kind in KINDS {
        let config = config::Model {
            kind,
            n_layer: 4,
            n_head: 4,
            n_embd: 64,
            block_size: 32,
            vocab_size: None,
            dropout: 0.0,
            ..config::Model::default()
        };
        let rank = Rank::new(Rig::new(), build(&config, 256).unwrap(), DType::F32, [1, 4, 32]);
        let loss = mean(&rank.forward(0).0);
        assert!((loss - 256_f64.ln()).abs() < 0.1, "{kind:?}: {loss}");
    }
}

#[test]
fn backward_without_forward_says_what_is_missing() {
    let mut rank = rank(ModelKind::Gpt2, DType::F32, 1);
    let mut flight = ChunkState::new(rank.model.whole());
    let ctx = rank.context(0);
    let mut grads = rank.grads.clone();
    let error = rank
        .passes(&ctx)
        .backward(&mut flight, None, &mut NoHooks, &mut grads);
    let message = error.unwrap_err().to_string();
    assert_eq!(message, "backward wants `head input`, which forward did not save");
    let evaluating = Context { dloss: None, ..ctx };
    let error = rank
        .passes(&evaluating)
        .backward(&mut flight, None, &mut NoHooks, &mut grads);
    let message = error.unwrap_err().to_string();
    assert_eq!(message, "backward wants the factor of each position's gradient");
    rank.step(0);
}

#[test]
fn an_evaluation_drops_nothing() {
    for kind in KINDS {
        let losses = |dropout, samples| {
            let config = config::Model {
                dropout,
                ..config(kind)
            };
            let rank = Rank::new(Rig::new(), build(&config, 11).unwrap(), DType::F32, [1, 2, 6]);
            let ctx = Context {
                samples,
                ..rank.context(0)
            };
            let tokens = &rank.batches[0].tokens;
            let passes = rank.passes(&ctx);
            let evaluated = passes.evaluate(rank.model.whole(), tokens, &mut NoHooks).unwrap();
            (
                values::<f32>(evaluated.buffer()),
                values::<f32>(rank.forward(0).0.buffer()),
            )
        };
        let samples = Some(SampleKey::default());
        let ((plain, trained), (dropped, trained_with)) = (losses(0.0, samples), losses(0.5, samples));
        assert_eq!((&plain, &plain), (&trained, &dropped), "{kind:?}");
        assert_ne!(trained, trained_with, "{kind:?}");
    }
}
