//! Generators: from the sizes of a pipeline to the schedule of a step.
//!
//! Each is a function of ranks, chunks and micro-batches, and makes F, B, I and W only; [passes](super::passes) add the
//! rest. The files group them by where the stages lie: [`looped`] or [`v_shaped`].

mod greedy;
mod looped;
mod row_writer;
mod shape;
mod v_shaped;

pub use greedy::greedy;
pub use looped::{gpipe, interleaved_1f1b, one_f_one_b, zb_h1};
pub use shape::{PipelineShape, ShapeError};
pub use v_shaped::zbv;

#[cfg(test)]
#[path = "generators_tests.rs"]
mod tests;
