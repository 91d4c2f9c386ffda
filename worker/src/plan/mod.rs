//! What a run costs before it runs: memory of a rank, samples of a step, bytes on the wire and their time.
//!
//! | type | what it says |
//! |---|---|
//! | [`Footprint`] | bytes that a rank holds, by kind |
//! | [`GlobalBatch`] | samples and tokens of one optimizer step |
//! | [`AllReduce`] | bytes that a rank moves, and the least time that takes |
//!
//! Pure functions of sizes. What the start-up table announces comes from here; what a run really holds and moves is
//! measured and recorded in `metrics.jsonl`.

mod all_reduce;
mod footprint;
mod global_batch;

pub use all_reduce::AllReduce;
pub use footprint::Footprint;
pub use global_batch::GlobalBatch;
