//! A disk on which a test decides what happens to each operation.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use ddp_worker::checkpoint::{Disk, Storage};

/// Sees each operation before it happens, by name and path; an error takes its place. It may block, as a slow disk.
pub type Before = dyn Fn(&'static str, &Path) -> io::Result<()> + Send + Sync;

/// See the module.
pub struct WatchedDisk(Arc<Before>);

impl WatchedDisk {
    pub fn storage(before: Arc<Before>) -> Arc<dyn Storage> {
        Arc::new(Self(before))
    }
}

/// No room is left.
pub fn full() -> io::Error {
    io::Error::from_raw_os_error(28)
}

impl Storage for WatchedDisk {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        (self.0)("create", path)?;
        Disk.create_folder(path)
    }

    fn write(&self, path: &Path, content: &[&[u8]]) -> io::Result<()> {
        (self.0)("write", path)?;
        Disk.write(path, content)
    }

    fn append(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        if let Err(error) = (self.0)("append", path) {
            // A full disk takes what fits.
            Disk.append(path, &bytes[..bytes.len() / 2])?;
            return Err(error);
        }
        Disk.append(path, bytes)
    }

    fn sync_file(&self, path: &Path) -> io::Result<()> {
        (self.0)("sync", path)?;
        Disk.sync_file(path)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        (self.0)("sync folder", path)?;
        Disk.sync_folder(path)
    }

    fn sync_file_system(&self, opened: &File) -> io::Result<()> {
        Disk.sync_file_system(opened)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        (self.0)("rename", to)?;
        Disk.rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        (self.0)("delete", path)?;
        Disk.remove_file(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        (self.0)("delete", path)?;
        Disk.remove_folder(path)
    }
}
