//! The same state in files for another number of ranks.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::layout::{self, LATEST};
use super::manifest::TensorKind;
use super::{CheckpointError, Extent, PartWriter, Reader, Storage, Writer, file_stem, share_of};
use crate::model::Region;

/// Bytes of a tensor that are in memory at once.
const CHUNK_BYTES: u64 = 4 << 20;

/// Rewrites the checkpoint `source`, whatever its regions, as `ranks` ranks that cut nothing would write it, with files of
/// equal size, as the only checkpoint of the run folder `out_dir`, which may not hold one yet. Memory is bounded, whatever the size of the
/// state; every hash is checked on the way. Returns the folder of the checkpoint.
pub fn reshard(
    storage: &Arc<dyn Storage>,
    source: &Reader,
    out_dir: &Path,
    ranks: usize,
) -> Result<PathBuf, CheckpointError> {
    let root = layout::folder(out_dir);
    refuse_checkpoints(&root)?;
    let state = &source.manifest().state;
    source.check_model()?;
    // One wait for the disk, not one for each of thousands of small files.
    let writer = Writer::on(storage.clone(), out_dir, state.step, 0).deferring_sync();
    writer.lead()?;
    let failed = |e: io::Error| CheckpointError::io("sync", &root, &e);
    // Before the first write: what fails from then on is told to it.
    let opened = File::open(&root).map_err(failed)?;
    let written = write(&writer, source, ranks).and_then(|stems| {
        storage.sync_file_system(&opened).map_err(failed)?;
        Ok(stems)
    });
    match written {
        Ok(stems) => writer.commit(state, &stems),
        Err(error) => {
            // The error that counts is on its way; what is left is no checkpoint.
            let _ = writer.abort();
            Err(error)
        }
    }
}

/// An error if there is any checkpoint below `root`, also one that `latest` does not name.
fn refuse_checkpoints(root: &Path) -> Result<(), CheckpointError> {
    let latest = root.join(LATEST);
    let steps = match layout::saved_steps(root) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
        steps => steps.map_err(|e| CheckpointError::io("list", root, &e))?,
    };
    let newest = steps.last().map(|step| root.join(layout::step_name(*step)));
    match newest.or_else(|| latest.exists().then_some(latest)) {
        Some(path) => Err(CheckpointError::Occupied { path }),
        None => Ok(()),
    }
}

/// All files of all ranks. Returns their names.
fn write(writer: &Writer, source: &Reader, ranks: usize) -> Result<Vec<String>, CheckpointError> {
    let mut stems = Vec::new();
    let kinds: BTreeSet<&TensorKind> = source.manifest().tensors.iter().map(|t| &t.name.kind).collect();
    for kind in kinds {
        let whole = whole_tensors(source, kind);
        if whole.is_empty() {
            continue;
        }
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

/// Every tensor of a kind, from its first element to its last, as one region.
pub(super) fn whole_tensors(source: &Reader, kind: &TensorKind) -> Vec<Extent> {
    let tensors = source.manifest().tensors.iter();
    tensors
        .filter(|tensor| tensor.name.kind == *kind)
        .map(|tensor| Extent {
            tensor: tensor.name.clone(),
            shape: tensor.shape.clone(),
            dtype: tensor.dtype,
            region: Region::whole(&tensor.shape),
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
            tensor,
            dtype,
            region,
            range,
            ..
        } = &extents[index];
        let step = CHUNK_BYTES / dtype.bytes() as u64;
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min(start + step);
            part.put(&source.read(tensor, region, start..end)?)?;
            start = end;
        }
    }
    Ok(())
}
