//! Gradients that exist only as this rank's shard, plus the units that are in flight (ZeRO-2 and -3).
//!
//! Backward writes a unit into a *slot*, shared with the other ranks; the unit is reduce-scattered there, this rank's
//! slice is added to the shard, and the slot serves another unit. A slot is reused in stream order: the host does not
//! wait, and a device that runs asynchronously waits for the collective itself.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::{GradientLayout, Portion, ReduceError, ShardUnit, Sharding};
use crate::collective::{CollectiveError, Communicator, Work};
use crate::device::{Arena, ArenaSpec, Buffer, DType, Device, Sharing, Stream};
use crate::model::ParamId;
use crate::ops::{Cast, ColumnSum, Fill};

/// Slots for units that follow each other: one is computed while another is in flight.
const SHARED_SLOTS: usize = 2;

/// See the module.
pub(super) struct Staging {
    device: Arc<dyn Device>,
    stream: Stream,
    sharding: Arc<Sharding>,
    slots: Vec<Slot>,
    /// By unit: the slots that it may take.
    choice: Vec<Range<usize>>,
    /// By unit: the slot that it has.
    taken: Vec<Option<usize>>,
    shard: Arena,
    launches: u64,
}

struct Slot {
    arena: Arena,
    /// Being written.
    open: bool,
    /// Reduced, or about to be, and not yet added to the shard.
    landing: Option<Landing>,
}

struct Landing {
    unit: usize,
    work: Work,
    number: u64,
    /// Add to the shard instead of overwriting it.
    accumulate: bool,
}

impl Staging {
    /// Every rank of `comm` must call it, with the same layout.
    pub(super) fn new(
        comm: &Communicator,
        device: &Arc<dyn Device>,
        stream: Stream,
        layout: &GradientLayout,
        sharding: &Arc<Sharding>,
    ) -> Result<Self, ReduceError> {
        let (sizes, choice) = staged(layout, sharding);
        let slot = |len| -> Result<Slot, CollectiveError> {
            let spec = spec("gradients in flight", layout.dtype(), len, Sharing::Node);
            Ok(Slot {
                arena: comm.alloc_shared(device, &spec)?,
                open: false,
                landing: None,
            })
        };
        Ok(Self {
            slots: sizes.into_iter().map(slot).collect::<Result<_, _>>()?,
            shard: device.alloc(&spec(
                "gradients",
                layout.accumulated(),
                sharding.shard_len(),
                Sharing::Private,
            ))?,
            taken: vec![None; choice.len()],
            choice,
            device: device.clone(),
            stream,
            sharding: sharding.clone(),
            launches: 0,
        })
    }

    /// Memory for a gradient; the first one of a unit takes a slot.
    pub(super) fn grad(&mut self, id: ParamId, deadline: Instant) -> Result<Buffer, ReduceError> {
        let (unit, range) = self.sharding.home(id);
        let slot = match self.taken[unit] {
            Some(slot) => slot,
            None => self.take(unit, deadline)?,
        };
        Ok(self.slots[slot].arena.slice(range))
    }

    fn take(&mut self, unit: usize, deadline: Instant) -> Result<usize, ReduceError> {
        let free = self.choice[unit].clone().filter(|&slot| !self.slots[slot].open);
        // An empty slot, else the one that was launched first.
        let number = |slot: &usize| self.slots[*slot].landing.as_ref().map(|landing| landing.number);
        let Some(slot) = free.min_by_key(number) else {
            let param = self.sharding.units()[unit].name.clone();
            return Err(ReduceError::OutOfOrder { param });
        };
        self.land(slot, deadline);
        self.slots[slot].open = true;
        self.taken[unit] = Some(slot);
        for gap in self.sharding.gaps(unit) {
            let out = self.slots[slot].arena.slice(gap);
            self.device.enqueue(self.stream, Fill { out, value: 0.0 }.into());
        }
        Ok(slot)
    }

    /// All elements of a unit that has been written.
    pub(super) fn buffer(&self, unit: usize) -> Buffer {
        let slot = self.taken[unit].expect("all gradients of the unit were written");
        self.slots[slot].arena.slice(0..self.sharding.units()[unit].len())
    }

    /// The unit is being reduce-scattered.
    pub(super) fn launched(&mut self, unit: usize, work: &Work, accumulate: bool) {
        let slot = self.taken[unit]
            .take()
            .expect("all gradients of the unit were written");
        self.launches += 1;
        self.slots[slot].open = false;
        self.slots[slot].landing = Some(Landing {
            unit,
            work: work.clone(),
            number: self.launches,
            accumulate,
        });
    }

    /// Puts the rest of the reduced units into the shard.
    pub(super) fn land_all(&mut self, deadline: Instant) {
        for slot in 0..self.slots.len() {
            self.land(slot, deadline);
        }
    }

    fn land(&mut self, slot: usize, deadline: Instant) {
        let slot = &mut self.slots[slot];
        let Some(landing) = slot.landing.take() else {
            return;
        };
        landing.work.wait_on(self.device.as_ref(), self.stream, deadline);
        let x = slot.arena.slice(self.sharding.own(landing.unit));
        let out = self.shard.slice(self.sharding.own_place(landing.unit).shard);
        let op = if landing.accumulate {
            // One row: an addition.
            let accumulate = true;
            ColumnSum { x, out, accumulate }.into()
        } else {
            Cast { x, out }.into()
        };
        self.device.enqueue(self.stream, op);
    }

    /// Forgets what an abandoned step has written.
    pub(super) fn reset(&mut self) {
        self.taken.fill(None);
        for slot in &mut self.slots {
            slot.open = false;
        }
    }

    pub(super) fn portion(&self) -> Portion {
        Portion::Shard(self.shard.clone())
    }

    /// Shard and slots.
    pub(super) fn bytes(&self) -> usize {
        let slots: usize = self.slots.iter().map(|slot| slot.arena.bytes()).sum();
        self.shard.bytes() + slots
    }
}

fn spec(name: &str, dtype: DType, len: usize, sharing: Sharing) -> ArenaSpec {
    ArenaSpec {
        name: name.into(),
        dtype,
        len,
        sharing,
    }
}

/// Sizes of the slots for gradients in flight, and those that each unit may take.
pub(super) fn staged(layout: &GradientLayout, sharding: &Sharding) -> (Vec<usize>, Vec<Range<usize>>) {
    // A tied parameter has its first gradient long before its last: its unit stays open meanwhile.
    let is_tied = |unit: &ShardUnit| unit.params.iter().any(|id| layout.spec(*id).contributions > 1);
    let units = sharding.units().iter();
    slots(&units.map(|unit| (unit.len(), is_tied(unit))).collect::<Vec<_>>())
}

/// Sizes of the slots, and those that each unit may take: one of its own for a unit that is needed out of turn, for
/// the others two that they take in turns. Units are given as (elements, out of turn).
pub(super) fn slots(units: &[(usize, bool)]) -> (Vec<usize>, Vec<Range<usize>>) {
    let in_turn = units.iter().filter(|(_, apart)| !apart);
    let shared = in_turn.clone().count().min(SHARED_SLOTS);
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
        let (sizes, choice) = slots(&[(5, false), (9, true), (7, false), (3, false)]);
        assert_eq!(sizes, [7, 7, 9]);
        assert_eq!(choice, [0..2, 2..3, 0..2, 0..2]);
        for apart in [false, true] {
            let (sizes, choice) = slots(&[(4, apart), (2, !apart)]);
            assert_eq!(sizes.iter().sum::<usize>(), 6);
            assert_ne!(choice[0], choice[1]);
        }
    }
}
