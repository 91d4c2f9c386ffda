//! The reducer: sums gradients over the ranks while they are being computed.
//!
//! It knows no models. Whoever can say "gradient i is ready" can use it:
//!
//! 1. [`Reducer::step`] begins a step and gives the right to write gradients ([`Step`]);
//! 2. each gradient is written and reported ([`Step::ready`]); a bucket is launched as soon as it and all before it
//!    are complete, strictly in layout order, whatever the order of the reports, so that all ranks issue the same
//!    operations;
//! 3. [`Step::finish`] waits for the others and gives the right to read the sums ([`Reduced`]);
//!    [`Step::finish_on`] lets a stream wait instead of the host.
//!
//! With [`Reducer::new`] every rank ends with all sums; with [`Reducer::sharded`] each with those that it owns,
//! reduce-scattered among the ranks of its copy and, when nothing is added to it any more, summed over the replicate group
//! ([`ReplicaSet`]).
//!
//! Peers write into the arena while a bucket is under way. The two guards keep Rust code out of it meanwhile; an
//! operation in flight owns its segment, so that it outlives even a reducer that is dropped too early.

use std::sync::Arc;
use std::time::Instant;

use super::ReduceError;
use super::gradients::{GradMemory, ReduceUnit, WholeGrads};
use super::readiness::Readiness;
use super::sharded_gradients::GradShard;
use super::slots::{Landed, Round};
use crate::collective::{Communicator, Launch, ReduceOp, Traffic, Work, WorkError};
use crate::config::{Accumulate, Sync, Unused};
use crate::device::{Buffer, Device, DeviceError, Element, Event, HostMut, HostRef, Stream};
use crate::model::{self, GradSink, GradSlot, ParamId};
use crate::parallel::comm_times::{CommTimes, CommTracker, DeviceTimes};
use crate::parallel::{GradientLayout, Portion, ReplicaSet, Sharding};

/// How gradients are synchronised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReducerConfig {
    /// What one operation carries.
    pub sync: Sync,
    /// Launch while gradients are still being computed; otherwise all at the end.
    pub overlap: bool,
}

impl Default for ReducerConfig {
    /// Buckets, launched as soon as they are complete.
    fn default() -> Self {
        Self {
            sync: Sync::Bucketed,
            overlap: true,
        }
    }
}

/// The gradients of a rank, and the operations that sum them.
pub struct Reducer {
    /// The ranks that hold a copy together.
    comm: Communicator,
    copies: Option<ReplicateGroup>,
    layout: Arc<GradientLayout>,
    config: ReducerConfig,
    units: Vec<ReduceUnit>,
    /// Unit of each parameter.
    unit_of: Vec<usize>,
    memory: GradMemory,
    in_flight: Vec<Work>,
    tracker: CommTracker,
    poison: Option<String>,
    unused: Unused,
    /// Global rank.
    rank: usize,
}

impl Reducer {
    /// Allocates the gradients. Every rank of `comm` must call it, with the same layout and configuration.
    pub fn new(
        comm: &Communicator,
        device: &Arc<dyn Device>,
        layout: Arc<GradientLayout>,
        config: ReducerConfig,
    ) -> Result<Self, ReduceError> {
        let replicas = ReplicaSet::of_all(comm.clone());
        let units = ReduceUnit::of_layout(&layout, config.sync);
        let whole = WholeGrads::new(&replicas, device, &layout, None, &units)?;
        let memory = GradMemory::Whole(whole);
        Ok(Self::with(&replicas, device, layout, config, units, memory))
    }

    /// A reducer that leaves each sum on the ranks that own it. Every rank of `replicas` must call it; `sharding`
    /// is over [`ReplicaSet::reduce`]. `stream` is the one that computes the gradients; `overlap` is as in
    /// [`ReducerConfig`].
    pub fn sharded(
        replicas: &ReplicaSet,
        (device, stream): (&Arc<dyn Device>, Stream),
        layout: Arc<GradientLayout>,
        sharding: &Arc<Sharding>,
        accumulate: Accumulate,
        overlap: bool,
    ) -> Result<Self, ReduceError> {
        let units = ReduceUnit::of_sharding(sharding);
        let memory = match accumulate {
            Accumulate::Full => {
                let whole = WholeGrads::new(replicas, device, &layout, Some(sharding), &units)?;
                GradMemory::Whole(whole)
            }
            Accumulate::Sharded => {
                GradMemory::Shard(GradShard::new(replicas, (device, stream), &layout, sharding)?)
            }
        };
        let sync = Sync::Bucketed;
        let config = ReducerConfig { sync, overlap };
        Ok(Self::with(replicas, device, layout, config, units, memory))
    }

    fn with(
        replicas: &ReplicaSet,
        device: &Arc<dyn Device>,
        layout: Arc<GradientLayout>,
        config: ReducerConfig,
        units: Vec<ReduceUnit>,
        memory: GradMemory,
    ) -> Self {
        let mut unit_of = vec![0; layout.params()];
        for (unit, params) in units.iter().map(|u| &u.params).enumerate() {
            for id in params {
                unit_of[id.0] = unit;
            }
        }
        Self {
            comm: replicas.reduce().clone(),
            copies: replicas
                .replicate()
                .map(|comm| ReplicateGroup::new(comm, units.len())),
            layout,
            config,
            units,
            unit_of,
            memory,
            in_flight: Vec::new(),
            tracker: CommTracker::new(device, replicas.all().timeline()),
            poison: None,
            unused: Unused::Error,
            rank: replicas.all().members()[replicas.all().rank()],
        }
    }

    /// The same, with another answer to parameters that take no part in a backward.
    #[must_use]
    pub fn with_unused(mut self, unused: Unused) -> Self {
        self.unused = unused;
        self
    }

    /// Where each gradient lies.
    #[must_use]
    pub fn layout(&self) -> &Arc<GradientLayout> {
        &self.layout
    }

    /// Size of the memory for gradients in bytes, padding and slots included.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// What of it is slots for gradients that are in flight.
    #[must_use]
    pub fn in_flight_bytes(&self) -> usize {
        self.memory.bytes() - self.memory.portion().arena().bytes()
    }

    /// Number of operations in which all gradients are reduced.
    #[must_use]
    pub fn operations(&self) -> usize {
        self.units.len()
    }

    /// Why an operation that a stream waits for has failed, if one has: the stream itself only says so in words.
    #[must_use]
    pub fn failure(&self) -> Option<WorkError> {
        self.tracker.failure()
    }

    /// Begins a step of so many micro-batches. The sum is over all of them and all ranks, and nothing scales it: the
    /// gradient of the mean is the sum of gradients of losses that were divided by all samples. It is launched when the last
    /// of them is complete, with [`Accumulate::Sharded`] for each of them.
    ///
    /// # Panics
    /// If there are none.
    pub fn step(&mut self, micro_batches: usize) -> Result<Step<'_>, ReduceError> {
        assert!(micro_batches > 0, "a step has a micro-batch");
        if let Some(cause) = &self.poison {
            return Err(ReduceError::Poisoned(cause.clone()));
        }
        self.memory.reset();
        if let Some(copies) = &mut self.copies {
            copies.reset();
        }
        Ok(Step::begin(self, micro_batches))
    }

    /// Memory of a gradient, to be written.
    fn grad(&mut self, id: ParamId) -> Result<Buffer, ReduceError> {
        let buffer = self.memory.grad(id, &self.tracker, self.comm.deadline())?;
        self.add_copies();
        Ok(buffer)
    }

    /// Sends a unit on its way that is complete at `ready`.
    fn launch(&mut self, index: usize, ready: Event, round: Round) {
        let unit = (index, &self.units[index]);
        let (tracker, deadline) = (&self.tracker, self.comm.deadline());
        let (buffer, ready) = self.memory.outgoing(unit, ready, tracker, deadline);
        let sum = ReduceOp::Sum { scale: 1.0 };
        let launch = Launch::after(ready, Traffic::Grads, unit.1.tag.clone());
        let work = tracker.launch(|| {
            if self.memory.is_scattered() {
                self.comm.reduce_scatter(&buffer, sum, launch)
            } else {
                self.comm.all_reduce(&buffer, sum, launch)
            }
        });
        self.memory.launched(unit, work.clone(), round);
        self.in_flight.push(work);
        self.add_copies();
    }

    /// Puts the sums where they belong, after the operations that were launched. Reached when those are there that
    /// the stream that computes does not wait for.
    fn land(&mut self, deadline: Instant) -> Event {
        let landed = self.memory.land_all(&self.tracker, deadline);
        self.add_copies();
        landed
    }

    /// Adds up over the copies of the state what is complete.
    fn add_copies(&mut self) {
        let landed = self.memory.take_landed();
        let Some(copies) = &mut self.copies else {
            return;
        };
        let units = &self.units;
        for landed in landed {
            let works = copies.arrived(landed, |unit| units[unit].tag.clone(), &self.tracker);
            self.in_flight.extend(works);
        }
    }
}

/// The right to write gradients. Dropped without [`Step::finish`], it leaves the reducer usable if nothing was
/// launched, and otherwise unusable with an error that says so: other ranks wait for the rest.
///
/// After its first error a step only repeats that error.
pub struct Step<'a> {
    /// Gone once the step has finished.
    reducer: Option<&'a mut Reducer>,
    /// Times that each unit is launched: once, or once a micro-batch.
    rounds: usize,
    readiness: Readiness,
    /// Parameters of each unit that are not complete in its round.
    open: Vec<usize>,
    /// Units launched so far, of all rounds: always a prefix.
    launched: usize,
    /// What [`Step::grad_mut`] lends.
    host: Option<Buffer>,
    failed: Option<ReduceError>,
}

impl<'a> Step<'a> {
    fn begin(reducer: &'a mut Reducer, micro_batches: usize) -> Self {
        let (rounds, in_round) = if reducer.memory.is_shard() {
            (micro_batches, 1)
        } else {
            (1, micro_batches)
        };
        Self {
            rounds,
            readiness: Readiness::new(&reducer.layout, in_round),
            open: reducer.units.iter().map(|unit| unit.params.len()).collect(),
            launched: 0,
            host: None,
            failed: None,
            reducer: Some(reducer),
        }
    }

    /// Memory for the next contribution to a gradient, for operations on the device.
    pub fn slot(&mut self, id: ParamId) -> Result<GradSlot, ReduceError> {
        let buffer = self.writable(id)?;
        Ok(GradSlot {
            buffer,
            accumulate: self.readiness.is_written(id),
        })
    }

    /// The elements of a gradient on the host, to which the next contribution is to be **added**: they are zero at
    /// the first access of a step.
    pub fn grad_mut<T: Element>(&mut self, id: ParamId) -> Result<HostMut<'_, T>, ReduceError> {
        let buffer = self.writable(id)?;
        let first = self.readiness.write(id);
        let mut grad = self.host.insert(buffer).host_mut::<T>()?;
        if first {
            grad.fill(T::zeroed());
        }
        Ok(grad)
    }

    /// One contribution to the gradient of `id` is there once `at` is reached. With the last one the gradient may be on
    /// its way to the other ranks.
    pub fn ready(&mut self, id: ParamId, at: Event) -> Result<(), ReduceError> {
        self.check()?;
        self.report(id, at).map_err(|e| self.fail(e))
    }

    /// Time that reduction has taken since the step before, as far as the host saw it.
    #[must_use]
    pub fn times(&self) -> CommTimes {
        self.reducer().tracker.times()
    }

    /// Launches what is left, waits for all of it, and gives the sums.
    pub fn finish(mut self, deadline: Instant) -> Result<Reduced<'a>, ReduceError> {
        let landed = self.complete(deadline)?;
        for work in std::mem::take(&mut self.reducer_mut().in_flight) {
            let done = self.reducer().tracker.wait_on_host(&work, deadline);
            done.map_err(|e| self.fail(e.into()))?;
        }
        landed.wait(deadline).map_err(|e| self.fail(e.into()))?;
        Ok(self.reduced()?.known())
    }

    /// Launches what is left and gives the sums to later operations of `stream`, the one that computes the
    /// gradients: on a device that runs asynchronously the host does not wait. An operation that fails fails the
    /// stream; [`Reducer::failure`] has its error.
    pub fn finish_on(mut self, stream: Stream, deadline: Instant) -> Result<Reduced<'a>, ReduceError> {
        let landed = self.complete(deadline)?;
        let reducer = self.reducer_mut();
        for work in std::mem::take(&mut reducer.in_flight) {
            reducer.tracker.wait_in_stream(stream, work.event(), deadline);
        }
        reducer.tracker.wait_in_stream(stream, &landed, deadline);
        self.reduced()
    }

    /// Why the step failed, if it has: who was given an error in words finds the kind here.
    #[must_use]
    pub fn failure(&self) -> Option<&ReduceError> {
        self.failed.as_ref()
    }

    /// Launches what is left. Reached when the sums are there that the stream that
    /// computes does not wait for.
    fn complete(&mut self, deadline: Instant) -> Result<Event, ReduceError> {
        self.check()?;
        let layout = &self.reducer().layout;
        self.readiness.all_there(layout).map_err(|e| self.fail(e))?;
        while self.launched < self.launches() {
            self.launch_next();
        }
        Ok(self.reducer_mut().land(deadline))
    }

    /// Everything is there, or streams wait for it.
    fn reduced(mut self) -> Result<Reduced<'a>, ReduceError> {
        let checked = self.reducer().tracker.check();
        checked.map_err(|e| self.fail(e.into()))?;
        let tracker = &self.reducer().tracker;
        let (times, device_times) = (tracker.take_times(), tracker.take_device_times());
        let reducer = self.reducer.take().expect("a step finishes once");
        Ok(Reduced {
            reducer,
            times,
            device_times,
        })
    }

    fn reducer(&self) -> &Reducer {
        self.reducer.as_deref().expect("`finish` consumes the step")
    }

    fn reducer_mut(&mut self) -> &mut Reducer {
        self.reducer.as_deref_mut().expect("`finish` consumes the step")
    }

    fn check(&self) -> Result<(), ReduceError> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn fail(&mut self, error: ReduceError) -> ReduceError {
        self.failed.get_or_insert(error).clone()
    }

    /// Memory of a gradient that is not on its way.
    fn writable(&mut self, id: ParamId) -> Result<Buffer, ReduceError> {
        self.check()?;
        self.readiness.known(id).map_err(|e| self.fail(e))?;
        if self.readiness.is_complete(id) {
            let (param, bucket) = self.reducer().layout.name_and_bucket(id);
            return Err(self.fail(ReduceError::Late { param, bucket }));
        }
        self.reducer_mut().grad(id).map_err(|e| self.fail(e))
    }

    fn report(&mut self, id: ParamId, at: Event) -> Result<(), ReduceError> {
        let layout = self.reducer().layout.clone();
        self.readiness.add(id, at, &layout)?;
        if self.readiness.is_complete(id) {
            let unit = self.reducer().unit_of[id.0];
            self.open[unit] -= 1;
            self.launch_complete();
        }
        Ok(())
    }

    /// Launches of a step.
    fn launches(&self) -> usize {
        self.rounds * self.open.len()
    }

    fn launch_complete(&mut self) {
        let config = self.reducer().config;
        // Units in slots must leave their slots, overlapped or not.
        let waits = !config.overlap && !self.reducer().memory.is_shard();
        if waits || config.sync == Sync::Naive {
            return;
        }
        while self.launched < self.launches() && self.open[self.launched % self.open.len()] == 0 {
            self.launch_next();
        }
    }

    fn launch_next(&mut self) {
        let unit = self.launched % self.open.len();
        let round = Round {
            index: self.launched / self.open.len(),
            count: self.rounds,
        };
        self.launched += 1;
        let reducer = self.reducer.as_deref_mut().expect("`finish` consumes the step");
        let params = &reducer.units[unit].params;
        let ready = self.readiness.take_event(params);
        if !round.is_last() {
            self.readiness.next_round(params);
            self.open[unit] = params.len();
        }
        reducer.launch(unit, ready, round);
    }
}

impl GradSink for Step<'_> {
    fn grad(&mut self, id: ParamId) -> Result<GradSlot, DeviceError> {
        Ok(self.slot(id)?)
    }

    fn contributed(&mut self, id: ParamId, at: Event) -> Result<(), DeviceError> {
        Ok(self.ready(id, at)?)
    }

    fn unused(&mut self, unused: &model::Unused<'_>) -> Result<(), DeviceError> {
        if self.reducer().unused == Unused::Zero {
            return Ok(());
        }
        let error = ReduceError::Unused {
            rank: self.reducer().rank,
            unused: unused.to_string(),
        };
        Err(self.fail(error).into())
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        let Some(reducer) = self.reducer.take() else {
            return;
        };
        // Operations in flight own their memory; nobody waits for them any more.
        let begun = self.launched > 0 || !reducer.in_flight.is_empty();
        reducer.in_flight.clear();
        if begun && reducer.poison.is_none() {
            let why = match &self.failed {
                Some(error) => error.to_string(),
                None => "the step was dropped".into(),
            };
            let (launched, all) = (self.launched, self.launches());
            reducer.poison = Some(format!(
                "a step ended after {launched} of {all} operations were launched, so this rank no longer agrees with the others: {why}"
            ));
        }
    }
}

/// The summed gradients, for reading. The next step can begin when this is gone.
pub struct Reduced<'a> {
    reducer: &'a mut Reducer,
    times: CommTimes,
    device_times: DeviceTimes,
}

impl Reduced<'_> {
    /// The same when nothing is in flight: the host knows what the device measured.
    fn known(mut self) -> Self {
        self.times += self.device_times.take();
        self
    }

    /// The memory, padding included. Of a whole arena that is scattered, only what this rank owns has a meaning.
    #[must_use]
    pub fn portion(&self) -> Portion {
        self.reducer.memory.portion()
    }

    /// Where each gradient lies.
    #[must_use]
    pub fn layout(&self) -> &GradientLayout {
        &self.reducer.layout
    }

    /// The elements of one gradient on the host. A sharded reducer has them on their owner only, and says so.
    ///
    /// # Panics
    /// If there is no such parameter.
    pub fn grad<T: Element>(&self, id: ParamId) -> Result<HostRef<'_, T>, ReduceError> {
        match self.reducer.memory.sum(id) {
            Some(grad) => Ok(grad.host()?),
            None => Err(ReduceError::Sharded {
                param: self.reducer.layout.spec(id).name.clone(),
            }),
        }
    }

    /// Time that reduction took. After [`Step::finish_on`] only what the host saw of it: on a device that runs
    /// asynchronously the rest is in `DeviceTimes`.
    #[must_use]
    pub fn times(&self) -> CommTimes {
        self.times
    }

    /// What the device measures of the step after [`Step::finish_on`]: complete when it has run all of it and
    /// [`Reducer::failure`] was asked after that.
    #[must_use]
    pub fn device_times(&self) -> DeviceTimes {
        self.device_times.clone()
    }
}

/// Sums over several copies of the state: what a rank owns is added up with the ranks that own the same of the other
/// copies, once a step, when nothing is added to it any more (hybrid sharding; [`ReplicaSet`]).
struct ReplicateGroup {
    /// The ranks that own the same slices.
    comm: Communicator,
    /// By unit: complete, but an earlier unit is not.
    landed: Vec<Option<Landed>>,
    /// Units added up so far: always a prefix, so that all ranks issue the same operations.
    added: usize,
}

impl ReplicateGroup {
    fn new(comm: &Communicator, units: usize) -> Self {
        Self {
            comm: comm.clone(),
            landed: (0..units).map(|_| None).collect(),
            added: 0,
        }
    }

    /// This rank's part of a unit is complete. Returns the operations that can begin; `tag` names a unit.
    fn arrived(&mut self, landed: Landed, tag: impl Fn(usize) -> String, tracker: &CommTracker) -> Vec<Work> {
        let unit = landed.unit;
        self.landed[unit] = Some(landed);
        let mut works = Vec::new();
        while let Some(Landed { unit, place, at }) = self.landed.get_mut(self.added).and_then(Option::take) {
            self.added += 1;
            let launch = Launch::after(at, Traffic::Grads, format!("{} of all copies", tag(unit)));
            // It is scaled already.
            let sum = ReduceOp::Sum { scale: 1.0 };
            works.push(tracker.launch(|| self.comm.all_reduce(&place, sum, launch)));
        }
        works
    }

    /// The next step begins.
    fn reset(&mut self) {
        self.landed.fill_with(|| None);
        self.added = 0;
    }
}
