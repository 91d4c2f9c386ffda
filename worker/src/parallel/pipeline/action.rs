//! A schedule: for each rank, a row of actions.
//!
//! The text of an action is that of PyTorch's `torch.distributed.pipelining`: stage, kind, micro-batch. `2F1` is the
//! forward of micro-batch 1 over stage 2, `0SEND_F1` sends what stage 0 made of it.

use std::collections::HashMap;
use std::fmt;

use super::stages::Placement;

/// What an action does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ActionKind {
    /// F: forward of a micro-batch over a stage.
    Forward,
    /// B: backward, both gradients at once.
    Backward,
    /// I: the half of backward that makes the gradient of the stage's input.
    InputGradient,
    /// W: the half of backward that makes the gradients of the stage's weights.
    WeightGradient,
    /// Sends the stage's output to the next stage.
    SendActivation,
    /// Receives the stage's input from the stage before.
    ReceiveActivation,
    /// Sends the gradient of the stage's input to the stage before.
    SendGradient,
    /// Receives the gradient of the stage's output from the next stage.
    ReceiveGradient,
}

impl ActionKind {
    /// The kind in the text of an action.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "F",
            Self::Backward => "B",
            Self::InputGradient => "I",
            Self::WeightGradient => "W",
            Self::SendActivation => "SEND_F",
            Self::ReceiveActivation => "RECV_F",
            Self::SendGradient => "SEND_B",
            Self::ReceiveGradient => "RECV_B",
        }
    }

    /// The kind in a sentence.
    pub const fn noun(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::InputGradient => "input gradient",
            Self::WeightGradient => "weight gradients",
            _ => self.name(),
        }
    }

    /// Whether it computes: F, B, I or W. The other kinds send or receive.
    pub const fn is_compute(self) -> bool {
        matches!(
            self,
            Self::Forward | Self::Backward | Self::InputGradient | Self::WeightGradient
        )
    }

    /// Whether it computes, sends or receives a gradient.
    pub const fn is_of_backward(self) -> bool {
        !matches!(
            self,
            Self::Forward | Self::SendActivation | Self::ReceiveActivation
        )
    }

    /// Whether it makes the gradient of the stage's input: B or I.
    pub const fn makes_input_gradient(self) -> bool {
        matches!(self, Self::Backward | Self::InputGradient)
    }

    /// Whether it makes the gradients of the stage's weights, and so frees what forward kept: B or W.
    pub const fn makes_weight_gradient(self) -> bool {
        matches!(self, Self::Backward | Self::WeightGradient)
    }

    /// Whether it receives.
    pub const fn is_receive(self) -> bool {
        matches!(self, Self::ReceiveActivation | Self::ReceiveGradient)
    }
}

/// One thing that a rank does in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// Rank that does it, along the pipeline's axis.
    pub rank: usize,
    /// Stage that it computes, sends from or receives for.
    pub stage: usize,
    /// What it does.
    pub kind: ActionKind,
    /// Micro-batch of the step, from 0.
    pub micro_batch: usize,
}

impl Action {
    /// The action of a neighbouring stage whose result F, B or I needs: F of the stage before, or I of the next stage (a B
    /// counts as I). `None` at the ends of the pipeline, and for other kinds.
    pub fn input(self, placement: &Placement) -> Option<Self> {
        let (stage, kind) = match self.kind {
            ActionKind::Forward => (self.stage.checked_sub(1)?, ActionKind::Forward),
            kind if kind.makes_input_gradient() => (self.stage + 1, ActionKind::InputGradient),
            _ => return None,
        };
        self.on_stage(stage, kind, placement)
    }

    /// I and W for a B; other actions are their own only part.
    pub fn parts(self) -> impl Iterator<Item = Self> {
        let (first, second) = match self.kind {
            ActionKind::Backward => (ActionKind::InputGradient, Some(ActionKind::WeightGradient)),
            kind => (kind, None),
        };
        let kinds = std::iter::once(first).chain(second);
        kinds.map(move |kind| self.with(kind))
    }

    /// The message that brings F, B or I its input, or that a send or a receive is one end of. `None` if there is no
    /// input, or if the same rank makes it.
    pub fn transfer(self, placement: &Placement) -> Option<Transfer> {
        use ActionKind::{
            Forward, InputGradient, ReceiveActivation, ReceiveGradient, SendActivation, SendGradient,
        };
        let consumer = match self.kind {
            SendActivation => self.on_stage(self.stage + 1, Forward, placement)?,
            ReceiveActivation => self.on_stage(self.stage, Forward, placement)?,
            SendGradient => self.on_stage(self.stage.checked_sub(1)?, InputGradient, placement)?,
            ReceiveGradient => self.on_stage(self.stage, InputGradient, placement)?,
            _ => self,
        };
        let producer = consumer.input(placement)?;
        let (send, receive) = match consumer.kind {
            Forward => (SendActivation, ReceiveActivation),
            _ => (SendGradient, ReceiveGradient),
        };
        (producer.rank != consumer.rank).then_some(Transfer {
            producer,
            send: producer.with(send),
            receive: consumer.with(receive),
        })
    }

    /// The same stage and micro-batch with another kind.
    #[must_use]
    pub const fn with(self, kind: ActionKind) -> Self {
        Self { kind, ..self }
    }

    /// The same micro-batch on a stage, if there is such a stage.
    fn on_stage(self, stage: usize, kind: ActionKind, placement: &Placement) -> Option<Self> {
        (stage < placement.stages()).then(|| Self {
            rank: placement.rank_of(stage),
            stage,
            kind,
            ..self
        })
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage, self.kind.name(), self.micro_batch)
    }
}

/// A message from one rank to another, by its two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Transfer {
    /// F or I, whose result is sent.
    pub producer: Action,
    /// On the rank that sends.
    pub send: Action,
    /// On the rank that receives.
    pub receive: Action,
}

impl Transfer {
    /// The edge that the message goes over.
    pub fn edge(&self) -> Edge {
        Edge {
            from: self.send.rank,
            to: self.receive.rank,
            is_gradient: self.send.kind == ActionKind::SendGradient,
        }
    }
}

/// A directed edge between two ranks, for activations or for gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Edge {
    /// Rank that sends.
    pub from: usize,
    /// Rank that receives.
    pub to: usize,
    /// Gradients, and not activations.
    pub is_gradient: bool,
}

/// What all ranks of a pipeline do in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    placement: Placement,
    micro_batches: usize,
    rows: Vec<Vec<Action>>,
}

impl Schedule {
    /// Puts a schedule together, without any check but that there is one row for each rank.
    pub fn new(placement: Placement, micro_batches: usize, rows: Vec<Vec<Action>>) -> Self {
        assert_eq!(rows.len(), placement.ranks(), "one row for each rank");
        Self {
            placement,
            micro_batches,
            rows,
        }
    }

    /// Which rank holds which stage.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Micro-batches of a step.
    pub fn micro_batches(&self) -> usize {
        self.micro_batches
    }

    /// The actions of each rank, in the order in which the rank runs them.
    pub fn rows(&self) -> &[Vec<Action>] {
        &self.rows
    }

    /// B for an I or a W, where that stage has B and no halves of this micro-batch: how messages name it.
    pub(super) fn as_written(&self, action: Action) -> Action {
        let whole = action.with(ActionKind::Backward);
        if !whole.parts().any(|half| half == action) {
            return action;
        }
        let row = &self.rows[action.rank];
        let is_half = |other: &Action| whole.parts().any(|half| half == *other);
        let is_whole = |other: &Action| (other.stage, other.kind) == (whole.stage, whole.kind);
        if row.iter().any(is_whole) && !row.iter().any(is_half) {
            whole
        } else {
            action
        }
    }

    /// Its messages, by the F or I that makes them.
    pub(super) fn sends(&self) -> HashMap<Action, Transfer> {
        let actions = self.rows.iter().flatten();
        let actions = actions.filter(|action| action.kind.is_compute());
        let transfers = actions.filter_map(|action| action.transfer(&self.placement));
        transfers.map(|transfer| (transfer.producer, transfer)).collect()
    }

    /// Whether sends and receives are part of it. Without them data is where it is needed as soon as it is made.
    pub fn has_transfers(&self) -> bool {
        let mut actions = self.rows.iter().flatten();
        actions.any(|action| !action.kind.is_compute())
    }

    /// The same with other rows, each made of a rank and its row.
    pub(super) fn map_rows(&self, change: impl FnMut((usize, &Vec<Action>)) -> Vec<Action>) -> Self {
        let rows = self.rows.iter().enumerate().map(change).collect();
        Self::new(self.placement.clone(), self.micro_batches, rows)
    }
}

/// A line for each rank, with its actions separated by commas, as PyTorch's pipelining writes them.
impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rows.iter().try_for_each(|row| {
            let actions: Vec<String> = row.iter().map(ToString::to_string).collect();
            writeln!(f, "{}", actions.join(","))
        })
    }
}
