//! Who waited for whom: a collective operation moves nothing until its last rank has come.

use std::collections::BTreeMap;

use super::overlap::{moving, of_kind};
use super::{About, Kind, Lane, Span};

/// Ranks that come so soon after each other come together.
const TOGETHER_US: f64 = 20.0;

/// An operation of all ranks of a group: communicator, first rank, sequence number.
type Meeting = (String, u32, u64);

/// Adds a span to each operation whose ranks are all here and did not come together, as long as the last one was
/// missing, and to what stood still for it. All spans are of one clock.
pub(super) fn mark_late(ranks: &mut [(About, Vec<Span>)]) {
    let mut meetings: BTreeMap<Meeting, Vec<(usize, usize)>> = BTreeMap::new();
    for (rank, (_, spans)) in ranks.iter().enumerate() {
        for (index, span) in spans.iter().enumerate() {
            if let (Lane::Communicator(name), Some(collective)) = (&span.lane, &span.collective)
                && let Some(sequence) = collective.sequence
            {
                let meeting = (name.clone(), collective.first_rank, sequence);
                meetings.entry(meeting).or_default().push((rank, index));
            }
        }
    }
    let mut late: Vec<Vec<Span>> = vec![Vec::new(); ranks.len()];
    for here in meetings.values() {
        let span = |&(rank, index): &(usize, usize)| -> &Span { &ranks[rank].1[index] };
        let size = span(&here[0])
            .collective
            .as_ref()
            .map(|collective| collective.ranks);
        let last = here
            .iter()
            .max_by(|a, b| span(a).start_us.total_cmp(&span(b).start_us));
        let (Some(last), true) = (last, size == Some(here.len() as u32)) else {
            continue;
        };
        let (name, came) = (waits_for(ranks[last.0].0.rank), span(last).start_us);
        for place in here {
            let waited = span(place);
            let end_us = came.min(waited.end_us);
            if end_us - waited.start_us > TOGETHER_US {
                late[place.0].push(Span {
                    kind: Kind::Late,
                    name: name.clone().into(),
                    end_us,
                    collective: None,
                    ..waited.clone()
                });
            }
        }
    }
    for ((_, spans), late) in ranks.iter_mut().zip(late) {
        spans.extend(late);
        let standing = standing(spans);
        spans.extend(standing);
    }
}

/// The parts of the computing stream's waits in which a rank was missing and nothing else was under way.
fn standing(spans: &[Span]) -> Vec<Span> {
    let waits = of_kind(spans, |span| {
        span.kind == Kind::Wait && span.lane == Lane::Compute
    });
    let still = waits.without(&moving(spans));
    let mut late: Vec<&Span> = spans.iter().filter(|span| span.kind == Kind::Late).collect();
    late.sort_by(|a, b| a.start_us.total_cmp(&b.start_us));
    let (mut standing, mut seen_us) = (Vec::new(), f64::NEG_INFINITY);
    for late in late {
        // Two communicators may miss a rank at the same time.
        let parts = still.within([late.start_us.max(seen_us), late.end_us]);
        standing.extend(parts.map(|[start_us, end_us]| Span {
            lane: Lane::Compute,
            start_us,
            end_us,
            ..late.clone()
        }));
        seen_us = late.end_us.max(seen_us);
    }
    standing
}

fn waits_for(rank: u32) -> String {
    format!("waits for rank {rank}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::{ClockReading, Collective};

    fn about(rank: u32) -> About {
        About {
            run: "test".into(),
            rank,
            world_size: 3,
            host: "a".into(),
            generation: 0,
            steps: [1, 1],
            clock: ClockReading {
                clock: "a".into(),
                ns: 0,
            },
            missed: 0,
        }
    }

    fn reduce(sequence: Option<u64>, start_us: f64, end_us: f64) -> Span {
        Span {
            lane: Lane::Communicator("world".into()),
            kind: Kind::Gradients,
            name: "all-reduce".into(),
            start_us,
            end_us,
            collective: Some(Collective {
                bytes: 4,
                first_rank: 0,
                ranks: 3,
                sequence,
            }),
        }
    }

    fn wait(start_us: f64, end_us: f64) -> Span {
        Span {
            lane: Lane::Compute,
            kind: Kind::Wait,
            name: "waits".into(),
            collective: None,
            ..reduce(None, start_us, end_us)
        }
    }

    fn late(spans: &[Span]) -> Vec<(&Lane, &str, f64, f64)> {
        let late = spans.iter().filter(|span| span.kind == Kind::Late);
        late.map(|span| (&span.lane, span.name.as_ref(), span.start_us, span.end_us))
            .collect()
    }

    #[test]
    fn those_that_come_first_wait_for_the_last() {
        let mut ranks = [
            (
                about(0),
                vec![reduce(Some(7), 100.0, 1000.0), wait(300.0, 1000.0)],
            ),
            (about(1), vec![reduce(Some(7), 895.0, 1000.0)]),
            (
                about(2),
                vec![reduce(Some(7), 900.0, 1000.0), wait(950.0, 1000.0)],
            ),
        ];
        mark_late(&mut ranks);
        let comm = Lane::Communicator("world".into());
        let words = "waits for rank 2";
        assert_eq!(
            late(&ranks[0].1),
            [
                (&comm, words, 100.0, 900.0),
                (&Lane::Compute, words, 300.0, 900.0)
            ]
        );
        // So short a time is none, and the last one waits for nobody.
        assert_eq!(late(&ranks[1].1), []);
        assert_eq!(late(&ranks[2].1), []);
    }

    #[test]
    fn what_stands_still_twice_in_a_row_is_late_twice() {
        let first = vec![
            reduce(Some(7), 100.0, 1000.0),
            wait(300.0, 600.0),
            wait(600.0, 1000.0),
        ];
        let mut ranks = [
            (about(0), first),
            (about(1), vec![reduce(Some(7), 900.0, 1000.0)]),
            (about(2), vec![reduce(Some(7), 900.0, 1000.0)]),
        ];
        mark_late(&mut ranks);
        let standing = late(&ranks[0].1);
        let standing = standing.iter().filter(|(lane, ..)| **lane == Lane::Compute);
        let times: Vec<_> = standing.map(|&(.., start, end)| [start, end]).collect();
        assert_eq!(
            times,
            [[300.0, 600.0], [600.0, 900.0]],
            "viewers drop what lies across two spans"
        );
    }

    #[test]
    fn only_operations_of_all_their_ranks_are_compared() {
        let mut ranks = [
            (
                about(0),
                vec![reduce(Some(7), 100.0, 1000.0), reduce(None, 0.0, 50.0)],
            ),
            (
                about(1),
                vec![reduce(Some(7), 900.0, 1000.0), reduce(None, 40.0, 50.0)],
            ),
        ];
        mark_late(&mut ranks);
        assert!(ranks.iter().all(|(_, spans)| late(spans).is_empty()));
    }
}
