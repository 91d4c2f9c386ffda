//! One round of data movement, whatever the operation: sums, copies within the node, exchanges with other nodes.
//!
//! Sums, reception and transmission overlap: a block is summed once all its remote contributions are in the
//! rings, and its result is sent while the next block arrives. Contributions never wait for results, so there is no
//! deadlock.
#![allow(unsafe_code, reason = "memory that other ranks map")]

use nix::poll::PollFd;

use super::header::OperationHeader;
use super::shared_memory::ControlSegments;
use super::tcp::{Connection, MemoryRange, PeerExchange, Transfer};
use super::topology::Topology;
use crate::collective::error::Failure;
use crate::collective::reduction::{NodeInput, Reduction};
use crate::collective::wait::{Wait, poll_once};

/// Least elements summed at a time while more are to come.
const LEAST_BLOCK: usize = 8 << 10;

/// Where a contribution is read.
#[derive(Clone, Copy, Debug)]
pub(super) enum SumSource {
    Memory(*const u8),
    /// In the ring of this rank of the group.
    Remote(usize),
}

/// A sum of contributions that this rank makes.
pub(super) struct LocalSum {
    pub(super) reduction: Reduction,
    /// Contributions, by node, in the order of the sum.
    pub(super) sources: Vec<NodeInput<SumSource>>,
    /// Where the result is written.
    pub(super) targets: Vec<*mut u8>,
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
    /// For the ranks of this node.
    pub(super) control: ControlSegments,
    /// To the ranks of other nodes; by rank of the group.
    pub(super) connections: Vec<Option<Connection>>,
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
            header: self.header,
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
    header: OperationHeader,
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
            let (received, result) = exchange.receive(self.summed, &self.header)?;
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
