//! The progress bar: one line at the bottom of the terminal, fed by the heartbeats of rank 0.

use std::fmt::Write as _;
use std::time::Duration;

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
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self { bar }
    }

    /// Shows the numbers of a step.
    pub(crate) fn show(&self, step: u64, progress: &Progress) {
        self.bar.set_length(progress.steps);
        self.bar.set_message(describe(progress));
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

/// The numbers beside the bar.
fn describe(progress: &Progress) -> String {
    let mut text = format!("loss {:.4}", progress.loss);
    if let Some(val_loss) = progress.val_loss {
        let _ = write!(text, "  val {val_loss:.4}");
    }
    let _ = write!(text, "  {} tokens/s", thousands(progress.tokens_per_s));
    // Also false for NaN.
    if progress.seconds_left >= 0.0 && progress.seconds_left.is_finite() {
        let left = Duration::from_secs_f64(progress.seconds_left.min(1e9));
        let _ = write!(text, "  {} left", clock(left));
    }
    text
}

fn thousands(number: f64) -> String {
    if number >= 1e6 {
        format!("{:.2}M", number / 1e6)
    } else if number >= 1e4 {
        format!("{:.1}k", number / 1e3)
    } else {
        format!("{number:.0}")
    }
}

fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if hours > 0 {
        format!("{hours}:{minutes:02}:{seconds:02}")
    } else {
        format!("{minutes}:{seconds:02}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let mut progress = Progress {
            steps: 600,
            loss: 2.345_678,
            tokens_per_s: 45_678.0,
            seconds_left: 83.2,
            val_loss: None,
        };
        assert_eq!(describe(&progress), "loss 2.3457  45.7k tokens/s  1:23 left");
        progress.val_loss = Some(2.3);
        progress.seconds_left = f64::NAN;
        progress.tokens_per_s = 900.0;
        assert_eq!(describe(&progress), "loss 2.3457  val 2.3000  900 tokens/s");
        assert_eq!(clock(Duration::from_secs(3723)), "1:02:03");
    }
}
