//! What one reduction carries: parameters that lie side by side.

use std::ops::Range;

use super::{GradientLayout, Sharding};
use crate::config::Sync;
use crate::model::ParamId;

/// See the module.
pub(super) struct Unit {
    /// Its elements, where all gradients lie in one arena.
    pub(super) range: Range<usize>,
    /// Those of them whose sums end on this rank, counted from the unit's first.
    pub(super) own: Range<usize>,
    /// Parameters that must be ready.
    pub(super) params: Vec<ParamId>,
    /// For errors and traces.
    pub(super) tag: String,
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
    pub(super) fn is_first(self) -> bool {
        self.index == 0
    }

    pub(super) fn is_last(self) -> bool {
        self.index + 1 == self.count
    }
}

impl Unit {
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
