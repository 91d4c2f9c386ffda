//! Parameters that need not all be here all the time.

use std::sync::Arc;

use super::{Ledger, Portion, Sharding, SyncTimes};
use crate::collective::{Communicator, WorkError};
use crate::device::{Device, DeviceError, Stream};
use crate::model::{Params, Pass};

/// The parameters of a model under some strategy.
///
/// A block is entered before its pass is enqueued and left after it; in between all parameters that the pass reads
/// are there.
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

    /// Time that parameters took since the last call, as far as the host saw it.
    fn take_times(&self) -> SyncTimes;

    /// Of what was launched since the last call: the part that the device measures, complete when all of it has run and
    /// [`Weights::failure`] was asked after that.
    fn take_ledger(&self) -> Ledger;

    /// Why parameters could not be gathered, if they could not.
    fn failure(&self) -> Option<WorkError>;
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
