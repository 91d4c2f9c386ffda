//! The progress bar: one line at the bottom of the terminal, fed by the heartbeats of rank 0.

use ddp_proto::control::Progress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Redraws a second, at most.
const REDRAW_HZ: u8 = 10;

/// A bar on standard error. Only the console's writer thread touches it.
pub(crate) struct Bar {
    bar: ProgressBar,
}

impl Bar {
    /// A bar that shows itself with the first numbers.
    pub(crate) fn new() -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(REDRAW_HZ));
        let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self { bar }
    }

    /// Shows the numbers of a step.
    pub(crate) fn show(&self, step: u64, progress: &Progress) {
        self.bar.set_length(progress.steps);
        self.bar.set_message(progress.to_string());
        self.bar.set_position(step);
    }

    /// Runs `write`, which writes to the terminal, above the bar. A bar without numbers is not drawn for it.
    pub(crate) fn above(&self, write: impl FnOnce()) {
        if self.is_shown() {
            self.bar.suspend(write);
        } else {
            write();
        }
    }

    /// Leaves the last state on the terminal, if anything was ever shown.
    pub(crate) fn finish(self) {
        if self.is_shown() {
            self.bar.abandon();
        } else {
            self.bar.finish_and_clear();
        }
    }

    fn is_shown(&self) -> bool {
        self.bar.length().is_some()
    }
}
