//! A file replaced as a whole or not at all.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;

use super::RunFilesError;

/// Writes `bytes` beside `path`, syncs them, and renames them over it. After a crash at any point `path`
/// has the old content or the new one.
pub(super) fn replace_file(path: &Path, bytes: &[u8]) -> Result<(), RunFilesError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".tmp");
    let temporary = path.with_file_name(name);
    let written = write_and_rename(path, &temporary, bytes);
    if written.is_err() {
        // The error that counts is on its way; a left-over would only be overwritten next time.
        let _ = fs::remove_file(&temporary);
    }
    written
}

fn write_and_rename(path: &Path, temporary: &Path, bytes: &[u8]) -> Result<(), RunFilesError> {
    let write = |e: &std::io::Error| RunFilesError::io("write", path, e);
    let mut file = File::create(temporary).map_err(|e| write(&e))?;
    file.write_all(bytes).map_err(|e| write(&e))?;
    file.sync_all().map_err(|e| write(&e))?;
    fs::rename(temporary, path).map_err(|e| write(&e))?;
    let folder = path
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    File::open(folder)
        .and_then(|folder| folder.sync_all())
        .map_err(|e| write(&e))
}
