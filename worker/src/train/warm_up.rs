//! Kernels are loaded and scratch memory is set aside before the first collective. CUDA may wait for the whole device
//! where a module is loaded or memory allocated, and a rank that waits there for a collective of NCCL, which waits for
//! another rank, may wait for ever.
//!
//! A step and an evaluation of a rank in an idle world show what a run needs. They change nothing: the device of that
//! world prepares the GPU for every operation that it is given, and carries none out.

use std::sync::Arc;
use std::time::Instant;

use super::TrainError;
use super::checkpointing::BuddyCopy;
use super::idle_world::idle_world_on;
use super::rank_spec::RankSpec;
use super::rank_table::StepTable;
use super::replica::Replica;
use super::run_row::{rehearse_evaluation, rehearse_step};
use crate::device::{
    Arena, ArenaSpec, Buffer, Compute, CudaDevice, Device, DeviceError, Event, IdleDevice, StateMemory,
    Stream,
};
use crate::model::Activation;
use crate::ops::Op;
use crate::optim::{Clip, UpdateStep};
use crate::parallel::NormOrder;

/// Prepares the GPU of `replica`, if it is on one, for all that a step will run. Nothing but its activations is
/// overwritten.
pub(super) fn warm_up(
    replica: &Replica,
    spec: &RankSpec,
    norm_order: &NormOrder,
    activations: usize,
) -> Result<(), TrainError> {
    let Compute { device: gpu, stream } = replica.world.compute.clone();
    let Some(spare) = replica.pool.arena().filter(|_| CudaDevice::of(&*gpu).is_some()) else {
        return Ok(());
    };
    let device = LoadingDevice {
        spare: spare.whole(),
        gpu,
        stream,
    };
    let device = Arc::new(device) as Arc<dyn Device>;
    let world = idle_world_on(device.clone(), spec.strategy.mesh, spec.rank);
    let (mut idle, mut reducer) = spec.idle(&world, activations)?;
    let parameters = &idle.parameters;
    // What is updated on the host needs no kernel.
    let home = Arc::new(StateMemory::on_device(device.clone()));
    let optimizer = spec.optimizer(parameters, &home)?;
    let (set, sharding) = (parameters.replica_set(), parameters.sharding());
    let clip = Clip::new(set, &world.compute, sharding, norm_order, &spec.config.train)?;
    let copy = BuddyCopy::new(spec, set, &home)?;
    let table = StepTable::new(&world)?;
    idle.weigh(1.0);
    // The second micro-batch adds to what the first has left.
    let micro_batches = idle.plan.micro_batches().min(2);
    let add = |losses: &Activation| table.add(losses, false);
    let grads = rehearse_step(&mut idle, &mut reducer, micro_batches, &add)?;
    let _ = clip.measure(&home, &grads);
    clip.finish(Some(table.rows()));
    let update = UpdateStep {
        scale: clip.scale(),
        lr: 0.0,
        number: 1,
    };
    let own = idle.parameters.own();
    let stream = world.compute.stream;
    let _ = optimizer.step(stream, own, &grads, &update);
    optimizer.round(stream, own);
    if let Some(copy) = copy {
        copy.step(stream, &update);
    }
    rehearse_evaluation(&mut idle, 1)?;
    Ok(replica.world.compute.synchronize()?)
}

/// Prepares a GPU for what it is given.
struct LoadingDevice {
    gpu: Arc<dyn Device>,
    /// The one that computes, whose scratch memory operations use.
    stream: Stream,
    /// Memory that is not in use yet: the activations'.
    spare: Buffer,
}

impl Device for LoadingDevice {
    fn name(&self) -> String {
        self.gpu.name()
    }

    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        IdleDevice.alloc(spec)
    }

    fn stream(&self) -> Stream {
        IdleDevice.stream()
    }

    fn enqueue(&self, _stream: Stream, op: Op) {
        let gpu = CudaDevice::of(&*self.gpu).expect("made for a GPU");
        gpu.prepare(self.stream, &op, &self.spare);
    }

    fn record(&self, stream: Stream) -> Event {
        IdleDevice.record(stream)
    }

    fn wait_event(&self, _stream: Stream, _event: &Event, _deadline: Instant) {}

    fn synchronize(&self, stream: Stream) -> Result<(), DeviceError> {
        IdleDevice.synchronize(stream)
    }

    fn upload(&self, _stream: Stream, _dst: &Buffer, _bytes: &[u8]) {}

    fn download(&self, stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
        IdleDevice.download(stream, src)
    }
}
