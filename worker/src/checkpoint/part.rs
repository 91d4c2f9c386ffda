//! One safetensors file of a checkpoint: what it is to hold, its layout, writing it in bounded memory, and what a file says
//! of itself.
//!
//! A range that is a whole tensor is stored under the tensor's own name and shape, so that any reader of safetensors can
//! load it; a whole region as `name[0..3, 8..16]`, with the region's shape; a part of either as a flat entry
//! `name@start..end`.
//!
//! Each range has a BLAKE3 hash, and one of each of its blocks: who reads a part verifies the blocks of that part only.
//! BLAKE3 is a tree over the bytes. The hash of a block is the node above it, and the hash of the range the root above all
//! of them, so that every byte is hashed once for both.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blake3::hazmat::{
    ChainingValue, HasherExt as _, Mode, left_subtree_len, merge_subtrees_non_root, merge_subtrees_root,
};
use blake3::{Hash, Hasher};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::{Deserialize, Serialize};

use super::CheckpointError;
use super::error::type_and_shape;
use super::manifest::{FileRecord, RangeRecord, RegionRecord, TensorKind, TensorName, TensorRecord};
use super::storage::Storage;
use crate::device::DType;
use crate::model::{ParamSpec, Region};

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

/// Bytes of a block: a power of two, so that each one is a subtree.
const BLOCK_BYTES: u64 = 16 << 20;

/// The hashes of a piece.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PieceHashes {
    pub(super) whole: Hash,
    /// Of each block; none where the piece is a single one.
    pub(super) blocks: Vec<ChainingValue>,
}

/// Hashes a piece from its first byte to its last.
struct PieceHasher {
    /// Of the block whose turn it is.
    hasher: Hasher,
    /// Its bytes so far.
    filled: u64,
    /// Of those that are complete.
    blocks: Vec<ChainingValue>,
}

impl PieceHasher {
    pub(super) fn new() -> Self {
        Self {
            hasher: Hasher::new(),
            filled: 0,
            blocks: Vec::new(),
        }
    }

    pub(super) fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            // Only when more follows: the last block is never empty, and a single one is the root itself.
            if self.filled == BLOCK_BYTES {
                self.end_block();
            }
            let here = (BLOCK_BYTES - self.filled).min(bytes.len() as u64);
            let (block, rest) = bytes.split_at(here as usize);
            self.hasher.update(block);
            self.filled += here;
            bytes = rest;
        }
    }

    /// The hashes; the next piece begins.
    pub(super) fn finish(&mut self) -> PieceHashes {
        let mut done = std::mem::replace(self, Self::new());
        if done.blocks.is_empty() {
            return PieceHashes {
                whole: done.hasher.finalize(),
                blocks: Vec::new(),
            };
        }
        done.end_block();
        PieceHashes {
            whole: root(&done.blocks),
            blocks: done.blocks,
        }
    }

    fn end_block(&mut self) {
        self.blocks.push(self.hasher.finalize_non_root());
        self.hasher = block_hasher(self.blocks.len());
        self.filled = 0;
    }
}

/// Block `index` of a piece of several.
fn block_hasher(index: usize) -> Hasher {
    let mut hasher = Hasher::new();
    hasher.set_input_offset(index as u64 * BLOCK_BYTES);
    hasher
}

/// The piece that has these blocks, of which there are two or more.
fn root(blocks: &[ChainingValue]) -> Hash {
    let (left, right) = children(blocks);
    merge_subtrees_root(&node(left), &node(right), Mode::Hash)
}

fn node(blocks: &[ChainingValue]) -> ChainingValue {
    if let [block] = blocks {
        return *block;
    }
    let (left, right) = children(blocks);
    merge_subtrees_non_root(&node(left), &node(right), Mode::Hash)
}

/// The last block counts as a full one: a shorter one is in the same place of the tree.
fn children(blocks: &[ChainingValue]) -> (&[ChainingValue], &[ChainingValue]) {
    let left = left_subtree_len(blocks.len() as u64 * BLOCK_BYTES) / BLOCK_BYTES;
    blocks.split_at(left as usize)
}

/// Where one block of a piece lies, from the piece's first byte, and how its hash is made.
pub(super) struct HashBlock {
    pub(super) bytes: std::ops::Range<u64>,
    hasher: Hasher,
    is_root: bool,
}

impl HashBlock {
    /// Blocks of a piece of so many bytes, as its record has hashes of them: one where it has none.
    pub(super) fn count(piece: &RangeRecord) -> usize {
        piece.blocks.len().max(1)
    }

    /// Blocks that hold bytes of a range that is not empty.
    pub(super) fn holding(piece: &RangeRecord, range: &std::ops::Range<u64>) -> std::ops::Range<usize> {
        if piece.blocks.is_empty() {
            return 0..1;
        }
        (range.start / BLOCK_BYTES) as usize..range.end.div_ceil(BLOCK_BYTES) as usize
    }

    /// Block `index` of a piece of so many bytes.
    pub(super) fn of(piece: &RangeRecord, bytes: u64, index: usize) -> Self {
        let is_root = piece.blocks.is_empty();
        let start = index as u64 * BLOCK_BYTES;
        let end = if is_root {
            bytes
        } else {
            bytes.min(start + BLOCK_BYTES)
        };
        Self {
            bytes: start..end,
            hasher: block_hasher(index),
            is_root,
        }
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
    }

    /// Its hash, as a record has it.
    pub(super) fn hash(&self) -> Hash {
        if self.is_root {
            self.hasher.finalize()
        } else {
            Hash::from_bytes(self.hasher.finalize_non_root())
        }
    }
}

/// True if a record's hashes of blocks, if it has some, make up its hash of a piece of so many bytes.
pub(super) fn agree(piece: &RangeRecord, bytes: u64) -> bool {
    if piece.blocks.is_empty() {
        return true;
    }
    let blocks: Option<Vec<ChainingValue>> = piece
        .blocks
        .iter()
        .map(|hex| Some(*Hash::from_hex(hex).ok()?.as_bytes()))
        .collect();
    blocks.is_some_and(|blocks| {
        blocks.len() > 1
            && blocks.len() as u64 == bytes.div_ceil(BLOCK_BYTES)
            && root(&blocks).to_hex().as_str() == piece.blake3
    })
}

/// A range of the elements of a tensor's region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Name of the tensor.
    pub tensor: TensorName,
    /// Its global shape.
    pub shape: Vec<u64>,
    /// Type of its elements.
    pub dtype: DType,
    /// The box of the tensor.
    pub region: Region,
    /// Elements, in row-major order of the region.
    pub range: Range<u64>,
}

impl Extent {
    /// All elements of a parameter's tensor of some kind. Parameters are the f32 masters, so that a run may go on in
    /// another precision.
    #[must_use]
    pub fn whole(kind: &TensorKind, spec: &ParamSpec) -> Self {
        let shape = spec.shape_on_disk();
        let region = Region::whole(&shape);
        Self {
            tensor: kind.of(&spec.key),
            dtype: DType::F32,
            range: 0..region.elements().expect("a parameter that fits in memory"),
            region,
            shape,
        }
    }

    /// Size of the range.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.range.end.saturating_sub(self.range.start) * self.dtype.bytes() as u64
    }

    /// Name and shape of the entry in the file: a whole region has its shape, a part of one is flat.
    pub(super) fn entry(&self) -> Result<(String, Vec<usize>), CheckpointError> {
        let Range { start, end } = self.range;
        let is_counted = Region::whole(&self.shape).elements().is_some();
        let is_within = is_counted && self.region.is_within(&self.shape);
        let elements = self.region.elements().filter(|_| is_within);
        let is_countable = |n: u64| n.checked_mul(self.dtype.bytes() as u64).is_some();
        let fits = elements.is_some_and(|n| start <= end && end <= n && is_countable(n));
        if !fits || self.tensor.to_string().contains(['@', '[']) {
            return Err(CheckpointError::Misuse(format!(
                "elements {start}..{end} of region {} of tensor `{}`, {}",
                self.region,
                self.tensor,
                type_and_shape(self.dtype, &self.shape)
            )));
        }
        let mut name = self.tensor.to_string();
        if !self.region.is_whole(&self.shape) {
            name += &self.region.to_string();
        }
        if elements == Some(end - start) {
            let shape = self.region.shape();
            Ok((name, shape.iter().map(|d| *d as usize).collect()))
        } else {
            Ok((format!("{name}@{start}..{end}"), vec![(end - start) as usize]))
        }
    }
}

/// Share `index` of `shares` of a row of extents: which of them, and which elements of each. Shares are equal to an
/// element, and in order; together they are the whole row.
///
/// # Panics
/// If there is no such share.
#[must_use]
pub fn share_of(extents: &[Range<u64>], index: usize, shares: usize) -> Vec<(usize, Range<u64>)> {
    assert!(index < shares, "share {index} of {shares}");
    let total: u64 = extents.iter().map(|range| range.end - range.start).sum();
    let cut = |i: usize| (u128::from(total) * i as u128 / shares as u128) as u64;
    let (from, to) = (cut(index), cut(index + 1));
    let mut own = Vec::new();
    let mut first = 0;
    for (i, range) in extents.iter().enumerate() {
        let last = first + (range.end - range.start);
        let (start, end) = (first.max(from), last.min(to));
        if start < end {
            own.push((i, range.start + (start - first)..range.start + (end - first)));
        }
        first = last;
    }
    own
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_hash_of_a_piece_is_that_of_its_bytes_whatever_its_blocks() {
        let block = BLOCK_BYTES as usize;
        let bytes: Vec<u8> = (0..5 * block + 3).map(|i| (i * i / 7) as u8).collect();
        let mut hasher = PieceHasher::new();
        for (len, blocks) in [
            (0, 0),
            (1, 0),
            (block, 0),
            (block + 1, 2),
            (2 * block, 2),
            (3 * block - 1, 3),
            (4 * block, 4),
            (5 * block + 3, 6),
        ] {
            for part in bytes[..len].chunks(3_000_017) {
                hasher.update(part);
            }
            let found = hasher.finish();
            assert_eq!(found.whole, blake3::hash(&bytes[..len]), "{len} bytes");
            assert_eq!(found.blocks.len(), blocks, "{len} bytes");
        }
    }

    proptest! {
        #[test]
        fn shares_are_equal_in_order_and_whole(
            extents in prop::collection::vec((0_u64..50, 0_u64..2000), 0..12),
            shares in 1_usize..9,
        ) {
            let extents: Vec<Range<u64>> = extents.iter().map(|&(start, len)| start..start + len).collect();
            let total: u64 = extents.iter().map(|r| r.end - r.start).sum();
            let all = |row: &mut dyn Iterator<Item = (usize, Range<u64>)>| -> Vec<(usize, u64)> {
                row.flat_map(|(i, range)| range.map(move |element| (i, element))).collect()
            };
            let mut joined = (0..shares).flat_map(|index| share_of(&extents, index, shares));
            prop_assert_eq!(all(&mut joined), all(&mut extents.iter().cloned().enumerate()));
            for index in 0..shares {
                let len: u64 = share_of(&extents, index, shares).iter().map(|(_, r)| r.end - r.start).sum();
                prop_assert!(len.abs_diff(total / shares as u64) <= 1);
            }
        }
    }
}
