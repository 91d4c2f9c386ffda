//! The model on this rank, and the memory of one micro-batch.

use crate::config::TrainConfig;
use crate::device::{ArenaSpec, Buffer, DType, DeviceError, Event, Stream};
use crate::model::{
    self, Activation, ActivationPool, Context, Flight, GradSink, Hooks, Model, Pass, Passes, SampleKey,
};
use crate::ops::Fill;
use crate::optim::{Optimizer, evict};
use crate::parallel::Parameters;
use crate::pretrained::PretrainedWeights;
use crate::train::TrainError;
use crate::train::world::World;

/// The model on this rank, and the memory of one micro-batch.
pub(crate) struct Replica {
    pub(crate) model: Model,
    pub(crate) parameters: Parameters,
    pub(crate) pool: ActivationPool,
    pub(crate) world: World,
    feed: Feed,
    /// Factor of each position's gradient.
    dloss: Buffer,
    /// What `dloss` is filled with.
    factor: Option<f64>,
}

/// One micro-batch on the host.
pub(crate) struct MicroBatch {
    pub(crate) inputs: Vec<i32>,
    pub(crate) targets: Vec<i32>,
}

impl MicroBatch {
    pub(crate) fn new(len: usize) -> Self {
        Self {
            inputs: vec![0; len],
            targets: vec![0; len],
        }
    }
}

impl Replica {
    /// `activations` is what [`model::rehearse`] says of the model.
    pub(crate) fn new(
        world: &World,
        model: Model,
        parameters: Parameters,
        activations: usize,
        config: &TrainConfig,
    ) -> Result<Self, TrainError> {
        let shape = vec![config.train.micro_batch, config.model.block_size];
        let positions: usize = shape.iter().product();
        let dloss = world
            .device
            .alloc(&ArenaSpec::private("loss factors", DType::F32, positions))?;
        Ok(Self {
            feed: Feed::new(world, shape)?,
            pool: ActivationPool::planned(world.device.clone(), activations)?,
            world: world.clone(),
            dloss: dloss.whole(),
            factor: None,
            parameters,
            model,
        })
    }

    /// The first values of the parameters that this rank owns, into the masters: published ones as far as there are some,
    /// the others from the seed alone.
    pub(crate) fn initialise(
        &self,
        optimizer: &Optimizer,
        seed: u64,
        pretrained: Option<&PretrainedWeights>,
    ) -> Result<(), TrainError> {
        let masters = optimizer.masters(self.parameters.own());
        for piece in self.parameters.sharding().own_pieces() {
            let spec = &self.model.params[piece.param.0];
            let (id, elements) = (piece.param, piece.elements);
            let mut values = vec![0_f32; elements.len()];
            let published = pretrained.map_or(0, |weights| weights.elements(id));
            for run in spec.runs(elements.clone()) {
                let (start, end) = (run.global, run.global + run.local.len());
                let cut = published.clamp(start, end);
                let values = &mut values[run.local.start - elements.start..run.local.end - elements.start];
                let (first, rest) = values.split_at_mut(cut - start);
                if let Some(weights) = pretrained.filter(|_| !first.is_empty()) {
                    weights.read(id, start..cut, first)?;
                }
                model::fill_init(spec, seed, cut..end, rest);
            }
            let target = masters.slice(&piece.place);
            optimizer
                .home()
                .upload(self.world.stream, &target, bytemuck::cast_slice(&values));
            evict(&target);
        }
        Ok(())
    }

    /// Makes each position's gradient count by `factor`: 1/(B·T) for the gradient of a micro-batch's mean.
    pub(crate) fn weigh(&mut self, factor: f64) {
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
    pub(crate) fn forward(
        &mut self,
        flight: &mut Flight,
        batch: &MicroBatch,
        key: SampleKey,
    ) -> Result<Activation, TrainError> {
        let tokens = self.upload(batch);
        let losses = self
            .passes(&self.context(key))
            .forward(flight, &tokens, &mut self.hooks());
        losses.map_err(|error| self.cause(error))
    }

    /// Backward of the micro-batch that went forward last.
    pub(crate) fn backward(
        &self,
        flight: &mut Flight,
        key: SampleKey,
        grads: &mut dyn GradSink,
    ) -> Result<(), TrainError> {
        let ctx = self.context(key);
        let done = self.passes(&ctx).backward(flight, None, &mut self.hooks(), grads);
        done.map(drop).map_err(|error| self.cause(error))
    }

    /// Sum of the losses of a micro-batch's positions, ignored ones not counted. Synchronises.
    pub(crate) fn total_loss(&mut self, batch: &MicroBatch) -> Result<f64, TrainError> {
        let tokens = self.upload(batch);
        let losses = self
            .passes(&self.context(SampleKey::default()))
            .evaluate(self.model.whole(), &tokens, &mut self.hooks())
            .map_err(|error| self.cause(error))?;
        let bytes = self.world.device.download(self.world.stream, losses.buffer())?;
        let losses = bytes
            .chunks_exact(size_of::<f32>())
            .map(bytemuck::pod_read_unaligned::<f32>);
        Ok(losses.map(f64::from).sum())
    }

    /// Positions of a micro-batch.
    pub(crate) fn positions(&self) -> usize {
        self.dloss.len()
    }

    /// An operation may have failed because its parameters could not be gathered.
    pub(crate) fn cause(&self, error: DeviceError) -> TrainError {
        self.parameters
            .failure()
            .map_or_else(|| error.into(), TrainError::from)
    }

    /// Brings a micro-batch to the device, and returns its tokens.
    pub(crate) fn upload(&mut self, batch: &MicroBatch) -> Activation {
        self.feed.bring(batch);
        self.feed.inputs()
    }

    pub(crate) fn passes<'a>(&'a self, ctx: &'a Context<'a>) -> Passes<'a> {
        Passes {
            model: &self.model,
            ctx,
        }
    }

    pub(crate) fn hooks(&self) -> ReplicaHooks<'_> {
        ReplicaHooks {
            parameters: &self.parameters,
            world: &self.world,
        }
    }

    pub(crate) fn context(&self, key: SampleKey) -> Context<'_> {
        Context {
            device: self.world.device.as_ref(),
            stream: self.world.stream,
            pool: &self.pool,
            params: &self.parameters,
            targets: self.feed.targets(),
            dloss: Some(&self.dloss),
            dtype: self.model.dtype(),
            samples: Some(key),
            timeline: Some(self.world.comm.timeline()),
        }
    }
}

/// What accompanies every pass of training: parameters are gathered and released, and a pass ends soon after the
/// generation is over.
pub(crate) struct ReplicaHooks<'a> {
    parameters: &'a Parameters,
    world: &'a World,
}

impl Hooks for ReplicaHooks<'_> {
    fn before(&mut self, block: usize, pass: Pass) -> Result<(), DeviceError> {
        if let Some(cause) = self.world.cancel.cause() {
            return Err(DeviceError::Upstream(format!("the generation is over: {cause}")));
        }
        self.parameters.unshard(block, pass)
    }

    fn after(&mut self, block: usize, pass: Pass, _made: Option<&Activation>) -> Result<(), DeviceError> {
        self.parameters.reshard(block, pass);
        Ok(())
    }
}

/// Tokens and targets on their way to the device: on a stream of their own, into one of two places, while the
/// micro-batch before is computed from the other.
struct Feed {
    world: World,
    /// Copies, ahead of the stream that computes.
    stream: Stream,
    places: [TokenBuffers; 2],
    /// The place that was filled last.
    current: usize,
    /// `[B, T]`
    shape: Vec<usize>,
}

/// Memory of one micro-batch.
struct TokenBuffers {
    /// Tokens and targets, `[B, T]`, i32.
    inputs: Buffer,
    targets: Buffer,
    /// All that reads it has run.
    read: Event,
}

impl Feed {
    /// For micro-batches of `shape`, samples by positions.
    fn new(world: &World, shape: Vec<usize>) -> Result<Self, TrainError> {
        let alloc = |name: &str| {
            let arena = world
                .device
                .alloc(&ArenaSpec::private(name, DType::I32, shape.iter().product()));
            arena.map(|arena| arena.whole())
        };
        let place = || -> Result<TokenBuffers, TrainError> {
            Ok(TokenBuffers {
                inputs: alloc("tokens")?,
                targets: alloc("targets")?,
                read: Event::reached(),
            })
        };
        let device = world.device.as_ref();
        let named = device.host_side().map(|side| side.named_stream("data"));
        Ok(Self {
            stream: named.unwrap_or_else(|| device.stream()),
            places: [place()?, place()?],
            current: 0,
            world: world.clone(),
            shape,
        })
    }

    /// Later operations of the stream that computes read this batch. Whatever reads the one before is in that stream
    /// already.
    fn bring(&mut self, batch: &MicroBatch) {
        let World { device, stream, .. } = &self.world;
        let deadline = self.world.deadline();
        self.places[self.current].read = device.record(*stream);
        self.current = 1 - self.current;
        let place = &self.places[self.current];
        device.wait_event(self.stream, &place.read, deadline);
        device.upload(self.stream, &place.inputs, bytemuck::cast_slice(&batch.inputs));
        device.upload(self.stream, &place.targets, bytemuck::cast_slice(&batch.targets));
        device.wait_event(*stream, &device.record(self.stream), deadline);
    }

    /// Tokens, `[B, T]`, i32.
    fn inputs(&self) -> Activation {
        Activation::borrowed(self.places[self.current].inputs.clone(), self.shape.clone())
    }

    /// Targets, `[B, T]`, i32.
    fn targets(&self) -> &Buffer {
        &self.places[self.current].targets
    }
}
