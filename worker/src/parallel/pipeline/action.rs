//! What a schedule is made of: actions, cells of one action or of two that overlap, and a row of cells for each rank.
//!
//! The text of an action is that of PyTorch's `torch.distributed.pipelining`: stage, kind, micro-batch. `2F1` is the
//! forward of micro-batch 1 over stage 2, `0SEND_F1` sends what stage 0 made of it, `3UNSHARD` gathers the weights of
//! stage 3.

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
    /// Gathers the stage's weights.
    Unshard,
    /// Releases the stage's gathered weights.
    Reshard,
    /// Reduces the gradients of the stage's weights over the ranks that hold copies of them.
    ReduceGradient,
    /// Updates the stage's weights. PyTorch's files have no such action.
    Step,
}

impl ActionKind {
    /// All of them, as the text of an action names them.
    pub const NAMES: [(Self, &'static str); 12] = [
        (Self::Forward, "F"),
        (Self::Backward, "B"),
        (Self::InputGradient, "I"),
        (Self::WeightGradient, "W"),
        (Self::SendActivation, "SEND_F"),
        (Self::ReceiveActivation, "RECV_F"),
        (Self::SendGradient, "SEND_B"),
        (Self::ReceiveGradient, "RECV_B"),
        (Self::Unshard, "UNSHARD"),
        (Self::Reshard, "RESHARD"),
        (Self::ReduceGradient, "REDUCE_GRAD"),
        (Self::Step, "STEP"),
    ];

    /// As in the text of an action.
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize].1
    }

    /// As sentences have it, of those that compute; else [`ActionKind::name`].
    pub const fn noun(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::InputGradient => "input gradient",
            Self::WeightGradient => "weight gradients",
            _ => self.name(),
        }
    }

    /// The kind of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        let kind = Self::NAMES.iter().find(|(_, other)| *other == name);
        kind.map(|&(kind, _)| kind)
    }

    /// Whether it computes on a micro-batch: F, B, I or W.
    pub const fn is_compute(self) -> bool {
        matches!(
            self,
            Self::Forward | Self::Backward | Self::InputGradient | Self::WeightGradient
        )
    }

    /// Whether it computes, sends or receives a gradient of a micro-batch.
    pub const fn is_of_backward(self) -> bool {
        self.makes_input_gradient()
            || self.makes_weight_gradient()
            || matches!(self, Self::SendGradient | Self::ReceiveGradient)
    }

    /// Whether it makes the gradient of the stage's input: B or I.
    pub const fn makes_input_gradient(self) -> bool {
        matches!(self, Self::Backward | Self::InputGradient)
    }

    /// Whether it makes the gradients of the stage's weights, and so frees what forward kept: B or W.
    pub const fn makes_weight_gradient(self) -> bool {
        matches!(self, Self::Backward | Self::WeightGradient)
    }

    /// Whether it is of one micro-batch, and not of the whole stage.
    pub const fn has_micro_batch(self) -> bool {
        self.is_compute() || self.is_send() || self.is_receive()
    }

    /// Whether it sends.
    pub const fn is_send(self) -> bool {
        matches!(self, Self::SendActivation | Self::SendGradient)
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
    /// Stage that it is done to or for.
    pub stage: usize,
    /// What it does.
    pub kind: ActionKind,
    /// Micro-batch of the step, from 0, where the kind has one.
    pub micro_batch: Option<usize>,
}

impl Action {
    /// An action of a whole stage.
    pub const fn of_stage(rank: usize, stage: usize, kind: ActionKind) -> Self {
        Self {
            rank,
            stage,
            kind,
            micro_batch: None,
        }
    }

    /// The action that F, B or I needs of a neighbouring stage: F of the stage before, or I of the next (which B counts
    /// as). None at the ends of the pipeline, and for other kinds.
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

    /// The message that brings F, B or I its input from another rank, or that a send or a receive is one end of. None
    /// where there is no input, or where it is made on the same rank.
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
        write!(f, "{}{}", self.stage, self.kind.name())?;
        self.micro_batch.map_or(Ok(()), |number| write!(f, "{number}"))
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
    /// The queue that the message goes through.
    pub fn edge(&self) -> Edge {
        Edge {
            from: self.send.rank,
            to: self.receive.rank,
            is_gradient: self.send.kind == ActionKind::SendGradient,
        }
    }
}

/// A directed edge between two ranks. It has a queue of its own: messages arrive in the order in which they are sent.
///
/// Activations and gradients go through different queues. In one they could wait for each other, with two ranks or
/// where stages lie in a V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Edge {
    /// Rank that sends.
    pub from: usize,
    /// Rank that receives.
    pub to: usize,
    /// Gradients, and not activations.
    pub is_gradient: bool,
}

/// A cell of a rank's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cell {
    /// One action.
    One(Action),
    /// A forward of one micro-batch and a backward of another whose communication and computation overlap
    /// (`OVERLAP_F_B`). Both need their inputs at the start, and both results are there at the end.
    Overlapped {
        /// F.
        forward: Action,
        /// B or I.
        backward: Action,
    },
}

impl Cell {
    /// Its actions, in order.
    pub fn actions(&self) -> impl Iterator<Item = Action> + use<> {
        let (first, second) = match *self {
            Self::One(action) => (action, None),
            Self::Overlapped { forward, backward } => (forward, Some(backward)),
        };
        std::iter::once(first).chain(second)
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(action) => action.fmt(f),
            Self::Overlapped { forward, backward } => write!(f, "({forward};{backward})OVERLAP_F_B"),
        }
    }
}

/// What all ranks of a pipeline do in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    placement: Placement,
    micro_batches: usize,
    rows: Vec<Vec<Cell>>,
}

impl Schedule {
    /// Puts a schedule together, without any check but that there is one row for each rank.
    pub fn new(placement: Placement, micro_batches: usize, rows: Vec<Vec<Cell>>) -> Self {
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

    /// The cells of each rank, in the order in which the rank runs them.
    pub fn rows(&self) -> &[Vec<Cell>] {
        &self.rows
    }

    /// The actions of a rank, in order.
    pub fn actions(&self, rank: usize) -> impl Iterator<Item = Action> {
        self.rows[rank].iter().flat_map(Cell::actions)
    }

    /// B for an I or a W, where that stage has B and no halves of this micro-batch: how messages name it.
    pub(super) fn as_written(&self, action: Action) -> Action {
        let whole = action.with(ActionKind::Backward);
        if !whole.parts().any(|half| half == action) {
            return action;
        }
        let mut row = self.actions(action.rank);
        let is_half = |other: Action| whole.parts().any(|half| half == other);
        let is_whole = |other: Action| (other.stage, other.kind) == (whole.stage, whole.kind);
        let has_halves = self.actions(action.rank).any(is_half);
        if row.any(is_whole) && !has_halves {
            whole
        } else {
            action
        }
    }

    /// Whether sends and receives are part of it. Without them data is where it is needed as soon as it is made.
    pub fn has_transfers(&self) -> bool {
        let mut actions = (0..self.rows.len()).flat_map(|rank| self.actions(rank));
        actions.any(|action| action.kind.is_send() || action.kind.is_receive())
    }

    /// The same with other rows, each made of a rank and its row.
    pub(super) fn map_rows(&self, mut change: impl FnMut(usize, &[Cell]) -> Vec<Cell>) -> Self {
        let rows = self.rows.iter().enumerate();
        let rows = rows.map(|(rank, row)| change(rank, row)).collect();
        Self::new(self.placement.clone(), self.micro_batches, rows)
    }
}
