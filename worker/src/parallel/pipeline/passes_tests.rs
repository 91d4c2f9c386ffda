//! PyTorch's `TestScheduleLowering`, and what receives wait for.

use std::collections::HashSet;

use super::*;
use crate::parallel::pipeline::csv::{self, CsvFormat};
use crate::parallel::pipeline::generators::{PipelineShape, interleaved_1f1b, one_f_one_b, zb_h1, zbv};
use crate::parallel::pipeline::simulator::{Links, StageCosts, simulate};
use crate::parallel::pipeline::stages::Placement;

fn read(text: &str) -> Schedule {
    csv::read(text).expect("a schedule")
}

fn text(schedule: &Schedule) -> String {
    csv::write(schedule, CsvFormat::ComputeComms)
}

const fn shape(ranks: usize, chunks: usize, micro_batches: usize) -> PipelineShape {
    PipelineShape {
        ranks,
        chunks,
        micro_batches,
    }
}

/// With B for an I that its W follows at once.
fn merge_backward(schedule: &Schedule) -> Schedule {
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

/// PyTorch's placement of receives: at once in the row of the receiver, as soon as the sender's row has the send. Rows
/// go on in turn, each by one action that has what it needs, or by a bubble.
fn with_early_receives(placement: &Placement, compute: &[Vec<Option<Action>>]) -> Schedule {
    let actions = || compute.iter().flatten().flatten();
    let transfers = actions().filter_map(|action| action.transfer(placement));
    let sends: HashMap<Action, Transfer> = transfers.map(|transfer| (transfer.producer, transfer)).collect();
    let mut next = vec![0; compute.len()];
    let mut rows: Vec<Vec<Cell>> = vec![Vec::new(); compute.len()];
    let mut done: HashSet<Action> = HashSet::new();
    while (0..compute.len()).any(|rank| next[rank] < compute[rank].len()) {
        for rank in 0..compute.len() {
            let Some(&cell) = compute[rank].get(next[rank]) else {
                continue;
            };
            let Some(action) = cell else {
                next[rank] += 1;
                continue;
            };
            let received = action.transfer(placement).map(|transfer| transfer.receive);
            let needed = received.or_else(|| action.input(placement));
            if needed.is_some_and(|needed| !done.contains(&needed)) {
                continue;
            }
            next[rank] += 1;
            rows[rank].push(Cell::One(action));
            done.extend(action.parts());
            if let Some(transfer) = action.parts().find_map(|part| sends.get(&part)) {
                rows[rank].push(Cell::One(transfer.send));
                rows[transfer.receive.rank].push(Cell::One(transfer.receive));
                done.insert(transfer.receive);
            }
        }
    }
    let micro_batches = actions()
        .filter_map(|action| action.micro_batch)
        .max()
        .map_or(0, |last| last + 1);
    Schedule::new(placement.clone(), micro_batches, rows)
}

/// The same for rows of text, in which an empty cell is a bubble.
fn read_with_early_receives(text: &str) -> Schedule {
    let schedule = read(text);
    let rows = text.lines().enumerate().map(|(rank, line)| {
        let mut actions = schedule.actions(rank);
        let cells = line.split(',').map(|cell| !cell.trim().is_empty());
        cells
            .map(|is_action| is_action.then(|| actions.next()).flatten())
            .collect()
    });
    with_early_receives(schedule.placement(), &rows.collect::<Vec<_>>())
}

/// Each action, B, sends and receives too, takes a step, and a receive can run in the step of its send.
fn pytorch_steps(schedule: &Schedule) -> u64 {
    let costs = StageCosts {
        backward: 1,
        ..StageCosts::UNIT
    };
    let links = Links {
        occupied: 1,
        ..Links::IDEAL
    };
    let costs = vec![costs; schedule.placement().stages()];
    simulate(schedule, &costs, links).expect("no deadlock").end
}

#[test]
fn pytorch_test_send_recv_simple() {
    let schedule = read_with_early_receives("0F0,0F1,  ,0B0,  ,0B1\n  ,1F0,1B0,1F1,1B1,  ");
    assert_eq!(
        text(&schedule),
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    );
    assert_eq!(pytorch_steps(&schedule), 11);
}

#[test]
fn pytorch_test_send_recv_v() {
    let compute = "0F0,0F1,,3F0,3I0,3F1,3I1,0I0,3W0,0I1,3W1,0W0,0W1\n,1F0,2F0,1F1,2F1,2I0,1I0,2I1,1I1,2W0,2W1,1W0,1W1\n";
    let schedule = read_with_early_receives(compute);
    let rows = text(&schedule);
    assert!(
        rows.contains(
            "1RECV_F0,1RECV_F1,1F0,2F0,2SEND_F0,1F1,2RECV_B0,2F1,2SEND_F1,2I0,2RECV_B1,1I0,1SEND_B0"
        )
    );
    assert_eq!(pytorch_steps(&schedule), 24);
}

#[test]
fn pytorch_test_csv_of_the_interleaved_zero_bubble() {
    let compute = merge_backward(&zb_h1(shape(2, 2, 8)).expect("fits"));
    let schedule = read_with_early_receives(&text(&compute));
    // `zb1p_2rank_2stagep_comms.csv`.
    assert!(
        text(&schedule).starts_with(
            "0F0,0SEND_F0,2RECV_F0,0F1,0SEND_F1,2RECV_F1,2F0,2SEND_F0,2F1,2SEND_F1,2RECV_B0,2B0,"
        )
    );
    assert_eq!(pytorch_steps(&schedule), 113);
    // Receives that come as late as they can hold up less.
    assert_eq!(pytorch_steps(&with_transfers(&compute)), 97);
}

#[test]
fn pytorch_test_reduce_grad() {
    assert_eq!(
        text(&with_reduction(&read("0F0,0F1,0B0,0B1"))),
        "0F0,0F1,0B0,0B1,0REDUCE_GRAD\n"
    );
    assert_eq!(
        text(&with_reduction(&read("0F0,0F1,1F0,1F1,1I0,1W0,1B1,0B0,0I1,0W1"))),
        "0F0,0F1,1F0,1F1,1I0,1W0,1B1,1REDUCE_GRAD,0B0,0I1,0W1,0REDUCE_GRAD\n"
    );
}

#[test]
fn pytorch_test_merge_bw() {
    assert_eq!(
        text(&merge_backward(&read("0F0,0F1,0F2,0I0,0I1,0W0,0I2,0W2,0W1"))),
        "0F0,0F1,0F2,0I0,0I1,0W0,0B2,0W1\n"
    );
}

#[test]
fn a_receive_is_before_what_needs_it_and_in_the_order_of_its_queue() {
    let schedule = with_transfers(&one_f_one_b(shape(2, 1, 2)).expect("fits"));
    assert_eq!(
        text(&schedule),
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    );
    // Rank 1 needs micro-batch 1 first, which is sent second.
    let crossed = with_transfers(&read("0F0,0F1,0B1,0B0\n1F1,1F0,1B1,1B0"));
    assert_eq!(
        text(&crossed),
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B1,0B1,0RECV_B0,0B0\n1RECV_F0,1RECV_F1,1F1,1F0,1B1,1SEND_B1,1B0,1SEND_B0\n"
    );
}

#[test]
fn messages_of_what_overlaps_are_around_it() {
    let schedule = with_transfers(&read("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1"));
    assert_eq!(
        text(&schedule),
        "0F0,0SEND_F0,0RECV_B0,(0F1;0B0)OVERLAP_F_B,0SEND_F1,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    );
}

/// How often an activation goes from rank to rank, next to the M times of 1F1B.
#[test]
fn chunks_multiply_the_messages_between_ranks() {
    let messages = |schedule: &Schedule, is_between: fn(Edge) -> bool| {
        let schedule = with_transfers(schedule);
        let placement = schedule.placement();
        let sends = (0..placement.ranks()).flat_map(|rank| schedule.actions(rank));
        let sends = sends.filter(|action| action.kind == ActionKind::SendActivation);
        let edges = sends
            .filter_map(|send| send.transfer(placement))
            .map(|transfer| transfer.edge());
        edges.filter(|&edge| is_between(edge)).count()
    };
    let ends = |edge: Edge| (edge.from.min(edge.to), edge.from.max(edge.to)) == (1, 2);
    assert_eq!(messages(&one_f_one_b(shape(4, 1, 8)).expect("fits"), ends), 8);
    assert_eq!(
        messages(&interleaved_1f1b(shape(4, 3, 8)).expect("fits"), ends),
        24
    );
    assert_eq!(messages(&zbv(shape(4, 2, 8)).expect("fits"), ends), 16);
    // The last stage of the way down and the first of the way up are on one rank.
    assert_eq!(messages(&zbv(shape(4, 2, 8)).expect("fits"), |_| true), 48);
}
