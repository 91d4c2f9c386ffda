//! The size of a generation: which of the nodes that are there make a number of ranks that the workers can go on with.
//!
//! The daemon knows nothing of what the workers do. They say a number that the ranks of a generation have to divide,
//! and one that they have to be a multiple of; where nodes have different numbers of workers, it takes a search to find
//! out which of them together make one.

use std::fmt;

use ddp_proto::rendezvous::Heartbeat;

/// Steps of one search. Nodes of one kind need one for each number of ranks; where kinds are mixed so wildly that this
/// is not enough, the answer is that there is none.
const MAX_STEPS: u32 = 1 << 16;
/// Different numbers of workers a node in one job that the search can handle.
const MAX_KINDS: usize = 64;

/// The numbers of ranks that the workers can go on with, as they say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RankLimits {
    /// The number has to divide this one.
    pub(super) divide: Option<u64>,
    /// It has to be a multiple of this one.
    pub(super) multiple_of: Option<u64>,
}

impl RankLimits {
    /// What a heartbeat says of them; none if nothing.
    pub(super) fn of(heartbeat: &Heartbeat) -> Option<Self> {
        let said = Self {
            divide: heartbeat.ranks_divide,
            multiple_of: heartbeat.ranks_multiple_of,
        };
        (said != Self::default()).then_some(said)
    }

    /// True if any number will do.
    pub(super) fn is_open(self) -> bool {
        self == Self::default()
    }

    /// The allowed numbers up to `most`, the largest first.
    fn up_to(self, most: u64) -> impl Iterator<Item = u64> {
        let most = self.divide.map_or(most, |divide| most.min(divide));
        let unit = self.multiple_of.unwrap_or(1).max(1);
        let multiples = (1..=most / unit).rev().map(move |count| count * unit);
        multiples.filter(move |ranks| self.divide.is_none_or(|divide| divide.is_multiple_of(*ranks)))
    }
}

impl fmt::Display for RankLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.divide, self.multiple_of) {
            (None, None) => f.write_str("any number of ranks"),
            (Some(divide), None) => write!(f, "a number of ranks that divides {divide}"),
            (None, Some(unit)) => write!(f, "a multiple of {unit} ranks"),
            (Some(divide), Some(unit)) => {
                write!(f, "a multiple of {unit} ranks that divides {divide}")
            }
        }
    }
}

/// What limits the size of a generation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Fewest nodes.
    pub(super) min: usize,
    /// Most nodes.
    pub(super) max: usize,
    /// Numbers of ranks.
    pub(super) ranks: RankLimits,
}

impl Limits {
    /// Which nodes to take, as indices into `workers`, which has the workers of each node in order of preference: those
    /// that make the largest number of ranks that is allowed, the most preferred of each kind. None if there is no such
    /// number, or any would do.
    pub(super) fn pick(&self, workers: &[u32]) -> Option<Vec<usize>> {
        if self.ranks.is_open() {
            return None;
        }
        let mut kinds: Vec<Kind> = Vec::new();
        for (node, of_node) in workers.iter().enumerate() {
            let of_node = u64::from(*of_node);
            match kinds.iter_mut().find(|kind| kind.workers == of_node) {
                Some(kind) => kind.nodes.push(node),
                None => kinds.push(Kind {
                    workers: of_node,
                    nodes: vec![node],
                }),
            }
        }
        if kinds.len() > MAX_KINDS {
            return None;
        }
        let mut largest = workers.to_vec();
        largest.sort_unstable_by_key(|of_node| std::cmp::Reverse(*of_node));
        let most: u64 = largest.iter().take(self.max).copied().map(u64::from).sum();
        let mut search = Search {
            limits: *self,
            kinds: &kinds,
            steps: MAX_STEPS,
            taken: Vec::new(),
        };
        for ranks in self.ranks.up_to(most) {
            let found = search.make(ranks);
            if found.is_some() || search.steps == 0 {
                return found;
            }
        }
        None
    }
}

/// The nodes with so many workers each.
struct Kind {
    workers: u64,
    nodes: Vec<usize>,
}

struct Search<'a> {
    limits: Limits,
    kinds: &'a [Kind],
    steps: u32,
    /// How many nodes of each kind so far.
    taken: Vec<usize>,
}

impl Search<'_> {
    /// The nodes that make exactly so many ranks.
    fn make(&mut self, ranks: u64) -> Option<Vec<usize>> {
        self.taken.clear();
        self.fill(ranks, 0).then(|| {
            let kinds = self.kinds.iter().zip(&self.taken);
            kinds
                .flat_map(|(kind, count)| &kind.nodes[..*count])
                .copied()
                .collect()
        })
    }

    /// Takes nodes of the kinds that are left for so many ranks; `nodes` are taken already.
    fn fill(&mut self, ranks: u64, nodes: usize) -> bool {
        if ranks == 0 {
            return nodes >= self.limits.min;
        }
        let Some(kind) = self.kinds.get(self.taken.len()) else {
            return false;
        };
        if self.steps == 0 {
            return false;
        }
        self.steps -= 1;
        let fit = (ranks / kind.workers).min((self.limits.max - nodes) as u64) as usize;
        let most = fit.min(kind.nodes.len());
        for count in (0..=most).rev() {
            self.taken.push(count);
            if self.fill(ranks - count as u64 * kind.workers, nodes + count) {
                return true;
            }
            self.taken.pop();
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pick_with(range: (usize, usize), ranks: RankLimits, workers: &[u32]) -> Option<Vec<usize>> {
        let limits = Limits {
            min: range.0,
            max: range.1,
            ranks,
        };
        limits.pick(workers)
    }

    fn pick(range: (usize, usize), divide: u64, workers: &[u32]) -> Option<Vec<usize>> {
        let ranks = RankLimits {
            divide: Some(divide),
            multiple_of: None,
        };
        pick_with(range, ranks, workers)
    }

    #[test]
    fn groups_of_ranks_stay_whole() {
        let of = |multiple_of, divide| RankLimits {
            divide,
            multiple_of: Some(multiple_of),
        };
        assert_eq!(pick_with((1, 4), of(4, None), &[2, 2, 2]), Some(vec![0, 1]));
        assert_eq!(pick_with((1, 4), of(4, None), &[3, 1, 2]), Some(vec![0, 1]));
        assert_eq!(
            pick_with((1, 4), of(4, Some(24)), &[4, 4, 4, 4]),
            Some(vec![0, 1, 2])
        );
        assert_eq!(pick_with((1, 4), of(8, None), &[2, 2, 2]), None);
        assert_eq!(
            of(4, Some(24)).to_string(),
            "a multiple of 4 ranks that divides 24"
        );
    }

    #[test]
    fn the_most_nodes_that_can_go_on_are_taken_in_order() {
        assert_eq!(pick((1, 4), 12, &[2, 2, 2, 2]), Some(vec![0, 1, 2]));
        assert_eq!(pick((1, 4), 8, &[2, 2, 2]), Some(vec![0, 1]));
        assert_eq!(pick((1, 2), 12, &[2, 2, 2]), Some(vec![0, 1]), "no more than MAX");
        assert_eq!(pick((3, 3), 8, &[2, 2, 2]), None, "no fewer than MIN");
        assert_eq!(pick((1, 4), 3, &[2, 2, 2]), None);
    }

    #[test]
    fn nodes_of_different_kinds_are_combined() {
        assert_eq!(pick((1, 3), 4, &[1, 2, 2]), Some(vec![1, 2]));
        assert_eq!(pick((1, 3), 6, &[4, 1, 2]), Some(vec![0, 2]));
    }

    #[test]
    fn a_job_of_too_many_kinds_takes_no_more_than_its_steps() {
        let wild: Vec<u32> = (0..60).map(|i| 1000 + 2 * i).collect();
        assert_eq!(pick((1, 60), 59 * 61 * 999_983, &wild), None);
        let kinds: Vec<u32> = (1..=65).collect();
        assert_eq!(pick((1, 65), 2, &kinds), None);
    }

    proptest! {
        #[test]
        fn no_larger_size_is_overlooked(
            workers in prop::collection::vec(1_u32..6, 1..8),
            divide in prop::option::of(1_u64..40),
            multiple_of in 1_u64..5,
            (min, max) in (1_usize..5, 0_usize..5).prop_map(|(min, more)| (min, min + more)),
        ) {
            let size = |nodes: &[usize]| nodes.iter().map(|i| u64::from(workers[*i])).sum::<u64>();
            let sets = (1_u32..1 << workers.len())
                .map(|set| (0..workers.len()).filter(|i| (set >> i) & 1 == 1).collect::<Vec<_>>());
            let best = sets
                .filter(|nodes| (min..=max).contains(&nodes.len()))
                .map(|nodes| size(&nodes))
                .filter(|ranks| ranks.is_multiple_of(multiple_of))
                .filter(|ranks| divide.is_none_or(|divide| divide.is_multiple_of(*ranks)))
                .max();
            let ranks = RankLimits { divide, multiple_of: Some(multiple_of) };
            let found = pick_with((min, max), ranks, &workers);
            prop_assert_eq!(found.as_deref().map(size), best);
            if let Some(nodes) = found {
                prop_assert!((min..=max).contains(&nodes.len()));
            }
        }
    }
}
