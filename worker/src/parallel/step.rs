//! The writing phase of one step.

use std::time::{Duration, Instant};

use super::events::all_of;
use super::reducer::{GRACE, GradMemory};
use super::{ReduceError, Reduced, Reducer, SyncTimes};
use crate::collective::{Communicator, Launch, ReduceOp, Traffic, Work};
use crate::config::{self, Sync};
use crate::device::{Buffer, Device, DeviceError, Element, Event, HostMut, Stream};
use crate::model::{GradSink, GradSlot, ParamId, Unused};

/// The right to write gradients. Dropped without [`Step::finish`], it leaves the reducer usable if nothing was
/// launched, and otherwise unusable with an error that says so: other ranks wait for the rest.
///
/// After its first error a step only repeats that error.
pub struct Step<'a> {
    /// Gone once the step has finished.
    reducer: Option<&'a mut Reducer>,
    accumulation: usize,
    micro_batch: usize,
    reports: Vec<Report>,
    /// Parameters of each unit that are not complete in the last micro-batch.
    open: Vec<usize>,
    /// Units launched so far: always a prefix.
    launched: usize,
    /// What [`Step::grad_mut`] lends.
    host: Option<Buffer>,
    failed: Option<ReduceError>,
}

/// What is known of one gradient in this step.
#[derive(Clone, Default)]
struct Report {
    /// Reports in the current micro-batch.
    times: usize,
    /// It has a value already: later contributions are added.
    written: bool,
    /// Points in streams that were not reached when they were reported.
    events: Vec<Event>,
}

impl<'a> Step<'a> {
    pub(super) fn begin(reducer: &'a mut Reducer, accumulation: usize) -> Self {
        Self {
            accumulation,
            micro_batch: 0,
            reports: vec![Report::default(); reducer.layout.params()],
            open: reducer.units.iter().map(|u| u.params.len()).collect(),
            launched: 0,
            host: None,
            failed: None,
            reducer: Some(reducer),
        }
    }

    /// Memory for the next contribution to a gradient, for operations on the device.
    pub fn slot(&mut self, id: ParamId) -> Result<GradSlot, ReduceError> {
        self.check()?;
        self.writable(id).map_err(|e| self.fail(e))?;
        let buffer = self.reducer_mut().grad(id).map_err(|e| self.fail(e))?;
        Ok(GradSlot {
            buffer,
            accumulate: self.reports[id.0].written,
        })
    }

    /// The elements of a gradient on the host, to which the next contribution is to be **added**: they are zero at
    /// the first access of a step.
    pub fn grad_mut<T: Element>(&mut self, id: ParamId) -> Result<HostMut<'_, T>, ReduceError> {
        self.check()?;
        self.writable(id).map_err(|e| self.fail(e))?;
        let first = !std::mem::replace(&mut self.reports[id.0].written, true);
        let buffer = self.reducer_mut().grad(id).map_err(|e| self.fail(e))?;
        let mut grad = self.host.insert(buffer).host_mut::<T>()?;
        if first {
            grad.fill(T::zeroed());
        }
        Ok(grad)
    }

    /// One contribution to the gradient of `id` is there once `at` is reached. With the last one of the last
    /// micro-batch the gradient may be on its way to the other ranks.
    pub fn ready(&mut self, id: ParamId, at: Event) -> Result<(), ReduceError> {
        self.check()?;
        self.report(id, at).map_err(|e| self.fail(e))
    }

    /// Ends a micro-batch that is not the last one.
    pub fn next_micro_batch(&mut self) -> Result<(), ReduceError> {
        self.check()?;
        let wrong = (self.micro_batch + 1 >= self.accumulation).then_some("another one was begun");
        self.end_micro_batch(wrong).map_err(|e| self.fail(e))?;
        if self.reducer().is_staged() {
            self.launch_rest();
            self.launched = 0;
            self.open = self.reducer().units.iter().map(|u| u.params.len()).collect();
            self.reports.fill(Report::default());
        }
        self.micro_batch += 1;
        for report in &mut self.reports {
            report.times = 0;
        }
        Ok(())
    }

    /// Launches what is left, waits for all of it, and gives the averages.
    pub fn finish(mut self, deadline: Instant) -> Result<Reduced<'a>, ReduceError> {
        self.complete()?;
        let started = Instant::now();
        self.launch_rest();
        let works = std::mem::take(&mut self.reducer_mut().in_flight);
        let mut comm = Duration::ZERO;
        for work in &works {
            let times = work.wait(deadline).map_err(|e| self.fail(e.into()))?;
            comm += times.ended.saturating_duration_since(times.started);
        }
        let landed = self.land(deadline);
        landed.wait(deadline).map_err(|e| self.fail(e.into()))?;
        let exposed = started.elapsed();
        Ok(self.reduced(SyncTimes { comm, exposed }))
    }

    /// Launches what is left and gives the averages to later operations of `stream`, the one that computes the
    /// gradients: on a device that runs asynchronously the host does not wait. An operation that fails fails the
    /// stream; [`Reducer::failure`] has its error.
    pub fn finish_on(
        mut self,
        (device, stream): (&dyn Device, Stream),
        deadline: Instant,
    ) -> Result<Reduced<'a>, ReduceError> {
        self.complete()?;
        let started = Instant::now();
        self.launch_rest();
        let reducer = self.reducer_mut();
        for work in &reducer.in_flight {
            work.wait_on(device, stream, deadline);
        }
        reducer.unsettled.append(&mut reducer.in_flight);
        let comm = reducer.settle().map_err(|e| self.fail(e.into()))?;
        device.wait_event(stream, &self.land(deadline), deadline);
        let exposed = started.elapsed();
        Ok(self.reduced(SyncTimes { comm, exposed }))
    }

    /// Why the step failed, if it has: who was given an error in words finds the kind here.
    #[must_use]
    pub fn failure(&self) -> Option<&ReduceError> {
        self.failed.as_ref()
    }

    /// Ends the last micro-batch.
    fn complete(&mut self) -> Result<(), ReduceError> {
        self.check()?;
        let wrong = (self.micro_batch + 1 < self.accumulation).then_some("it was finished");
        self.end_micro_batch(wrong).map_err(|e| self.fail(e))
    }

    /// Puts the averages where they belong, after the operations that were launched. Reached when those are there that
    /// the stream that computes has not waited for.
    fn land(&mut self, deadline: Instant) -> Event {
        match &mut self.reducer_mut().memory {
            GradMemory::Whole { wire: None, .. } => Event::reached(),
            GradMemory::Whole { wire: Some(wire), .. } => wire.land_all(deadline),
            GradMemory::Staged(staging) => {
                staging.land_all(deadline);
                Event::reached()
            }
        }
    }

    /// Everything is there, or streams wait for it.
    fn reduced(mut self, times: SyncTimes) -> Reduced<'a> {
        let reducer = self.reducer.take().expect("a step finishes once");
        Reduced::new(reducer, times)
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

    fn known(&self, id: ParamId) -> Result<(), ReduceError> {
        let count = self.reports.len();
        if id.0 < count {
            Ok(())
        } else {
            Err(ReduceError::Unknown { id: id.0, count })
        }
    }

    fn writable(&self, id: ParamId) -> Result<(), ReduceError> {
        self.known(id)?;
        if self.communicates() && self.reports[id.0].times >= self.expected(id) {
            let (param, bucket) = self.place(id);
            return Err(ReduceError::Late { param, bucket });
        }
        Ok(())
    }

    fn report(&mut self, id: ParamId, at: Event) -> Result<(), ReduceError> {
        self.known(id)?;
        let expected = self.expected(id);
        let report = &mut self.reports[id.0];
        report.times += 1;
        report.written = true;
        if !matches!(at.poll(), Some(Ok(()))) {
            report.events.push(at);
        }
        let times = report.times;
        if times > expected {
            let (param, bucket) = self.place(id);
            return Err(ReduceError::Double {
                param,
                bucket,
                micro_batch: self.micro_batch,
                times,
                expected,
            });
        }
        if self.communicates() && times == expected {
            let unit = self.reducer().unit_of[id.0];
            self.open[unit] -= 1;
            self.launch_complete();
        }
        Ok(())
    }

    /// True if gradients that are complete in this micro-batch go to the other ranks.
    fn communicates(&self) -> bool {
        self.micro_batch + 1 == self.accumulation || self.reducer().is_staged()
    }

    /// Reports of a parameter in one micro-batch.
    fn expected(&self, id: ParamId) -> usize {
        self.reducer().layout.spec(id).contributions
    }

    /// Name and bucket of a parameter, for errors.
    fn place(&self, id: ParamId) -> (String, usize) {
        let layout = &self.reducer().layout;
        let bucket = layout.bucket_of(id).expect("the parameter is known");
        (layout.spec(id).name.clone(), bucket)
    }

    fn end_micro_batch(&self, wrong: Option<&'static str>) -> Result<(), ReduceError> {
        if let Some(what) = wrong {
            return Err(ReduceError::MicroBatches {
                accumulation: self.accumulation,
                micro_batch: self.micro_batch,
                what,
            });
        }
        let layout = &self.reducer().layout;
        let short = |id: &&ParamId| self.reports[id.0].times < layout.spec(**id).contributions;
        let Some(first) = layout.order().iter().find(short) else {
            return Ok(());
        };
        let (param, bucket) = self.place(*first);
        Err(ReduceError::Missing {
            param,
            bucket,
            micro_batch: self.micro_batch,
            times: self.reports[first.0].times,
            expected: self.expected(*first),
            missing: layout.order().iter().filter(short).count(),
        })
    }

    fn launch_complete(&mut self) {
        let config = self.reducer().config;
        // Staged units must leave their slots, overlapped or not.
        let waits = !config.overlap && !self.reducer().is_staged();
        if waits || config.sync == Sync::Naive {
            return;
        }
        while self.open.get(self.launched) == Some(&0) {
            self.launch_next();
        }
    }

    fn launch_rest(&mut self) {
        while self.launched < self.open.len() {
            self.launch_next();
        }
    }

    fn launch_next(&mut self) {
        let unit = self.launched;
        self.launched += 1;
        let accumulation = self.accumulation;
        let reports = &mut self.reports;
        let reducer = self.reducer.as_deref_mut().expect("`finish` consumes the step");
        let Reducer {
            comm,
            copies,
            ranks,
            units,
            in_flight,
            memory,
            ..
        } = reducer;
        let index = unit;
        let unit = &units[index];
        let events = unit
            .params
            .iter()
            .flat_map(|id| std::mem::take(&mut reports[id.0].events));
        let average = ReduceOp::Sum {
            scale: 1.0 / (accumulation * *ranks) as f32,
        };
        let ready = all_of(events);
        let (buffer, scattered, ready) = match memory {
            GradMemory::Whole {
                arena,
                scattered,
                wire,
                ..
            } => {
                let place = arena.slice(unit.range.clone());
                let (buffer, ready) = match wire {
                    Some(wire) => wire.narrow(&place, &ready, Instant::now() + comm.timeout() + GRACE),
                    None => (place, ready),
                };
                (buffer, *scattered, ready)
            }
            GradMemory::Staged(staging) => (staging.buffer(index), true, ready),
        };
        let launch = Launch::after(ready, Traffic::Grads, unit.tag.clone());
        let mut work = if scattered {
            comm.reduce_scatter(&buffer, average, launch)
        } else {
            comm.all_reduce(&buffer, average, launch)
        };
        if let Some(copies) = copies {
            let own = buffer.slice(unit.own.clone());
            let summed = sum_of_copies(copies, &own, &work, &unit.tag);
            in_flight.push(std::mem::replace(&mut work, summed));
        }
        match memory {
            GradMemory::Whole { wire: None, .. } => {}
            GradMemory::Whole {
                wire: Some(wire),
                arena,
                ..
            } => {
                let place = arena.slice(unit.range.clone());
                let [from, to] = [buffer, place].map(|all| all.slice(unit.own.clone()));
                wire.launched(&work, from, to);
            }
            GradMemory::Staged(staging) => staging.launched(index, &work, self.micro_batch > 0),
        }
        in_flight.push(work);
    }
}

/// Adds what `reduced` leaves in `own` over all copies of the state; it is scaled already.
fn sum_of_copies(copies: &Communicator, own: &Buffer, reduced: &Work, tag: &str) -> Work {
    let tag = format!("{tag} of all copies");
    let launch = Launch::after(reduced.event().clone(), Traffic::Grads, tag);
    copies.all_reduce(own, ReduceOp::Sum { scale: 1.0 }, launch)
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
            micro_batch: self.micro_batch,
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
            let (launched, all) = (self.launched, reducer.units.len());
            reducer.poison = Some(format!(
                "a step ended after {launched} of {all} operations were launched, so this rank no longer agrees with the others: {why}"
            ));
        }
    }
}
