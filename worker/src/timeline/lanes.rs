//! Lanes below each other, with time from left to right, as an SVG: a step of a run, or a step of a pipeline's schedule.
//! The pointer over a box shows its tip.

use super::overlap::Intervals;
use super::svg::{CHARACTER, Svg, TimeAxis};

const WIDTH: f64 = 1600.0;
/// Where time begins, right of the names of the lanes.
const LEFT: f64 = 210.0;
const RIGHT: f64 = 1560.0;
/// Height of title and legend.
const HEADER: f64 = 92.0;
/// Height of the labels of the time axis.
const FOOTER: f64 = 40.0;
/// Height of the line above the lanes of a panel.
const HEADING: f64 = 30.0;
const GAP: f64 = 6.0;
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
    pub(crate) note: String,
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
    /// Draws the file.
    pub(crate) fn draw(&self) -> String {
        let bottom = HEADER + self.panels.iter().map(LanePanel::height).sum::<f64>();
        let mut svg = Svg::new([WIDTH, bottom + FOOTER], &format!("{STYLE}{}", self.colours));
        svg.text([16.0, 30.0], "title", self.title);
        svg.text([16.0, 52.0], "quiet", self.subtitle);
        let mut x = 16.0;
        for (class, words) in self.legend {
            svg.rect([x, 66.0, 14.0, 14.0], class, None);
            svg.text([x + 20.0, 77.0], "quiet", words);
            x += 44.0 + words.len() as f64 * CHARACTER;
        }
        let time = TimeAxis::new(self.end, [LEFT, RIGHT], 10.0);
        for tick in time.ticks() {
            let x = time.place(tick);
            svg.line([x, HEADER, x, bottom + 4.0]);
            let label = format!("{} {}", time.label(tick), self.unit);
            svg.text([x, bottom + 20.0], "tick", &label);
        }
        let mut top = HEADER;
        for panel in &self.panels {
            panel.draw(&mut svg, &time, top);
            top += panel.height();
        }
        svg.finish()
    }
}

impl LanePanel {
    fn height(&self) -> f64 {
        HEADING + self.lanes.iter().map(|lane| lane.height + GAP).sum::<f64>()
    }

    fn draw(&self, svg: &mut Svg, time: &TimeAxis, top: f64) {
        svg.text([16.0, top + 20.0], "heading", &self.heading);
        svg.text([LEFT, top + 20.0], "quiet", &self.note);
        let mut y = top + HEADING;
        for lane in &self.lanes {
            svg.text([28.0, y + lane.height / 2.0 + 4.0], "lane", &lane.name);
            svg.line([LEFT, y + lane.height, RIGHT, y + lane.height]);
            lane.draw(svg, time, y);
            y += lane.height + GAP;
        }
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

const STYLE: &str = "\
.page{fill:#fff}text{font:12px system-ui,sans-serif;fill:#222}\
.title{font-size:18px;font-weight:600}.heading{font-weight:600}.quiet,.tick{fill:#555}.tick{text-anchor:middle}\
.in{fill:#fff;font-size:11px;text-anchor:middle;pointer-events:none}\
rect{stroke:#fff;stroke-width:.5}line{stroke:#8885}\
@media(prefers-color-scheme:dark){.page{fill:#16181c}text{fill:#e4e4e4}.quiet,.tick{fill:#ababab}.in{fill:#fff}\
rect{stroke:#16181c}}";
