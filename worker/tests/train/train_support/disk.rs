//! A disk on which a test decides what happens to each operation.

use std::io;
use std::path::Path;
use std::sync::Arc;

use ddp_worker::checkpoint::{Disk, DiskStep, Storage};

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
    fn perform(&self, step: DiskStep<'_>) -> io::Result<()> {
        let (words, path) = step.words();
        let name = match step {
            DiskStep::Append(..) => "append",
            DiskStep::SyncFolder(_) => "sync folder",
            DiskStep::Rename(..) => "rename",
            _ => words,
        };
        if let Err(error) = (self.0)(name, path) {
            if let DiskStep::Append(path, bytes) = step {
                // A full disk takes what fits.
                Disk.perform(DiskStep::Append(path, &bytes[..bytes.len() / 2]))?;
            }
            return Err(error);
        }
        Disk.perform(step)
    }
}
