//! What is known of the gradients of one step: how often each was reported, and when it is there.
//!
//! A gradient is complete when its parameter has been reported contributions × micro-batches times, in whatever order
//! micro-batches run backward: a block of a pipeline may have done all of them before another has begun. Where every
//! micro-batch is reduced by itself, a step has as many rounds, and a gradient is complete in each.

use super::{GradientLayout, ReduceError};
use crate::device::Event;
use crate::model::ParamId;

/// See the module.
pub(super) struct Reports(Vec<Report>);

#[derive(Clone, Default)]
struct Report {
    /// In this round.
    times: usize,
    /// How often it is to be reported in a round.
    due: usize,
    /// The gradient has a value already: later contributions are added.
    written: bool,
    /// Points in streams that were not reached when they were reported.
    events: Vec<Event>,
}

impl Reports {
    /// For rounds of so many micro-batches.
    pub(super) fn new(layout: &GradientLayout, micro_batches: usize) -> Self {
        let due = |id| layout.spec(ParamId(id)).contributions * micro_batches;
        let report = |id| Report {
            due: due(id),
            ..Report::default()
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
        let (param, bucket) = layout.place(id);
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
        let (param, bucket) = layout.place(*first);
        let report = &self.0[first.0];
        Err(ReduceError::Missing {
            param,
            bucket,
            times: report.times,
            expected: report.due,
            missing: layout.order().iter().filter(short).count(),
        })
    }

    /// When the gradients of a unit are there.
    pub(super) fn take_events(&mut self, params: &[ParamId]) -> Vec<Event> {
        let events = params.iter().map(|id| std::mem::take(&mut self.0[id.0].events));
        events.flatten().collect()
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
