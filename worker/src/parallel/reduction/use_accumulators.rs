//! One accumulator for each use of a tied parameter, where micro-batches are added up.
//!
//! An embedding that is the head's matrix too gets a part of its gradient from either. If both are added to one sum as
//! they come, that sum is (head 1 + embedding 1) + head 2 + …. On two stages of a pipeline each rank adds up its own
//! use, and the two sums are added at the end. So that a rank with both uses has the same bits, it does the same: the
//! first use, in forward order, adds up in the gradient's memory, every other one in memory of its own, and the sums are
//! added in the order of the uses when the last contribution is there.

use std::collections::BTreeMap;

use crate::device::{ArenaSpec, Buffer, Compute, DeviceError, Event};
use crate::model::ParamId;
use crate::ops::ColumnSum;
use crate::parallel::GradientLayout;

/// One use of a parameter.
struct ParamUse {
    /// The block that uses it.
    block: usize,
    /// Sum of its contributions; none: in the gradient's memory.
    sum: Option<Buffer>,
    /// There is a contribution of this step.
    is_written: bool,
}

/// The sums of the uses of all tied parameters.
pub(super) struct UseAccumulators {
    compute: Compute,
    /// By parameter that several blocks use: its uses, in forward order.
    tied: BTreeMap<ParamId, Vec<ParamUse>>,
    /// The block whose contributions are made at the moment.
    block: Option<usize>,
}

impl UseAccumulators {
    /// Without accumulators: all uses of a parameter are added to one sum.
    pub(super) fn none(compute: &Compute) -> Self {
        Self {
            compute: compute.clone(),
            tied: BTreeMap::new(),
            block: None,
        }
    }

    /// Accumulators for the parameters that several blocks of the layout use.
    pub(super) fn new(layout: &GradientLayout, compute: &Compute) -> Result<Self, DeviceError> {
        let mut all = Self::none(compute);
        for id in (0..layout.params()).map(ParamId) {
            let spec = layout.spec(id);
            let sum = |nth: usize| {
                let name = format!("gradient of use {} of `{}`", nth + 1, spec.name);
                let len = layout.range(id).len();
                let spec = ArenaSpec::private(name, layout.accumulated(), len);
                compute.device.alloc(&spec).map(|arena| arena.whole())
            };
            let of_block = |(nth, &block): (usize, &usize)| {
                Ok::<_, DeviceError>(ParamUse {
                    block,
                    sum: (nth > 0).then(|| sum(nth)).transpose()?,
                    is_written: false,
                })
            };
            if spec.blocks.len() > 1 {
                let uses = spec.blocks.iter().enumerate().map(of_block);
                let uses = uses.collect::<Result<_, _>>()?;
                all.tied.insert(id, uses);
            }
        }
        Ok(all)
    }

    /// Size of the memory of later uses.
    pub(super) fn bytes(&self) -> usize {
        let sums = self.tied.values().flatten().filter_map(|tied| tied.sum.as_ref());
        sums.map(Buffer::bytes).sum()
    }

    /// A step begins.
    pub(super) fn reset(&mut self) {
        self.block = None;
        for tied in self.tied.values_mut().flatten() {
            tied.is_written = false;
        }
    }

    /// The contributions that follow are of this block.
    pub(super) fn enter(&mut self, block: usize) {
        self.block = Some(block);
    }

    /// The use that the current block makes of a tied parameter; the first one where the block is not known.
    fn current(&mut self, id: ParamId) -> Option<&mut ParamUse> {
        let uses = self.tied.get_mut(&id)?;
        let index = uses.iter().position(|tied| Some(tied.block) == self.block);
        uses.get_mut(index.unwrap_or(0))
    }

    /// For a tied parameter: the memory for the next contribution, unless that is the gradient's, and whether it has a value.
    pub(super) fn slot(&mut self, id: ParamId) -> Option<(Option<Buffer>, bool)> {
        let tied = self.current(id)?;
        Some((tied.sum.clone(), tied.is_written))
    }

    /// The current use has a value from now on.
    pub(super) fn write(&mut self, id: ParamId) {
        if let Some(tied) = self.current(id) {
            tied.is_written = true;
        }
    }

    /// Puts the addition of all uses to the gradient, `grad`, on the stream; reached when it is there. None where there is
    /// nothing to add.
    pub(super) fn add_up(&self, id: ParamId, grad: &Buffer) -> Option<Event> {
        let (first, later) = self.tied.get(&id)?.split_first()?;
        let mut accumulate = first.is_written;
        for x in later.iter().filter(|tied| tied.is_written) {
            // One row: an addition.
            self.compute.enqueue(ColumnSum {
                x: x.sum.clone()?,
                out: grad.clone(),
                accumulate,
            });
            accumulate = true;
        }
        Some(self.compute.record())
    }
}
