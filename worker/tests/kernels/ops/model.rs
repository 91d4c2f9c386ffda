//! Networks as a whole: schedules of micro-batches, memory, what they can see, that they learn.

use std::collections::BTreeMap;

use ddp_worker::config::{self, Experts, Model, ModelKind, RouterScore};
use ddp_worker::device::{DType, DeviceError, Event};
use ddp_worker::model::{
    ChunkState, Context, GradSink, GradSlot, NoHooks, ParamId, Params as _, SampleKey, build,
};

use super::rig::{Rank, Rig, assert_close, config, mean, numbers, values};
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
            uses: rank.uses(),
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
    assert!(2 * evaluating.pool.allocated_bytes() < training.pool.allocated_bytes());
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

const LAYERS: usize = 2;

/// Values of the parameters of a Llama of [`LAYERS`] layers, of which the output of each feed-forward layer has a factor.
fn llama(factors: [f64; LAYERS]) -> (Rank, BTreeMap<String, Vec<f64>>) {
    let rank = f64_rank(&Model {
        n_inner: Some(6),
        ..config(ModelKind::Llama)
    });
    let mut all = BTreeMap::new();
    for (id, spec) in rank.model.params.iter().enumerate() {
        let layer =
            (0..LAYERS).find(|layer| spec.key == format!("model.layers.{layer}.mlp.down_proj.weight"));
        let factor = 0.7 * layer.map_or(1.0, |layer| factors[layer]);
        let start = numbers(id as u64, spec.len()).into_iter();
        let start: Vec<f64> = start.map(|x| factor * x).collect();
        let param = rank.params.get(ParamId(id));
        param.host_mut::<f64>().unwrap().copy_from_slice(&start);
        all.insert(spec.key.clone(), start);
    }
    (rank, all)
}

fn f64_rank(model: &Model) -> Rank {
    Rank::new(Rig::new(), build(model, 11).unwrap(), DType::F64, [1, 2, 6])
}

/// Each expert, shared ones too, has the values of the Llama's feed-forward layer, and the router scores all alike.
fn with_equal_experts(experts: Experts) -> Rank {
    let rank = f64_rank(&Model {
        experts,
        n_inner: Some(6),
        ..config(ModelKind::Mixtral)
    });
    let (_, llama) = llama([1.0; LAYERS]);
    for (id, spec) in rank.model.params.iter().enumerate() {
        let param = rank.params.get(ParamId(id));
        let mut param = param.host_mut::<f64>().unwrap();
        let key = spec.key.replace("block_sparse_moe.shared_experts.", "mlp.");
        let key = key.replace("block_sparse_moe.experts.", "mlp.");
        if let Some(values) = llama.get(&key) {
            let parts = param.chunks_exact_mut(values.len());
            parts.for_each(|part| part.copy_from_slice(values));
        } else {
            assert!(key.ends_with("block_sparse_moe.gate.weight"), "{key}");
            param.fill(0.0);
        }
    }
    rank
}

/// With equal experts, only the sum of their weights shows: it is a factor of the layer's output.
#[test]
fn the_keys_of_experts_do_what_they_say() {
    let all = Experts {
        count: 4,
        top_k: 2,
        ..Model::default().experts
    };
    let one = Experts { top_k: 1, ..all };
    let [sigmoid, every, shared] = [
        Experts {
            score: RouterScore::Sigmoid,
            ..one
        },
        Experts { every: 2, ..one },
        Experts { shared: 1, ..all },
    ];
    // Room for half of the positions: those of the first sample.
    let capacity = Experts {
        capacity: Some(2.0),
        ..every
    };
    // By sample and layer.
    for (experts, factors) in [
        (all, [[1.0; LAYERS]; 2]),
        (one, [[0.25; LAYERS]; 2]),
        (Experts { count: 5, ..one }, [[0.2; LAYERS]; 2]),
        (sigmoid, [[0.5; LAYERS]; 2]),
        (shared, [[2.0; LAYERS]; 2]),
        (every, [[1.0, 0.25]; 2]),
        (capacity, [[1.0, 0.25], [1.0, 0.0]]),
    ] {
        let found = values::<f64>(with_equal_experts(experts).forward(0).0.buffer());
        for (sample, factors) in factors.into_iter().enumerate() {
            let (rank, _) = llama(factors);
            let expected = values::<f64>(rank.forward(0).0.buffer());
            let own = sample * 6..(sample + 1) * 6;
            for (found, expected) in found[own.clone()].iter().zip(&expected[own]) {
                assert_close(*found, *expected, 1e-12, &format!("sample {sample}, {experts:?}"));
            }
        }
    }
    // The router's gradient has no other sources: equal experts make its choice indifferent.
    let gradient = |aux_loss, z_loss| {
        let mut rank = with_equal_experts(Experts {
            aux_loss,
            z_loss,
            ..all
        });
        rank.step(0);
        let params = rank.model.params.iter();
        let router = params
            .enumerate()
            .find(|(_, spec)| spec.key.ends_with("gate.weight"));
        let (id, _) = router.expect("a router");
        values::<f64>(&rank.grads.grad(ParamId(id)).unwrap().buffer)
    };
    let largest = |gradient: &[f64]| gradient.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    assert!(largest(&gradient(0.0, 0.0)) < 1e-12);
    for [aux, z] in [[0.01, 0.0], [0.0, 0.01]] {
        let (single, double) = (gradient(aux, z), gradient(2.0 * aux, 2.0 * z));
        assert!(largest(&single) > 1e-4, "{single:?}");
        for (single, double) in single.iter().zip(&double) {
            assert_close(
                2.0 * single,
                *double,
                1e-9,
                &format!("aux_loss {aux}, z_loss {z}"),
            );
        }
    }
}
