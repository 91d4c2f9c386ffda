//! What is known of the gradients of one step: which were reported, how often, and when they are there.

use super::{GradientLayout, ReduceError};
use crate::device::Event;
use crate::model::ParamId;

/// A micro-batch of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    /// From 0.
    pub(super) micro_batch: usize,
    /// How many the step has.
    pub(super) accumulation: usize,
}

impl Turn {
    pub(super) fn is_first(self) -> bool {
        self.micro_batch == 0
    }

    pub(super) fn is_last(self) -> bool {
        self.micro_batch + 1 == self.accumulation
    }

    /// `what` was done in it, which is wrong.
    pub(super) fn wrong(self, what: &'static str) -> ReduceError {
        ReduceError::MicroBatches {
            accumulation: self.accumulation,
            micro_batch: self.micro_batch,
            what,
        }
    }
}

/// See the module.
pub(super) struct Reports(Vec<Report>);

#[derive(Clone, Default)]
struct Report {
    /// In the current micro-batch.
    times: usize,
    /// The gradient has a value already: later contributions are added.
    written: bool,
    /// Points in streams that were not reached when they were reported.
    events: Vec<Event>,
}

impl Reports {
    pub(super) fn new(layout: &GradientLayout) -> Self {
        Self(vec![Report::default(); layout.params()])
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

    /// True if all contributions of this micro-batch were reported.
    pub(super) fn is_complete(&self, id: ParamId, layout: &GradientLayout) -> bool {
        self.0[id.0].times >= layout.spec(id).contributions
    }

    /// One contribution is there once `at` is reached.
    pub(super) fn add(
        &mut self,
        id: ParamId,
        at: Event,
        layout: &GradientLayout,
        turn: Turn,
    ) -> Result<(), ReduceError> {
        self.known(id)?;
        let expected = layout.spec(id).contributions;
        let report = &mut self.0[id.0];
        report.times += 1;
        report.written = true;
        if !matches!(at.poll(), Some(Ok(()))) {
            report.events.push(at);
        }
        let times = report.times;
        if times <= expected {
            return Ok(());
        }
        let (param, bucket) = layout.place(id);
        Err(ReduceError::Double {
            param,
            bucket,
            micro_batch: turn.micro_batch,
            times,
            expected,
        })
    }

    /// An error if a contribution of this micro-batch is missing.
    pub(super) fn all_there(&self, layout: &GradientLayout, turn: Turn) -> Result<(), ReduceError> {
        let short = |id: &&ParamId| !self.is_complete(**id, layout);
        let Some(first) = layout.order().iter().find(short) else {
            return Ok(());
        };
        let (param, bucket) = layout.place(*first);
        Err(ReduceError::Missing {
            param,
            bucket,
            micro_batch: turn.micro_batch,
            times: self.0[first.0].times,
            expected: layout.spec(*first).contributions,
            missing: layout.order().iter().filter(short).count(),
        })
    }

    /// When the gradients of a unit are there.
    pub(super) fn take_events(&mut self, params: &[ParamId]) -> Vec<Event> {
        let events = params.iter().map(|id| std::mem::take(&mut self.0[id.0].events));
        events.flatten().collect()
    }

    /// The next micro-batch adds to the same gradients, or, if they are `gone`, begins new ones.
    pub(super) fn next_micro_batch(&mut self, gone: bool) {
        if gone {
            return self.0.fill(Report::default());
        }
        for report in &mut self.0 {
            report.times = 0;
        }
    }
}
