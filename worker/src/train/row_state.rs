//! What a rank keeps while it runs a row of a schedule, and what each kind of action does with activations.
//!
//! Between its actions, a micro-batch in flight has a [`ChunkState`] for each chunk. A stage hands its result to the next
//! stage directly if both are on this rank, and otherwise sends it. What a rank leases and releases, and when, follows from
//! the row alone. That is why a rehearsal finds the memory that a run needs.

use std::collections::HashMap;
use std::sync::Arc;

use crate::device::DeviceError;
use crate::model::{Activation, ChunkState, GradSink, Hooks, Passes};
use crate::parallel::pipeline::{Action, ActionKind, PipelinePlan};
use crate::parallel::{Arrival, StageMessages};

/// What a row is run for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowPurpose {
    /// Both passes.
    Training,
    /// Forward only: nothing is kept.
    Evaluation,
    /// Both passes. I does the work of B, and W does nothing.
    Inspection,
}

/// The micro-batches of a row that are in flight, and the messages between stages.
pub(crate) struct RowState {
    plan: Arc<PipelinePlan>,
    pub(crate) messages: StageMessages,
    purpose: RowPurpose,
    /// By stage and micro-batch: between forward and the end of backward.
    in_flight: HashMap<(usize, usize), ChunkState>,
    /// By the F, B or I that takes it (B as I).
    inputs: HashMap<Action, Arrival>,
    /// By the F, B or I that made it (B as I).
    to_send: HashMap<Action, Activation>,
}

impl RowState {
    pub(crate) fn new(plan: Arc<PipelinePlan>, messages: StageMessages) -> Self {
        Self {
            plan,
            messages,
            purpose: RowPurpose::Training,
            in_flight: HashMap::new(),
            inputs: HashMap::new(),
            to_send: HashMap::new(),
        }
    }

    /// This rank along the pipeline.
    pub(crate) fn rank(&self) -> usize {
        self.messages.rank()
    }

    /// Prepares for a row. Drops what a row that ended with an error has left behind.
    pub(crate) fn begin(&mut self, purpose: RowPurpose) {
        self.purpose = purpose;
        self.in_flight.clear();
        self.inputs.clear();
        self.to_send.clear();
        self.messages.begin();
    }

    /// True if this action takes tokens: it is a forward over the first stage.
    pub(crate) fn takes_tokens(action: Action) -> bool {
        action.kind == ActionKind::Forward && action.stage == 0
    }

    /// True if this action takes targets and makes losses: it is a forward over the last stage.
    pub(crate) fn makes_losses(&self, action: Action) -> bool {
        action.kind == ActionKind::Forward && action.stage == self.last_stage()
    }

    /// True if nothing reads the micro-batch's tokens after this action.
    pub(crate) fn ends_micro_batch(&self, action: Action) -> bool {
        match self.purpose {
            RowPurpose::Training => action.kind.makes_weight_gradient(),
            RowPurpose::Evaluation => action.kind == ActionKind::Forward,
            RowPurpose::Inspection => action.kind.makes_input_gradient(),
        }
    }

    /// Waits, in the stream that computes, for what another rank makes for an action.
    pub(crate) fn await_input(&mut self, action: Action) -> Result<(), DeviceError> {
        // B takes its input as I.
        if let Some(consumer) = action.parts().next()
            && let Some(arrival) = self.inputs.remove(&consumer)
        {
            let activation = self.messages.arrived(arrival)?;
            self.inputs.insert(consumer, Arrival::local(activation));
        }
        Ok(())
    }

    /// Carries out an action. `tokens` are for a forward over the first stage. Returns the losses of a forward over the
    /// last stage.
    pub(crate) fn carry_out(
        &mut self,
        action: Action,
        passes: &Passes<'_>,
        tokens: Option<Activation>,
        hooks: &mut dyn Hooks,
        grads: &mut dyn GradSink,
    ) -> Result<Option<Activation>, DeviceError> {
        match action.kind {
            ActionKind::Forward => return self.forward(action, passes, tokens, hooks),
            ActionKind::Backward | ActionKind::InputGradient => {
                self.backward(action, passes, hooks, grads)?;
            }
            ActionKind::WeightGradient if self.purpose == RowPurpose::Training => {
                let mut state = self.take_in_flight(action);
                passes.weight_gradients(&mut state, grads)?;
            }
            ActionKind::SendActivation | ActionKind::SendGradient => {
                let producer = action.with(end_of(action.kind));
                let activation = self.to_send.remove(&producer);
                self.messages.send(
                    action,
                    activation.expect("the schedule was checked: F or I comes first"),
                )?;
            }
            ActionKind::ReceiveActivation | ActionKind::ReceiveGradient => {
                let arrival = self.messages.receive(action, passes.ctx.pool)?;
                self.inputs.insert(action.with(end_of(action.kind)), arrival);
            }
            ActionKind::WeightGradient => {}
        }
        Ok(None)
    }

    /// Ends a row after its last action.
    pub(crate) fn finish(&mut self) -> Result<(), DeviceError> {
        self.messages.finish()?;
        let left = [self.in_flight.len(), self.inputs.len(), self.to_send.len()];
        assert_eq!(
            left, [0; 3],
            "the schedule was checked: a row ends every micro-batch"
        );
        Ok(())
    }

    fn forward(
        &mut self,
        action: Action,
        passes: &Passes<'_>,
        tokens: Option<Activation>,
        hooks: &mut dyn Hooks,
    ) -> Result<Option<Activation>, DeviceError> {
        let input = match action.stage {
            0 => tokens.expect("the caller has read them"),
            _ => self.take_input(action)?,
        };
        let chunk = passes.model.chunks[self.chunk(action)].clone();
        let made = if self.purpose == RowPurpose::Evaluation {
            passes.evaluate(chunk, &input, hooks)?
        } else {
            let mut state = ChunkState::new(chunk);
            let made = passes.forward(&mut state, &input, hooks)?;
            self.in_flight.insert(key(action), state);
            made
        };
        if self.makes_losses(action) {
            return Ok(Some(made));
        }
        self.hand_on(action, made);
        Ok(None)
    }

    /// All of backward, or its first half.
    fn backward(
        &mut self,
        action: Action,
        passes: &Passes<'_>,
        hooks: &mut dyn Hooks,
        grads: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        let input_gradient = action.with(ActionKind::InputGradient);
        let is_last = action.stage == self.last_stage();
        let dout = (!is_last).then(|| self.take_input(input_gradient)).transpose()?;
        let mut state = self.take_in_flight(action);
        let is_half = action.kind == ActionKind::InputGradient && self.purpose == RowPurpose::Training;
        if is_half {
            state.defer_weight_gradients();
        }
        let dinput = passes.backward(&mut state, dout, hooks, grads)?;
        if is_half {
            self.in_flight.insert(key(action), state);
        }
        if let (Some(dinput), true) = (dinput, action.stage > 0) {
            self.hand_on(input_gradient, dinput);
        }
        Ok(())
    }

    /// Gives the result of F to the next stage, or that of I to the stage before: directly, or in the next send.
    fn hand_on(&mut self, made_by: Action, activation: Activation) {
        let stage = match made_by.kind {
            ActionKind::Forward => made_by.stage + 1,
            _ => made_by.stage - 1,
        };
        if self.plan.placement().rank_of(stage) == made_by.rank {
            let consumer = Action { stage, ..made_by };
            self.inputs.insert(consumer, Arrival::local(activation));
        } else {
            self.to_send.insert(made_by, activation);
        }
    }

    fn take_input(&mut self, consumer: Action) -> Result<Activation, DeviceError> {
        let arrival = self.inputs.remove(&consumer);
        self.messages
            .arrived(arrival.expect("the schedule was checked: the input comes first"))
    }

    fn take_in_flight(&mut self, action: Action) -> ChunkState {
        let state = self.in_flight.remove(&key(action));
        state.expect("the schedule was checked: F comes first")
    }

    /// Which of this rank's chunks a stage is.
    fn chunk(&self, action: Action) -> usize {
        let mut stages = self.plan.placement().stages_of(action.rank);
        stages
            .position(|stage| stage == action.stage)
            .expect("the action is of this rank")
    }

    fn last_stage(&self) -> usize {
        self.plan.placement().stages() - 1
    }
}

fn key(action: Action) -> (usize, usize) {
    (action.stage, action.micro_batch)
}

/// F or I: the action that made what is sent, or that takes what is received.
const fn end_of(message: ActionKind) -> ActionKind {
    match message {
        ActionKind::SendActivation | ActionKind::ReceiveActivation => ActionKind::Forward,
        _ => ActionKind::InputGradient,
    }
}
