//! An SVG as text: rectangles, lines and words, whose colours are classes of its style; and the axis of time.

use std::fmt::Write as _;

/// Width of a character of a label, at most.
pub(crate) const CHARACTER: f64 = 6.6;

/// Characters of a line that fit a phone, whose text is larger than elsewhere compared with the picture.
const LINE: usize = 60;
/// Height of a line there.
pub(crate) const LINE_HEIGHT: f64 = 38.0;

/// A picture that is being drawn. Places are in pixels, from the left and from above.
#[derive(Default)]
pub(crate) struct Svg(String);

impl Svg {
    /// A rectangle; the pointer over it shows `tip`.
    pub(crate) fn rect(&mut self, [x, y, width, height]: [f64; 4], class: &str, tip: Option<&str>) {
        let _ = write!(
            self.0,
            "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\""
        );
        let _ = match tip {
            Some(tip) => writeln!(self.0, "><title>{}</title></rect>", escaped(tip)),
            None => writeln!(self.0, "/>"),
        };
    }

    /// Words, from this place to the right, above this height.
    pub(crate) fn text(&mut self, [x, y]: [f64; 2], class: &str, words: &str) {
        let words = escaped(words);
        let text = format!("<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{words}</text>\n");
        self.0 += &text;
    }

    /// Words in lines that fit a phone, from this place to the right and below. Returns what is below them there.
    pub(crate) fn lines(&mut self, [x, mut y]: [f64; 2], class: &str, words: &str) -> f64 {
        y += LINE_HEIGHT;
        let (baseline, mut length) = (y - 8.0, 0);
        let text = format!("<text class=\"{class}\" x=\"{x:.1}\" y=\"{baseline:.1}\"><tspan>");
        self.0 += &text;
        for word in words.split_whitespace() {
            length += word.chars().count() + 1;
            if length > LINE {
                (y, length) = (y + LINE_HEIGHT, word.chars().count());
                let text = format!("</tspan><tspan x=\"{x:.1}\" dy=\"1.15em\">");
                self.0 += &text;
            }
            self.0 += &(escaped(word) + " ");
        }
        self.0 += "</tspan></text>\n";
        y
    }

    /// Something of this class is in it.
    pub(crate) fn shows(&self, class: &str) -> bool {
        self.0.contains(&format!("class=\"{class}\""))
    }

    /// A line from one place to another.
    pub(crate) fn line(&mut self, [x, y, x2, y2]: [f64; 4]) {
        let text = format!("<line x1=\"{x:.1}\" y1=\"{y:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>\n");
        self.0 += &text;
    }

    /// The text of the file. `style` is the CSS of the classes, of which `page` is the ground.
    pub(crate) fn finish(self, [width, height]: [f64; 2], style: &str) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
             width=\"{width}\">\n<style>{style}</style>\n\
             <rect class=\"page\" width=\"100%\" height=\"100%\"/>\n{}</svg>\n",
            self.0
        )
    }
}

/// Maps the times from 0 to `end` to places, with ticks at round times.
pub(crate) struct TimeAxis {
    end: f64,
    places: [f64; 2],
    /// Between two ticks.
    distance: f64,
}

impl TimeAxis {
    /// An axis with about `ticks` ticks.
    pub(crate) fn new(end: f64, places: [f64; 2], ticks: f64) -> Self {
        Self {
            end,
            places,
            distance: tick_distance(end, ticks),
        }
    }

    /// The place of a time; times beyond the axis are at its edge.
    pub(crate) fn place(&self, time: f64) -> f64 {
        let [from, to] = self.places;
        from + (time / self.end).clamp(0.0, 1.0) * (to - from)
    }

    /// The times that have a tick.
    pub(crate) fn ticks(&self) -> impl Iterator<Item = f64> {
        let last = (self.end / self.distance).floor() as u64;
        (0..=last).map(|tick| tick as f64 * self.distance)
    }

    /// A tick's time, with as many digits as tell two ticks apart.
    pub(crate) fn label(&self, time: f64) -> String {
        let digits = (-self.distance.log10() - 1e-9).ceil().max(0.0) as usize;
        format!("{time:.digits$}")
    }
}

/// Distance of ticks: one, two or five times a power of ten, so that about `count` ticks fit into `length`.
fn tick_distance(length: f64, count: f64) -> f64 {
    let rough = length / count;
    let power = 10_f64.powf(rough.log10().floor());
    let round = [1.0, 2.0, 5.0].into_iter().find(|&step| step * power >= rough);
    round.unwrap_or(10.0) * power
}

/// XML has no control characters, not even escaped.
pub(crate) fn escaped(words: &str) -> String {
    words
        .replace(char::is_control, "\u{fffd}")
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_have_the_digits_that_tell_them_apart() {
        let labels = |end: f64| {
            let axis = TimeAxis::new(end, [0.0, 100.0], 4.0);
            let labels: Vec<String> = axis.ticks().map(|tick| axis.label(tick)).collect();
            labels.join(" ")
        };
        insta::assert_snapshot!(labels(600.0), @"0 200 400 600");
        insta::assert_snapshot!(labels(0.013), @"0.000 0.005 0.010");
        insta::assert_snapshot!(labels(6.1), @"0 2 4 6");
        insta::assert_snapshot!(labels(47_000.0), @"0 20000 40000");
    }
}
