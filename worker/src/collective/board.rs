//! The memory through which the ranks of one node meet: one small segment a rank, mapped by all of them.
//!
//! | part | written by | content |
//! |---|---|---|
//! | progress | owner | number of meetings it has come to |
//! | turnstile (first rank's only) | all | arrivals, and the meetings that are complete |
//! | pairs | owner, one each neighbour | counters and header of messages to and from that neighbour |
//! | two slots | owner, alternating | header of its operation, and its elements where they are few |
//! | three stages | all, by the protocol of the operation | pieces of buffers that peers cannot reach |
//!
//! A slot is written again two operations later. By then everyone has read it: a rank that enters operation
//! `k + 2` has met all others in `k + 1`, who therefore had left `k`.
#![allow(unsafe_code, reason = "words and bytes in mapped segments")]

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::door::Door;
use super::futex::{Gate, reached};
use super::header::{HEADER_BYTES, Header};
use super::{Failure, Wait};
use crate::device::HostMemory;

/// Most bytes of an operation whose elements travel beside its header.
pub(super) const SLOT_BYTES: usize = 32 << 10;
/// Size of a stage.
pub(super) const STAGE_BYTES: usize = 512 << 10;
/// Number of stages: one is filled, one is worked on, one is emptied.
pub(super) const STAGES: usize = 3;

/// How long a wait spins before it sleeps. About the cost of a sleep and a wake.
const SPIN: Duration = Duration::from_micros(50);
/// How long of that it keeps its core.
const SPIN_ALONE: Duration = Duration::from_micros(5);
const SPINS_BETWEEN_LOOKS: usize = 32;

const LINE: usize = 64;
const PAGE: usize = 4096;
const PROGRESS: usize = 0;
const ARRIVALS: usize = LINE;
const TURNSTILE: usize = 2 * LINE;
const PAIRS: usize = 4 * LINE;
const PAIR_BYTES: usize = 4 * LINE;
const SLOT_STRIDE: usize = LINE + SLOT_BYTES;

/// One rank of this node.
pub(super) struct Neighbour {
    /// Global rank, for errors.
    pub(super) global: usize,
    /// None for this rank itself.
    pub(super) door: Option<Door>,
}

/// Counters of the messages between two ranks.
#[derive(Clone, Copy, Debug)]
pub(super) enum PairGate {
    /// Messages that the owner has announced.
    Announced = 0,
    /// Pieces that the owner has put into its stages.
    Put = 1,
    /// Pieces that the owner has taken from the other's stages.
    Taken = 2,
}

/// See the module.
pub(super) struct Board {
    neighbours: Vec<Neighbour>,
    segments: Vec<HostMemory>,
    me: usize,
    meetings: u32,
    turn: usize,
    spin: bool,
}

impl Board {
    /// Makes this rank's segment and maps those of the others, which all do the same.
    pub(super) fn new(
        neighbours: Vec<Neighbour>,
        me: usize,
        spin: bool,
        wait: &Wait,
    ) -> Result<Self, Failure> {
        const LABEL: u64 = 0;
        let bytes = stage_offset(neighbours.len(), STAGES);
        let mut own = Some(HostMemory::shared("control", bytes)?);
        let fd = own
            .as_ref()
            .and_then(HostMemory::fd)
            .expect("shared memory has a descriptor");
        for neighbour in &neighbours {
            if let Some(door) = &neighbour.door {
                door.give(LABEL, fd.as_fd(), neighbour.global, wait)?;
            }
        }
        let mut segments = Vec::with_capacity(neighbours.len());
        for neighbour in &neighbours {
            segments.push(match &neighbour.door {
                Some(door) => {
                    let fd = door.take(LABEL, neighbour.global, wait)?;
                    HostMemory::map("control", fd, bytes)?
                }
                None => own.take().expect("only this rank has no door"),
            });
        }
        Ok(Self {
            neighbours,
            segments,
            me,
            meetings: 0,
            turn: 0,
            spin,
        })
    }

    /// Number of ranks on this node.
    pub(super) fn ranks(&self) -> usize {
        self.neighbours.len()
    }

    /// Position of this rank among them.
    pub(super) fn me(&self) -> usize {
        self.me
    }

    /// The connection to a neighbour, and its global rank.
    pub(super) fn doors(&self) -> impl Iterator<Item = (usize, usize, &Door)> {
        let ours = self.neighbours.iter().enumerate();
        ours.filter_map(|(i, n)| n.door.as_ref().map(|door| (i, n.global, door)))
    }

    /// Begins an operation: takes the next slot and writes this rank's header there.
    pub(super) fn announce(&mut self, header: &Header) {
        self.turn ^= 1;
        let slot = self.part(self.me, slot_offset(self.ranks(), self.turn));
        // SAFETY: the slot is ours, within the segment, and nobody reads it any more (see the module).
        unsafe { slot.cast::<[u8; HEADER_BYTES]>().write(header.encode()) };
    }

    /// The header of a rank that has come to the first meeting of this operation.
    pub(super) fn header(&self, rank: usize) -> Header {
        let slot = self.part(rank, slot_offset(self.ranks(), self.turn));
        // SAFETY: within the segment; its owner wrote it before the meeting and does not touch it now.
        let bytes = unsafe { slot.cast::<[u8; HEADER_BYTES]>().read() };
        Header::decode(&bytes)
    }

    /// The elements beside the header of this operation.
    pub(super) fn slot(&self, rank: usize) -> *mut u8 {
        self.part(rank, slot_offset(self.ranks(), self.turn) + LINE)
    }

    /// A stage of a rank.
    pub(super) fn stage(&self, rank: usize, index: usize) -> *mut u8 {
        self.part(rank, stage_offset(self.ranks(), index % STAGES))
    }

    /// Waits until all ranks of this node have come to the same meeting. What they wrote before is visible then.
    pub(super) fn meet(&mut self, wait: &Wait) -> Result<(), Failure> {
        let ranks = self.ranks();
        if ranks == 1 {
            return Ok(());
        }
        self.meetings = self.meetings.wrapping_add(1);
        let target = self.meetings;
        let arrived = self
            .word(0, ARRIVALS)
            .fetch_add(1, Ordering::AcqRel)
            .wrapping_add(1);
        self.word(self.me, PROGRESS).store(target, Ordering::Release);
        let turnstile = self.gate(0, TURNSTILE);
        if arrived == target.wrapping_mul(ranks as u32) {
            turnstile.raise(target);
            return Ok(());
        }
        self.await_gate(turnstile, target, wait, |rank| self.has_come(rank, 0))
    }

    /// True if a rank has come to the last meeting of this rank, or to one that is `later` than that.
    pub(super) fn has_come(&self, rank: usize, later: u32) -> bool {
        let progress = self.word(rank, PROGRESS).load(Ordering::Acquire);
        reached(progress, self.meetings.wrapping_add(later))
    }

    /// An error if a neighbour's process has gone without coming to a meeting that this rank needs it for.
    pub(super) fn check_doors(&self, needed: impl Fn(usize) -> bool) -> Result<(), Failure> {
        for (rank, global, door) in self.doors() {
            // The door first: what the neighbour wrote before it left counts.
            if needed(rank) && door.is_closed() && needed(rank) {
                return Err(Failure::PeerLost {
                    rank: global,
                    how: "its process left or died".to_owned(),
                });
            }
        }
        Ok(())
    }

    /// A counter that `owner` keeps about its messages with `other`.
    pub(super) fn pair_gate(&self, owner: usize, other: usize, gate: PairGate) -> Gate<'_> {
        self.gate(owner, PAIRS + other * PAIR_BYTES + gate as usize * LINE)
    }

    /// Writes the header of this rank's message to or from `other`.
    pub(super) fn announce_message(&self, other: usize, header: &Header) {
        let at = self.part(self.me, PAIRS + other * PAIR_BYTES + 3 * LINE);
        // SAFETY: ours, within the segment; the other has read the header of the message before, which is done.
        unsafe { at.cast::<[u8; HEADER_BYTES]>().write(header.encode()) };
    }

    /// The header of the message that `other` has announced to this rank.
    pub(super) fn message_header(&self, other: usize) -> Header {
        let at = self.part(other, PAIRS + self.me * PAIR_BYTES + 3 * LINE);
        // SAFETY: within the segment; the other wrote it before it announced, and not since.
        let bytes = unsafe { at.cast::<[u8; HEADER_BYTES]>().read() };
        Header::decode(&bytes)
    }

    /// Waits for a counter of one neighbour.
    pub(super) fn await_pair(
        &self,
        owner: usize,
        gate: PairGate,
        target: u32,
        wait: &Wait,
    ) -> Result<(), Failure> {
        let gate = self.pair_gate(owner, self.me, gate);
        self.await_gate(gate, target, wait, |rank| rank != owner || gate.reached(target))
    }

    fn await_gate(
        &self,
        gate: Gate<'_>,
        target: u32,
        wait: &Wait,
        arrived: impl Fn(usize) -> bool,
    ) -> Result<(), Failure> {
        if self.spin && spin(|| gate.reached(target)) {
            return Ok(());
        }
        while !gate.reached(target) {
            let slice = wait.slice();
            gate.sleep(target, slice);
            if gate.reached(target) {
                break;
            }
            wait.check(|| self.missing(&arrived))?;
            self.check_doors(|rank| !arrived(rank))?;
        }
        Ok(())
    }

    fn missing(&self, arrived: impl Fn(usize) -> bool) -> Vec<usize> {
        let ranks = self.neighbours.iter().enumerate();
        ranks
            .filter(|&(rank, _)| !arrived(rank))
            .map(|(_, n)| n.global)
            .collect()
    }

    fn gate(&self, rank: usize, offset: usize) -> Gate<'_> {
        Gate {
            value: self.word(rank, offset),
            sleepers: self.word(rank, offset + size_of::<u32>()),
        }
    }

    fn word(&self, rank: usize, offset: usize) -> &AtomicU32 {
        // SAFETY: aligned, within the mapping, which lives as long as `self`; all access to it is atomic.
        unsafe { AtomicU32::from_ptr(self.part(rank, offset).cast()) }
    }

    fn part(&self, rank: usize, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.segments[rank].len());
        self.segments[rank].ptr().as_ptr().wrapping_add(offset)
    }
}

/// Looks again and again for a short while; true once the condition holds. Gives the core away between looks
/// before long, in case the rank that is waited for needs it.
fn spin(done: impl Fn() -> bool) -> bool {
    let started = Instant::now();
    loop {
        for _ in 0..SPINS_BETWEEN_LOOKS {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
        match started.elapsed() {
            spent if spent > SPIN => return false,
            spent if spent > SPIN_ALONE => std::thread::yield_now(),
            _ => {}
        }
    }
}

fn slot_offset(ranks: usize, index: usize) -> usize {
    (PAIRS + ranks * PAIR_BYTES).next_multiple_of(PAGE) + index * SLOT_STRIDE
}

fn stage_offset(ranks: usize, index: usize) -> usize {
    slot_offset(ranks, 2).next_multiple_of(PAGE) + index * STAGE_BYTES
}
