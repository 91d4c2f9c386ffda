//! The parameters of a model under some strategy, and the simplest home for them: all on every rank (DDP, ZeRO-1 and
//! -2), where each rank updates those that it owns and gathers the others while the next forward begins.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::comm_times::CommTracker;
use super::{CommTimes, DeviceTimes, Portion, ReduceError, Sharding};
use crate::collective::{Communicator, Launch, Traffic, Work, WorkError};
use crate::device::{Arena, ArenaSpec, Buffer, Device, DeviceError, Stream};
use crate::model::{Model, ParamId, Params, Pass};

/// The parameters of a model under some strategy.
///
/// A block's parameters are unsharded before its pass is enqueued, and resharded after it.
pub trait Parameters: Params + Send + Sync {
    /// Gathers what a block's pass reads, as far as it is not there. Later operations of the compute stream can read it.
    fn unshard(&self, block: usize, pass: Pass) -> Result<(), DeviceError>;

    /// Releases what is not needed after a block's pass. The last operation of the pass must be in the stream.
    fn reshard(&self, block: usize, pass: Pass);

    /// What this rank owns has changed, by operations that are in the stream.
    fn updated(&self) -> Result<(), WorkError>;

    /// Waits until nothing is in flight, and releases what does not stay gathered between two steps.
    fn drain(&self) -> Result<(), WorkError>;

    /// Where each parameter and its owner are.
    fn sharding(&self) -> &Arc<Sharding>;

    /// Memory of what this rank owns.
    fn own(&self) -> &Portion;

    /// Bytes held all the time.
    fn bytes(&self) -> usize;

    /// Bytes for parameters that are gathered at the moment.
    fn gathered_bytes(&self) -> usize;

    /// True if every pass over the blocks is a collective one: all ranks must make as many.
    fn moves_together(&self) -> bool {
        false
    }

    /// Time that parameters took since the last call, as far as the host saw it.
    fn take_times(&self) -> CommTimes;

    /// Of what was launched since the last call: the part that the device measures, complete when all of it has run and
    /// [`Parameters::failure`] was asked after that.
    fn take_device_times(&self) -> DeviceTimes;

    /// Why parameters could not be gathered, if they could not.
    fn failure(&self) -> Option<WorkError>;
}

/// The ranks that share parameters, and the stream that reads them.
#[derive(Clone)]
pub struct GatherGroup {
    /// Gathers them.
    pub comm: Communicator,
    /// Holds them.
    pub device: Arc<dyn Device>,
    /// The compute stream.
    pub stream: Stream,
}

/// All parameters on every rank.
pub struct WholeParameters {
    group: GatherGroup,
    sharding: Arc<Sharding>,
    portion: Portion,
    views: Vec<Buffer>,
    /// Units of each block.
    units: Vec<Vec<usize>>,
    /// By unit: the gathering that nobody has waited for.
    in_flight: Mutex<Vec<Option<Work>>>,
    tracker: CommTracker,
}

impl WholeParameters {
    /// Zeros. Every rank must call it.
    pub fn new(group: &GatherGroup, model: &Model, sharding: &Arc<Sharding>) -> Result<Self, ReduceError> {
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
                .map(|b| sharding.units_of(b.params()))
                .collect(),
            in_flight: Mutex::new(vec![None; sharding.units().len()]),
            tracker: CommTracker::new(&group.device, group.comm.timeline()),
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

impl Params for WholeParameters {
    fn get(&self, id: ParamId) -> Buffer {
        self.views[id.0].clone()
    }
}

impl Parameters for WholeParameters {
    fn unshard(&self, block: usize, _pass: Pass) -> Result<(), DeviceError> {
        for &unit in &self.units[block] {
            let work = self.in_flight()[unit].take();
            if let Some(work) = work {
                let GatherGroup { comm, stream, .. } = &self.group;
                self.tracker
                    .wait_in_stream(*stream, work.event(), comm.deadline());
            }
        }
        let checked = self.tracker.check();
        checked.map_err(|e| DeviceError::Upstream(e.to_string()))
    }

    fn reshard(&self, _block: usize, _pass: Pass) {}

    fn updated(&self) -> Result<(), WorkError> {
        if self.sharding.world() == 1 {
            return Ok(());
        }
        self.drain()?;
        let GatherGroup { comm, device, stream } = &self.group;
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
            in_flight[index] = Some(self.tracker.launch(|| comm.all_gather(&whole, launch)));
        }
        Ok(())
    }

    fn drain(&self) -> Result<(), WorkError> {
        let works: Vec<Work> = self.in_flight().iter_mut().filter_map(Option::take).collect();
        works
            .iter()
            .try_for_each(|work| self.tracker.wait_on_host(work, self.group.comm.deadline()))
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
