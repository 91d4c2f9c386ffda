//! What is measured of a step: by the host while it enqueues it, by the device when it runs it.

use std::time::{Duration, Instant};

use super::exchange::Shares;
use crate::collective::{WireBytes, Work};
use crate::device::Fetch;
use crate::parallel::{CommTimes, DeviceTimes};
use crate::train::TrainError;
use crate::train::world::World;

/// Time of the parts of one step.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::train) struct StepTimes {
    pub(in crate::train) step: Duration,
    pub(in crate::train) data: Duration,
    pub(in crate::train) forward: Duration,
    pub(in crate::train) backward: Duration,
    pub(in crate::train) comm: Duration,
    pub(in crate::train) exposed: Duration,
    pub(in crate::train) share: Duration,
    pub(in crate::train) optimizer: Duration,
}

impl StepTimes {
    /// Adds what communication took. Returns the part of it that nothing else hid.
    pub(in crate::train) fn account(&mut self, times: CommTimes) -> Duration {
        self.comm += times.comm;
        self.exposed += times.exposed;
        times.exposed
    }
}

/// One finished step.
#[derive(Clone, Debug)]
pub(in crate::train) struct StepRecord {
    /// Steps finished, this one included.
    pub(in crate::train) step: u64,
    /// Samples of all ranks.
    pub(in crate::train) samples: u64,
    /// Mean over all ranks.
    pub(in crate::train) loss: f64,
    pub(in crate::train) val_loss: Option<f64>,
    pub(in crate::train) lr: f32,
    pub(in crate::train) grad_norm: f32,
    /// Steps skipped so far.
    pub(in crate::train) skipped: u64,
    pub(in crate::train) times: StepTimes,
    /// Bytes that this rank sent.
    pub(in crate::train) sent: WireBytes,
    /// Time for which checkpoints held training up since the step before.
    pub(in crate::train) stalled: Duration,
    /// A rank was asked to stop after this step.
    pub(in crate::train) stop: bool,
}

/// A step between the host, which is done with it, and the device, which may still have to run it.
pub(in crate::train) struct Enqueued {
    /// From 0.
    pub(in crate::train) step: u64,
    /// Samples of all ranks.
    pub(in crate::train) samples: u64,
    pub(in crate::train) lr: f32,
    /// What the host saw so far.
    pub(in crate::train) times: StepTimes,
    /// What the device measures of reduction and of parameters.
    pub(in crate::train) device_times: [DeviceTimes; 2],
    pub(in crate::train) started: Instant,
    /// Bytes that this rank sent.
    pub(in crate::train) sent: WireBytes,
    /// Exchanges that the stream waits for.
    pub(super) exchanges: Vec<Work>,
    /// Losses and norm.
    pub(super) fetches: [Fetch; 2],
}

/// What became of it.
pub(in crate::train) struct Numbers {
    pub(in crate::train) shares: Shares,
    /// Norm of the averaged gradients before clipping.
    pub(in crate::train) norm: f32,
}

impl Enqueued {
    /// Waits until the device has got there.
    pub(in crate::train) fn numbers(self, world: &World) -> Result<Numbers, TrainError> {
        let deadline = world.deadline();
        for work in self.exchanges {
            work.wait(deadline)?;
        }
        let [shares, norm] = self.fetches;
        Ok(Numbers {
            shares: Shares::read(&shares.wait(deadline)?),
            norm: bytemuck::pod_read_unaligned(&norm.wait(deadline)?),
        })
    }
}

impl Numbers {
    /// What is not finite, in words. The device has skipped the update then, and only then.
    pub(in crate::train) fn complaint(&self) -> Option<String> {
        match self.shares.not_finite() {
            Some((rank, loss)) => Some(format!("loss is {loss} on rank {rank}")),
            None if self.norm.is_finite() => None,
            None => Some(format!("norm of the averaged gradient is {}", self.norm)),
        }
    }
}
