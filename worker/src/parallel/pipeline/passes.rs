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

/// With B for an I that its W follows at once.
pub fn merge_backward(schedule: &Schedule) -> Schedule {
    schedule.map_rows(|_, row| {
        let mut merged: Vec<Cell> = Vec::with_capacity(row.len());
        for &cell in row {
            match (merged.last_mut(), cell) {
                (Some(Cell::One(before)), Cell::One(action)) if is_w_of(*before, action) => {
                    before.kind = ActionKind::Backward;
                }
                _ => merged.push(cell),
            }
        }
        merged
    })
}

fn is_w_of(before: Action, action: Action) -> bool {
    action.kind == ActionKind::WeightGradient && before == action.with(ActionKind::InputGradient)
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

/// With the weights of stages gathered before they are used and released after it.
///
/// Gathered are the next `stages` different ones that a rank's row computes on, so that one is gathered while another
/// one computes. One that is not among them is released.
pub fn with_gathering(schedule: &Schedule, stages: usize) -> Schedule {
    assert!(stages > 0, "a stage computes on gathered weights");
    schedule.map_rows(|rank, row| {
        let of = |kind: ActionKind| move |stage| Cell::One(Action::of_stage(rank, stage, kind));
        let mut gathered: Vec<usize> = Vec::new();
        let mut cells = Vec::new();
        for (number, cell) in row.iter().enumerate() {
            if cell.actions().any(|action| action.kind.is_compute()) {
                let wanted = next_stages(&row[number..], stages);
                let unwanted = gathered.iter().filter(|stage| !wanted.contains(stage));
                cells.extend(unwanted.copied().map(of(ActionKind::Reshard)));
                let new = wanted.iter().filter(|stage| !gathered.contains(stage));
                cells.extend(new.copied().map(of(ActionKind::Unshard)));
                gathered = wanted;
            }
            cells.push(*cell);
        }
        cells.extend(gathered.into_iter().map(of(ActionKind::Reshard)));
        cells
    })
}

/// The next `most` different stages that are computed on, or one more where two overlap.
fn next_stages(cells: &[Cell], most: usize) -> Vec<usize> {
    let mut stages: Vec<usize> = Vec::new();
    for cell in cells {
        for action in cell.actions().filter(|action| action.kind.is_compute()) {
            if !stages.contains(&action.stage) {
                stages.push(action.stage);
            }
        }
        if stages.len() >= most {
            break;
        }
    }
    stages
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

/// With the update of each stage at the end: the global norm needs the gradients of all stages first.
pub fn with_steps(schedule: &Schedule) -> Schedule {
    schedule.map_rows(|rank, row| {
        let stages = schedule.placement().stages_of(rank);
        let steps = stages.map(|stage| Cell::One(Action::of_stage(rank, stage, ActionKind::Step)));
        row.iter().copied().chain(steps).collect()
    })
}

#[cfg(test)]
#[path = "passes_tests.rs"]
mod tests;
