//! One step of some ranks as an SVG, which every browser shows.

use std::fmt::Write as _;

use super::lanes::{DrawnLane, LaneBox, LanePanel, LanePicture};
use super::{About, Kind, Lane, Overlap, Span, TraceFile};

/// Most ranks that are drawn: the first ones.
const MAX_RANKS: usize = 8;
/// Most characters of the line that says how a run trains.
const MAX_RUN: usize = 200;
/// Height of a block, as a part of the pass that it belongs to.
const BLOCK: f64 = 0.75;

/// Draws one step; `None` if no rank has it.
pub fn picture(file: &TraceFile, step: u64) -> Option<String> {
    let name = format!("step {step}");
    let steps = file.ranks.iter();
    let drawn: Vec<RankStep<'_>> = steps
        .filter_map(|(about, spans)| RankStep::find(about, spans, &name))
        .take(MAX_RANKS)
        .collect();
    let first = drawn.first()?;
    let starts = drawn.iter().map(|rank| rank.time[0]);
    let start = starts.fold(f64::INFINITY, f64::min);
    let end = drawn.iter().map(|rank| rank.time[1]).fold(0.0, f64::max);
    let ranks = match first.about.world_size as usize {
        all if all > drawn.len() => format!("the first {} of {all} ranks", drawn.len()),
        1 => "1 rank".to_owned(),
        all => format!("{all} ranks"),
    };
    let picture = LanePicture {
        title: &format!("Step {step}, {ranks}"),
        subtitle: &first.about.run.chars().take(MAX_RUN).collect::<String>(),
        legend: &LEGEND.map(|(_, class, words)| (class, words)),
        colours: COLOURS,
        end: ms((end - start).max(1.0)),
        unit: "ms",
        panels: drawn.iter().map(|rank| rank.panel([start, end])).collect(),
    };
    Some(picture.draw())
}

fn ms(us: f64) -> f64 {
    us * 1e-3
}

/// A step of one rank.
struct RankStep<'a> {
    about: &'a About,
    spans: &'a [Span],
    /// When it begins and ends, in microseconds.
    time: [f64; 2],
    lanes: Vec<&'a Lane>,
}

impl<'a> RankStep<'a> {
    fn find(about: &'a About, spans: &'a [Span], name: &str) -> Option<Self> {
        let step = spans
            .iter()
            .find(|span| span.lane == Lane::Steps && span.name == name)?;
        let time = [step.start_us, step.end_us];
        let inside = spans.iter().filter(|span| is_within(span, time));
        let mut lanes: Vec<&Lane> = inside.map(|span| &span.lane).collect();
        lanes.retain(|lane| **lane != Lane::Steps);
        lanes.sort_unstable();
        lanes.dedup();
        Some(Self {
            about,
            spans,
            time,
            lanes,
        })
    }

    /// Its lanes within the picture's time.
    fn panel(&self, time: [f64; 2]) -> LanePanel {
        let lane = |lane: &&Lane| {
            let of_lane = self.spans.iter().filter(|span| span.lane == **lane);
            let shown = of_lane.filter(|span| span.kind != Kind::Operation && is_within(span, time));
            DrawnLane {
                name: lane.to_string(),
                height: if **lane == Lane::Compute { 30.0 } else { 20.0 },
                boxes: shown.map(|span| lane_box(span, time[0])).collect(),
            }
        };
        LanePanel {
            heading: format!("rank {}: {}", self.about.rank, self.note()),
            lanes: self.lanes.iter().map(lane).collect(),
        }
    }

    /// How long the step took, and how much of its communication was hidden.
    fn note(&self) -> String {
        let overlap = Overlap::of(self.spans, [self.time]);
        let mut note = format!("{:.1} ms", ms(self.time[1] - self.time[0]));
        if let Some(hidden) = overlap.hidden() {
            let (moving, hidden) = (ms(overlap.moving_us), hidden * 100.0);
            let _ = write!(
                note,
                "; {moving:.1} ms of communication, {hidden:.0} % of it hidden"
            );
        }
        if overlap.late_us > 0.0 {
            let _ = write!(note, "; {:.1} ms waiting for slower ranks", ms(overlap.late_us));
        }
        note
    }
}

fn is_within(span: &Span, [start, end]: [f64; 2]) -> bool {
    span.end_us > start && span.start_us < end
}

fn lane_box(span: &Span, start: f64) -> LaneBox {
    let mut tip = format!("{}: {:.3} ms", span.name, ms(span.length_us()));
    if let Some(collective) = span.collective.as_ref().filter(|collective| collective.bytes > 0) {
        let _ = write!(tip, ", {:.2} MiB", collective.bytes as f64 / (1 << 20) as f64);
    }
    let class = LEGEND.iter().find(|(kind, ..)| *kind == span.kind);
    LaneBox {
        time: [span.start_us, span.end_us].map(|us| ms(us - start)),
        class: class.map_or("ground", |(_, class, _)| class).to_owned(),
        label: label(span).to_owned(),
        tip: Some(tip),
        height: if block(span).is_some() { BLOCK } else { 1.0 },
        layer: match span.kind {
            Kind::Late => 2,
            Kind::Wait => 1,
            _ => 0,
        },
    }
}

/// The name of a block, or what an operation between ranks is for.
fn label(span: &Span) -> &str {
    let name = span.name.as_ref();
    match span.kind {
        Kind::Forward | Kind::Backward => block(span).unwrap_or(""),
        Kind::Gradients | Kind::Parameters | Kind::Activations | Kind::Other => name
            .split_once('(')
            .map_or(name, |(_, tag)| tag.trim_end_matches(')')),
        _ => name,
    }
}

/// The block of which this is a pass; `None` if it is the pass of the whole model.
fn block(span: &Span) -> Option<&str> {
    let name = span.name.as_ref();
    name.strip_prefix("forward ").or(name.strip_prefix("backward "))
}

/// Classes of boxes, and what they stand for.
const LEGEND: [(Kind, &str, &str); 10] = [
    (Kind::Data, "data", "data"),
    (Kind::Forward, "forward", "forward"),
    (Kind::Backward, "backward", "backward"),
    (Kind::Optimizer, "optimizer", "norm, clip, update"),
    (Kind::Wait, "wait", "stalled on communication"),
    (Kind::Late, "late", "a rank is late"),
    (Kind::Gradients, "gradients", "gradients"),
    (Kind::Parameters, "parameters", "parameters"),
    (Kind::Activations, "activations", "activations"),
    (Kind::Other, "other", "losses, norms"),
];

const COLOURS: &str = "\
.ground{fill:#f1f1f1}.data{fill:#9aa0a6}.forward{fill:#4c78a8}.backward{fill:#3f8f6b}\
.optimizer{fill:#8e6bb0}.wait{fill:#d9534f}.late{fill:#e9b4b2}.late+.in{fill:#6b2b29}.gradients{fill:#d9822b}\
.parameters{fill:#b59a1d}.activations{fill:#c0569b}.other{fill:#6b6b6b}";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::ClockReading;

    fn rank(rank: u32) -> (About, Vec<Span>) {
        let about = About {
            run: "a <b> & \u{1}c".into(),
            rank,
            world_size: 20,
            host: "node-a".into(),
            generation: 0,
            steps: [3, 4],
            clock: ClockReading {
                clock: "a".into(),
                ns: 0,
            },
            missed: 0,
        };
        let span = |lane: &Lane, kind, name: &'static str, start_us, end_us| Span {
            lane: lane.clone(),
            kind,
            name: name.into(),
            start_us,
            end_us,
            collective: None,
        };
        let comm = Lane::Communicator("world".into());
        let spans = vec![
            span(&Lane::Steps, Kind::Step, "step 3", 0.0, 1000.0),
            span(&Lane::Steps, Kind::Step, "step 4", 1000.0, 3000.0),
            span(&Lane::Compute, Kind::Forward, "forward", 900.0, 990.0),
            span(&Lane::Compute, Kind::Backward, "backward", 1000.0, 2500.0),
            span(&Lane::Compute, Kind::Backward, "backward h.0", 1100.0, 2400.0),
            span(&Lane::Compute, Kind::Operation, "gelu_backward", 1100.0, 1200.0),
            span(&Lane::Compute, Kind::Wait, "waits", 1100.0, 1500.0),
            span(&Lane::Compute, Kind::Wait, "waits", 2500.0, 3000.0),
            span(&comm, Kind::Gradients, "all-reduce (bucket 0)", 2000.0, 3000.0),
        ];
        (about, spans)
    }

    fn rects<'a>(svg: &'a str, class: &str) -> Vec<&'a str> {
        let class = format!("<rect class=\"{class}\"");
        svg.lines().filter(|line| line.starts_with(&class)).collect()
    }

    #[test]
    fn it_shows_one_step_to_scale() {
        let file = TraceFile { ranks: vec![rank(0)] };
        let svg = picture(&file, 4).unwrap();
        // One of each kind that is drawn is in the legend.
        assert_eq!(rects(&svg, "forward").len(), 0, "of the step before");
        let backward = rects(&svg, "backward");
        assert!(backward[0].contains("x=\"60.0\"") && backward[0].contains("width=\"810.0\""));
        assert!(backward[1].contains("<title>backward h.0: 1.300 ms</title>"));
        assert_eq!((backward.len(), rects(&svg, "gradients").len()), (3, 2));
        assert!(!svg.contains("gelu"));
        // Where nothing is above it.
        assert!(svg.contains(">h.0</text>"), "{svg}");
        assert!(svg.contains(">bucket 0</text>"));
        // In lines that fit a phone.
        assert!(
            svg.contains(">rank 0: 2.0 ms; 1.0 ms of communication, 50 % of it hidden <"),
            "{svg}"
        );
        let (words, file) = ("word ".repeat(30), &mut TraceFile { ranks: vec![rank(0)] });
        file.ranks[0].0.run = words;
        assert_eq!(picture(file, 4).unwrap().matches(">word word").count(), 3);
        assert!(svg.contains("a &lt;b&gt; &amp; \u{fffd}c") && svg.ends_with("</svg>\n"));
    }

    #[test]
    fn of_many_ranks_it_shows_the_first() {
        let file = TraceFile {
            ranks: (0..20).map(rank).collect(),
        };
        let svg = picture(&file, 3).unwrap();
        assert!(svg.contains("Step 3, the first 8 of 20 ranks"));
        assert!(svg.contains(">rank 7: ") && !svg.contains(">rank 8: "));
        assert_eq!(picture(&file, 5), None);
    }
}
