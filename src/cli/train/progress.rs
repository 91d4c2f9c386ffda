//! How far a command is: one line at the bottom of a terminal, and nothing elsewhere.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How often the line is drawn again, in Hz.
const REDRAW_HZ: u8 = 10;

/// A bar of this template of indicatif. Clear it before anything else is printed.
pub(super) fn progress_bar(template: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(REDRAW_HZ));
    bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}
