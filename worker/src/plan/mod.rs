//! What a run costs before it runs: memory of a rank, samples of a step, bytes on the wire and their time.
//!
//! | type | what it says |
//! |---|---|
//! | [`Setting`] | strategy, ranks, micro-batches, types: what the formulas depend on |
//! | [`Footprint`] | bytes that a rank holds, by kind |
//! | [`Traffic`] | bytes that a rank moves in a step |
//! | [`GlobalBatch`] | samples and tokens of one optimizer step |
//! | [`AllReduce`] | bytes that a rank moves for one buffer, and the least time that takes |
//! | [`Exchange`], [`Among`] | what a step sends, by the group of ranks that it goes through |
//! | [`Cluster`] | nodes, ranks and wires, and the least time of exchanges |
//! | [`Work`] | arithmetic of a token |
//! | [`StepBound`] | the least time of a step |
//! | [`Accelerator`] | GPUs by their data sheets |
//!
//! Pure functions of sizes. Padding and buffers come on top, and follow from the layout: [`crate::train::Estimate`]
//! adds them up for a configuration, and [`crate::train::Comparison`] compares the strategies. What a run really holds
//! and moves is measured, and recorded in `metrics.jsonl`.

mod cost;
mod hardware;

pub use cost::{Among, Exchange, Footprint, GlobalBatch, Setting, Traffic, Work};
pub use hardware::{Accelerator, AllReduce, Cluster, StepBound};
