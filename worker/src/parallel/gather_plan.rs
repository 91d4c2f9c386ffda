//! When each unit of parameters is needed in the two passes over the blocks.

use std::ops::Range;

use super::slots::slots_for;
use super::{ShardUnit, Sharding};
use crate::model::{Model, ParamId, Pass};

/// A pure function of the model and the units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GatherPlan {
    forward: Vec<Vec<usize>>,
    backward: Vec<Vec<usize>>,
    /// By unit: it stays gathered from the end of forward to the beginning of backward.
    kept: Vec<bool>,
    /// By unit: several blocks use it, or its block has other units too, or it persists.
    apart: Vec<bool>,
    /// By unit: it is never released, and gathered after every update.
    pub(super) persists: Vec<bool>,
}

/// What stays gathered for longer than a block's pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Residence {
    /// Release after forward what backward needs again, but for the units of the last block, whose backward comes next.
    pub reshard: bool,
    /// Units of fewer elements than this stay from step to step.
    pub persist_below: usize,
}

impl GatherPlan {
    pub(super) fn new(model: &Model, sharding: &Sharding, residence: Residence) -> Self {
        let Residence {
            reshard,
            persist_below,
        } = residence;
        let forward: Vec<Vec<usize>> = (model.blocks.iter())
            .map(|block| units_of(sharding, block.params()))
            .collect();
        let backward: Vec<Vec<usize>> = (model.whole())
            .map(|block| units_of(sharding, model.read_by_backward(block)))
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

    /// How often each unit is gathered in a step of so many micro-batches, the one after the update included.
    pub(super) fn gatherings(&self, micro_batches: usize) -> Vec<usize> {
        let mut there = self.persists.clone();
        let mut times: Vec<usize> = there.iter().map(|there| usize::from(*there)).collect();
        let blocks = self.forward.len();
        let forward = (0..blocks).map(|block| (block, Pass::Forward));
        let passes = forward.chain((0..blocks).rev().map(|block| (block, Pass::Backward)));
        for (block, pass) in (0..micro_batches).flat_map(|_| passes.clone()) {
            for &unit in self.needed(block, pass) {
                times[unit] += usize::from(!std::mem::replace(&mut there[unit], true));
            }
            for unit in self.released(block, pass) {
                there[unit] = false;
            }
        }
        times
    }

    /// Units that a block's pass reads.
    pub(super) fn needed(&self, block: usize, pass: Pass) -> &[usize] {
        match pass {
            Pass::Forward => &self.forward[block],
            Pass::Backward => &self.backward[block],
        }
    }

    /// Elements of these gatherings.
    pub(super) fn gathered_elements(&self, sharding: &Sharding, micro_batches: usize) -> usize {
        let times = self.gatherings(micro_batches);
        let units = sharding.units().iter().zip(times);
        units.map(|(unit, times)| unit.len() * times).sum()
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

/// Elements of the units that ZeRO-3 gathers in a step of so many micro-batches, each as often as it is gathered.
#[must_use]
pub fn gathered_elements(
    model: &Model,
    sharding: &Sharding,
    residence: Residence,
    micro_batches: usize,
) -> usize {
    GatherPlan::new(model, sharding, residence).gathered_elements(sharding, micro_batches)
}

/// Elements of the slots that ZeRO-3 gathers parameters into.
#[must_use]
pub fn gathering_slots(model: &Model, sharding: &Sharding, residence: Residence) -> usize {
    let (sizes, _) = GatherPlan::new(model, sharding, residence).slots(sharding);
    sizes.iter().sum()
}

/// Units of parameters, each once.
pub(super) fn units_of(sharding: &Sharding, params: &[ParamId]) -> Vec<usize> {
    let mut units: Vec<usize> = params.iter().map(|id| sharding.home(*id).0).collect();
    units.sort_unstable();
    units.dedup();
    units
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
        let residence = Residence {
            reshard,
            persist_below,
        };
        GatherPlan::new(&model, &Sharding::of_groups(&layout, 2, 0), residence)
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
