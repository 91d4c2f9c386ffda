//! What can be wrong with the data.

use std::io;
use std::path::{Path, PathBuf};

/// The data cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DataError {
    /// Something is wrong with one of the files, or with the tokenizer's.
    #[error("`{}` {problem}{}", path.display(), hint.as_ref().map_or_else(String::new, |hint| format!("\n  hint: {hint}")))]
    File {
        /// The file, or what was to name some.
        path: PathBuf,
        /// Shown behind its name: "`data.bin` is empty".
        problem: String,
        /// The next step, where there is an obvious one.
        hint: Option<String>,
    },
    /// A file cannot be opened, mapped or listed.
    #[error("`{}` cannot be read: {cause}", path.display())]
    Unreadable {
        /// The file or folder.
        path: PathBuf,
        /// The system's words.
        cause: String,
    },
}

impl DataError {
    pub(super) fn file(path: &Path, problem: impl Into<String>, hint: Option<&str>) -> Self {
        Self::File {
            path: path.to_owned(),
            problem: problem.into(),
            hint: hint.map(ToOwned::to_owned),
        }
    }

    pub(crate) fn unreadable(path: &Path, error: &io::Error) -> Self {
        Self::Unreadable {
            path: path.to_owned(),
            cause: error.to_string(),
        }
    }

    /// The file is not what a tokenizer's file has to be.
    pub(crate) fn no_tokenizer(path: &Path, cause: impl std::fmt::Display) -> Self {
        let hint = "`data.tokenizer` takes a `tokenizer.json` of Hugging Face's tokenizers";
        Self::file(path, format!("is not a tokenizer's file: {cause}"), Some(hint))
    }
}
