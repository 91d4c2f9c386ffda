//! The model on this rank, and the memory of one micro-batch.

use std::sync::Arc;

use super::TrainError;
use super::feed::Feed;
use super::world::World;
use crate::config::TrainConfig;
use crate::device::{ArenaSpec, Buffer, DType, DeviceError, Event};
use crate::model::{
    self, Activation, ActivationPool, Context, GradSink, GradSlot, Model, ParamId, Saved, StepKey, Unused,
};
use crate::ops::Fill;
use crate::optim::{AdamW, evict};
use crate::parallel::Weights;
use crate::pretrained::PretrainedWeights;

/// See the module.
pub(super) struct Replica {
    pub(super) model: Model,
    pub(super) weights: Arc<dyn Weights>,
    pub(super) pool: ActivationPool,
    pub(super) world: World,
    pub(super) saved: Vec<Saved>,
    feed: Feed,
    /// Factor of each position's gradient.
    dloss: Buffer,
    /// What `dloss` is filled with.
    factor: Option<f64>,
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

impl Replica {
    /// `activations` is what [`model::rehearse`] says of the model.
    pub(super) fn new(
        world: &World,
        model: Model,
        weights: Arc<dyn Weights>,
        activations: usize,
        config: &TrainConfig,
    ) -> Result<Self, TrainError> {
        let shape = vec![config.train.micro_batch, config.model.block_size];
        let positions: usize = shape.iter().product();
        let dloss = world
            .device
            .alloc(&ArenaSpec::private("loss factors", DType::F32, positions))?;
        Ok(Self {
            saved: model::saved_for(&model),
            feed: Feed::new(world, shape)?,
            pool: ActivationPool::planned(world.device.clone(), activations)?,
            world: world.clone(),
            dloss: dloss.whole(),
            factor: None,
            weights,
            model,
        })
    }

    /// The first values of the parameters that this rank owns, into the masters: published ones as far as there are some,
    /// the others from the seed alone.
    pub(super) fn initialise(
        &self,
        adamw: &AdamW,
        seed: u64,
        pretrained: Option<&PretrainedWeights>,
    ) -> Result<(), TrainError> {
        let masters = adamw.masters(self.weights.own());
        for piece in self.weights.sharding().own_pieces() {
            let spec = &self.model.params[piece.param.0];
            let (id, elements) = (piece.param, piece.elements);
            let mut values = vec![0_f32; elements.len()];
            let published = pretrained.map_or(0, |weights| weights.elements(id));
            let cut = published.clamp(elements.start, elements.end);
            let (first, rest) = values.split_at_mut(cut - elements.start);
            if let Some(weights) = pretrained {
                weights.read(id, elements.start..cut, first)?;
            }
            model::fill_init(spec, id, seed, cut..elements.end, rest);
            let target = masters.slice(&piece.place);
            adamw
                .device()
                .upload(self.world.stream, &target, bytemuck::cast_slice(&values));
            evict(&target);
        }
        Ok(())
    }

    /// Makes each position's gradient count by `factor`: 1/(B·T) for the gradient of a micro-batch's mean.
    pub(super) fn weigh(&mut self, factor: f64) {
        if self.factor == Some(factor) {
            return;
        }
        self.factor = Some(factor);
        let fill = Fill {
            out: self.dloss.clone(),
            value: factor,
        };
        self.world.device.enqueue(self.world.stream, fill.into());
    }

    /// Forward of one micro-batch, whose backward comes next. Returns the loss of each position, still on the device.
    pub(super) fn forward(&mut self, batch: &Batch, key: StepKey) -> Result<Activation, TrainError> {
        let tokens = self.upload(batch);
        let mut saved = std::mem::take(&mut self.saved);
        let ctx = self.context(key);
        let losses = model::forward(&self.model, &ctx, self.weights.as_ref(), &tokens, &mut saved)
            .map_err(|error| self.cause(error))?;
        self.saved = saved;
        Ok(losses)
    }

    /// Backward of the micro-batch that went forward last.
    pub(super) fn backward(&mut self, key: StepKey, grads: &mut dyn GradSink) -> Result<(), TrainError> {
        self.world.check()?;
        let mut saved = std::mem::take(&mut self.saved);
        let mut grads = Interruptible {
            grads,
            world: &self.world,
        };
        model::backward(
            &self.model,
            &self.context(key),
            self.weights.as_ref(),
            &mut saved,
            &mut grads,
        )
        .map_err(|error| self.cause(error))?;
        self.saved = saved;
        Ok(())
    }

    /// Sum of the losses of a micro-batch's positions, ignored ones not counted.
    pub(super) fn total_loss(&mut self, batch: &Batch) -> Result<f64, TrainError> {
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
    pub(super) fn cause(&self, error: DeviceError) -> TrainError {
        self.weights
            .failure()
            .map_or_else(|| error.into(), TrainError::from)
    }

    /// Brings a micro-batch to the device, and returns its tokens.
    pub(super) fn upload(&mut self, batch: &Batch) -> Activation {
        self.feed.bring(batch);
        self.feed.inputs()
    }

    pub(super) fn context(&self, key: StepKey) -> Context<'_> {
        Context {
            device: self.world.device.as_ref(),
            stream: self.world.stream,
            pool: &self.pool,
            targets: self.feed.targets(),
            dloss: Some(&self.dloss),
            dtype: self.model.dtype(),
            key,
            timeline: Some(self.world.comm.timeline()),
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

    fn unused(&mut self, unused: &Unused<'_>) -> Result<(), DeviceError> {
        self.grads.unused(unused)
    }
}
