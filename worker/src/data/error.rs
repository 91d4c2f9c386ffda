//! What can be wrong with a token file.

use std::path::PathBuf;

/// A token file cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DataError {
    /// The file cannot be opened or mapped.
    #[error("cannot {doing} `{}`: {cause}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's words.
        cause: String,
    },
    /// A folder or a device, where a file is needed.
    #[error("`{}` is not a regular file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// There are too few tokens for a single sample.
    #[error(
        "`{}` has {tokens} tokens of {part}, a sample needs {needed}\n  hint: use a longer text or a smaller `model.block_size`",
        path.display()
    )]
    TooShort {
        /// The file.
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
