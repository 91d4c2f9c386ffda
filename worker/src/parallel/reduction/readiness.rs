//! What is known of the gradients of one step: how often each was reported, when it is there, and what is wrong.
//!
//! A gradient is complete when its parameter has been reported contributions × micro-batches times, in whatever order
//! micro-batches run backward: a block of a pipeline may have done all of them before another has begun. Where every
//! micro-batch is reduced by itself, a step has as many rounds, and a gradient is complete in each.

use std::sync::Arc;
use std::time::Instant;

use crate::collective::{CollectiveError, WorkError};
use crate::device::{DeviceError, Event, EventState};
use crate::model::ParamId;
use crate::parallel::GradientLayout;

/// Why gradients could not be reduced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReduceError {
    /// Gradients were not asked for, written and reported as the layout says.
    #[error("{0}")]
    Misuse(String),
    /// An earlier step left the ranks in disagreement.
    #[error("the reducer cannot be used any more: {0}")]
    Poisoned(String),
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl From<WorkError> for ReduceError {
    fn from(error: WorkError) -> Self {
        match error {
            WorkError::Failed(error) => Self::Collective(error),
            WorkError::Pending(error) => Self::Device(error),
        }
    }
}

impl From<ReduceError> for DeviceError {
    fn from(error: ReduceError) -> Self {
        match error {
            ReduceError::Device(error) => error,
            other => Self::Upstream(other.to_string()),
        }
    }
}

/// The gradients of a step.
pub(super) struct Readiness {
    layout: Arc<GradientLayout>,
    /// By parameter.
    reports: Vec<GradReports>,
}

#[derive(Clone, Default)]
struct GradReports {
    /// In this round.
    times: usize,
    /// How often it is to be reported in a round.
    due: usize,
    /// Its memory was asked for since the last report.
    asked_for: bool,
    /// The gradient has a value already: later contributions are added.
    written: bool,
    /// Points in streams that were not reached when they were reported.
    events: Vec<Event>,
}

impl Readiness {
    /// Nothing is reported yet; a round has `micro_batches`.
    pub(super) fn new(layout: &Arc<GradientLayout>, micro_batches: usize) -> Self {
        let report = |id| GradReports {
            due: layout.spec(ParamId(id)).contributions * micro_batches,
            ..GradReports::default()
        };
        Self {
            reports: (0..layout.params()).map(report).collect(),
            layout: layout.clone(),
        }
    }

    /// An error that begins with the gradient and its bucket.
    fn misuse(&self, id: ParamId, what: &str) -> ReduceError {
        let (name, bucket) = (&self.layout.spec(id).name, self.layout.bucket_of(id));
        let bucket = bucket.expect("the parameter is known");
        ReduceError::Misuse(format!("gradient of `{name}` (bucket {bucket}) {what}"))
    }

    fn known(&mut self, ParamId(id): ParamId) -> Result<&mut GradReports, ReduceError> {
        let count = self.reports.len();
        let unknown =
            || format!("a gradient of parameter {id} was reported, but there are {count} parameters");
        let report = self.reports.get_mut(id);
        report.ok_or_else(|| ReduceError::Misuse(unknown()))
    }

    /// The memory of a gradient is asked for. After its last report that is an error: it may be on its way to other
    /// ranks. True if the gradient has a value already.
    pub(super) fn ask(&mut self, id: ParamId) -> Result<bool, ReduceError> {
        let report = self.known(id)?;
        if report.times >= report.due {
            return Err(self.misuse(id, "was asked for after it was reported ready"));
        }
        report.asked_for = true;
        Ok(report.written)
    }

    /// The gradient has a value from now on.
    pub(super) fn write(&mut self, id: ParamId) {
        self.reports[id.0].written = true;
    }

    /// One contribution is there once `at` is reached. True if that was the last one of this round. Where memory
    /// `is_lent` for a round, each contribution must have asked for it.
    pub(super) fn add(&mut self, id: ParamId, at: Event, is_lent: bool) -> Result<bool, ReduceError> {
        let report = self.known(id)?;
        report.times += 1;
        let (times, expected) = (report.times, report.due);
        let was_asked_for = std::mem::take(&mut report.asked_for);
        if times > expected {
            return Err(self.misuse(id, &format!("was reported {times} times, expected {expected}")));
        }
        if is_lent && !was_asked_for {
            let what = "was reported, but its memory was not asked for since it was reported last\n  hint: report each contribution once, after it was written";
            return Err(self.misuse(id, what));
        }
        report.written = true;
        if !matches!(at.poll(), Some(Ok(()))) {
            report.events.push(at);
        }
        Ok(times == expected)
    }

    /// A complete gradient is changed once more, until `at`.
    pub(super) fn follow(&mut self, id: ParamId, at: Event) {
        self.reports[id.0].events.push(at);
    }

    /// An error if a contribution of this round is missing.
    pub(super) fn all_there(&self) -> Result<(), ReduceError> {
        let is_short = |id: &&ParamId| self.reports[id.0].times < self.reports[id.0].due;
        let mut short = self.layout.order().iter().filter(is_short);
        let Some(first) = short.next() else {
            return Ok(());
        };
        let (GradReports { times, due, .. }, missing) = (&self.reports[first.0], 1 + short.count());
        let what = format!(
            "was reported {times} times, expected {due}; {missing} gradients are missing in all\n  hint: every parameter must take part in every micro-batch"
        );
        Err(self.misuse(*first, &what))
    }

    /// Reached when the gradients of a unit are there.
    pub(super) fn take_event(&mut self, params: &[ParamId]) -> Event {
        let events = params
            .iter()
            .map(|id| std::mem::take(&mut self.reports[id.0].events));
        all_of(events.flatten())
    }

    /// The next round of these gradients begins, with new values.
    pub(super) fn next_round(&mut self, params: &[ParamId]) {
        for id in params {
            let report = &mut self.reports[id.0];
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
