//! What a step sends, by the group of ranks that it goes through.

/// Which ranks take part in a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Among {
    /// Those that hold one copy of the state together.
    Shards,
    /// Those that hold the same part of it, one of each copy; where nothing is sharded, all ranks.
    Copies,
}

/// A collective over all gradients or all parameters of a step: its buckets or groups together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// Bytes of the buffer that is reduced or gathered, padding included.
    pub bytes: u64,
    /// How often a step moves it: a reduce-scatter and an all-gather count 1, an all-reduce 2.
    pub times: u64,
    /// Who takes part.
    pub among: Among,
}

impl Exchange {
    /// Bytes that each of `ranks` ranks moves: `times` · (N − 1)/N · S.
    #[must_use]
    pub const fn bytes_a_rank(&self, ranks: u64) -> u64 {
        self.times * (ranks - 1) * (self.bytes / ranks)
    }
}
