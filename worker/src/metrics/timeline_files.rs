//! The files of a timeline, in the folder `timeline` of a run.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::RunFilesError;
use super::hold::replace_file;

const FOLDER: &str = "timeline";
const RANKS: &str = "ranks";
const TRACE: &str = "timeline.json";
const PICTURE: &str = "timeline.svg";

/// The folder `timeline` of a run. A file is there as a whole or not at all.
#[derive(Clone, Debug)]
pub struct TimelineFiles {
    folder: PathBuf,
}

impl TimelineFiles {
    /// Those of the run that has this folder. Touches nothing.
    #[must_use]
    pub fn of_run(out_dir: &Path) -> Self {
        Self {
            folder: out_dir.join(FOLDER),
        }
    }

    /// Writes the trace of one rank.
    pub fn write_rank(&self, rank: usize, json: &[u8]) -> Result<(), RunFilesError> {
        write(&self.of_rank(rank), json)
    }

    /// Where [`TimelineFiles::write_rank`] writes.
    #[must_use]
    pub fn of_rank(&self, rank: usize) -> PathBuf {
        self.folder.join(RANKS).join(format!("rank_{rank:05}.json"))
    }

    /// Writes the trace of all ranks. Returns its path.
    pub fn write_trace(&self, json: &[u8]) -> Result<PathBuf, RunFilesError> {
        let path = self.folder.join(TRACE);
        write(&path, json).map(|()| path)
    }

    /// Writes the picture. Returns its path.
    pub fn write_picture(&self, svg: &str) -> Result<PathBuf, RunFilesError> {
        let path = self.folder.join(PICTURE);
        write(&path, svg.as_bytes()).map(|()| path)
    }

    /// Deletes what a run writes here, and the folders if nothing else is in them.
    pub(super) fn delete(&self) -> Result<(), RunFilesError> {
        let ranks = self.folder.join(RANKS);
        let listed = match fs::read_dir(&ranks) {
            Ok(listed) => listed.collect::<Result<Vec<_>, _>>(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(e),
        };
        let listed = listed.map_err(|e| RunFilesError::io("read", &ranks, &e))?;
        let of_ranks = listed
            .iter()
            .map(fs::DirEntry::path)
            .filter(|path| is_of_rank(path));
        for path in of_ranks.chain([self.folder.join(TRACE), self.folder.join(PICTURE)]) {
            match fs::remove_file(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(RunFilesError::io("delete", &path, &e));
                }
                _ => {}
            }
        }
        for folder in [&ranks, &self.folder] {
            // Absent, or not empty: somebody else's files stay.
            let _ = fs::remove_dir(folder);
        }
        Ok(())
    }
}

fn is_of_rank(path: &Path) -> bool {
    let name = path
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    let number = name
        .strip_prefix("rank_")
        .and_then(|rest| rest.strip_suffix(".json"));
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), RunFilesError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(|e| RunFilesError::io("create", folder, &e))?;
    replace_file(path, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_run_writes_is_deleted() {
        let run = tempfile::tempdir().unwrap();
        let files = TimelineFiles::of_run(run.path());
        files.delete().unwrap();
        let write = || {
            files.write_rank(0, b"{}").unwrap();
            files.write_rank(123_456, b"{}").unwrap();
            files.write_trace(b"{}").unwrap();
            files.write_picture("<svg/>").unwrap();
        };
        write();
        files.delete().unwrap();
        assert!(!run.path().join(FOLDER).exists());
        write();
        let kept = run.path().join("timeline/ranks/rank_of_mine.json");
        fs::write(&kept, "mine").unwrap();
        files.delete().unwrap();
        let left: Vec<_> = fs::read_dir(run.path().join(FOLDER)).unwrap().collect();
        assert!(kept.exists() && left.len() == 1);
    }
}
