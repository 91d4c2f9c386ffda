//! Steps and step time of a worker, from its heartbeats. Only people see them; no decision uses them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ddp_proto::control::Phase;
use ddp_proto::rendezvous::RankProgress;

/// Most workers of a node in one heartbeat.
pub(super) const MAX_REPORTED: usize = 256;
/// Time that the average covers: much longer than the time between two heartbeats to the daemon. Ranks in lock-step
/// whose nodes report at different moments have nearly the same average then.
const WINDOW: Duration = Duration::from_secs(10);
/// Fewest steps that the average covers, so that one step that saves or validates does not decide it.
const WINDOW_STEPS: u64 = 4;
/// Shortest time between two marks, and shortest time that an average covers.
const MARK_INTERVAL: Duration = Duration::from_secs(1);

/// Shortest time that a sample of a worker's waits covers. It is longer than a scheduler's time slice, so that programs
/// that share a core do not make a straggler.
const SAMPLE_TIME: Duration = Duration::from_millis(250);
/// Samples of which quartiles are taken.
const SAMPLES: usize = 16;

/// The number of finished steps at a moment.
#[derive(Clone, Copy, Debug)]
struct Mark {
    step: u64,
    at: Instant,
}

impl Mark {
    fn time_since(self, earlier: Self) -> Duration {
        self.at.saturating_duration_since(earlier.at)
    }
}

/// How long a worker waits for other ranks.
#[derive(Clone, Debug, Default)]
struct Waits {
    /// Seconds a step, oldest first.
    samples: VecDeque<f64>,
    /// Where the next sample begins, and the seconds waited before.
    from: Option<(Mark, f64)>,
}

impl Waits {
    /// `waited_s` is the sum of all waits so far. True if there are enough samples for the first time.
    fn note(&mut self, now: Mark, waited_s: Option<f64>) -> bool {
        let waited_s = waited_s.filter(|seconds| seconds.is_finite());
        let (Some(waited_s), Some((from, before))) = (waited_s, self.from) else {
            self.from = waited_s.map(|waited_s| (now, waited_s));
            return false;
        };
        if now.time_since(from) < SAMPLE_TIME {
            return false;
        }
        self.from = Some((now, waited_s));
        let sample = (waited_s - before).max(0.0) / (now.step - from.step) as f64;
        let is_full = self.samples.len() == SAMPLES;
        if is_full {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
        !is_full && self.samples.len() == SAMPLES
    }

    /// The lower and the upper quartile.
    fn quartiles(&self) -> Option<[f64; 2]> {
        let mut sorted: Vec<f64> = self.samples.iter().copied().collect();
        sorted.sort_unstable_by(f64::total_cmp);
        (sorted.len() == SAMPLES).then(|| [sorted[SAMPLES / 4], sorted[SAMPLES - 1 - SAMPLES / 4]])
    }
}

/// Steps, step time and loss of one worker.
#[derive(Clone, Debug, Default)]
pub(super) struct Pace {
    /// Of the window, oldest first, [`MARK_INTERVAL`] apart or more: about one for each second of [`WINDOW`] at most.
    marks: VecDeque<Mark>,
    last: Option<Mark>,
    loss: Option<f64>,
    waits: Waits,
}

impl Pace {
    /// The worker had something to say `at` this moment; only rank 0 gives a loss. True if the daemon must get it at once:
    /// the first loss, one every [`MARK_INTERVAL`] and the last, and how long it waits for others once that is known.
    pub(super) fn note(
        &mut self,
        at: Instant,
        step: u64,
        phase: Phase,
        loss: Option<f64>,
        waited_s: Option<f64>,
    ) -> bool {
        let is_first = self.loss.is_none();
        self.loss = loss.filter(|loss| loss.is_finite()).or(self.loss);
        // The first step begins with what the start has left to do.
        if phase == Phase::Starting {
            return false;
        }
        match self.last {
            Some(last) if last.step == step => return phase == Phase::Finishing && self.loss.is_some(),
            // It counts anew.
            Some(last) if last.step > step => {
                self.marks.clear();
                self.waits = Waits::default();
            }
            _ => {}
        }
        let now = Mark { step, at };
        self.last = Some(now);
        let is_enough = |mark: &Mark| now.time_since(*mark) >= WINDOW && step - mark.step >= WINDOW_STEPS;
        while self.marks.get(1).is_some_and(is_enough) {
            self.marks.pop_front();
        }
        let newest = self.marks.back();
        let is_marked = newest.is_none_or(|newest| now.time_since(*newest) >= MARK_INTERVAL);
        if is_marked {
            self.marks.push_back(now);
        }
        self.waits.note(now, waited_s) || (self.loss.is_some() && (is_marked || is_first))
    }

    /// Seconds a step, averaged over the window; none until that is long enough.
    fn step_time_s(&self) -> Option<f64> {
        let (first, last) = (*self.marks.front()?, self.last?);
        let time = last.time_since(first);
        let steps = last.step - first.step;
        (steps > 0 && time >= MARK_INTERVAL).then(|| time.as_secs_f64() / steps as f64)
    }

    /// The progress for a heartbeat to the daemon.
    pub(super) fn report(&self, rank: u32, step: u64, silence: Duration) -> RankProgress {
        let waited = self.waits.quartiles();
        RankProgress {
            rank,
            step,
            step_time_s: self.step_time_s(),
            loss: self.loss,
            silent_ms: u64::try_from(silence.as_millis()).unwrap_or(u64::MAX),
            waited_low_s: waited.map(|[low, _]| low),
            waited_high_s: waited.map(|[_, high]| high),
            ..RankProgress::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_takes_the_time_between_two_heartbeats_and_the_first_one_does_not_count() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut pace = Pace::default();
        pace.note(at(0), 0, Phase::Starting, None, None);
        pace.note(at(9000), 1, Phase::Training, Some(f64::NAN), None);
        assert_eq!(pace.report(0, 1, Duration::ZERO).step_time_s, None);
        assert_eq!(pace.report(0, 1, Duration::ZERO).loss, None);
        pace.note(at(9500), 1, Phase::Training, Some(2.5), None);
        assert!(
            !pace.note(at(9600), 2, Phase::Training, Some(2.5), None),
            "one a second"
        );
        assert!(pace.note(at(10_000), 6, Phase::Training, Some(2.5), None));
        let told = pace.report(0, 6, Duration::from_millis(7));
        assert_eq!(told.step_time_s, Some(0.2), "five steps in a second");
        assert_eq!((told.loss, told.silent_ms), (Some(2.5), 7));
        assert!(pace.note(at(11_000), 10, Phase::Saving, None, None));
        assert!(
            pace.note(at(11_500), 10, Phase::Finishing, None, None),
            "the last one"
        );
        assert_eq!(
            pace.report(0, 10, Duration::ZERO).step_time_s,
            Some(2.0 / 9.0),
            "nine steps in two seconds"
        );
        pace.note(at(12_000), 3, Phase::Training, None, None);
        assert_eq!(
            pace.report(0, 3, Duration::ZERO).step_time_s,
            None,
            "it counts anew"
        );
        let mut pace = Pace::default();
        assert!(!pace.note(at(0), 0, Phase::Training, None, None));
        assert!(
            pace.note(at(10), 1, Phase::Training, Some(2.5), None),
            "the first loss"
        );
    }

    /// Ranks in lock-step whose nodes report two seconds apart: only one of the averages has the step that saves.
    #[test]
    fn one_long_step_does_not_decide_the_average() {
        let start = Instant::now();
        let paced = |steps: u64, saved: u64| {
            let mut pace = Pace::default();
            let mut ms = 0;
            for step in 0..steps {
                ms += if step == saved { 1500 } else { 10 };
                pace.note(
                    start + Duration::from_millis(ms),
                    step,
                    Phase::Training,
                    None,
                    None,
                );
                assert!(pace.marks.len() <= 12, "{} marks", pace.marks.len());
            }
            pace.step_time_s().expect("seconds of steps")
        };
        let (before, after) = (paced(2000, 2000), paced(2001, 2000));
        assert!((before - 0.01).abs() < 1e-9, "{before}");
        assert!(after < 1.25 * before, "{after} against {before}");
        assert!((paced(4000, 2000) - 0.01).abs() < 1e-9, "it is forgotten");
    }

    #[test]
    fn of_long_steps_the_average_has_four() {
        let start = Instant::now();
        let mut pace = Pace::default();
        for step in 0..=20 {
            pace.note(
                start + Duration::from_secs(60 * step + if step == 20 { 40 } else { 0 }),
                step,
                Phase::Training,
                None,
                None,
            );
            assert!(pace.marks.len() <= 6, "{} marks", pace.marks.len());
        }
        assert_eq!(pace.step_time_s(), Some(70.0), "280 s for the last four");
    }

    #[test]
    fn the_first_moments_have_no_average() {
        let start = Instant::now();
        let mut pace = Pace::default();
        for step in 0..=90 {
            pace.note(
                start + Duration::from_millis(10 * step),
                step,
                Phase::Training,
                None,
                None,
            );
        }
        assert_eq!(pace.step_time_s(), None);
        pace.note(start + Duration::from_secs(1), 100, Phase::Training, None, None);
        assert_eq!(pace.step_time_s(), Some(0.01));
    }

    #[test]
    fn what_a_worker_waits_is_known_after_sixteen_steps_and_one_long_wait_does_not_count() {
        let start = Instant::now();
        let (mut pace, mut waited) = (Pace::default(), 0.0);
        for step in 0..=16 {
            waited += if step == 7 { 9.0 } else { 0.125 };
            let at = start + Duration::from_millis(500 * step);
            let is_known = pace.note(at, step, Phase::Training, None, Some(waited));
            assert_eq!(is_known, step == 16, "step {step}");
        }
        let report = pace.report(0, 16, Duration::ZERO);
        assert_eq!(
            (report.waited_low_s, report.waited_high_s),
            (Some(0.125), Some(0.125))
        );
        pace.note(
            start + Duration::from_secs(9),
            3,
            Phase::Training,
            None,
            Some(0.0),
        );
        assert_eq!(
            pace.report(0, 3, Duration::ZERO).waited_low_s,
            None,
            "it counts anew"
        );
    }
}
