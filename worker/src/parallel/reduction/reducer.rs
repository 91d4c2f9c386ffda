//! The reducer: sums gradients over the ranks while they are being computed.
//!
//! It knows no models. Any program that can report "gradient i is ready" can use it:
//!
//! 1. [`Reducer::step`] begins a step and gives the right to write gradients ([`Step`]);
//! 2. each gradient is written and reported ([`Step::ready`]); a bucket is launched as soon as it and all before it
//!    are complete, strictly in layout order, whatever the order of the reports, so that all ranks issue the same
//!    operations; one that two pipeline stages share, and all after it, are launched at the end of the step;
//! 3. [`Step::finish`] waits for the others and gives the right to read the sums ([`Reduced`]);
//!    [`Step::finish_on`] lets a stream wait instead of the host.
//!
//! With [`Reducer::new`] every rank ends with all sums; with [`Reducer::over`] each with those that it owns. Gradients of
//! which ranks beyond the data-parallel ones have a part are summed over these first.
//!
//! Peers write into the arena while a bucket is under way. The two guards keep Rust code out of it meanwhile; an
//! operation in flight owns its segment, so that it outlives even a reducer that is dropped too early.

use std::sync::Arc;
use std::time::Instant;

use super::grad_units::{GradUnits, ReducerConfig, Round};
use super::readiness::{Readiness, ReduceError};
use super::use_accumulators::UseAccumulators;
use crate::collective::{Communicator, WorkError};
use crate::config::{Accumulate, Sync};
use crate::device::{
    Buffer, Compute, Device, DeviceError, Element, Event, HostMut, HostRef, StateBytes, Stream,
};
use crate::model::{GradSink, GradSlot, ParamId};
use crate::parallel::comm_times::{CommTimes, DeviceTimes};
use crate::parallel::{ArenaShare, GradientLayout, ReplicaSet, Sharding};

/// The gradients of a rank, and the operations that sum them.
pub struct Reducer {
    layout: Arc<GradientLayout>,
    grads: GradUnits,
    uses: UseAccumulators,
    /// Unit of each parameter.
    unit_of: Vec<usize>,
    /// Units are launched as soon as they are complete.
    is_eager: bool,
    /// Progress of the last step.
    progress: Progress,
}

/// How far a step is.
struct Progress {
    /// Times that each unit is launched: once, or once a micro-batch.
    rounds: usize,
    readiness: Readiness,
    /// Parameters of each unit that are not complete in its round.
    open: Vec<usize>,
    /// Units launched so far, of all rounds: always a prefix.
    launched: usize,
    is_finished: bool,
    failed: Option<ReduceError>,
}

impl Progress {
    fn new(layout: &Arc<GradientLayout>, grads: &GradUnits, micro_batches: usize) -> Self {
        let (rounds, in_round) = if grads.is_staged() {
            (micro_batches, 1)
        } else {
            (1, micro_batches)
        };
        Self {
            rounds,
            readiness: Readiness::new(layout, in_round),
            open: (0..grads.len()).map(|unit| grads.params(unit).len()).collect(),
            launched: 0,
            is_finished: false,
            failed: None,
        }
    }

    /// Launches of a step.
    fn launches(&self) -> usize {
        self.rounds * self.open.len()
    }

    /// The unit that is launched next.
    fn next(&self) -> usize {
        self.launched % self.open.len()
    }

    /// True if all gradients of the unit that is launched next are there.
    fn is_next_complete(&self) -> bool {
        self.launched < self.launches() && self.open[self.next()] == 0
    }

    /// Why the ranks disagree if the step is over now: other ranks wait for the launches that are left.
    fn poison(&self) -> Option<String> {
        if self.is_finished || self.launched == 0 {
            return None;
        }
        let why = match &self.failed {
            Some(error) => error.to_string(),
            None => "the step was dropped".into(),
        };
        let (launched, all) = (self.launched, self.launches());
        Some(format!(
            "a step ended after {launched} of {all} operations were launched, so this rank no longer agrees with the others: {why}"
        ))
    }
}

impl Reducer {
    /// A reducer that leaves all sums on every rank. Every rank of `comm` must call it, with the same layout and
    /// configuration.
    pub fn new(
        comm: &Communicator,
        device: &Arc<dyn Device>,
        layout: Arc<GradientLayout>,
        config: ReducerConfig,
    ) -> Result<Self, ReduceError> {
        let sharding = Arc::new(Sharding::replicated(&layout));
        let set = ReplicaSet::of_all(comm.clone());
        Self::over(&set, &Compute::new(device.clone()), layout, &sharding, config)
    }

    /// A reducer that leaves each sum on the ranks that own it. Every rank of `set` must call it; `sharding` is over
    /// [`crate::parallel::StateGroup::shard`], or replicated. `compute` makes the gradients.
    pub fn over(
        set: &ReplicaSet,
        compute: &Compute,
        layout: Arc<GradientLayout>,
        sharding: &Arc<Sharding>,
        config: ReducerConfig,
    ) -> Result<Self, ReduceError> {
        let is_staged = config.accumulate == Accumulate::Sharded;
        let mut ids = layout.order().iter();
        if let Some(id) = ids.find(|id| is_staged && layout.spec(**id).is_shared_by_stages()) {
            let name = &layout.spec(*id).name;
            return Err(ReduceError::Misuse(format!(
                "two stages of the pipeline share `{name}`, and its gradient cannot be reduced in every micro-batch\n  hint: set `parallel.accumulate: full`"
            )));
        }
        let uses = if config.micro_batches > 1 && !is_staged {
            UseAccumulators::new(&layout, compute)?
        } else {
            UseAccumulators::none(compute)
        };
        let overlaps = config.overlap && !(config.sync == Sync::Naive && sharding.world() == 1);
        let grads = GradUnits::new(set, compute, &layout, sharding, config)?;
        let mut unit_of = vec![0; layout.params()];
        for unit in 0..grads.len() {
            for id in grads.params(unit) {
                unit_of[id.0] = unit;
            }
        }
        Ok(Self {
            // Units in slots must leave their slots, overlapped or not.
            is_eager: is_staged || overlaps,
            progress: Progress::new(&layout, &grads, 1),
            layout,
            grads,
            uses,
            unit_of,
        })
    }

    /// Size of the memory for gradients in bytes: sums, slots, and what later uses of tied parameters add up in.
    pub fn bytes(&self) -> usize {
        self.grads.bytes() + self.uses.bytes()
    }

    /// What of it is sums, padding included.
    pub fn sum_bytes(&self) -> usize {
        self.grads.sums().arena().bytes()
    }

    /// The same by where they are.
    pub fn sum_bytes_by_place(&self) -> StateBytes {
        self.grads.sum_bytes()
    }

    /// What of it is slots for gradients that are in flight.
    pub fn in_flight_bytes(&self) -> usize {
        self.grads.bytes() - self.sum_bytes()
    }

    /// Number of operations in which all gradients are reduced.
    pub fn operations(&self) -> usize {
        self.grads.len()
    }

    /// Why an operation that a stream waits for has failed, if one has: the stream itself only says so in words.
    pub fn failure(&self) -> Option<WorkError> {
        self.grads.tracker.failure()
    }

    /// Begins a step of so many micro-batches. The sum is over all of them and all ranks, and nothing scales it: the
    /// gradient of the mean is the sum of gradients of losses that were divided by all samples. It is launched when the last
    /// of them is complete, with [`Accumulate::Sharded`] for each of them.
    ///
    /// # Panics
    /// If there are none.
    pub fn step(&mut self, micro_batches: usize) -> Result<Step<'_>, ReduceError> {
        assert!(micro_batches > 0, "a step has a micro-batch");
        if let Some(cause) = self.progress.poison() {
            return Err(ReduceError::Poisoned(cause));
        }
        self.grads.reset();
        self.uses.reset();
        self.progress = Progress::new(&self.layout, &self.grads, micro_batches);
        Ok(Step {
            reducer: self,
            host: None,
        })
    }

    fn check(&self) -> Result<(), ReduceError> {
        self.progress.failed.clone().map_or(Ok(()), Err)
    }

    fn fail(&mut self, error: ReduceError) -> ReduceError {
        self.progress.failed.get_or_insert(error).clone()
    }

    /// Memory of a gradient that is not on its way, and whether it has a value already.
    fn writable(&mut self, id: ParamId) -> Result<(Buffer, bool), ReduceError> {
        self.check()?;
        let asked = self.progress.readiness.ask(id);
        let memory = asked.and_then(|is_written| match self.uses.slot(id) {
            Some((Some(own), is_written)) => Ok((own, is_written)),
            Some((None, is_written)) => Ok((self.grads.grad(id)?, is_written)),
            None => Ok((self.grads.grad(id)?, is_written)),
        });
        memory.map_err(|e| self.fail(e))
    }

    /// The use of a gradient that the last memory was for has a value from now on.
    fn write(&mut self, id: ParamId) {
        self.progress.readiness.write(id);
        self.uses.write(id);
    }

    /// One contribution to a gradient is there once `at` is reached.
    fn report(&mut self, id: ParamId, at: Event) -> Result<(), ReduceError> {
        self.check()?;
        let is_staged = self.grads.is_staged();
        let added = self.progress.readiness.add(id, at, is_staged);
        let is_complete = added.map_err(|e| self.fail(e))?;
        self.uses.write(id);
        if !is_complete {
            return Ok(());
        }
        let grad = self.grads.in_place(id);
        if let Some(summed) = grad.and_then(|grad| self.uses.add_up(id, grad)) {
            self.progress.readiness.follow(id, summed);
        }
        self.progress.open[self.unit_of[id.0]] -= 1;
        while self.is_eager && self.progress.is_next_complete() && !self.is_next_shared_by_stages() {
            self.launch_next();
        }
        Ok(())
    }

    fn is_next_shared_by_stages(&self) -> bool {
        self.grads.is_shared_by_stages(self.progress.next())
    }

    fn launch_next(&mut self) {
        let progress = &mut self.progress;
        let unit = progress.next();
        let round = Round {
            index: progress.launched / progress.open.len(),
            count: progress.rounds,
        };
        progress.launched += 1;
        let params = self.grads.params(unit);
        let ready = progress.readiness.take_event(params);
        if !round.is_last() {
            progress.readiness.next_round(params);
            progress.open[unit] = params.len();
        }
        self.grads.launch(unit, ready, round);
    }
}

/// The right to write gradients. Dropped without [`Step::finish`], it leaves the reducer usable if nothing was
/// launched, and otherwise unusable with an error that says so: other ranks wait for the rest.
///
/// After its first error a step only repeats that error.
pub struct Step<'a> {
    reducer: &'a mut Reducer,
    /// What [`Step::grad_mut`] lends.
    host: Option<Buffer>,
}

impl<'a> Step<'a> {
    /// Memory for the next contribution to a gradient, for operations on the device.
    pub fn slot(&mut self, id: ParamId) -> Result<GradSlot, ReduceError> {
        let (buffer, accumulate) = self.reducer.writable(id)?;
        Ok(GradSlot { buffer, accumulate })
    }

    /// The elements of a gradient on the host, to which the next contribution is to be **added**: they are zero at
    /// the first access of a step.
    pub fn grad_mut<T: Element>(&mut self, id: ParamId) -> Result<HostMut<'_, T>, ReduceError> {
        let (buffer, is_written) = self.reducer.writable(id)?;
        self.reducer.write(id);
        let mut grad = self.host.insert(buffer).host_mut::<T>()?;
        if !is_written {
            grad.fill(T::zeroed());
        }
        Ok(grad)
    }

    /// One contribution to the gradient of `id` is there once `at` is reached. With the last one the gradient may be on
    /// its way to the other ranks.
    pub fn ready(&mut self, id: ParamId, at: Event) -> Result<(), ReduceError> {
        self.reducer.report(id, at)
    }

    /// Time that reduction has taken since the step before, as far as the host saw it.
    pub fn times(&self) -> CommTimes {
        self.reducer.grads.tracker.times()
    }

    /// Launches what is left, waits for all of it, and gives the sums.
    pub fn finish(mut self, deadline: Instant) -> Result<Reduced<'a>, ReduceError> {
        let stored = self.complete(deadline)?;
        let reducer = &mut *self.reducer;
        for work in std::mem::take(&mut reducer.grads.in_flight) {
            let done = reducer.grads.tracker.wait_on_host(&work, deadline);
            done.map_err(|e| reducer.fail(e.into()))?;
        }
        stored.wait(deadline).map_err(|e| reducer.fail(e.into()))?;
        let mut reduced = self.reduced()?;
        // Nothing is in flight: the host knows what the device measured.
        reduced.times += reduced.device_times.take();
        Ok(reduced)
    }

    /// Launches what is left and gives the sums to later operations of `stream`, the one that computes the
    /// gradients: on a device that runs asynchronously the host does not wait. An operation that fails fails the
    /// stream; [`Reducer::failure`] has its error.
    pub fn finish_on(mut self, stream: Stream, deadline: Instant) -> Result<Reduced<'a>, ReduceError> {
        let stored = self.complete(deadline)?;
        let GradUnits {
            in_flight, tracker, ..
        } = &mut self.reducer.grads;
        for work in std::mem::take(in_flight) {
            tracker.wait_in_stream(stream, work.event(), deadline);
        }
        tracker.wait_in_stream(stream, &stored, deadline);
        self.reduced()
    }

    /// Launches what is left. Reached when the sums are there that the stream that computes does not wait for.
    fn complete(&mut self, deadline: Instant) -> Result<Event, ReduceError> {
        let reducer = &mut *self.reducer;
        reducer.check()?;
        let all_there = reducer.progress.readiness.all_there();
        all_there.map_err(|e| reducer.fail(e))?;
        while reducer.progress.launched < reducer.progress.launches() {
            reducer.launch_next();
        }
        Ok(reducer.grads.store_slots(deadline))
    }

    /// Everything is there, or streams wait for it.
    fn reduced(self) -> Result<Reduced<'a>, ReduceError> {
        let reducer = self.reducer;
        let checked = reducer.grads.tracker.check();
        checked.map_err(|e| reducer.fail(e.into()))?;
        reducer.progress.is_finished = true;
        let tracker = &reducer.grads.tracker;
        Ok(Reduced {
            times: tracker.take_times(),
            device_times: tracker.take_device_times(),
            reducer,
        })
    }
}

impl GradSink for Step<'_> {
    fn enter(&mut self, block: usize) {
        self.reducer.uses.enter(block);
    }

    fn grad(&mut self, id: ParamId) -> Result<GradSlot, DeviceError> {
        Ok(self.slot(id)?)
    }

    fn contributed(&mut self, id: ParamId, at: Event) -> Result<(), DeviceError> {
        Ok(self.ready(id, at)?)
    }
}

/// The summed gradients, for reading. The next step can begin when this is gone.
pub struct Reduced<'a> {
    reducer: &'a Reducer,
    times: CommTimes,
    device_times: DeviceTimes,
}

impl Reduced<'_> {
    /// The memory, padding included. Of a whole arena that is scattered, only what this rank owns has a meaning.
    pub fn sums(&self) -> ArenaShare {
        self.reducer.grads.sums().clone()
    }

    /// The elements of one gradient on the host. Where ranks own parts, each has only its own, and this says so.
    ///
    /// # Panics
    /// If there is no such parameter.
    pub fn grad<T: Element>(&self, id: ParamId) -> Result<HostRef<'_, T>, ReduceError> {
        match self.reducer.grads.sum(id) {
            Some(grad) => Ok(grad.host()?),
            None => Err(ReduceError::Misuse(format!(
                "gradient of `{}` is sharded over the ranks, so no rank can read all of it",
                self.reducer.layout.spec(id).name
            ))),
        }
    }

    /// Time that reduction took. After [`Step::finish_on`] only what the host saw of it: on a device that runs
    /// asynchronously the rest is in `DeviceTimes`.
    pub fn times(&self) -> CommTimes {
        self.times
    }

    /// What the device measures of the step after [`Step::finish_on`]: complete when it has run all of it and
    /// [`Reducer::failure`] was asked after that.
    pub fn device_times(&self) -> DeviceTimes {
        self.device_times.clone()
    }
}
