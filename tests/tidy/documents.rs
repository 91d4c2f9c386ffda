//! Markdown that fits a screen and names files that exist.

use crate::{Breach, assert_none, tree};

/// Lines of Markdown end before this column.
const MARKDOWN_COLUMN: usize = 120;

/// Folders whose files documents name by their paths.
const ROOTS: [&str; 9] = [
    ".ci/",
    "deploy/",
    "docs/",
    "examples/",
    "launcher/",
    "proto/",
    "src/",
    "tests/",
    "worker/",
];

/// Lines that are too long. Left out: code, whose lines are a program's, and rows of tables, which cannot be wrapped.
fn long_lines(path: &str, text: &str) -> Vec<Breach> {
    let mut in_fence = false;
    let mut breaches = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let is_fence = line.trim_start().starts_with("```");
        in_fence ^= is_fence;
        let is_code = in_fence || is_fence || line.starts_with("    ");
        let is_table = line.trim_start().starts_with('|');
        let columns = line.chars().count();
        if !is_code && !is_table && columns >= MARKDOWN_COLUMN {
            let what = format!("{columns} columns, fewer than {MARKDOWN_COLUMN}: wrap the line");
            breaches.push(Breach::new(path, index + 1, what));
        }
    }
    breaches
}

/// Words in backticks, with their lines.
fn quoted(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.lines().enumerate();
    lines.flat_map(|(index, line)| {
        line.split('`')
            .skip(1)
            .step_by(2)
            .map(move |word| (index + 1, word))
    })
}

/// Paths of this repository that a document names and `exists` denies: below a folder of the root, with an ending.
fn dead_paths(path: &str, text: &str, exists: impl Fn(&str) -> bool) -> Vec<Breach> {
    let is_path = |word: &str| {
        let below = ROOTS.iter().any(|root| word.starts_with(root));
        let file = word.rsplit('/').next().unwrap_or_default();
        let plain = word
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c));
        below && plain && file.contains('.')
    };
    quoted(text)
        .filter(|(_, word)| is_path(word) && !exists(word))
        .map(|(line, word)| Breach::new(path, line, format!("`{word}` is not there")))
        .collect()
}

#[test]
fn documents_name_files_that_are_there() {
    let files = tree::files();
    let exists = |path: &str| files.iter().any(|file| file.path == path);
    let markdown = files.iter().filter(|file| file.is_markdown());
    let breaches: Vec<_> = markdown
        .flat_map(|file| {
            let folder = file.path.rsplit_once('/').map_or("", |(folder, _)| folder);
            dead_paths(&file.path, &file.text, |path| {
                exists(path) || exists(&format!("{folder}/{path}"))
            })
        })
        .collect();
    assert_none(&breaches);
}

#[test]
fn names_of_what_is_gone_are_caught() {
    let text = "`src/a.rs`, `src/gone.rs`; `a.rs`, `src/x y.rs`, `src/folder`";
    let breaches = dead_paths("a.md", text, |path| path == "src/a.rs");
    assert_eq!(breaches, [Breach::new("a.md", 1, "`src/gone.rs` is not there")]);
}

#[test]
fn lines_of_markdown_are_short() {
    let files = tree::files();
    let markdown = files.iter().filter(|file| file.is_markdown());
    let breaches: Vec<_> = markdown
        .flat_map(|file| long_lines(&file.path, &file.text))
        .collect();
    assert_none(&breaches);
}

#[test]
fn long_lines_are_caught() {
    let lines = |text: &str| {
        long_lines("a.md", text)
            .iter()
            .map(|breach| breach.line)
            .collect::<Vec<_>>()
    };
    let long = "x".repeat(MARKDOWN_COLUMN);
    assert_eq!(
        lines(&"é".repeat(MARKDOWN_COLUMN - 1)),
        [0; 0],
        "columns, not bytes"
    );
    assert_eq!(lines(&format!("a\n{long}\n```\n```\n{long}\n")), [2, 5]);
    // Code and tables.
    assert_eq!(
        lines(&format!("    {long}\n```\n{long}\n```\n| {long} |")),
        [0; 0]
    );
}
