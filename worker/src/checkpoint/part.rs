//! One safetensors file of a checkpoint: the extents it holds, its layout, its header and its hashes. It is written in
//! bounded memory.
//!
//! A range that is a whole tensor is stored under the tensor's own name and shape, so that any reader of safetensors can
//! load it; a whole region as `name[0..3, 8..16]`, with the region's shape; a part of either as a flat entry
//! `name@start..end`.
//!
//! Each block of 16 MiB of a range has a BLAKE3 hash. A reader of a part of the range verifies only the blocks of that part.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, ErrorKind, Read as _};
use std::ops::Range;
use std::path::Path;

use blake3::Hasher;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::{Deserialize, Serialize};

use super::CheckpointError;
use super::error::type_and_shape;
use super::manifest::{FileRecord, RangeRecord, RegionRecord, TensorKind, TensorName, TensorRecord};
use super::storage::{DiskStep, Storage};
use crate::device::DType;
use crate::model::{ParamSpec, Region};

/// The data begins at a multiple of it, so that a mapped file is aligned.
const ALIGNMENT: usize = 8;
/// Bytes that are written at once.
const CHUNK_BYTES: usize = 4 << 20;
/// Bytes between two syncs: what the last one has to wait for is bounded, and so is what the system must cache.
const SYNC_BYTES: usize = 256 << 20;
/// Bytes before the header: its length.
const LENGTH_BYTES: usize = 8;
/// Longest header that is read; the format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Bytes of a range that have a hash of their own. The last block of a range may be shorter.
const BLOCK_BYTES: u64 = 16 << 20;

/// What one rank wrote: merged into the manifest by the rank that commits.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Index {
    pub(super) file: FileRecord,
    /// One for each range.
    pub(super) tensors: Vec<TensorRecord>,
}

/// A safetensors file that is being written, extent after extent.
pub struct PartWriter<'a> {
    storage: &'a dyn Storage,
    path: &'a Path,
    /// In the order of the file, with the names of their entries.
    extents: Vec<(String, &'a Extent)>,
    /// The index of the complete extents.
    index: Index,
    /// Hashes the current block.
    hasher: Hasher,
    /// Hashes of the complete blocks of the current extent.
    blocks: Vec<String>,
    /// Bytes of the current extent that were put.
    filled: u64,
    buffered: Vec<u8>,
    unsynced: usize,
}

/// Creates a file with these extents, or replaces its content. `fill` is called for each extent by its number, in the
/// order of the file, and puts its bytes, little-endian. All of the file is on the disk when this returns.
pub(super) fn write_part(
    storage: &dyn Storage,
    path: &Path,
    extents: &[Extent],
    mut fill: impl FnMut(usize, &mut PartWriter<'_>) -> Result<(), CheckpointError>,
) -> Result<Index, CheckpointError> {
    let mut order: Vec<usize> = (0..extents.len()).collect();
    // Wider elements first, so that each entry is aligned to its own; then by name, for a fixed order.
    order.sort_by_key(|&i| {
        let extent = &extents[i];
        let width = std::cmp::Reverse(extent.dtype.bytes());
        (width, &extent.tensor, &extent.region, extent.range.start)
    });
    let mut part = PartWriter::create(storage, path, order.iter().map(|&i| &extents[i]))?;
    order.into_iter().try_for_each(|i| fill(i, &mut part))?;
    if let Some((_, extent)) = part.current() {
        let (missing, path) = (extent.bytes() - part.filled, path.display());
        return Err(CheckpointError::Misuse(format!(
            "`{path}` lacks {missing} bytes of a piece"
        )));
    }
    part.flush()?;
    part.sync()?;
    Ok(part.index)
}

impl<'a> PartWriter<'a> {
    /// Writes the header.
    fn create(
        storage: &'a dyn Storage,
        path: &'a Path,
        extents: impl Iterator<Item = &'a Extent>,
    ) -> Result<Self, CheckpointError> {
        let extents: Result<Vec<_>, _> = extents.map(|extent| Ok((extent.entry()?, extent))).collect();
        let extents = extents?;
        let header = header(&extents)?;
        storage.run(DiskStep::Write(path, &header))?;
        let data: u64 = extents.iter().map(|(_, extent)| extent.bytes()).sum();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let file = FileRecord {
            name: name.into_owned(),
            bytes: header.len() as u64 + data,
        };
        let mut part = Self {
            storage,
            path,
            index: Index {
                file,
                tensors: Vec::with_capacity(extents.len()),
            },
            extents,
            hasher: Hasher::new(),
            blocks: Vec::new(),
            filled: 0,
            buffered: Vec::new(),
            unsynced: 0,
        };
        part.end_extents();
        Ok(part)
    }

    /// More bytes, little-endian, of the extent whose turn it is; behind its end those of the next.
    pub fn put(&mut self, mut bytes: &[u8]) -> Result<(), CheckpointError> {
        while !bytes.is_empty() {
            let Some((_, extent)) = self.current() else {
                let (many, path) = (bytes.len(), self.path.display());
                return Err(CheckpointError::Misuse(format!(
                    "{many} bytes too many for `{path}`"
                )));
            };
            let missing = extent.bytes() - self.filled;
            let room = (CHUNK_BYTES - self.buffered.len()) as u64;
            let of_block = BLOCK_BYTES - self.hasher.count();
            let here = bytes.len().min(missing.min(room).min(of_block) as usize);
            let (chunk, rest) = bytes.split_at(here);
            self.hasher.update(chunk);
            self.buffered.extend_from_slice(chunk);
            self.filled += here as u64;
            if self.hasher.count() == BLOCK_BYTES {
                self.end_block();
            }
            self.end_extents();
            if self.buffered.len() == CHUNK_BYTES {
                self.flush()?;
            }
            bytes = rest;
        }
        Ok(())
    }

    /// Closes the extent whose turn it is, if it is complete, and those behind it that have no elements.
    fn end_extents(&mut self) {
        while let Some((entry, extent)) = self.current()
            && self.filled == extent.bytes()
        {
            let entry = entry.to_owned();
            if self.hasher.count() > 0 {
                self.end_block();
            }
            let range = RangeRecord {
                file: self.index.file.name.clone(),
                entry,
                start: extent.range.start,
                end: extent.range.end,
                blocks: std::mem::take(&mut self.blocks),
            };
            self.index.tensors.push(TensorRecord {
                name: extent.tensor.clone(),
                shape: extent.shape.clone(),
                dtype: extent.dtype,
                regions: vec![RegionRecord {
                    region: extent.region.clone(),
                    ranges: vec![range],
                }],
            });
            self.filled = 0;
        }
    }

    fn end_block(&mut self) {
        self.blocks.push(self.hasher.finalize().to_hex().to_string());
        self.hasher.reset();
    }

    /// The extent whose turn it is, with the name of its entry; none when all are complete.
    fn current(&self) -> Option<(&str, &'a Extent)> {
        let next = self.extents.get(self.index.tensors.len());
        next.map(|(entry, extent)| (entry.as_str(), *extent))
    }

    fn flush(&mut self) -> Result<(), CheckpointError> {
        if self.buffered.is_empty() {
            return Ok(());
        }
        self.storage.run(DiskStep::Append(self.path, &self.buffered))?;
        self.unsynced += self.buffered.len();
        self.buffered.clear();
        if self.unsynced >= SYNC_BYTES {
            self.sync()?;
        }
        Ok(())
    }

    /// Puts all that was written on the disk.
    fn sync(&mut self) -> Result<(), CheckpointError> {
        self.unsynced = 0;
        self.storage.run(DiskStep::SyncFile(self.path))
    }
}

/// Length and JSON, padded with spaces so that the data is aligned. Extents come with the names of their entries.
fn header(extents: &[(String, &Extent)]) -> Result<Vec<u8>, CheckpointError> {
    let misuse =
        |what: String| CheckpointError::Misuse(format!("the pieces of one file do not match: {what}"));
    let mut names = HashSet::new();
    if let Some((twice, _)) = extents.iter().find(|(name, _)| !names.insert(name)) {
        return Err(misuse(format!("`{twice}` occurs twice")));
    }
    let mut offset = 0;
    let infos = extents.iter().map(|(name, extent)| {
        let start = offset;
        offset += extent.bytes() as usize;
        let info = TensorInfo {
            dtype: dtype_on_disk(extent.dtype),
            shape: extent.entry_shape(),
            data_offsets: (start, offset),
        };
        (name.clone(), info)
    });
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(format), infos.collect()).map_err(|e| misuse(e.to_string()))?;
    let mut json = serde_json::to_vec(&metadata).map_err(|e| misuse(e.to_string()))?;
    json.resize(json.len().next_multiple_of(ALIGNMENT), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    Ok(bytes)
}

/// What a safetensors file says of itself.
pub(crate) struct Header {
    /// Names, types, shapes, and bytes from [`Header::data`] on; without gaps, and each as long as type and shape say.
    pub(crate) metadata: Metadata,
    /// Where the data begins, in bytes.
    pub(crate) data: u64,
}

impl Header {
    /// Bytes of the file that it describes. A header can name more than a number can count: no file is as long.
    pub(crate) fn file_len(&self) -> u64 {
        self.data.saturating_add(self.metadata.data_len() as u64)
    }
}

/// Reads the header of a safetensors file from its start; one that says nothing is [`ErrorKind::InvalidData`]. Whether
/// the data is there is left to the caller.
pub(crate) fn read_header(file: &mut File) -> io::Result<Header> {
    let damaged = |what| io::Error::new(ErrorKind::InvalidData, what);
    let mut length = [0; LENGTH_BYTES];
    file.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER_BYTES {
        return Err(damaged(format!("its header claims {length} bytes")));
    }
    // Checked before memory is reserved: a few bytes can claim the longest header.
    let rest = file.metadata()?.len().saturating_sub(LENGTH_BYTES as u64);
    if length > rest {
        let what = format!("its header claims {length} bytes, and {rest} follow");
        return Err(io::Error::new(ErrorKind::UnexpectedEof, what));
    }
    let mut json = vec![0; length as usize];
    file.read_exact(&mut json)?;
    Ok(Header {
        metadata: serde_json::from_slice(&json).map_err(|e| damaged(format!("its header: {e}")))?,
        data: LENGTH_BYTES as u64 + length,
    })
}

/// What safetensors calls a type.
pub(super) fn dtype_on_disk(dtype: DType) -> Dtype {
    match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::Bf16 => Dtype::BF16,
        DType::I32 => Dtype::I32,
        DType::U8 => Dtype::U8,
    }
}

impl RangeRecord {
    /// The blocks that hold `bytes`, which count from the range's first byte.
    pub(super) fn blocks_of(bytes: &Range<u64>) -> Range<usize> {
        if bytes.is_empty() {
            return 0..0;
        }
        (bytes.start / BLOCK_BYTES) as usize..bytes.end.div_ceil(BLOCK_BYTES) as usize
    }

    /// The bytes of block `index`, of a range of `len` bytes.
    pub(super) fn block(index: usize, len: u64) -> Range<u64> {
        let start = index as u64 * BLOCK_BYTES;
        start..len.min(start + BLOCK_BYTES)
    }

    /// True if these are the bytes of block `index`, by its hash.
    pub(super) fn is_block(&self, index: usize, bytes: &[u8]) -> bool {
        blake3::hash(bytes).to_hex().as_str() == self.blocks[index]
    }

    /// True if a range of `len` bytes has as many hashes as blocks.
    pub(super) fn has_all_blocks(&self, len: u64) -> bool {
        self.blocks.len() as u64 == len.div_ceil(BLOCK_BYTES)
    }
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

    /// A range of a box of a tensor that a checkpoint holds.
    pub(super) fn of(tensor: &TensorRecord, region: Region, range: Range<u64>) -> Self {
        Self {
            tensor: tensor.name.clone(),
            shape: tensor.shape.clone(),
            dtype: tensor.dtype,
            region,
            range,
        }
    }

    /// All tensors of these kinds of a model.
    pub fn of_model(kinds: &[TensorKind], params: &[ParamSpec]) -> Vec<Self> {
        let of_kind = |kind| params.iter().map(move |spec| Self::whole(kind, spec));
        kinds.iter().flat_map(of_kind).collect()
    }

    /// Size of the range; the largest number where it does not fit.
    pub fn bytes(&self) -> u64 {
        let elements = self.range.end.saturating_sub(self.range.start);
        elements.saturating_mul(self.dtype.bytes() as u64)
    }

    /// An error unless it is a range of a box of the tensor, of a size that can be counted.
    pub(super) fn check(&self) -> Result<(), CheckpointError> {
        let Range { start, end } = self.range;
        let is_counted = Region::whole(&self.shape).elements().is_some();
        let is_within = is_counted && self.region.is_within(&self.shape);
        let elements = self.region.elements().filter(|_| is_within);
        let is_countable = |n: u64| n.checked_mul(self.dtype.bytes() as u64).is_some();
        if elements.is_some_and(|n| start <= end && end <= n && is_countable(n)) {
            return Ok(());
        }
        Err(self.misused())
    }

    fn misused(&self) -> CheckpointError {
        let Range { start, end } = self.range;
        CheckpointError::Misuse(format!(
            "elements {start}..{end} of region {} of tensor `{}`, {}",
            self.region,
            self.tensor,
            type_and_shape(self.dtype, &self.shape)
        ))
    }

    /// Name of the entry in the file.
    pub(super) fn entry(&self) -> Result<String, CheckpointError> {
        self.check()?;
        if self.tensor.to_string().contains(['@', '[']) {
            return Err(self.misused());
        }
        let mut name = self.tensor.of_region(&self.region, &self.shape);
        if !self.is_region() {
            let Range { start, end } = self.range;
            name = format!("{name}@{start}..{end}");
        }
        Ok(name)
    }

    /// Shape of the entry in the file: a whole region has its own, a part of one is flat.
    fn entry_shape(&self) -> Vec<usize> {
        if self.is_region() {
            self.region.shape().iter().map(|d| *d as usize).collect()
        } else {
            vec![(self.range.end - self.range.start) as usize]
        }
    }

    /// True if the range is all of the region.
    fn is_region(&self) -> bool {
        self.region.elements() == Some(self.range.end - self.range.start)
    }
}

/// Share `index` of `shares` of a row of extents: which of them, and which elements of each. Shares are equal to an
/// element, and in order; together they are the whole row.
///
/// # Panics
/// If `index` is not below `shares`.
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
