//! The past of a job, for people: its generations with the reason of each change, and the losses of rank 0. Nothing is
//! decided by it, and all of it is bounded.

use std::collections::VecDeque;
use std::time::Duration;

use ddp_proto::rendezvous::{GenerationStatus, LossPoint, StatusReply};

use super::messages::clip;

/// Generations that are kept, the last ones.
const MAX_GENERATIONS: usize = 64;
/// Bytes of a reason that are kept.
const MAX_REASON_BYTES: usize = 1024;
/// Losses that are kept: when so many are there, every other one goes, and only every other one is kept from then on.
const MAX_LOSSES: usize = 512;

/// What was.
#[derive(Debug, Default)]
pub(super) struct History {
    generations: VecDeque<Period>,
    /// Generations that are not kept any more.
    dropped: u64,
    losses: Losses,
}

/// One generation.
#[derive(Debug)]
struct Period {
    /// Without its times.
    status: GenerationStatus,
    began: Duration,
    ended: Option<Duration>,
}

impl Period {
    fn tell(&self, now: Duration) -> GenerationStatus {
        let ago = |then: Duration| now.saturating_sub(then).as_millis() as u64;
        GenerationStatus {
            began_ms: ago(self.began),
            ended_ms: self.ended.map(ago),
            ..self.status.clone()
        }
    }
}

impl History {
    /// A generation began, or was taken up from an earlier daemon.
    pub(super) fn begin(&mut self, now: Duration, generation: u64, nodes: u32, ranks: u32, why: &str) {
        if self.generations.len() >= MAX_GENERATIONS {
            self.generations.pop_front();
            self.dropped += 1;
        }
        self.generations.push_back(Period {
            status: GenerationStatus {
                generation,
                nodes,
                ranks,
                began: clip(why, MAX_REASON_BYTES).to_owned(),
                ..GenerationStatus::default()
            },
            began: now,
            ended: None,
        });
    }

    /// Ends the last generation, unless it has ended before.
    pub(super) fn end(&mut self, now: Duration, why: &str) {
        if let Some(last) = self.generations.back_mut().filter(|last| last.ended.is_none()) {
            last.ended = Some(now);
            clip(why, MAX_REASON_BYTES).clone_into(&mut last.status.ended);
        }
    }

    /// Rank 0 told of this loss.
    pub(super) fn note_loss(&mut self, step: u64, loss: f64) {
        if let Some(last) = self.generations.back_mut() {
            last.status.step.get_or_insert(step);
        }
        self.losses.note(step, loss);
    }

    /// Tells all of it.
    pub(super) fn tell(&self, now: Duration, reply: &mut StatusReply) {
        let told = self.generations.iter().map(|period| period.tell(now));
        reply.generations = told.collect();
        reply.more_generations = self.dropped;
        let losses = self.losses.points.iter();
        reply.losses = losses.map(|&(step, loss)| LossPoint { step, loss }).collect();
    }
}

/// Losses over the steps of the run.
#[derive(Debug)]
struct Losses {
    points: Vec<(u64, f64)>,
    /// Keeps one of every `every` losses.
    every: u64,
    /// Those that came since the last one was kept.
    since: u64,
}

impl Default for Losses {
    fn default() -> Self {
        Self {
            points: Vec::new(),
            every: 1,
            since: 0,
        }
    }
}

impl Losses {
    fn note(&mut self, step: u64, loss: f64) {
        if !loss.is_finite() || self.points.last().is_some_and(|(last, _)| *last == step) {
            return;
        }
        if self.points.last().is_some_and(|(last, _)| *last > step) {
            // The workers have gone back to a checkpoint: those steps are done again.
            self.points.retain(|(earlier, _)| *earlier < step);
            self.since = self.every;
        }
        self.since += 1;
        if self.since < self.every && !self.points.is_empty() {
            return;
        }
        self.since = 0;
        if self.points.len() >= MAX_LOSSES {
            let mut index = 0;
            self.points.retain(|_| {
                index += 1;
                index % 2 == 1
            });
            self.every *= 2;
        }
        self.points.push((step, loss));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(history: &History, now: Duration) -> StatusReply {
        let mut reply = StatusReply::default();
        history.tell(now, &mut reply);
        reply
    }

    #[test]
    fn the_last_generations_are_kept_each_with_its_reasons() {
        let mut history = History::default();
        for generation in 1..=70 {
            let now = Duration::from_secs(generation);
            history.begin(now, generation, 2, 4, "all 2 nodes joined");
            history.end(now, &"x".repeat(5000));
            history.end(now, "only the first end counts");
        }
        let reply = told(&history, Duration::from_secs(71));
        assert_eq!((reply.generations.len(), reply.more_generations), (64, 6));
        let last = &reply.generations[63];
        assert_eq!(
            (last.generation, last.began_ms, last.ended_ms),
            (70, 1000, Some(1000))
        );
        assert_eq!((last.nodes, last.ranks, last.ended.len()), (2, 4, 1024));
    }

    #[test]
    fn losses_are_thinned_and_spread_over_the_run() {
        let mut history = History::default();
        for step in 0..100_000 {
            history.note_loss(step, 1.0 / step.max(1) as f64);
        }
        history.note_loss(100_000, f64::NAN);
        let losses = told(&history, Duration::ZERO).losses;
        assert!((256..=512).contains(&losses.len()), "{}", losses.len());
        assert_eq!(losses[0].step, 0);
        assert!(losses[losses.len() - 1].step > 99_000);
        let gaps: Vec<u64> = losses
            .windows(2)
            .map(|pair| pair[1].step - pair[0].step)
            .collect();
        assert!(gaps.iter().all(|gap| *gap <= 2 * gaps[0].max(256)), "{gaps:?}");
    }

    #[test]
    fn steps_that_are_done_again_replace_those_before() {
        let mut history = History::default();
        for (generation, steps) in [(1, &[1, 2, 3, 4][..]), (2, &[2, 3])] {
            history.begin(Duration::ZERO, generation, 1, 1, "");
            for &step in steps {
                history.note_loss(step, step as f64);
            }
        }
        let reply = told(&history, Duration::ZERO);
        let steps: Vec<u64> = reply.losses.iter().map(|point| point.step).collect();
        assert_eq!(steps, [1, 2, 3]);
        let began: Vec<_> = reply.generations.iter().map(|one| one.step).collect();
        assert_eq!(began, [Some(1), Some(2)], "a mark for each start");
    }
}
