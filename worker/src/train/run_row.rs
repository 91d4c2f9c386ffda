//! The only loop over a rank's row of a schedule. Training, evaluation, the search for numbers that are not finite, and
//! rehearsals on an idle device implement [`RowCaller`] and run it. Without a pipeline, a row is forward and backward of
//! each micro-batch.

use std::time::Instant;

use super::TrainError;
use super::replica::{MicroBatch, Replica};
use super::row_state::RowPurpose;
use crate::device::{DeviceError, Event};
use crate::model::{Activation, GradSink, GradSlot, Hooks, NoHooks, ParamId, SampleKey};
use crate::parallel::pipeline::Action;
use crate::parallel::{ArenaShare, Reducer};
use crate::timeline::Mark;

/// An action that is in the stream.
pub(crate) struct EnqueuedAction {
    pub(crate) action: Action,
    /// When it began to wait for its input.
    pub(crate) began: Instant,
    /// Its span in the timeline, if that is open.
    pub(crate) span: Option<Mark>,
    /// The loss of each position, on the device, if it is a forward over the last stage.
    pub(crate) losses: Option<Activation>,
    /// How many of them count: their targets are not ignored.
    pub(crate) positions: usize,
}

/// Provides the tokens of a row, and takes its losses and gradients.
pub(crate) trait RowCaller {
    /// An action is about to begin. An error ends the row.
    fn before(&mut self, _replica: &Replica, _action: Action) -> Result<(), TrainError> {
        Ok(())
    }

    /// Reads the micro-batch of a forward over the first or the last stage. Without it, all tokens are 0.
    fn read(
        &mut self,
        _replica: &Replica,
        _action: Action,
        _batch: &mut MicroBatch,
    ) -> Result<(), TrainError> {
        Ok(())
    }

    /// The samples of a micro-batch, which dropout depends on.
    fn samples(&self, _micro_batch: usize) -> SampleKey {
        SampleKey::default()
    }

    /// What accompanies the passes, and what takes the gradients.
    fn sinks(&mut self) -> (&mut dyn Hooks, &mut dyn GradSink);

    /// An action is in the stream.
    fn after(&mut self, _replica: &Replica, _enqueued: EnqueuedAction) -> Result<(), TrainError> {
        Ok(())
    }

    /// The last action is in the stream. Messages of the row may still be on their way.
    fn at_end(&mut self, _replica: &Replica) {}
}

/// Runs this rank's row of a step, or of an evaluation, of `micro_batches`.
pub(crate) fn run_row(
    replica: &mut Replica,
    purpose: RowPurpose,
    micro_batches: usize,
    caller: &mut dyn RowCaller,
) -> Result<(), TrainError> {
    let row = replica.row(purpose, micro_batches);
    let mut batch = MicroBatch::new(replica.shape().iter().product());
    replica.begin(purpose);
    for action in row {
        caller.before(replica, action)?;
        let takes_batch = replica.takes_batch(action);
        if takes_batch {
            caller.read(replica, action, &mut batch)?;
        }
        let began = Instant::now();
        replica.await_input(action)?;
        let span = replica.world.begin_span();
        let samples = caller.samples(action.micro_batch);
        let (hooks, grads) = caller.sinks();
        let losses = replica.carry_out(action, takes_batch.then_some(&batch), samples, hooks, grads)?;
        let enqueued = EnqueuedAction {
            action,
            began,
            span,
            positions: losses.as_ref().map_or(0, |_| batch.counted()),
            losses,
        };
        caller.after(replica, enqueued)?;
    }
    caller.at_end(replica);
    replica.finish()
}

/// Rehearses the passes and the reduction of a step on an idle replica. `on_losses` gets the losses of each micro-batch.
pub(crate) fn rehearse_step(
    replica: &mut Replica,
    reducer: &mut Reducer,
    micro_batches: usize,
    on_losses: &dyn Fn(&Activation),
) -> Result<ArenaShare, TrainError> {
    replica.parameters.updated()?;
    let mut grads = reducer.step(micro_batches)?;
    let mut caller = Rehearsal {
        hooks: NoHooks,
        grads: &mut grads,
        on_losses,
    };
    run_row(replica, RowPurpose::Training, micro_batches, &mut caller)?;
    let reduced = grads.finish_on(replica.world.compute.stream, replica.world.deadline())?;
    Ok(reduced.sums())
}

/// Rehearses an evaluation on an idle replica.
pub(crate) fn rehearse_evaluation(replica: &mut Replica, micro_batches: usize) -> Result<(), TrainError> {
    let mut caller = Rehearsal {
        hooks: NoHooks,
        grads: &mut NoGradients,
        on_losses: &|_| {},
    };
    run_row(replica, RowPurpose::Evaluation, micro_batches, &mut caller)
}

struct Rehearsal<'a> {
    hooks: NoHooks,
    grads: &'a mut dyn GradSink,
    on_losses: &'a dyn Fn(&Activation),
}

impl RowCaller for Rehearsal<'_> {
    fn sinks(&mut self) -> (&mut dyn Hooks, &mut dyn GradSink) {
        (&mut self.hooks, self.grads)
    }

    fn after(&mut self, _replica: &Replica, enqueued: EnqueuedAction) -> Result<(), TrainError> {
        enqueued.losses.iter().for_each(self.on_losses);
        Ok(())
    }
}

/// The gradients of an evaluation, which has no backward.
pub(crate) struct NoGradients;

impl GradSink for NoGradients {
    fn grad(&mut self, _id: ParamId) -> Result<GradSlot, DeviceError> {
        unreachable!("an evaluation has no backward")
    }

    fn contributed(&mut self, _id: ParamId, _at: Event) -> Result<(), DeviceError> {
        unreachable!("an evaluation has no backward")
    }
}
