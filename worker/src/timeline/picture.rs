//! One step of some ranks as an SVG, which every browser shows: lanes below each other, time from left to right. The
//! pointer over a span tells its name and length.

use std::fmt::Write as _;

use super::overlap::Intervals;
use super::svg::{Svg, tick_distance};
use super::{About, Kind, Lane, Overlap, Span, TraceFile};

/// Most ranks that are drawn: the first ones.
const MAX_RANKS: usize = 8;

const WIDTH: f64 = 1600.0;
/// Where time begins, right of the names of the lanes.
const LEFT: f64 = 210.0;
const RIGHT: f64 = 1580.0;
const HEADER: f64 = 92.0;
const AXIS: f64 = 40.0;
/// Height of the line above a rank's lanes.
const TITLE: f64 = 30.0;
const GAP: f64 = 6.0;

/// What a character of a label takes.
const CHARACTER: f64 = 6.2;

/// Most characters of the line that says how a run trains.
const MAX_RUN: usize = 200;

/// Narrower than that is not drawn as it is: nobody would see it.
const NARROWEST: f64 = 0.6;

/// Draws one step. None if no rank has it.
pub fn picture(file: &TraceFile, step: u64) -> Option<String> {
    let name = format!("step {step}");
    let drawn: Vec<Rank<'_>> = file
        .ranks
        .iter()
        .filter_map(|(about, spans)| Rank::of(about, spans, &name))
        .take(MAX_RANKS)
        .collect();
    let first = drawn.first()?;
    let start = drawn
        .iter()
        .map(|rank| rank.step[0])
        .fold(f64::INFINITY, f64::min);
    let end = drawn.iter().map(|rank| rank.step[1]).fold(0.0, f64::max);
    let scale = Scale {
        start,
        per_us: (RIGHT - LEFT) / (end - start).max(1.0),
    };
    let height = HEADER + drawn.iter().map(Rank::height).sum::<f64>() + AXIS;
    let mut svg = Svg::new([WIDTH, height], STYLE);
    let others = match first.about.world_size as usize {
        all if all > drawn.len() => format!("the first {} of {all} ranks", drawn.len()),
        1 => "1 rank".to_owned(),
        all => format!("{all} ranks"),
    };
    svg.text([16.0, 30.0], "heading", &format!("Step {step}, {others}"));
    let run: String = first.about.run.chars().take(MAX_RUN).collect();
    svg.text([16.0, 52.0], "quiet", &run);
    legend(&mut svg);
    axis(&mut svg, &scale, (end - start).max(1.0), height - AXIS);
    let mut top = HEADER;
    for rank in &drawn {
        rank.draw(&mut svg, &scale, top);
        top += rank.height();
    }
    Some(svg.finish())
}

/// From microseconds to places.
struct Scale {
    start: f64,
    per_us: f64,
}

impl Scale {
    fn shows(&self, span: &Span) -> bool {
        self.x(span.end_us) > LEFT && self.x(span.start_us) < RIGHT
    }

    fn x(&self, us: f64) -> f64 {
        (LEFT + (us - self.start) * self.per_us).clamp(LEFT, RIGHT)
    }
}

struct Rank<'a> {
    about: &'a About,
    spans: &'a [Span],
    /// Begin and end of the step.
    step: [f64; 2],
    lanes: Vec<&'a Lane>,
}

impl<'a> Rank<'a> {
    fn of(about: &'a About, spans: &'a [Span], step: &str) -> Option<Self> {
        let step = spans
            .iter()
            .find(|span| span.lane == Lane::Steps && span.name == step)?;
        let step = [step.start_us, step.end_us];
        let inside = |span: &&Span| span.end_us > step[0] && span.start_us < step[1];
        let mut lanes: Vec<&Lane> = spans.iter().filter(inside).map(|span| &span.lane).collect();
        lanes.retain(|lane| **lane != Lane::Steps);
        lanes.sort_unstable();
        lanes.dedup();
        Some(Self {
            about,
            spans,
            step,
            lanes,
        })
    }

    fn height(&self) -> f64 {
        TITLE + self.lanes.iter().map(|lane| lane_height(lane) + GAP).sum::<f64>()
    }

    fn draw(&self, svg: &mut Svg, scale: &Scale, top: f64) {
        svg.text([16.0, top + 20.0], "rank", &format!("rank {}", self.about.rank));
        svg.text([LEFT, top + 20.0], "quiet", &self.says());
        let mut y = top + TITLE;
        for lane in &self.lanes {
            let height = lane_height(lane);
            svg.text([28.0, y + height / 2.0 + 4.0], "lane", &lane.to_string());
            svg.line([LEFT, y + height, RIGHT, y + height]);
            let of_lane = self.spans.iter().filter(|span| span.lane == **lane);
            let shown = of_lane.filter(|span| span.kind != Kind::Operation && scale.shows(span));
            let mut spans: Vec<&Span> = shown.collect();
            spans.sort_by_key(|span| layer(span.kind));
            let above = |lower: usize| {
                let above = spans.iter().filter(|span| layer(span.kind) > lower);
                Intervals::union(above.map(|span| [span.start_us, span.end_us]))
            };
            let above = [above(0), above(1), above(2)];
            for span in &spans {
                draw(svg, scale, span, [y, height], &above[layer(span.kind)]);
            }
            y += height + GAP;
        }
    }

    /// The step in words.
    fn says(&self) -> String {
        let ms = |us: f64| us * 1e-3;
        let length = ms(self.step[1] - self.step[0]);
        let overlap = Overlap::of(self.spans, [self.step]);
        let mut words = format!("{length:.1} ms");
        if let Some(hidden) = overlap.hidden() {
            let (moving, hidden) = (ms(overlap.moving_us), hidden * 100.0);
            let _ = write!(
                words,
                "; {moving:.1} ms of communication, {hidden:.0} % of it hidden"
            );
        }
        if overlap.late_us > 0.0 {
            let _ = write!(words, "; {:.1} ms waiting for slower ranks", ms(overlap.late_us));
        }
        words
    }
}

fn lane_height(lane: &Lane) -> f64 {
    match lane {
        Lane::Compute => 30.0,
        _ => 20.0,
    }
}

/// What stands still is above what it stands in.
fn layer(kind: Kind) -> usize {
    match kind {
        Kind::Late => 2,
        Kind::Wait => 1,
        _ => 0,
    }
}

/// Draws a span between these heights; others will be `above` it.
fn draw(svg: &mut Svg, scale: &Scale, span: &Span, [y, height]: [f64; 2], above: &Intervals) {
    let (left, right) = (scale.x(span.start_us), scale.x(span.end_us));
    let width = (right - left).max(NARROWEST);
    // A block is within its pass.
    let inset = if block(span).is_some() { 4.0 } else { 0.0 };
    let place = [left, y + inset, width, height - 2.0 * inset];
    svg.rect(place, class(span.kind), Some(&tip(span)));
    let label = label(span);
    let needed = label.chars().count() as f64 * CHARACTER + 6.0;
    // The first place that is so wide and not covered.
    let seen = Intervals::union([[span.start_us, span.end_us]]).without(above);
    let mut places = seen.iter().map(|place| place.map(|us| scale.x(us)));
    if needed < width
        && let Some([left, _]) = places.find(|[left, right]| right - left > needed)
    {
        let class = if span.kind == Kind::Late { "on-late" } else { "in" };
        svg.text([left + 4.0, y + height / 2.0 + 4.0], class, label);
    }
}

/// What fits into a span: of a block its name, of an operation what it is for.
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

/// The block of which this is a pass; none if it is the pass of the whole model.
fn block(span: &Span) -> Option<&str> {
    let name = span.name.as_ref();
    name.strip_prefix("forward ").or(name.strip_prefix("backward "))
}

fn tip(span: &Span) -> String {
    let mut tip = format!("{}: {:.3} ms", span.name, span.length_us() * 1e-3);
    if let Some(collective) = span.collective.as_ref().filter(|collective| collective.bytes > 0) {
        let _ = write!(tip, ", {:.2} MiB", collective.bytes as f64 / (1 << 20) as f64);
    }
    tip
}

/// Names of colours, and what they stand for.
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

fn class(kind: Kind) -> &'static str {
    let colour = LEGEND.iter().find(|(of, ..)| *of == kind);
    colour.map_or("ground", |(_, class, _)| class)
}

fn legend(svg: &mut Svg) {
    let mut x = 16.0;
    for (_, class, words) in LEGEND {
        svg.rect([x, 66.0, 14.0, 14.0], class, None);
        svg.text([x + 20.0, 77.0], "quiet", words);
        x += 20.0 + words.len() as f64 * (CHARACTER + 0.4) + 24.0;
    }
}

/// Ticks at round numbers of milliseconds since the step began.
fn axis(svg: &mut Svg, scale: &Scale, length_us: f64, y: f64) {
    let step = tick_distance(length_us, 10.0);
    let decimals = if step < 1e3 {
        1 - (step.log10().floor() as i32 - 2).min(0)
    } else {
        0
    };
    for tick in 0..=(length_us / step) as u32 {
        let us = f64::from(tick) * step;
        let x = scale.x(scale.start + us);
        svg.line([x, HEADER, x, y + 4.0]);
        let label = format!("{:.*} ms", decimals as usize, us * 1e-3);
        if x + (label.len() + 2) as f64 * CHARACTER < WIDTH {
            svg.text([x + 3.0, y + 20.0], "quiet", &label);
        }
    }
}

const STYLE: &str = "\
.page{fill:#fff}\
text{font:12px system-ui,sans-serif;fill:#222}\
.heading{font-size:18px;font-weight:600}.rank{font-weight:600}.quiet{fill:#555}.lane{fill:#333}\
.in,.on-late{fill:#fff;font-size:11px;pointer-events:none}.on-late{fill:#6b2b29}\
.ground{fill:#f1f1f1}.data{fill:#9aa0a6}.forward{fill:#4c78a8}.backward{fill:#3f8f6b}\
.optimizer{fill:#8e6bb0}.wait{fill:#d9534f}.late{fill:#e9b4b2}.gradients{fill:#d9822b}.parameters{fill:#b59a1d}.activations{fill:#c0569b}.other{fill:#6b6b6b}\
rect{stroke:#fff;stroke-width:.5}line{stroke:#0002}";

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
        // One of each kind is in the legend.
        assert_eq!(rects(&svg, "forward").len(), 1, "of the step before");
        let backward = rects(&svg, "backward");
        assert!(backward[1].contains("x=\"210.0\"") && backward[1].contains("width=\"1027.5\""));
        assert!(backward[2].contains("<title>backward h.0: 1.300 ms</title>"));
        assert_eq!((backward.len(), rects(&svg, "gradients").len()), (3, 2));
        assert!(!svg.contains("gelu"));
        // Where nothing is above it.
        assert!(
            svg.contains("<text class=\"in\" x=\"556.5\" y=\"141.0\">h.0</text>"),
            "{svg}"
        );
        assert!(svg.contains(">bucket 0</text>"));
        assert!(svg.contains("2.0 ms; 1.0 ms of communication, 50 % of it hidden"));
        assert!(svg.contains("a &lt;b&gt; &amp; \u{fffd}c") && svg.ends_with("</svg>\n"));
    }

    #[test]
    fn of_many_ranks_it_shows_the_first() {
        let file = TraceFile {
            ranks: (0..20).map(rank).collect(),
        };
        let svg = picture(&file, 3).unwrap();
        assert!(svg.contains("Step 3, the first 8 of 20 ranks"));
        assert!(svg.contains(">rank 7<") && !svg.contains(">rank 8<"));
        assert_eq!(picture(&file, 5), None);
    }
}
