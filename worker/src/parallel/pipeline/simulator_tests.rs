//! The tables of published schedules, and formulas over ranges of ranks and micro-batches.

use super::*;
use crate::parallel::pipeline::generators::{
    PipelineShape, gpipe, greedy, interleaved_1f1b, one_f_one_b, zb_h1, zbv,
};
use crate::parallel::pipeline::passes::forward_only;

const fn shape(ranks: usize, chunks: usize, micro_batches: usize) -> PipelineShape {
    PipelineShape {
        ranks,
        chunks,
        micro_batches,
    }
}

fn run_on(schedule: &Schedule, transit: u64) -> Simulation {
    let costs = vec![StageCosts::UNIT; schedule.placement().stages()];
    simulate(schedule, &costs, transit).expect("no deadlock")
}

/// In ticks of a chunk, on ideal links.
fn run(schedule: &Schedule) -> Simulation {
    run_on(schedule, 0)
}

/// Length and peak, both for a rank's share of the model, and the bubble in percent.
fn numbers(schedule: &Schedule) -> (f64, f64, f64) {
    let simulation = run(schedule);
    let chunks = schedule.placement().stages() as f64 / schedule.placement().ranks() as f64;
    let percent = (simulation.bubble_fraction() * 1000.0).round() / 10.0;
    (
        simulation.end as f64 / chunks,
        percent,
        simulation.peak_bytes() as f64 / chunks,
    )
}

#[test]
fn gpipe_and_1f1b_as_in_the_table() {
    let table = [
        (2, 4, 15.0, 20.0, 4.0, 2.0),
        (2, 8, 27.0, 11.1, 8.0, 2.0),
        (4, 4, 21.0, 42.9, 4.0, 4.0),
        (4, 8, 33.0, 27.3, 8.0, 4.0),
        (4, 16, 57.0, 15.8, 16.0, 4.0),
        (8, 8, 45.0, 46.7, 8.0, 8.0),
        (8, 16, 69.0, 30.4, 16.0, 8.0),
    ];
    for (ranks, micro_batches, length, bubble, gpipe_peak, peak) in table {
        let shape = shape(ranks, 1, micro_batches);
        assert_eq!(
            numbers(&gpipe(shape).expect("fits")),
            (length, bubble, gpipe_peak),
            "{shape:?}"
        );
        assert_eq!(
            numbers(&one_f_one_b(shape).expect("fits")),
            (length, bubble, peak),
            "{shape:?}"
        );
    }
}

#[test]
fn interleaved_1f1b_as_in_the_table() {
    let table = [
        (2, 4, (13.5, 11.1, 2.5), (12.75, 5.9, 2.25)),
        (2, 8, (25.5, 5.9, 2.5), (24.75, 3.0, 2.25)),
        (4, 4, (16.5, 27.3, 4.0), (14.25, 15.8, 4.0)),
        (4, 8, (28.5, 15.8, 5.5), (26.25, 8.6, 4.75)),
        (4, 16, (52.5, 8.6, 5.5), (50.25, 4.5, 4.75)),
        (8, 8, (34.5, 30.4, 8.0), (29.25, 17.9, 8.0)),
        (8, 16, (58.5, 17.9, 11.5), (53.25, 9.9, 9.75)),
    ];
    for (ranks, micro_batches, two_chunks, four_chunks) in table {
        let of = |chunks| numbers(&interleaved_1f1b(shape(ranks, chunks, micro_batches)).expect("fits"));
        assert_eq!(of(2), two_chunks, "{ranks} ranks, {micro_batches} micro-batches");
        assert_eq!(of(4), four_chunks, "{ranks} ranks, {micro_batches} micro-batches");
    }
}

#[test]
fn zero_bubble_schedules_as_in_the_table() {
    let table = [
        (2, 4, (13.0, 7.7, 2.0), (12.5, 4.0, 2.0)),
        (2, 8, (25.0, 4.0, 2.0), (24.5, 2.0, 2.0)),
        (4, 4, (15.0, 20.0, 4.0), (13.5, 11.1, 4.0)),
        (4, 8, (27.0, 11.1, 4.0), (25.5, 5.9, 4.0)),
        (4, 16, (51.0, 5.9, 4.0), (49.5, 3.0, 4.0)),
        (8, 8, (31.0, 22.6, 8.0), (27.5, 12.7, 8.0)),
        (8, 16, (55.0, 12.7, 8.0), (51.5, 6.8, 8.0)),
    ];
    for (ranks, micro_batches, of_zb_h1, of_zbv) in table {
        let of = |schedule: Result<Schedule, _>| numbers(&schedule.expect("fits"));
        assert_eq!(of(zb_h1(shape(ranks, 1, micro_batches))), of_zb_h1);
        assert_eq!(of(zbv(shape(ranks, 2, micro_batches))), of_zbv);
        // The pattern of ZBV needs 2P − 1 micro-batches.
        if micro_batches < 2 * ranks - 1 {
            let greedy = greedy(shape(ranks, 2, micro_batches));
            assert_eq!(of(greedy), of_zbv);
        }
    }
}

#[test]
fn lengths_and_peaks_follow_the_formulas() {
    for p in 1..=8 {
        for m in 1..=3 * p + 1 {
            let one = shape(p, 1, m);
            let of_gpipe = run(&gpipe(one).expect("fits"));
            assert_eq!(
                (of_gpipe.end, of_gpipe.peak_bytes()),
                ((3 * (m + p - 1)) as u64, m as u64)
            );
            let of_1f1b = run(&one_f_one_b(one).expect("fits"));
            assert_eq!(of_1f1b.end, of_gpipe.end);
            assert_eq!(of_1f1b.peak_bytes(), m.min(p) as u64);
            let forward = run(&forward_only(&one_f_one_b(one).expect("fits")));
            assert_eq!(forward.end, (m + p - 1) as u64);
            if m >= p {
                let of_zb_h1 = run(&zb_h1(one).expect("fits"));
                assert_eq!(of_zb_h1.end, (3 * m + p - 1) as u64);
                let peaks: Vec<u64> = of_zb_h1.ranks.iter().map(|rank| rank.peak_bytes).collect();
                assert_eq!(peaks, vec![m.min(p) as u64; p], "the same on every rank");
            }
            // In ticks of a chunk, of which a rank has two.
            if m >= 2 * p - 1 {
                let of_zbv = run(&zbv(shape(p, 2, m)).expect("fits"));
                assert_eq!(of_zbv.end, (6 * m + p - 1) as u64);
                assert_eq!(of_zbv.peak_bytes(), (2 * p) as u64);
            }
        }
    }
}

#[test]
fn interleaving_shortens_the_bubble_for_any_number_of_micro_batches() {
    for (p, v) in [
        (1, 2),
        (2, 2),
        (2, 3),
        (3, 2),
        (4, 2),
        (4, 3),
        (4, 4),
        (5, 3),
        (8, 2),
    ] {
        for m in 1..=3 * p + 1 {
            let simulation = run(&interleaved_1f1b(shape(p, v, m)).expect("fits"));
            if m >= p {
                assert_eq!(
                    simulation.end,
                    (3 * m * v + 3 * (p - 1)) as u64,
                    "P {p}, M {m}, v {v}"
                );
            }
            if m.is_multiple_of(p) {
                let peak = (m * v).min(p * v + p - 1);
                assert_eq!(simulation.peak_bytes(), peak as u64, "P {p}, M {m}, v {v}");
            }
        }
    }
}

#[test]
fn the_greedy_schedule_is_as_short_as_zbv_or_nearly() {
    let up_to_8 = (1..=8).flat_map(|p| (p..2 * p).map(move |m| (p, m)));
    for (p, m) in up_to_8.chain([(11, 13), (13, 15), (14, 16), (16, 26)]) {
        let simulation = run(&greedy(shape(p, 2, m)).expect("fits"));
        let least = (6 * m + p - 1) as u64;
        let most = match p {
            ..=6 => least,
            7 | 8 => least + 2,
            _ => least + least / 10,
        };
        assert!((least..=most).contains(&simulation.end), "P {p}, M {m}");
        assert!(simulation.peak_bytes() <= 2 * p as u64, "P {p}, M {m}");
    }
}

/// The first I comes to rank 0 after P·F + (P − 1)·I, and until then P forwards are all that memory allows.
#[test]
fn the_bubble_of_zb_h1_with_unequal_times() {
    for (f, i, w) in [
        (1, 1, 1),
        (2, 3, 1),
        (3, 2, 2),
        (2, 2, 3),
        (10, 13, 7),
        (10, 7, 13),
        (3, 5, 4),
        (1, 2, 3),
    ] {
        for (p, m) in [(2, 2), (2, 5), (4, 4), (4, 9), (8, 8), (8, 20)] {
            let costs = StageCosts {
                forward: f,
                input_gradient: i,
                weight_gradient: w,
                ..StageCosts::UNIT
            };
            let schedule = zb_h1(shape(p, 1, m)).expect("fits");
            let simulation = simulate(&schedule, &vec![costs; p], 0).expect("no deadlock");
            let bubble = (p as u64 - 1) * f.max(i).max((f + i).saturating_sub(w));
            assert_eq!(simulation.bubble(0), bubble, "P {p}, M {m}, F {f}, I {i}, W {w}");
        }
    }
}

#[test]
fn links_take_their_time_and_carry_one_message_at_a_time() {
    let (schedule, transit) = (gpipe(shape(4, 1, 2)).expect("fits"), 5);
    // Three messages one after the other in forward, and three in backward. A message takes longer than F and B: the second
    // one waits 4 ticks for the first, and 3 on the way back.
    let end = 3 * (2 + 4 - 1) + 6 * transit + 4 + 3;
    assert_eq!(run_on(&schedule, transit).end, end);
}

#[test]
fn a_timeline_says_when_what_ran_and_what_was_kept() {
    let simulation = run_on(&one_f_one_b(shape(2, 1, 2)).expect("fits"), 0);
    let rows: Vec<String> = simulation
        .ranks
        .iter()
        .map(|rank| {
            let intervals = rank.intervals.iter();
            let texts = intervals.map(|it| format!("{} {}-{}", it.action, it.start, it.end));
            texts.collect::<Vec<_>>().join(", ")
        })
        .collect();
    assert_eq!(
        rows,
        [
            "0F0 0-1, 0F1 1-2, 0B0 4-6, 0B1 7-9",
            "1F0 1-2, 1B0 2-4, 1F1 4-5, 1B1 5-7"
        ]
    );
    assert_eq!(simulation.ranks[0].memory, [(0, 1), (1, 2), (6, 1), (9, 0)]);
    assert_eq!(simulation.ranks[1].memory, [(1, 1), (4, 0), (4, 1), (7, 0)]);
    assert_eq!((simulation.bubble(0), simulation.ranks[0].busy), (3, 6));
}
