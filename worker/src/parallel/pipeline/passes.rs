//! Passes: from a schedule that only computes to one that a rank can run. Each takes a schedule and makes another.

use std::collections::{BTreeMap, HashMap};

use super::action::{Action, ActionKind, Cell, Edge, Schedule, Transfer};

/// Without backward: for evaluation and generation.
pub fn forward_only(schedule: &Schedule) -> Schedule {
    let is_forward = |action: &Action| action.kind == ActionKind::Forward;
    schedule.map_rows(|_, row| {
        let actions = row.iter().flat_map(Cell::actions);
        actions.filter(is_forward).map(Cell::One).collect()
    })
}

/// With F and B one after the other where they overlap: the next rank gets the result of F before B is done.
pub fn without_overlap(schedule: &Schedule) -> Schedule {
    schedule.map_rows(|_, row| row.iter().flat_map(Cell::actions).map(Cell::One).collect())
}

/// With sends and receives between stages of different ranks.
///
/// A send follows what makes its message. A receive is as late as can be: before what needs the message or, since the
/// messages of an edge arrive in the order in which they are sent, before a later one of them that is needed earlier.
pub fn with_transfers(schedule: &Schedule) -> Schedule {
    assert!(!schedule.has_transfers(), "sends and receives are added once");
    let sends = sends(schedule);
    let mut receives = receives(schedule, &sends);
    schedule.map_rows(|rank, row| {
        let mut cells = Vec::with_capacity(2 * row.len());
        for (number, cell) in row.iter().enumerate() {
            let before = receives.remove(&(rank, number)).unwrap_or_default();
            cells.extend(before.into_iter().map(Cell::One));
            cells.push(*cell);
            let after = cell
                .actions()
                .flat_map(Action::parts)
                .filter_map(|part| sends.get(&part));
            cells.extend(after.map(|transfer| Cell::One(transfer.send)));
        }
        cells
    })
}

/// The messages of a schedule, by the F or I that makes them.
fn sends(schedule: &Schedule) -> HashMap<Action, Transfer> {
    let actions = schedule.rows().iter().flatten().flat_map(Cell::actions);
    let transfers = actions.filter_map(|action| action.transfer(schedule.placement()));
    transfers.map(|transfer| (transfer.producer, transfer)).collect()
}

/// By rank and cell, the receives that come before it.
fn receives(schedule: &Schedule, sends: &HashMap<Action, Transfer>) -> HashMap<(usize, usize), Vec<Action>> {
    let mut queues: BTreeMap<Edge, Vec<Action>> = BTreeMap::new();
    let mut needed_by: HashMap<Action, usize> = HashMap::new();
    for row in schedule.rows() {
        for (number, cell) in row.iter().enumerate() {
            for action in cell.actions() {
                if let Some(transfer) = action.transfer(schedule.placement()) {
                    needed_by.insert(transfer.receive, number);
                }
                for transfer in action.parts().filter_map(|part| sends.get(&part)) {
                    queues.entry(transfer.edge()).or_default().push(transfer.receive);
                }
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

/// With the reduction of a stage's gradients after its last W or B.
pub fn with_reduction(schedule: &Schedule) -> Schedule {
    schedule.map_rows(|rank, row| {
        let mut last: HashMap<usize, usize> = HashMap::new();
        for (number, cell) in row.iter().enumerate() {
            let gradients = cell
                .actions()
                .filter(|action| action.kind.makes_weight_gradient());
            last.extend(gradients.map(|action| (action.stage, number)));
        }
        let mut cells = Vec::with_capacity(row.len() + last.len());
        for (number, cell) in row.iter().enumerate() {
            cells.push(*cell);
            let of_cell = cell
                .actions()
                .filter(|action| action.kind.makes_weight_gradient());
            let complete = of_cell.filter(|action| last.get(&action.stage) == Some(&number));
            let kind = ActionKind::ReduceGradient;
            cells.extend(complete.map(|action| Cell::One(Action::of_stage(rank, action.stage, kind))));
        }
        cells
    })
}

#[cfg(test)]
#[path = "passes_tests.rs"]
mod tests;
