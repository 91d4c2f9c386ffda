//! Tokens: from a file to the samples of a rank.
//!
//! | file | what it holds |
//! |---|---|
//! | `token_file.rs` | [`TokenFile`]: a file of byte tokens, mapped into memory |
//! | `dataset.rs` | [`Dataset`]: the training and the validation [`Tokens`] of a configuration |
//! | `sampler.rs` | [`Sampler`]: which block is sample `n` of the run |
//! | `permutation.rs` | a permutation without a table |
//! | `loader.rs` | [`Loader`]: the samples of one rank; [`eval_blocks`]: its share of the validation |
//! | `entropy.rs` | [`Entropies`]: what a model without context can reach |
//!
//! The samples of a run are one global stream: sample `n` is the same at any number of ranks, so that a
//! run goes on at the same place from the number of consumed samples alone.

mod dataset;
mod entropy;
mod error;
mod loader;
mod permutation;
mod sampler;
mod token_file;

pub use dataset::{Dataset, HELD_OUT_PART, Tokens};
pub use entropy::Entropies;
pub use error::DataError;
pub use loader::{IGNORED, Loader, Shape, StepSamples, eval_blocks};
pub use sampler::{ORDER_VERSION, Sampler};
pub use token_file::TokenFile;
