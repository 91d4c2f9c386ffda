//! The row of a schedule in training: reads samples, adds up losses, passes gradients on, and measures its actions.

use std::time::{Duration, Instant};

use super::enqueued_step::StepTimes;
use crate::config::TrainConfig;
use crate::data::Loader;
use crate::mesh::Axis;
use crate::model::{GradSink, Hooks, NoHooks, SampleKey};
use crate::parallel::Step;
use crate::parallel::pipeline::{Action, ActionKind};
use crate::session::Session;
use crate::timeline::Kind;
use crate::train::TrainError;
use crate::train::rank_table::StepTable;
use crate::train::replica::{MicroBatch, Replica};
use crate::train::run_row::{EnqueuedAction, RowCaller};

/// The samples of a micro-batch of this rank.
pub(super) fn sample_key(config: &TrainConfig, loader: &Loader, step: u64, micro_batch: u64) -> SampleKey {
    SampleKey {
        seed: config.run.seed,
        first: loader.first_sample(step, micro_batch),
    }
}

/// The row of a step while it runs.
pub(super) struct TrainingRow<'a> {
    pub(super) config: &'a TrainConfig,
    pub(super) session: &'a Session,
    pub(super) step_table: &'a StepTable,
    pub(super) loader: &'a Loader,
    pub(super) step: u64,
    pub(super) micro_batches: u64,
    pub(super) stages: usize,
    /// Micro-batches whose losses are computed.
    pub(super) losses: u64,
    /// Positions of this rank's losses so far.
    pub(super) positions: usize,
    /// Time of reduction that nothing hid, before the action that runs.
    pub(super) exposed_before: Duration,
    pub(super) hooks: NoHooks,
    pub(super) grads: Step<'a>,
    pub(super) times: &'a mut StepTimes,
}

impl RowCaller for TrainingRow<'_> {
    fn before(&mut self, replica: &Replica, action: Action) -> Result<(), TrainError> {
        replica.world.check()?;
        if self.stages > 1 && action.kind.is_compute() {
            self.session.set_activity(|| replica.plan.in_words(action));
        }
        self.exposed_before = self.grads.times().exposed;
        Ok(())
    }

    fn read(&mut self, replica: &Replica, action: Action, batch: &mut MicroBatch) -> Result<(), TrainError> {
        let (began, span) = (Instant::now(), replica.world.begin_span());
        let MicroBatch { inputs, targets } = batch;
        (self.loader).fill(self.step, action.micro_batch as u64, inputs, targets)?;
        (replica.world).end_span(span, Kind::Data, || self.name_of(action, "data"));
        self.times.data += began.elapsed();
        Ok(())
    }

    fn samples(&self, micro_batch: usize) -> SampleKey {
        sample_key(self.config, self.loader, self.step, micro_batch as u64)
    }

    fn sinks(&mut self) -> (&mut dyn Hooks, &mut dyn GradSink) {
        (&mut self.hooks, &mut self.grads)
    }

    fn after(&mut self, replica: &Replica, enqueued: EnqueuedAction) -> Result<(), TrainError> {
        let action = enqueued.action;
        if let Some(losses) = enqueued.losses {
            if replica.counts_losses() {
                self.step_table.add(&losses, self.losses == 0);
                self.positions += enqueued.positions;
            }
            self.losses += 1;
        }
        let waited = self.times.account(replica.take_times());
        let waited = waited + (self.grads.times().exposed).saturating_sub(self.exposed_before);
        let took = enqueued.began.elapsed().saturating_sub(waited);
        if action.kind.is_compute() {
            let (kind, sum) = match action.kind {
                ActionKind::Forward => (Kind::Forward, &mut self.times.forward),
                _ => (Kind::Backward, &mut self.times.backward),
            };
            *sum += took;
            let noun = action.kind.noun();
            (replica.world).end_span(enqueued.span, kind, || self.name_of(action, noun));
        }
        Ok(())
    }

    fn at_end(&mut self, replica: &Replica) {
        if self.stages > 1 {
            let rank = replica.world.mesh.index(&[Axis::Pipeline]);
            (self.session).set_activity(|| replica.plan.behind_row_in_words(rank));
        }
    }
}

impl TrainingRow<'_> {
    /// Name of a span. In a pipeline it begins with the action as schedules write it.
    fn name_of(&self, action: Action, what: &str) -> String {
        let m = action.micro_batch;
        match (self.stages, self.micro_batches) {
            (1, 1) => what.to_owned(),
            (1, _) => format!("micro-batch {}: {what}", m + 1),
            _ => format!("{action}: stage {}, micro-batch {m}: {what}", action.stage),
        }
    }
}
