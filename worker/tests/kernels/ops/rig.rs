//! What the tests share: a device with buffers made from vectors, deterministic numbers, the gradient check.

use std::sync::Arc;

use ddp_worker::config::{self, ModelKind, Recompute};
use ddp_worker::device::{
    ArenaSpec, Buffer, Compute, Cpu, CpuDevice, DType, Device, DeviceError, Element, Isa,
};
use ddp_worker::model::{
    Activation, ActivationPool, ChunkState, Context, Keep, Model, NoHooks, Passes, SampleKey,
};
use ddp_worker::ops::Op;

use crate::local_model::{LocalGrads, LocalParams};

/// A CPU and one stream of it.
pub(crate) struct Rig {
    pub(crate) device: Arc<CpuDevice>,
    compute: Compute,
}

impl Rig {
    pub(crate) fn new() -> Self {
        Self::with(1, Isa::detect())
    }

    pub(crate) fn with(threads: usize, isa: Isa) -> Self {
        let device = Arc::new(CpuDevice::with_cpu(Cpu::with_isa(threads, isa).unwrap()));
        let compute = Compute::new(device.clone());
        Self { device, compute }
    }

    pub(crate) fn empty(&self, dtype: DType, len: usize) -> Buffer {
        let spec = ArenaSpec::private("test", dtype, len);
        self.device.alloc(&spec).unwrap().whole()
    }

    pub(crate) fn buffer<T: Element>(&self, values: &[T]) -> Buffer {
        let buffer = self.empty(T::DTYPE, values.len());
        buffer.host_mut::<T>().unwrap().copy_from_slice(values);
        buffer
    }

    /// The words of what went wrong on its stream.
    pub(crate) fn device_error(&self) -> String {
        let error = self.compute.synchronize();
        error.expect_err("an operation that fails").to_string()
    }

    pub(crate) fn run(&self, op: impl Into<Op>) {
        self.try_run(op).unwrap();
    }

    pub(crate) fn try_run(&self, op: impl Into<Op>) -> Result<(), DeviceError> {
        self.compute.enqueue(op);
        self.compute.synchronize()
    }
}

pub(crate) fn values<T: Element>(buffer: &Buffer) -> Vec<T> {
    buffer.host::<T>().unwrap().to_vec()
}

/// As f64, which every type fits into.
pub(crate) fn wide_values(buffer: &Buffer) -> Vec<f64> {
    match buffer.dtype() {
        DType::F64 => values(buffer),
        DType::Bf16 => values::<half::bf16>(buffer).into_iter().map(f64::from).collect(),
        _ => values::<f32>(buffer).into_iter().map(f64::from).collect(),
    }
}

pub(crate) use crate::op_cases::numbers::numbers;

pub(crate) fn numbers_f32(seed: u64, len: usize) -> Vec<f32> {
    numbers(seed, len).into_iter().map(|x| x as f32).collect()
}

/// Compares `d(Σ dout·out)/d(input)` of every element of every input with central differences.
///
/// `forward` takes the inputs to the output; `backward` takes inputs and `dout` to one gradient an input.
pub(crate) fn check_gradients(
    inputs: &[Vec<f64>],
    forward: impl Fn(&[Vec<f64>]) -> Vec<f64>,
    backward: impl Fn(&[Vec<f64>], &[f64]) -> Vec<Vec<f64>>,
) {
    let dout = numbers(99, forward(inputs).len());
    let found = backward(inputs, &dout);
    assert_eq!(found.len(), inputs.len(), "one gradient an input");
    let objective = |inputs: &[Vec<f64>]| forward(inputs).iter().zip(&dout).map(|(o, d)| o * d).sum::<f64>();
    let mut inputs = inputs.to_vec();
    for (which, found) in found.iter().enumerate() {
        assert_eq!(found.len(), inputs[which].len(), "gradient {which}");
        for (element, &found) in found.iter().enumerate() {
            const STEP: f64 = 1e-5;
            let value = inputs[which][element];
            let mut at = |x: f64| {
                inputs[which][element] = x;
                objective(&inputs)
            };
            let expected = (at(value + STEP) - at(value - STEP)) / (2.0 * STEP);
            inputs[which][element] = value;
            assert_close(
                found,
                expected,
                1e-6,
                &format!("input {which}, element {element}"),
            );
        }
    }
}

/// Relative to the size of the numbers, but not below 10⁻³ of 1.
pub(crate) fn assert_close(found: f64, expected: f64, tolerance: f64, what: &str) {
    let error = (found - expected).abs() / (found.abs() + expected.abs()).max(1e-3);
    assert!(
        error < tolerance,
        "{what}: found {found:e}, expected {expected:e}, relative error {error:e}"
    );
}

/// A small network.
pub(crate) fn config(kind: ModelKind) -> config::Model {
    config::Model {
        kind,
        n_layer: 2,
        n_head: 2,
        n_embd: 8,
        block_size: 6,
        vocab_size: None,
        dropout: 0.0,
        ..config::Model::default()
    }
}

/// A model on one rank, with its tokens.
pub(crate) struct Rank {
    pub(crate) rig: Rig,
    pub(crate) model: Model,
    pub(crate) params: LocalParams,
    pub(crate) grads: LocalGrads,
    pub(crate) pool: ActivationPool,
    pub(crate) batches: Vec<Batch>,
    dtype: DType,
}

/// One micro-batch.
pub(crate) struct Batch {
    pub(crate) tokens: Activation,
    pub(crate) targets: Buffer,
    pub(crate) dloss: Buffer,
}

impl Rank {
    /// `batches` micro-batches of `batch` samples; targets are arbitrary functions of the tokens.
    pub(crate) fn new(rig: Rig, model: Model, dtype: DType, sizes: [usize; 3]) -> Self {
        Self::with_grads(rig, model, (dtype, dtype), sizes)
    }

    /// The same with gradients of another type than parameters and activations.
    pub(crate) fn with_grads(
        rig: Rig,
        model: Model,
        (dtype, grad_dtype): (DType, DType),
        [batches, batch, positions]: [usize; 3],
    ) -> Self {
        let vocab = model.params[0].global_shape[0];
        let rows = batch * positions;
        let batches = (0..batches).map(|micro_batch| {
            let random = numbers(1000 + micro_batch as u64, rows);
            let tokens: Vec<i32> = random
                .iter()
                .map(|x| ((x + 1.0) / 2.0 * vocab as f64) as i32)
                .collect();
            let targets: Vec<i32> = tokens.iter().map(|t| (t * 7 + 3) % vocab as i32).collect();
            let dloss = match dtype {
                DType::F64 => rig.buffer(&vec![1.0 / rows as f64; rows]),
                _ => rig.buffer(&vec![1.0 / rows as f32; rows]),
            };
            Batch {
                tokens: Activation::borrowed(rig.buffer(&tokens), vec![batch, positions]),
                targets: rig.buffer(&targets),
                dloss,
            }
        });
        let batches = batches.collect();
        let params = LocalParams::new(rig.device.as_ref(), &model, dtype, 5).unwrap();
        let grads = LocalGrads::new(rig.device.as_ref(), &model, grad_dtype).unwrap();
        let pool = ActivationPool::new(rig.device.clone());
        Self {
            rig,
            model,
            params,
            grads,
            pool,
            batches,
            dtype,
        }
    }

    pub(crate) fn context(&self, micro_batch: usize) -> Context<'_> {
        let shape = self.batches[micro_batch].tokens.shape().try_into().unwrap();
        Context {
            targets: Some(&self.batches[micro_batch].targets),
            dloss: Some(&self.batches[micro_batch].dloss),
            position_weight: 1.0 / self.batches[micro_batch].dloss.len() as f64,
            keep: Keep::ForBackward(Recompute::Norms),
            samples: Some(SampleKey {
                seed: 1,
                first: 100 * micro_batch as u64,
            }),
            ..Context::new(&self.rig.compute, &self.pool, &self.params, shape, self.dtype)
        }
    }

    pub(crate) fn passes<'a>(&'a self, ctx: &'a Context<'a>) -> Passes<'a> {
        Passes {
            model: &self.model,
            ctx,
        }
    }

    pub(crate) fn forward(&self, micro_batch: usize) -> (Activation, ChunkState) {
        let mut flight = ChunkState::new(self.model.whole());
        let ctx = self.context(micro_batch);
        let tokens = &self.batches[micro_batch].tokens;
        let losses = self
            .passes(&ctx)
            .forward(&mut flight, tokens, &mut NoHooks)
            .unwrap();
        self.rig.compute.synchronize().unwrap();
        (losses, flight)
    }

    pub(crate) fn backward(&mut self, micro_batch: usize, flight: &mut ChunkState) {
        let mut grads = self.grads.clone();
        let ctx = self.context(micro_batch);
        let done = self.passes(&ctx).backward(flight, None, &mut NoHooks, &mut grads);
        done.unwrap();
        self.rig.compute.synchronize().unwrap();
        self.grads = grads;
    }

    /// In how many blocks each parameter is used: the contributions to its gradient in one micro-batch.
    pub(crate) fn uses(&self) -> Vec<usize> {
        let mut uses = vec![0; self.model.params.len()];
        for id in self.model.blocks.iter().flat_map(|block| block.params()) {
            uses[id.0] += 1;
        }
        uses
    }

    /// One micro-batch, forward and backward; the mean loss.
    pub(crate) fn step(&mut self, micro_batch: usize) -> f64 {
        self.grads.start_step();
        let (losses, mut flight) = self.forward(micro_batch);
        self.backward(micro_batch, &mut flight);
        mean(&losses)
    }
}

pub(crate) fn mean(losses: &Activation) -> f64 {
    let losses = wide_values(losses.buffer());
    losses.iter().sum::<f64>() / losses.len() as f64
}
