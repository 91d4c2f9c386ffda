//! The row of a rank, written action by action.

use std::collections::{HashMap, VecDeque};

use crate::parallel::pipeline::action::{Action, ActionKind};

/// Writes the row of a rank. A generator gives the stage and the kind of each action. The
/// micro-batch follows from them, because every stage runs micro-batches in order.
pub(super) struct RowWriter {
    rank: usize,
    actions: Vec<Action>,
    /// By stage, how many F were written.
    forwards: HashMap<usize, usize>,
    /// By stage, how many B and I were written.
    backwards: HashMap<usize, usize>,
    /// I whose W was not written yet, as (stage, micro-batch).
    without_w: VecDeque<(usize, usize)>,
}

impl RowWriter {
    pub(super) fn new(rank: usize) -> Self {
        Self {
            rank,
            actions: Vec::new(),
            forwards: HashMap::new(),
            backwards: HashMap::new(),
            without_w: VecDeque::new(),
        }
    }

    pub(super) fn actions(&self) -> &[Action] {
        &self.actions
    }

    pub(super) fn into_actions(self) -> Vec<Action> {
        self.actions
    }

    fn action(&self, stage: usize, kind: ActionKind, micro_batch: usize) -> Action {
        Action {
            rank: self.rank,
            stage,
            kind,
            micro_batch,
        }
    }

    /// Writes F, B or I of a stage's next micro-batch.
    pub(super) fn write(&mut self, stage: usize, kind: ActionKind) {
        let written = match kind {
            ActionKind::Forward => &mut self.forwards,
            _ => &mut self.backwards,
        };
        let count = written.entry(stage).or_default();
        let micro_batch = *count;
        *count += 1;
        if kind == ActionKind::InputGradient {
            self.without_w.push_back((stage, micro_batch));
        }
        self.actions.push(self.action(stage, kind, micro_batch));
    }

    /// Writes the oldest W that was not written yet, of `stage` or of any stage. Returns false if
    /// there is none.
    pub(super) fn write_w(&mut self, stage: Option<usize>) -> bool {
        let is_of_it = |&(of, _): &(usize, usize)| stage.is_none_or(|stage| stage == of);
        let Some(at) = self.without_w.iter().position(is_of_it) else {
            return false;
        };
        let (stage, micro_batch) = self.without_w.remove(at).expect("its position");
        let action = self.action(stage, ActionKind::WeightGradient, micro_batch);
        self.actions.push(action);
        true
    }

    /// Forwards written of a stage.
    pub(super) fn forwards(&self, stage: usize) -> usize {
        self.forwards.get(&stage).copied().unwrap_or(0)
    }
}
