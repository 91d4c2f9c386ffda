//! Whole networks against finite differences, in f64.

use ddp_worker::config::{Experts, Model, ModelKind, RopeScaling, RouterScore};
use ddp_worker::device::{Buffer, DType};
use ddp_worker::model::{Activation, ChunkState, Context, NoHooks, build};

use super::rig::{Rank, Rig, assert_close, config, mean, numbers, values};

/// With values larger than the first ones, so that every path carries a gradient.
fn rank(config: &Model) -> (Rank, Buffer, Vec<f64>) {
    let model = build(config, 11).unwrap();
    let rank = Rank::new(Rig::new(), model, DType::F64, [1, 2, 5]);
    let whole = rank.params.whole();
    let start: Vec<f64> = numbers(3, whole.len()).iter().map(|x| 0.7 * x).collect();
    whole.host_mut::<f64>().unwrap().copy_from_slice(&start);
    (rank, whole, start)
}

fn check(config: &Model) {
    let (mut rank, whole, start) = rank(config);
    rank.step(0);
    assert_eq!(rank.grads.contributions(), rank.uses());
    let found = values::<f64>(&rank.grads.whole());
    for (i, &found) in found.iter().enumerate() {
        const STEP: f64 = 1e-5;
        let at = |x: f64| {
            whole.host_mut::<f64>().unwrap()[i] = x;
            mean(&rank.forward(0).0)
        };
        let expected = (at(start[i] + STEP) - at(start[i] - STEP)) / (2.0 * STEP);
        whole.host_mut::<f64>().unwrap()[i] = start[i];
        assert_close(found, expected, 1e-6, &format!("element {i} of all parameters"));
    }
}

#[test]
fn gpt2() {
    check(&config(ModelKind::Gpt2));
}

#[test]
fn mlp() {
    check(&config(ModelKind::Mlp));
}

#[test]
fn gpt2_with_dropout() {
    check(&Model {
        dropout: 0.3,
        ..config(ModelKind::Gpt2)
    });
}

/// Heads that share keys and values, and scaled rotations; a head of its own and a tied one.
#[test]
fn llama() {
    for tied in [false, true] {
        check(&Model {
            n_kv_head: Some(1),
            tied: Some(tied),
            rope_scaling: Some(RopeScaling {
                factor: 4.0,
                low_freq_factor: 1.0,
                high_freq_factor: 2.0,
                original_positions: 40,
            }),
            rope_theta: 50.0,
            ..config(ModelKind::Llama)
        });
    }
}

/// Experts in every layer, and in every second one beside an expert that all positions go to; with a score that is the only
/// one; with less room than positions.
#[test]
fn mixtral() {
    let all = Experts {
        count: 4,
        top_k: 2,
        aux_loss: 0.0,
        ..Model::default().experts
    };
    for experts in [
        all,
        Experts {
            every: 2,
            shared: 1,
            score: RouterScore::Sigmoid,
            ..all
        },
        Experts { top_k: 1, ..all },
        Experts {
            capacity: Some(0.5),
            ..all
        },
    ] {
        check(&mixtral_of(experts));
    }
}

fn mixtral_of(experts: Experts) -> Model {
    Model {
        experts,
        n_inner: Some(6),
        ..config(ModelKind::Mixtral)
    }
}

/// The losses are sums over the layers. What is chosen has no gradient: the loads are those of the start.
#[test]
fn auxiliary_losses_of_all_layers_are_added_up() {
    let experts = Experts {
        count: 4,
        top_k: 2,
        aux_loss: 0.5,
        z_loss: 0.25,
        ..Model::default().experts
    };
    let without = Experts {
        aux_loss: 0.0,
        z_loss: 0.0,
        ..experts
    };
    let (mut rank_with, whole, start) = rank(&mixtral_of(experts));
    rank_with.step(0);
    let mut rank_without = rank(&mixtral_of(without)).0;
    rank_without.step(0);
    let [found, base] = [&rank_with, &rank_without].map(|rank| values::<f64>(&rank.grads.whole()));
    let (layers, width, positions) = (2, 3 * experts.count + 1, 10.0);
    let counted = || {
        let routers = rank_with.rig.buffer(&vec![0.0_f64; layers * width]);
        let ctx = Context {
            routers: Some(&routers),
            ..rank_with.context(0)
        };
        let mut state = ChunkState::new(rank_with.model.whole());
        let tokens = &rank_with.batches[0].tokens;
        let forward = rank_with.passes(&ctx).forward(&mut state, tokens, &mut NoHooks);
        forward.unwrap();
        values::<f64>(&routers)
    };
    let loads = counted();
    let losses = || {
        let (mut sum, found) = (0.0, counted());
        for (layer, loads) in found.chunks(width).zip(loads.chunks(width)) {
            let pairs = loads[..experts.count].iter().zip(&layer[experts.count..]);
            let balance: f64 = pairs.map(|(load, probability)| load * probability).sum();
            sum += 0.5 * experts.count as f64 * balance / (positions * positions);
            sum += 0.25 * layer[2 * experts.count] / positions;
        }
        sum
    };
    for i in (0..start.len()).step_by(3) {
        const STEP: f64 = 1e-5;
        let at = |x: f64| {
            whole.host_mut::<f64>().unwrap()[i] = x;
            losses()
        };
        let expected = (at(start[i] + STEP) - at(start[i] - STEP)) / (2.0 * STEP);
        whole.host_mut::<f64>().unwrap()[i] = start[i];
        assert_close(
            found[i] - base[i],
            expected,
            1e-6,
            &format!("element {i} of all parameters"),
        );
    }
}

/// Evaluation drops nothing, whatever room the experts have in training.
#[test]
fn a_capacity_is_for_training_alone() {
    let all = Experts {
        count: 4,
        top_k: 2,
        ..Model::default().experts
    };
    let losses = |capacity| {
        let (rank, ..) = rank(&mixtral_of(Experts { capacity, ..all }));
        let (ctx, tokens) = (rank.context(0), &rank.batches[0].tokens);
        let evaluated = rank
            .passes(&ctx)
            .evaluate(rank.model.whole(), tokens, &mut NoHooks);
        [evaluated.unwrap(), rank.forward(0).0].map(|losses: Activation| values::<f64>(losses.buffer()))
    };
    let ([roomy, trained], [narrow, dropped]) = (losses(None), losses(Some(0.5)));
    assert_eq!(roomy, narrow);
    assert_eq!(roomy, trained);
    assert_ne!(trained, dropped);
}
