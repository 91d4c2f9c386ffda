//! Gradients that exist only as this rank's shard, plus the units that are in flight (ZeRO-2 and -3).
//!
//! Backward writes a unit into a slot; the unit is reduce-scattered there, this rank's slice is added to the shard,
//! and the slot serves another unit.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::ReduceError;
use super::slots::{Landed, Landing, Round, Slots, StreamRole, slots_for};
use crate::collective::Work;
use crate::device::{Arena, ArenaSpec, Buffer, Device, Stream};
use crate::model::ParamId;
use crate::ops::Fill;
use crate::parallel::comm_times::CommTracker;
use crate::parallel::{GradientLayout, Portion, ReplicaSet, ShardUnit, Sharding};

/// The sums of what this rank owns, and the slots that the others pass through.
pub(super) struct GradShard {
    device: Arc<dyn Device>,
    sharding: Arc<Sharding>,
    slots: Slots,
    /// By unit: the slots that it may take.
    choice: Vec<Range<usize>>,
    /// By unit: the slot that it is written in.
    taken: Vec<Option<usize>>,
    shard: Arena,
}

impl GradShard {
    /// Every rank of `replicas` must call it, with the same layout.
    pub(super) fn new(
        replicas: &ReplicaSet,
        (device, stream): (&Arc<dyn Device>, Stream),
        layout: &GradientLayout,
        sharding: &Arc<Sharding>,
    ) -> Result<Self, ReduceError> {
        // A tied parameter has its first gradient long before its last: its unit stays open meanwhile.
        let is_tied = |unit: &ShardUnit| unit.params.iter().any(|id| layout.spec(*id).contributions > 1);
        let units = sharding.units().iter();
        let (sizes, choice) = slots_for(&units.map(|unit| (unit.len(), is_tied(unit))).collect::<Vec<_>>());
        let (name, dtype, len) = ("gradients", layout.accumulated(), sharding.shard_len());
        Ok(Self {
            slots: Slots::new(replicas.all(), (device, stream), layout.dtype(), sizes)?,
            shard: match replicas.replicate() {
                Some(_) => replicas
                    .all()
                    .alloc_shared(device, &ArenaSpec::on_node(name, dtype, len))?,
                None => device.alloc(&ArenaSpec::private(name, dtype, len))?,
            },
            taken: vec![None; choice.len()],
            choice,
            device: device.clone(),
            sharding: sharding.clone(),
        })
    }

    /// Memory for a gradient; the first one of a unit takes a slot.
    pub(super) fn grad(
        &mut self,
        id: ParamId,
        tracker: &CommTracker,
        deadline: Instant,
    ) -> Result<Buffer, ReduceError> {
        let (unit, range) = self.sharding.home(id);
        let slot = match self.taken[unit] {
            Some(slot) => slot,
            None => self.take(unit, tracker, deadline)?,
        };
        Ok(self.slots.slice(slot, range))
    }

    fn take(&mut self, unit: usize, tracker: &CommTracker, deadline: Instant) -> Result<usize, ReduceError> {
        let free = self.choice[unit]
            .clone()
            .filter(|slot| !self.taken.contains(&Some(*slot)));
        let Some(slot) = free.min_by_key(|&slot| self.slots.last_launch(slot)) else {
            let param = self.sharding.units()[unit].name.clone();
            return Err(ReduceError::OutOfOrder { param });
        };
        self.slots.land(slot, StreamRole::Compute, tracker, deadline);
        self.taken[unit] = Some(slot);
        for gap in self.sharding.gaps(unit) {
            let out = self.slots.slice(slot, gap);
            let stream = self.slots.stream();
            self.device.enqueue(stream, Fill { out, value: 0.0 }.into());
        }
        Ok(slot)
    }

    fn slot_of(&self, unit: usize) -> usize {
        self.taken[unit].expect("all gradients of the unit were written")
    }

    /// All elements of a unit that has been written.
    pub(super) fn buffer(&self, unit: usize) -> Buffer {
        let len = self.sharding.units()[unit].len();
        self.slots.slice(self.slot_of(unit), 0..len)
    }

    /// The unit is being reduce-scattered.
    pub(super) fn launched(&mut self, unit: usize, work: Work, round: Round) {
        let slot = self.slot_of(unit);
        self.taken[unit] = None;
        let landing = Landing {
            unit,
            work,
            own: self.sharding.own(unit),
            place: self.shard.slice(self.sharding.own_place(unit).shard),
            round,
        };
        self.slots.launched(slot, landing);
    }

    /// Puts the rest of the reduced units into the shard.
    pub(super) fn land_all(&mut self, tracker: &CommTracker, deadline: Instant) {
        self.slots.land_all(StreamRole::Compute, tracker, deadline);
    }

    /// See [`Slots::take_landed`].
    pub(super) fn take_landed(&mut self) -> Vec<Landed> {
        self.slots.take_landed()
    }

    /// Forgets what an abandoned step has written.
    pub(super) fn reset(&mut self) {
        self.taken.fill(None);
    }

    pub(super) fn portion(&self) -> Portion {
        Portion::Shard(self.shard.clone())
    }

    /// Shard and slots.
    pub(super) fn bytes(&self) -> usize {
        self.shard.bytes() + self.slots.bytes()
    }
}
