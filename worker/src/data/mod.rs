//! Tokens: from a file to the samples of a rank.
//!
//! | file | what it holds |
//! |---|---|
//! | `vocabulary.rs` | [`Vocabulary::of`]: how many tokens a tokenizer has, and what identifies it |
//! | `data_file.rs` | a file that is read as its bytes are asked for; [`DataError`]: what can be wrong with the data |
//! | `token_file.rs` | a text, or a file of tokens of a kind that its first bytes identify |
//! | `dataset.rs` | [`Dataset`]: the training and the validation [`Tokens`] of a configuration, in files that [`matching()`] finds; [`load_located`]: a configuration with them |
//! | `loader.rs` | [`Sampler`]: which block is sample `n` of the run; [`Loader`]: the samples of one rank; [`eval_blocks`]: its share of the validation, and [`fill_batch`] |
//!
//! The samples of a run are one global stream: sample `n` is the same at any number of ranks, so that a
//! run goes on at the same place from the number of consumed samples alone.

mod data_file;
mod dataset;
mod loader;
#[cfg(test)]
mod tests;
pub(crate) mod token_file;
mod vocabulary;

pub use data_file::DataError;
pub(crate) use data_file::open_regular;
pub use dataset::{Dataset, HELD_OUT_PART, MAX_FILES, Tokens, load_located, matching, read_vocabulary};
pub use loader::{BatchShape, IGNORED, Loader, ORDER_VERSION, Sampler, eval_blocks, fill_batch};
pub use token_file::TokenFacts;
pub(crate) use vocabulary::read_tokenizer;

pub use crate::config::Vocabulary;
