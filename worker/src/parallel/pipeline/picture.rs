//! Pictures of a step of a pipeline: a lane a rank with its F, B, I and W, and below it what the rank keeps for backward;
//! time goes from left to right. Where a lane shows its ground, the rank does not compute: the bubble.

use std::fmt::Write as _;

use super::simulator::{Interval, RankTimeline, Simulation};
use super::stages::Placement;
use crate::timeline::lanes::{DrawnLane, LaneBox, LanePanel, LanePicture};

const LANE: f64 = 26.0;
/// Height of the curve of what is kept.
const MEMORY: f64 = 14.0;
/// Shades that chunks have; further chunks have the last one.
const SHADES: usize = 4;

/// The picture of a simulated step. A unit of time is the F of all stages of a rank.
#[derive(Clone, Copy, Debug)]
pub struct SchedulePicture<'a> {
    /// Which rank holds which stage.
    pub placement: &'a Placement,
    /// The actions of all ranks; a micro-batch keeps a byte of each stage, and an F takes a tick.
    pub simulation: &'a Simulation,
}

impl SchedulePicture<'_> {
    /// How long it takes, the bubble, and the most that a rank keeps: in micro-batches of all that the rank holds.
    pub fn in_words(&self) -> String {
        format!(
            "{} units, bubble {:.1} %, at most {} micro-batches kept",
            short(self.time(self.simulation.end)),
            self.simulation.bubble_fraction() * 100.0,
            short(self.kept(self.simulation.peak_bytes())),
        )
    }

    /// Micro-batches of a rank's share.
    fn kept(&self, bytes: u64) -> f64 {
        (bytes as usize * self.placement.ranks()) as f64 / self.placement.stages() as f64
    }

    fn time(&self, tick: u64) -> f64 {
        (tick as usize * self.placement.ranks()) as f64 / self.placement.stages() as f64
    }

    /// Draws two lanes for each rank: its actions, and below them what it keeps for backward.
    pub fn draw(&self, title: &str) -> String {
        let mut lanes = Vec::new();
        for (rank, timeline) in self.simulation.ranks.iter().enumerate() {
            lanes.push(self.actions(rank, timeline));
            lanes.push(self.memory(timeline));
        }
        let picture = LanePicture {
            title,
            subtitle: &self.in_words(),
            legend: &LEGEND,
            colours: COLOURS,
            end: self.time(self.simulation.end),
            unit: "units",
            panels: vec![LanePanel {
                heading: "simulated".to_owned(),
                lanes,
            }],
        };
        picture.draw()
    }

    fn actions(&self, rank: usize, timeline: &RankTimeline) -> DrawnLane {
        let stages: Vec<usize> = self.placement.stages_of(rank).collect();
        let numbers: Vec<String> = stages.iter().map(usize::to_string).collect();
        let noun = if stages.len() == 1 { "stage" } else { "stages" };
        let mut boxes = vec![LaneBox {
            time: [0.0, self.time(self.simulation.end)],
            class: "idle".into(),
            label: String::new(),
            tip: None,
            height: 1.0,
            layer: 0,
        }];
        for interval in &timeline.intervals {
            let action = interval.action;
            if action.kind.is_compute() {
                let chunk = stages.iter().position(|stage| *stage == action.stage);
                let shade = chunk.unwrap_or(0).min(SHADES - 1);
                let time = [interval.start, interval.end].map(|tick| self.time(tick));
                let length = short(time[1] - time[0]);
                boxes.push(LaneBox {
                    time,
                    class: format!("{}{shade}", action.kind.name()),
                    label: action.micro_batch.to_string(),
                    tip: Some(format!("{action}: {}, {length} units", action.kind.noun())),
                    height: 1.0,
                    layer: 1,
                });
            }
        }
        DrawnLane {
            name: format!("rank {rank}: {noun} {}", numbers.join(", ")),
            height: LANE,
            boxes,
        }
    }

    /// Steps, of which the most that any rank keeps has the whole height.
    fn memory(&self, timeline: &RankTimeline) -> DrawnLane {
        let most_bytes = self.simulation.peak_bytes();
        let ends = timeline.memory.iter().skip(1).map(|&(tick, _)| tick);
        let steps = timeline.memory.iter().zip(ends.chain([self.simulation.end]));
        let boxes = steps.filter(|&(&(start, bytes), end)| bytes > 0 && end > start);
        DrawnLane {
            name: format!("kept: {}", short(self.kept(timeline.peak_bytes))),
            height: MEMORY,
            boxes: boxes
                .map(|(&(start, bytes), end)| LaneBox {
                    time: [start, end].map(|tick| self.time(tick)),
                    class: "kept".into(),
                    label: String::new(),
                    tip: None,
                    height: bytes as f64 / most_bytes as f64,
                    layer: 0,
                })
                .collect(),
        }
    }
}

/// The same as text where actions last few ticks: a row a rank and a column a tick; `.` where a rank does not compute.
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

/// Classes, and what they stand for.
const LEGEND: [(&str, &str); 6] = [
    ("F0", "F: forward"),
    ("B0", "B: backward"),
    ("I0", "I: gradient of the input"),
    ("W0", "W: gradients of the weights"),
    ("idle", "idle"),
    ("kept", "kept for backward"),
];

/// A kind of action has a colour, and its chunks get darker.
const COLOURS: &str = "\
.idle{fill:#dadada}.kept{fill:#9a7bbd;stroke:none}\
.F0{fill:#4c78a8}.F1{fill:#3e628a}.F2{fill:#325070}.F3{fill:#273e57}\
.B0{fill:#3b8562}.B1{fill:#306d50}.B2{fill:#275841}.B3{fill:#1e4532}\
.I0{fill:#2b8494}.I1{fill:#236c79}.I2{fill:#1c5762}.I3{fill:#16444c}\
.W0{fill:#b5651d}.W1{fill:#945318}.W2{fill:#784313}.W3{fill:#5e350f}\
@media(prefers-color-scheme:dark){.idle{fill:#45484e}}";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parallel::pipeline::{PipelinePlan, StageCosts, simulate};

    fn simulated(schedule: &str, ranks: usize, micro_batches: usize) -> (Placement, Simulation) {
        let plan = PipelinePlan::named(schedule, ranks, None, micro_batches).unwrap();
        let costs = vec![StageCosts::UNIT; plan.placement().stages()];
        let simulation = simulate(plan.schedule(), &costs, 0).unwrap();
        (plan.placement().clone(), simulation)
    }

    fn shown((placement, simulation): &(Placement, Simulation)) -> SchedulePicture<'_> {
        SchedulePicture {
            placement,
            simulation,
        }
    }

    #[test]
    fn a_small_one_is_drawn_to_scale() {
        let svg = shown(&simulated("1f1b", 2, 4)).draw("1F1B <2 ranks>");
        // 15 units from 60 to 1140.
        for part in [
            "1F1B &lt;2 ranks&gt;",
            r#"<rect class="F0" x="60.0" y="130.0" width="72.0" height="26.0"><title>0F0: forward, 1 units</title></rect>"#,
            r#"<rect class="B0" x="348.0" y="130.0" width="144.0" height="26.0"><title>0B0: backward, 2 units</title></rect>"#,
            // Of two micro-batches that the rank keeps at most.
            r#"<rect class="kept" x="60.0" y="201.0" width="72.0" height="7.0"/>"#,
        ] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
    }

    #[test]
    fn the_words_have_the_golden_values() {
        let words =
            |schedule, ranks, micro_batches| shown(&simulated(schedule, ranks, micro_batches)).in_words();
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

    #[test]
    fn chunks_have_shades_and_bubbles_show() {
        let step = simulated("zbv", 2, 4);
        let svg = shown(&step).draw("ZBV");
        let count = |class: &str| svg.matches(&format!("<rect class=\"{class}\"")).count();
        // Two ranks with four micro-batches; one of each is in the legend.
        assert_eq!([count("F0"), count("F1"), count("F2")], [9, 8, 0]);
        assert_eq!(count("idle"), 3);
        assert!(svg.contains("rank 0: stages 0, 3") && svg.contains("kept: 2"));
    }
}
