//! A simulated step of a pipeline as text.

use std::fmt::Write as _;

use super::simulator::{Interval, Simulation};
use super::stages::Placement;

/// How long a step takes in units, where a unit is the F of all stages of a rank; the bubble; and the most that a rank
/// keeps, in micro-batches of all that it holds. In the simulation an F takes a tick, and a micro-batch keeps a byte of
/// each stage.
pub fn summary(placement: &Placement, simulation: &Simulation) -> String {
    let of_rank = |number: u64| (number as usize * placement.ranks()) as f64 / placement.stages() as f64;
    format!(
        "{} units, bubble {:.1} %, at most {} micro-batches kept",
        short(of_rank(simulation.end)),
        simulation.bubble_fraction() * 100.0,
        short(of_rank(simulation.peak_bytes())),
    )
}

/// Where actions last few ticks: a row a rank and a column a tick; `.` where a rank does not compute.
pub fn grid(simulation: &Simulation) -> String {
    let computes = |interval: &Interval| interval.action.kind.is_compute();
    let all = simulation.ranks.iter().flat_map(|rank| &rank.intervals);
    let lengths = all
        .filter(|interval| computes(interval))
        .map(|interval| interval.action.to_string().len());
    let width = lengths.max().unwrap_or(0) + 1;
    let mut text = String::new();
    for (rank, timeline) in simulation.ranks.iter().enumerate() {
        let mut columns = vec![".".to_owned(); simulation.end as usize];
        for interval in timeline.intervals.iter().filter(|interval| computes(interval)) {
            let (start, end) = (interval.start as usize, interval.end as usize);
            columns[start..end].fill("-".repeat(width - 1));
            if let Some(first) = columns[start..end].first_mut() {
                *first = interval.action.to_string();
            }
        }
        let _ = write!(text, "rank {rank:<3}");
        for column in columns {
            let _ = write!(text, " {column:<0$}", width - 1);
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

/// With as many decimals as tell something, two at most.
fn short(number: f64) -> String {
    ((number * 100.0).round() / 100.0).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parallel::pipeline::{Links, PipelinePlan, StageCosts, simulate};

    fn simulated(schedule: &str, ranks: usize, micro_batches: usize) -> (Placement, Simulation) {
        let plan = PipelinePlan::named(schedule, ranks, None, micro_batches).unwrap();
        let costs = vec![StageCosts::UNIT; plan.placement().stages()];
        let simulation = simulate(plan.schedule(), &costs, Links::IDEAL).unwrap();
        (plan.placement().clone(), simulation)
    }

    #[test]
    fn the_words_have_the_golden_values() {
        let words = |schedule, ranks, micro_batches| {
            let (placement, simulation) = simulated(schedule, ranks, micro_batches);
            summary(&placement, &simulation)
        };
        insta::assert_snapshot!(words("1f1b", 2, 4), @"15 units, bubble 20.0 %, at most 2 micro-batches kept");
        insta::assert_snapshot!(words("interleaved", 4, 8), @"28.5 units, bubble 15.8 %, at most 5.5 micro-batches kept");
        insta::assert_snapshot!(words("zbv", 4, 8), @"25.5 units, bubble 5.9 %, at most 4 micro-batches kept");
    }

    #[test]
    fn as_text_a_column_is_a_tick() {
        insta::assert_snapshot!(grid(&simulated("1f1b", 2, 3).1), @r"
        rank 0   0F0 0F1 .   .   0B0 --- 0F2 0B1 --- .   0B2 ---
        rank 1   .   1F0 1B0 --- 1F1 1B1 --- 1F2 1B2 --- .   .
        ");
        assert!(
            grid(&simulated("zbv", 2, 4).1)
                .lines()
                .all(|line| line.len() < 8 + 4 * 26)
        );
    }
}
