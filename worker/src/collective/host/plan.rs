//! Which bytes of which rank each operation moves, and one round of that movement: sums, copies within the node, exchanges
//! with other nodes.
//!
//! Between nodes every byte that all ranks of a node contribute or receive crosses once: for each rank of another node,
//! one of this node is the relay ([`Topology::relay`]). It adds up the contributions of its node to that rank's sum, and
//! copies its result to all of them. With as many ranks on each node, each exchanges data with one rank of every other
//! node. A brief operation, in which this saves nothing, is exchanged by every rank with every other one.
//!
//! Sums, reception and transmission overlap: a block is summed once all its remote contributions are in the
//! rings, and its result is sent while the next block arrives. Contributions never wait for results, so there is no
//! deadlock.
#![allow(unsafe_code, reason = "memory that other ranks map")]

use std::ops::Range;

use nix::poll::PollFd;

use super::exchange::{Contribution, MemoryRange, NodeSum, PeerExchange, Transfer};
use super::header::OperationHeader;
use super::shared_memory::{ControlSegments, SLOT_BYTES};
use super::sockets::Connection;
use super::topology::Topology;
use crate::collective::error::Failure;
use crate::collective::operation::{Descriptor, Operation, Traffic, slice};
use crate::collective::reduction::{NodeInput, Reduction};
use crate::collective::wait::{Wait, poll_once};

/// True if the elements are written beside the header, so that the ranks synchronise once.
///
/// Each rank of an all-reduce then reads everything of all others: (N−1)·S bytes and not 2(N−1)/N·S. With more
/// than two ranks only [`Traffic::Other`] does so.
pub(super) fn is_brief(descriptor: &Descriptor, size: usize) -> bool {
    let is_frugal = !matches!(descriptor.operation, Operation::AllReduce(_))
        || size == 2
        || descriptor.traffic == Traffic::Other;
    is_frugal && descriptor.bytes() <= SLOT_BYTES
}

/// The elements that `rank` of a group of `size` contributes, so that others can read them.
pub(super) fn given(descriptor: &Descriptor, size: usize, rank: usize) -> Range<usize> {
    match descriptor.operation {
        Operation::AllReduce(_) | Operation::ReduceScatter(_) => 0..descriptor.len,
        Operation::AllGather => slice(descriptor.len, size, rank),
        Operation::Broadcast { root } if root == rank => 0..descriptor.len,
        _ => 0..0,
    }
}

/// A checked operation, and where its elements are in memory.
pub(super) struct RoundPlan<'a> {
    pub(super) descriptor: Descriptor,
    pub(super) topology: &'a Topology,
    /// By rank: what it contributes, if this rank can read it in memory. `None`: it comes over the connection to it.
    pub(super) views: Vec<Option<*mut u8>>,
    /// Where this rank's own result is written. In place, the same as what it contributes.
    pub(super) own: *mut u8,
    /// Others do not write into this rank's memory.
    pub(super) brief: bool,
}

impl RoundPlan<'_> {
    /// What this rank does.
    pub(super) fn round(&self, header: OperationHeader) -> Round {
        let mut round = Round::new(header);
        match self.descriptor.operation {
            Operation::AllReduce(_) => self.all_reduce(&mut round),
            Operation::ReduceScatter(_) => self.reduce_scatter(&mut round),
            Operation::AllGather => self.all_gather(&mut round),
            Operation::Broadcast { root } => self.broadcast(root, &mut round),
            Operation::AllToAll | Operation::Barrier | Operation::Send { .. } | Operation::Recv { .. } => {
                round.transfers = self.with_all(Transfer::header_only);
            }
        }
        round
    }

    /// Brief: each rank sums everything for itself. Else rank r sums slice r and writes the result to all.
    fn all_reduce(&self, round: &mut Round) {
        if self.brief {
            let whole = 0..self.descriptor.len;
            round.sum = Some(self.sum(&whole, vec![self.own]));
            round.transfers = self.with_relays(|transfer| self.summed_by(transfer, &whole, &whole));
            return;
        }
        let own = self.own_slice();
        let targets = self.views.iter().flatten();
        let targets = targets.map(|view| self.range(*view, &own).start);
        round.sum = Some(self.sum(&own, targets.collect()));
        round.transfers = self.with_relays(|transfer| {
            let given = self.slice(transfer.rank);
            self.result_of(self.summed_by(transfer, &given, &own))
        });
    }

    /// Rank r sums slice r and keeps it.
    fn reduce_scatter(&self, round: &mut Round) {
        let own = self.own_slice();
        round.sum = Some(self.sum(&own, vec![self.range(self.own, &own).start]));
        round.transfers = self.with_relays(|transfer| {
            let given = self.slice(transfer.rank);
            self.summed_by(transfer, &given, &own)
        });
    }

    /// Each rank reads the slices of all others.
    fn all_gather(&self, round: &mut Round) {
        for (view, rank) in self.other_views() {
            let theirs = self.slice(rank);
            let from = self.range(view, &theirs).start;
            round.copies.push((from, self.range(self.own, &theirs)));
        }
        round.transfers = self.with_relays(|transfer| self.result_of(transfer));
    }

    /// Each rank reads the root's elements.
    fn broadcast(&self, root: usize, round: &mut Round) {
        let (topology, whole) = (self.topology, 0..self.descriptor.len);
        let own = self.range(self.own, &whole);
        round.transfers = self.with_all(|rank| {
            let mut transfer = Transfer::header_only(rank);
            if root == topology.rank() && self.is_relay(rank, root) {
                transfer.result_out = self.range(self.own_view(), &whole);
            } else if root == rank && self.is_relay(topology.rank(), root) {
                transfer.result_in = own;
                transfer.result_copies = self.at_others(&whole);
            }
            transfer
        });
        match self.views[root] {
            Some(view) if root != topology.rank() => round.copies.push((view, own)),
            _ => {}
        }
    }

    /// The ranks whose elements are not in memory.
    fn remote(&self) -> impl Iterator<Item = usize> {
        (0..self.views.len()).filter(|&rank| self.views[rank].is_none())
    }

    /// An exchange with each of them.
    fn with_all(&self, transfer: impl FnMut(usize) -> Transfer) -> Vec<Transfer> {
        self.remote().map(transfer).collect()
    }

    /// An exchange with each of them where one of the two is the relay of its node for the other.
    fn with_relays(&self, transfer: impl Fn(Transfer) -> Transfer) -> Vec<Transfer> {
        let me = self.topology.rank();
        let related = |&rank: &usize| self.is_relay(me, rank) || self.is_relay(rank, me);
        let ranks = self.remote().filter(related);
        ranks.map(|rank| transfer(Transfer::header_only(rank))).collect()
    }

    /// True if `rank` exchanges data with the rank `other` for its whole node; brief, each does so for itself.
    fn is_relay(&self, rank: usize, other: usize) -> bool {
        self.brief || self.topology.relay(self.topology.node_of(rank), other) == rank
    }

    /// True if a node contributes the sum of its ranks to a sum that is made on another node.
    fn adds_up(&self, node: &[usize]) -> bool {
        !self.brief && node.len() > 1
    }

    /// The peer sums the elements `given`, and this rank the elements `taken`.
    fn summed_by(&self, mut transfer: Transfer, given: &Range<usize>, taken: &Range<usize>) -> Transfer {
        let (me, peer) = (self.topology.rank(), transfer.rank);
        if self.is_relay(me, peer) {
            transfer.contribution = self.contribution(given);
        }
        if self.is_relay(peer, me) {
            let node = &self.topology.nodes()[self.topology.node_of(peer)];
            transfer.taken_element = if self.adds_up(node) {
                self.reduction().partial_bytes()
            } else {
                self.element_bytes()
            };
            transfer.taken = taken.len() * transfer.taken_element;
        }
        transfer
    }

    /// The peer has the result of its slice, and this rank that of its own.
    fn result_of(&self, mut transfer: Transfer) -> Transfer {
        let (me, peer) = (self.topology.rank(), transfer.rank);
        if self.is_relay(peer, me) {
            transfer.result_out = self.range(self.own_view(), &self.own_slice());
        }
        if self.is_relay(me, peer) {
            let theirs = self.slice(peer);
            transfer.result_in = self.range(self.own, &theirs);
            transfer.result_copies = self.at_others(&theirs);
        }
        transfer
    }

    /// What the ranks of this node contribute to a sum that is made on another one.
    fn contribution(&self, range: &Range<usize>) -> Contribution {
        if !self.adds_up(self.topology.local_ranks()) {
            return Contribution::InMemory(self.range(self.own_view(), range));
        }
        let ranks = self.topology.local_ranks().iter();
        let ranks = ranks.filter_map(|&rank| self.views[rank]);
        let ranks = ranks.map(|view| self.range(view, range).start.cast_const());
        Contribution::Summed(NodeSum::new(self.reduction(), ranks.collect(), range.len()))
    }

    /// The same elements of the other ranks of this node, if this one may write there.
    fn at_others(&self, range: &Range<usize>) -> Vec<*mut u8> {
        let others = self.other_views().filter(|_| !self.brief);
        others.map(|(view, _)| self.range(view, range).start).collect()
    }

    /// What other ranks contribute in memory, with their ranks.
    fn other_views(&self) -> impl Iterator<Item = (*mut u8, usize)> {
        let views = self.views.iter().zip(0..);
        let views = views.filter_map(|(view, rank)| Some(((*view)?, rank)));
        views.filter(|&(_, rank)| rank != self.topology.rank())
    }

    /// The sum over all ranks: over those of another node by their relay, unless each contributes for itself.
    fn sum(&self, range: &Range<usize>, targets: Vec<*mut u8>) -> LocalSum {
        let (topology, reduction) = (self.topology, self.reduction());
        let mut foreign = (targets.len() - 1) * self.element_bytes();
        let mut sources = Vec::with_capacity(topology.nodes().len());
        for (index, node) in topology.nodes().iter().enumerate() {
            let is_own = index == topology.own_node();
            if !is_own && self.adds_up(node) {
                let relay = topology.relay(index, topology.rank());
                foreign += reduction.partial_bytes();
                sources.push(NodeInput::Partial(SumSource::Remote(relay)));
            } else {
                foreign += (node.len() - usize::from(is_own)) * self.element_bytes();
                sources.push(self.ranks_of(node, range));
            }
        }
        LocalSum {
            reduction,
            sources,
            targets,
            elements: range.len(),
            foreign,
        }
    }

    fn ranks_of(&self, node: &[usize], range: &Range<usize>) -> NodeInput<SumSource> {
        let source = |&rank: &usize| match self.views[rank] {
            Some(view) => SumSource::Memory(self.range(view, range).start),
            None => SumSource::Remote(rank),
        };
        NodeInput::Ranks(node.iter().map(source).collect())
    }

    fn reduction(&self) -> Reduction {
        let op = self.descriptor.operation.reduction();
        Reduction::new(self.descriptor.dtype, op.expect("only reductions add up"))
    }

    fn element_bytes(&self) -> usize {
        self.descriptor.dtype.bytes()
    }

    /// What this rank contributes.
    fn own_view(&self) -> *mut u8 {
        self.views[self.topology.rank()].expect("a rank reads its own elements")
    }

    fn own_slice(&self) -> Range<usize> {
        self.slice(self.topology.rank())
    }

    fn slice(&self, rank: usize) -> Range<usize> {
        slice(self.descriptor.len, self.topology.size(), rank)
    }

    fn range(&self, view: *mut u8, range: &Range<usize>) -> MemoryRange {
        let width = self.element_bytes();
        MemoryRange::new(view.wrapping_add(range.start * width), range.len() * width)
    }
}

/// Least elements summed at a time while more are to come.
const LEAST_BLOCK: usize = 8 << 10;

/// Where a contribution is read.
#[derive(Clone, Copy, Debug)]
enum SumSource {
    Memory(*const u8),
    /// In the ring of this rank of the group.
    Remote(usize),
}

/// A sum of contributions that this rank makes.
pub(super) struct LocalSum {
    pub(super) reduction: Reduction,
    /// Contributions, by node, in the order of the sum.
    sources: Vec<NodeInput<SumSource>>,
    /// Where the result is written.
    targets: Vec<*mut u8>,
    pub(super) elements: usize,
    /// Bytes of other ranks that are read and written for each element, for the counters.
    pub(super) foreign: usize,
}

/// What this rank does in a round.
pub(super) struct Round {
    /// The peers' headers must agree with it.
    pub(super) header: OperationHeader,
    /// A sum, if the operation has one. The results that are sent are then those of the sum.
    pub(super) sum: Option<LocalSum>,
    /// Copies from the memory of other ranks of the node.
    pub(super) copies: Vec<(*const u8, MemoryRange)>,
    /// By rank, each with a connection.
    pub(super) transfers: Vec<Transfer>,
}

/// How this rank reaches the others of its group.
pub(super) struct Peers {
    pub(super) topology: Topology,
    /// Shared memory with the ranks of this node.
    pub(super) control: ControlSegments,
    /// By rank of the group; none to itself.
    pub(super) connections: Vec<Option<Connection>>,
    /// What the ranks of all nodes contribute to an operation along the tree.
    pub(super) gathered: Vec<u64>,
}

impl Round {
    pub(super) fn new(header: OperationHeader) -> Self {
        Self {
            header,
            sum: None,
            copies: Vec::new(),
            transfers: Vec::new(),
        }
    }

    /// Carries the round out. Returns the bytes on the wire, as [`crate::collective::WireBytes`] counts them. A rank of
    /// the node whose process ends before the barrier that it needs ends the round: the last one of this rank, or, with
    /// `barrier_follows`, the next one.
    ///
    /// # Safety
    /// All memory must be valid, and disjoint from what other ranks write until the barrier after the round.
    pub(super) unsafe fn run(
        self,
        peers: &mut Peers,
        barrier_follows: bool,
        wait: &Wait,
    ) -> Result<u64, Failure> {
        let mut round = RunningRound {
            exchanges: start(self.transfers, &mut peers.connections, &self.header),
            sum: self.sum,
            summed: 0,
            counted: 0,
        };
        round.send()?;
        for (from, to) in self.copies {
            // SAFETY: the caller's promise; the source is memory of another rank, the target our own.
            unsafe { std::ptr::copy_nonoverlapping(from, to.start, to.len) };
            round.counted += to.len as u64;
        }
        loop {
            let received = round.receive()?;
            // SAFETY: the caller's promise, passed on.
            let summed = unsafe { round.sum_ready() };
            let sent = round.send()?;
            if round.done() {
                let within_node: u64 = round.exchanges.iter().map(PeerExchange::within_node).sum();
                return Ok(round.counted + within_node);
            }
            if !(received || summed || sent) {
                round.sleep(&peers.control, barrier_follows, wait)?;
            }
        }
    }
}

fn start<'a>(
    transfers: Vec<Transfer>,
    links: &'a mut [Option<Connection>],
    header: &OperationHeader,
) -> Vec<PeerExchange<'a>> {
    let mut transfers = transfers.into_iter().peekable();
    let mut exchanges = Vec::with_capacity(transfers.len());
    for (rank, link) in links.iter_mut().enumerate() {
        if let (Some(link), Some(transfer)) = (link, transfers.next_if(|transfer| transfer.rank == rank)) {
            exchanges.push(PeerExchange::new(link, transfer, header));
        }
    }
    assert!(
        transfers.next().is_none(),
        "transfers are in order of rank, each with a connection"
    );
    exchanges
}

struct RunningRound<'a> {
    exchanges: Vec<PeerExchange<'a>>,
    sum: Option<LocalSum>,
    /// Elements.
    summed: usize,
    counted: u64,
}

impl RunningRound<'_> {
    fn done(&self) -> bool {
        let summed = self.sum.as_ref().is_none_or(|sum| self.summed == sum.elements);
        summed && self.exchanges.iter().all(PeerExchange::done)
    }

    /// Bytes of the result that can be sent.
    fn ready(&self) -> usize {
        match &self.sum {
            Some(sum) => self.summed * sum.reduction.element_bytes(),
            None => usize::MAX,
        }
    }

    fn receive(&mut self) -> Result<bool, Failure> {
        let mut moved = false;
        for exchange in &mut self.exchanges {
            let (received, result) = exchange.receive(self.summed)?;
            moved |= received > 0;
            // The results of a sum are counted by the rank that made it.
            if self.sum.is_none() {
                self.counted += result as u64;
            }
        }
        Ok(moved)
    }

    fn send(&mut self) -> Result<bool, Failure> {
        let (mut moved, ready) = (false, self.ready());
        for exchange in &mut self.exchanges {
            let (sent, result) = exchange.send(ready)?;
            moved |= sent > 0;
            if self.sum.is_some() {
                self.counted += result as u64;
            }
        }
        Ok(moved)
    }

    /// Sums the blocks whose contributions are complete.
    ///
    /// # Safety
    /// As [`Round::run`].
    unsafe fn sum_ready(&mut self) -> bool {
        let Some(sum) = &self.sum else { return false };
        let mut moved = false;
        while self.summed < sum.elements {
            let (mut end, mut in_one_piece) = (sum.elements, sum.elements);
            for exchange in self.exchanges.iter().filter(|exchange| exchange.contributes()) {
                let ring = exchange.elements_in_ring();
                end = end.min(exchange.elements());
                in_one_piece = in_one_piece.min((self.summed / ring + 1) * ring);
            }
            end = end.min(in_one_piece);
            let len = end.saturating_sub(self.summed);
            let more_to_come = end < in_one_piece;
            if len == 0 || (more_to_come && len < LEAST_BLOCK) {
                break;
            }
            // SAFETY: the caller's promise; the blocks of remote contributions are in one piece in their rings.
            unsafe { self.sum_block(sum, len) };
            self.counted += (len * sum.foreign) as u64;
            self.summed += len;
            moved = true;
        }
        moved
    }

    /// # Safety
    /// As [`Round::run`], and `len` elements of every remote contribution must be in one piece in its ring.
    unsafe fn sum_block(&self, sum: &LocalSum, len: usize) {
        let at = self.summed;
        let at_byte = at * sum.reduction.element_bytes();
        let locate = |source: &SumSource| match *source {
            SumSource::Memory(start) => start.wrapping_add(at_byte),
            SumSource::Remote(rank) => {
                let exchange = self.exchanges.iter().find(|exchange| exchange.rank() == rank);
                exchange.expect("a remote source has a exchange").contribution(at)
            }
        };
        let sources: Vec<_> = sum.sources.iter().map(|node| node.map(locate)).collect();
        let target = |start: &*mut u8| start.wrapping_add(at_byte);
        let targets: Vec<_> = sum.targets.iter().map(target).collect();
        // SAFETY: the caller's promise, passed on.
        unsafe { sum.reduction.run(&sources, &targets, len) };
    }

    /// Waits until something can be sent or received.
    fn sleep(&self, control: &ControlSegments, barrier_follows: bool, wait: &Wait) -> Result<(), Failure> {
        let ready = self.ready();
        let interests = self
            .exchanges
            .iter()
            .filter_map(|exchange| exchange.interest(ready, self.summed));
        let mut fds: Vec<_> = interests.map(|(fd, events)| PollFd::new(fd, events)).collect();
        if !poll_once(&mut fds, wait.interval())? {
            control.check_alive(u32::from(barrier_follows))?;
        }
        wait.check(|| self.waiting_for())
    }

    /// The peers that are furthest behind.
    fn waiting_for(&self) -> Vec<usize> {
        let worst = self.exchanges.iter().filter_map(PeerExchange::lag).min();
        let behind = self.exchanges.iter().filter(|exchange| exchange.lag() == worst);
        behind.map(PeerExchange::global).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::host::topology::Member;
    use crate::collective::operation::{ReduceOp, Request};
    use crate::device::DType;

    /// Topology of one rank of a world with so many ranks on each node.
    fn topology(nodes: &[usize], me: usize) -> Topology {
        let member = |(node, &ranks): (usize, &usize)| (0..ranks).map(move |local| (node, local));
        let members = nodes.iter().enumerate().flat_map(member).enumerate();
        let members = members.map(|(global, (node, local))| Member { global, node, local });
        Topology::new(members.collect(), me)
    }

    fn transfers(nodes: &[usize], me: usize, operation: Operation, dtype: DType) -> Vec<Transfer> {
        let topology = topology(nodes, me);
        let descriptor = Descriptor {
            operation,
            dtype,
            len: 840,
            traffic: Traffic::Grads,
        };
        let local = |rank| topology.local_index(rank).map(|_| std::ptr::null_mut());
        let views = (0..topology.size()).map(local).collect();
        let header = OperationHeader::of(
            &Request {
                operation,
                buffer: buffer(dtype),
                all_to_all: None,
                traffic: descriptor.traffic,
                tag: "test".into(),
            },
            me,
            0,
        );
        let plan = RoundPlan {
            descriptor,
            topology: &topology,
            views,
            own: std::ptr::null_mut(),
            brief: false,
        };
        plan.round(header).transfers
    }

    fn buffer(dtype: DType) -> crate::device::Buffer {
        use crate::device::{ArenaSpec, CpuDevice, Device as _};
        let spec = ArenaSpec::private("test", dtype, 840);
        CpuDevice::new(1).unwrap().alloc(&spec).unwrap().whole()
    }

    /// For every slice each other node sends one sum and receives one result, however many ranks it has.
    #[test]
    fn bytes_cross_between_two_nodes_once() {
        let bytes = 840 * 4;
        for nodes in [&[4, 4][..], &[2, 2, 2], &[3, 3, 2], &[5, 1], &[1, 1, 1]] {
            let (ranks, others) = (nodes.iter().sum::<usize>(), nodes.len() - 1);
            for (operation, given, got) in [
                (
                    Operation::AllReduce(ReduceOp::Sum),
                    others * bytes,
                    others * bytes,
                ),
                (Operation::ReduceScatter(ReduceOp::Sum), others * bytes, 0),
                (Operation::AllGather, 0, others * bytes),
                (Operation::Broadcast { root: 1 }, 0, others * bytes),
            ] {
                let (mut contributions, mut taken, mut results_out, mut results_in) = (0, 0, 0, 0);
                for me in 0..ranks {
                    let transfers = transfers(nodes, me, operation, DType::F32);
                    contributions += transfers.iter().map(|s| s.contribution.bytes()).sum::<usize>();
                    taken += transfers.iter().map(|s| s.taken).sum::<usize>();
                    results_out += transfers.iter().map(|s| s.result_out.len).sum::<usize>();
                    results_in += transfers.iter().map(|s| s.result_in.len).sum::<usize>();
                }
                let what = format!("{operation} on {nodes:?}");
                assert_eq!((contributions, taken), (given, given), "{what}");
                assert_eq!((results_out, results_in), (got, got), "{what}");
            }
        }
    }

    /// What one of a pair sends is what the other expects, and with equal nodes each exchanges data with one rank of every node.
    #[test]
    fn pairs_agree() {
        for (nodes, dtype) in [
            (&[4, 4][..], DType::Bf16),
            (&[3, 1, 2], DType::Bf16),
            (&[2, 2, 2], DType::F32),
        ] {
            let ranks = nodes.iter().sum::<usize>();
            let all: Vec<_> = (0..ranks)
                .map(|me| transfers(nodes, me, Operation::AllReduce(ReduceOp::Sum), dtype))
                .collect();
            for (me, transfers) in all.iter().enumerate() {
                if nodes.iter().all(|&ranks| ranks == nodes[0]) {
                    assert_eq!(transfers.len(), nodes.len() - 1);
                }
                for transfer in transfers {
                    let other = all[transfer.rank].iter().find(|other| other.rank == me).unwrap();
                    assert_eq!(
                        transfer.contribution.bytes(),
                        other.taken,
                        "{nodes:?}: {me} to {}",
                        transfer.rank
                    );
                    assert_eq!(transfer.result_out.len, other.result_in.len);
                }
            }
        }
    }
}
