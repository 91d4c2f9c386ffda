//! Parameters that need not all be here all the time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Portion, Sharding, SyncTimes};
use crate::collective::{Communicator, WireBytes, Work, WorkError};
use crate::device::{Device, DeviceError, Stream};
use crate::model::Params;

/// Beyond its own deadline an operation is given this long to say so itself, with the better error.
const GRACE: Duration = Duration::from_secs(5);

/// One of the two passes over the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// First block first.
    Forward,
    /// Last block first.
    Backward,
}

/// The parameters of a model under some strategy.
///
/// A block is entered before its pass is enqueued and left after it; in between all parameters that the pass reads
/// are there. [`super::gated`] makes a model's blocks do so.
pub trait Weights: Params + Send + Sync {
    /// Later operations of the compute stream can read the parameters of a block.
    fn enter(&self, block: usize, pass: Pass) -> Result<(), DeviceError>;

    /// The last operation of the block's pass is in the stream.
    fn leave(&self, block: usize, pass: Pass);

    /// What this rank owns has changed, by operations that are in the stream.
    fn updated(&self) -> Result<(), WorkError>;

    /// Waits until nothing is in flight, and keeps no more than between two steps.
    fn settle(&self) -> Result<(), WorkError>;

    /// Where each parameter and its owner are.
    fn sharding(&self) -> &Arc<Sharding>;

    /// Memory of what this rank owns.
    fn own(&self) -> &Portion;

    /// Bytes held all the time.
    fn bytes(&self) -> usize;

    /// Bytes for parameters that are gathered at the moment.
    fn gathered_bytes(&self) -> usize;

    /// Elements that the ranks gather in a step of so many micro-batches, counted as often as they are gathered.
    fn gathered_elements(&self, micro_batches: usize) -> usize;

    /// True if every pass over the blocks is a collective one: all ranks must make as many.
    fn moves_together(&self) -> bool {
        false
    }

    /// Time that parameters took since the last call.
    fn take_times(&self) -> SyncTimes;

    /// Why parameters could not be gathered, if they could not.
    fn failure(&self) -> Option<WorkError>;

    /// Bytes sent by a communicator that only parameters use.
    fn wire_bytes(&self) -> WireBytes {
        WireBytes::default()
    }
}

/// The ranks that share parameters, and the stream that reads them.
#[derive(Clone)]
pub struct Group {
    /// Gathers them.
    pub comm: Communicator,
    /// Holds them.
    pub device: Arc<dyn Device>,
    /// The compute stream.
    pub stream: Stream,
}

/// Waiting for gathered parameters, and an account of it.
pub(super) struct Waiting {
    group: Group,
    account: Mutex<Account>,
}

#[derive(Default)]
struct Account {
    times: SyncTimes,
    failure: Option<WorkError>,
}

impl Waiting {
    pub(super) fn new(group: &Group) -> Self {
        Self {
            group: group.clone(),
            account: Mutex::default(),
        }
    }

    /// Later operations of the stream run after `work`. An error that is known already is returned.
    pub(super) fn in_stream(&self, work: &Work) -> Result<(), DeviceError> {
        let Group { device, stream, .. } = &self.group;
        let started = Instant::now();
        work.wait_on(device.as_ref(), *stream, self.deadline());
        self.account().times.exposed += started.elapsed();
        if !work.is_done() {
            return Ok(());
        }
        self.settle(work)
            .map_err(|e| DeviceError::Upstream(e.to_string()))
    }

    /// Blocks the host until `work` is done.
    pub(super) fn on_host(&self, work: &Work) -> Result<(), WorkError> {
        let started = Instant::now();
        let outcome = self.settle(work);
        self.account().times.exposed += started.elapsed();
        outcome
    }

    fn settle(&self, work: &Work) -> Result<(), WorkError> {
        match work.wait(self.deadline()) {
            Ok(times) => {
                self.account().times.comm += times.ended.saturating_duration_since(times.started);
                Ok(())
            }
            Err(error) => Err(self.account().failure.get_or_insert(error).clone()),
        }
    }

    pub(super) fn failure(&self) -> Option<WorkError> {
        self.account().failure.clone()
    }

    pub(super) fn take_times(&self) -> SyncTimes {
        std::mem::take(&mut self.account().times)
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.group.comm.timeout() + GRACE
    }

    fn account(&self) -> MutexGuard<'_, Account> {
        self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
