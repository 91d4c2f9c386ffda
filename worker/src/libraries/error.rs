//! Why a library cannot be used.

use std::path::PathBuf;

use super::Kind;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// No file of that name in any of the folders.
    #[error(
        "`{}` is not found, which is needed for {}; looked in {}\n  hint: {}",
        kind.stem(), kind.purpose(), list(searched), kind.hint()
    )]
    NotFound {
        /// What was looked for.
        kind: Kind,
        /// Folders that exist, in the order in which they were searched.
        searched: Vec<PathBuf>,
    },
    /// The dynamic loader refused the file.
    #[error("`{}` cannot be loaded: {cause}\n  hint: {}", path.display(), kind.hint())]
    NotLoaded {
        /// What it should be.
        kind: Kind,
        /// The file.
        path: PathBuf,
        /// The loader's words.
        cause: String,
    },
    /// The file lacks a function.
    #[error(
        "`{}` has no function `{symbol}`: it is too old, or another library of that name\n  hint: {}",
        path.display(), kind.hint()
    )]
    NoSymbol {
        /// What it should be.
        kind: Kind,
        /// The file.
        path: PathBuf,
        /// The function.
        symbol: &'static str,
    },
    /// The library works, but not with what is asked of it.
    #[error("`{}` {problem}\n  hint: {}", path.display(), kind.hint())]
    Unusable {
        /// What it is.
        kind: Kind,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
}

impl LibraryError {
    /// True if there is no such file: nothing is broken.
    #[must_use]
    pub const fn is_absence(&self) -> bool {
        matches!(self, Self::NotFound { .. })
    }
}

fn list(folders: &[PathBuf]) -> String {
    if folders.is_empty() {
        return "no folder at all".to_owned();
    }
    let names: Vec<_> = folders.iter().map(|f| format!("`{}`", f.display())).collect();
    names.join(", ")
}
