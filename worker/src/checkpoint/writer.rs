//! Files of many ranks to one checkpoint, all of it or nothing.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::type_and_shape;
use super::layout::{self, LATEST, MANIFEST};
use super::manifest::{FORMAT_VERSION, Manifest, RangeRecord, RegionRecord, State, TensorName, TensorRecord};
use super::part::{Index, PartWriter};
use super::reader::{Reader, Which};
use super::storage::{self, Disk, Storage};
use super::{CheckpointError, Extent, coverage};
use crate::device::DType;
use crate::model::Region;

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
    /// Files are closed without being put on the disk.
    defers_sync: bool,
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
            defers_sync: false,
        }
    }

    /// Leaves it to the caller to put the files on the disk, all at once, before [`Writer::commit`].
    pub(super) fn deferring_sync(mut self) -> Self {
        self.defers_sync = true;
        self
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

    /// Writes one file with these extents and their bytes, little-endian, and its index, and puts both on the disk.
    /// `stem` is a name of letters, digits, dashes and underscores that no other rank uses for this checkpoint.
    pub fn write(&self, stem: &str, pieces: &[(Extent, &[u8])]) -> Result<(), CheckpointError> {
        if let Some((extent, bytes)) = pieces
            .iter()
            .find(|(extent, bytes)| extent.bytes() != bytes.len() as u64)
        {
            let (tensor, range, bytes) = (&extent.tensor, &extent.range, bytes.len());
            let what = format!("elements {range:?} of tensor `{tensor}` in {bytes} bytes");
            return Err(CheckpointError::Misuse(what));
        }
        let extents: Vec<Extent> = pieces.iter().map(|(extent, _)| extent.clone()).collect();
        let mut part = self.part(stem, &extents)?;
        for index in part.order() {
            part.put(pieces[index].1)?;
        }
        self.close(stem, part)
    }

    /// Begins a file with these pieces, to be given one after the other. `stem` as in [`Writer::write`].
    pub fn part(&self, stem: &str, extents: &[Extent]) -> Result<PartWriter, CheckpointError> {
        if stem.is_empty()
            || !stem
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
        {
            return Err(CheckpointError::Misuse(format!(
                "`{stem}` is no name for a file of a checkpoint"
            )));
        }
        let path = self.temporary.join(layout::data_name(stem));
        PartWriter::create(self.storage.clone(), &path, extents)
    }

    /// Puts a file that has all its pieces, and its index, on the disk.
    pub fn close(&self, stem: &str, mut part: PartWriter) -> Result<(), CheckpointError> {
        if !self.defers_sync {
            part.sync()?;
        }
        let index = part.finish(&layout::data_name(stem))?;
        let index = serde_json::to_vec(&index).map_err(|e| CheckpointError::Misuse(e.to_string()))?;
        let (storage, path) = (self.storage.as_ref(), self.temporary.join(index_name(stem)));
        if self.defers_sync {
            let written = storage.write(&path, &[&index]);
            return written.map_err(|e| CheckpointError::io("write", &path, &e));
        }
        storage::write_file(storage, &path, &[&index])
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
        let unread = |e| CheckpointError::io("read", &self.root.join(LATEST), &e);
        let named = layout::latest_step(&self.out_dir).map_err(unread)?;
        // Where `latest` is lost, a run goes on from the newest checkpoint: that one is needed just as much.
        let latest = match named {
            Some(step) => Some(step),
            None => layout::newest_step(&self.out_dir).map_err(unread)?,
        };
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
            self.publish(&manifest, &target)?;
        }
        storage::sync_folder(self.storage.as_ref(), &self.root)?;
        storage::sync_folder(self.storage.as_ref(), &self.out_dir)?;
        if named != Some(self.step) {
            self.point_latest(named.is_none())?;
        }
        Ok(target)
    }

    /// Puts the checkpoint where there is none that anybody needs.
    fn publish(&self, manifest: &Manifest, target: &Path) -> Result<(), CheckpointError> {
        let storage = self.storage.as_ref();
        let bytes = manifest
            .to_bytes()
            .map_err(|e| CheckpointError::Misuse(e.to_string()))?;
        storage::write_file(storage, &self.temporary.join(MANIFEST), &[&bytes])?;
        self.delete_others(manifest)?;
        storage::sync_folder(storage, &self.temporary)?;
        // A run never goes on from this one: it is left of a save that crashed before its end, or was rolled back.
        storage
            .remove_folder(target)
            .map_err(|e| CheckpointError::io("delete", target, &e))?;
        storage::rename(storage, &self.temporary, target)
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

    /// A run would go on from this step already. One that was resumed at its end saves what it has read; one that went
    /// back comes with another state.
    fn save_again(&self, manifest: Manifest, target: &Path) -> Result<(), CheckpointError> {
        let content = |m: &Manifest| -> Vec<_> {
            let range = |r: &RangeRecord| (r.start..r.end, r.blake3.clone());
            let region =
                |r: &RegionRecord| (r.region.clone(), r.ranges.iter().map(range).collect::<Vec<_>>());
            let tensor = |t: &TensorRecord| {
                let regions: Vec<_> = t.regions.iter().map(region).collect();
                (t.name.clone(), t.shape.clone(), regions)
            };
            m.tensors.iter().map(tensor).collect()
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
        let mut tensors = BTreeMap::new();
        for stem in stems {
            let path = self.temporary.join(index_name(stem.as_ref()));
            let bytes = std::fs::read(&path).map_err(|e| CheckpointError::io("read", &path, &e))?;
            let index: Index =
                serde_json::from_slice(&bytes).map_err(|e| CheckpointError::damaged(&path, e.to_string()))?;
            files.push(index.file);
            index
                .tensors
                .into_iter()
                .try_for_each(|tensor| merge(&mut tensors, tensor))?;
        }
        files.sort_by(|a, b| a.name.cmp(&b.name));
        let mut tensors: Vec<TensorRecord> = tensors.into_iter().map(Merged::record).collect();
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
        let mut named: HashSet<&OsStr> = manifest.files.iter().map(|file| file.name.as_ref()).collect();
        named.insert(MANIFEST.as_ref());
        for entry in std::fs::read_dir(&self.temporary).map_err(list)? {
            let entry = entry.map_err(list)?;
            if !named.contains(entry.file_name().as_os_str()) {
                let path = entry.path();
                self.storage
                    .remove_file(&path)
                    .map_err(|e| CheckpointError::io("delete", &path, &e))?;
            }
        }
        Ok(())
    }

    /// Names the checkpoint in `latest`, when its folder has its name on the disk.
    fn point_latest(&self, is_first: bool) -> Result<(), CheckpointError> {
        if is_first {
            self.sync_above()?;
        }
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

/// What all files say of a tensor.
struct Merged {
    shape: Vec<u64>,
    dtype: DType,
    regions: BTreeMap<Region, Vec<RangeRecord>>,
}

impl Merged {
    fn record((name, merged): (TensorName, Self)) -> TensorRecord {
        let regions = merged.regions.into_iter();
        TensorRecord {
            name,
            shape: merged.shape,
            dtype: merged.dtype,
            regions: regions
                .map(|(region, ranges)| RegionRecord { region, ranges })
                .collect(),
        }
    }
}

/// Adds what one file says of a tensor.
fn merge(tensors: &mut BTreeMap<TensorName, Merged>, tensor: TensorRecord) -> Result<(), CheckpointError> {
    let known = tensors.entry(tensor.name.clone()).or_insert_with(|| Merged {
        shape: tensor.shape.clone(),
        dtype: tensor.dtype,
        regions: BTreeMap::new(),
    });
    if (known.dtype, &known.shape) != (tensor.dtype, &tensor.shape) {
        let one = type_and_shape(known.dtype, &known.shape);
        let other = type_and_shape(tensor.dtype, &tensor.shape);
        return Err(CheckpointError::Coverage {
            tensor: tensor.name.to_string(),
            what: format!("one file says {one}, another {other}"),
        });
    }
    for RegionRecord { region, ranges } in tensor.regions {
        known.regions.entry(region).or_default().extend(ranges);
    }
    Ok(())
}

fn index_name(stem: &str) -> String {
    format!("{stem}.index.json")
}

/// A whole checkpoint in a temporary folder that is to take the place of another, of the same step.
///
/// A folder cannot be replaced by one rename everywhere, a file can. So the new files join the old ones in the folder,
/// under names of their own, then the manifest, which says which files are the checkpoint, is replaced, and then the
/// old files are deleted. Whatever stops this, the folder is the old checkpoint or the new one.
struct Replacement<'a> {
    storage: &'a dyn Storage,
    /// Holds the files of `manifest`, whose content is on the disk.
    temporary: &'a Path,
    /// Folder of the checkpoint that is replaced.
    target: &'a Path,
}

impl Replacement<'_> {
    /// Puts the checkpoint in its place. On an error the folder holds the old or the new one; the temporary folder is
    /// left to the caller.
    fn put(&self, mut manifest: Manifest) -> Result<(), CheckpointError> {
        let names = self.rename_files(&mut manifest)?;
        let bytes = manifest
            .to_bytes()
            .map_err(|e| CheckpointError::Misuse(e.to_string()))?;
        let fresh = self.temporary.join(MANIFEST);
        storage::write_file(self.storage, &fresh, &[&bytes])?;
        let moved = names.iter().try_for_each(|(from, to)| {
            storage::rename(self.storage, &self.temporary.join(from), &self.target.join(to))
        });
        let ready = moved.and_then(|()| storage::sync_folder(self.storage, self.target));
        if let Err(error) = ready {
            for (_, name) in &names {
                // The error that counts is on its way; what is left goes with the next replacement.
                let _ = self.storage.remove_file(&self.target.join(name));
            }
            return Err(error);
        }
        // From here on the new manifest may be what a crash leaves, and its files stay.
        storage::rename(self.storage, &fresh, &self.target.join(MANIFEST))?;
        storage::sync_folder(self.storage, self.target)?;
        self.delete_others(&manifest);
        Ok(())
    }

    /// Gives the files names that are free in the folder; the names before and now.
    fn rename_files(&self, manifest: &mut Manifest) -> Result<Vec<(String, String)>, CheckpointError> {
        let taken = names(self.target)?;
        let is_free = |revision: &usize| {
            let mut files = manifest.files.iter();
            files.all(|file| !taken.contains(&layout::revised_name(&file.name, *revision)))
        };
        let revision = (1..=taken.len() + 1)
            .find(is_free)
            .expect("more revisions than names");
        let mut renamed = Vec::with_capacity(manifest.files.len());
        for file in &mut manifest.files {
            let name = layout::revised_name(&file.name, revision);
            renamed.push((std::mem::replace(&mut file.name, name.clone()), name));
        }
        let regions = manifest.tensors.iter_mut().flat_map(|tensor| &mut tensor.regions);
        for range in regions.flat_map(|region| &mut region.ranges) {
            range.file = layout::revised_name(&range.file, revision);
        }
        Ok(renamed)
    }

    /// Deletes files of tensors that the manifest does not name. One that stays wastes room, and is in nobody's way.
    fn delete_others(&self, manifest: &Manifest) {
        let Ok(mut found) = names(self.target) else {
            return;
        };
        found.retain(|name| layout::is_data(name) && manifest.files.iter().all(|file| file.name != *name));
        for name in found {
            let _ = self.storage.remove_file(&self.target.join(name));
        }
    }
}

fn names(folder: &Path) -> Result<HashSet<String>, CheckpointError> {
    let list = |e: std::io::Error| CheckpointError::io("list", folder, &e);
    let entries = std::fs::read_dir(folder).map_err(list)?;
    let names: Result<HashSet<_>, _> = entries
        .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()))
        .collect();
    names.map_err(list)
}
