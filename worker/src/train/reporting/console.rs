//! The console: messages for people, and step lines on rank 0 at a bearable rate.

use std::io::Write as _;
use std::time::{Duration, Instant};

use ddp_proto::control::Progress;

use crate::config::Train;

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

/// Says when a step line is due, and how long the rest of the run will take.
pub(crate) struct Pace {
    started: Instant,
    first_step: u64,
    pub(super) steps: u64,
    log_every: Option<u64>,
    last_line: Option<Instant>,
}

impl Pace {
    /// `first_step` steps of the run are finished already.
    pub(crate) fn new(now: Instant, first_step: u64, train: &Train) -> Self {
        Self {
            started: now,
            first_step,
            steps: train.steps,
            log_every: train.log_every,
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

    /// The line for a finished step, if one is due: the last step, new validation losses, and otherwise every
    /// `train.log_every` steps. Without it the first step, one a second at first, fewer later.
    pub(crate) fn line(
        &mut self,
        now: Instant,
        step: u64,
        progress: &Progress,
        is_news: bool,
    ) -> Option<String> {
        let is_due = self.log_every.map_or_else(
            || {
                let [shortest, longest] = LINE_INTERVALS;
                let interval = (now.duration_since(self.started) / 100).clamp(shortest, longest);
                self.last_line
                    .is_none_or(|last| now.duration_since(last) >= interval)
            },
            |every| step.is_multiple_of(every),
        );
        if !is_due && !is_news && step < self.steps {
            return None;
        }
        self.last_line = Some(now);
        Some(format!("step {step}/{} {progress}", self.steps))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(seconds_left: f64) -> Progress {
        Progress {
            steps: 600,
            loss: 2.414_21,
            val_loss: Some(2.5),
            val_step: None,
            lr: Some(3e-4),
            model_flops_per_s: None,
            mfu: None,
            tokens_per_s: 123_456.7,
            seconds_left,
        }
    }

    fn pace(start: Instant, first_step: u64, log_every: Option<u64>) -> Pace {
        let train = Train {
            steps: 600,
            log_every,
            ..Train::default()
        };
        Pace::new(start, first_step, &train)
    }

    #[test]
    fn a_line_says_where_the_run_is() {
        let start = Instant::now();
        let mut pace = pace(start, 100, None);
        let now = start + Duration::from_secs(10);
        let progress = progress(pace.seconds_left(now, 120));
        let line = pace.line(now, 120, &progress, false).unwrap();
        insta::assert_snapshot!(line, @"step 120/600 loss 2.414  val 2.500  lr 3.0e-4  123k tok/s  4:00 left");
    }

    #[test]
    fn lines_come_once_a_second_but_news_and_the_end_at_once() {
        let start = Instant::now();
        let mut pace = pace(start, 0, None);
        let mut is_told = |ms, step, is_news| {
            let now = start + Duration::from_millis(ms);
            pace.line(now, step, &progress(0.0), is_news).is_some()
        };
        assert!(is_told(10, 1, false));
        assert!(!is_told(500, 2, false));
        assert!(is_told(600, 3, true));
        assert!(!is_told(1599, 4, false));
        assert!(is_told(1600, 5, false));
        assert!(is_told(1601, 600, false));
    }

    #[test]
    fn a_long_run_says_less() {
        let start = Instant::now();
        let mut pace = pace(start, 0, None);
        let mut is_told = |s, step| {
            let now = start + Duration::from_secs(s);
            pace.line(now, step, &progress(0.0), false).is_some()
        };
        assert!(is_told(1000, 1));
        assert!(!is_told(1009, 2));
        assert!(is_told(1011, 3));
        assert!(is_told(100_000, 4));
        assert!(!is_told(100_029, 5));
        assert!(is_told(100_030, 6));
    }

    #[test]
    fn every_so_many_steps_if_asked_to_and_the_last() {
        let start = Instant::now();
        let mut pace = pace(start, 0, Some(250));
        let mut is_told = |step| pace.line(start, step, &progress(0.0), false).is_some();
        let told: Vec<u64> = (1..=600).filter(|step| is_told(*step)).collect();
        assert_eq!(told, [250, 500, 600]);
    }
}
