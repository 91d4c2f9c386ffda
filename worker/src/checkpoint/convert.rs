//! A checkpoint in other files: the same state for another number of ranks, or one file for other tools with the parameters
//! under their published names and a configuration beside it.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{File, TryLockError};
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::CheckpointError;
use super::folder::{self, file_stem};
use super::manifest::TensorKind;
use super::part::{Extent, PartWriter, share_of, write_part};
use super::reader::Reader;
use super::storage::{DiskStep, Storage, write_file};
use super::writer::Writer;
use crate::model::{Decoder, Published, Region};

/// Name of the file with the parameters, as other tools expect it.
const MODEL: &str = "model.safetensors";
/// Name of the configuration, as other tools expect it.
const CONFIG: &str = "config.json";

/// Writes the parameters of a checkpoint as one `model.safetensors`, with a `config.json`, to the new folder
/// `target`, which appears when it is whole. GPT-2 and Llama have the names, shapes and settings of Hugging Face
/// ([`Published`]); [`crate::pretrained`] reads them back. Memory is bounded by a few megabytes; every hash is checked on
/// the way.
pub fn export(storage: &Arc<dyn Storage>, source: &Reader, target: &Path) -> Result<(), CheckpointError> {
    if target.symlink_metadata().is_ok() {
        return Err(CheckpointError::Occupied {
            path: target.to_owned(),
        });
    }
    source.check_model()?;
    let temporary = beside(target)?;
    storage.run(DiskStep::CreateFolder(&temporary))?;
    let _held = hold(&temporary)?;
    let written = export_to(storage.as_ref(), source, &temporary).and_then(|()| {
        storage.run(DiskStep::SyncFolder(&temporary))?;
        storage.run(DiskStep::Rename(&temporary, target))?;
        storage.run(DiskStep::SyncFolder(parent(target)))
    });
    if written.is_err() {
        // The error that counts is on its way; a left-over is used by the next export.
        let _ = storage.run(DiskStep::RemoveFolder(&temporary));
    }
    written
}

/// Keeps other exports out of a folder, perhaps the left-over of one that crashed, until what is returned is dropped.
fn hold(folder: &Path) -> Result<File, CheckpointError> {
    let failed = |e: io::Error| CheckpointError::io("lock", folder, &e);
    let file = File::open(folder).map_err(failed)?;
    let is_ours = match file.try_lock() {
        // The process that held the lock may have renamed or deleted the folder in between.
        Ok(()) => {
            let ours = file.metadata().map_err(failed)?;
            folder
                .metadata()
                .is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino()))
        }
        Err(TryLockError::WouldBlock) => false,
        Err(TryLockError::Error(e)) => return Err(failed(e)),
    };
    if is_ours {
        return Ok(file);
    }
    let message = format!("`{}` is being written by another export", folder.display());
    Err(CheckpointError::NotSaved(message))
}

fn export_to(storage: &dyn Storage, source: &Reader, folder: &Path) -> Result<(), CheckpointError> {
    let model = source.model_config()?;
    let (published, decoder) = (Published::of(model.kind), Decoder::of(&model));
    let (mut files, mut sources) = (Vec::new(), Vec::new());
    for parameter in whole_tensors(source, &TensorKind::Parameter) {
        let shape: Vec<usize> = parameter.shape.iter().map(|len| *len as usize).collect();
        for tensor in published.tensors(&decoder, &parameter.tensor.key, &shape) {
            let shape: Vec<u64> = tensor.shape.iter().map(|len| *len as u64).collect();
            let Range { start, end } = tensor.elements;
            files.push(Extent {
                tensor: TensorKind::Parameter.of(&published.name_in_file(&tensor.name, &decoder)),
                region: Region::whole(&shape),
                range: 0..(end - start) as u64,
                dtype: parameter.dtype,
                shape,
            });
            sources.push(Extent {
                range: start as u64..end as u64,
                ..parameter.clone()
            });
        }
    }
    let fill = |index: usize, part: &mut PartWriter<'_>| copy(source, &sources[index], part);
    write_part((storage, &folder.join(MODEL), true), &files, fill)?;
    let settings = published.settings(&model, model.vocab_size.unwrap_or_default());
    write_file(
        storage,
        &folder.join(CONFIG),
        format!("{settings:#}\n").as_bytes(),
    )
}

/// A hidden folder in the same file system.
fn beside(target: &Path) -> Result<PathBuf, CheckpointError> {
    let Some(name) = target.file_name() else {
        return Err(CheckpointError::Misuse(format!(
            "`{}` is not a valid directory name",
            target.display()
        )));
    };
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(".exporting");
    Ok(parent(target).join(hidden))
}

fn parent(target: &Path) -> &Path {
    match target.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Bytes of a tensor that are in memory at once.
const CHUNK_BYTES: u64 = 4 << 20;

/// Rewrites the checkpoint `source`, whatever its regions, as `ranks` ranks that cut nothing would write it, with
/// files of equal size, as the only checkpoint of the run folder `out_dir`, which may not hold one yet. Memory is
/// bounded, whatever the size of the state; every hash is checked on the way. Returns the folder of the checkpoint.
pub fn reshard(
    storage: &Arc<dyn Storage>,
    source: &Reader,
    out_dir: &Path,
    ranks: usize,
) -> Result<PathBuf, CheckpointError> {
    let root = folder::checkpoints(out_dir);
    folder::refuse_checkpoints(&root)?;
    let state = &source.manifest().state;
    source.check_model()?;
    // One wait for the disk, not one for each of thousands of small files.
    let writer = Writer::on(storage.clone(), out_dir, state.step, 0).deferring_sync();
    writer.lead()?;
    // Before the first write: what fails from then on is reported to it.
    let opened = File::open(&root).map_err(|e| CheckpointError::io("sync", &root, &e))?;
    let written = write_resharded(&writer, source, ranks).and_then(|stems| {
        storage.run(DiskStep::SyncFileSystem(&root, &opened))?;
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

/// All files of all ranks. Returns their names.
fn write_resharded(writer: &Writer, source: &Reader, ranks: usize) -> Result<Vec<String>, CheckpointError> {
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
            writer.file(&stem, &own, |index, part| copy(source, &own[index], part))?;
            stems.push(stem);
        }
    }
    Ok(stems)
}

/// Every tensor of a kind, from its first element to its last, as one region.
fn whole_tensors(source: &Reader, kind: &TensorKind) -> Vec<Extent> {
    let tensors = source.manifest().tensors.iter();
    tensors
        .filter(|tensor| tensor.name.kind == *kind)
        .map(|tensor| {
            // Opening the checkpoint has counted them.
            let all = 0..tensor.elements().unwrap_or(0);
            Extent::of(tensor, Region::whole(&tensor.shape), all)
        })
        .collect()
}

/// Copies an extent to a file.
fn copy(source: &Reader, extent: &Extent, part: &mut PartWriter<'_>) -> Result<(), CheckpointError> {
    let Range { start, end } = extent.range;
    let step = CHUNK_BYTES / extent.dtype.bytes() as u64;
    for first in (start..end).step_by(step as usize) {
        let range = first..end.min(first + step);
        part.put(&source.read(&extent.tensor, &extent.region, range)?)?;
    }
    Ok(())
}
