//! What can go wrong between a text and its tokens.

use std::io;
use std::path::{Path, PathBuf};

use crate::data::DataError;

/// Tokens were not made. The output is as it was before.
#[derive(Debug, thiserror::Error)]
pub enum TokenizeError {
    /// An input or the tokenizer's file cannot be used.
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
    /// The output cannot be written in its place.
    #[error("`{}` {problem}", path.display())]
    Output {
        /// The output, or what is in its place.
        path: PathBuf,
        /// What is wrong with it, and the next step.
        problem: &'static str,
    },
    /// A part of an input makes no tokens.
    #[error("`{}`, line {line}: {problem}", path.display())]
    Input {
        /// The input.
        path: PathBuf,
        /// Counted from 1: of what is wrong, or of the beginning of a piece that cannot be encoded.
        line: u64,
        /// What is wrong, and the next step.
        problem: String,
    },
    /// Nothing can come of what was asked for; the reason, and the next step.
    #[error("{0}")]
    Refused(String),
    /// Threads could not be started.
    #[error("cannot start threads: {0}")]
    Threads(String),
}

impl TokenizeError {
    /// `source` came of `doing` something to `path`.
    pub(super) fn io(doing: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io {
            doing,
            path: path.to_owned(),
            source,
        }
    }
}
