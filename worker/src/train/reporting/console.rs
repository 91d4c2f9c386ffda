//! The console: messages for people, and step lines on rank 0 at a bearable rate, with the time left.

use std::io::Write as _;
use std::time::{Duration, Instant};

use ddp_proto::words::grouped;

/// Bounds of the time between two step lines, which is a hundredth of the run so far.
const LINE_INTERVALS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// Prints on the console. A console that is gone does not stop the training.
pub(crate) fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// Warns on the error stream, whichever rank it is, in one write, so that others do not come between. A console that is
/// gone does not stop the training.
pub(crate) fn warn(text: &str) {
    let words = format!("warning: {text}\n");
    let _ = std::io::stderr().write_all(words.as_bytes());
}

/// Counts steps and tokens since the start of this life of the run.
pub(crate) struct Pace {
    started: Instant,
    first_step: u64,
    steps: u64,
    last_line: Option<Instant>,
}

/// What a step line shows.
pub(crate) struct StepNumbers {
    /// Steps finished.
    pub(crate) step: u64,
    pub(crate) loss: f64,
    /// Of this very step.
    pub(crate) val_loss: Option<f64>,
    pub(crate) lr: f32,
    pub(crate) tokens_per_s: f64,
}

impl Pace {
    /// `first_step` steps of `steps` are finished already.
    pub(crate) fn new(now: Instant, first_step: u64, steps: u64) -> Self {
        Self {
            started: now,
            first_step,
            steps,
            last_line: None,
        }
    }

    /// Seconds left after `step` steps, at the mean speed so far, pauses included.
    pub(crate) fn seconds_left(&self, now: Instant, step: u64) -> f64 {
        let done = step.saturating_sub(self.first_step);
        if done == 0 {
            return 0.0;
        }
        let each = now.duration_since(self.started).as_secs_f64() / done as f64;
        each * self.steps.saturating_sub(step) as f64
    }

    /// The line for a finished step, if one is due: the first and the last step, new validation losses, and
    /// otherwise one a second at first, fewer later.
    pub(crate) fn line(&mut self, now: Instant, numbers: &StepNumbers, is_news: bool) -> Option<String> {
        let [shortest, longest] = LINE_INTERVALS;
        let interval = (now.duration_since(self.started) / 100).clamp(shortest, longest);
        let recent = self
            .last_line
            .is_some_and(|last| now.duration_since(last) < interval);
        if recent && !is_news && numbers.step < self.steps {
            return None;
        }
        self.last_line = Some(now);
        let val = numbers
            .val_loss
            .map_or_else(String::new, |val| format!("  val {val:.4}"));
        Some(format!(
            "step {}/{}  loss {:.4}{val}  lr {:.1e}  {} tokens/s  {} left",
            numbers.step,
            self.steps,
            numbers.loss,
            numbers.lr,
            grouped(numbers.tokens_per_s.max(0.0) as u64),
            clock(self.seconds_left(now, numbers.step)),
        ))
    }
}

/// `00:42`, or `1:02:03`.
fn clock(seconds: f64) -> String {
    let seconds = seconds.round().max(0.0) as u64;
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match hours {
        0 => format!("{minutes:02}:{seconds:02}"),
        _ => format!("{hours}:{minutes:02}:{seconds:02}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(step: u64) -> StepNumbers {
        StepNumbers {
            step,
            loss: 2.414_21,
            val_loss: Some(2.5),
            lr: 3e-4,
            tokens_per_s: 123_456.7,
        }
    }

    #[test]
    fn a_line_says_where_the_run_is() {
        let start = Instant::now();
        let mut pace = Pace::new(start, 100, 600);
        let line = pace
            .line(start + Duration::from_secs(10), &numbers(120), false)
            .unwrap();
        insta::assert_snapshot!(line, @"step 120/600  loss 2.4142  val 2.5000  lr 3.0e-4  123,456 tokens/s  04:00 left");
    }

    #[test]
    fn lines_come_once_a_second_but_news_and_the_end_at_once() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut pace = Pace::new(start, 0, 600);
        assert!(pace.line(at(10), &numbers(1), false).is_some());
        assert!(pace.line(at(500), &numbers(2), false).is_none());
        assert!(pace.line(at(600), &numbers(3), true).is_some());
        assert!(pace.line(at(1599), &numbers(4), false).is_none());
        assert!(pace.line(at(1600), &numbers(5), false).is_some());
        assert!(pace.line(at(1601), &numbers(600), false).is_some());
    }

    #[test]
    fn a_long_run_says_less() {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        let mut pace = Pace::new(start, 0, 600);
        assert!(pace.line(at(1000), &numbers(1), false).is_some());
        assert!(pace.line(at(1009), &numbers(2), false).is_none());
        assert!(pace.line(at(1011), &numbers(3), false).is_some());
        assert!(pace.line(at(100_000), &numbers(4), false).is_some());
        assert!(pace.line(at(100_029), &numbers(5), false).is_none());
        assert!(pace.line(at(100_030), &numbers(6), false).is_some());
    }

    #[test]
    fn the_time_left_is_readable() {
        assert_eq!([0.4, 62.0, 3723.0].map(clock), ["00:00", "01:02", "1:02:03"]);
    }
}
