//! How large the product is: lines of production code, files, files in a folder. `.ci/run lines` prints the table.
//!
//! A line of production code is neither blank nor a comment nor part of a test. Lines of Rust have a limit; those of CUDA
//! are counted beside them. A limit only goes down.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::lengths::without_tests;
use crate::rust_text::code_only;
use crate::tree::{self, SourceFile};
use crate::{Breach, assert_none};

/// Folders whose code is the product.
const PRODUCTION: [&str; 4] = ["launcher/src", "proto/src", "src", "worker/src"];
/// Lines of Rust in all of them.
const LINES: usize = 73_650;
/// Files of `worker/src`.
const WORKER_FILES: usize = 252;
/// A file with fewer lines than this, comments included, is a part of a concept.
const SHORT_FILE_LINES: usize = 60;
/// Files of the product that may be shorter. A kernel of CUDA is a text of its own; a binary only
/// wires.
const SHORT_FILES: [&str; 18] = [
    "launcher/src/output/progress.rs",
    "launcher/src/output/terminal.rs",
    "proto/src/codec.rs",
    "proto/src/exit.rs",
    "proto/src/mounts.rs",
    "proto/src/utc.rs",
    "src/bin/ddp-rendezvous.rs",
    "src/bin/ddp-run.rs",
    "src/bin/ddp-train.rs",
    "worker/src/ops/cuda/cast.cu",
    "worker/src/ops/cuda/dropout.cu",
    "worker/src/ops/cuda/elementwise.cuh",
    "worker/src/ops/cuda/fill.cu",
    "worker/src/ops/cuda/loss_sum.cu",
    "worker/src/optim/adamw.cu",
    "worker/src/optim/lion.cu",
    "worker/src/optim/muon.cu",
    "worker/src/optim/sgd.cu",
];
/// A folder with more files than this has rooms. Tests and `mod.rs` are left out.
const MAX_FILES_OF_A_FOLDER: usize = 15;
/// Folders with more files.
const CROWDED_FOLDERS: usize = 1;

/// A file of the product.
#[derive(Debug)]
struct Production<'a> {
    path: &'a str,
    /// Without blanks, comments and tests.
    lines: usize,
    /// All of them.
    text_lines: usize,
}

/// What lies below a folder.
#[derive(Debug, Default, PartialEq, Eq)]
struct Size {
    /// Lines.
    rust: usize,
    /// Lines.
    cuda: usize,
    files: usize,
}

impl Size {
    fn of(files: &[Production<'_>], folder: &str) -> Self {
        let mut size = Self::default();
        for file in files
            .iter()
            .filter(|file| Path::new(file.path).starts_with(folder))
        {
            let is_rust = Path::new(file.path)
                .extension()
                .is_some_and(|ending| ending == "rs");
            *(if is_rust { &mut size.rust } else { &mut size.cuda }) += file.lines;
            size.files += 1;
        }
        size
    }
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
    for folder in PRODUCTION.into_iter().chain([""]) {
        let size = Size::of(&files, folder);
        println!(
            "{:<16} {:>6} lines of production code in Rust, {:>5} in CUDA, in {:>3} files",
            if folder.is_empty() { "all" } else { folder },
            size.rust,
            size.cuda,
            size.files,
        );
    }
    let short: BTreeSet<&str> = files
        .iter()
        .filter(|file| file.text_lines < SHORT_FILE_LINES && !is_index(file.path))
        .map(|file| file.path)
        .collect();
    let crowded = crowded(&files);
    println!("{} files under {SHORT_FILE_LINES} lines", short.len());
    println!(
        "{} folders with more than {MAX_FILES_OF_A_FOLDER} files: {crowded:?}",
        crowded.len()
    );
    let worker = Size::of(&files, "worker/src");
    let breaches = [
        limit("lines of Rust", Size::of(&files, "").rust, LINES),
        limit("files of worker/src", worker.files, WORKER_FILES),
        limit("crowded folders", crowded.len(), CROWDED_FOLDERS),
    ];
    let named = BTreeSet::from(SHORT_FILES);
    let too_short = short.difference(&named).map(|path| {
        let what = format!("under {SHORT_FILE_LINES} lines: it is a part of a concept that has its file");
        Breach::new(path, 1, what)
    });
    let not_short = named
        .difference(&short)
        .map(|path| Breach::new(path, 1, "is in the list of short files, and is none".to_owned()));
    let breaches = breaches.into_iter().flatten();
    assert_none(&breaches.chain(too_short).chain(not_short).collect::<Vec<_>>());
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
        "worker/src/a.cu",
        "src/main.rs",
    ]
    .map(file);
    let counted = production(&files);
    let paths: Vec<&str> = counted.iter().map(|file| file.path).collect();
    assert_eq!(paths, ["worker/src/a.rs", "worker/src/a.cu", "src/main.rs"]);
    let of_worker = Size {
        rust: 1,
        cuda: 1,
        files: 2,
    };
    assert_eq!(Size::of(&counted, "worker/src"), of_worker);
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
