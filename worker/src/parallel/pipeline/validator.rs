//! Validator: refuses a schedule that computes something wrong or cannot come to its end, before anything starts.
//! How much it keeps is not looked at: that is allocated before the first step, and plans hold it against the machine's
//! memory.
//!
//! | rule | why |
//! |---|---|
//! | each stage and micro-batch has one F, and one B or one I and one W | nothing is left out or counted twice |
//! | what is needed on the same rank is done before | |
//! | F, I, W and B of a stage take micro-batches in order | sums of losses and gradients have the same bits under every schedule |
//! | nothing of a stage computes after its reduction | the reduced gradient is complete |
//! | nothing of a stage computes or is reduced after its update | a step has one version of the weights |
//! | a stage that gathers its weights computes only while they are | |
//! | each message is sent once and received once | |
//! | no rank waits for itself or in a circle with others | messages arrive in order, and queues hold few |

use std::collections::{HashMap, HashSet};

use super::action::{Action, ActionKind, Schedule};
use super::simulator::{Deadlock, Links, StageCosts, simulate};

/// What a schedule is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Forward and backward of each micro-batch.
    Training,
    /// Forward only: evaluation, generation.
    Evaluation,
}

/// What a schedule is held against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// What it is for.
    pub purpose: Purpose,
    /// Messages that the queue of an edge holds, as [`Links::capacity`].
    pub capacity: Option<usize>,
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
        /// Of the pipeline.
        stages: usize,
        /// Of the step.
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
    /// The gradients are reduced, or the weights updated, already.
    #[error("it comes after `{0}`")]
    ComesAfter(Action),
    /// The weights are not there.
    #[error("the weights of the stage are not gathered at that point")]
    NotGathered,
    /// They are there already.
    #[error("the weights of the stage are gathered already")]
    GatheredAlready,
    /// Both stages are on one rank, or there is no other stage.
    #[error("no other rank is at its other end")]
    NoOtherEnd,
}

/// Refuses a schedule that breaks a rule.
pub fn validate(schedule: &Schedule, rules: Rules) -> Result<(), Refusal> {
    for rank in 0..schedule.placement().ranks() {
        let mut row = Row::new(schedule, rules, rank);
        for action in schedule.actions(rank) {
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
    let costs = vec![StageCosts::UNIT; schedule.placement().stages()];
    let links = Links {
        capacity: rules.capacity,
        ..Links::IDEAL
    };
    simulate(schedule, &costs, links)?;
    Ok(())
}

/// The least number of messages that each queue must hold for a schedule not to deadlock. None if it always does.
pub fn least_capacity(schedule: &Schedule) -> Option<usize> {
    let costs = vec![StageCosts::UNIT; schedule.placement().stages()];
    let runs = |capacity| {
        let links = Links {
            capacity,
            ..Links::IDEAL
        };
        simulate(schedule, &costs, links)
    };
    let enough = runs(None).ok()?.deepest_queue;
    (0..enough)
        .find(|&capacity| runs(Some(capacity)).is_ok())
        .or(Some(enough))
}

/// What was done of a stage.
#[derive(Clone, Copy, Default)]
struct StageState {
    /// Its last F, I and W; a B is both of these.
    last: [Option<Action>; 3],
    /// Its reduction, and its update.
    closed_by: Option<Action>,
    /// Whether its weights are gathered, if it gathers them.
    is_gathered: Option<bool>,
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
    rules: Rules,
    rank: usize,
    has_transfers: bool,
    /// What was done, with I and W for B.
    done: HashSet<Action>,
    stages: HashMap<usize, StageState>,
}

impl<'a> Row<'a> {
    fn new(schedule: &'a Schedule, rules: Rules, rank: usize) -> Self {
        let gathering = schedule
            .actions(rank)
            .filter(|action| action.kind == ActionKind::Unshard);
        let state = StageState {
            is_gathered: Some(false),
            ..StageState::default()
        };
        Self {
            schedule,
            rules,
            rank,
            has_transfers: schedule.has_transfers(),
            done: HashSet::new(),
            stages: gathering.map(|action| (action.stage, state)).collect(),
        }
    }

    /// Whether the action may be there at all.
    fn check(&self, action: Action) -> Result<(), Reason> {
        let (placement, micro_batches) = (self.schedule.placement(), self.schedule.micro_batches());
        let is_known = match action.micro_batch {
            Some(number) => action.kind.has_micro_batch() && number < micro_batches,
            None => !action.kind.has_micro_batch(),
        };
        if action.stage >= placement.stages() || !is_known {
            return Err(Reason::OutOfRange {
                stages: placement.stages(),
                micro_batches,
            });
        }
        let holder = placement.rank_of(action.stage);
        if holder != self.rank || action.rank != self.rank {
            return Err(Reason::OtherRank(holder));
        }
        let is_message = action.kind.is_send() || action.kind.is_receive();
        if is_message && action.transfer(placement).is_none() {
            return Err(Reason::NoOtherEnd);
        }
        if action.kind.is_of_backward() && self.rules.purpose == Purpose::Evaluation {
            return Err(Reason::BackwardInEvaluation);
        }
        if action.parts().any(|part| self.done.contains(&part)) {
            return Err(Reason::Twice);
        }
        Ok(())
    }

    /// Whether what has to be done before is done, and nothing that has to be done after.
    fn check_order(&self, action: Action) -> Result<(), Reason> {
        let needs = self.needs(action).into_iter().flatten();
        if let Some(needed) = needs.into_iter().find(|needed| !self.done.contains(needed)) {
            return Err(Reason::NeedsBefore(self.schedule.as_written(needed)));
        }
        let nothing = StageState::default();
        let stage = self.stages.get(&action.stage).unwrap_or(&nothing);
        let before = halves(action.kind)
            .into_iter()
            .zip(stage.last)
            .filter_map(|(is_done, last)| last.filter(|_| is_done));
        let mut later = before.filter(|last| last.micro_batch > action.micro_batch);
        if let Some(last) = later.next() {
            return Err(Reason::Descends(last));
        }
        let changes = action.kind.is_compute() || action.kind == ActionKind::ReduceGradient;
        if let Some(closed_by) = stage.closed_by.filter(|_| changes) {
            return Err(Reason::ComesAfter(closed_by));
        }
        match (action.kind, stage.is_gathered) {
            (ActionKind::Unshard, Some(true)) => Err(Reason::GatheredAlready),
            (ActionKind::Reshard, None | Some(false)) => Err(Reason::NotGathered),
            (kind, Some(false)) if kind.is_compute() => Err(Reason::NotGathered),
            _ => Ok(()),
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
        let stage = self.stages.entry(action.stage).or_default();
        for (last, is_done) in stage.last.iter_mut().zip(halves(action.kind)) {
            if is_done {
                *last = Some(action);
            }
        }
        match action.kind {
            ActionKind::Unshard => stage.is_gathered = Some(true),
            ActionKind::Reshard => stage.is_gathered = Some(false),
            ActionKind::ReduceGradient | ActionKind::Step => stage.closed_by = Some(action),
            _ => {}
        }
        if !matches!(action.kind, ActionKind::Unshard | ActionKind::Reshard) {
            self.done.extend(action.parts());
        }
    }

    /// The first action that should be in the row and is not.
    fn missing(&self) -> Option<Action> {
        let placement = self.schedule.placement();
        let kinds: &[ActionKind] = match self.rules.purpose {
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
                    micro_batch: Some(number),
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
