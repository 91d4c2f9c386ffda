//! All parameters on every rank: DDP, and ZeRO-1 and -2, where each rank updates those that it owns and gathers the
//! others while the next forward begins.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::gather_plan::units_of;
use super::waiting::Waiting;
use super::{Group, Ledger, Portion, ReduceError, Sharding, SyncTimes, Weights};
use crate::collective::{Launch, Traffic, Work, WorkError};
use crate::device::{Arena, ArenaSpec, Buffer, DeviceError};
use crate::model::{Model, ParamId, Params, Pass};

/// See the module.
pub struct WholeWeights {
    group: Group,
    sharding: Arc<Sharding>,
    portion: Portion,
    views: Vec<Buffer>,
    /// Units of each block.
    units: Vec<Vec<usize>>,
    /// By unit: the gathering that nobody has waited for.
    in_flight: Mutex<Vec<Option<Work>>>,
    waiting: Waiting,
}

impl WholeWeights {
    /// Zeros. Every rank must call it.
    pub fn new(group: &Group, model: &Model, sharding: &Arc<Sharding>) -> Result<Self, ReduceError> {
        let (name, dtype, len) = ("parameters", model.dtype(), sharding.whole_len());
        let is_gathered = sharding.world() > 1;
        let arena = if is_gathered {
            let spec = ArenaSpec::on_node(name, dtype, len);
            group.comm.alloc_shared(&group.device, &spec)?
        } else {
            // Private memory can have huge pages.
            group.device.alloc(&ArenaSpec::private(name, dtype, len))?
        };
        let ids = (0..sharding.params()).map(ParamId);
        Ok(Self {
            views: ids.map(|id| arena.slice(sharding.whole_range(id))).collect(),
            units: model
                .blocks
                .iter()
                .map(|b| units_of(sharding, b.params()))
                .collect(),
            in_flight: Mutex::new(vec![None; sharding.units().len()]),
            waiting: Waiting::new(&group.device, group.comm.timeline()),
            portion: Portion::Whole(arena),
            sharding: sharding.clone(),
            group: group.clone(),
        })
    }

    /// All of them, padding included.
    #[must_use]
    pub fn arena(&self) -> &Arena {
        self.portion.arena()
    }

    fn in_flight(&self) -> MutexGuard<'_, Vec<Option<Work>>> {
        self.in_flight.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Params for WholeWeights {
    fn get(&self, id: ParamId) -> Buffer {
        self.views[id.0].clone()
    }
}

impl Weights for WholeWeights {
    fn enter(&self, block: usize, _pass: Pass) -> Result<(), DeviceError> {
        for &unit in &self.units[block] {
            let work = self.in_flight()[unit].take();
            if let Some(work) = work {
                let Group { comm, stream, .. } = &self.group;
                self.waiting.in_stream(*stream, work.event(), comm.deadline());
            }
        }
        let settled = self.waiting.settle();
        settled.map_err(|e| DeviceError::Upstream(e.to_string()))
    }

    fn leave(&self, _block: usize, _pass: Pass) {}

    fn updated(&self) -> Result<(), WorkError> {
        if self.sharding.world() == 1 {
            return Ok(());
        }
        self.settle()?;
        let Group { comm, device, stream } = &self.group;
        let after = device.record(*stream);
        let mut in_flight = self.in_flight();
        // The forward begins with what backward finishes last.
        for (index, unit) in self.sharding.units().iter().enumerate().rev() {
            let launch = Launch::after(
                after.clone(),
                Traffic::Params,
                format!("parameters of {}", unit.name),
            );
            let whole = self.arena().slice(unit.whole());
            in_flight[index] = Some(self.waiting.launch(|| comm.all_gather(&whole, launch)));
        }
        Ok(())
    }

    fn settle(&self) -> Result<(), WorkError> {
        let works: Vec<Work> = self.in_flight().iter_mut().filter_map(Option::take).collect();
        works
            .iter()
            .try_for_each(|work| self.waiting.on_host(work, self.group.comm.deadline()))
    }

    fn sharding(&self) -> &Arc<Sharding> {
        &self.sharding
    }

    fn own(&self) -> &Portion {
        &self.portion
    }

    fn bytes(&self) -> usize {
        self.arena().bytes()
    }

    fn gathered_bytes(&self) -> usize {
        0
    }

    fn gathered_elements(&self, _micro_batches: usize) -> usize {
        if self.sharding.world() == 1 {
            return 0;
        }
        self.sharding.whole_len()
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
