//! How large the product is: lines of production code, files, files in a folder. `.ci/run lines` prints the table.
//!
//! A line of production code is one of Rust or CUDA that is neither blank nor a comment nor part of a test. Each limit
//! that is above what the style asks for only goes down.

use std::collections::BTreeMap;

use crate::lengths::without_tests;
use crate::rust_text::code_only;
use crate::tree::{self, SourceFile};
use crate::{Breach, assert_none};

/// Folders whose code is the product.
const PRODUCTION: [&str; 4] = ["launcher/src", "proto/src", "src", "worker/src"];
/// Lines of `worker/src`. The style asks for 32,000.
const WORKER_LINES: usize = 39_600;
/// Files of `worker/src`. The style asks for 200.
const WORKER_FILES: usize = 235;
/// A file with fewer lines than this, comments included, is a part of a concept.
const SHORT_FILE_LINES: usize = 60;
/// Files of the product that are shorter, `mod.rs` and `lib.rs` left out.
const SHORT_FILES: usize = 19;
/// A folder with more files than this has rooms. Tests and `mod.rs` are left out.
const MAX_FILES_OF_A_FOLDER: usize = 15;
/// Folders with more files.
const CROWDED_FOLDERS: usize = 5;

/// A file of the product.
#[derive(Debug)]
struct Production<'a> {
    path: &'a str,
    /// Without blanks, comments and tests.
    lines: usize,
    /// All of them.
    text_lines: usize,
}

fn is_test(path: &str) -> bool {
    path.split('/')
        .any(|part| part == "tests" || part == "tests.rs" || part.ends_with("_tests.rs"))
}

fn production(files: &[SourceFile]) -> Vec<Production<'_>> {
    let is_production = |file: &&SourceFile| {
        let is_code = [".rs", ".cu", ".cuh"]
            .iter()
            .any(|ending| file.path.ends_with(ending));
        let is_below = |folder: &&str| file.path.starts_with(&format!("{folder}/"));
        is_code && !is_test(&file.path) && PRODUCTION.iter().any(is_below)
    };
    let counted = files.iter().filter(is_production).map(|file| Production {
        path: &file.path,
        lines: count(&file.text),
        text_lines: file.text.lines().count(),
    });
    counted.collect()
}

fn count(text: &str) -> usize {
    let code = without_tests(&code_only(text));
    code.lines().filter(|line| !line.trim().is_empty()).count()
}

fn folder_of(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

fn is_index(path: &str) -> bool {
    ["mod.rs", "lib.rs", "main.rs"]
        .iter()
        .any(|name| path.ends_with(name))
}

/// Folders with too many files, with their number.
fn crowded<'a>(files: &[Production<'a>]) -> Vec<(&'a str, usize)> {
    let mut folders: BTreeMap<&str, usize> = BTreeMap::new();
    for file in files.iter().filter(|file| !is_index(file.path)) {
        *folders.entry(folder_of(file.path)).or_default() += 1;
    }
    folders.retain(|_, number| *number > MAX_FILES_OF_A_FOLDER);
    folders.into_iter().collect()
}

/// A breach if a number that only goes down is above its limit.
fn limit(what: &str, number: usize, most: usize) -> Option<Breach> {
    (number > most).then(|| Breach::new(what, number, format!("at most {most}")))
}

#[test]
fn the_product_does_not_grow_beyond_its_limits() {
    let files = tree::files();
    let files = production(&files);
    let within = |folder: &str| {
        let folder = format!("{folder}/");
        let those = files.iter().filter(move |file| file.path.starts_with(&folder));
        those.fold((0, 0), |(lines, number), file| (lines + file.lines, number + 1))
    };
    for folder in PRODUCTION {
        let (lines, number) = within(folder);
        println!("{folder:<16} {lines:>7} lines of production code in {number:>4} files");
    }
    let total: usize = files.iter().map(|file| file.lines).sum();
    println!(
        "{:<16} {total:>7} lines of production code in {:>4} files",
        "all",
        files.len()
    );
    let short: Vec<&str> = files
        .iter()
        .filter(|file| file.text_lines < SHORT_FILE_LINES && !is_index(file.path))
        .map(|file| file.path)
        .collect();
    let crowded = crowded(&files);
    println!("{} files under {SHORT_FILE_LINES} lines: {short:?}", short.len());
    println!(
        "{} folders with more than {MAX_FILES_OF_A_FOLDER} files: {crowded:?}",
        crowded.len()
    );
    let (lines, number) = within("worker/src");
    let breaches = [
        limit("lines of worker/src", lines, WORKER_LINES),
        limit("files of worker/src", number, WORKER_FILES),
        limit("short files", short.len(), SHORT_FILES),
        limit("crowded folders", crowded.len(), CROWDED_FOLDERS),
    ];
    assert_none(&breaches.into_iter().flatten().collect::<Vec<_>>());
}

#[test]
fn lines_of_production_are_those_that_do_something() {
    assert_eq!(count("//! Doc.\n\nfn f() {\n    // Why.\n    g();\n}\n"), 3);
    assert_eq!(
        count("fn f() {}\n#[cfg(test)]\nmod tests {\n    fn g() {}\n}\n"),
        1
    );
    let file = |path: &str| SourceFile {
        path: path.to_owned(),
        text: "fn f() {}\n".to_owned(),
    };
    let files = [
        "worker/src/a.rs",
        "worker/src/a_tests.rs",
        "worker/tests/b.rs",
        "src/main.rs",
    ]
    .map(file);
    let counted: Vec<&str> = production(&files).iter().map(|file| file.path).collect();
    assert_eq!(counted, ["worker/src/a.rs", "src/main.rs"]);
}

#[test]
fn crowded_folders_are_caught() {
    let paths: Vec<String> = (0..=MAX_FILES_OF_A_FOLDER)
        .map(|n| format!("src/a/{n}.rs"))
        .collect();
    let all: Vec<Production<'_>> = paths
        .iter()
        .map(|path| Production {
            path,
            lines: 1,
            text_lines: 1,
        })
        .collect();
    assert_eq!(crowded(&all), [("src/a", MAX_FILES_OF_A_FOLDER + 1)]);
    assert_eq!(crowded(&all[1..]), []);
    assert!(limit("files", 2, 1).is_some() && limit("files", 1, 1).is_none());
}
