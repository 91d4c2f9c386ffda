//! Ranks that take longer for a step than the others.
//!
//! Ranks in lock-step wait for each other in every step, so their step times are alike however slow one of them is: a
//! straggler is found where ranks do not wait, or wait for some of the others only.

use ddp_proto::rendezvous::{RankProgress, StatusReply};

/// So many times the median make a straggler.
const FACTOR: f64 = 1.5;
/// Stragglers that are named.
const MAX_NAMED: usize = 64;

/// Tells the median of the step times, and which ranks are slow.
pub(super) fn tell<'a>(ranks: impl Iterator<Item = &'a RankProgress>, reply: &mut StatusReply) {
    let timed: Vec<(u32, f64)> = ranks
        .filter_map(|rank| Some((rank.rank, rank.step_time_s?)))
        .collect();
    let Some(median) = median(timed.iter().map(|(_, time)| *time).collect()) else {
        return;
    };
    let mut slow: Vec<u32> = timed
        .iter()
        .filter(|(_, time)| *time > FACTOR * median)
        .map(|(rank, _)| *rank)
        .collect();
    slow.sort_unstable();
    reply.median_step_time_s = Some(median);
    reply.more_stragglers = slow.len().saturating_sub(MAX_NAMED) as u32;
    slow.truncate(MAX_NAMED);
    reply.stragglers = slow;
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

    fn told(times: &[Option<f64>]) -> StatusReply {
        let ranks: Vec<RankProgress> = (0..)
            .zip(times)
            .map(|(rank, &step_time_s)| RankProgress {
                rank,
                step_time_s,
                ..RankProgress::default()
            })
            .collect();
        let mut reply = StatusReply::default();
        tell(ranks.iter(), &mut reply);
        reply
    }

    #[test]
    fn a_rank_is_slow_beyond_one_and_a_half_times_the_median() {
        let reply = told(&[Some(0.2), Some(0.1), None, Some(0.1), Some(0.15), Some(0.16)]);
        assert_eq!(reply.median_step_time_s, Some(0.15));
        assert!(reply.stragglers.is_empty());
        assert_eq!(told(&[Some(0.1), Some(0.1), Some(0.16)]).stragglers, [2]);
        assert_eq!(told(&[Some(0.3), Some(0.1)]).stragglers, [0], "of two ranks");
        assert_eq!(told(&[None]).median_step_time_s, None);
    }

    #[test]
    fn few_are_named_and_the_rest_is_counted() {
        let times: Vec<_> = (0..300)
            .map(|rank| Some(if rank < 200 { 0.1 } else { 9.0 }))
            .collect();
        let reply = told(&times);
        assert_eq!((reply.stragglers.len(), reply.more_stragglers), (64, 36));
        assert_eq!(reply.stragglers[0], 200);
    }
}
