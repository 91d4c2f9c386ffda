//! From text to token files: what `ddp-train tokenize` does.
//!
//! | file | what it holds |
//! |---|---|
//! | `run.rs` | [`tokenize`]: texts in, one token file out, which appears when it is whole |
//! | `source.rs` | texts and lines of JSON, read piece by piece, and cut where that changes no token |
//! | `encoder.rs` | a tokenizer, and the token that separates documents |
//! | `error.rs` | what can go wrong |
//!
//! Memory is bounded whatever the size of the texts: pieces are read up to a batch, encoded by all threads while the next
//! batch is read, and written in their order, so that the number of threads changes no byte.
//!
//! This is the only module that knows the libraries that make tokens; training knows sizes and hashes.

mod encoder;
mod error;
mod run;
mod source;
#[cfg(test)]
mod tests;

pub use encoder::END_OF_TEXT;
pub use error::TokenizeError;
pub use run::{Progress, Report, Request, tokenize};

pub use crate::config::Tokenizer;
