//! The transport of CPU memory: a rank is a peer wherever it lives, by shared memory on the same node, by TCP on
//! another one.
//!
//! Every operation begins in the same way: each rank writes a header of what it does, the ranks of a node meet,
//! and each compares its header with those of all peers. Then, by where the elements are:
//! - *brief*: the elements lie beside the header; everyone reads what it needs and is done;
//! - *in place*: the buffers are in shared arenas; rank r works on slice r of all buffers, and the ranks meet again;
//! - *staged*: other buffers go through small stages in the same way, three rounds in flight.
//!
//! A group on several nodes with several ranks on one of them takes the second way only if all ranks use the same
//! shared arena, and refuses a mixture; on one node, a mixture goes the third way.
#![allow(unsafe_code, reason = "memory that other ranks map")]

use std::sync::Arc;

use super::board::Board;
use super::group::Group;
use super::header::{Address, Header};
use super::link::Link;
use super::moves::{Means, Moves};
use super::plan::{Job, Views};
use super::segment::SharedSegment;
use super::staging::Rounds;
use super::{Failure, Operation, Place, Request, Transport, Wait, WireBytes};
use crate::device::{Arena, ArenaSpec, Device, Held};

/// See the module.
pub(super) struct Flat {
    pub(super) place: Place,
    pub(super) group: Group,
    pub(super) board: Board,
    pub(super) links: Vec<Option<Link>>,
    pub(super) collectives: u64,
    pub(super) pairs: Vec<super::message::Pair>,
    wire: WireBytes,
}

impl Flat {
    /// A transport over connections that are there. `links` are by rank of the group.
    pub(super) fn new(place: Place, group: Group, board: Board, links: Vec<Option<Link>>) -> Self {
        let pairs = vec![super::message::Pair::default(); group.size()];
        Self {
            place,
            group,
            board,
            links,
            collectives: 0,
            pairs,
            wire: WireBytes::default(),
        }
    }

    fn collective(&mut self, request: &Request, held: &mut Held, wait: &Wait) -> Result<u64, Failure> {
        let job = Job::of(request);
        let base = held.host_ptr()?;
        let mut header = Header::of(request, self.group.me(), self.next(), address(request));
        if !self.group.is_scattered() && !self.group.is_gathered() {
            // Between nodes the rounds must match, so all must go the same way.
            header = header.with_common_arena();
        }
        let brief = job.is_brief(self.group.size());
        self.board.announce(&header);
        if brief {
            // SAFETY: a slot has room for a brief operation, it is ours until the meeting, and the buffer is held.
            unsafe { self.fill_slot(&job, base) };
        }
        self.board.meet(wait)?;
        self.compare(&header)?;
        job.check(self.group.size())?;
        if brief {
            let given: Vec<_> = (0..self.board.ranks())
                .map(|rank| self.board.slot(rank))
                .collect();
            let views = Views {
                given: &given,
                own: base,
            };
            let moves = job.plan(&self.group, &views, header, true)?;
            // SAFETY: everyone only reads the slots, and writes its own held buffer.
            return unsafe { self.run(moves, false, wait) };
        }
        match self.reachable_views(request, base)? {
            Some(given) => {
                let views = Views {
                    given: &given,
                    own: base,
                };
                let moves = job.plan(&self.group, &views, header, false)?;
                // SAFETY: all ranks hold these buffers; each writes slices that no other touches.
                let counted = unsafe { self.run(moves, true, wait) }?;
                self.board.meet(wait)?;
                Ok(counted)
            }
            // SAFETY: the buffer is held.
            None => unsafe { self.staged(job, base, header, wait) },
        }
    }

    /// Compares the headers of all neighbours with ours.
    pub(super) fn compare(&self, header: &Header) -> Result<(), Failure> {
        for (neighbour, &rank) in self.group.neighbours().iter().enumerate() {
            header.agree(&self.board.header(neighbour), self.group.global(rank))?;
        }
        Ok(())
    }

    /// The number of the next collective.
    pub(super) fn next(&mut self) -> u64 {
        self.collectives += 1;
        self.collectives - 1
    }

    /// Carries out moves.
    ///
    /// # Safety
    /// As [`Moves::run`].
    pub(super) unsafe fn run(
        &mut self,
        moves: Moves,
        meets_after: bool,
        wait: &Wait,
    ) -> Result<u64, Failure> {
        let mut means = Means {
            links: &mut self.links,
            board: &self.board,
            meets_after,
            wait,
        };
        // SAFETY: the caller's promise, passed on.
        unsafe { moves.run(&mut means) }
    }

    /// # Safety
    /// The job must be brief, `base` must be its buffer, and no peer may access it.
    unsafe fn fill_slot(&self, job: &Job, base: *const u8) {
        let given = job.given(&self.group);
        let element = job.dtype.bytes();
        let (start, len) = (given.start * element, given.len() * element);
        let slot = self.board.slot(self.board.me());
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(base.add(start), slot.add(start), len) };
    }

    /// Where the buffers of all neighbours are mapped, if all are in the same shared arena, or there are none.
    fn reachable_views(&self, request: &Request, base: *mut u8) -> Result<Option<Vec<*mut u8>>, Failure> {
        if self.group.is_scattered() {
            return Ok(Some(vec![base]));
        }
        let Some(segment) = SharedSegment::behind(&request.buffer) else {
            return Ok(None);
        };
        let addresses = (0..self.board.ranks()).map(|rank| self.board.header(rank).address());
        let same = |address: Option<Address>| address.filter(|a| a.arena == segment.number());
        let Some(addresses) = addresses.map(same).collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        let views = self
            .group
            .neighbours()
            .iter()
            .zip(addresses)
            .map(|(&rank, address)| {
                if rank == self.group.me() {
                    return Ok(base);
                }
                let global = self.group.global(rank);
                segment
                    .of_neighbour(global, address.offset, request.buffer.bytes())
                    .ok_or_else(|| {
                        Failure::Invalid(format!(
                            "the buffer of rank {global} is not in `{:?}`",
                            request.buffer.arena()
                        ))
                    })
            });
        views.collect::<Result<_, _>>().map(Some)
    }

    /// Takes a private buffer through the stages. In each step one round is filled, the round before it is worked
    /// on, the one before that is emptied, and all meet.
    ///
    /// # Safety
    /// `base` must be the held buffer of the job.
    unsafe fn staged(
        &mut self,
        job: Job,
        base: *mut u8,
        header: Header,
        wait: &Wait,
    ) -> Result<u64, Failure> {
        let rounds = Rounds::new(job, base, &self.group)?;
        let (count, me) = (rounds.count(), self.board.me());
        let mut counted = 0;
        for step in 0..count + 2 {
            if step < count {
                // SAFETY: what was in this stage was emptied in the step before, and worked on before that.
                unsafe { rounds.fill(step, self.board.stage(me, step), &self.group) };
            }
            if (1..=count).contains(&step) {
                let round = step - 1;
                let given: Vec<_> = (0..self.board.ranks())
                    .map(|r| self.board.stage(r, round))
                    .collect();
                let views = Views {
                    given: &given,
                    own: given[me],
                };
                let moves = rounds.job(round).plan(&self.group, &views, header, false)?;
                // SAFETY: all have filled this stage before the last meeting and leave it alone until the next,
                // but for this work, in which each writes slices that no other touches.
                counted += unsafe { self.run(moves, true, wait) }?;
            }
            if step >= 2 {
                // SAFETY: all have worked on this stage before the last meeting.
                unsafe { rounds.empty(step - 2, self.board.stage(me, step - 2), &self.group) };
            }
            if step <= count {
                self.board.meet(wait)?;
            }
        }
        Ok(counted)
    }
}

impl Transport for Flat {
    fn rank(&self) -> usize {
        self.group.me()
    }

    fn members(&self) -> &[usize] {
        self.group.globals()
    }

    fn execute(
        &mut self,
        _sequence: u64,
        request: &Request,
        held: &mut Held,
        wait: &Wait,
    ) -> Result<(), Failure> {
        let counted = match request.operation {
            Operation::Send { to: peer } | Operation::Recv { from: peer } => {
                self.message(peer, request, held, wait)?
            }
            _ => self.collective(request, held, wait)?,
        };
        self.wire.add(request.traffic, counted);
        Ok(())
    }

    fn alloc_shared(
        &mut self,
        _device: &Arc<dyn Device>,
        spec: &ArenaSpec,
        wait: &Wait,
    ) -> Result<Arena, Failure> {
        self.share(spec, wait)
    }

    fn split(&mut self, name: &str, members: &[usize], wait: &Wait) -> Result<Box<dyn Transport>, Failure> {
        self.subgroup(name, members, wait)
    }

    fn wire_bytes(&self) -> WireBytes {
        self.wire
    }
}

fn address(request: &Request) -> Option<Address> {
    let segment = SharedSegment::behind(&request.buffer)?;
    Some(Address {
        arena: segment.number(),
        offset: request.buffer.start() as u64,
    })
}
