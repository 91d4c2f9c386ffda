//! A picture as text: rectangles, lines and words of an SVG, whose colours are classes of its style.

use std::fmt::Write as _;

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

    /// From one place to another.
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

/// Distance of ticks at round numbers, one, two or five times a power of ten, of which about `count` are in a length.
pub(crate) fn tick_distance(length: f64, count: f64) -> f64 {
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
