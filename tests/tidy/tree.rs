//! The text files of the repository.

use std::path::Path;

/// Names that hold nothing written by hand; `.git` is a file in a linked worktree.
const GENERATED: [&str; 4] = [".git", "target", "runs", "node_modules"];

/// Files whose text is somebody else's.
const SKIPPED_FILES: [&str; 5] = [
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "LICENSE-PYTHON.txt",
    "python-reference.txt",
    "Cargo.lock",
];

/// A file with its path below the repository's root, with `/`.
#[derive(Debug)]
pub(crate) struct SourceFile {
    pub(crate) path: String,
    pub(crate) text: String,
}

impl SourceFile {
    pub(crate) fn is_rust(&self) -> bool {
        Path::new(&self.path)
            .extension()
            .is_some_and(|ending| ending == "rs")
    }
}

/// All text files that the rules apply to, sorted by path.
pub(crate) fn files() -> Vec<SourceFile> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    collect(root, root, &mut files);
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files
}

pub(crate) fn rust_files() -> Vec<SourceFile> {
    let mut files = files();
    files.retain(SourceFile::is_rust);
    files
}

fn collect(root: &Path, folder: &Path, files: &mut Vec<SourceFile>) {
    for entry in std::fs::read_dir(folder).expect("a readable folder").flatten() {
        let path = entry.path();
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if GENERATED.contains(&name.as_ref()) {
            continue;
        }
        let kind = entry.file_type().expect("a file type");
        if kind.is_dir() {
            collect(root, &path, files);
        } else if kind.is_file() && !SKIPPED_FILES.contains(&name.as_ref()) {
            // What is not UTF-8 is not text.
            let Ok(text) = std::fs::read_to_string(&path) else {
                continue;
            };
            let path = path
                .strip_prefix(root)
                .expect("below the root")
                .to_string_lossy()
                .into_owned();
            files.push(SourceFile { path, text });
        }
    }
}

#[test]
fn the_repository_is_found() {
    let files = files();
    for known in [
        "Cargo.toml",
        "src/lib.rs",
        "proto/src/lib.rs",
        "tests/tidy/tree.rs",
        ".ci/run",
    ] {
        assert!(
            files.iter().any(|file| file.path == known),
            "`{known}` was not found"
        );
    }
}
