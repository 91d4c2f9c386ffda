//! A trained model at work: text that goes on from a prompt, and the loss of any text.
//!
//! | file | what it holds |
//! |---|---|
//! | `loaded.rs` | [`LoadedModel`]: the parameters of a checkpoint in the memory of one device |
//! | `run_settings.rs` | [`RunSettings`]: what a checkpoint says of its run: tokenizer, data, precision |
//! | `generate.rs` | [`complete`]: token after token, with a key-value cache |
//! | `sampling.rs` | [`Sampling`]: from logits to a token: temperature, top-k, top-p |
//! | `evaluate.rs` | [`Evaluated`]: the mean loss of a text |

mod evaluate;
mod generate;
mod loaded;
mod run_settings;
mod sampling;

pub use evaluate::Evaluated;
pub use generate::{Completion, CompletionOptions, Generator, complete};
pub use loaded::{InferenceError, LoadedModel, open_device};
pub use run_settings::{RunSettings, open_tokens};
pub use sampling::{Sampling, Weighed};

pub use crate::checkpoint::{CheckpointError, Reader};
pub use crate::config::{Paths, Precision, Tokenizer};
pub use crate::data::{DataError, Tokens, Vocabulary};
pub use crate::tokenize::Encoder;
