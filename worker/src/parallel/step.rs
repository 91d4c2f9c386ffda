//! The writing phase of one step.

use std::time::Instant;

use super::events::all_of;
use super::reduce_unit::Round;
use super::reports::Reports;
use super::{ReduceError, Reduced, Reducer, SyncTimes};
use crate::config::{self, Sync};
use crate::device::{Buffer, DeviceError, Element, Event, HostMut, Stream};
use crate::model::{GradSink, GradSlot, ParamId, Unused};

/// The right to write gradients. Dropped without [`Step::finish`], it leaves the reducer usable if nothing was
/// launched, and otherwise unusable with an error that says so: other ranks wait for the rest.
///
/// After its first error a step only repeats that error.
pub struct Step<'a> {
    /// Gone once the step has finished.
    reducer: Option<&'a mut Reducer>,
    /// Times that each unit is launched: once, or once a micro-batch.
    rounds: usize,
    reports: Reports,
    /// Parameters of each unit that are not complete in its round.
    open: Vec<usize>,
    /// Units launched so far, of all rounds: always a prefix.
    launched: usize,
    /// What [`Step::grad_mut`] lends.
    host: Option<Buffer>,
    failed: Option<ReduceError>,
}

impl<'a> Step<'a> {
    pub(super) fn begin(reducer: &'a mut Reducer, micro_batches: usize) -> Self {
        let (rounds, in_round) = if reducer.memory.is_shard() {
            (micro_batches, 1)
        } else {
            (1, micro_batches)
        };
        Self {
            rounds,
            reports: Reports::new(&reducer.layout, in_round),
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
            accumulate: self.reports.is_written(id),
        })
    }

    /// The elements of a gradient on the host, to which the next contribution is to be **added**: they are zero at
    /// the first access of a step.
    pub fn grad_mut<T: Element>(&mut self, id: ParamId) -> Result<HostMut<'_, T>, ReduceError> {
        let buffer = self.writable(id)?;
        let first = self.reports.write(id);
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
    pub fn times(&self) -> SyncTimes {
        self.reducer().waiting.times()
    }

    /// Launches what is left, waits for all of it, and gives the sums.
    pub fn finish(mut self, deadline: Instant) -> Result<Reduced<'a>, ReduceError> {
        let landed = self.complete(deadline)?;
        for work in std::mem::take(&mut self.reducer_mut().in_flight) {
            let done = self.reducer().waiting.on_host(&work, deadline);
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
            reducer.waiting.in_stream(stream, work.event(), deadline);
        }
        reducer.waiting.in_stream(stream, &landed, deadline);
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
        self.reports.all_there(layout).map_err(|e| self.fail(e))?;
        while self.launched < self.launches() {
            self.launch_next();
        }
        Ok(self.reducer_mut().land(deadline))
    }

    /// Everything is there, or streams wait for it.
    fn reduced(mut self) -> Result<Reduced<'a>, ReduceError> {
        let settled = self.reducer().waiting.settle();
        settled.map_err(|e| self.fail(e.into()))?;
        let waiting = &self.reducer().waiting;
        let (times, ledger) = (waiting.take_times(), waiting.take_ledger());
        let reducer = self.reducer.take().expect("a step finishes once");
        Ok(Reduced::new(reducer, times, ledger))
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
        self.reports.known(id).map_err(|e| self.fail(e))?;
        if self.reports.is_complete(id) {
            let (param, bucket) = self.reducer().layout.place(id);
            return Err(self.fail(ReduceError::Late { param, bucket }));
        }
        self.reducer_mut().grad(id).map_err(|e| self.fail(e))
    }

    fn report(&mut self, id: ParamId, at: Event) -> Result<(), ReduceError> {
        let layout = self.reducer().layout.clone();
        self.reports.add(id, at, &layout)?;
        if self.reports.is_complete(id) {
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
        let events = self.reports.take_events(params);
        if !round.is_last() {
            self.reports.next_round(params);
            self.open[unit] = params.len();
        }
        reducer.launch(unit, all_of(events), round);
    }
}

impl GradSink for Step<'_> {
    fn grad(&mut self, id: ParamId) -> Result<GradSlot, DeviceError> {
        Ok(self.slot(id)?)
    }

    fn contributed(&mut self, id: ParamId, at: Event) -> Result<(), DeviceError> {
        Ok(self.ready(id, at)?)
    }

    fn unused(&mut self, unused: &Unused<'_>) -> Result<(), DeviceError> {
        if self.reducer().unused == config::Unused::Zero {
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
