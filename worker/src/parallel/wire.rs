//! Gradients that are added up in one type and cross the wire in a narrower one.
//!
//! A unit is narrowed into a slot, reduced there, and widened into its place again. All this is on a stream of its
//! own, so that neither the host nor the stream that computes waits, on a device that runs asynchronously.

use std::sync::Arc;
use std::time::Instant;

use super::ReduceError;
use super::slots::{Course, IN_TURN, Landed, Landing, Slots};
use super::waiting::Waiting;
use crate::collective::Communicator;
use crate::device::{Buffer, DType, Device, Event};
use crate::ops::Cast;

/// See the module.
pub(super) struct Wire {
    device: Arc<dyn Device>,
    slots: Slots,
    /// Slots that units take in turns.
    turns: usize,
    /// Units narrowed so far.
    count: usize,
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
        Ok(Self {
            turns: sizes.len(),
            slots: Slots::new(comm, (device, device.stream()), dtype, sizes)?,
            device: device.clone(),
            count: 0,
        })
    }

    /// Narrows a unit that is complete at `ready`. Returns it as it crosses the wire, and when it is there.
    pub(super) fn narrow(
        &mut self,
        unit: &Buffer,
        ready: &Event,
        waiting: &Waiting,
        deadline: Instant,
    ) -> (Buffer, Event) {
        let (slot, stream) = (self.count % self.turns, self.slots.stream());
        self.count += 1;
        self.slots.land(slot, Course::Beside, waiting, deadline);
        // For arithmetic, not for communication.
        self.device.wait_event(stream, ready, deadline);
        let narrow = self.slots.slice(slot, 0..unit.len());
        let cast = Cast {
            x: unit.clone(),
            out: narrow.clone(),
        };
        self.device.enqueue(stream, cast.into());
        (narrow, self.device.record(stream))
    }

    /// The unit that was narrowed last is being reduced.
    pub(super) fn launched(&mut self, landing: Landing) {
        self.slots.launched((self.count - 1) % self.turns, landing);
    }

    /// Widens what is still on its way.
    pub(super) fn land_all(&mut self, waiting: &Waiting, deadline: Instant) {
        self.slots.land_all(Course::Beside, waiting, deadline);
    }

    /// See [`Slots::take_landed`].
    pub(super) fn take_landed(&mut self) -> Vec<Landed> {
        self.slots.take_landed()
    }

    /// All that was asked for has run.
    pub(super) fn record(&self) -> Event {
        self.device.record(self.slots.stream())
    }

    /// Size of the slots.
    pub(super) fn bytes(&self) -> usize {
        self.slots.bytes()
    }
}

/// Sizes of the slots for units of these lengths.
pub(super) fn slots(lens: impl Iterator<Item = usize> + Clone) -> Vec<usize> {
    let largest = lens.clone().max().unwrap_or(0);
    vec![largest; IN_TURN.min(lens.count())]
}
