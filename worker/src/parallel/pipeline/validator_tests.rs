//! What each rule refuses, word for word.

use super::*;
use crate::parallel::pipeline::generators::{PipelineShape, one_f_one_b, zb_h1};
use crate::parallel::pipeline::passes::{forward_only, with_transfers};
use crate::parallel::pipeline::schedule_of;

fn refused(text: &str) -> String {
    let schedule = schedule_of(text);
    let refusal = validate(&schedule, Purpose::Training).expect_err("breaks a rule");
    refusal.to_string()
}

const fn shape(ranks: usize, micro_batches: usize) -> PipelineShape {
    PipelineShape {
        ranks,
        chunks: 1,
        micro_batches,
    }
}

#[test]
fn a_complete_schedule_is_allowed() {
    let compute = zb_h1(shape(4, 8)).expect("fits");
    let complete = with_transfers(&compute).expect("no deadlock");
    for schedule in [compute, complete] {
        assert_eq!(validate(&schedule, Purpose::Training), Ok(()));
    }
}

#[test]
fn each_micro_batch_passes_each_stage_once() {
    assert_eq!(
        refused("0F0,0F1,0B0\n1F0,1F1,1B0,1B1"),
        "rank 0 is refused at `0B1`: the action is missing"
    );
    assert_eq!(
        refused("0F0,0B0,0F0"),
        "rank 0 is refused at `0F0`: the action is there twice, whole or in part"
    );
    assert_eq!(
        refused("0F0,0I0\n1F0,1B0"),
        "rank 0 is refused at `0W0`: the action is missing"
    );
    assert_eq!(
        refused("0F0,0B0,0W0"),
        "rank 0 is refused at `0W0`: the action is there twice, whole or in part"
    );
    assert_eq!(
        refused("0F0,0I0,0B0"),
        "rank 0 is refused at `0B0`: the action is there twice, whole or in part"
    );
    assert_eq!(
        refused("0F0,0B0,0B0"),
        "rank 0 is refused at `0B0`: the action is there twice, whole or in part"
    );
}

#[test]
fn no_action_can_be_left_out() {
    let schedule = with_transfers(&zb_h1(shape(3, 4)).expect("fits")).expect("no deadlock");
    for (rank, row) in schedule.rows().iter().enumerate() {
        for number in 0..row.len() {
            let mut rows = schedule.rows().to_vec();
            let action = rows[rank].remove(number);
            let without = Schedule::new(schedule.placement().clone(), schedule.micro_batches(), rows);
            assert!(
                validate(&without, Purpose::Training).is_err(),
                "{action} of rank {rank}"
            );
        }
    }
}

#[test]
fn a_row_is_in_order() {
    assert_eq!(
        refused("0B0,0F0"),
        "rank 0 is refused at `0B0`: `0F0` has to come before it"
    );
    assert_eq!(
        refused("0F0,0W0,0I0"),
        "rank 0 is refused at `0W0`: `0I0` has to come before it"
    );
    assert_eq!(
        refused("1F0,0F0,1B0,0B0"),
        "rank 0 is refused at `1F0`: `0F0` has to come before it"
    );
    assert_eq!(
        refused("0F0,1F0,0B0,1B0"),
        "rank 0 is refused at `0B0`: `1B0` has to come before it"
    );
}

#[test]
fn gradients_are_added_in_the_order_of_micro_batches() {
    assert_eq!(
        refused("0F0,0F1,0I0,0I1,0W1,0W0"),
        "rank 0 is refused at `0W0`: it comes after `0W1`, but a stage takes micro-batches in order, as sums depend on it"
    );
    assert!(refused("0F0,0F1,0B1,0B0").contains("`0B0`: it comes after `0B1`"));
    // Losses are added in forward, gradients of norms in I.
    assert!(refused("0F1,0F0,0B0,0B1").contains("`0F0`: it comes after `0F1`"));
    assert!(refused("0F0,0F1,0I1,0I0,0W0,0W1").contains("`0I0`: it comes after `0I1`"));
}

#[test]
fn messages_are_sent_and_received_once() {
    let good = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n";
    let schedule = schedule_of(good);
    assert_eq!(validate(&schedule, Purpose::Training), Ok(()));
    assert_eq!(schedule.to_string(), good);
    let without = |cell: &str| refused(&good.replace(cell, ""));
    assert_eq!(
        without("0SEND_F0"),
        "rank 0 is refused at `0SEND_F0`: the action is missing"
    );
    assert_eq!(
        without("1SEND_B0"),
        "rank 1 is refused at `1SEND_B0`: the action is missing"
    );
    assert_eq!(
        without("1RECV_F0"),
        "rank 1 is refused at `1F0`: `1RECV_F0` has to come before it"
    );
    assert_eq!(
        refused("0F0,0SEND_F0,1RECV_F0,1F0,1B0,0B0"),
        "rank 0 is refused at `0SEND_F0`: no other rank is at its other end"
    );
    assert_eq!(
        refused(
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F1,1RECV_F0,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1"
        ),
        "the schedule deadlocks: rank 0 at `0SEND_F0` waits for `1RECV_F0` of rank 1; rank 1 at `1RECV_F1` waits for `0SEND_F1` of rank 0"
    );
}

#[test]
fn a_deadlock_is_shown_as_a_cycle() {
    // Each receive just before what needs it: to send F1, rank 0 waits for rank 1, which waits for it to take B0.
    assert_eq!(
        refused(
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"
        ),
        "the schedule deadlocks: rank 0 at `0SEND_F1` waits for `1RECV_F1` of rank 1; rank 1 at `1SEND_B0` waits for `0RECV_B0` of rank 0"
    );
    // By data alone.
    assert_eq!(
        refused("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"),
        "the schedule deadlocks: rank 0 at `0B0` waits for `1B0` of rank 1; rank 1 at `1F1` waits for `0F1` of rank 0"
    );
}

/// In pytorch 172668 and 188833 a step hung whose receives were all issued first.
#[test]
fn receives_at_the_front_deadlock() {
    let schedule = with_transfers(&one_f_one_b(shape(3, 4)).expect("fits")).expect("no deadlock");
    let text = schedule.to_string();
    let to_front = |row: &str| {
        let (receives, others): (Vec<&str>, Vec<&str>) =
            row.split(',').partition(|cell| cell.contains("RECV"));
        [receives, others].concat().join(",")
    };
    let rows: Vec<String> = text.lines().map(to_front).collect();
    assert_eq!(
        refused(&rows.join("\n")),
        "the schedule deadlocks: rank 0 at `0RECV_B0` waits for `1SEND_B0` of rank 1; rank 1 at `1RECV_F0` waits for `0SEND_F0` of rank 0"
    );
}

#[test]
fn evaluation_is_forward_only() {
    let schedule = one_f_one_b(shape(4, 8)).expect("fits");
    assert_eq!(
        validate(
            &with_transfers(&forward_only(&schedule)).expect("no deadlock"),
            Purpose::Evaluation
        ),
        Ok(())
    );
    assert_eq!(
        validate(&schedule, Purpose::Evaluation)
            .expect_err("has backward")
            .to_string(),
        "rank 0 is refused at `0B0`: evaluation has no backward"
    );
    let without_backward = validate(&forward_only(&schedule), Purpose::Training).expect_err("no backward");
    assert_eq!(
        without_backward.to_string(),
        "rank 0 is refused at `0I0`: the action is missing"
    );
}

#[test]
fn actions_belong_to_the_pipeline() {
    let schedule = schedule_of("0F0,0B0\n1F0,1B0");
    let swapped = {
        let mut rows = schedule.rows().to_vec();
        rows.swap(0, 1);
        Schedule::new(schedule.placement().clone(), 1, rows)
    };
    assert_eq!(
        validate(&swapped, Purpose::Training)
            .expect_err("on the wrong rank")
            .to_string(),
        "rank 1 is refused at `1F0`: the stage is on rank 1"
    );
    let fewer = Schedule::new(schedule.placement().clone(), 0, schedule.rows().to_vec());
    assert_eq!(
        validate(&fewer, Purpose::Training)
            .expect_err("too many")
            .to_string(),
        "rank 0 is refused at `0F0`: there are 2 stages and 0 micro-batches"
    );
}
