//! Files of many ranks to one checkpoint, all of it or nothing.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::CheckpointError;
use super::folder::{self, LATEST, MANIFEST};
use super::manifest::{FORMAT_VERSION, Manifest, State, join};
use super::part::{Extent, Index, PartWriter, write_part};
use super::reader::{Reader, Which};
use super::storage::{DiskStep, Storage, write_file};

/// A checkpoint that is being written.
///
/// Each rank that writes has one. Rank 0 prepares the folder with [`Writer::lead`], the others, before it or after it,
/// with [`Writer::follow`]. Each writes its files with [`Writer::file`]; when all have, rank 0 calls [`Writer::commit`]
/// with the names of all files. Until then nothing of it is visible. A save that failed is given up with
/// [`Writer::abort`], when all ranks have stopped writing.
pub struct Writer {
    storage: Arc<dyn Storage>,
    /// `<out_dir>/checkpoints`
    root: PathBuf,
    out_dir: PathBuf,
    temporary: PathBuf,
    step: u64,
    generation: u64,
    fence: Option<Fence>,
}

/// The file with which the last process to take a run's folder has named itself.
#[derive(Clone, Debug)]
pub struct Fence {
    path: PathBuf,
    announced: String,
}

impl Fence {
    /// This process has written `announced` to the file.
    pub fn new(path: PathBuf, announced: String) -> Self {
        Self { path, announced }
    }

    /// An error if another process has named itself since.
    pub fn check(&self) -> Result<(), CheckpointError> {
        let found =
            std::fs::read_to_string(&self.path).map_err(|e| CheckpointError::io("read", &self.path, &e))?;
        if found == self.announced {
            return Ok(());
        }
        Err(CheckpointError::NotSaved(format!(
            "another process has taken the directory of the run, as `{}` says: the job was restarted meanwhile",
            self.path.display()
        )))
    }
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
            fence: None,
        }
    }

    /// The checkpoint is only committed while no later process has taken the folder of the run.
    #[must_use]
    pub fn fenced(self, fence: Option<Fence>) -> Self {
        Self { fence, ..self }
    }

    /// Prepares the folder, on the rank that will commit. Deletes what saves of this generation and those before it
    /// left behind; never what a later one is writing, since this rank may not yet have noticed its own end.
    pub fn lead(&self) -> Result<(), CheckpointError> {
        self.follow()?;
        // What cannot be deleted only wastes room.
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
        self.check_fence()?;
        if let Some(latest) = latest.filter(|latest| *latest > ours && self.fence.is_none()) {
            // `latest` never goes back: this rank has not noticed that its generation is over.
            return Err(CheckpointError::NotSaved(format!(
                "the checkpoint of step {ours} is older than the latest, of step {latest}: the job wrote that one after a later restart"
            )));
        }
        if latest == Some(self.step) && Reader::open(&self.out_dir, Which::Step(self.step)).is_ok() {
            // The run was resumed at its end, or two lives of it reached this step: the state is saved already.
            // The next save deletes what cannot be deleted now.
            let _ = self.abort();
        } else {
            self.publish(&manifest, &target)?;
        }
        self.storage.run(DiskStep::SyncFolder(&self.root))?;
        self.storage.run(DiskStep::SyncFolder(&self.out_dir))?;
        if named != Some(self.step) {
            if named.is_none() {
                self.sync_above()?;
            }
            self.check_fence()?;
            folder::point_latest(self.storage.as_ref(), &self.out_dir, self.step)?;
        }
        Ok(target)
    }

    fn check_fence(&self) -> Result<(), CheckpointError> {
        self.fence.as_ref().map_or(Ok(()), Fence::check)
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

    /// Puts the checkpoint in its place, in which no run needs a checkpoint.
    fn publish(&self, manifest: &Manifest, target: &Path) -> Result<(), CheckpointError> {
        let storage = self.storage.as_ref();
        write_file(storage, &self.temporary.join(MANIFEST), &manifest.to_bytes()?)?;
        // The indices, and files that an earlier attempt at the same save left.
        let named: HashSet<&str> = manifest.files.iter().map(|file| file.name.as_str()).collect();
        for name in folder::names(&self.temporary)? {
            if name != MANIFEST && !named.contains(name.as_str()) {
                storage.run(DiskStep::RemoveFile(&self.temporary.join(name)))?;
            }
        }
        storage.run(DiskStep::SyncFolder(&self.temporary))?;
        // A run never goes on from this one: it is left of a save that crashed before its end, or was rolled back.
        storage.run(DiskStep::RemoveFolder(target))?;
        storage.run(DiskStep::Rename(&self.temporary, target))
    }

    /// Puts the names of the folders above the run's on the disk, which may be as new as the run.
    fn sync_above(&self) -> Result<(), CheckpointError> {
        for folder in self.out_dir.ancestors().skip(1) {
            let folder = ddp_proto::paths::or_here(folder);
            match self.storage.run(DiskStep::SyncFolder(folder)) {
                // We did not create a folder that we may not open; and what has no names on a disk cannot be asked to keep
                // them.
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

fn index_name(stem: &str) -> String {
    format!("{stem}.index.json")
}
