//! What a run costs before it runs: memory of a rank, samples of a step, bytes on the wire and their time.
//!
//! | type | what it says |
//! |---|---|
//! | [`Setting`] | strategy, ranks, micro-batches, types: what the formulas depend on |
//! | [`Footprint`] | bytes that a rank holds, by kind |
//! | [`Traffic`] | bytes that a rank moves in a step |
//! | [`GlobalBatch`] | samples and tokens of one optimizer step |
//! | [`AllReduce`] | bytes that a rank moves for one buffer, and the least time that takes |
//!
//! Pure functions of sizes. Padding and buffers come on top, and follow from the layout: [`crate::train::Outlook`]
//! adds them up for a configuration. What a run really holds and moves is measured and recorded in `metrics.jsonl`.

mod all_reduce;
mod footprint;
mod global_batch;
mod setting;
mod traffic;

pub use all_reduce::AllReduce;
pub use footprint::Footprint;
pub use global_batch::GlobalBatch;
pub use setting::Setting;
pub use traffic::Traffic;
