//! Slots: memory shared with the other ranks, through which units of gradients pass one after the other.
//!
//! A unit is reduced in its slot; then this rank's part of it *lands*: it is copied or added to where it belongs, and
//! the slot serves another unit. A slot is reused in the order of a stream: a host waits only where the device runs at
//! once.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::ReduceError;
use crate::collective::{Communicator, Work};
use crate::device::{Arena, ArenaSpec, Buffer, DType, Device, Event, Stream};
use crate::ops::{Cast, ColumnSum};
use crate::parallel::comm_times::CommTracker;

/// Slots for units that follow each other: one is computed while another is in flight.
pub(super) const IN_TURN: usize = 2;

/// The slots of a reducer, and what passes through them.
pub(super) struct Slots {
    device: Arc<dyn Device>,
    stream: Stream,
    /// By slot.
    all: Vec<Slot>,
    launches: u64,
    landed: Vec<Landed>,
}

struct Slot {
    arena: Arena,
    landing: Option<Landing>,
    /// Of what it serves, or has served last.
    launch: u64,
}

/// Which of its launches in a step a unit is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Round {
    /// From 0.
    pub(super) index: usize,
    /// How many there are.
    pub(super) count: usize,
}

impl Round {
    pub(super) fn is_first(self) -> bool {
        self.index == 0
    }

    pub(super) fn is_last(self) -> bool {
        self.index + 1 == self.count
    }
}

/// A unit that is being reduced, and what becomes of this rank's part of it.
pub(super) struct Landing {
    pub(super) unit: usize,
    pub(super) work: Work,
    /// Elements of the slot.
    pub(super) own: Range<usize>,
    /// Where they belong.
    pub(super) place: Buffer,
    /// The first round overwrites what is there, later ones are added to it.
    pub(super) round: Round,
}

/// A unit whose part is complete and where it belongs.
pub(super) struct Landed {
    pub(super) unit: usize,
    pub(super) place: Buffer,
    /// Once this is reached.
    pub(super) at: Event,
}

/// How a stream waits for a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamRole {
    /// It computes, and stands still meanwhile.
    Compute,
    /// It lies beside the one that computes.
    Side,
}

impl Slots {
    /// Slots of so many elements each. Every rank of `comm` must call it.
    pub(super) fn new(
        comm: &Communicator,
        (device, stream): (&Arc<dyn Device>, Stream),
        dtype: DType,
        sizes: impl IntoIterator<Item = usize>,
    ) -> Result<Self, ReduceError> {
        let slot = |len| -> Result<Slot, ReduceError> {
            let spec = ArenaSpec::on_node("gradients in flight", dtype, len);
            Ok(Slot {
                arena: comm.alloc_shared(device, &spec)?,
                landing: None,
                launch: 0,
            })
        };
        Ok(Self {
            all: sizes.into_iter().map(slot).collect::<Result<_, _>>()?,
            device: device.clone(),
            stream,
            launches: 0,
            landed: Vec::new(),
        })
    }

    /// The stream in whose order slots are reused.
    pub(super) fn stream(&self) -> Stream {
        self.stream
    }

    /// Elements of a slot.
    pub(super) fn slice(&self, slot: usize, range: Range<usize>) -> Buffer {
        self.all[slot].arena.slice(range)
    }

    /// When a slot last began to serve a unit: the smallest is the first to be free again.
    pub(super) fn last_launch(&self, slot: usize) -> u64 {
        self.all[slot].launch
    }

    /// A unit is being reduced in a slot.
    pub(super) fn launched(&mut self, slot: usize, landing: Landing) {
        self.launches += 1;
        self.all[slot].launch = self.launches;
        self.all[slot].landing = Some(landing);
    }

    /// Lands what a slot holds, if it holds something.
    pub(super) fn land(&mut self, slot: usize, role: StreamRole, tracker: &CommTracker, deadline: Instant) {
        let slot = &mut self.all[slot];
        let Some(landing) = slot.landing.take() else {
            return;
        };
        let Landing {
            unit,
            work,
            own,
            place,
            round,
        } = landing;
        match role {
            StreamRole::Compute => tracker.wait_in_stream(self.stream, work.event(), deadline),
            StreamRole::Side => tracker.wait_in_side_stream(self.stream, work.event(), deadline),
        }
        let (x, out) = (slot.arena.slice(own), place.clone());
        let op = if round.is_first() {
            Cast { x, out }.into()
        } else {
            // One row: an addition.
            let accumulate = true;
            ColumnSum { x, out, accumulate }.into()
        };
        self.device.enqueue(self.stream, op);
        if round.is_last() {
            let at = self.device.record(self.stream);
            self.landed.push(Landed { unit, place, at });
        }
    }

    /// Lands all, in the order in which they were launched.
    pub(super) fn land_all(&mut self, role: StreamRole, tracker: &CommTracker, deadline: Instant) {
        let mut order: Vec<usize> = (0..self.all.len()).collect();
        order.sort_by_key(|&slot| self.all[slot].launch);
        for slot in order {
            self.land(slot, role, tracker, deadline);
        }
    }

    /// Units that have landed for the last time since the last call.
    pub(super) fn take_landed(&mut self) -> Vec<Landed> {
        std::mem::take(&mut self.landed)
    }

    /// Size of the slots.
    pub(super) fn bytes(&self) -> usize {
        self.all.iter().map(|slot| slot.arena.bytes()).sum()
    }
}

/// Sizes of slots, and those that each unit may take: one of its own for a unit that is needed out of turn, for the
/// others some that they take in turns. Units are given as (elements, out of turn).
pub(in crate::parallel) fn slots_for(units: &[(usize, bool)]) -> (Vec<usize>, Vec<Range<usize>>) {
    let in_turn = units.iter().filter(|(_, apart)| !apart);
    let shared = in_turn.clone().count().min(IN_TURN);
    let largest = in_turn.map(|(len, _)| *len).max().unwrap_or(0);
    let mut sizes = vec![largest; shared];
    let choice = units.iter().map(|&(len, apart)| {
        if !apart {
            return 0..shared;
        }
        sizes.push(len);
        sizes.len() - 1..sizes.len()
    });
    let choice = choice.collect();
    (sizes, choice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_in_turn_share_two_slots_of_the_largest() {
        let (sizes, choice) = slots_for(&[(5, false), (9, true), (7, false), (3, false)]);
        assert_eq!(sizes, [7, 7, 9]);
        assert_eq!(choice, [0..2, 2..3, 0..2, 0..2]);
        for apart in [false, true] {
            let (sizes, choice) = slots_for(&[(4, apart), (2, !apart)]);
            assert_eq!(sizes.iter().sum::<usize>(), 6);
            assert_ne!(choice[0], choice[1]);
        }
    }
}
