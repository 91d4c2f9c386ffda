//! Where the gradients of a rank are while they are reduced: whole, or only its shard.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::ReduceError;
use super::sharded_gradients::GradShard;
use super::slots::{IN_TURN, Landed, Landing, Round, Slots, StreamRole};
use crate::collective::{Communicator, Work};
use crate::config::Sync;
use crate::device::{Arena, ArenaSpec, Buffer, DType, Device, Event};
use crate::model::ParamId;
use crate::ops::Cast;
use crate::parallel::comm_times::CommTracker;
use crate::parallel::{GradientLayout, Portion, ReplicaSet, Sharding};

/// What one reduction carries: parameters that lie side by side.
pub(super) struct ReduceUnit {
    /// Its elements, where all gradients lie in one arena.
    pub(super) range: Range<usize>,
    /// Those of them whose sums end on this rank, counted from the unit's first.
    pub(super) own: Range<usize>,
    /// Parameters that must be ready.
    pub(super) params: Vec<ParamId>,
    /// For errors and traces.
    pub(super) tag: String,
}

impl ReduceUnit {
    fn whole(range: Range<usize>, params: &[ParamId], tag: String) -> Self {
        Self {
            own: 0..range.len(),
            range,
            params: params.to_vec(),
            tag,
        }
    }

    /// Where every rank ends with all sums.
    pub(super) fn of_layout(layout: &GradientLayout, sync: Sync) -> Vec<Self> {
        match sync {
            Sync::Naive => vec![Self::whole(
                0..layout.len(),
                layout.order(),
                "all gradients".into(),
            )],
            Sync::PerParameter => {
                let ordered = layout.order().iter();
                ordered
                    .map(|id| {
                        let tag = format!("gradient of `{}`", layout.spec(*id).name);
                        Self::whole(layout.range(*id), &[*id], tag)
                    })
                    .collect()
            }
            Sync::Bucketed => {
                let buckets = layout.buckets().iter().enumerate();
                buckets
                    .map(|(i, bucket)| {
                        let first = &layout.spec(bucket.params[0]).name;
                        let tag = format!("bucket {i}, from `{first}`");
                        Self::whole(bucket.range.clone(), &bucket.params, tag)
                    })
                    .collect()
            }
        }
    }

    /// Where each sum ends on the rank that owns it.
    pub(super) fn of_sharding(sharding: &Sharding) -> Vec<Self> {
        let units = sharding.units().iter().enumerate();
        units
            .map(|(index, unit)| Self {
                range: unit.whole(),
                own: sharding.own(index),
                params: unit.params.clone(),
                tag: unit.name.clone(),
            })
            .collect()
    }
}

/// The gradients of a rank.
pub(super) enum GradMemory {
    /// All in one arena.
    Whole(WholeGrads),
    /// In slots for as long as they are in flight, then in the shard of their owner.
    Shard(GradShard),
}

/// Gradients in one arena: summed on every rank, or each on its owner.
pub(super) struct WholeGrads {
    arena: Arena,
    /// By parameter.
    grads: Vec<Buffer>,
    is_scattered: bool,
    /// Where they cross the wire in another type.
    wire: Option<NarrowedSlots>,
    landed: Vec<Landed>,
}

impl WholeGrads {
    /// Every rank of `replicas` must call it. Without a `sharding` every rank ends with all sums.
    pub(super) fn new(
        replicas: &ReplicaSet,
        device: &Arc<dyn Device>,
        layout: &GradientLayout,
        sharding: Option<&Sharding>,
        units: &[ReduceUnit],
    ) -> Result<Self, ReduceError> {
        let comm = replicas.all();
        let is_narrowed = layout.dtype() != layout.accumulated();
        let is_reduced_in_place = !is_narrowed || replicas.replicate().is_some();
        let wire = if is_narrowed {
            let lens = units.iter().map(|unit| unit.range.len());
            Some(NarrowedSlots::new(comm, device, layout.dtype(), lens)?)
        } else {
            None
        };
        let len = sharding.map_or(layout.len(), Sharding::whole_len);
        let (name, dtype) = ("gradients", layout.accumulated());
        let arena = if is_reduced_in_place {
            comm.alloc_shared(device, &ArenaSpec::on_node(name, dtype, len))?
        } else {
            device.alloc(&ArenaSpec::private(name, dtype, len))?
        };
        let range = |id| sharding.map_or_else(|| layout.range(id), |sharding| sharding.whole_range(id));
        Ok(Self {
            grads: (0..layout.params())
                .map(|id| arena.slice(range(ParamId(id))))
                .collect(),
            arena,
            is_scattered: sharding.is_some(),
            wire,
            landed: Vec::new(),
        })
    }

    fn launched(&mut self, index: usize, unit: &ReduceUnit, work: Work, round: Round) {
        let place = self.arena.slice(unit.range.clone()).slice(unit.own.clone());
        let Some(wire) = &mut self.wire else {
            let at = work.event().clone();
            self.landed.push(Landed {
                unit: index,
                place,
                at,
            });
            return;
        };
        wire.launched(Landing {
            unit: index,
            work,
            own: unit.own.clone(),
            place,
            round,
        });
    }
}

impl GradMemory {
    /// Memory of a gradient, to be written.
    pub(super) fn grad(
        &mut self,
        id: ParamId,
        tracker: &CommTracker,
        deadline: Instant,
    ) -> Result<Buffer, ReduceError> {
        match self {
            Self::Whole(whole) => Ok(whole.grads[id.0].clone()),
            Self::Shard(shard) => shard.grad(id, tracker, deadline),
        }
    }

    /// All elements of a gradient, where every rank ends with them.
    pub(super) fn sum(&self, id: ParamId) -> Option<&Buffer> {
        match self {
            Self::Whole(whole) if !whole.is_scattered => Some(&whole.grads[id.0]),
            _ => None,
        }
    }

    /// A unit as it crosses the wire, complete at `ready`, and when it is there.
    pub(super) fn outgoing(
        &mut self,
        (index, unit): (usize, &ReduceUnit),
        ready: Event,
        tracker: &CommTracker,
        deadline: Instant,
    ) -> (Buffer, Event) {
        match self {
            Self::Shard(shard) => (shard.buffer(index), ready),
            Self::Whole(whole) => {
                let place = whole.arena.slice(unit.range.clone());
                match &mut whole.wire {
                    Some(wire) => wire.narrow(&place, &ready, tracker, deadline),
                    None => (place, ready),
                }
            }
        }
    }

    /// The unit that went out last is being reduced.
    pub(super) fn launched(&mut self, (index, unit): (usize, &ReduceUnit), work: Work, round: Round) {
        match self {
            Self::Whole(whole) => whole.launched(index, unit, work, round),
            Self::Shard(shard) => shard.launched(index, work, round),
        }
    }

    /// Puts the sums that were launched where they belong. Reached when those are there that the stream that
    /// computes does not wait for.
    pub(super) fn land_all(&mut self, tracker: &CommTracker, deadline: Instant) -> Event {
        match self {
            Self::Whole(whole) => whole.wire.as_mut().map_or_else(Event::reached, |wire| {
                wire.land_all(tracker, deadline);
                wire.record()
            }),
            Self::Shard(shard) => {
                shard.land_all(tracker, deadline);
                Event::reached()
            }
        }
    }

    /// Units of which this rank's part is complete since the last call.
    pub(super) fn take_landed(&mut self) -> Vec<Landed> {
        match self {
            Self::Whole(whole) => match &mut whole.wire {
                Some(wire) => wire.take_landed(),
                None => std::mem::take(&mut whole.landed),
            },
            Self::Shard(shard) => shard.take_landed(),
        }
    }

    /// True if every micro-batch communicates.
    pub(super) fn is_shard(&self) -> bool {
        matches!(self, Self::Shard(_))
    }

    /// True if a sum ends on its owner only.
    pub(super) fn is_scattered(&self) -> bool {
        match self {
            Self::Whole(whole) => whole.is_scattered,
            Self::Shard(_) => true,
        }
    }

    /// Forgets what an abandoned step has left.
    pub(super) fn reset(&mut self) {
        drop(self.take_landed());
        if let Self::Shard(shard) = self {
            shard.reset();
        }
    }

    pub(super) fn portion(&self) -> Portion {
        match self {
            Self::Whole(whole) => Portion::Whole(whole.arena.clone()),
            Self::Shard(shard) => shard.portion(),
        }
    }

    /// Size, padding and slots included.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Whole(whole) => whole.arena.bytes() + whole.wire.as_ref().map_or(0, NarrowedSlots::bytes),
            Self::Shard(shard) => shard.bytes(),
        }
    }
}

/// Slots for gradients that are added up in one type and cross the wire in a narrower one.
///
/// A unit is narrowed into a slot, reduced there, and widened into its place again. All this is on a stream of its
/// own, so that neither the host nor the stream that computes waits, on a device that runs asynchronously.
struct NarrowedSlots {
    device: Arc<dyn Device>,
    slots: Slots,
    /// Slots that units take in turns.
    turns: usize,
    /// Units narrowed so far.
    count: usize,
}

impl NarrowedSlots {
    /// For units of these lengths. Every rank of `comm` must call it.
    fn new(
        comm: &Communicator,
        device: &Arc<dyn Device>,
        dtype: DType,
        lens: impl Iterator<Item = usize> + Clone,
    ) -> Result<Self, ReduceError> {
        let largest = lens.clone().max().unwrap_or(0);
        let sizes = vec![largest; IN_TURN.min(lens.count())];
        Ok(Self {
            turns: sizes.len(),
            slots: Slots::new(comm, (device, device.stream()), dtype, sizes)?,
            device: device.clone(),
            count: 0,
        })
    }

    /// Narrows a unit that is complete at `ready`. Returns it as it crosses the wire, and when it is there.
    fn narrow(
        &mut self,
        unit: &Buffer,
        ready: &Event,
        tracker: &CommTracker,
        deadline: Instant,
    ) -> (Buffer, Event) {
        let (slot, stream) = (self.count % self.turns, self.slots.stream());
        self.count += 1;
        self.slots.land(slot, StreamRole::Side, tracker, deadline);
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
    fn launched(&mut self, landing: Landing) {
        self.slots.launched((self.count - 1) % self.turns, landing);
    }

    /// Widens what is still on its way.
    fn land_all(&mut self, tracker: &CommTracker, deadline: Instant) {
        self.slots.land_all(StreamRole::Side, tracker, deadline);
    }

    fn take_landed(&mut self) -> Vec<Landed> {
        self.slots.take_landed()
    }

    /// All that was asked for has run.
    fn record(&self) -> Event {
        self.device.record(self.slots.stream())
    }

    /// Size of the slots.
    fn bytes(&self) -> usize {
        self.slots.bytes()
    }
}
