//! Passes: from a schedule that only computes to one that a rank can run. Each takes a schedule and makes another.

use super::action::{Action, ActionKind, Schedule};
use super::simulator::{Deadlock, Interval, StageCosts, simulate};

/// Computing actions of its own rank that a receive goes ahead of, so that its message arrives while they run.
const RECEIVED_AHEAD: usize = 2;

/// Without backward: for evaluation and generation.
pub fn forward_only(schedule: &Schedule) -> Schedule {
    let is_forward = |action: &Action| action.kind == ActionKind::Forward;
    schedule.map_rows(|(_, row)| row.iter().copied().filter(is_forward).collect())
}

/// With sends and receives between stages of different ranks.
///
/// All rows follow one order of the whole step: actions that compute by when they start, messages by when they are made, in
/// a step where F, I and W take equally long. So ranks that run their rows in order, and send only when the other rank
/// receives, never wait for each other in a circle: of what is left, the first in that order can always run. It holds even
/// on a GPU that runs all its streams in the order of their launches. A receive then goes ahead of up to
/// `RECEIVED_AHEAD` actions that compute, but passes no message. The order of messages alone, the same on all ranks,
/// excludes a circle.
pub fn with_transfers(schedule: &Schedule) -> Result<Schedule, Deadlock> {
    assert!(!schedule.has_transfers(), "sends and receives are added once");
    let costs = vec![StageCosts::UNIT; schedule.placement().stages()];
    let simulated = simulate(schedule, &costs, 0)?;
    let sends = schedule.sends();
    // By rank: when, and messages first. Of simultaneous messages the same is first on both ranks: activations, and of each
    // kind the first one to flow, so that a rank does not wait for the next message with one that it could send.
    let mut rows = vec![Vec::new(); schedule.placement().ranks()];
    let intervals = simulated.ranks.iter().flat_map(|rank| &rank.intervals);
    for &Interval { action, start, end } in intervals {
        rows[action.rank].push((start, true, (false, 0), action, action));
        for transfer in action.parts().filter_map(|part| sends.get(&part)) {
            let stage = transfer.send.stage;
            let flow = if transfer.edge().is_gradient {
                (true, usize::MAX - stage)
            } else {
                (false, stage)
            };
            for message in [transfer.send, transfer.receive] {
                rows[message.rank].push((end, false, flow, transfer.send, message));
            }
        }
    }
    Ok(schedule.map_rows(|(rank, _)| {
        rows[rank].sort_unstable();
        receive_ahead(rows[rank].iter().map(|&(.., action)| action))
    }))
}

fn receive_ahead(row: impl Iterator<Item = Action>) -> Vec<Action> {
    let mut moved: Vec<Action> = Vec::new();
    for action in row {
        let before = moved.iter().rev().take(RECEIVED_AHEAD);
        let passed = if action.kind.is_receive() {
            before.take_while(|action| action.kind.is_compute()).count()
        } else {
            0
        };
        moved.insert(moved.len() - passed, action);
    }
    moved
}

#[cfg(test)]
#[path = "passes_tests.rs"]
mod tests;
