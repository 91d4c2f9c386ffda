//! Against what PyTorch's generators make, and sizes that others' users ran into.

use super::*;
use crate::parallel::pipeline::action::Schedule;
use crate::parallel::pipeline::passes::{forward_only, with_transfers};
use crate::parallel::pipeline::validator::{Purpose, validate};

const fn shape(ranks: usize, chunks: usize, micro_batches: usize) -> PipelineShape {
    PipelineShape {
        ranks,
        chunks,
        micro_batches,
    }
}

fn text(schedule: Result<Schedule, ShapeError>) -> String {
    schedule.expect("the schedule exists").to_string()
}

/// FNV-1a of 64 bits.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn assert_runs(schedule: &Schedule, shape: PipelineShape) {
    for (purpose, schedule) in [
        (Purpose::Training, schedule),
        (Purpose::Evaluation, &forward_only(schedule)),
    ] {
        let complete = with_transfers(schedule).expect("no deadlock");
        let without =
            complete.map_rows(|(_, row)| row.iter().copied().filter(|a| a.kind.is_compute()).collect());
        assert_eq!(&without, schedule, "what computes keeps its order");
        let refusal = validate(&complete, purpose).err();
        assert_eq!(refusal.map(|refusal| refusal.to_string()), None, "{shape:?}");
    }
}

#[test]
fn schedules_read_like_the_papers() {
    assert_eq!(text(gpipe(shape(2, 1, 2))), "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n");
    assert_eq!(
        text(gpipe(shape(2, 2, 2))),
        "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1\n"
    );
    assert_eq!(
        text(one_f_one_b(shape(3, 1, 4))),
        "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3\n1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3\n2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3\n"
    );
    assert_eq!(
        text(interleaved_1f1b(shape(2, 2, 2))),
        "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\n"
    );
    assert_eq!(
        text(zb_h1(shape(2, 1, 3))),
        "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n"
    );
    assert_eq!(
        text(zbv(shape(2, 2, 3))),
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,3F2,3I2,3W2,0I1,0W1,0I2,0W2\n1F0,2F0,1F1,2F1,2I0,2W0,1F2,1I0,1W0,2F2,2I1,2W1,1I1,2I2,1I2,1W1,2W2,1W2\n"
    );
}

/// `zb1p_2rank_2stagep_compute.csv` of the same folder, without its bubbles.
#[test]
fn zb_h1_with_chunks_is_the_interleaved_zero_bubble_of_pytorch() {
    let text = text(zb_h1(shape(2, 2, 8)));
    assert!(text.starts_with("0F0,0F1,2F0,2F1,2I0,2W0,0F2,2I1,2W1,0F3,0I0,0W0,"));
    assert_eq!(hash(&text), 9_646_976_560_495_348_581, "{text}");
}

/// The shapes of PyTorch's `test_pipeline_order*`, as (chunks, micro-batches, ranks).
#[test]
fn the_shapes_of_pytorchs_tests_run() {
    let shapes = [
        (2, 2, 2),
        (2, 8, 4),
        (4, 16, 4),
        (3, 2, 2),
        (3, 12, 4),
        (4, 10, 5),
        (2, 3, 4),
        (2, 10, 4),
        (2, 15, 4),
    ];
    for (chunks, micro_batches, ranks) in shapes {
        let shape = shape(ranks, chunks, micro_batches);
        for schedule in [gpipe(shape), interleaved_1f1b(shape), zb_h1(shape)] {
            assert_runs(&schedule.expect("fits"), shape);
        }
        assert_eq!(zbv(shape).is_ok(), chunks == 2);
        if let Ok(schedule) = zbv(shape) {
            assert_runs(&schedule, shape);
        }
    }
}

#[test]
fn the_largest_shape_of_pytorchs_tests_runs() {
    let shape = shape(64, 4, 128);
    assert_runs(&interleaved_1f1b(shape).expect("fits"), shape);
}

/// In torchtitan 775 a step hung that had fewer micro-batches than ranks.
#[test]
fn any_number_of_micro_batches_runs_on_any_number_of_ranks() {
    for ranks in 1..=6 {
        for micro_batches in 1..=2 * ranks + 1 {
            for chunks in 1..=3 {
                let shape = shape(ranks, chunks, micro_batches);
                let all = [gpipe, one_f_one_b, interleaved_1f1b, zb_h1, zbv, greedy];
                let those = all.into_iter().filter_map(|generate| generate(shape).ok());
                those.for_each(|schedule| assert_runs(&schedule, shape));
            }
        }
    }
}

#[test]
fn what_does_not_exist_is_refused_in_words() {
    let refused = |schedule: Result<Schedule, ShapeError>| schedule.expect_err("does not fit").to_string();
    assert_eq!(
        refused(one_f_one_b(shape(4, 2, 8))),
        "1F1B does not support 4 ranks, 2 chunks per rank and 8 micro-batches: 1F1B has one chunk per rank; use interleaved 1F1B for several"
    );
    assert_eq!(
        refused(zb_h1(shape(4, 1, 0))),
        "ZB-H1 does not support 4 ranks, 1 chunk per rank and 0 micro-batches: each must be at least 1"
    );
    assert!(interleaved_1f1b(shape(4, 1, 8)).is_err());
    assert!(zbv(shape(4, 3, 8)).is_err());
    assert!(greedy(shape(4, 1, 8)).is_err());
}
