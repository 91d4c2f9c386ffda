//! The token file, which appears when it is whole.

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{self, BufWriter, Seek as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use super::TokenizeError;
use crate::data::token_file::{HEADER_BYTES, header};
use crate::data::{TokenFacts, Width};

/// Bytes that are written at once.
const BUFFER_BYTES: usize = 1 << 20;

/// A file beside its final place. What was at that place stays until the new file is whole and on the disk.
pub(super) struct Output {
    path: PathBuf,
    temporary: PathBuf,
    /// None once it is published.
    file: Option<BufWriter<File>>,
    bytes: usize,
}

impl Output {
    /// Begins a file, of which nobody else may write the same.
    pub(super) fn create(path: &Path, overwrite: bool) -> Result<Self, TokenizeError> {
        let Some(name) = path.file_name().filter(|_| !path.is_dir()) else {
            let source = io::Error::from(io::ErrorKind::IsADirectory);
            return Err(TokenizeError::io("write", path, source));
        };
        if let Ok(there) = path.symlink_metadata() {
            // A rename would put a file in the place of a device.
            if !there.is_file() {
                return Err(TokenizeError::NotAFile {
                    path: path.to_owned(),
                });
            }
            if !overwrite {
                return Err(TokenizeError::Exists {
                    path: path.to_owned(),
                });
            }
        }
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(".tokenizing");
        let temporary = path.with_file_name(hidden);
        let failed = |e| TokenizeError::io("create", &temporary, e);
        let mut options = File::options();
        // A pipe would otherwise be waited for until somebody reads it.
        options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        // Cut to nothing only when it is ours.
        let opened = options.write(true).create(true).truncate(false).open(&temporary);
        let file = opened.map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(TokenizeError::NotAFile { path: temporary });
        }
        let busy = || TokenizeError::Busy {
            path: path.to_owned(),
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(busy()),
            Err(TryLockError::Error(e)) => return Err(failed(e)),
        }
        // Whoever had it locked may have renamed it in between.
        let is_there = fs::metadata(&temporary).is_ok_and(|there| {
            file.metadata()
                .is_ok_and(|ours| (ours.dev(), ours.ino()) == (there.dev(), there.ino()))
        });
        if !is_there {
            return Err(busy());
        }
        file.set_len(0).map_err(failed)?;
        let mut output = Self {
            path: path.to_owned(),
            file: Some(BufWriter::with_capacity(BUFFER_BYTES, file)),
            bytes: 0,
            temporary,
        };
        output.put(&[0; HEADER_BYTES])?;
        Ok(output)
    }

    /// Appends tokens as they are stored.
    pub(super) fn write(&mut self, tokens: &[u8]) -> Result<(), TokenizeError> {
        self.put(tokens)?;
        self.bytes += tokens.len();
        Ok(())
    }

    /// Writes the header, syncs everything, and puts the file in its place.
    pub(super) fn publish(mut self, width: Width, facts: &TokenFacts) -> Result<(), TokenizeError> {
        let tokens = self.bytes / width.bytes();
        let header = header(width, tokens, facts).ok_or_else(|| {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "the tokenizer's name is too long");
            TokenizeError::io("write", &self.path, source)
        })?;
        let written = self.finish(&header);
        written.map_err(|e| TokenizeError::io("write", &self.path, e))
    }

    fn finish(&mut self, header: &[u8]) -> io::Result<()> {
        let Some(mut writer) = self.file.take() else {
            return Ok(());
        };
        let renamed = (|| {
            writer.rewind()?;
            writer.write_all(header)?;
            writer.flush()?;
            writer.get_ref().sync_all()?;
            fs::rename(&self.temporary, &self.path)
        })();
        if let Err(e) = renamed {
            self.file = Some(writer);
            return Err(e);
        }
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), TokenizeError> {
        let Some(file) = &mut self.file else {
            return Ok(());
        };
        let written = file.write_all(bytes);
        written.map_err(|e| TokenizeError::io("write", &self.temporary, e))
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if let Some(file) = self.file.take() {
            // Without writing what is buffered. A left-over would only be overwritten next time.
            drop(file.into_parts());
            let _ = fs::remove_file(&self.temporary);
        }
    }
}
