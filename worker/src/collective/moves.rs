//! One round of data movement, whatever the operation: sums, copies within the node, flows to other nodes.
//!
//! Sums, reception and transmission overlap: a block is summed once all its remote contributions are in the
//! rings, and its result leaves while the next block arrives. Contributions never wait for results, so no circle
//! of waiting can form.
#![allow(unsafe_code, reason = "memory that other ranks map")]

use nix::poll::PollFd;

use super::board::Board;
use super::flow::{Flow, Script, Span};
use super::header::Header;
use super::kernel::{NodeGives, Reduction};
use super::link::Link;
use super::patience::poll_once;
use super::{Failure, Wait};

/// Least elements summed at a time while more are to come.
const LEAST_BLOCK: usize = 8 << 10;

/// Where a contribution is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    /// In memory.
    Here(*const u8),
    /// In the ring of this rank of the group.
    Far(usize),
}

/// A sum of contributions.
pub(super) struct Fold {
    /// How.
    pub(super) reduction: Reduction,
    /// Contributions, by node, in the order of the sum.
    pub(super) sources: Vec<NodeGives<Source>>,
    /// Where the result goes.
    pub(super) targets: Vec<*mut u8>,
    /// Number of elements.
    pub(super) elements: usize,
    /// Bytes of other ranks, read and written for each element, for the counters.
    pub(super) foreign: usize,
}

/// See the module.
pub(super) struct Moves {
    /// What the peers must agree with.
    pub(super) header: Header,
    /// A sum, if the operation has one. The results that are sent are then those of the sum.
    pub(super) fold: Option<Fold>,
    /// Copies from neighbours' memory.
    pub(super) copies: Vec<(*const u8, Span)>,
    /// What remote peers send and get.
    pub(super) scripts: Vec<Script>,
}

/// What a round needs of the transport.
pub(super) struct Means<'a> {
    /// Connections, by rank of the group.
    pub(super) links: &'a mut [Option<Link>],
    /// The neighbours: one that dies before the meeting behind this round ends the round.
    pub(super) board: &'a Board,
    /// True if there is such a meeting.
    pub(super) meets_after: bool,
    /// Bound.
    pub(super) wait: &'a Wait,
}

impl Moves {
    /// Nothing but headers to the remote peers.
    pub(super) fn new(header: Header) -> Self {
        Self {
            header,
            fold: None,
            copies: Vec::new(),
            scripts: Vec::new(),
        }
    }

    /// Carries the round out. Returns the bytes that this rank took from others or gave to them as results, as
    /// [`super::WireBytes`] counts them.
    ///
    /// # Safety
    /// All memory must be valid, and disjoint from what other ranks write until the meeting after the round.
    pub(super) unsafe fn run(self, means: &mut Means<'_>) -> Result<u64, Failure> {
        let mut round = Round {
            flows: flows(self.scripts, means.links, &self.header),
            fold: self.fold,
            header: self.header,
            folded: 0,
            counted: 0,
        };
        round.send()?;
        for (from, to) in self.copies {
            // SAFETY: the caller's promise; the source is a neighbour's memory, the target our own.
            unsafe { std::ptr::copy_nonoverlapping(from, to.start, to.len) };
            round.counted += to.len as u64;
        }
        loop {
            let received = round.receive()?;
            // SAFETY: the caller's promise, passed on.
            let folded = unsafe { round.fold_ready() };
            let sent = round.send()?;
            if round.done() {
                let among_neighbours: u64 = round.flows.iter().map(Flow::among_neighbours).sum();
                return Ok(round.counted + among_neighbours);
            }
            if !(received || folded || sent) {
                round.sleep(means.board, means.meets_after, means.wait)?;
            }
        }
    }
}

fn flows<'a>(scripts: Vec<Script>, links: &'a mut [Option<Link>], header: &Header) -> Vec<Flow<'a>> {
    let mut scripts = scripts.into_iter().peekable();
    let mut flows = Vec::with_capacity(scripts.len());
    for (rank, link) in links.iter_mut().enumerate() {
        if let (Some(link), Some(script)) = (link, scripts.next_if(|script| script.rank == rank)) {
            flows.push(Flow::new(link, script, header));
        }
    }
    assert!(
        scripts.next().is_none(),
        "scripts are in order of rank, each with a connection"
    );
    flows
}

struct Round<'a> {
    flows: Vec<Flow<'a>>,
    fold: Option<Fold>,
    header: Header,
    /// Elements of the sum that are done.
    folded: usize,
    counted: u64,
}

impl Round<'_> {
    fn done(&self) -> bool {
        let summed = self.fold.as_ref().is_none_or(|fold| self.folded == fold.elements);
        summed && self.flows.iter().all(Flow::done)
    }

    /// Bytes of results that may be sent.
    fn ready(&self) -> usize {
        match &self.fold {
            Some(fold) => self.folded * fold.reduction.element_bytes(),
            None => usize::MAX,
        }
    }

    fn receive(&mut self) -> Result<bool, Failure> {
        let mut moved = false;
        for flow in &mut self.flows {
            let (received, result) = flow.receive(self.folded, &self.header)?;
            moved |= received > 0;
            // The results of a sum are counted by who made it.
            if self.fold.is_none() {
                self.counted += result as u64;
            }
        }
        Ok(moved)
    }

    fn send(&mut self) -> Result<bool, Failure> {
        let (mut moved, ready) = (false, self.ready());
        for flow in &mut self.flows {
            let (sent, result) = flow.send(ready)?;
            moved |= sent > 0;
            if self.fold.is_some() {
                self.counted += result as u64;
            }
        }
        Ok(moved)
    }

    /// Sums what is complete.
    ///
    /// # Safety
    /// As [`Moves::run`].
    unsafe fn fold_ready(&mut self) -> bool {
        let Some(fold) = &self.fold else { return false };
        let mut moved = false;
        while self.folded < fold.elements {
            let (mut end, mut in_one_piece) = (fold.elements, fold.elements);
            for flow in self.flows.iter().filter(|flow| flow.contributes()) {
                let ring = flow.elements_in_ring();
                end = end.min(flow.elements());
                in_one_piece = in_one_piece.min((self.folded / ring + 1) * ring);
            }
            end = end.min(in_one_piece);
            let len = end.saturating_sub(self.folded);
            let more_to_come = end < in_one_piece;
            if len == 0 || (more_to_come && len < LEAST_BLOCK) {
                break;
            }
            // SAFETY: the caller's promise; the blocks of remote contributions lie in one piece in their rings.
            unsafe { self.fold_block(fold, len) };
            self.counted += (len * fold.foreign) as u64;
            self.folded += len;
            moved = true;
        }
        moved
    }

    /// # Safety
    /// As [`Moves::run`], and `len` elements of every remote contribution must be in one piece in its ring.
    unsafe fn fold_block(&self, fold: &Fold, len: usize) {
        let at = self.folded;
        let at_byte = at * fold.reduction.element_bytes();
        let locate = |source: &Source| match *source {
            Source::Here(start) => start.wrapping_add(at_byte),
            Source::Far(rank) => {
                let flow = self.flows.iter().find(|flow| flow.rank() == rank);
                flow.expect("a remote source has a flow").contribution(at)
            }
        };
        let sources: Vec<_> = fold.sources.iter().map(|node| node.map(locate)).collect();
        let target = |start: &*mut u8| start.wrapping_add(at_byte);
        let targets: Vec<_> = fold.targets.iter().map(target).collect();
        // SAFETY: the caller's promise, passed on.
        unsafe { fold.reduction.run(&sources, &targets, len) };
    }

    /// Waits until a connection can go on.
    fn sleep(&self, board: &Board, meets_after: bool, wait: &Wait) -> Result<(), Failure> {
        let ready = self.ready();
        let interests = self
            .flows
            .iter()
            .filter_map(|flow| flow.interest(ready, self.folded));
        let mut fds: Vec<_> = interests.map(|(fd, events)| PollFd::new(fd, events)).collect();
        if !poll_once(&mut fds, wait.slice())? {
            board.check_doors(|rank| !board.has_come(rank, u32::from(meets_after)))?;
        }
        wait.check(|| self.waiting_for())
    }

    /// The peers that are furthest behind.
    fn waiting_for(&self) -> Vec<usize> {
        let worst = self.flows.iter().filter_map(Flow::lag).min();
        let behind = self.flows.iter().filter(|flow| flow.lag() == worst);
        behind.map(Flow::global).collect()
    }
}
