//! A step as it is enqueued, and as the device has run it.

use std::time::{Duration, Instant};

use crate::collective::{WireBytes, Work};
use crate::device::{DeviceError, Fetch};
use crate::parallel::{CommTimes, DeviceTimes};
use crate::train::TrainError;
use crate::train::rank_table::StepRows;
use crate::train::world::World;

/// Time of the parts of one step.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StepTimes {
    pub(crate) step: Duration,
    pub(crate) data: Duration,
    pub(crate) forward: Duration,
    pub(crate) backward: Duration,
    pub(crate) comm: Duration,
    pub(crate) exposed: Duration,
    pub(crate) share: Duration,
    pub(crate) optimizer: Duration,
}

impl StepTimes {
    /// Adds what communication took. Returns the part of it that nothing else hid.
    pub(crate) fn account(&mut self, times: CommTimes) -> Duration {
        self.comm += times.comm;
        self.exposed += times.exposed;
        times.exposed
    }
}

/// What the host knows of a step that it has enqueued.
pub(crate) struct StepNumbers {
    /// From 0.
    pub(crate) step: u64,
    /// Samples of all ranks.
    pub(crate) samples: u64,
    pub(crate) lr: f32,
    /// What the host saw so far.
    pub(crate) times: StepTimes,
    /// What the device measures of reduction, and of each of the replica's groups.
    pub(crate) device_times: Vec<DeviceTimes>,
    pub(crate) started: Instant,
    /// Bytes that this rank sent.
    pub(crate) sent: WireBytes,
}

/// A step that the host has enqueued, and that the device may still have to run.
pub(crate) struct EnqueuedStep {
    pub(crate) numbers: StepNumbers,
    /// Collectives that the stream waits for.
    pub(super) collectives: Vec<Work>,
    /// Losses and norm.
    pub(super) fetches: [Fetch; 2],
    /// What routers count.
    pub(super) routers: Option<Fetch>,
}

/// What a step that the device has run came to.
pub(crate) struct StepResult {
    pub(crate) numbers: StepNumbers,
    /// Numbers of all ranks.
    pub(crate) rows: StepRows,
    /// Norm of the averaged gradients before clipping.
    pub(crate) norm: f32,
    /// What routers count: [`crate::train::router_table::RouterTable::read`].
    pub(crate) routers: Option<Vec<u8>>,
}

impl EnqueuedStep {
    /// Waits until the device has run the step.
    pub(crate) fn result(mut self, world: &World) -> Result<StepResult, TrainError> {
        for work in self.collectives.drain(..) {
            work.wait(world.deadline())?;
        }
        self.read(world.deadline())
    }

    /// The result, as far as the device has come. An error if some rank has left in the step.
    pub(crate) fn read(self, deadline: Instant) -> Result<StepResult, TrainError> {
        let [rows, norm] = self.fetches;
        let rows = StepRows::read(&rows.wait(deadline)?);
        let step = self.numbers.step + 1;
        if let Some(rank) = rows.left_in(step) {
            let what = format!("rank {rank} has left the generation in step {step}");
            return Err(DeviceError::Upstream(what).into());
        }
        Ok(StepResult {
            rows,
            numbers: self.numbers,
            norm: bytemuck::pod_read_unaligned(&norm.wait(deadline)?),
            routers: self.routers.map(|fetch| fetch.wait(deadline)).transpose()?,
        })
    }
}

impl StepResult {
    /// What is not finite, in words. The device has skipped the update then, and those of the steps behind it.
    pub(crate) fn complaint(&self) -> Option<String> {
        match self.rows.not_finite() {
            Some((rank, loss)) => Some(format!("loss is {loss} on rank {rank}")),
            None if self.norm.is_finite() => None,
            None => Some(format!("norm of the averaged gradient is {}", self.norm)),
        }
    }
}
