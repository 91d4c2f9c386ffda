//! Simulator: when each rank runs which action of a schedule, how long it waits, and what it keeps meanwhile.
//!
//! Time is in ticks and memory in bytes, of whatever size the caller counts in: whole numbers, so that results are
//! exact. A rank runs its actions in order, each as soon as what it needs is there. Which rank waits for which follows
//! from the order alone, not from the durations: a schedule that deadlocks here deadlocks always.

use std::collections::HashMap;

use super::action::{Action, ActionKind, Edge, Schedule, Transfer};

/// What the actions of a stage cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageCosts {
    /// Ticks of F.
    pub forward: u64,
    /// Ticks of B.
    pub backward: u64,
    /// Ticks of I.
    pub input_gradient: u64,
    /// Ticks of W.
    pub weight_gradient: u64,
    /// Bytes that are kept of a micro-batch from its F to its W or B. 0 for evaluation.
    pub kept_bytes: u64,
}

impl StageCosts {
    /// F, I and W take a tick each, B takes two, a micro-batch keeps a byte, and nothing else costs anything.
    pub const UNIT: Self = Self {
        forward: 1,
        backward: 2,
        input_gradient: 1,
        weight_gradient: 1,
        kept_bytes: 1,
    };

    fn ticks(&self, kind: ActionKind) -> u64 {
        match kind {
            ActionKind::Forward => self.forward,
            ActionKind::Backward => self.backward,
            ActionKind::InputGradient => self.input_gradient,
            ActionKind::WeightGradient => self.weight_gradient,
            _ => 0,
        }
    }
}

/// An action that ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval {
    /// What ran.
    pub action: Action,
    /// Tick of its start.
    pub start: u64,
    /// Tick of its end.
    pub end: u64,
}

/// What a rank did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankTimeline {
    /// Its actions, in order.
    pub intervals: Vec<Interval>,
    /// Ticks in which it computed: F, B, I, W.
    pub busy: u64,
    /// What it kept for backward, as (tick, bytes from then on).
    pub memory: Vec<(u64, u64)>,
    /// The most that it kept.
    pub peak_bytes: u64,
}

impl RankTimeline {
    /// Takes down what an action keeps from its start, or frees at its end, for stages that keep so many bytes.
    fn note_memory(&mut self, action: Action, [start, end]: [u64; 2], kept_bytes: u64) {
        let kept = self.memory.last().map_or(0, |&(_, bytes)| bytes);
        if action.kind == ActionKind::Forward {
            self.memory.push((start, kept + kept_bytes));
            self.peak_bytes = self.peak_bytes.max(kept + kept_bytes);
        } else if action.kind.makes_weight_gradient() {
            self.memory.push((end, kept - kept_bytes));
        }
    }
}

/// A simulated step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Simulation {
    /// Ticks until the last action of the last rank has ended.
    pub end: u64,
    /// By rank.
    pub ranks: Vec<RankTimeline>,
}

impl Simulation {
    /// Ticks in which a rank did not compute.
    pub fn bubble(&self, rank: usize) -> u64 {
        self.end - self.ranks[rank].busy
    }

    /// The part of all ranks' time in which they did not compute.
    pub fn bubble_fraction(&self) -> f64 {
        // In floating point: ticks of a slow device come near the largest number.
        let idle: f64 = (0..self.ranks.len()).map(|rank| self.bubble(rank) as f64).sum();
        idle / f64::max(self.end as f64 * self.ranks.len() as f64, 1.0)
    }

    /// The most that any rank kept.
    pub fn peak_bytes(&self) -> u64 {
        let peaks = self.ranks.iter().map(|rank| rank.peak_bytes);
        peaks.max().unwrap_or(0)
    }
}

/// A rank that cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// What it would do next.
    pub action: Action,
    /// What has to happen before.
    pub awaited: Action,
}

/// Ranks that wait for each other in a cycle, so that none can go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the schedule deadlocks: {}", chain(waiting))]
pub struct Deadlock {
    /// Each one waits for the next, and the last one for the first.
    pub waiting: Vec<Waiting>,
}

fn chain(waiting: &[Waiting]) -> String {
    let link = |Waiting { action, awaited }: &Waiting| {
        let (rank, other) = (action.rank, awaited.rank);
        format!("rank {rank} at `{action}` waits for `{awaited}` of rank {other}")
    };
    waiting.iter().map(link).collect::<Vec<_>>().join("; ")
}

/// Runs a schedule. `costs` has an entry for each stage, and every action that another one needs is in a row. A message
/// takes `transit` ticks from where it is made, and an [`Edge`] carries one at a time. Sends and receives take no time of
/// their ranks, stand at the end of the action before, and do not wait for messages of other edges. (In a run, all messages
/// of a rank in one direction go in order.)
pub fn simulate(schedule: &Schedule, costs: &[StageCosts], transit: u64) -> Result<Simulation, Deadlock> {
    assert_eq!(costs.len(), schedule.placement().stages(), "costs of each stage");
    Run::new(schedule, costs, transit).finish()
}

/// Runs a schedule with sends and receives, each of which has a rank at its other end, as ranks do that do one thing after
/// the other: a message goes over when both its ranks have come to it.
pub(super) fn check_order(schedule: &Schedule) -> Result<(), Deadlock> {
    let costs = vec![StageCosts::UNIT; schedule.placement().stages()];
    let run = Run {
        waits_at_messages: schedule.has_transfers(),
        ..Run::new(schedule, &costs, 0)
    };
    run.finish().map(drop)
}

struct Run<'a> {
    schedule: &'a Schedule,
    costs: &'a [StageCosts],
    transit: u64,
    /// A rank goes on after a send or a receive only when the other rank has come to it.
    waits_at_messages: bool,
    /// By the F or I that makes it.
    sends: HashMap<Action, Transfer>,
    /// By rank, the position of the next action in its row, and when the one before ends.
    next: Vec<(usize, u64)>,
    /// When what was done ended, with I and W for B.
    ended: HashMap<Action, u64>,
    /// When the last message of an edge arrives.
    busy_until: HashMap<Edge, u64>,
    /// When a message arrives, by its receive.
    arrives: HashMap<Action, u64>,
    ranks: Vec<RankTimeline>,
}

impl<'a> Run<'a> {
    fn new(schedule: &'a Schedule, costs: &'a [StageCosts], transit: u64) -> Self {
        let ranks = schedule.placement().ranks();
        Self {
            schedule,
            costs,
            transit,
            waits_at_messages: false,
            sends: schedule.sends(),
            next: vec![(0, 0); ranks],
            ended: HashMap::new(),
            busy_until: HashMap::new(),
            arrives: HashMap::new(),
            ranks: vec![RankTimeline::default(); ranks],
        }
    }

    fn finish(mut self) -> Result<Simulation, Deadlock> {
        let mut has_moved = true;
        while has_moved {
            has_moved = false;
            // There and back again, as activations and their gradients go.
            let ranks = 0..self.ranks.len();
            for rank in ranks.clone().chain(ranks.rev()) {
                while let Some(Ok(())) = self.advance(rank) {
                    has_moved = true;
                }
            }
        }
        match self.deadlock() {
            Some(deadlock) => Err(deadlock),
            None => Ok(Simulation {
                end: self.next.iter().map(|&(_, end)| end).max().unwrap_or(0),
                ranks: self.ranks,
            }),
        }
    }

    fn next_action(&self, rank: usize) -> Option<Action> {
        self.schedule.rows()[rank].get(self.next[rank].0).copied()
    }

    /// Runs the next action of a rank, if its input is there. Otherwise returns what the rank waits for. `None` at the end
    /// of the row.
    fn advance(&mut self, rank: usize) -> Option<Result<(), Waiting>> {
        let action = self.next_action(rank)?;
        let ready = match action.kind {
            kind if kind.is_compute() => self.may_compute(action),
            _ if self.waits_at_messages => self.may_exchange(action),
            _ => Ok(0),
        };
        let ready = match ready {
            Ok(at) => at,
            Err(awaited) => return Some(Err(Waiting { action, awaited })),
        };
        let start = ready.max(self.next[rank].1);
        let end = start + self.ticks(action);
        self.carry_out(action, start, end);
        (self.ranks[rank].intervals).push(Interval { action, start, end });
        self.next[rank] = (self.next[rank].0 + 1, end);
        Some(Ok(()))
    }

    fn ticks(&self, action: Action) -> u64 {
        self.costs[action.stage].ticks(action.kind)
    }

    /// When all that F, B, I or W needs is there.
    fn may_compute(&self, action: Action) -> Result<u64, Action> {
        let own = match action.kind {
            ActionKind::Backward | ActionKind::InputGradient => Some(ActionKind::Forward),
            ActionKind::WeightGradient => Some(ActionKind::InputGradient),
            _ => None,
        };
        let placement = self.schedule.placement();
        let own = own.map_or(Ok(0), |kind| self.end_of(action.with(kind)))?;
        let input = match (action.transfer(placement), action.input(placement)) {
            (Some(transfer), _) if self.waits_at_messages => self.end_of(transfer.receive)?,
            (Some(transfer), _) => *self.arrives.get(&transfer.receive).ok_or(transfer.producer)?,
            (None, Some(input)) => self.end_of(input)?,
            (None, None) => 0,
        };
        Ok(own.max(input))
    }

    fn end_of(&self, action: Action) -> Result<u64, Action> {
        self.ended.get(&action).copied().ok_or(action)
    }

    /// When a send has something to send and its receiver is there, or when a receive's message was sent.
    fn may_exchange(&self, message: Action) -> Result<u64, Action> {
        let transfer = message.transfer(self.schedule.placement());
        let transfer = transfer.unwrap_or_else(|| panic!("`{message}` has another rank at its other end"));
        if message.kind.is_receive() {
            return self.end_of(transfer.send);
        }
        let (made, receiver) = (self.end_of(transfer.producer)?, transfer.receive.rank);
        if self.next_action(receiver) != Some(transfer.receive) {
            return Err(transfer.receive);
        }
        Ok(made.max(self.next[receiver].1))
    }

    /// Notes that an action ran.
    fn carry_out(&mut self, action: Action, start: u64, end: u64) {
        for part in action.parts() {
            self.ended.insert(part, end);
            if let Some(transfer) = self.sends.get(&part) {
                let busy_until = self.busy_until.entry(transfer.edge()).or_default();
                *busy_until = end.max(*busy_until) + self.transit;
                self.arrives.insert(transfer.receive, *busy_until);
            }
        }
        let StageCosts { kept_bytes, .. } = self.costs[action.stage];
        let ticks = self.ticks(action);
        let timeline = &mut self.ranks[action.rank];
        if action.kind.is_compute() {
            timeline.busy += ticks;
        }
        timeline.note_memory(action, [start, end], kept_bytes);
    }

    /// The ranks that wait for each other, if a rank has not reached the end of its row.
    fn deadlock(&mut self) -> Option<Deadlock> {
        let ranks = 0..self.ranks.len();
        let mut waits: Vec<Option<Waiting>> = ranks.map(|rank| self.advance(rank)?.err()).collect();
        for wait in waits.iter_mut().flatten() {
            wait.awaited = self.schedule.as_written(wait.awaited);
        }
        let mut waiting = vec![(*waits.iter().flatten().next()?)];
        loop {
            let awaited = waiting[waiting.len() - 1].awaited.rank;
            if let Some(first) = waiting.iter().position(|wait| wait.action.rank == awaited) {
                waiting.drain(..first);
                return Some(Deadlock { waiting });
            }
            waiting.push(waits[awaited].expect("a rank at the end of its row has done what others wait for"));
        }
    }
}

#[cfg(test)]
#[path = "simulator_tests.rs"]
mod tests;
