//! Gradients that are added up in one type and cross the wire in a narrower one.
//!
//! A unit is narrowed into a *slot*, shared with the other ranks, reduced there, and widened into its place again. Two
//! slots of the largest unit take turns. All this is on a stream of its own, so that neither the host nor the stream
//! that computes waits, on a device that runs asynchronously.

use std::sync::Arc;
use std::time::Instant;

use super::ReduceError;
use crate::collective::{Communicator, Work};
use crate::device::{Arena, ArenaSpec, Buffer, DType, Device, Event, Sharing, Stream};
use crate::ops::Cast;

/// One is filled while another is in flight.
const SLOTS: usize = 2;

/// See the module.
pub(super) struct Wire {
    device: Arc<dyn Device>,
    stream: Stream,
    slots: Vec<Slot>,
    /// Units narrowed so far.
    count: usize,
}

struct Slot {
    arena: Arena,
    landing: Option<Landing>,
}

/// A unit on its way back.
struct Landing {
    work: Work,
    from: Buffer,
    to: Buffer,
}

impl Wire {
    /// For units of these lengths. Every rank of `comm` must call it.
    pub(super) fn new(
        comm: &Communicator,
        device: &Arc<dyn Device>,
        dtype: DType,
        lens: impl Iterator<Item = usize> + Clone,
    ) -> Result<Self, ReduceError> {
        let sizes = slots(lens);
        let slots = sizes.into_iter().map(|len| -> Result<Slot, ReduceError> {
            let spec = ArenaSpec {
                name: "gradients in flight".into(),
                dtype,
                len,
                sharing: Sharing::Node,
            };
            Ok(Slot {
                arena: comm.alloc_shared(device, &spec)?,
                landing: None,
            })
        });
        Ok(Self {
            slots: slots.collect::<Result<_, _>>()?,
            device: device.clone(),
            stream: device.stream(),
            count: 0,
        })
    }

    /// Narrows a unit that is complete at `ready`. Returns it as it crosses the wire, and when it is there.
    pub(super) fn narrow(&mut self, unit: &Buffer, ready: &Event, deadline: Instant) -> (Buffer, Event) {
        let slot = self.count % self.slots.len();
        self.count += 1;
        self.land(slot, deadline);
        self.device.wait_event(self.stream, ready, deadline);
        let narrow = self.slots[slot].arena.slice(0..unit.len());
        let cast = Cast {
            x: unit.clone(),
            out: narrow.clone(),
        };
        self.device.enqueue(self.stream, cast.into());
        (narrow, self.device.record(self.stream))
    }

    /// The unit that was narrowed last is being reduced: afterwards `from`, a part of it, belongs into `to`.
    pub(super) fn launched(&mut self, work: &Work, from: Buffer, to: Buffer) {
        let slot = (self.count - 1) % self.slots.len();
        self.slots[slot].landing = Some(Landing {
            work: work.clone(),
            from,
            to,
        });
    }

    /// Widens what is still on its way. Returns when all of it is there.
    pub(super) fn land_all(&mut self, deadline: Instant) -> Event {
        for slot in 0..self.slots.len() {
            self.land(slot, deadline);
        }
        self.device.record(self.stream)
    }

    fn land(&mut self, slot: usize, deadline: Instant) {
        let Some(Landing { work, from, to }) = self.slots[slot].landing.take() else {
            return;
        };
        work.wait_on(self.device.as_ref(), self.stream, deadline);
        self.device.enqueue(self.stream, Cast { x: from, out: to }.into());
    }

    /// Size of the slots.
    pub(super) fn bytes(&self) -> usize {
        self.slots.iter().map(|slot| slot.arena.bytes()).sum()
    }
}

/// Sizes of the slots for units of these lengths.
pub(super) fn slots(lens: impl Iterator<Item = usize> + Clone) -> Vec<usize> {
    let largest = lens.clone().max().unwrap_or(0);
    vec![largest; SLOTS.min(lens.count())]
}
