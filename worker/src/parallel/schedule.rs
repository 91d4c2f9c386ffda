//! Schedules: what a rank does in a step, as data.
//!
//! A step executes a list of actions. A chunk is a range of the model's blocks that a rank holds; without a pipeline
//! there is one, with all of them.

/// One thing that a rank does in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Forward of a micro-batch over a chunk.
    Forward {
        /// Chunk of this rank, from 0.
        chunk: usize,
        /// Micro-batch of the step, from 0.
        micro_batch: u64,
    },
    /// Backward of a micro-batch over a chunk, whose forward was before.
    Backward {
        /// Chunk of this rank, from 0.
        chunk: usize,
        /// Micro-batch of the step, from 0.
        micro_batch: u64,
    },
}

/// One micro-batch after the other: `0F0 0B0 0F1 0B1 …` in the notation of PyTorch's pipelining. At most one is in
/// flight.
#[must_use]
pub fn sequential(micro_batches: u64) -> Vec<Action> {
    let both = |micro_batch| {
        [
            Action::Forward {
                chunk: 0,
                micro_batch,
            },
            Action::Backward {
                chunk: 0,
                micro_batch,
            },
        ]
    };
    (0..micro_batches).flat_map(both).collect()
}
