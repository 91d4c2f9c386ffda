//! Tokens: from a file to the samples of a rank.
//!
//! | file | what it holds |
//! |---|---|
//! | `vocabulary.rs` | [`Vocabulary`]: how many tokens a tokenizer has, and by what it is told from others |
//! | `matching.rs` | [`matching()`]: the files that a path with a `*` names |
//! | `mapped_file.rs` | a file, mapped into memory |
//! | `token_format/` | kinds of token files, known by their first bytes |
//! | `token_file.rs` | [`TokenFile`]: a text, or a file of tokens |
//! | `token_stream.rs` | several of them, one behind the other |
//! | `dataset.rs` | [`Dataset`]: the training and the validation [`Tokens`] of a configuration |
//! | `error.rs`, `file_problem.rs` | what can be wrong with them |
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
mod file_problem;
mod loader;
mod mapped_file;
mod matching;
mod permutation;
mod sampler;
#[cfg(test)]
mod tests;
mod token_file;
pub(crate) mod token_format;
mod token_stream;
mod vocabulary;

pub use dataset::{Dataset, HELD_OUT_PART, Tokens};
pub use entropy::Entropies;
pub use error::DataError;
pub use file_problem::FileProblem;
pub use loader::{IGNORED, Loader, Shape, StepSamples, eval_blocks};
pub use matching::{MAX_FILES, matching};
pub use sampler::{ORDER_VERSION, Sampler};
pub use token_file::TokenFile;
pub use token_format::{TokenFacts, Width};
pub use vocabulary::Vocabulary;
pub(crate) use vocabulary::read_tokenizer;
