//! Files of many ranks to one checkpoint, all of it or nothing.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::CheckpointError;
use super::folder::{self, LATEST, MANIFEST};
use super::manifest::{FORMAT_VERSION, Manifest, State, TensorRecord, join};
use super::part::{Extent, Index, PartWriter, write_part};
use super::reader::{Reader, Which};
use super::storage::{DiskStep, Storage, write_file};

/// A checkpoint that is being written.
///
/// Each rank that writes has one. Rank 0 prepares the folder with [`Writer::lead`], the others, before it or after it,
/// with [`Writer::follow`]. Each writes its files with [`Writer::file`]; when all have, rank 0 calls [`Writer::commit`]
/// with the names of all files. Until then nothing of it is visible. A save that failed is given up with
/// [`Writer::abort`], when nobody writes any more.
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
    /// The checkpoint after `step` finished steps. Touches nothing: [`Writer::lead`] or [`Writer::follow`] comes next.
    pub fn on(storage: Arc<dyn Storage>, out_dir: &Path, step: u64, generation: u64) -> Self {
        let root = folder::checkpoints(out_dir);
        let temporary = root.join(folder::temporary_name(step, generation));
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
        let _ = folder::delete_stale(self.storage.as_ref(), &self.root, |name, of| {
            of <= self.generation && self.temporary.file_name() != Some(name.as_ref())
        });
        Ok(())
    }

    /// Prepares the folder, on any other rank.
    pub fn follow(&self) -> Result<(), CheckpointError> {
        self.storage.run(DiskStep::CreateFolder(&self.temporary))
    }

    /// Writes one file with these extents, and its index, and puts both on the disk. `fill` is called for each extent by
    /// its number, in the order of the file, and puts its bytes, little-endian. `stem` is a name of letters, digits,
    /// dashes and underscores that no other rank uses for this checkpoint.
    pub fn file(
        &self,
        stem: &str,
        extents: &[Extent],
        fill: impl FnMut(usize, &mut PartWriter<'_>) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        if stem.is_empty()
            || !stem
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
        {
            return Err(CheckpointError::Misuse(format!(
                "`{stem}` is not a valid name for a checkpoint file"
            )));
        }
        let storage = self.storage.as_ref();
        let path = self.temporary.join(folder::data_name(stem));
        let index = write_part(storage, &path, extents, fill)?;
        let index = serde_json::to_vec(&index).map_err(|e| CheckpointError::Misuse(e.to_string()))?;
        write_file(storage, &self.temporary.join(index_name(stem)), &index)
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
            let _ = self.abort();
        }
        done
    }

    /// Gives the save up and deletes what was written.
    pub fn abort(&self) -> Result<(), CheckpointError> {
        self.storage.run(DiskStep::RemoveFolder(&self.temporary))
    }

    fn commit_inner(&self, state: &State, stems: &[impl AsRef<str>]) -> Result<PathBuf, CheckpointError> {
        let (ours, theirs) = (self.step, state.step);
        if theirs != ours {
            let what = format!("the checkpoint of step {ours} got the state of step {theirs}");
            return Err(CheckpointError::Misuse(what));
        }
        let manifest = self.merge(state, stems)?;
        let target = self.root.join(folder::step_name(self.step));
        let unread = |e| CheckpointError::io("read", &self.root.join(LATEST), &e);
        let named = folder::latest_step(&self.out_dir).map_err(unread)?;
        // Where `latest` is lost, a run goes on from the newest checkpoint: that one is needed just as much.
        let latest = match named {
            Some(step) => Some(step),
            None => folder::newest_step(&self.out_dir).map_err(unread)?,
        };
        if let Some(latest) = latest.filter(|latest| *latest > ours) {
            // `latest` never goes back: this rank has not noticed that its generation is over.
            return Err(CheckpointError::NotSaved(format!(
                "the checkpoint of step {ours} is older than the latest, of step {latest}: the job wrote that one after a later restart"
            )));
        }
        if latest == Some(self.step) && target.exists() {
            self.save_again(manifest, &target)?;
        } else {
            self.publish(&manifest, &target)?;
        }
        self.storage.run(DiskStep::SyncFolder(&self.root))?;
        self.storage.run(DiskStep::SyncFolder(&self.out_dir))?;
        if named != Some(self.step) {
            if named.is_none() {
                self.sync_above()?;
            }
            folder::point_latest(self.storage.as_ref(), &self.out_dir, self.step)?;
        }
        Ok(target)
    }

    fn merge(&self, state: &State, stems: &[impl AsRef<str>]) -> Result<Manifest, CheckpointError> {
        let mut files = Vec::new();
        let mut parts = Vec::new();
        for stem in stems {
            let path = self.temporary.join(index_name(stem.as_ref()));
            let bytes = std::fs::read(&path).map_err(|e| CheckpointError::io("read", &path, &e))?;
            let index: Index =
                serde_json::from_slice(&bytes).map_err(|e| CheckpointError::damaged(&path, e.to_string()))?;
            files.push(index.file);
            parts.extend(index.tensors);
        }
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Manifest {
            format_version: FORMAT_VERSION,
            blake3: String::new(),
            state: state.clone(),
            files,
            tensors: join(parts).map_err(CheckpointError::NotSaved)?,
        })
    }

    /// Puts the checkpoint where there is none that anybody needs.
    fn publish(&self, manifest: &Manifest, target: &Path) -> Result<(), CheckpointError> {
        let storage = self.storage.as_ref();
        write_file(storage, &self.temporary.join(MANIFEST), &manifest.to_bytes()?)?;
        // The indices, and files that an earlier attempt at the same save left.
        self.delete_others(&self.temporary, manifest, |name| name != MANIFEST)?;
        storage.run(DiskStep::SyncFolder(&self.temporary))?;
        // A run never goes on from this one: it is left of a save that crashed before its end, or was rolled back.
        storage.run(DiskStep::RemoveFolder(target))?;
        storage.run(DiskStep::Rename(&self.temporary, target))
    }

    /// A run would go on from this step already. One that was resumed at its end saves what it has read; one that went
    /// back comes with another state.
    fn save_again(&self, manifest: Manifest, target: &Path) -> Result<(), CheckpointError> {
        let is_same = |saved: &Manifest| {
            saved.state.consumed_samples == manifest.state.consumed_samples
                && content(saved) == content(&manifest)
        };
        // One that does not open is none.
        let saved = Reader::open(&self.out_dir, Which::Step(self.step));
        if !saved.is_ok_and(|saved| is_same(saved.manifest())) {
            self.replace(manifest, target)?;
        }
        // What cannot be deleted now is at the next begin.
        let _ = self.abort();
        Ok(())
    }

    /// Puts the checkpoint in the place of another, of the same step.
    ///
    /// A folder cannot be replaced by one rename everywhere, a file can. So the new files join the old ones in the
    /// folder, under names of their own, then the manifest, which says which files are the checkpoint, is replaced, and
    /// then the old files are deleted. Whatever stops this, the folder is the old checkpoint or the new one.
    fn replace(&self, mut manifest: Manifest, target: &Path) -> Result<(), CheckpointError> {
        let storage = self.storage.as_ref();
        let renamed = rename_files(&mut manifest, target)?;
        let fresh = self.temporary.join(MANIFEST);
        write_file(storage, &fresh, &manifest.to_bytes()?)?;
        let moved = renamed.iter().try_for_each(|(from, to)| {
            storage.run(DiskStep::Rename(&self.temporary.join(from), &target.join(to)))
        });
        if let Err(error) = moved.and_then(|()| storage.run(DiskStep::SyncFolder(target))) {
            for (_, name) in &renamed {
                // The error that counts is on its way; what is left goes with the next replacement.
                let _ = storage.run(DiskStep::RemoveFile(&target.join(name)));
            }
            return Err(error);
        }
        // From here on the new manifest may be what a crash leaves, and its files stay.
        storage.run(DiskStep::Rename(&fresh, &target.join(MANIFEST)))?;
        storage.run(DiskStep::SyncFolder(target))?;
        // What stays wastes room, and is in nobody's way.
        let _ = self.delete_others(target, &manifest, folder::is_data);
        Ok(())
    }

    /// Deletes what is `ours` in a folder, by its name, and no file of the manifest.
    fn delete_others(
        &self,
        folder: &Path,
        manifest: &Manifest,
        ours: impl Fn(&str) -> bool,
    ) -> Result<(), CheckpointError> {
        let named: HashSet<&str> = manifest.files.iter().map(|file| file.name.as_str()).collect();
        let mut others = folder::names(folder)?;
        others.retain(|name| ours(name) && !named.contains(name.as_str()));
        others
            .iter()
            .try_for_each(|name| self.storage.run(DiskStep::RemoveFile(&folder.join(name))))
    }

    /// Puts the names of the folders above the run's on the disk, which may be as new as the run.
    fn sync_above(&self) -> Result<(), CheckpointError> {
        for folder in self.out_dir.ancestors().skip(1) {
            let is_here = folder.as_os_str().is_empty();
            let folder = if is_here { Path::new(".") } else { folder };
            match self.storage.run(DiskStep::SyncFolder(folder)) {
                // Who may not open it has not made it; and what has no names on a disk cannot be asked to keep them.
                Err(CheckpointError::Io {
                    kind: ErrorKind::PermissionDenied | ErrorKind::InvalidInput,
                    ..
                }) => {}
                other => other?,
            }
        }
        Ok(())
    }
}

/// What a checkpoint holds, whatever its files are called.
fn content(manifest: &Manifest) -> Vec<TensorRecord> {
    let mut tensors = manifest.tensors.clone();
    for range in tensors.iter_mut().flat_map(TensorRecord::ranges_mut) {
        (range.file, range.entry) = Default::default();
    }
    tensors
}

/// Gives the files of a manifest names that are free in the folder `target`; the names before and now.
fn rename_files(manifest: &mut Manifest, target: &Path) -> Result<Vec<(String, String)>, CheckpointError> {
    let taken: HashSet<String> = folder::names(target)?.into_iter().collect();
    let is_free = |revision: &usize| {
        let mut files = manifest.files.iter();
        files.all(|file| !taken.contains(&folder::revised_name(&file.name, *revision)))
    };
    let revision = (1..=taken.len() + 1)
        .find(is_free)
        .expect("more revisions than names");
    let mut renamed = Vec::with_capacity(manifest.files.len());
    for file in &mut manifest.files {
        let name = folder::revised_name(&file.name, revision);
        renamed.push((std::mem::replace(&mut file.name, name.clone()), name));
    }
    for range in manifest.tensors.iter_mut().flat_map(TensorRecord::ranges_mut) {
        range.file = folder::revised_name(&range.file, revision);
    }
    Ok(renamed)
}

fn index_name(stem: &str) -> String {
    format!("{stem}.index.json")
}
