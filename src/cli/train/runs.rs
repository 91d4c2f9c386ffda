//! Runs below a directory, named where the directory of one run was expected.
//!
//! Without `run.out_dir`, a run is two levels below the folder that people remember: `runs/<name>/<run id>`.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The directory of the checkpoints of a run.
pub(super) const CHECKPOINTS: &str = "checkpoints";
/// Most runs that are named.
const MAX_NAMED: usize = 3;
/// Levels of directories that are searched, and most entries of each directory.
const LEVELS: [&str; 2] = ["in this directory", "two levels down"];
const MAX_ENTRIES: usize = 4096;

/// A line that names the newest runs of `directory`, or of the directories in it; empty if there are none. A run is a
/// directory that holds [`CHECKPOINTS`], whose last change is its time.
pub(super) fn hint(directory: &Path) -> String {
    let mut folders = vec![directory.to_owned()];
    for level in LEVELS {
        folders = folders.iter().flat_map(|folder| folders_in(folder)).collect();
        let named = newest(&folders);
        if !named.is_empty() {
            let named = named.join("`, `");
            return format!("\n  hint: pass one of the runs {level}, newest first: `{named}`");
        }
    }
    String::new()
}

fn folders_in(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let paths = entries.take(MAX_ENTRIES).map(|entry| entry.path());
    paths.filter(|path| path.is_dir()).collect()
}

/// The newest of these that are runs. Equal times are in the order of the names.
fn newest(folders: &[PathBuf]) -> Vec<String> {
    let time_of = |folder: &Path| fs::metadata(folder.join(CHECKPOINTS)).ok()?.modified().ok();
    let mut runs: Vec<(SystemTime, String)> = folders
        .iter()
        .filter_map(|folder| Some((time_of(folder)?, folder.display().to_string())))
        .collect();
    runs.sort_unstable();
    let newest_first = runs.into_iter().rev().map(|(_, run)| run);
    newest_first.take(MAX_NAMED).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_named_where_they_are_and_not_further_down() {
        let dir = tempfile::tempdir().unwrap();
        let hint = |path: &str| {
            let hint = hint(&dir.path().join(path));
            hint.replace(&format!("{}/", dir.path().display()), "")
        };
        for run in ["runs/first/a", "runs/first/b"] {
            fs::create_dir_all(dir.path().join(run).join(CHECKPOINTS)).unwrap();
        }
        let named = "newest first: `runs/first/b`, `runs/first/a`";
        let here = format!("\n  hint: pass one of the runs in this directory, {named}");
        assert_eq!(hint("runs/first"), here);
        assert_eq!(hint("runs"), here.replace("in this directory", "two levels down"));
        assert_eq!(hint(""), "", "three levels down");
        assert_eq!(hint("runs/first/a"), "");
        assert_eq!(hint("none"), "");
    }
}
