//! A file of data, mapped into memory; and what can be wrong with the data.
#![allow(
    unsafe_code,
    reason = "copies out of a file mapping; the block carries its argument"
)]

use std::fmt::Display;
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use memmap2::{MmapOptions, MmapRaw};

/// A file that is never loaded as a whole: the kernel reads pages as they are touched and shares them among the
/// ranks of a node.
///
/// Other processes can change the file, so that no reference into the mapping is ever made: bytes are
/// copied out. A byte that changes meanwhile is read as the old or the new one.
pub(super) struct MappedFile {
    path: PathBuf,
    file: File,
    /// `None` for an empty file, which cannot be mapped.
    map: Option<MmapRaw>,
}

impl MappedFile {
    /// Maps the file at `path`.
    pub(super) fn open(path: &Path) -> Result<Self, DataError> {
        let file = open_regular(path)?;
        let map = match file.metadata().map(|metadata| metadata.len()) {
            Ok(0) => Ok(None),
            Ok(_) => MmapOptions::new().map_raw_read_only(&file).map(Some),
            Err(e) => Err(e),
        };
        Ok(Self {
            path: path.to_owned(),
            map: map.map_err(|e| DataError::unreadable(path, &e))?,
            file,
        })
    }

    /// The path that was opened.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Number of bytes.
    pub(super) fn len(&self) -> usize {
        self.map.as_ref().map_or(0, MmapRaw::len)
    }

    /// Copies the bytes from `start` into `out`. The file must have enough of them.
    ///
    /// A file that shrank since it was opened is an error: pages beyond its end do not exist any more, and
    /// touching one would end the process with SIGBUS. Only a truncation between this check and the copy,
    /// microseconds later, still does.
    pub(super) fn read(&self, start: usize, out: &mut [u8]) -> Result<(), DataError> {
        let fits = start.checked_add(out.len()).is_some_and(|end| end <= self.len());
        assert!(fits, "bytes {start}..+{} of {}", out.len(), self.len());
        let Some(map) = &self.map else {
            return Ok(());
        };
        let (was, is) = (self.len() as u64, self.file.metadata().map_or(0, |m| m.len()));
        if is < was {
            return Err(DataError::file(
                &self.path,
                format!("shrank from {was} to {is} bytes while it was in use"),
                Some("write a new file and rename it over the old one instead of truncating it"),
            ));
        }
        // SAFETY: `start + out.len() <= map.len()` was checked above, so that the source lies within the
        // mapping, which lives as long as `self` and is readable; `out` is an exclusive borrow of other
        // memory, so that the two do not overlap. `u8` has neither alignment nor invalid values. No
        // reference to the mapped bytes exists, so that their change by another process breaks no promise
        // made to the compiler. A page that was truncated away faults (SIGBUS): the process ends, which
        // is not undefined behaviour, and the check above makes it all but impossible.
        unsafe {
            std::ptr::copy_nonoverlapping(map.as_ptr().add(start), out.as_mut_ptr(), out.len());
        }
        Ok(())
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
        let file = MappedFile::open(&path).unwrap();
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
        let file = MappedFile::open(&path).unwrap();
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
        let open = |path: &Path| MappedFile::open(path).err().unwrap().to_string();
        assert!(open(folder.path()).ends_with("is not a regular file"));
        assert!(open(&folder.path().join("gone")).contains("No such file"));
        let pipe = folder.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(open(&pipe).ends_with("is not a regular file"));
        let empty = folder.path().join("empty");
        std::fs::write(&empty, b"").unwrap();
        assert_eq!(MappedFile::open(&empty).unwrap().len(), 0);
    }
}
