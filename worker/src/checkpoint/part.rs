//! Layout of one safetensors file of a checkpoint, and the index of what is in it.
//!
//! A piece that is a whole tensor is stored under the tensor's own name and shape, so that any reader of
//! safetensors can load it; a part of one as a flat entry `name@start..end`.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::Path;

use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::{Deserialize, Serialize};

use super::header::{Header, HeaderError, read_header};
use super::manifest::{FileRecord, PieceRecord, TensorRecord};
use super::{CheckpointError, Extent};
use crate::device::DType;

/// The data begins at a multiple of it, so that a mapped file is aligned.
const ALIGNMENT: usize = 8;

/// What one rank wrote: merged into the manifest by the rank that commits.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Index {
    pub(super) file: FileRecord,
    pub(super) tensors: Vec<TensorRecord>,
}

/// Where everything will lie in a file: the header, and the order of the pieces behind it.
pub(super) struct PartLayout {
    pub(super) header: Vec<u8>,
    /// Pieces in the order of the file, by their number in what was asked for.
    pub(super) order: Vec<usize>,
    extents: Vec<Extent>,
    /// Name of the entry of each piece, in the order of the file.
    entries: Vec<String>,
}

impl PartLayout {
    /// Lays out a file with these pieces.
    pub(super) fn new(extents: &[Extent]) -> Result<Self, CheckpointError> {
        let mut order: Vec<usize> = (0..extents.len()).collect();
        // Wider elements first, so that each entry is aligned to its own; then by name, for a fixed order.
        order.sort_by_key(|&i| {
            let Extent {
                dtype, tensor, range, ..
            } = &extents[i];
            (std::cmp::Reverse(dtype.bytes()), tensor.as_str(), range.start)
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
    pub(super) fn extent(&self, position: usize) -> &Extent {
        &self.extents[self.order[position]]
    }

    /// The index, when the hash of each piece is known, in the order of the file.
    pub(super) fn index(&self, file_name: &str, hashes: &[blake3::Hash]) -> Index {
        assert_eq!(hashes.len(), self.order.len(), "a hash for each piece");
        let mut tensors: BTreeMap<&str, TensorRecord> = BTreeMap::new();
        for (position, hash) in hashes.iter().enumerate() {
            let extent = self.extent(position);
            let record = tensors.entry(&extent.tensor).or_insert_with(|| TensorRecord {
                name: extent.tensor.clone(),
                shape: extent.shape.clone(),
                dtype: extent.dtype,
                pieces: Vec::new(),
            });
            record.pieces.push(PieceRecord {
                file: file_name.to_owned(),
                entry: self.entries[position].clone(),
                start: extent.range.start,
                end: extent.range.end,
                blake3: hash.to_hex().to_string(),
            });
        }
        let data: u64 = self.extents.iter().map(Extent::bytes).sum();
        Index {
            file: FileRecord {
                name: file_name.to_owned(),
                bytes: self.header.len() as u64 + data,
            },
            tensors: tensors.into_values().collect(),
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
