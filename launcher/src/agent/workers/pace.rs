//! How far a worker has come and how fast, from its heartbeats. People are told of it; nothing is decided by it.

use std::time::{Duration, Instant};

use ddp_proto::control::Phase;
use ddp_proto::rendezvous::RankProgress;

/// Workers of a node of which a heartbeat tells.
pub(super) const MAX_TOLD: usize = 256;
/// Steps that the average reaches back over: one that saves or validates is forgotten soon.
const AVERAGED_STEPS: f64 = 4.0;

/// Steps, step time and loss of one worker.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    /// Its last step, and when it was reached.
    last: Option<(u64, Instant)>,
    step_time: Option<Duration>,
    loss: Option<f64>,
}

impl Pace {
    /// The worker had something to say `at` this moment.
    pub(super) fn note(&mut self, at: Instant, step: u64, phase: Phase, loss: Option<f64>) {
        self.loss = loss.filter(|loss| loss.is_finite()).or(self.loss);
        // The first step begins with what the start has left to do.
        if phase == Phase::Starting {
            return;
        }
        match self.last {
            Some((before, _)) if before == step => return,
            Some((before, since)) if before < step => {
                let steps = (step - before) as f64;
                let time = at.saturating_duration_since(since).as_secs_f64() / steps;
                let average = self.step_time.map_or(time, |average| {
                    let average = average.as_secs_f64();
                    average + (time - average) * (steps / AVERAGED_STEPS).min(1.0)
                });
                self.step_time = Duration::try_from_secs_f64(average).ok();
            }
            _ => self.step_time = None,
        }
        self.last = Some((step, at));
    }

    /// As the daemon is told.
    pub(super) fn told(&self, rank: u32, step: u64, silence: Duration) -> RankProgress {
        RankProgress {
            rank,
            step,
            step_time_s: self.step_time.map(|time| time.as_secs_f64()),
            loss: self.loss.filter(|_| rank == 0),
            silent_ms: u64::try_from(silence.as_millis()).unwrap_or(u64::MAX),
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
        pace.note(at(0), 0, Phase::Starting, None);
        pace.note(at(9000), 1, Phase::Training, Some(f64::NAN));
        assert_eq!(pace.told(0, 1, Duration::ZERO).step_time_s, None);
        assert_eq!(pace.told(0, 1, Duration::ZERO).loss, None);
        pace.note(at(9500), 1, Phase::Training, Some(2.5));
        pace.note(at(10_000), 6, Phase::Training, None);
        let told = pace.told(0, 6, Duration::from_millis(7));
        assert_eq!(told.step_time_s, Some(0.2), "five steps in a second");
        assert_eq!((told.loss, told.silent_ms), (Some(2.5), 7));
        assert_eq!(pace.told(1, 6, Duration::ZERO).loss, None, "rank 0's only");
        pace.note(at(11_000), 7, Phase::Saving, None);
        assert_eq!(pace.told(0, 7, Duration::ZERO).step_time_s, Some(0.4));
        pace.note(at(12_000), 3, Phase::Training, None);
        assert_eq!(
            pace.told(0, 3, Duration::ZERO).step_time_s,
            None,
            "it counts anew"
        );
    }
}
