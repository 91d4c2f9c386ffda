//! What a rank will hold and send, before anything is allocated: the run's own types, made for a rank of the planned mesh
//! on a device that does nothing, among ranks that do nothing. One step is rehearsed there, and what the types say of
//! their memory and count on the wire is the estimate.

use std::sync::Arc;
use std::time::Duration;

use ddp_proto::env::WorkerEnv;

use crate::collective::{Communicator, Executor, Failure, Request, StreamWork, Transport, Wait};
use crate::config::{Strategy, TrainConfig};
use crate::device::{Device, Event, IdleDevice};
use crate::mesh::{Axis, Mesh, MeshShape};
use crate::model::{Flight, Model, SampleKey};
use crate::optim::{Optimizer, StateMemory};
use crate::parallel::{GradientLayout, Reducer};
use crate::session::Cancel;
use crate::train::TrainError;
use crate::train::replica::{MicroBatch, Replica};
use crate::train::strategy::{Blueprint, Scheme, allocate, optimizer};
use crate::train::world::World;

/// Bound of waits for what is there at once.
const TIMEOUT: Duration = Duration::from_mins(1);

/// What a rank holds and sends, under one strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// [`Strategy::Ddp`] where nothing can be sharded.
    pub strategy: Strategy,
    /// Ranks that hold one copy of the state together.
    pub shard_ranks: u64,
    /// Parameters of the model, Ψ: without padding, a tied one counted once.
    pub parameters: u64,
    /// Elements of parameters, or of gradients, with their padding.
    pub padded: u64,
    /// What it holds.
    pub held: Footprint,
    /// What it sends in a step.
    pub sent: StepTraffic,
}

/// Bytes that a rank holds for as long as it trains, as the types that hold them say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Parameters.
    pub params: u64,
    /// Slots for parameters that are gathered at the moment.
    pub gathered: u64,
    /// Gradients, with those in flight.
    pub grads: u64,
    /// Slots for gradients that are being reduced.
    pub in_flight: u64,
    /// State of the optimizer, and masters, on the device.
    pub optimizer: u64,
    /// Of parameters, gradients and optimizer: so that ranks have equal slices of whole chunks.
    pub padding: u64,
    /// Activations of a micro-batch.
    pub activations: u64,
}

impl Footprint {
    pub(in crate::train) fn of(replica: &Replica, reducer: &Reducer, optimizer: &Optimizer) -> Self {
        let (params, in_flight) = (replica.parameters.bytes(), reducer.in_flight_bytes());
        let padded = replica.parameters.sharding().whole_len();
        let padding = (padded - replica.model.param_count()) as f64 / padded as f64;
        let elements = params + reducer.bytes() - in_flight + optimizer.bytes();
        Self {
            params: params as u64,
            gathered: replica.parameters.gathered_bytes() as u64,
            grads: reducer.bytes() as u64,
            in_flight: in_flight as u64,
            optimizer: optimizer.bytes_by_place().device as u64,
            padding: (elements as f64 * padding) as u64,
            activations: replica.pool.allocated_bytes() as u64,
        }
    }

    /// All of it.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.params + self.gathered + self.grads + self.optimizer + self.activations
    }
}

/// Bytes that a rank sends in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTraffic {
    /// Gradients, in the type in which they are reduced.
    pub grads: u64,
    /// Parameters, in the type that operations read.
    pub params: u64,
    /// The part of both that goes to other copies of the state; the rest goes to ranks of the same copy.
    pub between_copies: u64,
}

impl StepTraffic {
    /// Gradients and parameters.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.grads + self.params
    }
}

impl Estimate {
    /// Of a configuration on the rank that `env` describes: a pure function.
    pub fn of(config: &TrainConfig, env: &WorkerEnv) -> Result<Self, TrainError> {
        let Blueprint {
            model,
            layout,
            scheme,
            activations,
            ..
        } = Blueprint::of(config, env)?;
        Self::new(config, &model, &layout, scheme, activations)
    }

    pub(in crate::train) fn new(
        config: &TrainConfig,
        model: &Model,
        layout: &Arc<GradientLayout>,
        scheme: Scheme,
        activations: usize,
    ) -> Result<Self, TrainError> {
        let world = idle_world(scheme.mesh);
        let (parameters, mut reducer) = allocate(&world, config, &scheme, model, layout)?;
        let home = StateMemory::on_device(world.device.clone());
        let optimizer = optimizer(&parameters, home, config, model)?;
        let mut replica = Replica::new(&world, model.clone(), parameters, activations, config)?;
        let micro_batches = config.train.grad_accumulation as u64;
        Ok(Self {
            strategy: scheme.strategy,
            shard_ranks: scheme.shard_ranks() as u64,
            parameters: model.param_count() as u64,
            padded: replica.parameters.sharding().whole_len() as u64,
            sent: step_traffic(&mut replica, &mut reducer, micro_batches)?,
            held: Footprint::of(&replica, &reducer, &optimizer),
        })
    }
}

/// What a step of so many micro-batches sends. The second one is rehearsed, later ones send as much.
fn step_traffic(
    replica: &mut Replica,
    reducer: &mut Reducer,
    micro_batches: u64,
) -> Result<StepTraffic, TrainError> {
    let mut sent_by = |micro_batches| {
        let before = sent(&replica.world.mesh)?;
        step(replica, reducer, micro_batches)?;
        let after = sent(&replica.world.mesh)?;
        Ok::<_, TrainError>([0, 1, 2].map(|kind| after[kind] - before[kind]))
    };
    let (one, two) = (sent_by(1)?, sent_by(2)?);
    let [grads, params, between_copies] =
        [0, 1, 2].map(|kind| one[kind] + (micro_batches - 1) * (two[kind] - one[kind]));
    Ok(StepTraffic {
        grads,
        params,
        between_copies,
    })
}

/// The passes of a step, and the gathering of what its update leaves.
fn step(replica: &mut Replica, reducer: &mut Reducer, micro_batches: usize) -> Result<(), TrainError> {
    let (batch, key) = (MicroBatch::new(replica.positions()), SampleKey::default());
    replica.parameters.updated()?;
    let mut grads = reducer.step(micro_batches)?;
    for _ in 0..micro_batches {
        let mut flight = Flight::over(replica.model.whole());
        drop(replica.forward(&mut flight, &batch, key)?);
        replica.backward(&mut flight, key, &mut grads)?;
    }
    grads.finish_on(replica.world.stream, replica.world.deadline())?;
    Ok(())
}

/// Bytes of gradients, of parameters, and of both between copies of the state that were sent so far.
fn sent(mesh: &Mesh) -> Result<[u64; 3], TrainError> {
    let all = mesh.wire_bytes();
    let between_copies = if mesh.size(&[Axis::Replicate]) == 1 {
        0
    } else {
        let copies = mesh.group(&[Axis::Replicate])?.wire_bytes();
        copies.grads + copies.params
    };
    Ok([all.grads, all.params, between_copies])
}

/// Rank 0 of a mesh that is not there.
fn idle_world(mesh: MeshShape) -> World {
    let (device, cancel): (Arc<dyn Device>, _) = (Arc::new(IdleDevice), Cancel::default());
    let ranks = IdleRanks((0..mesh.ranks()).collect());
    let comm = Communicator::new("planned", Box::new(ranks), Executor::Inline, TIMEOUT, &cancel);
    World {
        mesh: Arc::new(Mesh::new(mesh, comm.clone(), Executor::Inline)),
        stream: device.stream(),
        device,
        comm,
        cancel,
    }
}

/// Global ranks of a group whose operations are done as soon as they are asked for; this rank is the first. Its
/// communicator counts what they would send.
struct IdleRanks(Vec<usize>);

impl Transport for IdleRanks {
    fn rank(&self) -> usize {
        0
    }

    fn members(&self) -> &[usize] {
        &self.0
    }

    fn split(&mut self, _: &str, members: &[usize], _: &Wait) -> Result<Box<dyn Transport>, Failure> {
        Ok(Box::new(Self(
            members.iter().map(|member| self.0[*member]).collect(),
        )))
    }

    fn is_on_stream(&self) -> bool {
        true
    }

    fn enqueue(
        &mut self,
        _sequence: u64,
        _request: &Request,
        after: &Event,
        _wait: &Wait,
    ) -> Result<Arc<dyn StreamWork>, Failure> {
        Ok(Arc::new(Done(after.clone())))
    }
}

struct Done(Event);

impl StreamWork for Done {
    fn done(&self) -> &Event {
        &self.0
    }

    fn outcome(&self) -> Option<Result<(), Failure>> {
        Some(Ok(()))
    }
}

#[cfg(test)]
#[path = "estimate_tests.rs"]
mod tests;
