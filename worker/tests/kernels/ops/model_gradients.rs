//! Whole networks against finite differences, in f64.

use ddp_worker::config::{Experts, Model, ModelKind, RopeScaling, RouterScore};
use ddp_worker::device::DType;
use ddp_worker::model::build;

use super::rig::{Rank, Rig, assert_close, config, mean, numbers, values};

fn check(config: &Model) {
    let model = build(config, 11).unwrap();
    let mut rank = Rank::new(Rig::new(), model, DType::F64, [1, 2, 5]);
    // Larger than the first values, so that every path carries a gradient.
    let whole = rank.params.whole();
    let start: Vec<f64> = numbers(3, whole.len()).iter().map(|x| 0.7 * x).collect();
    whole.host_mut::<f64>().unwrap().copy_from_slice(&start);
    rank.step(0);
    assert_eq!(rank.grads.contributions(), rank.model.uses());
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
        check(&Model {
            experts,
            n_inner: Some(6),
            ..config(ModelKind::Mixtral)
        });
    }
}
