//! What is known of the gradients of one step: how often each was reported, and when it is there.
//!
//! A gradient is complete when its parameter has been reported contributions × micro-batches times, in whatever order
//! micro-batches run backward: a block of a pipeline may have done all of them before another has begun. Where every
//! micro-batch is reduced by itself, a step has as many rounds, and a gradient is complete in each.

use std::time::Instant;

use super::ReduceError;
use crate::device::{DeviceError, Event, EventState};
use crate::model::ParamId;
use crate::parallel::GradientLayout;

/// By parameter.
pub(super) struct Readiness(Vec<GradReports>);

#[derive(Clone, Default)]
struct GradReports {
    /// In this round.
    times: usize,
    /// How often it is to be reported in a round.
    due: usize,
    /// The gradient has a value already: later contributions are added.
    written: bool,
    /// Points in streams that were not reached when they were reported.
    events: Vec<Event>,
}

impl Readiness {
    /// For rounds of so many micro-batches.
    pub(super) fn new(layout: &GradientLayout, micro_batches: usize) -> Self {
        let due = |id| layout.spec(ParamId(id)).contributions * micro_batches;
        let report = |id| GradReports {
            due: due(id),
            ..GradReports::default()
        };
        Self((0..layout.params()).map(report).collect())
    }

    /// An error if there is no such parameter.
    pub(super) fn known(&self, id: ParamId) -> Result<(), ReduceError> {
        let count = self.0.len();
        if id.0 < count {
            Ok(())
        } else {
            Err(ReduceError::Unknown { id: id.0, count })
        }
    }

    /// True if the gradient has a value already.
    pub(super) fn is_written(&self, id: ParamId) -> bool {
        self.0[id.0].written
    }

    /// The gradient gets a value; true if it had none.
    pub(super) fn write(&mut self, id: ParamId) -> bool {
        !std::mem::replace(&mut self.0[id.0].written, true)
    }

    /// True if all contributions of this round were reported.
    pub(super) fn is_complete(&self, id: ParamId) -> bool {
        let report = &self.0[id.0];
        report.times >= report.due
    }

    /// One contribution is there once `at` is reached.
    pub(super) fn add(&mut self, id: ParamId, at: Event, layout: &GradientLayout) -> Result<(), ReduceError> {
        self.known(id)?;
        let report = &mut self.0[id.0];
        report.times += 1;
        report.written = true;
        if !matches!(at.poll(), Some(Ok(()))) {
            report.events.push(at);
        }
        let (times, expected) = (report.times, report.due);
        if times <= expected {
            return Ok(());
        }
        let (param, bucket) = layout.name_and_bucket(id);
        Err(ReduceError::Double {
            param,
            bucket,
            times,
            expected,
        })
    }

    /// An error if a contribution of this round is missing.
    pub(super) fn all_there(&self, layout: &GradientLayout) -> Result<(), ReduceError> {
        let short = |id: &&ParamId| !self.is_complete(**id);
        let Some(first) = layout.order().iter().find(short) else {
            return Ok(());
        };
        let (param, bucket) = layout.name_and_bucket(*first);
        let report = &self.0[first.0];
        Err(ReduceError::Missing {
            param,
            bucket,
            times: report.times,
            expected: report.due,
            missing: layout.order().iter().filter(short).count(),
        })
    }

    /// Reached when the gradients of a unit are there.
    pub(super) fn take_event(&mut self, params: &[ParamId]) -> Event {
        let events = params.iter().map(|id| std::mem::take(&mut self.0[id.0].events));
        all_of(events.flatten())
    }

    /// The next round of these gradients begins, with new values.
    pub(super) fn next_round(&mut self, params: &[ParamId]) {
        for id in params {
            let report = &mut self.0[id.0];
            report.times = 0;
            report.written = false;
        }
    }
}

/// Reached when all parts are; failed with the error of the first part that failed.
fn all_of(parts: impl IntoIterator<Item = Event>) -> Event {
    let mut open: Vec<Event> = parts
        .into_iter()
        .filter(|e| !matches!(e.poll(), Some(Ok(()))))
        .collect();
    match open.len() {
        0 => Event::reached(),
        1 => open.remove(0),
        _ => Event::new(AllOf(open)),
    }
}

struct AllOf(Vec<Event>);

impl EventState for AllOf {
    fn poll(&self) -> Option<Result<(), DeviceError>> {
        // An unreached part hides a failed one behind it: the first failure in order is the one reported.
        self.0.iter().try_fold(Ok(()), |before, part| match before {
            Ok(()) => part.poll(),
            failed => Some(failed),
        })
    }

    fn wait(&self, deadline: Instant) -> Result<(), DeviceError> {
        self.0.iter().try_for_each(|part| part.wait(deadline))
    }

    fn parts(&self) -> &[Event] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_reached_with_its_last_part() {
        let (first, first_signal) = Event::pair("first");
        let (second, second_signal) = Event::pair("second");
        let both = all_of([first, Event::reached(), second]);
        assert_eq!(both.poll(), None);
        second_signal.set(Ok(()));
        assert_eq!(both.poll(), None);
        first_signal.set(Ok(()));
        assert_eq!(both.poll(), Some(Ok(())));
        assert_eq!(both.wait(Instant::now()), Ok(()));
    }

    #[test]
    fn it_fails_with_its_first_failed_part() {
        let (first, first_signal) = Event::pair("first");
        let (second, second_signal) = Event::pair("second");
        let both = all_of([first, second]);
        drop(second_signal);
        first_signal.set(Ok(()));
        let failed = DeviceError::Upstream("second was given up".into());
        assert_eq!(both.poll(), Some(Err(failed.clone())));
        assert_eq!(both.wait(Instant::now()), Err(failed));
    }
}
