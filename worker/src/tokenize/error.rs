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
    /// The output is there.
    #[error("`{}` exists already\n  hint: `--overwrite` replaces it, or choose another name with `-o`", path.display())]
    Exists {
        /// The output.
        path: PathBuf,
    },
    /// A folder, a device, a pipe or a link is in the output's place.
    #[error("`{}` is not a regular file, and is not replaced\n  hint: choose another name with `-o`; of a symbolic link, the name of the file that it leads to", path.display())]
    NotAFile {
        /// What is no file.
        path: PathBuf,
    },
    /// Another process writes the same output.
    #[error("`{}` is being written by another `ddp-train tokenize`\n  hint: wait for it, or choose another name with `-o`", path.display())]
    Busy {
        /// The output.
        path: PathBuf,
    },
    /// The output would take the place of a text.
    #[error("`{}` is an input, and cannot be the output too\n  hint: choose another name with `-o`", path.display())]
    IsInput {
        /// Both.
        path: PathBuf,
    },
    /// Bytes make no tokens: they are.
    #[error(
        "`--tokenizer bytes` needs no token file: texts are trained on as they are\n  hint: name the text in `data.train`, with `data.tokenizer: bytes`"
    )]
    Bytes,
    /// A text that is no text.
    #[error("`{}`, line {line}: not UTF-8\n  hint: `iconv` converts other texts; a packed file must be unpacked first", path.display())]
    NotUtf8 {
        /// The input.
        path: PathBuf,
        /// Counted from 1.
        line: u64,
    },
    /// A line of JSON that is none, or not one with a text.
    #[error("`{}`, line {line}: {what}", path.display())]
    Record {
        /// The input.
        path: PathBuf,
        /// Counted from 1.
        line: u64,
        /// What is wrong, and the next step.
        what: String,
    },
    /// So much text without a place to cut it.
    #[error("`{}`, line {line}: {limit} bytes without a place to cut them\n  hint: {hint}", path.display())]
    TooLong {
        /// The input.
        path: PathBuf,
        /// Where it begins, counted from 1.
        line: u64,
        /// The most that is taken at once, in bytes.
        limit: usize,
        /// The next step.
        hint: &'static str,
    },
    /// The tokenizer refused a text.
    #[error("`{}`, line {line}: the tokenizer cannot encode it: {cause}", path.display())]
    Encode {
        /// The input.
        path: PathBuf,
        /// Where the piece begins, counted from 1.
        line: u64,
        /// The library's words.
        cause: String,
    },
    /// The vocabulary has no such token.
    #[error(
        "`--end-of-text {token}`: `{tokenizer}` has no such token\n  hint: it is among `added_tokens` of most tokenizers; `{tokenizer}` is searched for the very word"
    )]
    NoEndOfText {
        /// What was asked for.
        token: String,
        /// Name of the tokenizer.
        tokenizer: String,
    },
    /// There was nothing to encode.
    #[error("the inputs hold no text: no token was made")]
    NoTokens,
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
