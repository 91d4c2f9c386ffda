//! Pieces of many ranks to one checkpoint, all of it or nothing.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::layout::{self, LATEST, MANIFEST};
use super::manifest::{FORMAT_VERSION, Manifest, State, TensorRecord};
use super::part::Index;
use super::part_writer::PartWriter;
use super::reader::{Reader, Which};
use super::replacement::Replacement;
use super::storage::{self, Disk, Storage};
use super::{CheckpointError, Extent, coverage};
use crate::device::DType;

/// A range of a tensor's elements, to be written.
#[derive(Clone, Debug)]
pub struct Piece<'a> {
    /// Name of the tensor.
    pub tensor: &'a str,
    /// Its global shape.
    pub shape: &'a [u64],
    /// Type of its elements.
    pub dtype: DType,
    /// Elements that these are, in row-major order of the whole tensor.
    pub range: Range<u64>,
    /// The elements, little-endian.
    pub bytes: &'a [u8],
}

impl Piece<'_> {
    fn extent(&self) -> Result<Extent, CheckpointError> {
        let extent = Extent {
            tensor: self.tensor.to_owned(),
            shape: self.shape.to_vec(),
            dtype: self.dtype,
            range: self.range.clone(),
        };
        if extent.bytes() == self.bytes.len() as u64 {
            return Ok(extent);
        }
        let Range { start, end } = self.range;
        Err(CheckpointError::Misuse(format!(
            "elements {start}..{end} of tensor `{}` in {} bytes",
            self.tensor,
            self.bytes.len()
        )))
    }
}

/// A checkpoint that is being written.
///
/// Each rank that writes has one: rank 0 from [`Writer::begin`], the others, before it or after it, from
/// [`Writer::join`]. Each writes its files ([`Writer::write`], or [`Writer::part`] and [`Writer::close`]); when all
/// have, rank 0 calls [`Writer::commit`] with the names of all files. Until then nothing of it is visible. A save that
/// failed is given up with [`Writer::abort`], when nobody writes any more.
pub struct Writer {
    storage: Arc<dyn Storage>,
    /// `<out_dir>/checkpoints`
    root: PathBuf,
    out_dir: PathBuf,
    temporary: PathBuf,
    step: u64,
    generation: u64,
}

impl Writer {
    /// Begins the checkpoint after `step` finished steps, on the rank that will commit it.
    pub fn begin(out_dir: &Path, step: u64, generation: u64) -> Result<Self, CheckpointError> {
        let writer = Self::on(Arc::new(Disk), out_dir, step, generation);
        writer.lead()?;
        Ok(writer)
    }

    /// Joins a checkpoint that rank 0 of the same generation begins, before this or after it.
    pub fn join(out_dir: &Path, step: u64, generation: u64) -> Result<Self, CheckpointError> {
        let writer = Self::on(Arc::new(Disk), out_dir, step, generation);
        writer.follow()?;
        Ok(writer)
    }

    /// On any storage. Touches nothing: [`Writer::lead`] or [`Writer::follow`] comes next.
    #[must_use]
    pub fn on(storage: Arc<dyn Storage>, out_dir: &Path, step: u64, generation: u64) -> Self {
        let root = layout::folder(out_dir);
        let temporary = root.join(layout::temporary_name(step, generation));
        Self {
            storage,
            root,
            out_dir: out_dir.to_owned(),
            temporary,
            step,
            generation,
        }
    }

    /// Prepares the folder, on the rank that will commit. Deletes what saves of this generation and those before it
    /// left behind; never what a later one is writing, since this rank may not yet have noticed its own end.
    pub fn lead(&self) -> Result<(), CheckpointError> {
        self.follow()?;
        // What cannot be deleted wastes room, and is in nobody's way.
        let _ = delete_stale(self.storage.as_ref(), &self.root, |name, of| {
            of <= self.generation && self.temporary.file_name() != Some(name.as_ref())
        });
        Ok(())
    }

    /// Prepares the folder, on any other rank.
    pub fn follow(&self) -> Result<(), CheckpointError> {
        self.storage
            .create_folder(&self.temporary)
            .map_err(|e| CheckpointError::io("create", &self.temporary, &e))
    }

    /// Writes one file with these pieces, and its index, and puts both on the disk. `stem` is a name of
    /// letters, digits and dashes that no other rank uses for this checkpoint.
    pub fn write(&self, stem: &str, pieces: &[Piece<'_>]) -> Result<(), CheckpointError> {
        let extents = pieces.iter().map(Piece::extent).collect::<Result<Vec<_>, _>>()?;
        let mut part = self.part(stem, &extents)?;
        for index in part.order() {
            part.put(pieces[index].bytes)?;
        }
        self.close(stem, part)
    }

    /// Begins a file with these pieces, to be given one after the other. `stem` as in [`Writer::write`].
    pub fn part(&self, stem: &str, extents: &[Extent]) -> Result<PartWriter, CheckpointError> {
        if stem.is_empty() || !stem.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-') {
            return Err(CheckpointError::Misuse(format!(
                "`{stem}` is no name for a file of a checkpoint"
            )));
        }
        let path = self.temporary.join(layout::data_name(stem));
        PartWriter::create(self.storage.clone(), &path, extents)
    }

    /// Puts a file that has all its pieces, and its index, on the disk.
    pub fn close(&self, stem: &str, part: PartWriter) -> Result<(), CheckpointError> {
        let index = part.finish(&layout::data_name(stem))?;
        let index = serde_json::to_vec(&index).map_err(|e| CheckpointError::Misuse(e.to_string()))?;
        storage::write_file(
            self.storage.as_ref(),
            &self.temporary.join(index_name(stem)),
            &[&index],
        )
    }

    /// Makes the checkpoint whole and visible: merges the indices of the files `stems`, checks that they make
    /// up every tensor, writes the manifest, and names the checkpoint in `latest`, last of all. Only the rank
    /// that began it calls this, when all ranks have written.
    ///
    /// On an error `latest` still names the checkpoint before. Returns the folder.
    pub fn commit(&self, state: &State, stems: &[impl AsRef<str>]) -> Result<PathBuf, CheckpointError> {
        let done = self.commit_inner(state, stems);
        if done.is_err() {
            // The error that counts is on its way; what cannot be deleted now is at the next begin.
            let _ = self.storage.remove_folder(&self.temporary);
        }
        done
    }

    /// Gives the save up and deletes what was written.
    pub fn abort(&self) -> Result<(), CheckpointError> {
        let path = &self.temporary;
        self.storage
            .remove_folder(path)
            .map_err(|e| CheckpointError::io("delete", path, &e))
    }

    fn commit_inner(&self, state: &State, stems: &[impl AsRef<str>]) -> Result<PathBuf, CheckpointError> {
        if state.step != self.step {
            let (ours, theirs) = (self.step, state.step);
            return Err(CheckpointError::Misuse(format!(
                "the checkpoint of step {ours} got the state of step {theirs}"
            )));
        }
        let manifest = self.merge(state, stems)?;
        let target = self.root.join(layout::step_name(self.step));
        let latest = layout::latest_step(&self.out_dir)
            .map_err(|e| CheckpointError::io("read", &self.root.join(LATEST), &e))?;
        if let Some(latest) = latest.filter(|latest| *latest > self.step) {
            // `latest` never goes back: this rank has not noticed that its generation is over.
            return Err(CheckpointError::Overtaken {
                step: self.step,
                latest,
            });
        }
        if latest == Some(self.step) && target.exists() {
            self.save_again(manifest, &target)?;
        } else {
            self.publish(&manifest, &target, latest.is_none())?;
        }
        Ok(target)
    }

    /// Puts the checkpoint where there is none that anybody needs, and names it in `latest`.
    fn publish(&self, manifest: &Manifest, target: &Path, is_first: bool) -> Result<(), CheckpointError> {
        let storage = self.storage.as_ref();
        let bytes = manifest
            .to_bytes()
            .map_err(|e| CheckpointError::Misuse(e.to_string()))?;
        storage::write_file(storage, &self.temporary.join(MANIFEST), &[&bytes])?;
        self.delete_others(manifest)?;
        storage::sync_folder(storage, &self.temporary)?;
        // What `latest` does not name is left of a save that crashed before its end, or was rolled back.
        storage
            .remove_folder(target)
            .map_err(|e| CheckpointError::io("delete", target, &e))?;
        storage::rename(storage, &self.temporary, target)?;
        storage::sync_folder(storage, &self.root)?;
        storage::sync_folder(storage, &self.out_dir)?;
        if is_first {
            self.sync_above()?;
        }
        self.point_latest()
    }

    /// Puts the names of the folders above the run's on the disk, which may be as new as the run.
    fn sync_above(&self) -> Result<(), CheckpointError> {
        for folder in self.out_dir.ancestors().skip(1) {
            let is_here = folder.as_os_str().is_empty();
            let folder = if is_here { Path::new(".") } else { folder };
            match self.storage.sync_folder(folder) {
                // Who may not open it has not made it; and what has no names on a disk cannot be told to keep them.
                Err(e) if matches!(e.kind(), ErrorKind::PermissionDenied | ErrorKind::InvalidInput) => {}
                other => other.map_err(|e| CheckpointError::io("sync", folder, &e))?,
            }
        }
        Ok(())
    }

    /// `latest` names this step already. A run that was resumed at its end saves what it has read; one that went back
    /// comes with another state.
    fn save_again(&self, manifest: Manifest, target: &Path) -> Result<(), CheckpointError> {
        let content = |m: &Manifest| -> Vec<_> {
            let pieces = |t: &TensorRecord| t.pieces.iter().map(|p| p.blake3.clone()).collect::<Vec<_>>();
            m.tensors
                .iter()
                .map(|t| (t.name.clone(), t.shape.clone(), pieces(t)))
                .collect()
        };
        let is_same = |saved: &Manifest| {
            saved.state.consumed_samples == manifest.state.consumed_samples
                && content(saved) == content(&manifest)
        };
        // One that does not open is none.
        let saved = Reader::open(&self.out_dir, Which::Step(self.step));
        if !saved.is_ok_and(|saved| is_same(saved.manifest())) {
            let replacement = Replacement {
                storage: self.storage.as_ref(),
                temporary: &self.temporary,
                target,
            };
            replacement.put(manifest)?;
        }
        // What cannot be deleted now is at the next begin.
        let _ = self.abort();
        Ok(())
    }

    fn merge(&self, state: &State, stems: &[impl AsRef<str>]) -> Result<Manifest, CheckpointError> {
        let mut files = Vec::new();
        let mut tensors: BTreeMap<String, TensorRecord> = BTreeMap::new();
        for stem in stems {
            let path = self.temporary.join(index_name(stem.as_ref()));
            let bytes = std::fs::read(&path).map_err(|e| CheckpointError::io("read", &path, &e))?;
            let index: Index =
                serde_json::from_slice(&bytes).map_err(|e| CheckpointError::damaged(&path, e.to_string()))?;
            files.push(index.file);
            for tensor in index.tensors {
                merge_tensor(&mut tensors, tensor)?;
            }
        }
        files.sort_by(|a, b| a.name.cmp(&b.name));
        let mut tensors: Vec<TensorRecord> = tensors.into_values().collect();
        tensors.iter_mut().try_for_each(coverage::check)?;
        Ok(Manifest {
            format_version: FORMAT_VERSION,
            blake3: String::new(),
            state: state.clone(),
            files,
            tensors,
        })
    }

    /// Deletes the indices, and files that an earlier attempt at the same save left: what is not in the
    /// manifest is not in the checkpoint.
    fn delete_others(&self, manifest: &Manifest) -> Result<(), CheckpointError> {
        let list = |e: std::io::Error| CheckpointError::io("list", &self.temporary, &e);
        for entry in std::fs::read_dir(&self.temporary).map_err(list)? {
            let entry = entry.map_err(list)?;
            let name = entry.file_name();
            let belongs = name == MANIFEST || manifest.files.iter().any(|f| name == f.name.as_str());
            if !belongs {
                let path = entry.path();
                self.storage
                    .remove_file(&path)
                    .map_err(|e| CheckpointError::io("delete", &path, &e))?;
            }
        }
        Ok(())
    }

    fn point_latest(&self) -> Result<(), CheckpointError> {
        let temporary = self.root.join(layout::LATEST_TEMPORARY);
        let name = format!("{}\n", layout::step_name(self.step));
        let storage = self.storage.as_ref();
        let pointed = storage::write_file(storage, &temporary, &[name.as_bytes()])
            .and_then(|()| storage::rename(storage, &temporary, &self.root.join(LATEST)));
        if pointed.is_err() {
            // The error that counts is on its way; what is left is overwritten the next time.
            let _ = storage.remove_file(&temporary);
        }
        pointed?;
        storage::sync_folder(storage, &self.root)
    }
}

/// Deletes all saves below the folder of a run that never ended, whatever their generation: for a job that
/// begins, before it writes.
pub fn delete_unfinished(out_dir: &Path) -> Result<(), CheckpointError> {
    let root = layout::folder(out_dir);
    if root.is_dir() {
        delete_stale(&Disk, &root, |_, _| true)
    } else {
        Ok(())
    }
}

/// Deletes the temporary folders for whose name and generation `stale` says so.
fn delete_stale(
    storage: &dyn Storage,
    root: &Path,
    stale: impl Fn(&str, u64) -> bool,
) -> Result<(), CheckpointError> {
    let list = |e: std::io::Error| CheckpointError::io("list", root, &e);
    for entry in std::fs::read_dir(root).map_err(list)? {
        let entry = entry.map_err(list)?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else {
            continue;
        };
        if layout::generation_of_temporary(name).is_some_and(|generation| stale(name, generation)) {
            let path = entry.path();
            storage
                .remove_folder(&path)
                .map_err(|e| CheckpointError::io("delete", &path, &e))?;
        }
    }
    Ok(())
}

fn merge_tensor(
    tensors: &mut BTreeMap<String, TensorRecord>,
    tensor: TensorRecord,
) -> Result<(), CheckpointError> {
    let Some(known) = tensors.get_mut(&tensor.name) else {
        tensors.insert(tensor.name.clone(), tensor);
        return Ok(());
    };
    if (known.dtype, &known.shape) != (tensor.dtype, &tensor.shape) {
        let words = |t: &TensorRecord| super::error::type_and_shape(t.dtype, &t.shape);
        return Err(CheckpointError::Coverage {
            tensor: tensor.name.clone(),
            what: format!("one file says {}, another {}", words(known), words(&tensor)),
        });
    }
    known.pieces.extend(tensor.pieces);
    Ok(())
}

fn index_name(stem: &str) -> String {
    format!("{stem}.index.json")
}
