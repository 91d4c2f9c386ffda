//! Waits of workers for other ranks, on the console: a line when one has become long, and one when it is over.

use std::time::{Duration, Instant};

use ddp_proto::control::PeerWait;
use ddp_proto::words::numbered;

/// A wait of this length is reported.
const LONG: Duration = Duration::from_secs(5);
/// Ranks that began to wait together are reported in one line, though their heartbeats come one after the other.
const APART: Duration = Duration::from_millis(1500);

/// The waits of a generation's workers that were reported and go on.
#[derive(Debug, Default)]
pub(crate) struct ReportedWaits(Vec<ReportedWait>);

#[derive(Debug)]
struct ReportedWait {
    /// Those that wait, ascending.
    ranks: Vec<u32>,
    operation: String,
    since: Instant,
}

impl ReportedWait {
    /// The same wait goes on: a set-up that waits for the next peer has begun a new one.
    fn is_of(&self, rank: u32, wait: &PeerWait) -> bool {
        let is_long = Duration::from_millis(wait.waited_ms) + APART >= LONG;
        is_long && self.operation == wait.operation && self.ranks.contains(&rank)
    }
}

impl ReportedWaits {
    /// The lines that are due, now that the workers wait as `workers` says: ranks, ascending, each with its waits.
    pub(crate) fn update(&mut self, workers: &[(u32, &[PeerWait])], now: Instant) -> Vec<String> {
        let all = || {
            workers
                .iter()
                .flat_map(|(rank, waits)| waits.iter().map(|wait| (*rank, wait)))
        };
        let mut lines = Vec::new();
        self.0.retain(|reported| {
            let goes_on = all().any(|(rank, wait)| reported.is_of(rank, wait));
            if !goes_on {
                lines.push(format!(
                    "{}: {} stopped waiting after {:.1} s",
                    numbered("rank", &reported.ranks),
                    reported.operation,
                    now.saturating_duration_since(reported.since).as_secs_f64()
                ));
            }
            goes_on
        });
        for (rank, wait) in all() {
            let waited = Duration::from_millis(wait.waited_ms);
            if waited < LONG
                || wait.peers.is_empty()
                || self.0.iter().any(|reported| reported.is_of(rank, wait))
            {
                continue;
            }
            let together = all().filter(|(_, other)| {
                let is_long = Duration::from_millis(other.waited_ms) + APART >= LONG;
                is_long && (&other.operation, &other.peers) == (&wait.operation, &wait.peers)
            });
            let reported = ReportedWait {
                ranks: together.map(|(rank, _)| rank).collect(),
                operation: wait.operation.clone(),
                since: now.checked_sub(waited).unwrap_or(now),
            };
            lines.push(format!("{}: {wait}", numbered("rank", &reported.ranks)));
            self.0.push(reported);
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(operation: &str, waited_ms: u64, peers: &str) -> PeerWait {
        PeerWait {
            operation: operation.into(),
            waited_ms,
            peers: peers.into(),
        }
    }

    #[test]
    fn a_long_wait_is_a_line_and_its_end_is_one() {
        let (mut reported, now) = (ReportedWaits::default(), Instant::now());
        let waits = |waited_ms| [wait("all-reduce #3 of `world`", waited_ms, "rank 1")];
        assert!(reported.update(&[(0, &waits(4999)), (1, &[])], now).is_empty());
        insta::assert_snapshot!(reported.update(&[(0, &waits(5200)), (1, &[])], now).join("\n"), @"rank 0: all-reduce #3 of `world` has waited 5.2 s for rank 1");
        assert!(
            reported.update(&[(0, &waits(9200)), (1, &[])], now).is_empty(),
            "once"
        );
        let later = now + Duration::from_secs(7);
        insta::assert_snapshot!(reported.update(&[(0, &[]), (1, &[])], later).join("\n"), @"rank 0: all-reduce #3 of `world` stopped waiting after 12.2 s");
        assert!(reported.update(&[(0, &[]), (1, &[])], later).is_empty(), "once");
    }

    #[test]
    fn ranks_that_wait_for_the_same_one_are_one_line() {
        let (mut reported, now) = (ReportedWaits::default(), Instant::now());
        let reduce = |waited_ms, peers| [wait("all-reduce #3 of `world`", waited_ms, peers)];
        let (first, second, other) = (
            reduce(5000, "rank 2"),
            reduce(4100, "rank 2"),
            reduce(5000, "rank 9"),
        );
        let workers: [(u32, &[PeerWait]); 4] = [(0, &first), (1, &second), (2, &other), (3, &second)];
        insta::assert_snapshot!(reported.update(&workers, now).join("\n"), @r"
        ranks 0, 1, 3: all-reduce #3 of `world` has waited 5.0 s for rank 2
        rank 2: all-reduce #3 of `world` has waited 5.0 s for rank 9
        ");
        // The next operation of the same ranks is another wait.
        let next = [wait("all-reduce #4 of `world`", 300, "rank 2")];
        let workers: [(u32, &[PeerWait]); 4] = [(0, &next), (1, &second), (2, &other), (3, &next)];
        assert!(
            reported.update(&workers, now).is_empty(),
            "one of them still waits"
        );
        let workers: [(u32, &[PeerWait]); 4] = [(0, &next), (1, &next), (2, &other), (3, &next)];
        insta::assert_snapshot!(reported.update(&workers, now).join("\n"), @"ranks 0, 1, 3: all-reduce #3 of `world` stopped waiting after 5.0 s");
    }

    #[test]
    fn a_set_up_that_waits_for_the_next_peer_is_told_anew() {
        let (mut reported, now) = (ReportedWaits::default(), Instant::now());
        let connect = |waited_ms, peers| [wait("connect of `world`", waited_ms, peers)];
        assert_eq!(reported.update(&[(0, &connect(6000, "rank 1"))], now).len(), 1);
        insta::assert_snapshot!(reported.update(&[(0, &connect(1000, "rank 9"))], now).join("\n"), @"rank 0: connect of `world` stopped waiting after 6.0 s");
        insta::assert_snapshot!(reported.update(&[(0, &connect(5100, "rank 9"))], now).join("\n"), @"rank 0: connect of `world` has waited 5.1 s for rank 9");
    }

    #[test]
    fn an_operation_that_knows_no_peers_is_not_told() {
        let unknown = [wait("all-reduce #3 of `world`, queued,", 9000, "")];
        let workers: [(u32, &[PeerWait]); 1] = [(0, &unknown)];
        assert!(
            ReportedWaits::default()
                .update(&workers, Instant::now())
                .is_empty()
        );
    }
}
