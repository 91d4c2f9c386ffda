//! The ranks that hold a model together, over a communicator: what [`TensorOps`] are for blocks.

use super::comm_times::CommTracker;
use crate::collective::{CollectiveError, Communicator, Launch, ReduceOp, Traffic};
use crate::device::{Compute, DeviceError};
use crate::mesh::{Axis, Mesh};
use crate::model::{Activation, Context, Exchange, ExchangeKind, TensorOps, own_rows};

/// A tensor group. Sums are in rank order, the same bits on every rank.
///
/// With t ranks and an activation of A bytes, a rank moves 2(t−1)/t·A in an all-reduce and (t−1)/t·A in each of the others,
/// as [`Traffic::Activations`].
pub struct TensorGroup {
    comm: Communicator,
    /// Makes the activations.
    compute: Compute,
    is_sequence: bool,
    tracker: CommTracker,
}

impl TensorGroup {
    /// The ranks of `comm`; `is_sequence`: each holds its own rows of the residual stream. Operations of `comm` best run on
    /// the calling thread, since blocks wait for each.
    pub fn new(comm: Communicator, compute: &Compute, is_sequence: bool) -> Self {
        Self {
            tracker: CommTracker::new(&compute.device, comm.timeline()),
            comm,
            compute: compute.clone(),
            is_sequence,
        }
    }

    /// Times and failure of the exchanges. The failure is behind the errors that blocks return.
    pub fn tracker(&self) -> &CommTracker {
        &self.tracker
    }
}

/// All groups of ranks that compute blocks together with this one; none where this rank does it alone.
pub struct BlockGroups {
    tensor: Option<TensorGroup>,
}

impl BlockGroups {
    /// Every rank must call it. `is_sequence` is as in [`TensorGroup::new`].
    pub fn connect(mesh: &Mesh, compute: &Compute, is_sequence: bool) -> Result<Self, CollectiveError> {
        let along = [Axis::Tensor];
        let connect = || mesh.group_inline(&along, "activations along tensor");
        let comm = (mesh.size(&along) > 1).then(connect).transpose()?;
        Ok(Self {
            tensor: comm.map(|comm| TensorGroup::new(comm, compute, is_sequence)),
        })
    }

    /// The ranks that sum and gather activations without copies, if these lie in memory that they share.
    pub fn communicator(&self) -> Option<&Communicator> {
        self.tensor.as_ref().map(|group| &group.comm)
    }

    /// Of each group.
    pub fn trackers(&self) -> impl Iterator<Item = &CommTracker> {
        self.tensor.iter().map(TensorGroup::tracker)
    }

    /// For blocks that these ranks compute together.
    pub fn with_groups<'a>(&'a self, ctx: Context<'a>) -> Context<'a> {
        let tensor = self.tensor.as_ref().map(|group| group as &dyn TensorOps);
        Context { tensor, ..ctx }
    }
}

impl TensorOps for TensorGroup {
    fn index(&self) -> usize {
        self.comm.rank()
    }

    fn size(&self) -> usize {
        self.comm.size()
    }

    fn is_sequence(&self) -> bool {
        self.is_sequence
    }

    fn start(&self, kind: ExchangeKind, x: &Activation, name: &str) -> Result<Exchange, DeviceError> {
        self.tracker.check_input()?;
        if kind != ExchangeKind::AllReduce {
            own_rows(x, [self.index(), self.size()])?;
        }
        let launch = Launch::after(self.compute.record(), Traffic::Activations, name);
        let work = self.tracker.launch(|| match kind {
            ExchangeKind::AllReduce => self.comm.all_reduce(x.buffer(), ReduceOp::Sum, launch),
            ExchangeKind::GatherRows => self.comm.all_gather(x.buffer(), launch),
            ExchangeKind::ReduceScatterRows => self.comm.reduce_scatter(x.buffer(), ReduceOp::Sum, launch),
        });
        Ok(Exchange::new(work.event().clone(), x))
    }

    fn finish(&self, exchange: Exchange) -> Result<(), DeviceError> {
        let deadline = self.comm.deadline();
        self.tracker
            .wait_in_stream(self.compute.stream, exchange.done(), deadline);
        self.tracker.check_input()
    }
}
