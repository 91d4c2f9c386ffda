//! From text to token files, which is what `ddp-train tokenize` does, and from tokens back to text.
//!
//! | file | what it holds |
//! |---|---|
//! | `run.rs` | [`tokenize`]: texts in, one token file out, which appears when it is whole |
//! | `source.rs` | texts and lines of JSON, read piece by piece, and cut where that changes no token |
//! | `encoder.rs` | [`Encoder`]: a tokenizer, and the token that separates documents |
//! | `decoder.rs` | [`Decoder`]: text of tokens while they come, by whole characters |
//!
//! Memory is bounded whatever the size of the texts: pieces are read up to a batch, encoded by all threads while the next
//! batch is read, and written in their order, so that the number of threads changes no byte.
//!
//! This is the only module that knows the libraries that make tokens; training knows sizes and hashes.

mod decoder;
mod encoder;
mod run;
mod source;
#[cfg(test)]
mod tests;

pub use decoder::Decoder;
pub use encoder::{ENDS_OF_TEXT, Encoder};
pub use run::{Progress, Report, Request, tokenize};

pub use crate::config::Tokenizer;

use std::io;
use std::path::{Path, PathBuf};

use crate::data::DataError;

/// Tokens were not made. The output is as it was before.
#[derive(Debug, thiserror::Error)]
pub enum TokenizeError {
    /// An input, the output or the tokenizer's file cannot be used.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The file system refused.
    #[error("cannot {doing} `{}`: {source}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// On which file.
        path: PathBuf,
        /// The system's words.
        source: io::Error,
    },
    /// The request or a part of an input makes no tokens: the reason, and the next step.
    #[error("{0}")]
    Refused(String),
    /// Threads could not be started.
    #[error("cannot start threads: {0}")]
    Threads(String),
}

impl TokenizeError {
    /// `source` came of `doing` something to `path`.
    fn io(doing: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io {
            doing,
            path: path.to_owned(),
            source,
        }
    }

    /// A part of an input makes no tokens. `line` counts from 1: the line of the problem, or of the beginning of a
    /// piece that cannot be encoded.
    fn input(path: &Path, line: u64, problem: &str) -> Self {
        Self::Refused(format!("`{}`, line {line}: {problem}", path.display()))
    }
}
