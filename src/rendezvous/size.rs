//! The size of a generation: which of the nodes that are there make a number of ranks that the workers can go on with.
//!
//! The daemon knows nothing of what the workers do. They say a number that the ranks of a generation have to divide;
//! where nodes have different numbers of workers, it takes a search to find out which of them together make one.

/// Steps of one search. Nodes of one kind need one for each number of ranks; where kinds are mixed so wildly that this
/// is not enough, the answer is that there is none.
const MAX_STEPS: u32 = 1 << 16;
/// Different numbers of workers a node in one job that are told apart.
const MAX_KINDS: usize = 64;

/// What limits the size of a generation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Fewest nodes.
    pub(super) min: usize,
    /// Most nodes.
    pub(super) max: usize,
    /// The number of ranks has to divide this one; none: any will do.
    pub(super) ranks_divide: Option<u64>,
}

impl Limits {
    /// Which nodes to take, as indices into `workers`, which has the workers of each node in order of preference: those
    /// that make the largest number of ranks that is allowed, the most preferred of each kind. None if there is no such
    /// number, or any would do.
    pub(super) fn pick(&self, workers: &[u32]) -> Option<Vec<usize>> {
        let multiple = self.ranks_divide?;
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
        let most: u64 = workers.iter().copied().map(u64::from).sum();
        let mut search = Search {
            limits: *self,
            kinds: &kinds,
            steps: MAX_STEPS,
            taken: Vec::new(),
        };
        (1..=most.min(multiple))
            .rev()
            .filter(|ranks| multiple.is_multiple_of(*ranks))
            .find_map(|ranks| search.make(ranks))
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

    fn pick(range: (usize, usize), ranks_divide: u64, workers: &[u32]) -> Option<Vec<usize>> {
        let limits = Limits {
            min: range.0,
            max: range.1,
            ranks_divide: Some(ranks_divide),
        };
        limits.pick(workers)
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
            ranks_divide in 1_u64..40,
            (min, max) in (1_usize..5, 0_usize..5).prop_map(|(min, more)| (min, min + more)),
        ) {
            let size = |nodes: &[usize]| nodes.iter().map(|i| u64::from(workers[*i])).sum::<u64>();
            let sets = (1_u32..1 << workers.len())
                .map(|set| (0..workers.len()).filter(|i| (set >> i) & 1 == 1).collect::<Vec<_>>());
            let best = sets
                .filter(|nodes| (min..=max).contains(&nodes.len()))
                .map(|nodes| size(&nodes))
                .filter(|ranks| ranks_divide.is_multiple_of(*ranks))
                .max();
            let found = pick((min, max), ranks_divide, &workers);
            prop_assert_eq!(found.as_deref().map(size), best);
            if let Some(nodes) = found {
                prop_assert!((min..=max).contains(&nodes.len()));
            }
        }
    }
}
