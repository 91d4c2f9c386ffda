//! Lanes below each other, with time from left to right, as an SVG: a step of a run, or a step of a pipeline's schedule.
//! The pointer over a box shows its tip.

use super::overlap::Intervals;
use super::svg::{CHARACTER, LINE_HEIGHT, Svg, TimeAxis};

const WIDTH: f64 = 1200.0;
/// Where time begins and ends.
const LEFT: f64 = 60.0;
const RIGHT: f64 = 1140.0;
/// Where words begin, and the second column of the legend.
const COLUMNS: [f64; 2] = [16.0, 616.0];
/// Narrower boxes would be invisible.
const NARROWEST: f64 = 0.6;
/// Number of layers in a lane.
const LAYERS: usize = 3;

/// A picture of lanes, in panels below each other.
pub(crate) struct LanePicture<'a> {
    pub(crate) title: &'a str,
    pub(crate) subtitle: &'a str,
    /// Classes of boxes, and what they stand for.
    pub(crate) legend: &'a [(&'a str, &'a str)],
    /// CSS of these classes.
    pub(crate) colours: &'a str,
    /// When time ends. It begins at 0.
    pub(crate) end: f64,
    /// Unit of all times.
    pub(crate) unit: &'a str,
    pub(crate) panels: Vec<LanePanel>,
}

/// Some lanes under one heading.
pub(crate) struct LanePanel {
    pub(crate) heading: String,
    pub(crate) lanes: Vec<DrawnLane>,
}

/// One lane. Times of its boxes may lie outside of the picture's.
pub(crate) struct DrawnLane {
    pub(crate) name: String,
    pub(crate) height: f64,
    pub(crate) boxes: Vec<LaneBox>,
}

/// A box that stands on the bottom of its lane.
pub(crate) struct LaneBox {
    pub(crate) time: [f64; 2],
    pub(crate) class: String,
    /// Shown where it fits and no box of a higher layer covers it.
    pub(crate) label: String,
    pub(crate) tip: Option<String>,
    /// Part of the lane's height.
    pub(crate) height: f64,
    /// 0 to 2; higher layers cover lower ones.
    pub(crate) layer: usize,
}

impl LanePicture<'_> {
    /// Draws the file. What wants room is below what it describes, as on a phone nothing fits beside it.
    pub(crate) fn draw(&self) -> String {
        let mut svg = Svg::default();
        let top = svg.lines([COLUMNS[0], 8.0], "title", self.title);
        let time = TimeAxis::new(self.end, [LEFT, RIGHT], 10.0);
        let bottom = (self.panels.iter()).fold(top, |y, panel| panel.draw(&mut svg, &time, y));
        for (tick, class) in time.ticks().zip(["tick", "tick odd"].into_iter().cycle()) {
            let x = time.place(tick);
            svg.line([x, top, x, bottom + 4.0]);
            let label = format!("{} {}", time.label(tick), self.unit);
            svg.text([x, bottom + 32.0], class, &label);
        }
        let mut y = bottom + LINE_HEIGHT;
        let shown: Vec<_> = self.legend.iter().filter(|(class, _)| svg.shows(class)).collect();
        for row in shown.chunks(COLUMNS.len()) {
            y += LINE_HEIGHT;
            for ((class, words), x) in row.iter().zip(COLUMNS) {
                svg.rect([x, y - 24.0, 20.0, 20.0], class, None);
                svg.text([x + 30.0, y - 8.0], "quiet", words);
            }
        }
        let height = svg.lines([COLUMNS[0], y], "quiet", self.subtitle) + 8.0;
        svg.finish([WIDTH, height], &format!("{STYLE}{}", self.colours))
    }
}

impl LanePanel {
    /// Returns what is below it.
    fn draw(&self, svg: &mut Svg, time: &TimeAxis, top: f64) -> f64 {
        let mut y = svg.lines([COLUMNS[0], top + 8.0], "heading", &self.heading);
        for lane in &self.lanes {
            y = svg.lines([COLUMNS[0], y], "lane", &lane.name);
            lane.draw(svg, time, y);
            y += lane.height;
            svg.line([LEFT, y, RIGHT, y]);
        }
        y
    }
}

impl DrawnLane {
    fn draw(&self, svg: &mut Svg, time: &TimeAxis, y: f64) {
        for layer in 0..LAYERS {
            let above = self.boxes.iter().filter(|other| other.layer > layer);
            let above = Intervals::union(above.map(|other| other.time));
            for drawn in self.boxes.iter().filter(|drawn| drawn.layer == layer) {
                let [left, right] = drawn.time.map(|at| time.place(at));
                let height = self.height * drawn.height;
                let place = [
                    left,
                    y + self.height - height,
                    (right - left).max(NARROWEST),
                    height,
                ];
                svg.rect(place, &drawn.class, drawn.tip.as_deref());
                let needed = drawn.label.chars().count() as f64 * CHARACTER + 2.0;
                if drawn.label.is_empty() || needed > right - left {
                    continue;
                }
                let seen = Intervals::union([drawn.time]).without(&above);
                let mut parts = seen.iter().map(|part| part.map(|at| time.place(at)));
                if let Some([left, right]) = parts.find(|[left, right]| right - left > needed) {
                    let middle = [f64::midpoint(left, right), y + self.height / 2.0 + 4.0];
                    svg.text(middle, "in", &drawn.label);
                }
            }
        }
    }
}

/// On a phone the picture is a third as wide, or where a page is made for a desktop, 0.4: its text grows.
const STYLE: &str = "\
:root{max-width:100%;height:auto;background:#fff}.page{fill:#fff}text{font:14px system-ui,sans-serif;fill:#222}\
.title{font-size:20px;font-weight:600}.heading{font-weight:600}.quiet,.tick{fill:#555}.tick{text-anchor:middle}\
.in{fill:#fff;font-size:11px;text-anchor:middle;pointer-events:none}\
rect{stroke:#fff;stroke-width:.5}line{stroke:#8885}\
@media(max-width:600px),(max-device-width:600px){text{font-size:33px}.title{font-size:38px}.in,.odd{display:none}}\
@media(prefers-color-scheme:dark){:root{background:#16181c}.page{fill:#16181c}text{fill:#e4e4e4}\
.quiet,.tick{fill:#ababab}.in{fill:#fff}rect{stroke:#16181c}}";
