//! A file replaced as a whole or not at all.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

use super::RunFilesError;

/// Writes `bytes` beside `path`, syncs them, and renames them over it. After a crash at any point `path`
/// has the old content or the new one.
pub(super) fn replace_file(path: &Path, bytes: &[u8]) -> Result<(), RunFilesError> {
    replace_prepared(path, bytes, |_| Ok(())).map(drop)
}

/// The same with a file that `prepare` has had before anybody else can see it. Returns the new file.
pub(super) fn replace_prepared(
    path: &Path,
    bytes: &[u8],
    prepare: impl FnOnce(&File) -> io::Result<()>,
) -> Result<File, RunFilesError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".tmp");
    let temporary = path.with_file_name(name);
    let written = write_and_rename(path, &temporary, bytes, prepare);
    if written.is_err() {
        // The error that counts is on its way; a left-over would only be overwritten next time.
        let _ = fs::remove_file(&temporary);
    }
    written.map_err(|e| RunFilesError::io("write", path, &e))
}

fn write_and_rename(
    path: &Path,
    temporary: &Path,
    bytes: &[u8],
    prepare: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<File> {
    // Left by a crash, and perhaps still held open by a process that is dying.
    let _ = fs::remove_file(temporary);
    let mut file = File::create(temporary)?;
    prepare(&file)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(temporary, path)?;
    let folder = path
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()?;
    Ok(file)
}
