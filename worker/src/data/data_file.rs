//! A file of data, read as its bytes are asked for; and what can be wrong with the data.

use std::fmt::Display;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// A file that is never loaded as a whole: the ranks of a node share the pages that the system caches.
pub(super) struct DataFile {
    path: PathBuf,
    file: File,
    len: usize,
}

impl DataFile {
    /// Opens the file at `path`.
    pub(super) fn open(path: &Path) -> Result<Self, DataError> {
        let file = open_regular(path)?;
        let metadata = file.metadata().map_err(|e| DataError::unreadable(path, &e))?;
        Ok(Self {
            path: path.to_owned(),
            len: metadata.len() as usize,
            file,
        })
    }

    /// The path that was opened.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Number of bytes when the file was opened.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Reads the bytes from `start` into `out`. The file must have had enough of them when it was opened. A file that
    /// shrank since then is an error.
    pub(super) fn read(&self, start: usize, out: &mut [u8]) -> Result<(), DataError> {
        let fits = start.checked_add(out.len()).is_some_and(|end| end <= self.len);
        assert!(fits, "bytes {start}..+{} of {}", out.len(), self.len);
        let is = self.file.metadata().map_or(0, |metadata| metadata.len());
        if is < self.len as u64 {
            return Err(DataError::file(
                &self.path,
                format!("shrank from {} to {is} bytes while it was in use", self.len),
                Some("write a new file and rename it over the old one instead of truncating it"),
            ));
        }
        let read = self.file.read_exact_at(out, start as u64);
        read.map_err(|e| DataError::unreadable(&self.path, &e))
    }
}

/// Opens a regular file. A pipe would otherwise be waited for until somebody writes to it.
pub(crate) fn open_regular(path: &Path) -> Result<File, DataError> {
    let failed = |e| DataError::unreadable(path, &e);
    let mut options = File::options();
    options.read(true).custom_flags(libc::O_NONBLOCK);
    let file = options.open(path).map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(DataError::file(path, "is not a regular file", None));
    }
    Ok(file)
}

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
    /// A file cannot be opened, read or listed.
    #[error("`{}` cannot be read: {cause}", path.display())]
    Unreadable {
        /// The file or folder.
        path: PathBuf,
        /// The system's words.
        cause: String,
    },
}

impl DataError {
    /// What is wrong with a file, and the next step.
    pub(crate) fn file(path: &Path, problem: impl Into<String>, hint: Option<&str>) -> Self {
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
    pub(crate) fn no_tokenizer(path: &Path, cause: impl Display) -> Self {
        let hint = "`data.tokenizer` expects a `tokenizer.json` of Hugging Face tokenizers";
        Self::file(path, format!("is not a tokenizer file: {cause}"), Some(hint))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_file_holds() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        std::fs::write(&path, b"hello world").unwrap();
        let file = DataFile::open(&path).unwrap();
        let mut out = [0; 5];
        file.read(6, &mut out).unwrap();
        assert_eq!((&out, file.len()), (b"world", 11));
        for beyond in [7, usize::MAX] {
            let read = std::panic::AssertUnwindSafe(|| file.read(beyond, &mut [0; 5]));
            assert!(std::panic::catch_unwind(read).is_err(), "{beyond}");
        }
    }

    #[test]
    fn a_file_that_shrinks_is_an_error_and_no_signal() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        std::fs::write(&path, vec![7; 1 << 16]).unwrap();
        let file = DataFile::open(&path).unwrap();
        std::fs::write(&path, b"short").unwrap();
        let error = file.read(60_000, &mut [0; 16]).unwrap_err();
        let message = error.to_string().replace(&path.display().to_string(), "FILE");
        insta::assert_snapshot!(message, @r"
        `FILE` shrank from 65536 to 5 bytes while it was in use
          hint: write a new file and rename it over the old one instead of truncating it
        ");
    }

    #[test]
    fn folders_pipes_and_missing_files_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let open = |path: &Path| DataFile::open(path).err().unwrap().to_string();
        assert!(open(folder.path()).ends_with("is not a regular file"));
        assert!(open(&folder.path().join("gone")).contains("No such file"));
        let pipe = folder.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(open(&pipe).ends_with("is not a regular file"));
        let empty = folder.path().join("empty");
        std::fs::write(&empty, b"").unwrap();
        assert_eq!(DataFile::open(&empty).unwrap().len(), 0);
    }
}
