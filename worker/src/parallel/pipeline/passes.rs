//! Passes: from a schedule that only computes to one that a rank can run. Each takes a schedule and makes another.

use std::collections::{BTreeMap, HashMap};

use super::action::{Action, ActionKind, Edge, Schedule, Transfer};

/// Without backward: for evaluation and generation.
pub fn forward_only(schedule: &Schedule) -> Schedule {
    let is_forward = |action: &Action| action.kind == ActionKind::Forward;
    schedule.map_rows(|(_, row)| row.iter().copied().filter(is_forward).collect())
}

/// With sends and receives between stages of different ranks.
///
/// A send follows what makes its message. A receive is as late as can be: before what needs the message or, since the
/// messages of an edge arrive in the order in which they are sent, before a later one of them that is needed earlier.
pub fn with_transfers(schedule: &Schedule) -> Schedule {
    assert!(!schedule.has_transfers(), "sends and receives are added once");
    let sends = sends(schedule);
    let mut receives = receives(schedule, &sends);
    schedule.map_rows(|(rank, row)| {
        let mut completed = Vec::with_capacity(2 * row.len());
        for (number, &action) in row.iter().enumerate() {
            completed.extend(receives.remove(&(rank, number)).unwrap_or_default());
            completed.push(action);
            let sent = action.parts().filter_map(|part| sends.get(&part));
            completed.extend(sent.map(|transfer| transfer.send));
        }
        completed
    })
}

/// The messages of a schedule, by the F or I that makes them.
fn sends(schedule: &Schedule) -> HashMap<Action, Transfer> {
    let actions = schedule.rows().iter().flatten();
    let transfers = actions.filter_map(|action| action.transfer(schedule.placement()));
    transfers.map(|transfer| (transfer.producer, transfer)).collect()
}

/// By rank and position in its row, the receives that come before that action.
fn receives(schedule: &Schedule, sends: &HashMap<Action, Transfer>) -> HashMap<(usize, usize), Vec<Action>> {
    let mut queues: BTreeMap<Edge, Vec<Action>> = BTreeMap::new();
    let mut needed_by: HashMap<Action, usize> = HashMap::new();
    for row in schedule.rows() {
        for (number, action) in row.iter().enumerate() {
            if let Some(transfer) = action.transfer(schedule.placement()) {
                needed_by.insert(transfer.receive, number);
            }
            for transfer in action.parts().filter_map(|part| sends.get(&part)) {
                queues.entry(transfer.edge()).or_default().push(transfer.receive);
            }
        }
    }
    let mut before: HashMap<(usize, usize), Vec<Action>> = HashMap::new();
    for queue in queues.into_values() {
        let mut earliest = usize::MAX;
        for receive in queue.into_iter().rev() {
            earliest = earliest.min(needed_by[&receive]);
            before.entry((receive.rank, earliest)).or_default().push(receive);
        }
    }
    for receives in before.values_mut() {
        receives.reverse();
    }
    before
}

#[cfg(test)]
#[path = "passes_tests.rs"]
mod tests;
