//! Pictures of a step of a pipeline: a lane a rank with its F, B, I and W, and below it what the rank keeps for backward;
//! time goes from left to right. Where a lane shows its ground, the rank does not compute: the bubble.

use std::fmt::Write as _;

use super::action::Action;
use super::simulator::{Interval, RankTimeline, Simulation};
use super::stages::Placement;
use crate::timeline::svg::Svg;

const WIDTH: f64 = 1200.0;
/// Where time begins, right of the names of the lanes.
const LEFT: f64 = 150.0;
const RIGHT: f64 = 1184.0;
/// Above the panels: title and legend.
const HEADER: f64 = 64.0;
/// Above the lanes of a panel.
const HEADING: f64 = 34.0;
const LANE: f64 = 26.0;
/// Of the curve of what is kept.
const MEMORY: f64 = 14.0;
const GAP: f64 = 10.0;
/// Between a lane and its curve.
const SEAM: f64 = 2.0;
/// Below the lanes of a panel: where time begins and ends.
const AXIS: f64 = 24.0;
/// What a character of a label takes.
const CHARACTER: f64 = 6.6;
/// Shades that chunks have; further ones have the last.
const SHADES: usize = 4;

/// What ticks are shown as.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Unit {
    /// In one of it.
    pub ticks: f64,
    /// Behind a number of it.
    pub name: &'static str,
}

/// A step, of the simulator or measured.
#[derive(Clone, Copy, Debug)]
pub struct Panel<'a> {
    /// What it is.
    pub heading: &'a str,
    /// Which rank holds which stage.
    pub placement: &'a Placement,
    /// What ranks did; a micro-batch keeps a byte of each stage.
    pub simulation: &'a Simulation,
    /// What its ticks are.
    pub unit: Unit,
}

impl Panel<'_> {
    /// How long it takes, the bubble, and the most that a rank keeps: in micro-batches of all that the rank holds.
    pub fn in_words(&self) -> String {
        format!(
            "{} {}, bubble {:.1} %, at most {} micro-batches kept",
            short(self.simulation.end as f64 / self.unit.ticks),
            self.unit.name,
            self.simulation.bubble_fraction() * 100.0,
            short(self.kept(self.simulation.peak_bytes())),
        )
    }

    /// Micro-batches of a rank's share.
    fn kept(&self, bytes: u64) -> f64 {
        (bytes as usize * self.placement.ranks()) as f64 / self.placement.stages() as f64
    }

    fn height(&self) -> f64 {
        HEADING + self.placement.ranks() as f64 * (LANE + SEAM + MEMORY + GAP) + AXIS
    }

    fn draw(&self, svg: &mut Svg, scale: &Scale, top: f64) {
        let (unit, end) = (self.unit, self.simulation.end);
        svg.text([16.0, top + 22.0], "heading", self.heading);
        svg.text([LEFT, top + 22.0], "", &self.in_words());
        let mut y = top + HEADING;
        for (rank, timeline) in self.simulation.ranks.iter().enumerate() {
            let stages: Vec<usize> = self.placement.stages_of(rank).collect();
            let numbers: Vec<String> = stages.iter().map(usize::to_string).collect();
            let noun = if stages.len() == 1 { "stage" } else { "stages" };
            let name = format!("rank {rank}: {noun} {}", numbers.join(", "));
            svg.text([16.0, y + 17.0], "", &name);
            svg.rect([LEFT, y, scale.x(end) - LEFT, LANE], "idle", None);
            for interval in &timeline.intervals {
                let action = interval.action;
                if action.kind.is_compute() {
                    let chunk = stages.iter().position(|stage| *stage == action.stage);
                    self.draw_action(svg, scale, (action, chunk.unwrap_or(0)), interval, y);
                }
            }
            self.draw_memory(svg, scale, timeline, y + LANE + SEAM + MEMORY);
            y += LANE + SEAM + MEMORY + GAP;
        }
        svg.text([LEFT, y + 12.0], "quiet", "0");
        let words = format!("{} {}", short(end as f64 / unit.ticks), unit.name);
        let x = scale.x(end) - words.chars().count() as f64 * CHARACTER;
        svg.text([x, y + 12.0], "quiet", &words);
    }

    fn draw_action(
        &self,
        svg: &mut Svg,
        scale: &Scale,
        (action, chunk): (Action, usize),
        interval: &Interval,
        y: f64,
    ) {
        let (left, right) = (scale.x(interval.start), scale.x(interval.end));
        let class = format!("{}{}", action.kind.name(), chunk.min(SHADES - 1));
        let tip = format!(
            "{action}: {}, {} {}",
            action.kind.noun(),
            short((interval.end - interval.start) as f64 / self.unit.ticks),
            self.unit.name
        );
        svg.rect([left, y, right - left, LANE], &class, Some(&tip));
        let label = action.micro_batch.to_string();
        if label.len() as f64 * CHARACTER + 2.0 < right - left {
            svg.text([f64::midpoint(left, right), y + LANE / 2.0 + 4.0], "in", &label);
        }
    }

    /// As steps above `bottom`, where the most that is kept has the whole height.
    fn draw_memory(&self, svg: &mut Svg, scale: &Scale, timeline: &RankTimeline, bottom: f64) {
        let ends = timeline.memory.iter().skip(1).map(|&(tick, _)| tick);
        for (&(start, bytes), end) in timeline.memory.iter().zip(ends.chain([self.simulation.end])) {
            let height = MEMORY * bytes as f64 / scale.most_bytes.max(1) as f64;
            let (left, right) = (scale.x(start), scale.x(end));
            if height > 0.0 && right > left {
                svg.rect([left, bottom - height, right - left, height], "kept", None);
            }
        }
        svg.line([LEFT, bottom, scale.x(self.simulation.end), bottom]);
        let words = format!("kept: {}", short(self.kept(timeline.peak_bytes)));
        svg.text([16.0, bottom - 2.0], "quiet", &words);
    }
}

/// From ticks to places, the same for all panels.
struct Scale {
    per_tick: f64,
    most_bytes: u64,
}

impl Scale {
    fn x(&self, tick: u64) -> f64 {
        LEFT + tick as f64 * self.per_tick
    }
}

/// Draws steps below each other, to one scale.
pub fn picture(title: &str, panels: &[Panel<'_>]) -> String {
    let steps = || panels.iter().map(|panel| panel.simulation);
    let end = steps().map(|step| step.end).max().unwrap_or(0).max(1);
    let scale = Scale {
        per_tick: (RIGHT - LEFT) / end as f64,
        most_bytes: steps().map(Simulation::peak_bytes).max().unwrap_or(0),
    };
    let height = HEADER + panels.iter().map(Panel::height).sum::<f64>();
    let mut svg = Svg::new([WIDTH, height], STYLE);
    svg.text([16.0, 26.0], "title", title);
    let mut x = 16.0;
    for (class, words) in LEGEND {
        svg.rect([x, 40.0, 14.0, 14.0], class, None);
        svg.text([x + 20.0, 51.0], "quiet", words);
        x += 20.0 + words.len() as f64 * CHARACTER + 20.0;
    }
    let mut top = HEADER;
    for panel in panels {
        panel.draw(&mut svg, &scale, top);
        top += panel.height();
    }
    svg.finish()
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
const STYLE: &str = "\
.page{fill:#fff}text{font:12px system-ui,sans-serif;fill:#222}.quiet{fill:#555}\
.title{font-size:16px;font-weight:600}.heading{font-weight:600}\
rect{stroke:#fff;stroke-width:.7}line{stroke:#888}.idle{fill:#dadada}.kept{fill:#9a7bbd;stroke:none}\
.F0{fill:#4c78a8}.F1{fill:#3e628a}.F2{fill:#325070}.F3{fill:#273e57}\
.B0{fill:#3b8562}.B1{fill:#306d50}.B2{fill:#275841}.B3{fill:#1e4532}\
.I0{fill:#2b8494}.I1{fill:#236c79}.I2{fill:#1c5762}.I3{fill:#16444c}\
.W0{fill:#b5651d}.W1{fill:#945318}.W2{fill:#784313}.W3{fill:#5e350f}\
@media (prefers-color-scheme:dark){.page{fill:#16181c}text{fill:#e4e4e4}.quiet{fill:#ababab}\
rect{stroke:#16181c}.idle{fill:#45484e}}\
.in{fill:#fff;font-size:11px;text-anchor:middle;pointer-events:none}";

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

    fn panel((placement, simulation): &(Placement, Simulation)) -> Panel<'_> {
        Panel {
            heading: "simulated",
            placement,
            simulation,
            unit: Unit {
                ticks: (placement.stages() / placement.ranks()) as f64,
                name: "units",
            },
        }
    }

    #[test]
    fn a_small_one_as_svg() {
        let step = simulated("1f1b", 2, 4);
        insta::assert_snapshot!(picture("1F1B <2 ranks>", &[panel(&step)]));
    }

    #[test]
    fn the_words_have_the_golden_values() {
        let words =
            |schedule, ranks, micro_batches| panel(&simulated(schedule, ranks, micro_batches)).in_words();
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
        let svg = picture("ZBV", &[panel(&step), panel(&step)]);
        let count = |class: &str| svg.matches(&format!("<rect class=\"{class}\"")).count();
        // Two panels of two ranks with four micro-batches; one of each is in the legend.
        assert_eq!([count("F0"), count("F1"), count("F2")], [17, 16, 0]);
        assert_eq!(count("idle"), 5);
        assert!(svg.contains("rank 0: stages 0, 3") && svg.contains("kept: 2"));
    }
}
