//! The mark by which the later lives of a run know the folder that an earlier one had taken.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::RunFilesError;
use super::replace::replace_file;

/// Holds the name of the run that took the folder last.
pub(super) const CLAIM: &str = ".run-token";

/// The mark in one folder. Without it a job whose first life was killed before it had looked at the folder would
/// go on with a stranger's run.
pub(super) struct Claim {
    path: PathBuf,
}

impl Claim {
    pub(super) fn of(folder: &Path) -> Self {
        Self {
            path: folder.join(CLAIM),
        }
    }

    /// True if the run called `token` has taken the folder.
    pub(super) fn is_of(&self, token: &str) -> Result<bool, RunFilesError> {
        match fs::read_to_string(&self.path) {
            Ok(found) => Ok(found.trim_end() == token),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(RunFilesError::io("read", &self.path, &e)),
        }
    }

    /// From here on the folder belongs to the run called `token`: its later lives go on with what they find.
    pub(super) fn take(&self, token: &str) -> Result<(), RunFilesError> {
        replace_file(&self.path, format!("{token}\n").as_bytes())
    }
}
