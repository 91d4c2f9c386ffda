//! Writes one file piece by piece, in bounded memory, hashing on the way.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::part::{Index, PartLayout};
use super::storage::Storage;
use super::{CheckpointError, Extent};

/// Bytes that are written at once; small pieces are gathered up to it.
const CHUNK_BYTES: usize = 4 << 20;
/// Bytes between two syncs: what the last one has to wait for is bounded, and so is what the system must cache.
const SYNC_BYTES: usize = 256 << 20;

/// A safetensors file that is being written. Its pieces are given in [`PartWriter::order`].
pub struct PartWriter {
    storage: Arc<dyn Storage>,
    path: PathBuf,
    layout: PartLayout,
    /// Hashes of the pieces that are complete.
    hashes: Vec<blake3::Hash>,
    hasher: blake3::Hasher,
    /// Bytes of the piece whose turn it is that are still to come.
    missing: u64,
    buffered: Vec<u8>,
    unsynced: usize,
}

impl PartWriter {
    /// Creates the file, or replaces its content.
    pub(super) fn create(
        storage: Arc<dyn Storage>,
        path: &Path,
        extents: &[Extent],
    ) -> Result<Self, CheckpointError> {
        let layout = PartLayout::new(extents)?;
        storage
            .write(path, &[&layout.header])
            .map_err(|e| CheckpointError::io("write", path, &e))?;
        let mut part = Self {
            storage,
            path: path.to_owned(),
            layout,
            hashes: Vec::with_capacity(extents.len()),
            hasher: blake3::Hasher::new(),
            missing: 0,
            buffered: Vec::new(),
            unsynced: 0,
        };
        part.turn();
        Ok(part)
    }

    /// The order in which the pieces are wanted, by their number in what was asked for.
    #[must_use]
    pub fn order(&self) -> Vec<usize> {
        self.layout.order.clone()
    }

    /// More bytes, little-endian, of the piece whose turn it is; behind its end those of the next.
    pub fn put(&mut self, mut bytes: &[u8]) -> Result<(), CheckpointError> {
        while !bytes.is_empty() {
            if self.missing == 0 {
                let path = self.path.display();
                return Err(CheckpointError::Misuse(format!(
                    "{} bytes too many for `{path}`",
                    bytes.len()
                )));
            }
            let room = CHUNK_BYTES - self.buffered.len();
            let here = bytes.len().min(self.missing.min(room as u64) as usize);
            let (chunk, rest) = bytes.split_at(here);
            self.hasher.update(chunk);
            if here == CHUNK_BYTES {
                self.append(chunk)?;
            } else {
                self.buffered.extend_from_slice(chunk);
                self.flush_full()?;
            }
            self.missing -= here as u64;
            self.end_piece();
            bytes = rest;
        }
        Ok(())
    }

    /// Puts the file on the disk.
    pub(super) fn finish(mut self, file_name: &str) -> Result<Index, CheckpointError> {
        if self.missing > 0 {
            let (missing, path) = (self.missing, self.path.display());
            return Err(CheckpointError::Misuse(format!(
                "`{path}` lacks {missing} bytes of a piece"
            )));
        }
        self.flush()?;
        self.sync()?;
        Ok(self.layout.index(file_name, &self.hashes))
    }

    /// Closes a piece that is complete, and those behind it that have no elements.
    fn end_piece(&mut self) {
        if self.missing == 0 {
            self.hashes.push(self.hasher.finalize());
            self.hasher.reset();
            self.turn();
        }
    }

    fn turn(&mut self) {
        while self.hashes.len() < self.layout.order.len() {
            self.missing = self.layout.extent(self.hashes.len()).bytes();
            if self.missing > 0 {
                break;
            }
            self.hashes.push(blake3::hash(&[]));
        }
    }

    fn flush_full(&mut self) -> Result<(), CheckpointError> {
        if self.buffered.len() < CHUNK_BYTES {
            return Ok(());
        }
        self.flush()
    }

    fn flush(&mut self) -> Result<(), CheckpointError> {
        if self.buffered.is_empty() {
            return Ok(());
        }
        let buffered = std::mem::take(&mut self.buffered);
        self.append(&buffered)?;
        self.buffered = buffered;
        self.buffered.clear();
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.storage
            .append(&self.path, bytes)
            .map_err(|e| CheckpointError::io("write", &self.path, &e))?;
        self.unsynced += bytes.len();
        if self.unsynced >= SYNC_BYTES {
            self.sync()?;
        }
        Ok(())
    }

    fn sync(&mut self) -> Result<(), CheckpointError> {
        self.unsynced = 0;
        self.storage
            .sync_file(&self.path)
            .map_err(|e| CheckpointError::io("sync", &self.path, &e))
    }
}
