//! How far it is: one line at the bottom of a terminal, and nothing where there is none.

use ddp_worker::tokenize::Progress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Redraws a second, at most.
const REDRAW_HZ: u8 = 10;

/// A bar on standard error, of the same looks as that of a training.
pub(super) struct Bar {
    bar: ProgressBar,
}

impl Bar {
    pub(super) fn new() -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(REDRAW_HZ));
        let style = "{bar:30} {bytes}/{total_bytes}  {msg}  {bytes_per_sec}  {eta} left";
        bar.set_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self { bar }
    }

    pub(super) fn show(&self, progress: Progress) {
        self.bar.set_length(progress.total);
        self.bar.set_message(format!("{} tokens", progress.tokens));
        self.bar.set_position(progress.bytes);
    }

    /// Takes it away: what it came to is said in words.
    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
