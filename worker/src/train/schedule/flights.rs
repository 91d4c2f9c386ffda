//! A rank's row of a schedule, action by action: the only place that knows what each kind of action does with activations.
//! Training, evaluation and the search for numbers that are not finite run rows here, and so does the rehearsal of memory:
//! what it leases and lets go of, and when, follows from the row alone.
//!
//! Between its actions a micro-batch is a [`Flight`] of each chunk. What one stage makes for the next is either handed on,
//! where that is on the same rank, or sent; what another rank makes is received.

use std::collections::HashMap;
use std::sync::Arc;

use crate::device::DeviceError;
use crate::model::{Activation, ActivationPool, Flight, GradSink, Hooks, Passes};
use crate::parallel::pipeline::{Action, ActionKind, PipelinePlan};
use crate::parallel::{Arrival, EdgeQueues};

/// What a row is run for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowPurpose {
    /// Both passes, as the row has them.
    Training,
    /// Forward only: nothing is kept.
    Evaluation,
    /// Both passes, with the whole of backward where the row has its first half.
    Inspection,
}

/// The micro-batches of a row on their way.
pub(crate) struct Flights {
    plan: Arc<PipelinePlan>,
    pub(crate) edges: EdgeQueues,
    purpose: RowPurpose,
    /// By stage and micro-batch: between forward and the end of backward.
    in_flight: HashMap<(usize, usize), Flight>,
    /// By the F, B or I that takes it (B as I).
    inputs: HashMap<Action, Arrival>,
    /// By the F, B or I that made it (B as I).
    to_send: HashMap<Action, Activation>,
}

impl Flights {
    /// `edges` are between the stages of the plan.
    pub(crate) fn new(plan: Arc<PipelinePlan>, edges: EdgeQueues) -> Self {
        Self {
            plan,
            edges,
            purpose: RowPurpose::Training,
            in_flight: HashMap::new(),
            inputs: HashMap::new(),
            to_send: HashMap::new(),
        }
    }

    /// This rank along the pipeline.
    pub(crate) fn rank(&self) -> usize {
        self.edges.rank()
    }

    /// Before the first action of a row. What an earlier row has left behind by an error is dropped.
    pub(crate) fn begin(
        &mut self,
        row: &[Action],
        purpose: RowPurpose,
        pool: &ActivationPool,
    ) -> Result<(), DeviceError> {
        self.purpose = purpose;
        self.in_flight.clear();
        self.inputs.clear();
        self.to_send.clear();
        self.edges.begin(row, pool)
    }

    /// True if this action takes tokens: it is a forward over the first stage.
    pub(crate) fn takes_tokens(action: Action) -> bool {
        action.kind == ActionKind::Forward && action.stage == 0
    }

    /// True if this action takes targets and makes losses: it is a forward over the last stage.
    pub(crate) fn makes_losses(&self, action: Action) -> bool {
        action.kind == ActionKind::Forward && action.stage == self.last_stage()
    }

    /// True if tokens are not needed any more behind this action.
    pub(crate) fn ends_flight(&self, action: Action) -> bool {
        match self.purpose {
            RowPurpose::Training => action.kind.makes_weight_gradient(),
            RowPurpose::Evaluation => action.kind == ActionKind::Forward,
            RowPurpose::Inspection => action.kind.makes_input_gradient(),
        }
    }

    /// Does it. `tokens` are for an action that takes some. Returns the losses, if it makes some.
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
                let mut flight = self.take_flight(action);
                passes.weight_gradients(&mut flight, grads)?;
            }
            ActionKind::SendActivation | ActionKind::SendGradient => {
                let producer = action.with(made_by(action.kind));
                let activation = self.to_send.remove(&producer);
                self.edges
                    .send(action, activation.expect("it was made before, as was checked"))?;
            }
            ActionKind::ReceiveActivation | ActionKind::ReceiveGradient => {
                let arrival = self.edges.receive(action, passes.ctx.pool)?;
                self.inputs.insert(action.with(made_by(action.kind)), arrival);
            }
            // Blocks gather their parameters themselves, and the reducer knows when a gradient is complete.
            ActionKind::WeightGradient
            | ActionKind::Unshard
            | ActionKind::Reshard
            | ActionKind::ReduceGradient
            | ActionKind::Step => {}
        }
        Ok(None)
    }

    /// Behind the last action.
    pub(crate) fn finish(&mut self) -> Result<(), DeviceError> {
        self.edges.finish()?;
        let left = [self.in_flight.len(), self.inputs.len(), self.to_send.len()];
        assert_eq!(left, [0; 3], "a row was checked to end what it begins");
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
            let mut flight = Flight::over(chunk);
            let made = passes.forward(&mut flight, &input, hooks)?;
            self.in_flight.insert(key(action), flight);
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
        let dout = if action.stage == self.last_stage() {
            None
        } else {
            Some(self.take_input(input_gradient)?)
        };
        let mut flight = self.take_flight(action);
        let is_half = action.kind == ActionKind::InputGradient && self.purpose == RowPurpose::Training;
        let dinput = if is_half {
            let dinput = passes.input_gradient(&mut flight, dout, hooks, grads)?;
            self.in_flight.insert(key(action), flight);
            dinput
        } else {
            passes.backward(&mut flight, dout, hooks, grads)?
        };
        if let (Some(dinput), true) = (dinput, action.stage > 0) {
            self.hand_on(input_gradient, dinput);
        }
        Ok(())
    }

    /// Gives what F or I has made to the next stage, or the one before, at once or to be sent.
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
        self.edges
            .arrived(arrival.expect("it came before, as was checked"))
    }

    fn take_flight(&mut self, action: Action) -> Flight {
        let flight = self.in_flight.remove(&key(action));
        flight.expect("it went forward before, as was checked")
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
    (action.stage, action.micro_batch.unwrap_or_default())
}

/// F or I, whose result is sent, or that takes what is received.
const fn made_by(message: ActionKind) -> ActionKind {
    match message {
        ActionKind::SendActivation | ActionKind::ReceiveActivation => ActionKind::Forward,
        _ => ActionKind::InputGradient,
    }
}
