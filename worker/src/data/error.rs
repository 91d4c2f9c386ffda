//! What can be wrong with the data.

use std::path::{Path, PathBuf};

use super::FileProblem;

/// The data cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DataError {
    /// One of the files, or the tokenizer's.
    #[error("`{}` {problem}{}", path.display(), problem.hint_line())]
    File {
        /// The file, or what was to name some.
        path: PathBuf,
        /// What is wrong with it.
        problem: FileProblem,
    },
    /// There are too few tokens for a single sample.
    #[error(
        "`{}` has {tokens} tokens of {part}, a sample needs {needed}\n  hint: use a longer text or a smaller `model.block_size`",
        path.display()
    )]
    TooShort {
        /// The file, or the first of several.
        path: PathBuf,
        /// Tokens of this part of it.
        tokens: u64,
        /// What the part is for: `training` or `validation`.
        part: &'static str,
        /// One more than the block size.
        needed: u64,
    },
    /// Somebody changed the file while it was read.
    #[error(
        "`{}` shrank from {was} to {is} bytes while it was in use\n  hint: write a new file and rename it over the old one instead of truncating it",
        path.display()
    )]
    Shrank {
        /// The file.
        path: PathBuf,
        /// Bytes when it was opened.
        was: u64,
        /// Bytes now.
        is: u64,
    },
    /// A bug of the caller.
    #[error("`{}`: {what}", path.display())]
    Misuse {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        what: String,
    },
}

impl DataError {
    /// Something is wrong with the file at `path`.
    pub(crate) fn file(path: &Path, problem: FileProblem) -> Self {
        Self::File {
            path: path.to_owned(),
            problem,
        }
    }
}
