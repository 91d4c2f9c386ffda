//! How much of the communication nobody waited for.

use std::collections::BTreeMap;

use super::intervals::Intervals;
use super::{Kind, Lane, Span};

/// Of one rank. Times in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Overlap {
    /// For which gradients or parameters were under way, on any lane, and all ranks were there.
    pub moving_us: f64,
    /// The part of it for which the computing stream stood still.
    pub exposed_us: f64,
    /// For which the computing stream stood still because a rank was late.
    pub late_us: f64,
}

impl Overlap {
    /// Of the spans of one rank within these times, from begin to end. Which ranks were late is known of merged traces only: else
    /// waiting for them is a part of what was under way.
    #[must_use]
    pub fn of(spans: &[Span], times: impl IntoIterator<Item = [f64; 2]>) -> Self {
        let within = Intervals::union(times);
        let moving = moving(spans).common(&within);
        let standing = of_kind(spans, |span| {
            span.kind == Kind::Wait && span.lane == Lane::Compute
        });
        let late = of_kind(spans, |span| {
            span.kind == Kind::Late && span.lane == Lane::Compute
        });
        Self {
            moving_us: moving.length(),
            exposed_us: moving.common(&standing).length(),
            late_us: late.common(&within).length(),
        }
    }

    /// The part that was hidden behind arithmetic, from 0 to 1. None without communication.
    #[must_use]
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

/// When gradients or parameters were under way, and no rank was missing.
pub(super) fn moving(spans: &[Span]) -> Intervals {
    let mut lanes: BTreeMap<&Lane, [Vec<[f64; 2]>; 2]> = BTreeMap::new();
    for span in spans {
        let [moves, late] = match span.kind {
            Kind::Gradients | Kind::Parameters | Kind::Late => lanes.entry(&span.lane).or_default(),
            _ => continue,
        };
        match span.kind {
            Kind::Late => late.push([span.start_us, span.end_us]),
            _ => moves.push([span.start_us, span.end_us]),
        }
    }
    let of_lanes = lanes.into_values().map(|[moves, late]| {
        let late = Intervals::union(late);
        Intervals::union(moves).without(&late)
    });
    let of_lanes: Vec<Intervals> = of_lanes.collect();
    Intervals::union(of_lanes.iter().flat_map(Intervals::iter))
}

/// When there were such spans.
pub(super) fn of_kind(spans: &[Span], wanted: impl Fn(&Span) -> bool) -> Intervals {
    let wanted = spans.iter().filter(|span| wanted(span));
    Intervals::union(wanted.map(|span| [span.start_us, span.end_us]))
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
