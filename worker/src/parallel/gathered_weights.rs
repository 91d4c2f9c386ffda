//! ZeRO-3 (FSDP): a rank holds its shard of the parameters; a group is gathered before the blocks that use it, and
//! released after the last of them.
//!
//! The group of the next block is gathered while a block computes. Gathered groups lie in *slots*, shared with the
//! other ranks: two that ordinary blocks take in turns, and one of its own for each group that several blocks use, or
//! that shares its block with others. A slot is released and reused in stream order.
//!
//! Small groups may persist ([`Residence`]): gathered after every update instead of in every pass. A norm or a bias
//! needs none of this: it travels with its block's group and costs no operation of its own.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::gather_plan::{GatherPlan, Residence};
use super::waiting::Waiting;
use super::{Group, Ledger, Portion, ReduceError, Sharding, SyncTimes, Weights};
use crate::collective::{Launch, Traffic, Work, WorkError};
use crate::device::{Arena, ArenaSpec, Buffer, DeviceError};
use crate::model::{Model, ParamId, Params, Pass};
use crate::ops::Cast;

/// See the module.
pub struct GatheredWeights {
    group: Group,
    sharding: Arc<Sharding>,
    plan: GatherPlan,
    shard: Portion,
    slots: Vec<Arena>,
    /// By unit: the slots that it may take.
    choice: Vec<Range<usize>>,
    state: Mutex<State>,
    waiting: Waiting,
}

struct State {
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

impl GatheredWeights {
    /// Zeros. Every rank must call it. `group` is best one that only parameters use, so that gathering overlaps with
    /// the reduction of gradients.
    pub fn new(
        group: &Group,
        model: &Model,
        sharding: &Arc<Sharding>,
        residence: Residence,
    ) -> Result<Self, ReduceError> {
        let plan = GatherPlan::new(model, sharding, residence);
        let (sizes, choice) = plan.slots(sharding);
        let slot = |len: &usize| {
            let spec = ArenaSpec::on_node("gathered parameters", model.dtype(), *len);
            group.comm.alloc_shared(&group.device, &spec)
        };
        let shard = ArenaSpec::private("parameters", model.dtype(), sharding.shard_len());
        let shard = group.device.alloc(&shard)?;
        Ok(Self {
            state: Mutex::new(State {
                gathered: choice.iter().map(|_| None).collect(),
                taken: vec![false; sizes.len()],
            }),
            slots: sizes.iter().map(slot).collect::<Result<_, _>>()?,
            choice,
            plan,
            shard: Portion::Shard(shard),
            waiting: Waiting::new(&group.device, group.comm.timeline()),
            sharding: sharding.clone(),
            group: group.clone(),
        })
    }

    /// Begins to gather a unit that is not there. False if there is no slot for it at the moment.
    fn gather(&self, state: &mut State, unit: usize) -> bool {
        if state.gathered[unit].is_some() {
            return true;
        }
        let Some(slot) = self.choice[unit].clone().find(|&slot| !state.taken[slot]) else {
            return false;
        };
        let Group { comm, device, stream } = &self.group;
        let description = &self.sharding.units()[unit];
        let target = self.slots[slot].slice(0..description.len());
        let copy = Cast {
            x: self.shard.slice(&self.sharding.own_place(unit)),
            out: target.slice(self.sharding.own(unit)),
        };
        device.enqueue(*stream, copy.into());
        let tag = format!("parameters of {}", description.name);
        let launch = Launch::after(device.record(*stream), Traffic::Params, tag);
        let work = Some(self.waiting.launch(|| comm.all_gather(&target, launch)));
        state.gathered[unit] = Some(Gathered { slot, work });
        state.taken[slot] = true;
        true
    }

    fn release(state: &mut State, unit: usize) -> Option<Work> {
        let gathered = state.gathered[unit].take()?;
        state.taken[gathered.slot] = false;
        gathered.work
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Params for GatheredWeights {
    fn get(&self, id: ParamId) -> Buffer {
        let (unit, range) = self.sharding.home(id);
        let state = self.state();
        let gathered = state.gathered[unit].as_ref();
        let slot = gathered.expect("a block lists the parameters that it reads").slot;
        self.slots[slot].slice(range)
    }
}

impl Weights for GatheredWeights {
    fn enter(&self, block: usize, pass: Pass) -> Result<(), DeviceError> {
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
                let Group { comm, stream, .. } = &self.group;
                self.waiting.in_stream(*stream, work.event(), comm.deadline());
            }
        }
        let settled = self.waiting.settle();
        settled.map_err(|e| DeviceError::Upstream(e.to_string()))
    }

    fn leave(&self, block: usize, pass: Pass) {
        let mut state = self.state();
        for unit in self.plan.released(block, pass) {
            // It was waited for when the block was entered.
            Self::release(&mut state, unit);
        }
    }

    fn updated(&self) -> Result<(), WorkError> {
        self.settle()?;
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

    fn settle(&self) -> Result<(), WorkError> {
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
            .try_for_each(|work| self.waiting.on_host(work, self.group.comm.deadline()))
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

    fn gathered_elements(&self, micro_batches: usize) -> usize {
        self.plan.gathered_elements(&self.sharding, micro_batches)
    }

    fn moves_together(&self) -> bool {
        true
    }

    fn take_times(&self) -> SyncTimes {
        self.waiting.take_times()
    }

    fn take_ledger(&self) -> Ledger {
        self.waiting.take_ledger()
    }

    fn failure(&self) -> Option<WorkError> {
        self.waiting.failure()
    }
}
