//! An SVG as text: rectangles, lines, paths and words, whose colours are classes of its style; and axes.

use std::fmt::Write as _;

/// Width of a character of a label, at most.
pub(crate) const CHARACTER: f64 = 6.6;

/// A picture that is being drawn. Places are in pixels, from the left and from above.
pub(crate) struct Svg(String);

impl Svg {
    /// An empty one. `style` is the CSS of its classes, of which `page` is the ground.
    pub(crate) fn new([width, height]: [f64; 2], style: &str) -> Self {
        Self(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
             width=\"{width}\" height=\"{height}\">\n<style>{style}</style>\n\
             <rect class=\"page\" width=\"100%\" height=\"100%\"/>\n"
        ))
    }

    /// A rectangle; the pointer over it shows `tip`.
    pub(crate) fn rect(&mut self, [x, y, width, height]: [f64; 4], class: &str, tip: Option<&str>) {
        let _ = write!(
            self.0,
            "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\""
        );
        self.end("rect", tip);
    }

    /// Words, from this place to the right, above this height.
    pub(crate) fn text(&mut self, [x, y]: [f64; 2], class: &str, words: &str) {
        let words = escaped(words);
        let _ = writeln!(
            self.0,
            "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{words}</text>"
        );
    }

    /// A line from one place to another.
    pub(crate) fn line(&mut self, [x, y, x2, y2]: [f64; 4]) {
        let _ = writeln!(
            self.0,
            "<line x1=\"{x:.1}\" y1=\"{y:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>"
        );
    }

    /// A line through these places, or the area within it if the class fills it; the pointer over it shows `tip`.
    pub(crate) fn path(
        &mut self,
        places: impl IntoIterator<Item = [f64; 2]>,
        class: &str,
        tip: Option<&str>,
    ) {
        let _ = write!(self.0, "<path class=\"{class}\" d=\"");
        for (index, [x, y]) in places.into_iter().enumerate() {
            let _ = write!(self.0, "{}{x:.1} {y:.1}", if index == 0 { 'M' } else { 'L' });
        }
        self.0.push('"');
        self.end("path", tip);
    }

    fn end(&mut self, element: &str, tip: Option<&str>) {
        let _ = match tip {
            Some(tip) => writeln!(self.0, "><title>{}</title></{element}>", escaped(tip)),
            None => writeln!(self.0, "/>"),
        };
    }

    /// The text of the file.
    pub(crate) fn finish(mut self) -> String {
        self.0.push_str("</svg>\n");
        self.0
    }
}

/// Maps numbers to places, with ticks at round numbers.
pub(crate) struct Axis {
    numbers: [f64; 2],
    places: [f64; 2],
    /// Between two ticks.
    distance: f64,
}

impl Axis {
    /// The numbers from `low` to `high`, with about `ticks` ticks.
    pub(crate) fn new([low, high]: [f64; 2], places: [f64; 2], ticks: f64) -> Self {
        Self {
            numbers: [low, high],
            places,
            distance: tick_distance(high - low, ticks),
        }
    }

    /// The place of a number; numbers beyond the axis are at its edge.
    pub(crate) fn place(&self, number: f64) -> f64 {
        let ([low, high], [from, to]) = (self.numbers, self.places);
        from + ((number - low) / (high - low)).clamp(0.0, 1.0) * (to - from)
    }

    /// The numbers that have a tick.
    pub(crate) fn ticks(&self) -> impl Iterator<Item = f64> {
        let ([low, high], distance) = (self.numbers, self.distance);
        let first = (low / distance).ceil() as i64;
        let last = (high / distance).floor() as i64;
        (first..=last).map(move |tick| tick as f64 * distance)
    }

    /// A tick's number, with as many digits as tell two ticks apart.
    pub(crate) fn label(&self, number: f64) -> String {
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
}
