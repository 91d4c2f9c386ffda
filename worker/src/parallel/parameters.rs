//! The parameters of a model under some strategy.
//!
//! A rank owns its slice of each unit of parameters, or everything. A unit is *gathered* before a block's pass that
//! reads it, and may be released after the last such pass ([`ReshardPolicy`]):
//!
//! | strategy | memory | gathered | released |
//! |---|---|---|---|
//! | DDP | all parameters | never: each rank owns them all | never |
//! | ZeRO-1, -2 | all parameters; a rank owns slices of them | in place after every update, while the next forward begins | never |
//! | ZeRO-3 (FSDP) | the shard, and slots | while the block before computes | after the last block that uses it |
//!
//! Under ZeRO-3 gathered units lie in *slots*, shared with the other ranks: two that ordinary blocks take in turns, and
//! one of its own for each unit that several blocks use, or that shares its block with others. A slot is released and
//! reused in stream order. Small units may persist: gathered after every update instead of in every pass. A norm or a
//! bias needs none of this: it travels with its block's unit and costs no operation of its own. A unit that is cut over one
//! rank is read where it is owned, if the device reaches that.
//!
//! The shard may lie in memory of the host or in a file ([`StateMemory`]). Gathering a unit then begins with a copy of this
//! rank's slice, beside the host on a stream of its own; from a file the kernel has read it ahead, while the blocks before
//! computed.

use std::ops::Range;
use std::sync::Arc;

use ddp_proto::words::numbered;
use parking_lot::Mutex;

use super::comm_times::CommTracker;
use super::reduction::slots_for;
use super::{ArenaRanges, ArenaShare, ReduceError, ReplicaSet, Sharding, summed_over};
use crate::collective::{CollectiveError, Communicator, Launch, Traffic, Work, WorkError};
use crate::device::{
    Arena, ArenaSpec, Buffer, Compute, DType, Device, DeviceError, Event, StateBytes, StateMemory,
    StatePlace, evict, prefetch,
};
use crate::model::{Model, ParamId, Params, Pass};
use crate::ops::Cast;

/// What stays gathered for longer than a block's pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReshardPolicy {
    /// Everything, for ever.
    KeepAll,
    /// What is small, and what the next pass reads.
    Release {
        /// Release after forward what backward needs again, but for the units of the last block, whose backward comes
        /// next.
        after_forward: bool,
        /// Units of fewer elements than this stay from step to step.
        persist_below: usize,
    },
}

/// What of the parameters is held, and where.
pub struct ParameterMemory {
    /// What stays gathered.
    pub policy: ReshardPolicy,
    /// Where this rank's shard lies, if not beside what is gathered.
    pub home: Option<Arc<StateMemory>>,
    /// What this rank owned in the generation before, if its layout is the same. It is used in place, unless ranks share it.
    pub kept: Option<ArenaShare>,
}

impl From<ReshardPolicy> for ParameterMemory {
    fn from(policy: ReshardPolicy) -> Self {
        Self {
            policy,
            home: None,
            kept: None,
        }
    }
}

/// What this rank owns of the parameters, and the units that are gathered at the moment.
///
/// A block's parameters are unsharded before its pass is enqueued, and resharded after it.
pub struct Parameters {
    set: ReplicaSet,
    comm: Communicator,
    compute: Compute,
    /// Where what is owned is copied from its home: the stream that computes, unless the device does not reach that.
    loads: Compute,
    sharding: Arc<Sharding>,
    plan: GatherPlan,
    home: Arc<StateMemory>,
    own: ArenaShare,
    /// Where gathered units lie: slots, or the place of each unit in the whole arena.
    slots: Vec<Buffer>,
    /// By unit: the slots that it may take.
    choice: Vec<Range<usize>>,
    /// By unit.
    gathered: Mutex<Vec<Option<Gathered>>>,
    tracker: CommTracker,
    /// With each group of ranks that hold the same.
    compared: Vec<Compared>,
}

/// A unit that is there, or on its way.
struct Gathered {
    slot: usize,
    /// The gathering, until something waits for it.
    work: Option<Work>,
    /// The same of a copy: of a unit that this rank has alone.
    loaded: Option<Event>,
}

impl Parameters {
    /// Zeros, or what was kept. Every rank of `set` must call it.
    pub fn new(
        set: &ReplicaSet,
        compute: &Compute,
        model: &Model,
        sharding: &Arc<Sharding>,
        memory: ParameterMemory,
    ) -> Result<Self, ReduceError> {
        let ParameterMemory { policy, home, kept } = memory;
        let (comm, device) = (&set.groups[0].gathers, &compute.device);
        let home = home.unwrap_or_else(|| Arc::new(StateMemory::on_device(device.clone())));
        let plan = GatherPlan::new(model, sharding, policy, home.place());
        let shared = |name, len| comm.alloc_shared(device, &ArenaSpec::on_node(name, model.dtype(), len));
        let kept = kept.map(|own| Ok(own.arena().clone()));
        let spec = |len| ArenaSpec::private("parameters", model.dtype(), len);
        let (own, slots, choice) = if policy == ReshardPolicy::KeepAll {
            let arena = match sharding.world() {
                // Private memory can have huge pages.
                1 => kept.unwrap_or_else(|| device.alloc(&spec(sharding.whole_len())))?,
                _ => shared("parameters", sharding.whole_len())?,
            };
            let slots = sharding
                .units()
                .iter()
                .map(|unit| arena.slice(unit.whole.clone()));
            let (slots, choice) = slots.enumerate().map(|(i, slot)| (slot, i..i + 1)).unzip();
            (ArenaShare::Whole(arena), slots, choice)
        } else {
            let (sizes, choice) = plan.slots(sharding);
            let len = sharding.shard_len();
            let own = ArenaShare::Shard(kept.unwrap_or_else(|| home.alloc(&spec(len)))?);
            let slot = |len| shared("gathered parameters", len).map(|arena| arena.whole());
            let slots = sizes.into_iter().map(slot).collect::<Result<Vec<_>, _>>()?;
            (own, slots, choice)
        };
        let is_whole = matches!(own, ArenaShare::Whole(_));
        let there = |slot: usize| {
            let (work, loaded) = (None, None);
            is_whole.then_some(Gathered { slot, work, loaded })
        };
        Ok(Self {
            gathered: Mutex::new((0..choice.len()).map(there).collect()),
            compared: Compared::all(set, device, model, sharding, &own)?,
            tracker: CommTracker::new(device, comm.timeline()),
            set: set.clone(),
            comm: comm.clone(),
            loads: match home.host_state() {
                Some(_) => Compute::new(device.clone()),
                None => compute.clone(),
            },
            compute: compute.clone(),
            sharding: sharding.clone(),
            plan,
            home,
            own,
            slots,
            choice,
        })
    }

    /// Gathers what a block's pass reads, as far as it is not there, and begins to gather what the next pass reads. Later
    /// operations of the compute stream can read it.
    pub fn unshard(&self, block: usize, pass: Pass) -> Result<(), DeviceError> {
        let mut gathered = self.gathered.lock();
        for &unit in self.plan.needed(block, pass) {
            if !self.gather(&mut gathered, unit) {
                let name = &self.sharding.units()[unit].name;
                let what = format!("no memory to gather the {name}: the blocks before hold all of it");
                return Err(DeviceError::Upstream(what));
            }
        }
        for &unit in self.plan.next(block, pass, 1) {
            self.gather(&mut gathered, unit);
        }
        for &unit in self.plan.next(block, pass, 2) {
            prefetch(&self.own.slice(&self.sharding.own_ranges(unit)));
        }
        for &unit in self.plan.needed(block, pass) {
            if let Some(loaded) = gathered[unit]
                .as_mut()
                .and_then(|gathered| gathered.loaded.take())
            {
                self.compute.wait_event(&loaded, self.comm.deadline());
            }
            if let Some(work) = gathered[unit].as_mut().and_then(|gathered| gathered.work.take()) {
                self.tracker
                    .wait_in_stream(self.compute.stream, work.event(), self.comm.deadline());
            }
        }
        self.tracker.check_input()
    }

    /// Releases what is not needed after a block's pass. The last operation of the pass must be in the stream.
    pub fn reshard(&self, block: usize, pass: Pass) {
        let mut gathered = self.gathered.lock();
        for unit in self.plan.released(block, pass) {
            // It was waited for when the block was entered.
            gathered[unit] = None;
        }
    }

    /// What this rank owns has changed, by operations that are in the stream.
    pub fn updated(&self) -> Result<(), WorkError> {
        if !self.plan.moves.contains(&true) {
            return Ok(());
        }
        self.drain()?;
        let mut gathered = self.gathered.lock();
        // The forward begins with what backward finishes last.
        for unit in (0..gathered.len()).rev().filter(|&unit| self.plan.persists[unit]) {
            // What is there is from before the update.
            gathered[unit] = None;
            self.gather(&mut gathered, unit);
        }
        Ok(())
    }

    /// Waits until nothing is in flight, and releases what does not stay gathered between two steps.
    pub fn drain(&self) -> Result<(), WorkError> {
        let mut works = Vec::new();
        for (gathered, persists) in self.gathered.lock().iter_mut().zip(&self.plan.persists) {
            works.extend(gathered.as_mut().and_then(|gathered| gathered.work.take()));
            if !persists {
                *gathered = None;
            }
        }
        works
            .iter()
            .try_for_each(|work| self.tracker.wait_on_host(work, self.comm.deadline()))
    }

    /// Begins to gather a unit that is not there. False if there is no slot for it at the moment.
    fn gather(&self, gathered: &mut [Option<Gathered>], unit: usize) -> bool {
        if gathered[unit].is_some() {
            return true;
        }
        let is_taken = |slot: &usize| gathered.iter().flatten().any(|other| other.slot == *slot);
        let Some(slot) = self.choice[unit].clone().find(|slot| !is_taken(slot)) else {
            return false;
        };
        let description = &self.sharding.units()[unit];
        let target = self.slots[slot].slice(0..description.whole.len());
        if let ArenaShare::Shard(_) = self.own {
            if self.loads.stream != self.compute.stream {
                // Until then the slot is read.
                self.loads
                    .wait_event(&self.compute.record(), self.comm.deadline());
            }
            let copy = Cast {
                x: self.own.slice(&self.sharding.own_ranges(unit)),
                out: target.slice(self.sharding.own(unit)),
            };
            self.home.enqueue_all(self.loads.stream, vec![copy.into()]);
        }
        let loaded = self.loads.record();
        let work = (description.ranks > 1).then(|| {
            let tag = format!("parameters of {}", description.name);
            let launch = Launch::after(loaded.clone(), Traffic::Params, tag);
            let comm = &self.set.group(&description.axes).gathers;
            self.tracker.launch(|| comm.all_gather(&target, launch))
        });
        let loaded = work.is_none().then_some(loaded);
        gathered[unit] = Some(Gathered { slot, work, loaded });
        true
    }

    /// Where each parameter and its owner are.
    pub fn sharding(&self) -> &Arc<Sharding> {
        &self.sharding
    }

    /// The ranks that share them.
    pub fn replica_set(&self) -> &ReplicaSet {
        &self.set
    }

    /// Memory of what this rank owns.
    pub fn own(&self) -> &ArenaShare {
        &self.own
    }

    /// Bytes held all the time.
    pub fn bytes(&self) -> StateBytes {
        self.home.bytes(self.own.arena().bytes(), 1)
    }

    /// Bytes for parameters that are gathered at the moment.
    pub fn gathered_bytes(&self) -> usize {
        match self.own {
            ArenaShare::Whole(_) => 0,
            ArenaShare::Shard(_) => self.slots.iter().map(Buffer::bytes).sum(),
        }
    }

    /// Times and failure of the gathers.
    pub fn tracker(&self) -> &CommTracker {
        &self.tracker
    }

    /// Overwrites `params`, which may be masters, on all ranks with those of rank 0.
    pub fn broadcast(&self, params: &Buffer) -> Result<(), WorkError> {
        let launch = Launch::after(self.compute.record(), Traffic::Params, "initial parameters");
        let work = self.set.all.broadcast(params, 0, launch);
        work.wait(self.set.all.deadline()).map(drop)
    }

    /// The first difference between ranks that must hold the same, after so many steps. All ranks that compared with each
    /// other get the same one.
    pub fn difference(&self, step: u64) -> Result<Option<Difference>, WorkError> {
        let mut first = None;
        // All of them: other ranks take part in those behind the first that finds something.
        for compared in &self.compared {
            let found = self.difference_in(compared, step)?;
            first = first.or(found);
        }
        Ok(first)
    }

    fn difference_in(&self, compared: &Compared, step: u64) -> Result<Option<Difference>, WorkError> {
        let Compared { comm, parts, hashes } = compared;
        let own_bytes = parts.len() * HASH_BYTES;
        let mut own = Vec::with_capacity(own_bytes);
        for (_, place) in parts {
            let part = self.own.slice(place);
            let bytes = self.home.download(self.compute.stream, &part);
            evict(&part);
            let hash = blake3::hash(&bytes.map_err(WorkError::Pending)?);
            own.extend_from_slice(&hash.as_bytes()[..HASH_BYTES]);
        }
        let place = hashes.slice(comm.rank() * own_bytes..(comm.rank() + 1) * own_bytes);
        self.compute.upload(&place, &own);
        let launch = Launch::after(self.compute.record(), Traffic::Other, "parameter hashes");
        let work = comm.all_gather(&hashes.whole(), launch);
        work.wait(comm.deadline())?;
        let all = self.compute.download(&hashes.whole());
        let all = all.map_err(WorkError::Pending)?;
        Ok(compared.first_difference(&all, step, self.set.all.size()))
    }
}

impl Params for Parameters {
    fn get(&self, id: ParamId) -> Buffer {
        let (unit, range) = self.sharding.unit_range(id);
        if !self.plan.moves[unit] {
            return self.own.slice(&self.sharding.own_ranges(unit)).slice(range);
        }
        let gathered = self.gathered.lock();
        let there = gathered[unit].as_ref();
        let slot = there.expect("a block lists the parameters that it reads").slot;
        self.slots[slot].slice(range)
    }
}

/// Bytes of the hash of one parameter.
const HASH_BYTES: usize = 16;

/// A parameter that is not the same on all ranks that hold it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "parameter `{param}` of {} differs from rank {reference} after step {step}\n  hint: ranks that start equal and add the same gradients stay equal; look for a failing machine or different builds",
    numbered("rank", ranks)
)]
pub struct Difference {
    /// The first parameter that differs, in forward order.
    param: String,
    /// Global rank that the others are compared with.
    reference: usize,
    /// Global ranks whose parameter differs from its.
    ranks: Vec<usize>,
    /// Steps finished.
    step: u64,
    /// Every rank took part in the comparison.
    is_of_all: bool,
}

impl Difference {
    /// True if every rank has found it; false if only the ranks that hold copies of this part have.
    pub const fn is_of_all(&self) -> bool {
        self.is_of_all
    }
}

/// What must be the same, bit by bit, on the ranks of a group: all parameters, or this rank's part where it owns parts.
struct Compared {
    comm: Communicator,
    /// Each parameter, or part of one, by name, in forward order.
    parts: Vec<(String, ArenaRanges)>,
    /// One slice a rank, in each the hashes of all parts.
    hashes: Arena,
}

impl Compared {
    /// With the ranks that hold the same, of the data-parallel ones and beyond them.
    fn all(
        set: &ReplicaSet,
        device: &Arc<dyn Device>,
        model: &Model,
        sharding: &Sharding,
        own: &ArenaShare,
    ) -> Result<Vec<Self>, CollectiveError> {
        let mut held: Vec<(ParamId, ArenaRanges)> = match own {
            ArenaShare::Whole(_) => {
                let place = |id| ArenaRanges {
                    whole: sharding.whole_range(id),
                    shard: 0..0,
                };
                let all = (0..model.params.len()).map(ParamId);
                all.map(|id| (id, place(id))).collect()
            }
            ArenaShare::Shard(_) => {
                let own = sharding.own_pieces().into_iter();
                own.map(|piece| (piece.param, piece.place)).collect()
            }
        };
        held.sort_by_key(|(id, _)| *id);
        let with_data = set.groups.iter().filter_map(|group| {
            let comm = match own {
                ArenaShare::Whole(_) => Some(&group.all),
                ArenaShare::Shard(_) => group.copies.as_ref(),
            };
            let has = |id: ParamId| group.axes == summed_over(&model.params[id.0].roles);
            let of_group = held.iter().filter(|(id, _)| has(*id));
            Some((comm?, of_group.collect::<Vec<_>>()))
        });
        // A tied embedding is a unit of its own, so that its copies are sharded alike.
        let with_others = set.copy_groups.iter().map(|group| {
            let shared = held.iter().filter(|(id, _)| group.held.contains(id));
            (&group.comm, shared.collect())
        });
        let compared = with_data.into_iter().chain(with_others);
        let compared = compared.filter(|(_, parts)| !parts.is_empty());
        let compared = compared.map(|(comm, parts)| {
            let len = comm.size() * parts.len() * HASH_BYTES;
            let hashes = ArenaSpec::on_node("parameter hashes", DType::U8, len);
            let named =
                |(id, place): &(ParamId, ArenaRanges)| (model.params[id.0].key.clone(), place.clone());
            Ok(Self {
                hashes: comm.alloc_shared(device, &hashes)?,
                parts: parts.into_iter().map(named).collect(),
                comm: comm.clone(),
            })
        });
        compared.collect()
    }

    /// From the hashes of all ranks.
    fn first_difference(&self, hashes: &[u8], step: u64, world: usize) -> Option<Difference> {
        let Self { comm, parts, .. } = self;
        let ranks: Vec<&[u8]> = hashes.chunks(parts.len() * HASH_BYTES).collect();
        let differs = |rank: &[u8], part: usize| {
            let hash = part * HASH_BYTES..(part + 1) * HASH_BYTES;
            rank[hash.clone()] != ranks[0][hash]
        };
        let part = (0..parts.len()).find(|&part| ranks.iter().any(|rank| differs(rank, part)))?;
        let members = comm.members().iter().zip(&ranks);
        Some(Difference {
            param: parts[part].0.clone(),
            reference: comm.members()[0],
            ranks: members
                .filter(|(_, rank)| differs(rank, part))
                .map(|(member, _)| *member)
                .collect(),
            step,
            is_of_all: comm.size() == world,
        })
    }
}

/// When each unit of parameters is needed in the two passes over the blocks: a pure function of the model and the units.
#[derive(Clone, Debug, PartialEq, Eq)]
struct GatherPlan {
    forward: Vec<Vec<usize>>,
    backward: Vec<Vec<usize>>,
    /// By unit: it is gathered, rather than read where it is owned.
    moves: Vec<bool>,
    /// By block: it is the first of its chunk. What comes behind the pass of a chunk is the schedule's affair.
    begins_chunk: Vec<bool>,
    /// By unit: it stays gathered from the end of forward to the beginning of backward.
    kept: Vec<bool>,
    /// By unit: several blocks use it, or its block has other units too, or it persists.
    apart: Vec<bool>,
    /// By unit: it is never released, and gathered after every update.
    persists: Vec<bool>,
}

impl GatherPlan {
    /// Of a shard in `home`.
    fn new(model: &Model, sharding: &Sharding, policy: ReshardPolicy, home: StatePlace) -> Self {
        let (reshard, persist_below) = match policy {
            ReshardPolicy::KeepAll => (false, usize::MAX),
            ReshardPolicy::Release {
                after_forward,
                persist_below,
            } => (after_forward, persist_below),
        };
        let units = sharding.units();
        let moves: Vec<bool> = (units.iter())
            .map(|unit| unit.ranks > 1 || home != StatePlace::Device)
            .collect();
        let units_of = |params: &[ParamId]| -> Vec<usize> {
            let mut units = sharding.units_of(params);
            units.retain(|unit| moves[*unit]);
            units
        };
        let forward: Vec<Vec<usize>> = (model.blocks.iter())
            .map(|block| units_of(block.params()))
            .collect();
        let backward: Vec<Vec<usize>> = (model.blocks.iter())
            .map(|block| units_of(block.read_by_backward()))
            .collect();
        let count = units.len();
        let kept = |unit: usize| match backward.split_last() {
            Some((last, before)) => {
                last.contains(&unit) || (!reshard && before.iter().any(|units| units.contains(&unit)))
            }
            None => false,
        };
        let elements =
            |params: &[ParamId]| -> usize { params.iter().map(|id| model.params[id.0].len()).sum() };
        let persists: Vec<bool> = (0..count)
            .map(|unit| moves[unit] && elements(&units[unit].params) < persist_below)
            .collect();
        let axes = |unit: usize| &units[unit].axes;
        let apart = |unit: usize| {
            let mut users = forward.iter().filter(|units| units.contains(&unit));
            let is_other = |other: &usize| *other != unit && axes(*other) == axes(unit);
            users.next().is_some_and(|units| units.iter().any(is_other)) || users.next().is_some()
        };
        Self {
            kept: (0..count).map(kept).collect(),
            apart: (0..count)
                .map(|unit| !reshard || persists[unit] || apart(unit))
                .collect(),
            persists,
            moves,
            begins_chunk: (model.whole())
                .map(|block| model.chunks.iter().any(|chunk| chunk.start == block))
                .collect(),
            forward,
            backward,
        }
    }

    /// Units that a block's pass reads.
    fn needed(&self, block: usize, pass: Pass) -> &[usize] {
        match pass {
            Pass::Forward => &self.forward[block],
            Pass::Backward => &self.backward[block],
        }
    }

    /// Sizes of the slots that gathered units lie in, and those that each unit may take.
    fn slots(&self, sharding: &Sharding) -> (Vec<usize>, Vec<Range<usize>>) {
        let units = sharding.units().iter().enumerate().map(|(index, unit)| {
            let len = if self.moves[index] { unit.whole.len() } else { 0 };
            (len, (!self.apart[index]).then(|| unit.axes.clone()))
        });
        slots_for(&units.collect::<Vec<_>>())
    }

    /// Units that a later pass of the same chunk reads: the next one, or one more `ahead`.
    fn next(&self, block: usize, pass: Pass, ahead: usize) -> &[usize] {
        let next = (0..ahead).try_fold(block, |block, _| match pass {
            Pass::Forward => {
                let is_last = self.begins_chunk.get(block + 1).is_none_or(|begins| *begins);
                (!is_last).then_some(block + 1)
            }
            Pass::Backward => block.checked_sub(1).filter(|_| !self.begins_chunk[block]),
        });
        next.map_or(&[], |block| self.needed(block, pass))
    }

    /// Units that nobody reads after a block's pass, until they are gathered again.
    fn released(&self, block: usize, pass: Pass) -> Vec<usize> {
        let done = |unit: &usize| match pass {
            Pass::Forward => {
                let later = self.forward[block + 1..].iter();
                !self.kept[*unit] && !later.flatten().any(|other| other == unit)
            }
            Pass::Backward => {
                let later = self.backward[..block].iter();
                !later.flatten().any(|other| other == unit)
            }
        };
        let needed = self.needed(block, pass).iter().copied();
        needed.filter(|unit| !self.persists[*unit]).filter(done).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;
    use crate::mesh::MeshShape;
    use crate::model;
    use crate::parallel::{GradientLayout, LayoutConfig};

    fn plan(kind: config::ModelKind, reshard: bool) -> GatherPlan {
        persisting(kind, reshard, 0)
    }

    fn persisting(kind: config::ModelKind, reshard: bool, persist_below: usize) -> GatherPlan {
        let config = config::Model {
            kind,
            n_layer: 2,
            n_head: 1,
            n_embd: 8,
            block_size: 8,
            vocab_size: None,
            dropout: 0.0,
            ..config::Model::default()
        };
        let model = model::build(&config, 256).unwrap();
        let layout = GradientLayout::of_model(&model, &LayoutConfig::new(2)).unwrap();
        let policy = ReshardPolicy::Release {
            after_forward: reshard,
            persist_below,
        };
        GatherPlan::new(
            &model,
            &Sharding::of_groups(&layout, MeshShape::of_shards(2), 0),
            policy,
            StatePlace::Device,
        )
    }

    // Units of the GPT-2, in the order of backward: head, h.1, h.0, wpe, wte.

    #[test]
    fn a_tied_weight_stays_from_its_first_use_to_its_last_in_each_pass() {
        let plan = plan(config::ModelKind::Gpt2, true);
        assert_eq!(plan.needed(0, Pass::Forward), [3, 4]);
        assert_eq!(plan.needed(3, Pass::Forward), [0, 4]);
        assert_eq!(plan.released(0, Pass::Forward), [3]);
        assert_eq!(plan.released(1, Pass::Forward), [2]);
        assert!(plan.released(3, Pass::Forward).is_empty());
        assert_eq!(plan.released(3, Pass::Backward), [0, 4]);
        assert_eq!(plan.released(2, Pass::Backward), [1]);
        assert!(plan.needed(0, Pass::Backward).is_empty());
        assert_eq!(plan.apart, [true, false, false, true, true]);
    }

    #[test]
    fn the_next_block_is_known_in_both_directions() {
        let plan = plan(config::ModelKind::Gpt2, true);
        assert_eq!(plan.next(0, Pass::Forward, 1), [2]);
        assert_eq!(plan.next(2, Pass::Forward, 1), [0, 4]);
        assert!(plan.next(3, Pass::Forward, 1).is_empty());
        assert_eq!(plan.next(3, Pass::Backward, 1), [1]);
        assert!(plan.next(1, Pass::Backward, 1).is_empty());
        assert!(plan.next(0, Pass::Backward, 1).is_empty());
    }

    #[test]
    fn without_resharding_only_what_backward_never_reads_is_released() {
        let plan = plan(config::ModelKind::Gpt2, false);
        let released: Vec<Vec<usize>> = (0..4).map(|block| plan.released(block, Pass::Forward)).collect();
        assert_eq!(released, [vec![3], vec![], vec![], vec![]]);
        assert!(plan.apart.iter().all(|apart| *apart));
    }

    #[test]
    fn small_units_persist_and_are_never_released() {
        // The head has 16 elements, the positions 64, a block 872, the tied weight 2048.
        let plan = persisting(config::ModelKind::Gpt2, true, 65);
        assert_eq!(plan.persists, [true, false, false, true, false]);
        assert_eq!(plan.apart, [true, false, false, true, true]);
        assert!(plan.released(0, Pass::Forward).is_empty());
        assert_eq!(plan.released(3, Pass::Backward), [4]);
        let plan = persisting(config::ModelKind::Gpt2, true, 1000);
        assert_eq!(plan.persists, [true, true, true, true, false]);
        assert_eq!(plan.apart, [true; 5], "a slot of its own");
    }

    #[test]
    fn all_is_released_in_the_end() {
        for kind in [config::ModelKind::Gpt2, config::ModelKind::Mlp] {
            for reshard in [true, false] {
                let plan = plan(kind, reshard);
                let mut held = std::collections::BTreeSet::new();
                let blocks = plan.forward.len();
                let forward = (0..blocks).map(|block| (block, Pass::Forward));
                let backward = (0..blocks).rev().map(|block| (block, Pass::Backward));
                for (block, pass) in forward.chain(backward) {
                    held.extend(plan.needed(block, pass).iter().copied());
                    for unit in plan.released(block, pass) {
                        assert!(held.remove(&unit));
                    }
                }
                assert!(held.is_empty(), "{kind:?} {held:?}");
            }
        }
    }
}
