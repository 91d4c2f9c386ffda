//! Round trips, and errors for files that are not schedules.

use super::*;
use crate::parallel::pipeline::generators::{PipelineShape, dual_pipe_v, interleaved_1f1b, zbv};
use crate::parallel::pipeline::passes::{with_reduction, with_transfers};

fn refused(text: &str) -> String {
    read(text).expect_err("no schedule").to_string()
}

#[test]
fn what_is_written_is_read() {
    let shape = PipelineShape {
        ranks: 4,
        chunks: 2,
        micro_batches: 8,
    };
    for schedule in [interleaved_1f1b(shape), zbv(shape), dual_pipe_v(shape)] {
        let compute = schedule.expect("fits");
        assert_eq!(
            read(&write(&compute, CsvFormat::ComputeOnly)).as_ref(),
            Ok(&compute)
        );
        let complete = with_transfers(&with_reduction(&compute)).map_rows(|rank, row| {
            let [unshard, reshard] = [ActionKind::Unshard, ActionKind::Reshard]
                .map(|kind| Cell::One(Action::of_stage(rank, rank, kind)));
            [&[unshard][..], row, &[reshard]].concat()
        });
        assert_eq!(
            read(&write(&complete, CsvFormat::ComputeComms)).as_ref(),
            Ok(&complete)
        );
        let with_steps = complete.map_rows(|rank, row| {
            let step = Cell::One(Action::of_stage(rank, rank, ActionKind::Step));
            [row, &[step]].concat()
        });
        assert_eq!(
            read(&write(&with_steps, CsvFormat::ComputeComms)).as_ref(),
            Ok(&complete)
        );
        assert_eq!(
            read(&write(&with_steps, CsvFormat::ComputeOnly)).as_ref(),
            Ok(&compute)
        );
    }
}

#[test]
fn bubbles_quotes_and_line_ends_of_pythons_csv_are_read() {
    let schedule = read(",  ,0F0,\"0UNSHARD\",,0B0\r\n1F0, 1B0 ,,\r\n\r\n").expect("a schedule");
    assert_eq!(
        write(&schedule, CsvFormat::ComputeComms),
        "0F0,0UNSHARD,0B0\n1F0,1B0\n"
    );
    assert_eq!(schedule.micro_batches(), 1);
    assert_eq!(read("0F0,0STEP").expect("a schedule").rows()[0].len(), 2);
}

#[test]
fn the_placement_follows_from_the_rows() {
    let schedule = read("0F0,3F0\n1F0,2F0\n").expect("a schedule");
    assert_eq!(schedule.placement(), &Placement::v_shaped(2, 2));
    let schedule = read("0F0,2F0\n1F0,3F0\n").expect("a schedule");
    assert_eq!(schedule.placement(), &Placement::looped(2, 2));
}

#[test]
fn errors_name_row_column_and_cell() {
    let of_row_2 = |cell: &str| refused(&format!("0F0,0B0\n1F0,,{cell},1B0\n"));
    assert_eq!(
        of_row_2("1X0"),
        "row 2, column 3, `1X0`: expected an action: a stage, a kind and a micro-batch, such as `2F1`"
    );
    for no_action in ["F0", "1", "1f0", "1F0x", "1F-1", "-1F0", "1BW0"] {
        assert!(
            of_row_2(no_action).contains("expected an action: a stage"),
            "{no_action}"
        );
    }
    assert_eq!(
        of_row_2("1F"),
        "row 2, column 3, `1F`: the micro-batch is missing"
    );
    assert_eq!(
        of_row_2("1UNSHARD0"),
        "row 2, column 3, `1UNSHARD0`: this kind of action has no micro-batch"
    );
    assert_eq!(
        of_row_2("0F1"),
        "row 2, column 3, `0F1`: stage 0 is also in row 1"
    );
    for no_overlap in [
        "(1F1;1F0)OVERLAP_F_B",
        "(1B0;1F1)OVERLAP_F_B",
        "(1F1)OVERLAP_F_B",
        "(1F1;1B0)",
    ] {
        assert!(
            of_row_2(no_overlap).contains("expected one F that overlaps with one B or I"),
            "{no_overlap}"
        );
    }
    for too_large in ["1F1048576", "1048576F1", "1F99999999999999999999"] {
        let message = format!(
            "row 2, column 3, `{too_large}`: numbers of stages and micro-batches must be below 1048576"
        );
        assert_eq!(of_row_2(too_large), message);
    }
}

#[test]
fn rows_and_stages_must_not_be_missing() {
    assert_eq!(refused("0F0\n\n1F0\n"), "row 2 has no action");
    assert_eq!(refused("0F0\n2F0\n"), "no row has stage 1, but a row has stage 2");
    assert_eq!(
        refused("0F0\n1048575F0\n"),
        "no row has stage 1, but a row has stage 1048575"
    );
    assert_eq!(refused(" \n"), "the table is empty");
}
