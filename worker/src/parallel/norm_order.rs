//! In which order the ranks of a norm add up their sums of squares: that of the whole model on one rank.
//!
//! A rank squares what it owns by chunk. Each chunk is one of the layout of the whole model
//! ([`super::GradientLayout::chunks_in`]), and the sums are combined in the order of these; of a chunk that each rank of a tensor
//! group has another part of, in the order of the ranks. What several ranks hold is counted by one of them
//! ([`super::is_counted`]). Padding has no place. So the norm has the same bits for every number of stages and of shards.
//!
//! Layouts and shardings are pure functions, so that every rank knows what all others have without asking.

use super::Sharding;

/// Where the sums of all ranks of a norm are, and in which order they are combined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NormOrder {
    ranks: usize,
    each: usize,
    places: Vec<i32>,
}

impl NormOrder {
    /// The order that follows from the chunks of each rank ([`NormOrder::chunks`]), given in the order of the ranks that hold
    /// one copy of the model ([`super::one_copy`]).
    pub fn new(ranks: &[Vec<Option<usize>>]) -> Self {
        let each = ranks.iter().map(Vec::len).max().unwrap_or(0);
        let placed = ranks.iter().enumerate().flat_map(|(rank, chunks)| {
            let place = move |i: usize| (rank * each + i) as i32;
            let chunks = chunks.iter().enumerate();
            chunks.filter_map(move |(i, chunk)| Some(((*chunk)?, place(i))))
        });
        let mut placed: Vec<(usize, i32)> = placed.collect();
        placed.sort_unstable();
        Self {
            ranks: ranks.len(),
            each,
            places: placed.into_iter().map(|(_, place)| place).collect(),
        }
    }

    /// For each chunk that a `rank` owns, in the order of its memory, which one of the whole
    /// model it is, as `of_layout` says of all chunks of the layout ([`super::GradientLayout::chunks_in`]); none for padding.
    pub fn chunks(sharding: &Sharding, rank: usize, of_layout: &[Option<usize>]) -> Vec<Option<usize>> {
        let own = sharding.chunks_of(rank).into_iter();
        own.map(|chunk| of_layout[chunk?]).collect()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Sums that each rank brings: as many as the one with the most chunks has.
    pub fn each(&self) -> usize {
        self.each
    }

    /// The place of each sum among those of all ranks, in the order in which they are combined.
    pub fn places(&self) -> &[i32] {
        &self.places
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_combined_in_the_order_of_the_whole_model_then_of_ranks() {
        // Two stages, each with two tensor ranks; chunks 1 and 3 are of copies, padding is between.
        let ranks = [
            vec![Some(2), Some(3)],
            vec![Some(2), None],
            vec![Some(0), None, Some(1)],
            vec![Some(0), None, None],
        ];
        let order = NormOrder::new(&ranks);
        assert_eq!(order.each(), 3);
        assert_eq!(order.places(), [6, 9, 8, 0, 3, 1]);
    }

    #[test]
    fn of_no_rank_there_is_nothing() {
        assert_eq!(NormOrder::new(&[]).places(), [0; 0]);
    }
}
