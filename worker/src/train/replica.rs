//! The model on this rank, and the memory of one micro-batch.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::TrainError;
use super::world::World;
use crate::config::TrainConfig;
use crate::device::{ArenaSpec, Buffer, DType, DeviceError, Event, Sharing};
use crate::model::{
    self, Activation, ActivationPool, Context, GradSink, GradSlot, Model, ParamId, Saved, StepKey,
};
use crate::ops::Fill;
use crate::parallel::Weights;

/// See the module.
pub(super) struct Replica {
    pub(super) model: Model,
    pub(super) weights: Arc<dyn Weights>,
    pub(super) pool: ActivationPool,
    world: World,
    saved: Vec<Saved>,
    /// Tokens and targets, `[B, T]`, i32.
    inputs: Buffer,
    targets: Buffer,
    shape: Vec<usize>,
    /// Factor of each position's gradient: 1/(B·T), for the gradient of the mean.
    dloss: Buffer,
}

/// One micro-batch on the host.
pub(super) struct Batch {
    pub(super) inputs: Vec<i32>,
    pub(super) targets: Vec<i32>,
}

impl Batch {
    pub(super) fn new(len: usize) -> Self {
        Self {
            inputs: vec![0; len],
            targets: vec![0; len],
        }
    }
}

/// Time of the two halves of a micro-batch, as the host saw it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PassTimes {
    pub(super) forward: Duration,
    pub(super) backward: Duration,
}

impl Replica {
    pub(super) fn new(
        world: &World,
        model: Model,
        weights: Arc<dyn Weights>,
        config: &TrainConfig,
    ) -> Result<Self, TrainError> {
        let alloc = |name: &str, dtype, len| {
            world.device.alloc(&ArenaSpec {
                name: name.into(),
                dtype,
                len,
                sharing: Sharing::Private,
            })
        };
        let shape = vec![config.train.micro_batch, config.model.block_size];
        let positions: usize = shape.iter().product();
        let dloss = alloc("loss factors", DType::F32, positions)?.whole();
        let factor = Fill {
            out: dloss.clone(),
            value: 1.0 / positions as f64,
        };
        world.device.enqueue(world.stream, factor.into());
        Ok(Self {
            saved: model::saved_for(&model),
            inputs: alloc("tokens", DType::I32, positions)?.whole(),
            targets: alloc("targets", DType::I32, positions)?.whole(),
            pool: ActivationPool::new(world.device.clone()),
            world: world.clone(),
            shape,
            dloss,
            weights,
            model,
        })
    }

    /// The first values of the parameters that this rank owns, from the seed alone.
    pub(super) fn initialise(&self, seed: u64) {
        for piece in self.weights.sharding().own_pieces() {
            let spec = &self.model.params[piece.param.0];
            let mut values = vec![0_f32; piece.elements.len()];
            model::fill_init(spec, piece.param, seed, piece.elements, &mut values);
            let target = self.weights.own().slice(&piece.place);
            self.world
                .device
                .upload(self.world.stream, &target, bytemuck::cast_slice(&values));
        }
    }

    /// Forward and backward of one micro-batch. Returns the loss of each position, still on the device.
    pub(super) fn learn(
        &mut self,
        batch: &Batch,
        key: StepKey,
        grads: &mut dyn GradSink,
    ) -> Result<(Activation, PassTimes), TrainError> {
        let started = Instant::now();
        let tokens = self.upload(batch);
        let mut saved = std::mem::take(&mut self.saved);
        let ctx = self.context(key);
        let losses = model::forward(&self.model, &ctx, self.weights.as_ref(), &tokens, &mut saved)
            .map_err(|error| self.cause(error))?;
        let turned = Instant::now();
        self.world.check()?;
        let dloss = Activation::borrowed(self.dloss.clone(), vec![self.dloss.len()]);
        let mut grads = Interruptible {
            grads,
            world: &self.world,
        };
        model::backward(
            &self.model,
            &ctx,
            self.weights.as_ref(),
            &mut saved,
            &dloss,
            &mut grads,
        )
        .map_err(|error| self.cause(error))?;
        let times = PassTimes {
            forward: turned - started,
            backward: turned.elapsed(),
        };
        self.saved = saved;
        Ok((losses, times))
    }

    /// Sum of the losses of a micro-batch's positions, ignored ones not counted.
    pub(super) fn total_loss(&self, batch: &Batch) -> Result<f64, TrainError> {
        let tokens = self.upload(batch);
        let losses = model::evaluate(
            &self.model,
            &self.context(StepKey::default()),
            self.weights.as_ref(),
            &tokens,
        )
        .map_err(|error| self.cause(error))?;
        self.sum(&losses)
    }

    /// Sum of losses on the device. Synchronises.
    pub(super) fn sum(&self, losses: &Activation) -> Result<f64, TrainError> {
        let bytes = self.world.device.download(self.world.stream, losses.buffer())?;
        let losses = bytes
            .chunks_exact(size_of::<f32>())
            .map(bytemuck::pod_read_unaligned::<f32>);
        Ok(losses.map(f64::from).sum())
    }

    /// Positions of a micro-batch.
    pub(super) fn positions(&self) -> usize {
        self.dloss.len()
    }

    /// An operation may have failed because its parameters could not be gathered.
    fn cause(&self, error: DeviceError) -> TrainError {
        self.weights
            .failure()
            .map_or_else(|| error.into(), TrainError::from)
    }

    fn upload(&self, batch: &Batch) -> Activation {
        let World { device, stream, .. } = &self.world;
        device.upload(*stream, &self.inputs, bytemuck::cast_slice(&batch.inputs));
        device.upload(*stream, &self.targets, bytemuck::cast_slice(&batch.targets));
        Activation::borrowed(self.inputs.clone(), self.shape.clone())
    }

    fn context(&self, key: StepKey) -> Context<'_> {
        Context {
            device: self.world.device.as_ref(),
            stream: self.world.stream,
            pool: &self.pool,
            targets: &self.targets,
            dtype: DType::F32,
            key,
        }
    }
}

/// Ends backward soon after the generation is over.
struct Interruptible<'a> {
    grads: &'a mut dyn GradSink,
    world: &'a World,
}

impl GradSink for Interruptible<'_> {
    fn grad(&mut self, id: ParamId) -> Result<GradSlot, DeviceError> {
        self.grads.grad(id)
    }

    fn contributed(&mut self, id: ParamId, at: Event) -> Result<(), DeviceError> {
        if let Some(cause) = self.world.cancel.cause() {
            return Err(DeviceError::Upstream(format!("the generation is over: {cause}")));
        }
        self.grads.contributed(id, at)
    }
}
