//! How much of the communication was hidden, and which ranks waited for which: a collective operation moves nothing until its
//! last rank has come. Both are computed on times as sets of intervals.

use std::collections::{BTreeMap, BTreeSet};

use super::{About, Kind, Lane, Span};

/// Times of one rank, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Overlap {
    /// Time in which gradients, parameters or activations moved, on any lane, with all ranks present.
    pub moving_us: f64,
    /// The part of it in which the computing stream waited.
    pub exposed_us: f64,
    /// Time in which the computing stream waited because a rank was late.
    pub late_us: f64,
}

impl Overlap {
    /// Of the spans of one rank within these times, from begin to end. Which ranks were late is known of merged traces only: else
    /// waiting for them is a part of what was under way.
    pub fn of(spans: &[Span], times: impl IntoIterator<Item = [f64; 2]>) -> Self {
        let within = Intervals::union(times);
        let moving = moving(spans).common(&within);
        let on_compute = |kind| of_kind(spans, |span| span.kind == kind && span.lane == Lane::Compute);
        Self {
            moving_us: moving.length(),
            exposed_us: moving.common(&on_compute(Kind::Wait)).length(),
            late_us: on_compute(Kind::Late).common(&within).length(),
        }
    }

    /// The part that was hidden behind arithmetic, from 0 to 1. None without communication.
    pub fn hidden(&self) -> Option<f64> {
        (self.moving_us > 0.0).then(|| 1.0 - self.exposed_us / self.moving_us)
    }
}

impl std::ops::AddAssign for Overlap {
    fn add_assign(&mut self, other: Self) {
        self.moving_us += other.moving_us;
        self.exposed_us += other.exposed_us;
        self.late_us += other.late_us;
    }
}

/// When gradients, parameters or activations were under way, and no rank was missing.
pub(super) fn moving(spans: &[Span]) -> Intervals {
    let lanes: BTreeSet<&Lane> = spans.iter().map(|span| &span.lane).collect();
    let of_lanes = lanes.into_iter().map(|lane| {
        let of_lane =
            |kinds: &[Kind]| of_kind(spans, |span| span.lane == *lane && kinds.contains(&span.kind));
        let moved = of_lane(&[Kind::Gradients, Kind::Parameters, Kind::Activations]);
        moved.without(&of_lane(&[Kind::Late]))
    });
    let of_lanes: Vec<Intervals> = of_lanes.collect();
    Intervals::union(of_lanes.iter().flat_map(Intervals::iter))
}

/// When there were such spans.
fn of_kind(spans: &[Span], wanted: impl Fn(&Span) -> bool) -> Intervals {
    let wanted = spans.iter().filter(|span| wanted(span));
    Intervals::union(wanted.map(|span| [span.start_us, span.end_us]))
}

/// Ascending intervals that do not overlap.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Intervals(Vec<[f64; 2]>);

impl Intervals {
    /// Whenever one of these is; empty ones are never.
    pub(super) fn union(intervals: impl IntoIterator<Item = [f64; 2]>) -> Self {
        let mut intervals: Vec<[f64; 2]> = intervals.into_iter().filter(|[start, end]| start < end).collect();
        intervals.sort_by(|a, b| a[0].total_cmp(&b[0]));
        let mut union: Vec<[f64; 2]> = Vec::new();
        for [start, end] in intervals {
            match union.last_mut() {
                Some(last) if start < last[1] => last[1] = last[1].max(end),
                _ => union.push([start, end]),
            }
        }
        Self(union)
    }

    /// When both are.
    fn common(&self, other: &Self) -> Self {
        self.without(&self.without(other))
    }

    /// When this is and the other is not.
    pub(super) fn without(&self, other: &Self) -> Self {
        let (mut left, mut rest) = (Vec::new(), &other.0[..]);
        for &[start, end] in &self.0 {
            // Those that are over by now are over for whatever begins later, too.
            while rest.first().is_some_and(|first| first[1] <= start) {
                rest = &rest[1..];
            }
            let mut from = start;
            for &[gone, back] in rest.iter().take_while(|part| part[0] < end) {
                if from < gone {
                    left.push([from, gone]);
                }
                from = back;
            }
            if from < end {
                left.push([from, end]);
            }
        }
        Self(left)
    }

    /// Those parts that lie within this one.
    pub(super) fn within(&self, [start, end]: [f64; 2]) -> impl Iterator<Item = [f64; 2]> {
        let first = self.0.partition_point(|part| part[1] <= start);
        let parts = self.0[first..].iter().take_while(move |part| part[0] < end);
        parts.map(move |part| [part[0].max(start), part[1].min(end)])
    }

    /// All together.
    pub(super) fn length(&self) -> f64 {
        self.0.iter().map(|[start, end]| end - start).sum()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = [f64; 2]> {
        self.0.iter().copied()
    }
}

/// Ranks that come so soon after each other come together.
const TOGETHER_US: f64 = 20.0;

/// An operation of all ranks of a group: communicator, first rank, sequence number.
type Meeting = (String, u32, u64);

/// Adds a span to each operation whose ranks are all here and did not come together, as long as the last one was
/// missing, and to what waited for it. All spans are of one clock.
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
        let (name, came) = (
            format!("waits for rank {}", ranks[last.0].0.rank),
            span(last).start_us,
        );
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::{ClockReading, Collective};

    fn span(lane: Lane, kind: Kind, start_us: f64, end_us: f64) -> Span {
        Span {
            lane,
            kind,
            name: "x".into(),
            start_us,
            end_us,
            collective: None,
        }
    }

    #[test]
    fn what_is_waited_for_is_exposed_and_counts_once() {
        let comm = |name: &str| Lane::Communicator(name.into());
        let mut spans = vec![
            // Two communicators at once from 20 to 30.
            span(comm("world"), Kind::Gradients, 10.0, 30.0),
            span(comm("parameters"), Kind::Parameters, 20.0, 40.0),
            span(comm("world"), Kind::Gradients, 50.0, 60.0),
            // Not what averaging takes.
            span(comm("world"), Kind::Other, 60.0, 90.0),
            span(Lane::Compute, Kind::Backward, 0.0, 35.0),
            span(Lane::Compute, Kind::Wait, 35.0, 45.0),
            span(Lane::Compute, Kind::Wait, 55.0, 58.0),
            span(Lane::Host, Kind::Wait, 10.0, 20.0),
        ];
        let whole = Overlap::of(&spans, [[0.0, 100.0]]);
        assert_eq!((whole.moving_us, whole.exposed_us), (40.0, 8.0));
        assert_eq!(whole.hidden(), Some(0.8));
        let parts = Overlap::of(&spans, [[38.0, 45.0], [50.0, 52.0]]);
        assert_eq!((parts.moving_us, parts.exposed_us), (4.0, 2.0));
        assert_eq!(Overlap::of(&spans, [[95.0, 99.0]]).hidden(), None);
        // Until 57 another rank was missing.
        spans.push(span(comm("world"), Kind::Late, 50.0, 57.0));
        spans.push(span(Lane::Compute, Kind::Late, 55.0, 57.0));
        let known = Overlap::of(&spans, [[0.0, 100.0]]);
        assert_eq!(
            (known.moving_us, known.exposed_us, known.late_us),
            (33.0, 6.0, 2.0)
        );
    }

    #[test]
    fn they_are_what_sets_of_moments_are() {
        let one = Intervals::union([[4.0, 6.0], [0.0, 2.0], [1.0, 3.0], [5.0, 5.0], [8.0, 9.0]]);
        assert_eq!(one, Intervals(vec![[0.0, 3.0], [4.0, 6.0], [8.0, 9.0]]));
        let other = Intervals::union([[2.0, 5.0], [5.5, 5.75], [9.0, 10.0]]);
        let common = one.common(&other);
        assert_eq!(common, Intervals(vec![[2.0, 3.0], [4.0, 5.0], [5.5, 5.75]]));
        assert_eq!(common, other.common(&one));
        let left = one.without(&other);
        assert_eq!(
            left,
            Intervals(vec![[0.0, 2.0], [5.0, 5.5], [5.75, 6.0], [8.0, 9.0]])
        );
        let within: Vec<_> = one.within([2.0, 4.5]).collect();
        assert_eq!(within, [[2.0, 3.0], [4.0, 4.5]]);
        assert_eq!(left.length() + common.length(), one.length());
    }

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
