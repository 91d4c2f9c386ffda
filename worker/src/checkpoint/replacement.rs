//! The latest checkpoint saved once more with another content: a run that went back and came to the same step again.
//!
//! A folder cannot be replaced by one rename everywhere, a file can. So the new files join the old ones in the folder,
//! under names of their own, then the manifest, which says which files are the checkpoint, is replaced, and then the
//! old files go. Whatever stops this, the folder is the old checkpoint or the new one.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use super::CheckpointError;
use super::layout::{self, MANIFEST};
use super::manifest::Manifest;
use super::storage::{self, Storage};

/// A whole checkpoint in a temporary folder that is to take the place of another.
pub(super) struct Replacement<'a> {
    pub(super) storage: &'a dyn Storage,
    /// Holds the files of `manifest`, whose content is on the disk.
    pub(super) temporary: &'a Path,
    /// Folder of the checkpoint that is replaced.
    pub(super) target: &'a Path,
}

impl Replacement<'_> {
    /// Puts the checkpoint in its place. On an error the folder holds the old or the new one; the temporary folder is
    /// left to the caller.
    pub(super) fn put(&self, mut manifest: Manifest) -> Result<(), CheckpointError> {
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
        for piece in manifest.tensors.iter_mut().flat_map(|tensor| &mut tensor.pieces) {
            piece.file = layout::revised_name(&piece.file, revision);
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
    let entries = fs::read_dir(folder).map_err(list)?;
    let names: Result<HashSet<_>, _> = entries
        .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()))
        .collect();
    names.map_err(list)
}
