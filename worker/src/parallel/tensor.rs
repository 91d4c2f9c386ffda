//! Tensor parallelism: the collectives of a tensor group, in the order of the compute stream.
//!
//! On CPUs they run inline, on memory that the ranks of a node share; on GPUs on a stream of NCCL's own, for which the
//! compute stream waits. How the model is cut is in `model/build.rs`, when blocks ask for what in `model/tensor.rs`.

use std::sync::Arc;

use super::comm_times::{CommTimes, CommTracker, DeviceTimes};
use crate::collective::{Communicator, Launch, ReduceOp, Traffic, Work, WorkError};
use crate::device::{Buffer, Device, DeviceError, Stream};
use crate::model::TensorGroup;

/// This rank in its tensor group.
pub struct TensorRanks {
    comm: Communicator,
    device: Arc<dyn Device>,
    /// The compute stream.
    stream: Stream,
    is_sequence: bool,
    tracker: CommTracker,
}

impl TensorRanks {
    /// Over the ranks of `comm`, whose operations best run on the calling thread: the blocks wait for each. `stream` is the
    /// one that computes.
    #[must_use]
    pub fn new(
        comm: Communicator,
        (device, stream): (&Arc<dyn Device>, Stream),
        is_sequence: bool,
    ) -> Self {
        Self {
            tracker: CommTracker::new(device, comm.timeline()),
            device: device.clone(),
            comm,
            stream,
            is_sequence,
        }
    }

    /// The ranks.
    #[must_use]
    pub fn communicator(&self) -> &Communicator {
        &self.comm
    }

    /// Time that they took since the last call, as far as the host saw it.
    pub fn take_times(&self) -> CommTimes {
        self.tracker.take_times()
    }

    /// Of what was launched since the last call: the part that the device measures.
    pub fn take_device_times(&self) -> DeviceTimes {
        self.tracker.take_device_times()
    }

    /// Why an operation failed, if one has.
    pub fn failure(&self) -> Option<WorkError> {
        self.tracker.failure()
    }

    /// Later operations of the compute stream run after the one that `issue` launches.
    fn run(&self, what: &str, issue: impl FnOnce(Launch) -> Work) -> Result<(), DeviceError> {
        let launch = Launch::after(self.device.record(self.stream), Traffic::Activations, what);
        let work = self.tracker.launch(|| issue(launch));
        self.tracker
            .wait_in_stream(self.stream, work.event(), self.comm.deadline());
        let checked = self.tracker.check();
        checked.map_err(|error| DeviceError::Upstream(error.to_string()))
    }
}

impl TensorGroup for TensorRanks {
    fn place(&self) -> (usize, usize) {
        (self.comm.rank(), self.comm.size())
    }

    fn is_sequence(&self) -> bool {
        self.is_sequence
    }

    fn all_reduce(&self, x: &Buffer, what: &str) -> Result<(), DeviceError> {
        self.run(what, |launch| self.comm.all_reduce(x, ReduceOp::Sum, launch))
    }

    fn reduce_scatter(&self, x: &Buffer, what: &str) -> Result<(), DeviceError> {
        self.run(what, |launch| self.comm.reduce_scatter(x, ReduceOp::Sum, launch))
    }

    fn all_gather(&self, x: &Buffer, what: &str) -> Result<(), DeviceError> {
        self.run(what, |launch| self.comm.all_gather(x, launch))
    }
}
