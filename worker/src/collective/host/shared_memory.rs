//! Memory that the ranks of one node share.
//!
//! [`ControlSegments`]: one small segment a rank, mapped by all of them, through which they synchronise.
//!
//! | part | written by | content |
//! |---|---|---|
//! | progress | owner | number of barriers that it has reached |
//! | barrier (first rank's only) | all | arrivals, and the barriers that are complete |
//! | two slots | owner, alternating | header of its operation, and its elements where they are few |
//! | three stages | all, by the protocol of the operation | pieces of buffers that other ranks do not map |
//!
//! A slot is written again two operations later. By then every rank has read it: a rank that starts operation
//! `k + 2` has passed the barrier of `k + 1` with all others, which therefore had completed `k`.
//!
//! [`SharedArena`]: the memory of an arena on which operations need no copies.
#![allow(unsafe_code, reason = "words and bytes in mapped segments")]

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::header::{HEADER_BYTES, OperationHeader};
use super::sockets::Connection;
use crate::collective::error::Failure;
use crate::collective::wait::{Wait, hung_up};
use crate::device::{Buffer, DeviceError, HostMemory, Memory};

/// Most bytes of an operation whose elements are written beside its header.
pub(super) const SLOT_BYTES: usize = 32 << 10;
/// Size of a stage.
pub(super) const STAGE_BYTES: usize = 512 << 10;
/// Number of stages: one is filled, one is worked on, one is emptied.
const STAGES: usize = 3;

/// How long a wait spins before it sleeps. About the cost of a sleep and a wake.
const SPIN: Duration = Duration::from_micros(50);
/// A rank spins for this long before it yields its core.
const SPIN_WITHOUT_YIELD: Duration = Duration::from_micros(5);
const SPINS_BETWEEN_CLOCK_READS: usize = 32;

const LINE: usize = 64;
const PAGE: usize = 4096;
const PROGRESS: usize = 0;
const ARRIVALS: usize = LINE;
const BARRIER: usize = 2 * LINE;
const SLOT_STRIDE: usize = LINE + SLOT_BYTES;

/// Number of the packet that carries the descriptor of a control segment.
const SEGMENT_LABEL: u64 = 0;

/// The control segments of this node. Ranks are those within the node.
pub(super) struct ControlSegments {
    /// Global ranks.
    globals: Vec<usize>,
    /// Sockets of the connections to the others, which close when their processes end. `None` for this rank.
    sockets: Vec<Option<Arc<OwnedFd>>>,
    segments: Vec<HostMemory>,
    me: usize,
    barriers: u32,
    turn: usize,
    spin: bool,
}

impl ControlSegments {
    /// Makes the segment of the global rank `own` and maps those of the others, which all do the same. There is a connection
    /// to each other rank.
    pub(super) fn new(
        own: usize,
        connections: &[Option<&Connection>],
        spin: bool,
        wait: &Wait,
    ) -> Result<Self, Failure> {
        let bytes = stage_offset(STAGES);
        let mut segment = Some(HostMemory::shared("control", bytes)?);
        let fd = segment.as_ref().and_then(HostMemory::fd);
        for connection in connections.iter().flatten() {
            let fd = fd.expect("shared memory has a descriptor");
            connection.send_fd(SEGMENT_LABEL, fd.as_fd(), wait)?;
        }
        let mut segments = Vec::with_capacity(connections.len());
        for connection in connections {
            segments.push(match connection {
                Some(connection) => {
                    HostMemory::map("control", connection.receive_fd(SEGMENT_LABEL, wait)?, bytes)?
                }
                None => segment.take().expect("only this rank has no connection"),
            });
        }
        let me = connections.iter().position(Option::is_none);
        Ok(Self {
            globals: connections
                .iter()
                .map(|c| c.map_or(own, Connection::peer))
                .collect(),
            sockets: connections.iter().map(|c| c.map(Connection::socket)).collect(),
            segments,
            me: me.expect("this rank has no connection"),
            barriers: 0,
            turn: 0,
            spin,
        })
    }

    /// Number of ranks on this node.
    pub(super) fn ranks(&self) -> usize {
        self.globals.len()
    }

    /// Begins an operation: takes the next slot and writes this rank's header there.
    pub(super) fn announce(&mut self, header: &OperationHeader) {
        self.turn ^= 1;
        let at = self
            .at(self.me, slot_offset(self.turn))
            .cast::<[u8; HEADER_BYTES]>();
        // SAFETY: within the segment, and ours; no rank reads the slot any more (see the module).
        unsafe { at.write(bytemuck::cast(*header)) };
    }

    /// The header of a rank that has reached the first barrier of this operation.
    pub(super) fn header(&self, rank: usize) -> OperationHeader {
        let at = self.at(rank, slot_offset(self.turn)).cast::<[u8; HEADER_BYTES]>();
        // SAFETY: within the segment; its owner wrote it before the barrier and does not touch it now.
        bytemuck::cast(unsafe { at.read() })
    }

    /// The elements beside the header of this operation.
    pub(super) fn slot(&self, rank: usize) -> *mut u8 {
        self.at(rank, slot_offset(self.turn) + LINE)
    }

    /// The same of this rank.
    pub(super) fn own_slot(&self) -> *mut u8 {
        self.slot(self.me)
    }

    /// A stage of a rank.
    pub(super) fn stage(&self, rank: usize, index: usize) -> *mut u8 {
        self.at(rank, stage_offset(index % STAGES))
    }

    /// Waits until all ranks of this node have reached the same barrier. What they wrote before is visible then.
    pub(super) fn barrier(&mut self, wait: &Wait) -> Result<(), Failure> {
        let ranks = self.ranks();
        if ranks == 1 {
            return Ok(());
        }
        self.barriers = self.barriers.wrapping_add(1);
        let target = self.barriers;
        let arrivals = self.word(0, ARRIVALS).fetch_add(1, Ordering::AcqRel);
        self.word(self.me, PROGRESS).store(target, Ordering::Release);
        let complete = self.counter(0, BARRIER);
        if arrivals.wrapping_add(1) == target.wrapping_mul(ranks as u32) {
            complete.raise(target);
            return Ok(());
        }
        if self.spin && spin(|| complete.reached(target)) {
            return Ok(());
        }
        while !complete.reached(target) {
            complete.sleep(target, wait.interval());
            if complete.reached(target) {
                break;
            }
            wait.check(|| {
                let missing = (0..ranks).filter(|&rank| !self.has_reached(rank, 0));
                missing.map(|rank| self.globals[rank]).collect()
            })?;
            self.check_alive(0)?;
        }
        Ok(())
    }

    /// True if a rank has reached the last barrier of this rank, or one that is `later` than that.
    fn has_reached(&self, rank: usize, later: u32) -> bool {
        let progress = self.word(rank, PROGRESS).load(Ordering::Acquire);
        reached(progress, self.barriers.wrapping_add(later))
    }

    /// An error if the process of another rank has ended without reaching a barrier: the last one of this rank, or one
    /// that is `later`.
    pub(super) fn check_alive(&self, later: u32) -> Result<(), Failure> {
        for (rank, socket) in self.sockets.iter().enumerate() {
            let is_needed = || !self.has_reached(rank, later);
            // The socket first: what the rank wrote before its process ended counts.
            if let Some(socket) = socket
                && is_needed()
                && hung_up(socket)
                && is_needed()
            {
                return Err(Failure::PeerLost {
                    rank: self.globals[rank],
                    how: "its process left or died".to_owned(),
                });
            }
        }
        Ok(())
    }

    fn counter(&self, rank: usize, offset: usize) -> SharedCounter<'_> {
        SharedCounter {
            value: self.word(rank, offset),
            sleepers: self.word(rank, offset + size_of::<u32>()),
        }
    }

    fn word(&self, rank: usize, offset: usize) -> &AtomicU32 {
        // SAFETY: aligned, within the mapping, which lives as long as `self`; all access to it is atomic.
        unsafe { AtomicU32::from_ptr(self.at(rank, offset).cast()) }
    }

    fn at(&self, rank: usize, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.segments[rank].bytes());
        self.segments[rank].ptr().as_ptr().wrapping_add(offset)
    }
}

/// Polls for a short while; true once the condition holds. Soon yields the core between polls, in case the rank that is
/// waited for needs it.
fn spin(done: impl Fn() -> bool) -> bool {
    let started = Instant::now();
    loop {
        for _ in 0..SPINS_BETWEEN_CLOCK_READS {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
        match started.elapsed() {
            spent if spent > SPIN => return false,
            spent if spent > SPIN_WITHOUT_YIELD => std::thread::yield_now(),
            _ => {}
        }
    }
}

fn slot_offset(index: usize) -> usize {
    PAGE + index * SLOT_STRIDE
}

fn stage_offset(index: usize) -> usize {
    slot_offset(2).next_multiple_of(PAGE) + index * STAGE_BYTES
}

/// A counter in shared memory with the number of ranks that sleep on it (futex). It wraps; waiters are never more than
/// half its range behind.
#[derive(Clone, Copy)]
struct SharedCounter<'a> {
    value: &'a AtomicU32,
    /// A rank whose process ends in its sleep stays counted, which only costs a system call.
    sleepers: &'a AtomicU32,
}

impl SharedCounter<'_> {
    /// True once the counter has reached `target`. What was written before the raise is visible then.
    fn reached(self, target: u32) -> bool {
        reached(self.value.load(Ordering::Acquire), target)
    }

    /// Sets the counter and wakes the ranks that sleep.
    fn raise(self, value: u32) {
        // Sequentially consistent with `sleep`: either the sleeper sees the value or we see the sleeper.
        self.value.store(value, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            // SAFETY: the word outlives the call; the kernel uses its address only.
            unsafe {
                libc::syscall(libc::SYS_futex, self.value.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
            }
        }
    }

    /// Sleeps until the counter may have reached `target`, at most for `bound`.
    fn sleep(self, target: u32, bound: Duration) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let seen = self.value.load(Ordering::SeqCst);
        if !reached(seen, target) {
            futex_wait(self.value, seen, bound);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// True if a wrapping counter at `value` has reached `target`.
fn reached(value: u32, target: u32) -> bool {
    value.wrapping_sub(target) as i32 >= 0
}

fn futex_wait(word: &AtomicU32, seen: u32, bound: Duration) {
    let bound = libc::timespec {
        tv_sec: bound.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(bound.subsec_nanos()),
    };
    // SAFETY: the word and the bound outlive the call; the kernel only reads them. After every result, a time-out
    // included, the caller looks again.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            seen,
            &raw const bound,
        );
    }
}

/// The memory of a shared arena: this rank's segment, and those of the other ranks of the node, all of which are unmapped
/// with the arena.
#[derive(Debug)]
pub(super) struct SharedArena {
    number: u64,
    own: HostMemory,
    /// By global rank.
    others: Vec<(usize, HostMemory)>,
}

impl SharedArena {
    /// Maps the segments of the other ranks of the node, which all do the same. `number` is the same on all ranks, and not 0.
    pub(super) fn exchange(
        number: u64,
        name: &str,
        own: HostMemory,
        connections: &[&Connection],
        wait: &Wait,
    ) -> Result<Self, Failure> {
        for connection in connections {
            let fd = own.fd().expect("shared memory has a descriptor");
            connection.send_fd(number, fd.as_fd(), wait)?;
        }
        let mut others = Vec::with_capacity(connections.len());
        for connection in connections {
            let (peer, fd) = (connection.peer(), connection.receive_fd(number, wait)?);
            // The other ranks may have succeeded: not a refusal, after which all ranks could go on.
            let failed = |error: DeviceError| Failure::System {
                what: format!("mapping the memory of rank {peer}"),
                cause: error.to_string(),
            };
            others.push((peer, HostMemory::map(name, fd, own.bytes()).map_err(failed)?));
        }
        Ok(Self { number, own, others })
    }

    /// The shared arena of a buffer, if it is in one.
    pub(super) fn of(buffer: &Buffer) -> Option<&Self> {
        buffer.arena().memory_as()
    }

    /// The same on all ranks.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// First of `bytes` bytes at `offset` in the segment of another rank, if they are mapped here.
    pub(super) fn of_rank(&self, global: usize, offset: u64, bytes: usize) -> Option<*mut u8> {
        let (_, memory) = self.others.iter().find(|(rank, _)| *rank == global)?;
        let offset = usize::try_from(offset).ok()?;
        let fits = offset.checked_add(bytes)? <= memory.bytes();
        fits.then(|| memory.ptr().as_ptr().wrapping_add(offset))
    }
}

// SAFETY: it is that of `own`, which keeps the promise and lives as long as `self`. Other processes map it too, and write
// it only while an operation of this rank holds the range (`Held`).
unsafe impl Memory for SharedArena {
    fn bytes(&self) -> usize {
        self.own.bytes()
    }

    fn host_ptr(&self) -> Option<NonNull<u8>> {
        Some(self.own.ptr())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sleeper_is_woken_and_counters_wrap() {
        let (value, sleepers) = (AtomicU32::new(u32::MAX), AtomicU32::new(0));
        let counter = SharedCounter {
            value: &value,
            sleepers: &sleepers,
        };
        std::thread::scope(|s| {
            let sleeper = s.spawn(|| {
                while !counter.reached(1) {
                    counter.sleep(1, Duration::from_secs(10));
                }
            });
            counter.raise(0);
            counter.raise(1);
            sleeper.join().unwrap();
        });
        assert!(counter.reached(u32::MAX) && !counter.reached(2));
        assert_eq!(sleepers.load(Ordering::SeqCst), 0);
    }
}
