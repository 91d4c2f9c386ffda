//! The gradients of a rank, and their way over the ranks, unit by unit.
//!
//! A unit is what one reduction carries. It is contributed, reduced, and *stored*: this rank's part of the sum is put
//! where it belongs.
//!
//! | what a rank keeps | contributed | reduced | stored |
//! |---|---|---|---|
//! | all gradients | in its place | in place: all-reduced, or reduce-scattered to owners | is there |
//! | all, in a wider type than crosses the wire | in its place | narrowed, in a slot | own part is widened into its place |
//! | its shard (ZeRO-2, -3), or all (`sync_each_batch`) | in a slot | in that slot | copied into the shard, or added to it |
//!
//! What ranks beyond the data-parallel ones have a part of ([`CopyGroup::summed`]) is summed over them first, where it
//! was contributed, when the unit is complete. A unit is reduced by its [`StateGroup`]. With several copies of the state,
//! what is stored for the last time in a step is then summed over the copies ([`StateGroup::copies`]), in the order of
//! units, so that all ranks issue the same operations.
//!
//! *Slots* are memory shared with the other ranks, through which units pass one after the other. A slot is reused in the
//! order of a stream: a host waits only where the device runs at once. Narrowing and widening are on a stream of their
//! own, so that the stream that computes does not wait either.
//!
//! A shard may lie in memory of the host or in a file ([`StateMemory`]). Beside the host a unit is stored as soon as it is
//! reduced, on a stream of its own, and the next user of its slot waits for that. With several copies of the state the shard
//! stays on the device, which sums it over them.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::readiness::ReduceError;
use crate::collective::{Communicator, Launch, ReduceOp, Traffic, Work};
use crate::config::{Accumulate, Sync};
use crate::device::{Arena, ArenaSpec, Buffer, Compute, DType, Event, StateBytes, StateMemory};
use crate::mesh::MeshShape;
use crate::model::ParamId;
use crate::ops::{Cast, ColumnSum, Fill};
use crate::parallel::comm_times::CommTracker;
use crate::parallel::{
    ArenaShare, CopyGroup, GradientLayout, ReplicaSet, ShardUnit, Sharding, StateGroup, summed_over,
};

/// Slots for units that follow each other: one is computed while another is in flight.
const IN_TURN: usize = 2;

/// How gradients are synchronised.
#[derive(Clone, Debug)]
pub struct ReducerConfig {
    /// What one operation carries, where every rank ends with all sums.
    pub sync: Sync,
    /// Launch while gradients are still being computed; otherwise all at the end.
    pub overlap: bool,
    /// What is held of the gradients of other ranks' parameters; with [`Accumulate::Sharded`], every micro-batch is summed.
    pub accumulate: Accumulate,
    /// Most micro-batches of a step. With several that are added up here, each use of a tied parameter has a sum of its own.
    pub micro_batches: usize,
    /// Where a shard of the gradients lies, if not beside what is in flight.
    pub home: Option<Arc<StateMemory>>,
}

impl Default for ReducerConfig {
    /// Buckets, launched as soon as they are complete.
    fn default() -> Self {
        Self {
            sync: Sync::Bucketed,
            overlap: true,
            accumulate: Accumulate::Full,
            micro_batches: 1,
            home: None,
        }
    }
}

/// What one reduction carries: parameters that lie side by side.
struct Reduction {
    /// Its elements, where all gradients lie in one arena.
    range: Range<usize>,
    /// The elements whose sums this rank gets, counted from the first.
    own: Range<usize>,
    /// Parameters that must be ready.
    params: Vec<ParamId>,
    /// The ranks that sum it.
    group: StateGroup,
    /// What of them is summed over other ranks first, counted from the first element.
    partial: Vec<PartialSum>,
    /// Another stage of a pipeline has a part of some gradient: launched when the passes of this rank are over.
    is_shared_by_stages: bool,
    /// Name in errors and traces.
    tag: String,
}

/// Elements of a unit that are summed over a group.
struct PartialSum {
    /// Index in [`ReplicaSet::copy_groups`].
    group: usize,
    range: Range<usize>,
}

impl PartialSum {
    /// The partial sums of a unit, in order. Neighbours are summed at once.
    fn all(
        start: usize,
        params: &[ParamId],
        layout: &GradientLayout,
        sharding: &Sharding,
        groups: &[CopyGroup],
    ) -> Vec<Self> {
        let mut sums = Vec::new();
        for (index, group) in groups.iter().enumerate() {
            let kind = |id: &ParamId| (group.summed.contains(id), layout.spec(*id).group);
            for params in params.chunk_by(|a, b| kind(a) == kind(b)) {
                if !group.summed.contains(&params[0]) {
                    continue;
                }
                let [first, last] = [params[0], params[params.len() - 1]].map(|id| sharding.whole_range(id));
                sums.push(Self {
                    group: index,
                    range: first.start - start..last.end - start,
                });
            }
        }
        sums
    }
}

impl Reduction {
    /// The units of the sharding; where nothing is sharded or offloaded, `config.sync` decides: what is summed in every
    /// micro-batch has buckets.
    fn all(
        layout: &GradientLayout,
        sharding: &Sharding,
        config: &ReducerConfig,
        set: &ReplicaSet,
    ) -> Vec<Self> {
        let unit = |range: Range<usize>, own: Range<usize>, params: &[ParamId], tag| Self {
            partial: PartialSum::all(range.start, params, layout, sharding, &set.copy_groups),
            group: set.group(&summed_over(&layout.spec(params[0]).roles)).clone(),
            is_shared_by_stages: params.iter().any(|id| layout.spec(*id).is_shared_by_stages()),
            params: params.to_vec(),
            range,
            own,
            tag,
        };
        let of_units = |sharding: &Sharding| {
            let units = sharding.units().iter().enumerate();
            let of = |(i, u): (usize, &ShardUnit)| {
                unit(u.whole.clone(), sharding.own(i), &u.params, u.name.clone())
            };
            units.map(of).collect()
        };
        match config.sync {
            _ if sharding.world() > 1 || config.home.is_some() => of_units(sharding),
            Sync::Bucketed => of_units(&Sharding::of_buckets(layout, MeshShape::of_shards(1), 0)),
            Sync::Naive => of_units(&Sharding::replicated(layout)),
            Sync::PerParameter => {
                let tag = |id| format!("gradient of `{}`", layout.spec(id).name);
                let own = |id| 0..layout.range(id).len();
                let one = |id: &ParamId| unit(layout.range(*id), own(*id), &[*id], tag(*id));
                layout.order().iter().map(one).collect()
            }
        }
    }

    /// Its group, where each rank of that gets a slice.
    fn scattered(&self) -> Option<&StateGroup> {
        (self.own.len() < self.range.len()).then_some(&self.group)
    }
}

/// Sizes of the slots, and those that each unit may take.
fn slots_of(
    reductions: &[Reduction],
    layout: &GradientLayout,
    is_staged: bool,
) -> (Vec<usize>, Vec<Range<usize>>) {
    if !is_staged && layout.dtype() == layout.accumulated() {
        return (Vec::new(), vec![0..0; reductions.len()]);
    }
    // A tied parameter has its first gradient long before its last: its unit stays open meanwhile.
    let is_tied = |unit: &Reduction| unit.params.iter().any(|id| layout.spec(*id).contributions > 1);
    let turn = |unit: &Reduction| (!is_staged || !is_tied(unit)).then(|| unit.group.axes.clone());
    let units = reductions.iter().map(|unit| (unit.range.len(), turn(unit)));
    slots_for(&units.collect::<Vec<_>>())
}

/// Sizes of slots, and those that each unit may take: one of its own for a unit that is needed out of turn, for the
/// others some that those of the same kind take in turns. Units are given as (elements, kind if in turn).
pub(in crate::parallel) fn slots_for<T: PartialEq>(
    units: &[(usize, Option<T>)],
) -> (Vec<usize>, Vec<Range<usize>>) {
    let (mut sizes, mut choice) = (Vec::new(), Vec::<Range<usize>>::new());
    for (index, (len, turn)) in units.iter().enumerate() {
        let is_alike = |other: &&(usize, Option<T>)| turn.is_some() && other.1 == *turn;
        if let Some(first) = units[..index].iter().position(|other| is_alike(&other)) {
            choice.push(choice[first].clone());
            continue;
        }
        let lens = units[index..].iter().filter(is_alike).map(|(len, _)| *len);
        let end = sizes.len() + lens.clone().count().clamp(1, IN_TURN);
        choice.push(sizes.len()..end);
        sizes.resize(end, lens.max().unwrap_or(*len));
    }
    (sizes, choice)
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
    pub(super) fn is_last(self) -> bool {
        self.index + 1 == self.count
    }
}

/// One unit, and where it passes.
struct Unit {
    reduction: Reduction,
    /// Where it is contributed; none: in a slot.
    place: Option<Buffer>,
    /// Slots in which it may be reduced; none: in its place.
    slots: Range<usize>,
    /// Where this rank's part of the sum belongs.
    target: Buffer,
    /// Reached when this rank's part is stored for the last time in a step; taken when it is summed over the copies.
    stored: Option<Event>,
}

impl Unit {
    /// `index` in the sharding, where a rank keeps its shard.
    fn new(
        reduction: Reduction,
        slots: Range<usize>,
        sums: &ArenaShare,
        sharding: &Sharding,
        index: usize,
    ) -> Self {
        let place = match sums {
            ArenaShare::Whole(arena) => Some(arena.slice(reduction.range.clone())),
            ArenaShare::Shard(_) => None,
        };
        Self {
            target: match &place {
                Some(place) => place.slice(reduction.own.clone()),
                None => sums.slice(&sharding.own_ranges(index)),
            },
            reduction,
            place,
            slots,
            stored: None,
        }
    }
}

struct Slot {
    arena: Arena,
    /// The unit that is being written.
    unit: Option<usize>,
    /// The unit that is being reduced.
    pending: Option<PendingSum>,
    /// Reached when the last unit was stored, if not in the stream in which slots are reused.
    stored: Option<Event>,
    /// Number of its current or last launch. The slot with the smallest one becomes free first.
    launch: u64,
}

/// A unit that is being reduced in a slot.
struct PendingSum {
    unit: usize,
    work: Work,
    /// The first round overwrites what is in its target, later ones are added to it.
    round: Round,
}

/// The gradients of a rank, and the operations that sum them.
pub(super) struct GradUnits {
    /// In the order of its stream slots are reused.
    compute: Compute,
    /// Where sums are stored, if not there.
    stores: Option<Compute>,
    home: Arc<StateMemory>,
    /// All data-parallel ranks.
    comm: Communicator,
    copy_groups: Vec<CopyGroup>,
    sharding: Arc<Sharding>,
    units: Vec<Unit>,
    /// What this rank keeps.
    sums: ArenaShare,
    /// By parameter, where all of them lie in one arena.
    grads: Vec<Buffer>,
    slots: Vec<Slot>,
    launches: u64,
    /// Units that were summed over the copies in this step: always a prefix.
    replicated: usize,
    pub(super) in_flight: Vec<Work>,
    pub(super) tracker: CommTracker,
}

impl GradUnits {
    /// Every rank of `set` must call it, with the same layout; `compute` makes the gradients.
    pub(super) fn new(
        set: &ReplicaSet,
        compute: &Compute,
        layout: &GradientLayout,
        sharding: &Arc<Sharding>,
        config: ReducerConfig,
    ) -> Result<Self, ReduceError> {
        let (device, is_staged) = (&compute.device, config.accumulate == Accumulate::Sharded);
        let reductions = Reduction::all(layout, sharding, &config, set);
        let (sizes, choice) = slots_of(&reductions, layout, is_staged);
        let shared = |name, dtype: DType, len| {
            set.all
                .alloc_shared(device, &ArenaSpec::on_node(name, dtype, len))
        };
        let slot = |len| -> Result<Slot, ReduceError> {
            Ok(Slot {
                arena: shared("gradients in flight", layout.dtype(), len)?,
                unit: None,
                pending: None,
                stored: None,
                launch: 0,
            })
        };
        let slots: Vec<Slot> = sizes.into_iter().map(slot).collect::<Result<_, _>>()?;
        let (name, dtype) = ("gradients", layout.accumulated());
        let has_copies = sharding.world() > 1 && set.groups.iter().any(|group| group.copies.is_some());
        let home = config.home.filter(|_| is_staged && !has_copies);
        let home = home.unwrap_or_else(|| Arc::new(StateMemory::on_device(device.clone())));
        let kept = |len| -> Result<Arena, ReduceError> {
            if slots.is_empty() || has_copies {
                return Ok(shared(name, dtype, len)?);
            }
            Ok(home.alloc(&ArenaSpec::private(name, dtype, len))?)
        };
        let sums = if is_staged {
            ArenaShare::Shard(kept(sharding.shard_len())?)
        } else {
            ArenaShare::Whole(kept(sharding.whole_len())?)
        };
        let placed = reductions.into_iter().zip(choice).enumerate();
        let unit = |(index, (reduction, slots))| Unit::new(reduction, slots, &sums, sharding, index);
        let grads = (0..layout.params()).filter(|_| !is_staged);
        Ok(Self {
            units: placed.map(unit).collect(),
            grads: grads
                .map(|id| sums.arena().slice(sharding.whole_range(ParamId(id))))
                .collect(),
            compute: if slots.is_empty() || is_staged {
                compute.clone()
            } else {
                Compute::new(device.clone())
            },
            stores: home.host_state().map(|_| Compute::new(device.clone())),
            home,
            sums,
            slots,
            launches: 0,
            replicated: 0,
            in_flight: Vec::new(),
            tracker: CommTracker::new(device, set.all.timeline()),
            comm: set.all.clone(),
            copy_groups: set.copy_groups.clone(),
            sharding: sharding.clone(),
        })
    }

    /// Number of units.
    pub(super) fn len(&self) -> usize {
        self.units.len()
    }

    /// Parameters of a unit.
    pub(super) fn params(&self, unit: usize) -> &[ParamId] {
        &self.units[unit].reduction.params
    }

    /// True if another stage of a pipeline has a part of a unit. To wait for that stage in the middle of a pass could be to
    /// wait for ever: it may need what comes of the pass.
    pub(super) fn is_shared_by_stages(&self, unit: usize) -> bool {
        self.units[unit].reduction.is_shared_by_stages
    }

    /// Memory of a gradient that adds up in its place.
    pub(super) fn in_place(&self, id: ParamId) -> Option<&Buffer> {
        self.grads.get(id.0)
    }

    /// True if gradients of other ranks' parameters exist in slots only: every micro-batch communicates.
    pub(super) fn is_staged(&self) -> bool {
        matches!(self.sums, ArenaShare::Shard(_))
    }

    /// The memory that this rank keeps.
    pub(super) fn sums(&self) -> &ArenaShare {
        &self.sums
    }

    /// All elements of a gradient, where every rank ends with them.
    pub(super) fn sum(&self, id: ParamId) -> Option<&Buffer> {
        let unit = &self.sharding.units()[self.sharding.unit_range(id).0];
        self.grads.get(id.0).filter(|_| unit.ranks == 1)
    }

    /// Size, padding and slots included.
    pub(super) fn bytes(&self) -> usize {
        let slots: usize = self.slots.iter().map(|slot| slot.arena.bytes()).sum();
        self.sums.arena().bytes() + slots
    }

    /// Size of what this rank keeps, with padding, by where it is.
    pub(super) fn sum_bytes(&self) -> StateBytes {
        self.home.bytes(self.sums.arena().bytes(), 1)
    }

    /// Forgets what an abandoned step has left.
    pub(super) fn reset(&mut self) {
        for slot in &mut self.slots {
            slot.unit = None;
        }
        for unit in &mut self.units {
            unit.stored = None;
        }
        self.replicated = 0;
    }

    /// Memory of a gradient, to be written; the first one of a unit may take a slot.
    pub(super) fn grad(&mut self, id: ParamId) -> Result<Buffer, ReduceError> {
        if let Some(grad) = self.grads.get(id.0) {
            return Ok(grad.clone());
        }
        let (unit, range) = self.sharding.unit_range(id);
        let slot = match self.slot_of(unit) {
            Some(slot) => slot,
            None => self.open_slot(unit)?,
        };
        Ok(self.slots[slot].arena.slice(range))
    }

    /// A slot for a unit that is about to be written.
    fn open_slot(&mut self, unit: usize) -> Result<usize, ReduceError> {
        let slot = self.take_slot(unit)?;
        for gap in self.sharding.gaps(unit) {
            let out = self.slots[slot].arena.slice(gap);
            self.compute.enqueue(Fill { out, value: 0.0 });
        }
        self.sum_copies();
        Ok(slot)
    }

    /// Sends a unit on its way that is complete at `ready`.
    pub(super) fn launch(&mut self, index: usize, ready: Event, round: Round) {
        let ready = self.sum_partial(index, ready);
        let (buffer, ready, slot) = self.outgoing(index, ready);
        let unit = &self.units[index].reduction;
        let launch = Launch::after(ready, Traffic::Grads, unit.tag.clone());
        let work = (self.tracker).launch(|| match unit.scattered() {
            Some(group) => group.shard.reduce_scatter(&buffer, ReduceOp::Sum, launch),
            None => unit.group.all.all_reduce(&buffer, ReduceOp::Sum, launch),
        });
        self.in_flight.push(work.clone());
        if let Some(slot_index) = slot {
            self.launches += 1;
            let slot = &mut self.slots[slot_index];
            (slot.unit, slot.launch) = (None, self.launches);
            slot.pending = Some(PendingSum {
                unit: index,
                work,
                round,
            });
            if self.stores.is_some() {
                self.store_slot(slot_index, self.comm.deadline());
            }
        } else {
            self.units[index].stored = Some(work.event().clone());
        }
        self.sum_copies();
    }

    /// Stores the units that were launched. Reached when those are stored that the stream that computes does not wait
    /// for.
    pub(super) fn store_slots(&mut self, deadline: Instant) -> Event {
        let mut order: Vec<usize> = (0..self.slots.len()).collect();
        order.sort_by_key(|&slot| self.slots[slot].launch);
        for slot in order {
            self.store_slot(slot, deadline);
        }
        let stored = match &self.stores {
            Some(stores) => stores.record(),
            None if self.slots.is_empty() || self.is_staged() => Event::reached(),
            None => self.compute.record(),
        };
        self.sum_copies();
        stored
    }

    /// Sums what other ranks have a part of. Reached when the unit has these sums.
    fn sum_partial(&mut self, index: usize, mut ready: Event) -> Event {
        let Unit { reduction, place, .. } = &self.units[index];
        for PartialSum { group, range } in &reduction.partial {
            let memory = match (place, self.slot_of(index)) {
                (Some(place), _) => place.slice(range.clone()),
                (None, slot) => {
                    let slot = slot.expect("each report asked for memory before");
                    self.slots[slot].arena.slice(range.clone())
                }
            };
            let comm = &self.copy_groups[*group].comm;
            let tag = format!("partial gradients of {}", reduction.tag);
            let launch = Launch::after(ready, Traffic::Grads, tag);
            let work = self
                .tracker
                .launch(|| comm.all_reduce(&memory, ReduceOp::Sum, launch));
            ready = work.event().clone();
            self.in_flight.push(work);
        }
        ready
    }

    /// A unit as it crosses the wire, when it is there, and its slot.
    fn outgoing(&mut self, index: usize, ready: Event) -> (Buffer, Event, Option<usize>) {
        let len = self.units[index].reduction.range.len();
        let Some(place) = self.units[index].place.clone() else {
            let slot = self.slot_of(index).expect("each report asked for memory before");
            return (self.slots[slot].arena.slice(0..len), ready, Some(slot));
        };
        if self.slots.is_empty() {
            return (place, ready, None);
        }
        let slot = self
            .take_slot(index)
            .expect("a narrowed unit is launched at once");
        // For arithmetic, not for communication.
        self.compute.wait_event(&ready, self.comm.deadline());
        let narrow = self.slots[slot].arena.slice(0..len);
        self.compute.enqueue(Cast {
            x: place,
            out: narrow.clone(),
        });
        (narrow, self.compute.record(), Some(slot))
    }

    /// The slot that a unit is written in.
    fn slot_of(&self, unit: usize) -> Option<usize> {
        self.slots.iter().position(|slot| slot.unit == Some(unit))
    }

    /// A slot for a unit: of those that are not being written the first to be free.
    fn take_slot(&mut self, index: usize) -> Result<usize, ReduceError> {
        let unit = &self.units[index];
        let free = unit.slots.clone().filter(|&slot| self.slots[slot].unit.is_none());
        let Some(slot) = free.min_by_key(|&slot| self.slots[slot].launch) else {
            return Err(ReduceError::Misuse(format!(
                "gradients of {} were begun before earlier ones were complete\n  hint: with sharded gradients, backward must finish them in the order of the layout",
                unit.reduction.tag
            )));
        };
        self.store_slot(slot, self.comm.deadline());
        if let Some(stored) = self.slots[slot].stored.take() {
            self.compute.wait_event(&stored, self.comm.deadline());
        }
        self.slots[slot].unit = Some(index);
        Ok(slot)
    }

    /// Stores what is being reduced in a slot, if something is.
    fn store_slot(&mut self, slot: usize, deadline: Instant) {
        let slot = &mut self.slots[slot];
        let Some(PendingSum { unit, work, round }) = slot.pending.take() else {
            return;
        };
        let (unit, on) = (
            &mut self.units[unit],
            self.stores.as_ref().unwrap_or(&self.compute),
        );
        match (&unit.place, &self.stores) {
            (None, None) => self.tracker.wait_in_stream(on.stream, work.event(), deadline),
            _ => self
                .tracker
                .wait_in_side_stream(on.stream, work.event(), deadline),
        }
        let x = slot.arena.slice(unit.reduction.own.clone());
        let (out, accumulate) = (unit.target.clone(), round.index > 0);
        let store = if accumulate {
            // One row: an addition.
            ColumnSum { x, out, accumulate }.into()
        } else {
            Cast { x, out }.into()
        };
        self.home.enqueue_all(on.stream, vec![store]);
        slot.stored = self.stores.as_ref().map(Compute::record);
        if round.is_last() {
            unit.stored = Some(on.record());
        }
    }

    /// Sums over the copies of the state what is stored for the last time, up to the first unit that has not.
    fn sum_copies(&mut self) {
        while let Some(unit) = self.units.get_mut(self.replicated)
            && let Some(stored) = unit.stored.take()
        {
            self.replicated += 1;
            let scattered = unit.reduction.scattered();
            let Some(comm) = scattered.and_then(|group| group.copies.as_ref()) else {
                continue;
            };
            let tag = format!("{} of all copies", unit.reduction.tag);
            let launch = Launch::after(stored, Traffic::Grads, tag);
            let work = self
                .tracker
                .launch(|| comm.all_reduce(&unit.target, ReduceOp::Sum, launch));
            self.in_flight.push(work);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_in_turn_share_two_slots_of_the_largest_of_their_group() {
        let (sizes, choice) = slots_for(&[(5, Some('a')), (9, None), (7, Some('a')), (3, Some('a'))]);
        assert_eq!(sizes, [7, 7, 9]);
        assert_eq!(choice, [0..2, 2..3, 0..2, 0..2]);
        for turns in [[Some('a'), None], [None, Some('a')], [Some('a'), Some('b')]] {
            let (sizes, choice) = slots_for(&[(4, turns[0]), (2, turns[1])]);
            assert_eq!(sizes, [4, 2]);
            assert_eq!(choice, [0..1, 1..2]);
        }
    }
}
