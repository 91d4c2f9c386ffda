//! Stages of a pipeline: which rank holds which stage, and which layers a stage consists of.

use std::ops::Range;

/// Which rank holds which stage. Ranks are those along the pipeline's axis of the mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    rank_of_stage: Vec<usize>,
    stages_of_rank: Vec<Vec<usize>>,
}

impl Placement {
    /// Stage `s` on rank `s mod ranks`, as interleaved schedules have it.
    pub fn looped(ranks: usize, chunks: usize) -> Self {
        Self::new(ranks, (0..ranks * chunks).map(|stage| stage % ranks).collect())
    }

    /// Stages in a V: with two chunks, rank 0 holds the first and the last stage.
    pub fn v_shaped(ranks: usize, chunks: usize) -> Self {
        let rank_of = |stage: usize| {
            let way = stage % ranks;
            if (stage / ranks).is_multiple_of(2) {
                way
            } else {
                ranks - 1 - way
            }
        };
        Self::new(ranks, (0..ranks * chunks).map(rank_of).collect())
    }

    /// Any placement, by the ranks of the stages.
    pub fn new(ranks: usize, rank_of_stage: Vec<usize>) -> Self {
        let mut stages_of_rank = vec![Vec::new(); ranks];
        for (stage, &rank) in rank_of_stage.iter().enumerate() {
            assert!(rank < ranks, "ranks of the pipeline");
            stages_of_rank[rank].push(stage);
        }
        Self {
            rank_of_stage,
            stages_of_rank,
        }
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.stages_of_rank.len()
    }

    /// Number of stages.
    pub fn stages(&self) -> usize {
        self.rank_of_stage.len()
    }

    /// The rank that holds a stage.
    pub fn rank_of(&self, stage: usize) -> usize {
        self.rank_of_stage[stage]
    }

    /// The stages of a rank, in order. The rank calls them its chunks.
    pub fn stages_of(&self, rank: usize) -> impl DoubleEndedIterator<Item = usize> + '_ {
        self.stages_of_rank[rank].iter().copied()
    }
}

/// What the layers of a model cost, in any unit: operations, measured time, bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerCosts {
    /// What comes before the layers, on the first stage.
    pub embedding: u64,
    /// The cost of each layer, in order.
    pub layers: Vec<u64>,
    /// What comes after the layers, on the last stage.
    pub head: u64,
}

impl LayerCosts {
    /// Layers that cost 1, with an embedding and a head that cost nothing.
    pub fn equal(layers: usize) -> Self {
        Self {
            embedding: 0,
            layers: vec![1; layers],
            head: 0,
        }
    }
}

/// The model has fewer layers than the pipeline has stages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{layers} layers cannot be divided on {stages} stages: each stage needs a layer")]
pub struct TooFewLayers {
    /// Layers of the model.
    pub layers: usize,
    /// Stages of the pipeline.
    pub stages: usize,
}

/// Divides the layers on stages: consecutive ranges that hold every layer exactly once, and at least one each.
///
/// The dearest stage costs as little as possible. Of the divisions for which that is so, the sum of the squares of the
/// costs is least; of several such ones, the first stages have more layers.
pub fn divide_layers(costs: &LayerCosts, stages: usize) -> Result<Vec<Range<usize>>, TooFewLayers> {
    let layers = costs.layers.len();
    if stages == 0 || layers < stages {
        return Err(TooFewLayers { layers, stages });
    }
    let mut before = vec![0_u128];
    before.extend(costs.layers.iter().scan(0, |sum, &cost| {
        *sum += u128::from(cost);
        Some(*sum)
    }));
    let cost = |stage: usize, range: &Range<usize>| {
        let embedding = if stage == 0 { costs.embedding } else { 0 };
        let head = if stage + 1 == stages { costs.head } else { 0 };
        before[range.end] - before[range.start] + u128::from(embedding) + u128::from(head)
    };
    let sizes = Sizes { layers, stages };
    let (dearest, _) = sizes
        .least(|stage, range, later| Some(cost(stage, range).max(later)))
        .expect("there are at least as many layers as stages");
    let squares = |stage: usize, range: &Range<usize>, later: u128| {
        let cost = cost(stage, range);
        (cost <= dearest).then(|| later.saturating_add(cost.saturating_mul(cost)))
    };
    let (_, ranges) = sizes.least(squares).expect("one division has this dearest stage");
    Ok(ranges)
}

/// How many layers are divided on how many stages.
struct Sizes {
    layers: usize,
    stages: usize,
}

impl Sizes {
    /// The division of the least value, and that value. `value` gets a stage, its layers and the least value of all later
    /// stages (0 if there are none), and returns the value of all of them, which must not fall with more layers. `None`
    /// refuses the layers, and all ranges with more.
    fn least(
        &self,
        value: impl Fn(usize, &Range<usize>, u128) -> Option<u128>,
    ) -> Option<(u128, Vec<Range<usize>>)> {
        // A stage begins at one of so many layers, counted from its own number: every other one has a layer too.
        let begins = self.layers - self.stages + 1;
        // Of all later stages, by where they begin; and by stage, from the last one, where it ends.
        let mut later = vec![None; begins];
        later[begins - 1] = Some(0);
        let mut ends = Vec::new();
        for stage in (0..self.stages).rev() {
            let of_begin = |begin: usize| {
                let mut best: Option<(u128, u32)> = None;
                for next in begin..begins {
                    let range = stage + begin..stage + 1 + next;
                    let own = value(stage, &range, 0);
                    if own.is_none_or(|own| best.is_some_and(|(least, _)| own > least)) {
                        break;
                    }
                    // Of equal ones the one that ends last.
                    if let Some(all) = later[next].and_then(|later| value(stage, &range, later))
                        && best.is_none_or(|(least, _)| all <= least)
                    {
                        best = Some((all, next as u32));
                    }
                }
                best
            };
            let best: Vec<_> = (0..begins).map(of_begin).collect();
            later = best.iter().map(|best| Some((*best)?.0)).collect();
            ends.push(best.into_iter().map(|best| Some(best?.1)).collect::<Vec<_>>());
        }
        let mut begin = 0;
        let ranges = ends.iter().rev().enumerate().map(|(stage, ends)| {
            let first = stage + begin;
            begin = ends[begin]? as usize;
            Some(first..stage + 1 + begin)
        });
        Some((later[0]?, ranges.collect::<Option<_>>()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(costs: &LayerCosts, stages: usize) -> Vec<usize> {
        let ranges = divide_layers(costs, stages).expect("enough layers");
        let firsts: Vec<usize> = ranges.iter().map(|range| range.start).collect();
        let ends: Vec<usize> = ranges.iter().map(|range| range.end).collect();
        assert_eq!(firsts[0], 0);
        assert_eq!(firsts[1..], ends[..stages - 1], "every layer once");
        assert_eq!(ends[stages - 1], costs.layers.len());
        ranges.iter().map(ExactSizeIterator::len).collect()
    }

    #[test]
    fn equal_layers_are_divided_evenly() {
        let ranges = divide_layers(&LayerCosts::equal(24), 4).expect("enough layers");
        assert_eq!(ranges, [0..6, 6..12, 12..18, 18..24]);
        assert_eq!(lengths(&LayerCosts::equal(30), 4), [8, 8, 7, 7]);
        assert_eq!(lengths(&LayerCosts::equal(10), 3), [4, 3, 3]);
        assert_eq!(lengths(&LayerCosts::equal(3), 3), [1, 1, 1]);
    }

    #[test]
    fn embedding_and_head_count() {
        let costs = LayerCosts {
            embedding: 1,
            head: 3,
            ..LayerCosts::equal(20)
        };
        assert_eq!(lengths(&costs, 4), [5, 6, 6, 3]);
        let dear_head = LayerCosts {
            embedding: 0,
            head: 100,
            ..LayerCosts::equal(9)
        };
        assert_eq!(lengths(&dear_head, 3), [4, 4, 1]);
    }

    #[test]
    fn the_dearest_stage_is_as_cheap_as_it_can_be() {
        let costs = LayerCosts {
            embedding: 2,
            layers: vec![5, 1, 1, 7, 2, 2, 9, 1],
            head: 4,
        };
        for stages in 1..=8 {
            // The dearest stage, the sum of squares, and the stages' layers, the most first.
            let order = |ranges: &Vec<Range<usize>>| {
                let of = |(stage, range): (usize, &Range<usize>)| {
                    let own: u64 = costs.layers[range.clone()].iter().sum();
                    own + u64::from(stage == 0) * costs.embedding
                        + u64::from(stage + 1 == stages) * costs.head
                };
                let all: Vec<u64> = ranges.iter().enumerate().map(of).collect();
                let squares: u64 = all.iter().map(|cost| cost * cost).sum();
                let lengths = ranges.iter().map(|range| std::cmp::Reverse(range.len()));
                (all.into_iter().max(), squares, lengths.collect::<Vec<_>>())
            };
            let all = divisions(0, costs.layers.len(), stages);
            let best = all.into_iter().min_by_key(order).expect("one");
            assert_eq!(divide_layers(&costs, stages).expect("enough"), best);
        }
    }

    /// Every way to cut `first..end` into `parts` ranges that are not empty.
    fn divisions(first: usize, end: usize, parts: usize) -> Vec<Vec<Range<usize>>> {
        if parts == 1 {
            return vec![vec![Range { start: first, end }]];
        }
        let cuts = first + 1..end + 2 - parts;
        let with_rest = cuts.flat_map(|cut| {
            let rest = divisions(cut, end, parts - 1).into_iter();
            rest.map(move |rest| std::iter::once(first..cut).chain(rest).collect())
        });
        with_rest.collect()
    }

    /// More than anybody's, and less than a second.
    #[test]
    fn many_stages_take_neither_memory_nor_time() {
        let ones = lengths(&LayerCosts::equal(1 << 16), 1 << 16);
        assert!(ones.iter().all(|&length| length == 1));
        let halves = lengths(&LayerCosts::equal(1 << 12), 1 << 11);
        assert!(halves.iter().all(|&length| length == 2));
    }

    #[test]
    fn each_stage_needs_a_layer() {
        let refused = divide_layers(&LayerCosts::equal(3), 4).expect_err("too few");
        assert_eq!(
            refused.to_string(),
            "3 layers cannot be divided on 4 stages: each stage needs a layer"
        );
    }

    #[test]
    fn placements_are_loops_or_go_there_and_back() {
        let ranks = |placement: &Placement| -> Vec<usize> {
            (0..placement.stages())
                .map(|stage| placement.rank_of(stage))
                .collect()
        };
        assert_eq!(ranks(&Placement::looped(3, 2)), [0, 1, 2, 0, 1, 2]);
        assert_eq!(ranks(&Placement::v_shaped(3, 3)), [0, 1, 2, 2, 1, 0, 0, 1, 2]);
        assert_eq!(Placement::v_shaped(4, 2).stages_of(1).collect::<Vec<_>>(), [1, 6]);
    }
}
