//! Ranks that take longer for a step than the others.
//!
//! Ranks in lock-step wait for each other in every step, so they are at the same step however slow one of them is: a
//! straggler is found where ranks do not wait, or wait for some of the others only. It takes longer and falls behind.

use std::time::Duration;

use ddp_proto::rendezvous::{RankProgress, StatusReply};

/// So many times the median make a straggler.
const FACTOR: f64 = 1.5;
/// Ranks that are at most so many steps apart are in lock-step: one of them may just have finished the step.
const LOCK_STEP: f64 = 1.0;
/// The moments of two reports are known to this.
const REPORT_ERROR: Duration = Duration::from_millis(200);
/// Stragglers that are named.
const MAX_NAMED: usize = 64;

/// What a rank said, and when its node said so.
pub(super) type Report<'a> = (Duration, &'a RankProgress);

/// Tells the median of the step times, and which ranks are slow.
pub(super) fn tell<'a>(reports: impl Iterator<Item = Report<'a>>, reply: &mut StatusReply) {
    let timed: Vec<(Report<'a>, f64)> = reports
        .filter_map(|report| Some((report, report.1.step_time_s?)))
        .collect();
    let Some(median) = median(timed.iter().map(|(_, time)| *time).collect()) else {
        return;
    };
    let reports = timed.iter().map(|(report, _)| *report);
    let Some(foremost) = reports.max_by_key(|(_, rank)| rank.step) else {
        return;
    };
    let mut slow: Vec<u32> = timed
        .iter()
        .filter(|(report, time)| *time > FACTOR * median && is_behind(*report, foremost, median))
        .map(|((_, rank), _)| rank.rank)
        .collect();
    slow.sort_unstable();
    reply.median_step_time_s = Some(median);
    reply.more_stragglers = slow.len().saturating_sub(MAX_NAMED) as u32;
    slow.truncate(MAX_NAMED);
    reply.stragglers = slow;
}

/// True if the rank was behind when the foremost one reported its step, even if it went on at the median pace since its
/// own report: nodes report at different moments.
fn is_behind((at, rank): Report<'_>, (then, foremost): Report<'_>, median: f64) -> bool {
    let since = (then + REPORT_ERROR).saturating_sub(at).as_secs_f64();
    let steps_since = if median > 0.0 { since / median } else { 0.0 };
    rank.step as f64 + steps_since + LOCK_STEP < foremost.step as f64
}

/// Of an even number of times the smaller of the two in the middle: of two ranks, one can be slow.
fn median(mut times: Vec<f64>) -> Option<f64> {
    let middle = times.len().checked_sub(1)? / 2;
    let (_, median, _) = times.select_nth_unstable_by(middle, f64::total_cmp);
    Some(*median)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of ranks with these step times and steps, whose nodes reported at these milliseconds.
    fn told(ranks: &[(u64, Option<f64>, u64)]) -> StatusReply {
        let ranks: Vec<(Duration, RankProgress)> = (0..)
            .zip(ranks)
            .map(|(rank, &(at_ms, step_time_s, step))| {
                let progress = RankProgress {
                    rank,
                    step,
                    step_time_s,
                    ..RankProgress::default()
                };
                (Duration::from_millis(at_ms), progress)
            })
            .collect();
        let mut reply = StatusReply::default();
        tell(ranks.iter().map(|(at, rank)| (*at, rank)), &mut reply);
        reply
    }

    /// Of ranks that do not wait for each other: each has gone on for a minute at its own pace.
    fn told_of_times(times: &[Option<f64>]) -> StatusReply {
        let steps = |time: Option<f64>| time.map_or(0, |time| (60.0 / time) as u64);
        let ranks: Vec<_> = times.iter().map(|&time| (60_000, time, steps(time))).collect();
        told(&ranks)
    }

    #[test]
    fn a_rank_is_slow_beyond_one_and_a_half_times_the_median() {
        let reply = told_of_times(&[Some(0.2), Some(0.1), None, Some(0.1), Some(0.15), Some(0.16)]);
        assert_eq!(reply.median_step_time_s, Some(0.15));
        assert!(reply.stragglers.is_empty());
        assert_eq!(told_of_times(&[Some(0.1), Some(0.1), Some(0.16)]).stragglers, [2]);
        assert_eq!(
            told_of_times(&[Some(0.3), Some(0.1)]).stragglers,
            [0],
            "of two ranks"
        );
        assert_eq!(told_of_times(&[None]).median_step_time_s, None);
        let stopped = told(&[(0, Some(0.0), 5), (0, Some(1.0), 1)]);
        assert_eq!(stopped.stragglers, [1], "a median of nothing");
    }

    /// One of two ranks was called slow whose node had reported after a checkpoint, and the other's before it.
    #[test]
    fn ranks_in_lock_step_are_not_slow() {
        let saved = told(&[(1000, Some(0.0126), 500), (1000, Some(0.1661), 501)]);
        assert!(saved.stragglers.is_empty(), "{saved:?}");
        // A second and a half later: as many steps as fit into that time at the median pace.
        let earlier = told(&[(1500, Some(0.0107), 300), (3000, Some(0.0071), 512)]);
        assert!(earlier.stragglers.is_empty(), "{earlier:?}");
        // The later report has the long step.
        let later = told(&[(1500, Some(0.0107), 512), (3000, Some(0.0261), 513)]);
        assert!(later.stragglers.is_empty(), "{later:?}");
        let behind = told(&[(1500, Some(0.0207), 200), (3000, Some(0.0071), 512)]);
        assert_eq!(behind.stragglers, [0], "more than the reports are apart");
    }

    #[test]
    fn few_are_named_and_the_rest_is_counted() {
        let times: Vec<_> = (0..300)
            .map(|rank| Some(if rank < 200 { 0.1 } else { 9.0 }))
            .collect();
        let reply = told_of_times(&times);
        assert_eq!((reply.stragglers.len(), reply.more_stragglers), (64, 36));
        assert_eq!(reply.stragglers[0], 200);
    }
}
