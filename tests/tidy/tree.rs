//! The files of the repository, which are all text.

use std::path::Path;

use crate::{Breach, assert_none};

/// Names that hold nothing written by hand; `.git` is a file in a linked worktree.
const GENERATED: [&str; 5] = [".git", "target", "runs", "node_modules", "__pycache__"];

/// Files whose text other projects wrote.
const SKIPPED_FILES: [&str; 5] = [
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "LICENSE-PYTHON.txt",
    "python-reference.txt",
    "Cargo.lock",
];

/// What a generator wrote, and a test compares with its source.
const GENERATED_FILE: &str = "proto/proto/generated.rs";

/// A file with its path below the repository's root, with `/`.
#[derive(Debug)]
pub(crate) struct SourceFile {
    pub(crate) path: String,
    pub(crate) text: String,
}

impl SourceFile {
    pub(crate) fn is_rust(&self) -> bool {
        self.has_extension("rs")
    }

    pub(crate) fn is_markdown(&self) -> bool {
        self.has_extension("md")
    }

    fn has_extension(&self, wanted: &str) -> bool {
        Path::new(&self.path)
            .extension()
            .is_some_and(|ending| ending == wanted)
    }
}

/// What lies below a folder.
#[derive(Debug, Default)]
struct Tree {
    texts: Vec<SourceFile>,
    /// Paths of the files that are no UTF-8.
    binaries: Vec<String>,
}

/// All text files that the rules apply to, sorted by path.
pub(crate) fn files() -> Vec<SourceFile> {
    let mut files = Tree::below(Path::new(env!("CARGO_MANIFEST_DIR"))).texts;
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files
}

pub(crate) fn rust_files() -> Vec<SourceFile> {
    let mut files = files();
    files.retain(SourceFile::is_rust);
    files
}

/// The text of one file.
pub(crate) fn text_of(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

impl Tree {
    fn below(root: &Path) -> Self {
        let mut tree = Self::default();
        tree.collect(root, root);
        tree
    }

    fn collect(&mut self, root: &Path, folder: &Path) {
        for entry in std::fs::read_dir(folder).expect("a readable folder").flatten() {
            let path = entry.path();
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if GENERATED.contains(&name.as_ref()) {
                continue;
            }
            let kind = entry.file_type().expect("a file type");
            if kind.is_dir() {
                self.collect(root, &path);
            } else if kind.is_file() && !SKIPPED_FILES.contains(&name.as_ref()) {
                let below = path.strip_prefix(root).expect("below the root");
                let below = below.to_string_lossy().into_owned();
                if below == GENERATED_FILE {
                    continue;
                }
                match std::fs::read_to_string(&path) {
                    Ok(text) => self.texts.push(SourceFile { path: below, text }),
                    Err(_) => self.binaries.push(below),
                }
            }
        }
    }

    /// A reviewer reads every change; what cannot be read, such as a package or a program, is fetched or built.
    fn unreadable(&self) -> Vec<Breach> {
        let ends = |path: &str, folder: &str, end: &str| path.starts_with(folder) && path.ends_with(end);
        // What is read is the format itself, and no script of ours wrote it. Screenshots show what people see.
        let is_published = |path: &str| ends(path, "tests/parity/", ".safetensors");
        let is_screenshot = |path: &str| ends(path, "docs/pictures/", ".png");
        let breach = |path| Breach::new(path, 1, "no text: the repository holds what can be read");
        let binaries = (self.binaries.iter()).filter(|path| !is_published(path) && !is_screenshot(path));
        binaries.map(|path| breach(path)).collect()
    }
}

#[test]
fn all_files_are_text() {
    assert_none(&Tree::below(Path::new(env!("CARGO_MANIFEST_DIR"))).unreadable());
}
