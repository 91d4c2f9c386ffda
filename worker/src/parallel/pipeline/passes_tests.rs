//! Where sends and receives are placed.

use super::*;
use crate::parallel::pipeline::Edge;
use crate::parallel::pipeline::generators::{PipelineShape, gpipe, interleaved_1f1b, one_f_one_b, zbv};
use crate::parallel::pipeline::schedule_of;

const fn shape(ranks: usize, chunks: usize, micro_batches: usize) -> PipelineShape {
    PipelineShape {
        ranks,
        chunks,
        micro_batches,
    }
}

fn text(schedule: &Schedule) -> String {
    with_transfers(schedule).expect("no deadlock").to_string()
}

#[test]
fn a_message_stands_where_it_is_made_in_both_rows() {
    assert_eq!(
        text(&one_f_one_b(shape(2, 1, 2)).expect("fits")),
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0B1\n1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    );
    // Rank 1 needs micro-batch 1 first, which is sent second.
    assert_eq!(
        text(&schedule_of("0F0,0F1,0B1,0B0\n1F1,1F0,1B1,1B0")),
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B1,0RECV_B0,0B1,0B0\n1RECV_F0,1RECV_F1,1F1,1F0,1B1,1SEND_B1,1B0,1SEND_B0\n"
    );
}

/// The backward of GPipe on three ranks: rank 1 takes the gradient of the next micro-batch before it sends its own.
#[test]
fn of_simultaneous_gradients_the_one_from_further_down_is_first() {
    let text = text(&gpipe(shape(3, 1, 2)).expect("fits"));
    let middle = text.lines().nth(1).expect("three ranks");
    assert!(
        middle.ends_with("1RECV_B0,1RECV_B1,1B0,1SEND_B0,1B1,1SEND_B1"),
        "{middle}"
    );
}

#[test]
fn a_receive_goes_ahead_of_two_actions_and_of_no_message() {
    let row = schedule_of("0F0,0F1,0F2,0SEND_F2,0RECV_B0,0F3,0F4,0F5,0RECV_B1,0RECV_B2\n1F0");
    let moved = receive_ahead(row.rows()[0].iter().copied());
    let moved: Vec<String> = moved.iter().map(ToString::to_string).collect();
    assert_eq!(
        moved.join(","),
        "0F0,0F1,0F2,0SEND_F2,0RECV_B0,0F3,0RECV_B1,0RECV_B2,0F4,0F5"
    );
}

/// How often an activation goes from rank to rank, next to the M times of 1F1B.
#[test]
fn chunks_multiply_the_messages_between_ranks() {
    let messages = |schedule: &Schedule, is_between: fn(Edge) -> bool| {
        let schedule = with_transfers(schedule).expect("no deadlock");
        let placement = schedule.placement();
        let sends = schedule.rows().iter().flatten();
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
