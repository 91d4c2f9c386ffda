//! Times at which something was so, as intervals.

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
    pub(super) fn common(&self, other: &Self) -> Self {
        let (mut common, mut rest) = (Vec::new(), &other.0[..]);
        for &[start, end] in &self.0 {
            rest = behind(rest, start);
            let inside = rest.iter().take_while(|part| part[0] < end);
            common.extend(inside.map(|part| [part[0].max(start), part[1].min(end)]));
        }
        Self(common)
    }

    /// When this is and the other is not.
    pub(super) fn without(&self, other: &Self) -> Self {
        let (mut left, mut rest) = (Vec::new(), &other.0[..]);
        for &[start, end] in &self.0 {
            rest = behind(rest, start);
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

/// Without those that are over at `start`, as they are for whatever begins later.
fn behind(mut rest: &[[f64; 2]], start: f64) -> &[[f64; 2]] {
    while rest.first().is_some_and(|first| first[1] <= start) {
        rest = &rest[1..];
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
