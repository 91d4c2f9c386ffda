//! Validator: refuses a schedule that computes something wrong or deadlocks, before anything starts.
//! It does not check memory: the activations of a step are allocated before the first step.
//!
//! | rule | why |
//! |---|---|
//! | each stage and micro-batch has one F, and one B or one I and one W | nothing is left out or counted twice |
//! | what is needed on the same rank is done before | |
//! | F, I, W and B of a stage take micro-batches in order | sums of losses and gradients have the same bits under every schedule |
//! | each message is sent once and received once | |
//! | no rank waits for itself or in a circle with others, even if it runs one action at a time | the streams of a GPU may wait for each other |

use std::collections::{HashMap, HashSet};

use super::action::{Action, ActionKind, Schedule};
use super::simulator::{Deadlock, check_order};

/// What a schedule is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Forward and backward of each micro-batch.
    Training,
    /// Forward only: evaluation, generation.
    Evaluation,
}

/// Why a schedule is not run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A rank's row is wrong at an action.
    #[error("rank {} is refused at `{action}`: {reason}", action.rank)]
    Action {
        /// The action, on the rank in whose row it is or is missing.
        action: Action,
        /// What is wrong.
        reason: Reason,
    },
    /// Ranks wait for each other.
    #[error(transparent)]
    Deadlock(#[from] Deadlock),
}

/// What is wrong with an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// The pipeline is smaller.
    #[error("there are {stages} stages and {micro_batches} micro-batches")]
    OutOfRange {
        /// Stages of the pipeline.
        stages: usize,
        /// Micro-batches of the step.
        micro_batches: usize,
    },
    /// Its stage is elsewhere.
    #[error("the stage is on rank {0}")]
    OtherRank(usize),
    /// It should be there.
    #[error("the action is missing")]
    Missing,
    /// It was done before, by itself or as a half of a B.
    #[error("the action is there twice, whole or in part")]
    Twice,
    /// Evaluation has no backward.
    #[error("evaluation has no backward")]
    BackwardInEvaluation,
    /// What it needs was not done.
    #[error("`{0}` has to come before it")]
    NeedsBefore(Action),
    /// The order of sums would differ.
    #[error("it comes after `{0}`, but a stage takes micro-batches in order, as sums depend on it")]
    Descends(Action),
    /// Both stages are on one rank, or there is no other stage.
    #[error("no other rank is at its other end")]
    NoOtherEnd,
}

/// Refuses a schedule that breaks a rule.
pub fn validate(schedule: &Schedule, purpose: Purpose) -> Result<(), Refusal> {
    for rank in 0..schedule.placement().ranks() {
        let mut row = Row::new(schedule, purpose, rank);
        for &action in &schedule.rows()[rank] {
            row.check(action)
                .and_then(|()| row.check_order(action))
                .map_err(|reason| Refusal::Action { action, reason })?;
            row.note(action);
        }
        if let Some(action) = row.missing() {
            let reason = Reason::Missing;
            return Err(Refusal::Action { action, reason });
        }
    }
    check_order(schedule)?;
    Ok(())
}

/// Whether an action does F, I, W.
fn halves(kind: ActionKind) -> [bool; 3] {
    [
        kind == ActionKind::Forward,
        kind.makes_input_gradient(),
        kind.makes_weight_gradient(),
    ]
}

/// The walk over a rank's row.
struct Row<'a> {
    schedule: &'a Schedule,
    purpose: Purpose,
    rank: usize,
    has_transfers: bool,
    /// What was done, with I and W for B.
    done: HashSet<Action>,
    /// By stage: its last F, I and W; a B is both of these.
    last: HashMap<usize, [Option<Action>; 3]>,
}

impl<'a> Row<'a> {
    fn new(schedule: &'a Schedule, purpose: Purpose, rank: usize) -> Self {
        Self {
            schedule,
            purpose,
            rank,
            has_transfers: schedule.has_transfers(),
            done: HashSet::new(),
            last: HashMap::new(),
        }
    }

    /// Whether the action may be there at all.
    fn check(&self, action: Action) -> Result<(), Reason> {
        let (placement, micro_batches) = (self.schedule.placement(), self.schedule.micro_batches());
        if action.stage >= placement.stages() || action.micro_batch >= micro_batches {
            return Err(Reason::OutOfRange {
                stages: placement.stages(),
                micro_batches,
            });
        }
        let holder = placement.rank_of(action.stage);
        if holder != self.rank || action.rank != self.rank {
            return Err(Reason::OtherRank(holder));
        }
        if !action.kind.is_compute() && action.transfer(placement).is_none() {
            return Err(Reason::NoOtherEnd);
        }
        if action.kind.is_of_backward() && self.purpose == Purpose::Evaluation {
            return Err(Reason::BackwardInEvaluation);
        }
        if action.parts().any(|part| self.done.contains(&part)) {
            return Err(Reason::Twice);
        }
        Ok(())
    }

    /// Whether all that the action needs is done, and no later micro-batch.
    fn check_order(&self, action: Action) -> Result<(), Reason> {
        let needs = self.needs(action).into_iter().flatten();
        if let Some(needed) = needs.into_iter().find(|needed| !self.done.contains(needed)) {
            return Err(Reason::NeedsBefore(self.schedule.as_written(needed)));
        }
        let last = self.last.get(&action.stage).copied().unwrap_or_default();
        let same_half = halves(action.kind).into_iter().zip(last);
        let mut before = same_half.filter_map(|(is_done, last)| last.filter(|_| is_done));
        match before.find(|last| last.micro_batch > action.micro_batch) {
            Some(last) => Err(Reason::Descends(last)),
            None => Ok(()),
        }
    }

    /// What has to be done on this rank before an action.
    fn needs(&self, action: Action) -> [Option<Action>; 2] {
        let placement = self.schedule.placement();
        let own = |kind| Some(action.with(kind));
        let input = match action.transfer(placement) {
            Some(transfer) => self.has_transfers.then_some(transfer.receive),
            None => action.input(placement),
        };
        match action.kind {
            ActionKind::Forward => [input, None],
            ActionKind::Backward | ActionKind::InputGradient => [own(ActionKind::Forward), input],
            ActionKind::SendActivation => [own(ActionKind::Forward), None],
            ActionKind::WeightGradient | ActionKind::SendGradient => [own(ActionKind::InputGradient), None],
            _ => [None, None],
        }
    }

    /// Notes that an action is done.
    fn note(&mut self, action: Action) {
        let stage = self.last.entry(action.stage).or_default();
        for (last, is_done) in stage.iter_mut().zip(halves(action.kind)) {
            if is_done {
                *last = Some(action);
            }
        }
        self.done.extend(action.parts());
    }

    /// The first action that should be in the row and is not.
    fn missing(&self) -> Option<Action> {
        let placement = self.schedule.placement();
        let kinds: &[ActionKind] = match self.purpose {
            Purpose::Training => &[
                ActionKind::Forward,
                ActionKind::InputGradient,
                ActionKind::WeightGradient,
            ],
            Purpose::Evaluation => &[ActionKind::Forward],
        };
        let of_stage = |stage| {
            let of_micro_batch = move |number| {
                kinds.iter().map(move |&kind| Action {
                    rank: self.rank,
                    stage,
                    kind,
                    micro_batch: number,
                })
            };
            (0..self.schedule.micro_batches()).flat_map(of_micro_batch)
        };
        let mut needed = placement.stages_of(self.rank).flat_map(of_stage);
        needed.find_map(|action| self.missing_of(action))
    }

    /// The action or the send of its result, if it is not in the row.
    fn missing_of(&self, action: Action) -> Option<Action> {
        let send = match action.kind {
            ActionKind::Forward => Some(ActionKind::SendActivation),
            ActionKind::InputGradient => Some(ActionKind::SendGradient),
            _ => None,
        };
        let send = send.map(|kind| action.with(kind));
        let is_sent =
            |send: &Action| self.has_transfers && send.transfer(self.schedule.placement()).is_some();
        let both = [Some(action), send.filter(is_sent)].into_iter().flatten();
        let mut missing = both.filter(|action| !self.done.contains(action));
        missing.next().map(|action| self.schedule.as_written(action))
    }
}

#[cfg(test)]
#[path = "validator_tests.rs"]
mod tests;
