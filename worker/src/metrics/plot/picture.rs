//! Curves as an SVG, which every browser shows: panels below each other, steps from left to right.

use std::path::Path;

use super::curves::{Curve, RunCurves};
use crate::metrics::RunFilesError;
use crate::metrics::run_file::replace_file;
use crate::timeline::svg::{Svg, escaped, tick_distance};

/// Most runs that are told apart by colour.
pub const MAX_RUNS: usize = 8;

const WIDTH: f64 = 960.0;
/// Where steps begin, right of the numbers.
const LEFT: f64 = 72.0;
const RIGHT: f64 = 936.0;
const HEADER: f64 = 52.0;
/// A line of the legend.
const LEGEND: f64 = 20.0;
/// Above a panel, with its title.
const TITLE: f64 = 32.0;
/// Below it, with the steps.
const FOOTER: f64 = 26.0;
/// What a character of a label takes.
const CHARACTER: f64 = 6.6;
/// Most characters of a run's name.
const MAX_NAME: usize = 120;
/// Part of a panel that is free above and below its curves.
const MARGIN: f64 = 0.06;
/// The first part of a run does not set the scale of its losses: all that follows would be flat.
const BEGIN: f64 = 0.05;
/// Rows for what is said of restarts.
const ROWS: usize = 4;

/// One panel: its title, its height, and the curves of a run in it. The second one is drawn with its points.
struct Panel {
    title: &'static str,
    height: f64,
    curves: fn(&RunCurves) -> [Option<&Curve>; 2],
    /// The lowest number that is shown is 0.
    from_zero: bool,
}

const PANELS: [Panel; 4] = [
    Panel {
        title: "loss, nats per token: line in training, points in validation",
        height: 260.0,
        curves: |run| [Some(&run.loss), Some(&run.val_loss)],
        from_zero: false,
    },
    Panel {
        title: "learning rate",
        height: 110.0,
        curves: |run| [Some(&run.lr), None],
        from_zero: true,
    },
    Panel {
        title: "gradient norm, before clipping",
        height: 110.0,
        curves: |run| [Some(&run.grad_norm), None],
        from_zero: true,
    },
    Panel {
        title: "tokens per second",
        height: 110.0,
        curves: |run| [Some(&run.tokens_per_s), None],
        from_zero: true,
    },
];

/// A page of HTML that has all it needs.
pub fn html(runs: &[RunCurves]) -> String {
    let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>{}</title>\n\
         <style>body{{margin:0;background:#fff}}svg{{display:block;margin:0 auto;max-width:100%;height:auto}}\
         @media(prefers-color-scheme:dark){{body{{background:#16181c}}}}</style>\n{}</html>\n",
        escaped(&names.join(", ")),
        svg(runs)
    )
}

/// Replaces the file at `path` as a whole.
pub fn write(path: &Path, picture: &str) -> Result<(), RunFilesError> {
    replace_file(path, picture.as_bytes())
}

/// The picture alone.
pub fn svg(runs: &[RunCurves]) -> String {
    let names = if runs.len() > 1 { runs.len() } else { 0 };
    let top = HEADER + names as f64 * LEGEND;
    let heights = PANELS.iter().map(|panel| TITLE + panel.height + FOOTER);
    let mut svg = Svg::new([WIDTH, top + heights.sum::<f64>() + 12.0], STYLE);
    let name = |run: &RunCurves| run.name.chars().take(MAX_NAME).collect::<String>();
    match runs {
        [run] => svg.text([16.0, 32.0], "heading", &name(run)),
        several => svg.text([16.0, 32.0], "heading", &format!("{} runs", several.len())),
    }
    for (index, run) in runs.iter().enumerate().take(names) {
        let y = HEADER + index as f64 * LEGEND;
        svg.path([[16.0, y + 8.0], [40.0, y + 8.0]], &format!("key c{index}"), None);
        svg.text([48.0, y + 12.0], "name", &name(run));
    }
    let steps = runs.iter().map(|run| run.steps).max().unwrap_or(1) as f64;
    let mut y = top;
    for panel in &PANELS {
        y += TITLE;
        panel.draw(&mut svg, runs, &Axis::new([0.0, steps], [LEFT, RIGHT], 8.0), y);
        y += panel.height + FOOTER;
    }
    svg.finish()
}

impl Panel {
    fn draw(&self, svg: &mut Svg, runs: &[RunCurves], x: &Axis, top: f64) {
        let bottom = top + self.height;
        svg.text([LEFT, top - 10.0], "title", self.title);
        let Some(y) = self.scale(runs, [bottom, top]) else {
            svg.text([LEFT, top + self.height / 2.0], "quiet", "no numbers");
            return;
        };
        for tick in y.ticks() {
            svg.line([LEFT, y.place(tick), RIGHT, y.place(tick)]);
            svg.text([LEFT - 8.0, y.place(tick) + 4.0], "tick", &y.label(tick));
        }
        svg.text([LEFT - 8.0, bottom + 17.0], "tick", "step");
        for tick in x.ticks() {
            svg.line([x.place(tick), top, x.place(tick), bottom]);
            svg.text([x.place(tick), bottom + 17.0], "step", &x.label(tick));
        }
        // What is said of restarts has its place in the tallest panel.
        let mut free = [if self.from_zero { WIDTH } else { LEFT }; ROWS];
        for (index, run) in runs.iter().enumerate() {
            restarts(svg, (run, index), x, [top, bottom], &mut free);
            let [curve, dots] = (self.curves)(run);
            if let Some(curve) = curve {
                draw(svg, curve, index, x, &y);
            }
            for point in dots.into_iter().flat_map(Curve::points) {
                let place = [x.place(point.step()), y.place(point.mean())];
                let tip = format!("step {:.0}: {:.4}", point.step(), point.mean());
                svg.path([place, place], &format!("dot c{index}"), Some(&tip));
            }
        }
    }

    /// The map from numbers to positions, if there is any number.
    fn scale(&self, runs: &[RunCurves], places: [f64; 2]) -> Option<Axis> {
        let begin = if self.from_zero { 0.0 } else { BEGIN };
        let points = runs.iter().flat_map(|run| {
            let points = (self.curves)(run).into_iter().flatten().flat_map(Curve::points);
            points.filter(move |point| point.step() >= run.steps as f64 * begin)
        });
        let low = (points.clone().map(|point| point.min)).fold(f64::INFINITY, f64::min);
        let high = points.map(|point| point.max).fold(f64::NEG_INFINITY, f64::max);
        if low > high {
            return None;
        }
        // A number that never changes has room too.
        let margin = MARGIN * (high - low).max(high.abs() * 1e-3).max(1e-12);
        let low = if self.from_zero && low >= 0.0 {
            0.0
        } else {
            low - margin
        };
        Some(Axis::new([low, high + margin], places, self.height / 26.0))
    }
}

/// A line through the means, in the band from the lowest to the highest where points stand for several steps.
fn draw(svg: &mut Svg, curve: &Curve, run: usize, x: &Axis, y: &Axis) {
    let points = curve.points();
    if curve.is_merged() {
        let above = points
            .clone()
            .map(|point| [x.place(point.step()), y.place(point.max)]);
        let below: Vec<_> = (points.clone())
            .map(|point| [x.place(point.step()), y.place(point.min)])
            .collect();
        svg.path(
            above.chain(below.into_iter().rev()),
            &format!("band c{run}"),
            None,
        );
    }
    let line = points.map(|point| [x.place(point.step()), y.place(point.mean())]);
    svg.path(line, &format!("curve c{run}"), None);
}

/// Marks the first steps of generations, with words where there is room: rows are `free` from these places on.
fn restarts(
    svg: &mut Svg,
    (run, index): (&RunCurves, usize),
    x: &Axis,
    [top, bottom]: [f64; 2],
    free: &mut [f64; ROWS],
) {
    for (step, words) in &run.restarts {
        let place = x.place(*step as f64);
        let mark = [[place, top], [place, bottom]];
        svg.path(mark, &format!("restart c{index}"), Some(words));
        let end = place + words.chars().count() as f64 * CHARACTER;
        if let Some(row) = free
            .iter()
            .position(|free| *free <= place)
            .filter(|_| end < WIDTH)
        {
            svg.text([place + 4.0, top + 12.0 + 13.0 * row as f64], "quiet", words);
            free[row] = end;
        }
    }
}

/// From numbers to places.
struct Axis {
    numbers: [f64; 2],
    places: [f64; 2],
    /// Between two ticks.
    distance: f64,
}

impl Axis {
    fn new([low, high]: [f64; 2], places: [f64; 2], ticks: f64) -> Self {
        Self {
            numbers: [low, high],
            places,
            distance: tick_distance(high - low, ticks),
        }
    }

    /// At the edge, if it is beyond it.
    fn place(&self, number: f64) -> f64 {
        let ([low, high], [from, to]) = (self.numbers, self.places);
        from + ((number - low) / (high - low)).clamp(0.0, 1.0) * (to - from)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        let ([low, high], distance) = (self.numbers, self.distance);
        let first = (low / distance).ceil() as i64;
        let last = (high / distance).floor() as i64;
        (first..=last).map(move |tick| tick as f64 * distance)
    }

    /// With as many digits as tell two ticks apart.
    fn label(&self, number: f64) -> String {
        let digits = |unit: f64| (-(self.distance / unit).log10() - 1e-9).ceil().max(0.0) as usize;
        let [low, high] = self.numbers.map(f64::abs);
        match low.max(high) {
            _ if number == 0.0 => "0".to_owned(),
            top if top >= 1e6 => format!("{:.*}M", digits(1e6), number / 1e6),
            top if top >= 1e4 => format!("{:.*}k", digits(1e3), number / 1e3),
            top if top < 1e-2 => {
                let power = 10_f64.powf(number.abs().log10().floor());
                format!("{number:.*e}", digits(power))
            }
            _ => format!("{number:.*}", digits(1.0)),
        }
    }
}

const STYLE: &str = "\
.page{fill:#fff}\
text{font:12px system-ui,sans-serif;fill:#222}\
.heading{font-size:17px;font-weight:600}.title{font-weight:600}.quiet,.tick,.step{fill:#666}.quiet{font-size:11px}\
.tick{text-anchor:end}.step{text-anchor:middle}line{stroke:#8883}\
path{fill:none;stroke:currentColor}.curve{stroke-width:1.5;stroke-linejoin:round}.key{stroke-width:3}\
.dot{stroke-width:7;stroke-linecap:round}.band{stroke:none;fill:currentColor;fill-opacity:.2}\
.restart{stroke-dasharray:4 3;stroke-opacity:.8}\
.c0{color:#2f6db3}.c1{color:#d9730d}.c2{color:#2e8b57}.c3{color:#c9372c}\
.c4{color:#8250c4}.c5{color:#0f8b8d}.c6{color:#a8558f}.c7{color:#7a6a1f}\
@media(prefers-color-scheme:dark){.page{fill:#16181c}text{fill:#e6e6e6}.quiet,.tick,.step{fill:#9aa0a6}\
.c0{color:#6aa5e8}.c1{color:#f2994a}.c2{color:#5cc28a}.c3{color:#f0776c}\
.c4{color:#b794f0}.c5{color:#4cc5c7}.c6{color:#dd8bc6}.c7{color:#c9b458}}";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_have_the_digits_that_tell_them_apart() {
        let labels = |low: f64, high: f64| {
            let axis = Axis::new([low, high], [0.0, 100.0], 4.0);
            let labels: Vec<String> = axis.ticks().map(|tick| axis.label(tick)).collect();
            labels.join(" ")
        };
        insta::assert_snapshot!(labels(0.0, 600.0), @"0 200 400 600");
        insta::assert_snapshot!(labels(1.31, 5.6), @"2 4");
        insta::assert_snapshot!(labels(3.281, 3.294), @"3.285 3.290");
        insta::assert_snapshot!(labels(0.0, 6.1e-4), @"0 2e-4 4e-4 6e-4");
        insta::assert_snapshot!(labels(0.0, 47_000.0), @"0 20k 40k");
        insta::assert_snapshot!(labels(1_150_000.0, 1_260_000.0), @"1.15M 1.20M 1.25M");
    }

    fn run(name: &str, lines: &[String]) -> RunCurves {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("metrics.jsonl"), lines.concat()).unwrap();
        RunCurves {
            name: name.to_owned(),
            ..RunCurves::read(folder.path()).unwrap()
        }
    }

    fn line(step: u64, generation: u64) -> String {
        let val = if step == 4 { ",\"val_loss\":2.5" } else { "" };
        format!(
            "{{\"step\":{step},\"loss\":{},\"lr\":1e-3{val},\"generation\":{generation}}}\n",
            5 - step
        )
    }

    #[test]
    fn a_run_is_drawn_to_scale() {
        let svg = svg(&[run("a <b>", &[1, 2, 3, 4].map(|step| line(step, step / 3)))]);
        assert!(svg.contains("a &lt;b&gt;"), "{svg}");
        // Steps 1 to 4 of 4, from 72 to 936.
        assert!(svg.contains("<path class=\"curve c0\" d=\"M288.0 "), "{svg}");
        assert!(svg.contains("<path class=\"dot c0\" d=\"M936.0 "), "{svg}");
        assert!(svg.contains("<path class=\"restart c0\" d=\"M720.0 "), "{svg}");
        assert!(svg.contains(">generation 1</text>"), "{svg}");
        assert!(!svg.contains("band c0") && !svg.contains("key c0"), "{svg}");
        assert!(!svg.contains("NaN"), "{svg}");
    }

    #[test]
    fn several_runs_have_a_legend_and_a_page_needs_nothing_else() {
        let long: Vec<String> = (1..=5000)
            .map(|step| {
                line(step % 4 + 1, 1).replacen(
                    &format!("\"step\":{}", step % 4 + 1),
                    &format!("\"step\":{step}"),
                    1,
                )
            })
            .collect();
        let page = html(&[run("one", &[line(1, 1)]), run("two", &long)]);
        assert!(page.contains("<title>one, two</title>"), "{page}");
        assert!(page.contains("key c1") && page.contains(">two</text>") && page.contains("band c1"));
        assert!(page.contains("prefers-color-scheme:dark"));
        // But for the name of the format.
        let references = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!references.contains("http") && !references.contains("src="));
        assert!(page.len() < 1 << 20, "{} bytes", page.len());
    }
}
