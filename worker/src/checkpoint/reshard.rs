//! The same state in files for another number of ranks.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::layout::{self, Kind, LATEST};
use super::{CheckpointError, Extent, PartWriter, Reader, Storage, Writer, file_stem, share_of};

/// Bytes of a tensor that are in memory at once.
const CHUNK_BYTES: u64 = 4 << 20;

/// Rewrites the checkpoint `source` as `ranks` ranks would write it, with files of equal size, as the only
/// checkpoint of the run folder `out_dir`, which may not hold one yet. Memory is bounded, whatever the size of the
/// state; every hash is checked on the way. Returns the folder of the checkpoint.
pub fn reshard(
    storage: &Arc<dyn Storage>,
    source: &Reader,
    out_dir: &Path,
    ranks: usize,
) -> Result<PathBuf, CheckpointError> {
    let latest = layout::folder(out_dir).join(LATEST);
    if latest.exists() {
        return Err(CheckpointError::Occupied { path: latest });
    }
    let state = &source.manifest().state;
    let writer = Writer::on(storage.clone(), out_dir, state.step, 0);
    writer.lead()?;
    match write(&writer, source, ranks) {
        Ok(stems) => writer.commit(state, &stems),
        Err(error) => {
            // The error that counts is on its way; what is left is no checkpoint.
            let _ = writer.abort();
            Err(error)
        }
    }
}

/// All files of all ranks. Returns their names.
fn write(writer: &Writer, source: &Reader, ranks: usize) -> Result<Vec<String>, CheckpointError> {
    let mut stems = Vec::new();
    for kind in Kind::ALL {
        let whole = whole_tensors(source, kind);
        let ranges: Vec<_> = whole.iter().map(|extent| extent.range.clone()).collect();
        for rank in 0..ranks {
            let own: Vec<Extent> = share_of(&ranges, rank, ranks)
                .into_iter()
                .map(|(tensor, range)| Extent {
                    range,
                    ..whole[tensor].clone()
                })
                .collect();
            let stem = file_stem(kind, rank, ranks);
            let mut part = writer.part(&stem, &own)?;
            copy(source, &own, &mut part)?;
            writer.close(&stem, part)?;
            stems.push(stem);
        }
    }
    Ok(stems)
}

/// Every tensor of a kind, from its first element to its last.
pub(super) fn whole_tensors(source: &Reader, kind: Kind) -> Vec<Extent> {
    let tensors = source.manifest().tensors.iter();
    tensors
        .filter(|tensor| Kind::of(&tensor.name) == kind)
        .map(|tensor| Extent {
            tensor: tensor.name.clone(),
            shape: tensor.shape.clone(),
            dtype: tensor.dtype,
            // Opening the checkpoint has counted them.
            range: 0..tensor.elements().unwrap_or(0),
        })
        .collect()
}

/// Fills a file that was begun with `extents`.
pub(super) fn copy(
    source: &Reader,
    extents: &[Extent],
    part: &mut PartWriter,
) -> Result<(), CheckpointError> {
    for index in part.order() {
        let Extent {
            tensor, dtype, range, ..
        } = &extents[index];
        let step = CHUNK_BYTES / dtype.bytes() as u64;
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min(start + step);
            part.put(&source.read(tensor, start..end)?)?;
            start = end;
        }
    }
    Ok(())
}
