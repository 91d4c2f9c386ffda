//! The ranks that compute blocks together, over communicators: what [`GroupOps`] are for blocks.

use super::comm_times::CommTracker;
use crate::collective::{CollectiveError, Communicator, Launch, ReduceOp, Traffic, WorkError};
use crate::config::ContextAlgorithm;
use crate::device::{ArenaSpec, Compute, DType, DeviceError};
use crate::mesh::{Axis, Mesh};
use crate::model::{Activation, Context, Exchange, ExchangeKind, GroupOps, own_rows};

/// A tensor group, a context group, or the ranks that hold experts together. Sums are in rank order, the same bits on every
/// rank.
///
/// With t ranks and an activation of A bytes, a rank moves 2(t−1)/t·A in an all-reduce, A where it is passed on, and
/// (t−1)/t·A in each of the others, as [`Traffic::Activations`].
pub struct RankGroup {
    pub(super) comm: Communicator,
    /// Makes the activations.
    pub(super) compute: Compute,
    is_sequence: bool,
    /// Of a ring: to the next rank of those at even places, and of the others.
    links: Option<[Communicator; 2]>,
    pub(super) tracker: CommTracker,
}

impl RankGroup {
    /// The ranks of `comm`; `is_sequence`: each holds its own rows of the residual stream. Operations of `comm` best run on
    /// the calling thread, since blocks wait for each.
    pub fn new(comm: Communicator, compute: &Compute, is_sequence: bool) -> Self {
        Self {
            tracker: CommTracker::new(&compute.device, comm.timeline()),
            comm,
            compute: compute.clone(),
            is_sequence,
            links: None,
        }
    }

    /// The same ranks, as a ring where there are two more communicators of them. Operations of these best have a thread of
    /// their own.
    #[must_use]
    pub fn with_ring(self, links: Option<[Communicator; 2]>) -> Self {
        Self { links, ..self }
    }

    /// Exchanges an element with each rank, or passes one on in the ring: NCCL connects to a rank in the first call for it, and
    /// takes memory for that.
    fn connect_links(&self) -> Result<(), WorkError> {
        let exchange = || {
            let ranks = self.size();
            let spec = ArenaSpec::private("first exchange", DType::F32, 2 * ranks);
            let elements = self.compute.device.alloc(&spec)?;
            let part = |start| Activation::borrowed(elements.slice(start..start + ranks), vec![ranks]);
            let (parts, name) = ([&part(0), &part(ranks)], "first exchange");
            if self.is_ring() {
                let passed = self.pass_on(parts, name)?;
                passed
                    .into_iter()
                    .try_for_each(|exchange| self.finish(exchange).map(drop))?;
            } else {
                self.all_to_all(parts, [vec![1; ranks], vec![1; ranks]], name)?;
            }
            self.compute.synchronize()
        };
        let done = exchange().map_err(WorkError::Pending);
        self.tracker.failure().map_or(done, Err)
    }

    /// Times and failure of the exchanges. The failure is behind the errors that blocks return.
    pub fn tracker(&self) -> &CommTracker {
        &self.tracker
    }
}

/// All groups of ranks that compute blocks together with this one; none where this rank does it alone.
pub struct BlockGroups {
    tensor: Option<RankGroup>,
    context: Option<RankGroup>,
    /// The ranks of both.
    all: Option<Communicator>,
    experts: Option<RankGroup>,
}

impl BlockGroups {
    /// Every rank must call it. `is_sequence` is as in [`RankGroup::new`].
    pub fn connect(
        mesh: &Mesh,
        compute: &Compute,
        is_sequence: bool,
        context_algorithm: ContextAlgorithm,
    ) -> Result<Self, WorkError> {
        let connect = |axes: &[Axis], name| {
            let has_several = mesh.size(axes) > 1;
            has_several.then(|| mesh.group_inline(axes, name)).transpose()
        };
        let tensor = connect(&[Axis::Tensor], "activations along tensor")?;
        let context = connect(&[Axis::Context], "activations along context")?;
        let experts = connect(mesh.shape().expert_axes(), "rows of experts")?;
        let all = match (&tensor, &context) {
            (Some(_), Some(_)) => connect(
                &[Axis::Context, Axis::Tensor],
                "activations along context × tensor",
            )?,
            (tensor, context) => tensor.clone().or_else(|| context.clone()),
        };
        let link = |name| mesh.line(Axis::Context, name);
        let is_ring = context.is_some() && context_algorithm == ContextAlgorithm::Ring;
        let links =
            || Ok::<_, CollectiveError>([link("ring, from even ranks")?, link("ring, from odd ranks")?]);
        let links = is_ring.then(links);
        let links = links.transpose()?;
        let groups = Self {
            all,
            tensor: tensor.map(|comm| RankGroup::new(comm, compute, is_sequence)),
            context: context.map(|comm| RankGroup::new(comm, compute, false).with_ring(links)),
            experts: experts.map(|comm| RankGroup::new(comm, compute, false)),
        };
        let ring = groups.context.iter().filter(|group| group.is_ring());
        if compute.device.is_asynchronous() {
            ring.chain(&groups.experts)
                .try_for_each(RankGroup::connect_links)?;
        }
        Ok(groups)
    }

    /// The ranks that sum and gather activations without copies, if these lie in memory that they share.
    pub fn communicator(&self) -> Option<&Communicator> {
        self.all.as_ref()
    }

    /// Of each group.
    pub fn trackers(&self) -> impl Iterator<Item = &CommTracker> {
        let groups = self.tensor.iter().chain(&self.context).chain(&self.experts);
        groups.map(RankGroup::tracker)
    }

    /// For blocks that these ranks compute together.
    pub fn with_groups<'a>(&'a self, mut ctx: Context<'a>) -> Context<'a> {
        ctx.tensor = self.tensor.as_ref().map(|group| group as _);
        ctx.context_group = self.context.as_ref().map(|group| group as _);
        ctx.experts = self.experts.as_ref().map(|group| group as _);
        ctx
    }
}

impl GroupOps for RankGroup {
    fn index(&self) -> usize {
        self.comm.rank()
    }

    fn size(&self) -> usize {
        self.comm.size()
    }

    fn is_sequence(&self) -> bool {
        self.is_sequence
    }

    fn is_ring(&self) -> bool {
        self.links.is_some()
    }

    /// Of two neighbours, one sends first and the other receives first, so that no ranks wait in a circle, with an executor
    /// thread or without. Only with an odd number of ranks, the last one sends and receives over the same link.
    fn pass_on(&self, [sent, received]: [&Activation; 2], name: &str) -> Result<[Exchange; 2], DeviceError> {
        self.tracker.check_input()?;
        let (index, size) = (self.index(), self.size());
        let [next, before] = [(index + 1) % size, (index + size - 1) % size];
        let links = self.links.as_ref().expect("the group is a ring");
        let link = |from: usize| &links[usize::from(from % 2 == 1 || from == size - 1)];
        let launch = || Launch::after(self.compute.record(), Traffic::Activations, name);
        let send = || link(index).send(sent.buffer(), next, launch());
        let receive = || link(before).recv(received.buffer(), before, launch());
        let early = (index % 2 == 1).then(|| self.tracker.launch(receive));
        let send = self.tracker.launch(send);
        let receive = early.unwrap_or_else(|| self.tracker.launch(receive));
        Ok([(send, sent), (receive, received)].map(|(work, x)| Exchange::new(work.event().clone(), x)))
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

    fn finish(&self, exchange: Exchange) -> Result<Activation, DeviceError> {
        let deadline = self.comm.deadline();
        self.tracker
            .wait_in_stream(self.compute.stream, exchange.done(), deadline);
        self.tracker.check_input().map(|()| exchange.into_activation())
    }
}
