//! Storage that notes what it is asked to do, so that a save that hangs can say where.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::checkpoint::Storage;

/// What a save is asking of its storage now.
pub(super) struct Notes(Mutex<Note>);

struct Note {
    /// The operation that has not returned, in words, and its path.
    doing: Option<(&'static str, PathBuf)>,
    /// When the storage last took something, or was asked to.
    moved: Instant,
}

/// The storage of a save, with notes.
pub(super) struct NotedStorage {
    pub(super) storage: Arc<dyn Storage>,
    pub(super) notes: Arc<Notes>,
}

impl Notes {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Note {
            doing: None,
            moved: Instant::now(),
        }))
    }

    /// Notes that the save goes on, unless it waits for the storage.
    pub(super) fn moved(&self) {
        let mut note = self.note();
        if note.doing.is_none() {
            note.moved = Instant::now();
        }
    }

    /// Time since the storage last took something, or was asked to.
    pub(super) fn silence(&self) -> Duration {
        self.note().moved.elapsed()
    }

    /// The operation that has not returned.
    pub(super) fn doing(&self) -> Option<(&'static str, PathBuf)> {
        self.note().doing.clone()
    }

    fn note(&self) -> MutexGuard<'_, Note> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NotedStorage {
    fn noted(
        &self,
        doing: &'static str,
        path: &Path,
        act: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let begun = Note {
            doing: Some((doing, path.to_owned())),
            moved: Instant::now(),
        };
        *self.notes.note() = begun;
        let done = act();
        let mut note = self.notes.note();
        note.doing = None;
        note.moved = Instant::now();
        done
    }
}

impl Storage for NotedStorage {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        self.noted("create", path, || self.storage.create_folder(path))
    }

    fn write(&self, path: &Path, content: &[&[u8]]) -> io::Result<()> {
        self.noted("write", path, || self.storage.write(path, content))
    }

    fn append(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        self.noted("write", path, || self.storage.append(path, bytes))
    }

    fn sync_file(&self, path: &Path) -> io::Result<()> {
        self.noted("sync", path, || self.storage.sync_file(path))
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.noted("sync", path, || self.storage.sync_folder(path))
    }

    fn sync_file_system(&self, opened: &File) -> io::Result<()> {
        self.noted("sync", Path::new("the file system"), || {
            self.storage.sync_file_system(opened)
        })
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.noted("rename to", to, || self.storage.rename(from, to))
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.noted("delete", path, || self.storage.remove_file(path))
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        self.noted("delete", path, || self.storage.remove_folder(path))
    }
}
