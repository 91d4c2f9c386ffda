//! One safetensors file of a checkpoint: its layout, writing it in bounded memory, and what a file says of itself.
//!
//! A range that is a whole tensor is stored under the tensor's own name and shape, so that any reader of safetensors can
//! load it; a whole region as `name[0..3, 8..16]`, with the region's shape; a part of either as a flat entry
//! `name@start..end`.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::{Deserialize, Serialize};

use super::manifest::{FileRecord, RangeRecord, RegionRecord, TensorRecord};
use super::piece_hash::{PieceHasher, PieceHashes};
use super::storage::Storage;
use super::{CheckpointError, Extent};
use crate::device::DType;

/// The data begins at a multiple of it, so that a mapped file is aligned.
const ALIGNMENT: usize = 8;
/// Bytes that are written at once; small pieces are gathered up to it.
const CHUNK_BYTES: usize = 4 << 20;
/// Bytes between two syncs: what the last one has to wait for is bounded, and so is what the system must cache.
const SYNC_BYTES: usize = 256 << 20;
/// Bytes before the header: its length.
const LENGTH_BYTES: usize = 8;
/// Longest header that is read; the format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// A safetensors file that is being written. Its pieces are given in [`PartWriter::order`].
pub struct PartWriter {
    storage: Arc<dyn Storage>,
    path: PathBuf,
    layout: PartLayout,
    /// Hashes of the pieces that are complete.
    hashes: Vec<PieceHashes>,
    hasher: PieceHasher,
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
            hasher: PieceHasher::new(),
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

    /// Ends the file. Whether it is on the disk is up to [`PartWriter::sync`].
    pub(super) fn finish(mut self, file_name: &str) -> Result<Index, CheckpointError> {
        if self.missing > 0 {
            let (missing, path) = (self.missing, self.path.display());
            return Err(CheckpointError::Misuse(format!(
                "`{path}` lacks {missing} bytes of a piece"
            )));
        }
        self.flush()?;
        Ok(self.layout.index(file_name, &self.hashes))
    }

    /// Closes a piece that is complete, and those behind it that have no elements.
    fn end_piece(&mut self) {
        if self.missing == 0 {
            self.hashes.push(self.hasher.finish());
            self.turn();
        }
    }

    fn turn(&mut self) {
        while self.hashes.len() < self.layout.order.len() {
            self.missing = self.layout.extent(self.hashes.len()).bytes();
            if self.missing > 0 {
                break;
            }
            self.hashes.push(self.hasher.finish());
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

    /// Puts what was given so far on the disk.
    pub(super) fn sync(&mut self) -> Result<(), CheckpointError> {
        self.flush()?;
        self.unsynced = 0;
        self.storage
            .sync_file(&self.path)
            .map_err(|e| CheckpointError::io("sync", &self.path, &e))
    }
}

/// What one rank wrote: merged into the manifest by the rank that commits.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Index {
    pub(super) file: FileRecord,
    /// One for each range.
    pub(super) tensors: Vec<TensorRecord>,
}

/// Where everything will lie in a file: the header, and the order of the pieces behind it.
struct PartLayout {
    header: Vec<u8>,
    /// Pieces in the order of the file, by their number in what was asked for.
    order: Vec<usize>,
    extents: Vec<Extent>,
    /// Name of the entry of each piece, in the order of the file.
    entries: Vec<String>,
}

impl PartLayout {
    /// Lays out a file with these pieces.
    fn new(extents: &[Extent]) -> Result<Self, CheckpointError> {
        let mut order: Vec<usize> = (0..extents.len()).collect();
        // Wider elements first, so that each entry is aligned to its own; then by name, for a fixed order.
        order.sort_by_key(|&i| {
            let Extent {
                dtype,
                tensor,
                region,
                range,
                ..
            } = &extents[i];
            (std::cmp::Reverse(dtype.bytes()), tensor, region, range.start)
        });
        let mut infos = Vec::with_capacity(order.len());
        let mut offset = 0;
        for extent in order.iter().map(|&i| &extents[i]) {
            let (entry, shape) = extent.entry()?;
            let end = offset + extent.bytes() as usize;
            let info = TensorInfo {
                dtype: to_safetensors(extent.dtype),
                shape,
                data_offsets: (offset, end),
            };
            infos.push((entry, info));
            offset = end;
        }
        let entries = infos.iter().map(|(entry, _)| entry.clone()).collect();
        Ok(Self {
            header: header(infos)?,
            order,
            extents: extents.to_vec(),
            entries,
        })
    }

    /// The piece at a position in the file.
    fn extent(&self, position: usize) -> &Extent {
        &self.extents[self.order[position]]
    }

    /// The index, when the hash of each range is known, in the order of the file.
    fn index(&self, file_name: &str, hashes: &[PieceHashes]) -> Index {
        assert_eq!(hashes.len(), self.order.len(), "a hash for each range");
        let hex = |hash: &[u8; 32]| blake3::Hash::from_bytes(*hash).to_hex().to_string();
        let record = |(position, hashes): (usize, &PieceHashes)| {
            let extent = self.extent(position).clone();
            let range = RangeRecord {
                file: file_name.to_owned(),
                entry: self.entries[position].clone(),
                start: extent.range.start,
                end: extent.range.end,
                blake3: hashes.whole.to_hex().to_string(),
                blocks: hashes.blocks.iter().map(hex).collect(),
            };
            TensorRecord {
                name: extent.tensor,
                shape: extent.shape,
                dtype: extent.dtype,
                regions: vec![RegionRecord {
                    region: extent.region,
                    ranges: vec![range],
                }],
            }
        };
        let data: u64 = self.extents.iter().map(Extent::bytes).sum();
        Index {
            file: FileRecord {
                name: file_name.to_owned(),
                bytes: self.header.len() as u64 + data,
            },
            tensors: hashes.iter().enumerate().map(record).collect(),
        }
    }
}

/// Length and JSON, padded with spaces so that the data is aligned.
fn header(entries: Vec<(String, TensorInfo)>) -> Result<Vec<u8>, CheckpointError> {
    let misuse =
        |what: String| CheckpointError::Misuse(format!("the pieces of one file do not go together: {what}"));
    let mut names: Vec<&str> = entries.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    if let Some((twice, _)) = names
        .iter()
        .zip(&names[1.min(names.len())..])
        .find(|(a, b)| a == b)
    {
        return Err(misuse(format!("`{twice}` is there twice")));
    }
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(metadata), entries).map_err(|e| misuse(e.to_string()))?;
    let mut json = serde_json::to_vec(&metadata).map_err(|e| misuse(e.to_string()))?;
    json.resize(json.len().next_multiple_of(ALIGNMENT), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    Ok(bytes)
}

/// What a file says of itself.
pub(crate) struct Header {
    /// Names, types, shapes, and bytes from [`Header::data`] on; without gaps, and each as long as type and shape say.
    pub(crate) metadata: Metadata,
    /// Where the data begins, in bytes.
    pub(crate) data: u64,
}

/// Why there is none.
pub(crate) enum HeaderError {
    /// The system refused.
    Io(io::Error),
    /// In words.
    Damaged(String),
}

impl From<io::Error> for HeaderError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Reads the header of a safetensors file from its start. Whether the data is there is left to the caller.
pub(crate) fn read_header(file: &mut File) -> Result<Header, HeaderError> {
    let mut length = [0; LENGTH_BYTES];
    file.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER_BYTES {
        return Err(HeaderError::Damaged(format!("its header claims {length} bytes")));
    }
    let mut json = vec![0; length as usize];
    file.read_exact(&mut json)?;
    let metadata =
        serde_json::from_slice(&json).map_err(|e| HeaderError::Damaged(format!("its header: {e}")))?;
    Ok(Header {
        metadata,
        data: LENGTH_BYTES as u64 + length,
    })
}

/// An entry of an opened file.
pub(super) struct Entry {
    pub(super) dtype: DType,
    /// Bytes from the start of the file.
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// Reads the header of the safetensors file at `path`.
pub(super) fn read_entries(path: &Path, file: &mut File) -> Result<HashMap<String, Entry>, CheckpointError> {
    let Header { metadata, data } = read_header(file).map_err(|e| match e {
        HeaderError::Io(e) => CheckpointError::io("read", path, &e),
        HeaderError::Damaged(what) => CheckpointError::damaged(path, what),
    })?;
    let mut entries = HashMap::new();
    for (name, info) in metadata.tensors() {
        let Some(dtype) = from_safetensors(info.dtype) else {
            return Err(CheckpointError::damaged(
                path,
                format!("entry `{name}` has the foreign type {:?}", info.dtype),
            ));
        };
        let (from, to) = info.data_offsets;
        let entry = Entry {
            dtype,
            offset: data + from as u64,
            bytes: (to - from) as u64,
        };
        entries.insert(name, entry);
    }
    Ok(entries)
}

fn to_safetensors(dtype: DType) -> Dtype {
    match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::Bf16 => Dtype::BF16,
        DType::I32 => Dtype::I32,
        DType::U8 => Dtype::U8,
    }
}

fn from_safetensors(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::BF16 => DType::Bf16,
        Dtype::I32 => DType::I32,
        Dtype::U8 => DType::U8,
        _ => return None,
    })
}
