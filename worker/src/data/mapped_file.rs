//! A file of data, mapped into memory.
#![allow(
    unsafe_code,
    reason = "copies out of a file mapping; the block carries its argument"
)]

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use memmap2::{MmapOptions, MmapRaw};

use super::{DataError, FileProblem};

/// A file that is never loaded as a whole: the kernel reads pages as they are touched and shares them among the
/// ranks of a node.
///
/// Other processes can change the file, so that no reference into the mapping is ever made: bytes are
/// copied out. A byte that changes meanwhile is read as the old or the new one.
pub(super) struct MappedFile {
    path: PathBuf,
    file: File,
    /// None for an empty file, which cannot be mapped.
    map: Option<MmapRaw>,
}

impl MappedFile {
    /// Maps the file at `path`.
    pub(super) fn open(path: &Path) -> Result<Self, DataError> {
        let failed = |e: std::io::Error| {
            let cause = e.to_string();
            DataError::file(path, FileProblem::Unreadable { cause })
        };
        // A pipe would otherwise be waited for until somebody writes to it.
        let mut options = File::options();
        options.read(true).custom_flags(libc::O_NONBLOCK);
        let file = options.open(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        if !metadata.is_file() {
            return Err(DataError::file(path, FileProblem::NotAFile));
        }
        let map = if metadata.len() == 0 {
            None
        } else {
            Some(MmapOptions::new().map_raw_read_only(&file).map_err(failed)?)
        };
        Ok(Self {
            path: path.to_owned(),
            file,
            map,
        })
    }

    /// Where it was opened.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Number of bytes.
    pub(super) fn len(&self) -> usize {
        self.map.as_ref().map_or(0, MmapRaw::len)
    }

    /// True for an empty file.
    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the bytes from `start` into `out`.
    ///
    /// A file that shrank since it was opened is an error: pages beyond its end do not exist any more, and
    /// touching one would end the process with SIGBUS. Only a truncation between this check and the copy,
    /// microseconds later, still does.
    pub(super) fn read(&self, start: usize, out: &mut [u8]) -> Result<(), DataError> {
        if out.is_empty() {
            return Ok(());
        }
        let fits = start.checked_add(out.len()).is_some_and(|end| end <= self.len());
        let Some(map) = self.map.as_ref().filter(|_| fits) else {
            return Err(DataError::Misuse {
                path: self.path.clone(),
                what: format!("bytes {start}..+{} of {} were asked for", out.len(), self.len()),
            });
        };
        let is = self.file.metadata().map_or(0, |m| m.len());
        if is < self.len() as u64 {
            return Err(DataError::Shrank {
                path: self.path.clone(),
                was: self.len() as u64,
                is,
            });
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
        assert!(matches!(file.read(7, &mut out), Err(DataError::Misuse { .. })));
        assert!(matches!(
            file.read(usize::MAX, &mut out),
            Err(DataError::Misuse { .. })
        ));
    }

    #[test]
    fn a_file_that_shrinks_is_an_error_and_no_signal() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        std::fs::write(&path, vec![7; 1 << 16]).unwrap();
        let file = MappedFile::open(&path).unwrap();
        std::fs::write(&path, b"short").unwrap();
        let error = file.read(60_000, &mut [0; 16]).unwrap_err();
        assert_eq!(
            error,
            DataError::Shrank {
                path,
                was: 1 << 16,
                is: 5
            }
        );
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
        assert!(MappedFile::open(&empty).unwrap().is_empty());
    }
}
