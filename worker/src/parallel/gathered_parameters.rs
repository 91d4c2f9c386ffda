//! ZeRO-3 (FSDP): a rank holds its shard of the parameters; a group is gathered before the blocks that use it, and
//! released after the last of them.
//!
//! The group of the next block is gathered while a block computes. Gathered groups lie in *slots*, shared with the
//! other ranks: two that ordinary blocks take in turns, and one of its own for each group that several blocks use, or
//! that shares its block with others. A slot is released and reused in stream order.
//!
//! Small groups may persist ([`ReshardPolicy`]): gathered after every update instead of in every pass. A norm or a bias
//! needs none of this: it travels with its block's group and costs no operation of its own.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::comm_times::CommTracker;
use super::parameters::GatherGroup;
use super::reduction::slots_for;
use super::{CommTimes, DeviceTimes, Parameters, Portion, ReduceError, ShardUnit, Sharding};
use crate::collective::{Launch, Traffic, Work, WorkError};
use crate::device::{Arena, ArenaSpec, Buffer, DeviceError};
use crate::model::{Model, ParamId, Params, Pass};
use crate::ops::Cast;

/// What stays gathered for longer than a block's pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReshardPolicy {
    /// Release after forward what backward needs again, but for the units of the last block, whose backward comes next.
    pub reshard: bool,
    /// Units of fewer elements than this stay from step to step.
    pub persist_below: usize,
}

/// This rank's shard of the parameters, and the groups that are gathered at the moment.
pub struct GatheredParameters {
    group: GatherGroup,
    sharding: Arc<Sharding>,
    plan: GatherPlan,
    shard: Portion,
    slots: Vec<Arena>,
    /// By unit: the slots that it may take.
    choice: Vec<Range<usize>>,
    state: Mutex<SlotState>,
    tracker: CommTracker,
}

struct SlotState {
    /// By unit.
    gathered: Vec<Option<Gathered>>,
    /// By slot.
    taken: Vec<bool>,
}

struct Gathered {
    slot: usize,
    /// The gathering that nobody has waited for.
    work: Option<Work>,
}

impl GatheredParameters {
    /// Zeros. Every rank must call it. `group` is best one that only parameters use, so that gathering overlaps with
    /// the reduction of gradients.
    pub fn new(
        group: &GatherGroup,
        model: &Model,
        sharding: &Arc<Sharding>,
        policy: ReshardPolicy,
    ) -> Result<Self, ReduceError> {
        let plan = GatherPlan::new(model, sharding, policy);
        let (sizes, choice) = plan.slots(sharding);
        let slot = |len: &usize| {
            let spec = ArenaSpec::on_node("gathered parameters", model.dtype(), *len);
            group.comm.alloc_shared(&group.device, &spec)
        };
        let shard = ArenaSpec::private("parameters", model.dtype(), sharding.shard_len());
        let shard = group.device.alloc(&shard)?;
        Ok(Self {
            state: Mutex::new(SlotState {
                gathered: choice.iter().map(|_| None).collect(),
                taken: vec![false; sizes.len()],
            }),
            slots: sizes.iter().map(slot).collect::<Result<_, _>>()?,
            choice,
            plan,
            shard: Portion::Shard(shard),
            tracker: CommTracker::new(&group.device, group.comm.timeline()),
            sharding: sharding.clone(),
            group: group.clone(),
        })
    }

    /// Begins to gather a unit that is not there. False if there is no slot for it at the moment.
    fn gather(&self, state: &mut SlotState, unit: usize) -> bool {
        if state.gathered[unit].is_some() {
            return true;
        }
        let Some(slot) = self.choice[unit].clone().find(|&slot| !state.taken[slot]) else {
            return false;
        };
        let GatherGroup { comm, device, stream } = &self.group;
        let description = &self.sharding.units()[unit];
        let target = self.slots[slot].slice(0..description.len());
        let copy = Cast {
            x: self.shard.slice(&self.sharding.own_place(unit)),
            out: target.slice(self.sharding.own(unit)),
        };
        device.enqueue(*stream, copy.into());
        let tag = format!("parameters of {}", description.name);
        let launch = Launch::after(device.record(*stream), Traffic::Params, tag);
        let work = Some(self.tracker.launch(|| comm.all_gather(&target, launch)));
        state.gathered[unit] = Some(Gathered { slot, work });
        state.taken[slot] = true;
        true
    }

    fn release(state: &mut SlotState, unit: usize) -> Option<Work> {
        let gathered = state.gathered[unit].take()?;
        state.taken[gathered.slot] = false;
        gathered.work
    }

    fn state(&self) -> MutexGuard<'_, SlotState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Params for GatheredParameters {
    fn get(&self, id: ParamId) -> Buffer {
        let (unit, range) = self.sharding.home(id);
        let state = self.state();
        let gathered = state.gathered[unit].as_ref();
        let slot = gathered.expect("a block lists the parameters that it reads").slot;
        self.slots[slot].slice(range)
    }
}

impl Parameters for GatheredParameters {
    fn unshard(&self, block: usize, pass: Pass) -> Result<(), DeviceError> {
        let mut state = self.state();
        for &unit in self.plan.needed(block, pass) {
            if !self.gather(&mut state, unit) {
                let name = &self.sharding.units()[unit].name;
                let what = format!("no memory to gather the {name}: the blocks before hold all of it");
                return Err(DeviceError::Upstream(what));
            }
        }
        for &unit in self.plan.next(block, pass) {
            self.gather(&mut state, unit);
        }
        for &unit in self.plan.needed(block, pass) {
            let gathered = state.gathered[unit].as_mut();
            if let Some(work) = gathered.and_then(|gathered| gathered.work.take()) {
                let GatherGroup { comm, stream, .. } = &self.group;
                self.tracker
                    .wait_in_stream(*stream, work.event(), comm.deadline());
            }
        }
        let checked = self.tracker.check();
        checked.map_err(|e| DeviceError::Upstream(e.to_string()))
    }

    fn reshard(&self, block: usize, pass: Pass) {
        let mut state = self.state();
        for unit in self.plan.released(block, pass) {
            // It was waited for when the block was entered.
            Self::release(&mut state, unit);
        }
    }

    fn updated(&self) -> Result<(), WorkError> {
        self.drain()?;
        let mut state = self.state();
        // The forward begins with what backward finishes last.
        for unit in (0..self.choice.len())
            .rev()
            .filter(|&unit| self.plan.persists[unit])
        {
            // What is there is of yesterday.
            Self::release(&mut state, unit);
            self.gather(&mut state, unit);
        }
        Ok(())
    }

    fn drain(&self) -> Result<(), WorkError> {
        let works: Vec<Work> = {
            let mut state = self.state();
            (0..self.choice.len())
                .filter_map(|unit| {
                    if self.plan.persists[unit] {
                        state.gathered[unit].as_mut()?.work.take()
                    } else {
                        Self::release(&mut state, unit)
                    }
                })
                .collect()
        };
        works
            .iter()
            .try_for_each(|work| self.tracker.wait_on_host(work, self.group.comm.deadline()))
    }

    fn sharding(&self) -> &Arc<Sharding> {
        &self.sharding
    }

    fn own(&self) -> &Portion {
        &self.shard
    }

    fn bytes(&self) -> usize {
        self.shard.arena().bytes()
    }

    fn gathered_bytes(&self) -> usize {
        self.slots.iter().map(Arena::bytes).sum()
    }

    fn moves_together(&self) -> bool {
        true
    }

    fn take_times(&self) -> CommTimes {
        self.tracker.take_times()
    }

    fn take_device_times(&self) -> DeviceTimes {
        self.tracker.take_device_times()
    }

    fn failure(&self) -> Option<WorkError> {
        self.tracker.failure()
    }
}

/// When each unit of parameters is needed in the two passes over the blocks: a pure function of the model and the units.
#[derive(Clone, Debug, PartialEq, Eq)]
struct GatherPlan {
    forward: Vec<Vec<usize>>,
    backward: Vec<Vec<usize>>,
    /// By unit: it stays gathered from the end of forward to the beginning of backward.
    kept: Vec<bool>,
    /// By unit: several blocks use it, or its block has other units too, or it persists.
    apart: Vec<bool>,
    /// By unit: it is never released, and gathered after every update.
    pub(super) persists: Vec<bool>,
}

impl GatherPlan {
    pub(super) fn new(model: &Model, sharding: &Sharding, policy: ReshardPolicy) -> Self {
        let ReshardPolicy {
            reshard,
            persist_below,
        } = policy;
        let forward: Vec<Vec<usize>> = (model.blocks.iter())
            .map(|block| sharding.units_of(block.params()))
            .collect();
        let backward: Vec<Vec<usize>> = (model.whole())
            .map(|block| sharding.units_of(model.read_by_backward(block)))
            .collect();
        let count = sharding.units().len();
        let kept = |unit: usize| match backward.split_last() {
            Some((last, before)) => {
                last.contains(&unit) || (!reshard && before.iter().any(|units| units.contains(&unit)))
            }
            None => false,
        };
        let elements =
            |params: &[ParamId]| -> usize { params.iter().map(|id| model.params[id.0].len()).sum() };
        let persists: Vec<bool> = (sharding.units().iter())
            .map(|unit| elements(&unit.params) < persist_below)
            .collect();
        let apart = |unit: usize| {
            let mut users = forward.iter().filter(|units| units.contains(&unit));
            users.next().is_none_or(|units| units.len() > 1) || users.next().is_some()
        };
        Self {
            kept: (0..count).map(kept).collect(),
            apart: (0..count)
                .map(|unit| !reshard || persists[unit] || apart(unit))
                .collect(),
            persists,
            forward,
            backward,
        }
    }

    /// Units that a block's pass reads.
    pub(super) fn needed(&self, block: usize, pass: Pass) -> &[usize] {
        match pass {
            Pass::Forward => &self.forward[block],
            Pass::Backward => &self.backward[block],
        }
    }

    /// Sizes of the slots that gathered units lie in, and those that each unit may take.
    pub(super) fn slots(&self, sharding: &Sharding) -> (Vec<usize>, Vec<Range<usize>>) {
        let lens = sharding.units().iter().map(ShardUnit::len);
        slots_for(&lens.zip(self.apart.iter().copied()).collect::<Vec<_>>())
    }

    /// Units that the pass after this one reads.
    pub(super) fn next(&self, block: usize, pass: Pass) -> &[usize] {
        let next = match pass {
            Pass::Forward => self.forward.get(block + 1),
            Pass::Backward => block.checked_sub(1).map(|before| &self.backward[before]),
        };
        next.map_or(&[], Vec::as_slice)
    }

    /// Units that nobody reads after a block's pass, until they are gathered again.
    pub(super) fn released(&self, block: usize, pass: Pass) -> Vec<usize> {
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
            init_from: None,
            dropout: 0.0,
        };
        let model = model::build(&config, 256).unwrap();
        let layout = GradientLayout::of_model(&model, &LayoutConfig::new(2)).unwrap();
        let policy = ReshardPolicy {
            reshard,
            persist_below,
        };
        GatherPlan::new(&model, &Sharding::of_groups(&layout, 2, 0), policy)
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
        assert_eq!(plan.next(0, Pass::Forward), [2]);
        assert_eq!(plan.next(2, Pass::Forward), [0, 4]);
        assert!(plan.next(3, Pass::Forward).is_empty());
        assert_eq!(plan.next(3, Pass::Backward), [1]);
        assert!(plan.next(1, Pass::Backward).is_empty());
        assert!(plan.next(0, Pass::Backward).is_empty());
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
