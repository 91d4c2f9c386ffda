//! The model on this rank, and the memory of its micro-batches.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::row_state::{RowPurpose, RowState};
use crate::collective::{Communicator, WorkError};
use crate::data::IGNORED;
use crate::device::{ArenaSpec, Buffer, Compute, DType, DeviceError, Event, evict};
use crate::mesh::Axis;
use crate::model::{
    self, Activation, ActivationPool, Context, GradSink, Hooks, Keep, Model, Pass, Passes, SampleKey,
};
use crate::ops::Fill;
use crate::optim::Optimizer;
use crate::parallel::pipeline::{Action, ActionKind, PipelinePlan};
use crate::parallel::{BlockGroups, CommTimes, CommTracker, DeviceTimes, Parameters};
use crate::pretrained::PretrainedWeights;
use crate::train::TrainError;
use crate::train::router_table::RouterTable;
use crate::train::world::{Groups, World};

/// The model on this rank, and the memory of its micro-batches.
pub(crate) struct Replica {
    /// The part of the model that this rank holds.
    pub(crate) model: Model,
    pub(crate) parameters: Parameters,
    pub(crate) pool: ActivationPool,
    pub(crate) world: World,
    blocks: BlockGroups,
    pub(crate) plan: Arc<PipelinePlan>,

    row: RowState,
    feed: TokenFeed,
    /// Factor of each position's gradient.
    dloss: Buffer,
    /// What `dloss` is filled with.
    factor: Option<f64>,
    /// None: there are no experts.
    pub(crate) routers: Option<RouterTable>,
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

    /// Positions whose losses count.
    pub(crate) fn counted(&self) -> usize {
        self.targets.iter().filter(|&&target| target != IGNORED).count()
    }
}

/// What a replica is made of.
pub(crate) struct ReplicaParts {
    pub(crate) model: Model,
    pub(crate) parameters: Parameters,
    pub(crate) plan: Arc<PipelinePlan>,
    /// Bytes, as a rehearsal of the plan has found them.
    pub(crate) activations: usize,
    /// Samples by positions of a micro-batch.
    pub(crate) shape: [usize; 2],
    pub(crate) routers: Option<RouterTable>,
}

impl Replica {
    pub(crate) fn new(world: &World, groups: Groups, parts: ReplicaParts) -> Result<Self, TrainError> {
        let Groups { blocks, messages, .. } = groups;
        let (model, plan, shape) = (parts.model, parts.plan, parts.shape);
        let positions = shape[0] * shape[1];
        let spec = ArenaSpec::private("loss factors", DType::F32, positions);
        let dloss = world.compute.device.alloc(&spec)?;
        let counts = buffers_needed(&model, &plan.row(messages.rank(), plan.micro_batches()));
        Ok(Self {
            feed: TokenFeed::new(world, shape, counts)?,
            row: RowState::new(plan.clone(), messages),
            plan,
            pool: activation_pool(world, blocks.communicator(), parts.activations)?,
            blocks,
            world: world.clone(),
            dloss: dloss.whole(),
            factor: None,
            routers: parts.routers,
            parameters: parts.parameters,
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
            let whole_id = self.model.whole_id(id);
            let published = pretrained.map_or(0, |weights| weights.elements(whole_id));
            for run in spec.runs(elements.clone()) {
                let (start, end) = (run.global, run.global + run.local.len());
                let cut = published.clamp(start, end);
                let values = &mut values[run.local.start - elements.start..run.local.end - elements.start];
                let (first, rest) = values.split_at_mut(cut - start);
                if let Some(weights) = pretrained.filter(|_| !first.is_empty()) {
                    weights.read(whole_id, start..cut, first)?;
                }
                model::fill_init(spec, seed, cut..end, rest);
            }
            let target = masters.slice(&piece.place);
            let stream = self.world.compute.stream;
            (optimizer.home()).upload(stream, &target, bytemuck::cast_slice(&values));
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
        self.world.compute.enqueue(Fill {
            out: self.dloss.clone(),
            value: factor,
        });
    }

    /// Whether this rank counts its losses: it computes them, and no other rank of its tensor group counts the same ones.
    pub(crate) fn counts_losses(&self) -> bool {
        self.model.holds_head && self.world.mesh.index(&[Axis::Tensor]) == 0
    }

    /// What this rank does in a step, or in an evaluation, of `micro_batches`.
    pub(crate) fn row(&self, purpose: RowPurpose, micro_batches: usize) -> Vec<Action> {
        let rank = self.row.rank();
        match purpose {
            RowPurpose::Training | RowPurpose::Inspection => self.plan.row(rank, micro_batches),
            RowPurpose::Evaluation => self.plan.evaluation_row(rank, micro_batches),
        }
    }

    /// Prepares for a row.
    pub(crate) fn begin(&mut self, purpose: RowPurpose) {
        if let (Some(routers), RowPurpose::Training) = (&self.routers, purpose) {
            routers.clear();
        }
        self.feed.reset();
        self.row.begin(purpose);
    }

    /// True if an action takes a micro-batch from the host: its tokens, its targets, or both.
    pub(crate) fn takes_batch(&self, action: Action) -> bool {
        RowState::takes_tokens(action) || self.row.makes_losses(action)
    }

    /// Waits, in the stream that computes, for the result of another stage that an action needs.
    pub(crate) fn await_input(&mut self, action: Action) -> Result<(), TrainError> {
        let awaited = self.row.await_input(action);
        awaited.map_err(|error| self.cause(error))
    }

    /// Carries out an action of the row. `batch` is the micro-batch for an action that takes one, with the given `samples`;
    /// `hooks` accompany the passes beside the replica's own. Returns the loss of each position, still on the device, if the
    /// action makes them.
    pub(crate) fn carry_out(
        &mut self,
        action: Action,
        batch: Option<&MicroBatch>,
        samples: SampleKey,
        hooks: &mut dyn Hooks,
        grads: &mut dyn GradSink,
    ) -> Result<Option<Activation>, TrainError> {
        let micro_batch = action.micro_batch;
        let makes_losses = self.row.makes_losses(action);
        let bring = |batch: &MicroBatch| {
            let wanted = [RowState::takes_tokens(action), makes_losses];
            self.feed.bring(micro_batch, batch, wanted)
        };
        let (tokens, targets) = batch.map_or((None, None), bring);
        let (world, parameters, model) = (&self.world, &self.parameters, &self.model);
        let shape = self.feed.shape;
        let routers = (self.routers.as_ref()).map(|table| table.of_micro_batch(micro_batch));
        let ctx = Context {
            targets: targets.as_ref(),
            dloss: Some(&self.dloss),
            position_weight: self.factor.unwrap_or_default(),
            routers: routers.as_ref(),
            keep: Keep::ForBackward(model.recompute),
            samples: Some(samples),
            timeline: Some(world.comm.timeline()),
            ..Context::new(&world.compute, &self.pool, parameters, shape, model.dtype())
        };
        let ctx = &self.blocks.with_groups(ctx);
        let passes = Passes { model, ctx };
        let mut hooks = ReplicaHooks {
            parameters,
            world,
            others: hooks,
        };
        let done = self.row.carry_out(action, &passes, tokens, &mut hooks, grads);
        if makes_losses {
            self.feed.targets.release(&self.world, micro_batch);
        }
        if action.stage == 0 && self.row.ends_micro_batch(action) {
            self.feed.tokens.release(&self.world, micro_batch);
        }
        done.map_err(|error| self.cause(error))
    }

    /// Ends a row after its last action.
    pub(crate) fn finish(&mut self) -> Result<(), TrainError> {
        let done = self.row.finish();
        done.map_err(|error| self.cause(error))
    }

    /// Samples of a micro-batch, and positions of each that this rank computes.
    pub(crate) fn shape(&self) -> [usize; 2] {
        self.feed.shape
    }

    /// The cause of a failed operation: communication that failed before it, if there is some, else the error itself.
    pub(crate) fn cause(&self, error: DeviceError) -> TrainError {
        self.failure().map_or_else(|| error.into(), TrainError::from)
    }

    /// Why parameters could not be gathered, or a message or an exchange of the tensor group failed.
    pub(crate) fn failure(&self) -> Option<WorkError> {
        self.trackers().find_map(CommTracker::failure)
    }

    fn trackers(&self) -> impl Iterator<Item = &CommTracker> {
        let of_all = [self.parameters.tracker(), self.row.messages.tracker()];
        of_all.into_iter().chain(self.blocks.trackers())
    }

    /// Time that parameters and messages of the pipeline took since the last call, as far as the host saw it.
    pub(crate) fn take_times(&self) -> CommTimes {
        let mut times = CommTimes::default();
        self.trackers().for_each(|tracker| times += tracker.take_times());
        times
    }

    /// The times that the device measures of what was launched since the last call.
    pub(crate) fn take_device_times(&self) -> Vec<DeviceTimes> {
        self.trackers().map(CommTracker::take_device_times).collect()
    }
}

/// Memory for activations, which ranks that sum and gather them share.
fn activation_pool(
    world: &World,
    sharing: Option<&Communicator>,
    bytes: usize,
) -> Result<ActivationPool, TrainError> {
    let device = world.compute.device.clone();
    let Some(sharing) = sharing else {
        return Ok(ActivationPool::planned(device, bytes)?);
    };
    let spec = ArenaSpec::on_node("activations", DType::U8, bytes);
    let arena = sharing.alloc_shared(&device, &spec)?;
    Ok(ActivationPool::over(device, Some(arena)))
}

/// Accompanies every pass: gathers and releases parameters, and ends the pass soon after the generation is over.
struct ReplicaHooks<'a> {
    parameters: &'a Parameters,
    world: &'a World,
    others: &'a mut dyn Hooks,
}

impl Hooks for ReplicaHooks<'_> {
    fn before(&mut self, block: usize, pass: Pass) -> Result<(), DeviceError> {
        if let Some(cause) = self.world.cancel.cause() {
            return Err(DeviceError::Upstream(format!(
                "the launcher stopped the workers: {cause}"
            )));
        }
        self.others.before(block, pass)?;
        self.parameters.unshard(block, pass)
    }

    fn after(&mut self, block: usize, pass: Pass, made: Option<&Activation>) -> Result<(), DeviceError> {
        self.parameters.reshard(block, pass);
        self.others.after(block, pass, made)
    }
}

/// Tokens and targets on their way to the device, on a stream of their own, while another micro-batch is computed.
struct TokenFeed {
    world: World,
    /// Copies, ahead of the stream that computes.
    copies: Compute,
    /// `[B, T]`
    shape: [usize; 2],
    tokens: TokenBuffers,
    targets: TokenBuffers,
}

impl TokenFeed {
    /// For micro-batches of `shape`, samples by positions. `counts` are the numbers of buffers for tokens and for targets.
    fn new(world: &World, shape: [usize; 2], counts: [usize; 2]) -> Result<Self, TrainError> {
        let device = world.compute.device.clone();
        let named = device.host_side().map(|side| side.named_stream("data"));
        let len = shape.iter().product();
        Ok(Self {
            copies: Compute {
                stream: named.unwrap_or_else(|| device.stream()),
                device,
            },
            tokens: TokenBuffers::new(world, "tokens", len, counts[0])?,
            targets: TokenBuffers::new(world, "targets", len, counts[1])?,
            world: world.clone(),
            shape,
        })
    }

    /// Tokens and targets, as they are wanted, of a micro-batch: later operations of the stream that computes read them,
    /// `[B, T]`, i32, until they are released.
    fn bring(
        &mut self,
        micro_batch: usize,
        batch: &MicroBatch,
        wanted: [bool; 2],
    ) -> (Option<Activation>, Option<Buffer>) {
        let (on, deadline) = (&self.copies, self.world.deadline());
        let tokens = wanted[0].then(|| self.tokens.fill(on, deadline, micro_batch, &batch.inputs));
        let targets = wanted[1].then(|| self.targets.fill(on, deadline, micro_batch, &batch.targets));
        self.world.compute.wait_event(&on.record(), deadline);
        let shaped = |tokens| Activation::borrowed(tokens, self.shape.to_vec());
        (tokens.map(shaped), targets)
    }

    /// Releases what a row that ended with an error has left behind.
    fn reset(&mut self) {
        for buffers in [&mut self.tokens, &mut self.targets] {
            while let Some((&micro_batch, _)) = buffers.taken.first_key_value() {
                buffers.release(&self.world, micro_batch);
            }
        }
    }
}

/// Memory for tokens, or for targets, of several micro-batches.
struct TokenBuffers {
    /// Free buffers, the one that was released first in front.
    free: VecDeque<TokenBuffer>,
    /// By micro-batch.
    taken: BTreeMap<usize, Buffer>,
}

/// Memory for one micro-batch.
struct TokenBuffer {
    buffer: Buffer,
    /// Reached when all that reads the buffer has run.
    read: Event,
}

impl TokenBuffers {
    fn new(world: &World, name: &str, len: usize, count: usize) -> Result<Self, TrainError> {
        let buffer = |_| {
            let spec = ArenaSpec::private(name, DType::I32, len);
            let arena = world.compute.device.alloc(&spec)?;
            Ok(TokenBuffer {
                buffer: arena.whole(),
                read: Event::reached(),
            })
        };
        Ok(Self {
            free: (0..count).map(buffer).collect::<Result<_, DeviceError>>()?,
            taken: BTreeMap::new(),
        })
    }

    /// Puts the numbers of a micro-batch on the stream of `copies`, until `deadline`.
    fn fill(&mut self, copies: &Compute, deadline: Instant, micro_batch: usize, numbers: &[i32]) -> Buffer {
        let free = self.free.pop_front();
        let TokenBuffer { buffer, read } =
            free.expect("there are as many buffers as micro-batches in flight");
        copies.wait_event(&read, deadline);
        copies.upload(&buffer, numbers);
        self.taken.insert(micro_batch, buffer.clone());
        buffer
    }

    /// Frees the buffer of a micro-batch. All that reads it must be in the stream that computes.
    fn release(&mut self, world: &World, micro_batch: usize) {
        if let Some(buffer) = self.taken.remove(&micro_batch) {
            let read = world.compute.record();
            self.free.push_back(TokenBuffer { buffer, read });
        }
    }
}

/// Number of buffers for tokens, and for targets: one for each micro-batch in flight, and one more for the micro-batch that is
/// copied meanwhile.
fn buffers_needed(model: &Model, row: &[Action]) -> [usize; 2] {
    let (mut now, mut most) = (0_usize, 0);
    for action in row.iter().filter(|action| action.stage == 0) {
        now += usize::from(action.kind == ActionKind::Forward);
        most = most.max(now);
        now -= usize::from(action.kind.makes_weight_gradient());
    }
    let of = |is_held: bool, most: usize| if is_held { most + 1 } else { 0 };
    [of(model.holds_embedding, most), of(model.holds_head, 1)]
}
