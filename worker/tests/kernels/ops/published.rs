//! Llamas and Mixtrals that transformers has saved: loss and gradients beside its own, by `tests/parity/make_llama.py` and
//! `make_mixtral.py`.

use std::fs;
use std::path::{Path, PathBuf};

use ddp_worker::config::{Experts, Model, ModelKind, RopeScaling};
use ddp_worker::device::DType;
use ddp_worker::model::{Decoder, GradSink as _, ParamId, Params as _, Published, build};
use ddp_worker::pretrained::PretrainedWeights;
use safetensors::SafeTensors;
use serde::Deserialize;

use super::rig::{Rank, Rig, values};

/// Of sums in f32 in another order.
const TOLERANCE: f64 = 1e-5;

#[derive(Deserialize)]
struct Golden {
    /// Of each sample, one more than it has positions.
    tokens: Vec<Vec<i32>>,
    loss: f64,
    /// Of steps of gradient descent on the samples, the loss and the norm of the gradient.
    #[serde(default)]
    losses: Vec<f64>,
    #[serde(default)]
    norms: Vec<f64>,
    #[serde(default)]
    lr: f32,
}

fn folder(kind: ModelKind, name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/parity")
        .join(Published::of(kind).model_type)
        .join(name)
}

fn llama() -> Model {
    Model {
        kind: ModelKind::Llama,
        n_layer: 2,
        n_head: 4,
        n_embd: 16,
        n_inner: Some(24),
        block_size: 16,
        vocab_size: Some(32),
        ..Model::default()
    }
}

/// The network with the weights of a folder, and the loss and gradients of the samples there.
fn expect_parity(name: &str, config: &Model) {
    let folder = folder(config.kind, name);
    let golden: Golden =
        serde_json::from_str(&fs::read_to_string(folder.join("golden.json")).unwrap()).unwrap();
    let model = build(config, 32).unwrap();
    let weights = PretrainedWeights::open(&folder, config, &model.params).unwrap();
    let sizes = [1, golden.tokens.len(), golden.tokens[0].len() - 1];
    let mut rank = Rank::new(Rig::new(), model, DType::F32, sizes);
    for id in (0..rank.model.params.len()).map(ParamId) {
        let target = rank.params.get(id);
        let mut target = target.host_mut::<f32>().unwrap();
        weights.read(id, 0..weights.elements(id), &mut target).unwrap();
    }
    let batch = &rank.batches[0];
    let column = |from: usize| -> Vec<i32> {
        let rows = golden.tokens.iter();
        rows.flat_map(|row| row[from..].iter().copied().take(sizes[2]))
            .collect()
    };
    let inputs = batch.tokens.buffer();
    inputs.host_mut::<i32>().unwrap().copy_from_slice(&column(0));
    batch
        .targets
        .host_mut::<i32>()
        .unwrap()
        .copy_from_slice(&column(1));

    let loss = rank.step(0);
    let error = (loss - golden.loss).abs() / golden.loss;
    assert!(
        error < TOLERANCE,
        "{name}: {loss}, transformers has {}",
        golden.loss
    );
    expect_gradients(
        name,
        &mut rank,
        config,
        &fs::read(folder.join("gradients.safetensors")).unwrap(),
    );
    expect_steps(name, &mut rank, &golden);
}

/// Those of the step that was computed last.
fn expect_gradients(name: &str, rank: &mut Rank, config: &Model, safetensors: &[u8]) {
    let expected = SafeTensors::deserialize(safetensors).unwrap();
    let (published, decoder) = (Published::of(config.kind), Decoder::of(config));
    let mut compared = 0;
    for id in (0..rank.model.params.len()).map(ParamId) {
        let found = values::<f32>(&rank.grads.grad(id).unwrap().buffer);
        let spec = &rank.model.params[id.0];
        for tensor in published.tensors(&decoder, &spec.key, &spec.global_shape) {
            let expected = expected.tensor(&tensor.name).unwrap();
            assert_eq!(expected.shape(), tensor.shape);
            let expected = expected.data().chunks_exact(4);
            let expected = expected.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
            let pairs = found[tensor.elements.clone()].iter().zip(expected);
            let [difference, length] = pairs.fold([0.0; 2], |[difference, length], (found, expected)| {
                let (found, expected) = (f64::from(*found), f64::from(expected));
                [difference + (found - expected).powi(2), length + expected.powi(2)]
            });
            // An expert that no position goes to has no gradient.
            let is_expert = tensor.name.contains("experts");
            assert!(
                length > 0.0 || is_expert,
                "{name}: `{}` has no gradient",
                tensor.name
            );
            let error = (difference / length.max(f64::MIN_POSITIVE)).sqrt();
            assert!(
                error < TOLERANCE,
                "{name}: the gradient of `{}` is off by {error:e}",
                tensor.name
            );
            compared += 1;
        }
    }
    assert_eq!(compared, expected.len());
}

/// Losses and norms of steps of gradient descent.
fn expect_steps(name: &str, rank: &mut Rank, golden: &Golden) {
    for (step, (loss, norm)) in golden.losses.iter().zip(&golden.norms).enumerate() {
        let mut squares = 0.0;
        let found = rank.step(0);
        for id in (0..rank.model.params.len()).map(ParamId) {
            let gradient = values::<f32>(&rank.grads.grad(id).unwrap().buffer);
            let param = rank.params.get(id);
            for (param, gradient) in param.host_mut::<f32>().unwrap().iter_mut().zip(gradient) {
                *param -= golden.lr * gradient;
                squares += f64::from(gradient).powi(2);
            }
        }
        for (what, found, expected) in [("loss", found, loss), ("norm", squares.sqrt(), norm)] {
            let error = (found - expected).abs() / expected;
            assert!(
                error < TOLERANCE,
                "{name}, step {step}: {what} {found}, transformers has {expected}"
            );
        }
    }
}

#[test]
fn scaled_positions_and_grouped_queries() {
    let config = Model {
        n_kv_head: Some(2),
        norm_eps: 1e-6,
        rope_theta: 500_000.0,
        rope_scaling: Some(RopeScaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_positions: 8,
        }),
        ..llama()
    };
    expect_parity("scaled", &config);
}

#[test]
fn a_tied_head_and_halves() {
    let config = Model {
        n_kv_head: Some(1),
        tied: Some(true),
        ..llama()
    };
    expect_parity("tied", &config);
}

fn mixtral(n_layer: usize, aux_loss: f32) -> Model {
    Model {
        kind: ModelKind::Mixtral,
        n_layer,
        n_kv_head: Some(2),
        n_inner: Some(16),
        experts: Experts {
            aux_loss,
            ..Model::default().experts
        },
        ..llama()
    }
}

#[test]
fn thirty_steps_of_a_mixtral() {
    expect_parity("plain", &mixtral(2, 0.0));
}

#[test]
fn thirty_steps_of_a_mixtral_with_its_balancing_loss() {
    expect_parity("balanced", &mixtral(1, 0.1));
}
