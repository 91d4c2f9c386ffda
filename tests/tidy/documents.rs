//! Markdown that fits a screen, and a glossary that has every public type of the worker's core.

use std::collections::BTreeSet;

use crate::rust_text::{code_only, is_name_byte, is_word_at};
use crate::{Breach, assert_none, tree};

/// Lines of Markdown end before this column.
const MARKDOWN_COLUMN: usize = 120;

const GLOSSARY: &str = "docs/glossary.md";

/// The modules whose public types the glossary explains.
const EXPLAINED: [&str; 3] = [
    "worker/src/parallel/mod.rs",
    "worker/src/collective/mod.rs",
    "worker/src/train/mod.rs",
];

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

/// Names of the types that a module defines as public or passes on with `pub use`.
fn public_types(text: &str) -> BTreeSet<String> {
    let code = code_only(text);
    let mut found = BTreeSet::new();
    for (at, _) in code
        .match_indices("pub ")
        .filter(|(at, _)| is_word_at(&code, *at, "pub"))
    {
        let rest = &code[at + 4..];
        let is_use = rest.starts_with("use ");
        let defines = ["struct ", "enum ", "trait ", "type "]
            .iter()
            .find(|keyword| rest.starts_with(**keyword));
        let names = match defines {
            _ if is_use => &rest[..rest.find(';').unwrap_or(rest.len())],
            Some(keyword) => {
                let name = &rest[keyword.len()..];
                let end = name
                    .bytes()
                    .position(|byte| !is_name_byte(byte))
                    .unwrap_or(name.len());
                &name[..end]
            }
            None => continue,
        };
        let words = names.split(|c: char| !c.is_alphanumeric() && c != '_');
        // A type begins with a capital and has a small letter; a constant has none.
        let is_type = |word: &&str| word.starts_with(char::is_uppercase) && word.contains(char::is_lowercase);
        found.extend(words.filter(is_type).map(str::to_owned));
    }
    found
}

/// Public types of `text` whose names stand nowhere in backticks in the glossary.
fn unexplained(path: &str, text: &str, glossary: &str) -> Vec<Breach> {
    public_types(text)
        .into_iter()
        .filter(|name| !glossary.contains(&format!("`{name}`")))
        .map(|name| Breach::new(path, 1, format!("`{name}` has no line in {GLOSSARY}")))
        .collect()
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

/// Types that the glossary names and no code has.
fn dead_types(glossary: &str, names: &BTreeSet<&str>) -> Vec<Breach> {
    let is_type = |word: &str| {
        word.starts_with(char::is_uppercase)
            && word.contains(char::is_lowercase)
            && word.chars().all(char::is_alphanumeric)
    };
    quoted(glossary)
        .filter(|(_, word)| is_type(word) && !names.contains(word))
        .map(|(line, word)| Breach::new(GLOSSARY, line, format!("no type is named `{word}`")))
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
fn the_glossary_names_types_that_are_there() {
    let files = tree::files();
    let rust = files.iter().filter(|file| file.is_rust());
    let code: Vec<String> = rust.map(|file| code_only(&file.text)).collect();
    let names: BTreeSet<&str> = code
        .iter()
        .flat_map(|code| code.split(|c: char| !c.is_alphanumeric() && c != '_'))
        .collect();
    let glossary = files
        .iter()
        .find(|file| file.path == GLOSSARY)
        .expect("a glossary");
    assert_none(&dead_types(&glossary.text, &names));
}

#[test]
fn names_of_what_is_gone_are_caught() {
    let text = "`src/a.rs`, `src/gone.rs`; `a.rs`, `src/x y.rs`, `src/folder`";
    let breaches = dead_paths("a.md", text, |path| path == "src/a.rs");
    assert_eq!(breaches, [Breach::new("a.md", 1, "`src/gone.rs` is not there")]);
    let breaches = dead_types("`Known` and\n`Gone`, `LIMIT`, `a.b`", &BTreeSet::from(["Known"]));
    assert_eq!(breaches, [Breach::new(GLOSSARY, 2, "no type is named `Gone`")]);
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
fn the_glossary_has_every_public_type() {
    let files = tree::files();
    let text = |path: &str| {
        let file = files.iter().find(|file| file.path == path);
        &file.unwrap_or_else(|| panic!("`{path}` was not found")).text
    };
    let breaches: Vec<_> = EXPLAINED
        .iter()
        .flat_map(|path| {
            assert!(
                !public_types(text(path)).is_empty(),
                "`{path}` was not understood"
            );
            unexplained(path, text(path), text(GLOSSARY))
        })
        .collect();
    assert_none(&breaches);
}

#[test]
fn long_lines_are_caught() {
    let (short, long) = ("x".repeat(MARKDOWN_COLUMN - 1), "x".repeat(MARKDOWN_COLUMN));
    assert_eq!(long_lines("a.md", &short), []);
    assert_eq!(
        long_lines("a.md", &"é".repeat(MARKDOWN_COLUMN - 1)),
        [],
        "columns, not bytes"
    );
    assert_eq!(long_lines("a.md", &format!("a\n{long}\n"))[0].line, 2);
    assert_eq!(long_lines("a.md", &format!("    {long}")), [], "code");
    assert_eq!(long_lines("a.md", &format!("```\n{long}\n```\n")), [], "code");
    assert_eq!(
        long_lines("a.md", &format!("```\n```\n{long}\n")).len(),
        1,
        "after code"
    );
    assert_eq!(long_lines("a.md", &format!("| {long} |")), [], "a table");
}

#[test]
fn unexplained_types_are_caught() {
    let module = "//! [`NotMine`]\nmod a;\npub use a::{Known, Unknown, function, LIMIT};\npub struct Own;\nuse b::Private;\n";
    let found: Vec<_> = public_types(module).into_iter().collect();
    assert_eq!(found, ["Known", "Own", "Unknown"]);
    let breaches = unexplained(
        "a.rs",
        module,
        "- **a**: `Known`, and Unknown without backticks; `Own`",
    );
    let names: Vec<_> = breaches.iter().map(|breach| breach.what.as_str()).collect();
    assert_eq!(names, ["`Unknown` has no line in docs/glossary.md"]);
}
