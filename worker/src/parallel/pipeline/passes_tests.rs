//! Where sends and receives are placed.

use super::*;
use crate::parallel::pipeline::generators::{PipelineShape, interleaved_1f1b, one_f_one_b, zbv};
use crate::parallel::pipeline::schedule_of;

const fn shape(ranks: usize, chunks: usize, micro_batches: usize) -> PipelineShape {
    PipelineShape {
        ranks,
        chunks,
        micro_batches,
    }
}

#[test]
fn a_receive_is_before_what_needs_it_and_in_the_order_of_its_queue() {
    let schedule = with_transfers(&one_f_one_b(shape(2, 1, 2)).expect("fits"));
    assert_eq!(
        schedule.to_string(),
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    );
    // Rank 1 needs micro-batch 1 first, which is sent second.
    let crossed = with_transfers(&schedule_of("0F0,0F1,0B1,0B0\n1F1,1F0,1B1,1B0"));
    assert_eq!(
        crossed.to_string(),
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B1,0B1,0RECV_B0,0B0\n1RECV_F0,1RECV_F1,1F1,1F0,1B1,1SEND_B1,1B0,1SEND_B0\n"
    );
}

/// How often an activation goes from rank to rank, next to the M times of 1F1B.
#[test]
fn chunks_multiply_the_messages_between_ranks() {
    let messages = |schedule: &Schedule, is_between: fn(Edge) -> bool| {
        let schedule = with_transfers(schedule);
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
