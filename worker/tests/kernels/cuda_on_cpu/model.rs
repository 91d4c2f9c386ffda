//! A whole network whose element-wise, normalisation, embedding and loss operations are the CUDA kernels, and its
//! attention; products are the CPU's.

use std::sync::Arc;

use ddp_worker::config::{Model as ModelConfig, ModelKind, Recompute};
use ddp_worker::device::{ArenaSpec, Compute, CpuDevice, DType, Device};
use ddp_worker::model::{
    Activation, ActivationPool, ChunkState, Context, Keep, NoHooks, Passes, SampleKey, build,
};

use super::device::Imitation;
use crate::local_model::{LocalGrads, LocalParams};

const BATCH: usize = 2;
const POSITIONS: usize = 6;
const VOCAB: usize = 11;

/// Losses and gradients of one micro-batch.
fn step(device: &Arc<dyn Device>, dropout: f32) -> [Vec<f32>; 2] {
    let config = ModelConfig {
        kind: ModelKind::Gpt2,
        n_layer: 2,
        n_head: 2,
        n_embd: 16,
        block_size: POSITIONS,
        vocab_size: None,
        dropout,
        ..ModelConfig::default()
    };
    let model = build(&config, VOCAB).unwrap();
    let compute = Compute::new(device.clone());
    let params = LocalParams::new(device.as_ref(), &model, DType::F32, 5).unwrap();
    let mut grads = LocalGrads::new(device.as_ref(), &model, DType::F32).unwrap();
    let buffer = |name: &str, dtype, bytes: &[u8]| {
        let spec = ArenaSpec::private(name, dtype, BATCH * POSITIONS);
        let buffer = device.alloc(&spec).unwrap().whole();
        compute.upload(&buffer, bytes);
        buffer
    };
    let tokens: Vec<i32> = (0..BATCH * POSITIONS).map(|i| (i * i % VOCAB) as i32).collect();
    let targets: Vec<i32> = tokens.iter().map(|t| (t * 7 + 3) % VOCAB as i32).collect();
    let tokens = buffer("tokens", DType::I32, bytemuck::cast_slice(&tokens));
    let targets = buffer("targets", DType::I32, bytemuck::cast_slice(&targets));
    let factors = [1.0 / (BATCH * POSITIONS) as f32; BATCH * POSITIONS];
    let dloss = buffer("dloss", DType::F32, bytemuck::cast_slice(&factors));
    let pool = ActivationPool::new(device.clone());
    let ctx = Context {
        targets: Some(&targets),
        dloss: Some(&dloss),
        keep: Keep::ForBackward(Recompute::Norms),
        samples: Some(SampleKey { seed: 3, first: 7 }),
        ..Context::new(&compute, &pool, &params, [BATCH, POSITIONS], DType::F32)
    };
    let passes = Passes {
        model: &model,
        ctx: &ctx,
    };
    let mut flight = ChunkState::new(model.whole());
    let tokens = Activation::borrowed(tokens, vec![BATCH, POSITIONS]);
    let losses = passes.forward(&mut flight, &tokens, &mut NoHooks).unwrap();
    let read = |buffer| -> Vec<f32> {
        let bytes = compute.download(buffer).unwrap();
        bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect()
    };
    let losses = read(losses.buffer());
    grads.start_step();
    passes
        .backward(&mut flight, None, &mut NoHooks, &mut grads)
        .unwrap();
    [losses, read(&grads.whole())]
}

#[test]
fn losses_and_gradients_are_those_of_the_cpu() {
    for dropout in [0.0, 0.3] {
        agrees_with_the_cpu(dropout);
    }
}

fn agrees_with_the_cpu(dropout: f32) {
    let device = Arc::new(Imitation::new(2));
    let found = step(&(device.clone() as Arc<dyn Device>), dropout);
    let expected = step(
        &(Arc::new(CpuDevice::new(1).unwrap()) as Arc<dyn Device>),
        dropout,
    );
    for (what, (found, expected)) in ["loss", "gradient"].iter().zip(found.iter().zip(&expected)) {
        assert_eq!(found.len(), expected.len());
        let most = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
            assert!(
                (found - expected).abs() <= 1e-5 * most,
                "{what} {i} is {found:e}, expected {expected:e}"
            );
        }
    }
    // Embedding, loss and its gradient; five normalisations; GELU and attention twice a block: more than these few.
    assert!(
        device.planned() > 20,
        "{} operations were kernels",
        device.planned()
    );
}
