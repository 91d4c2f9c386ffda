//! How large the product is: lines of production code, of a file, files in a folder. `.ci/run lines` prints the table.
//!
//! A line of production code is neither blank nor a comment nor part of a test, and a person wrote it. Lines of Rust have a
//! limit; those of CUDA are counted beside them. A limit only goes down. `../shared/limits.toml` may set a lower one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::rust_text::{code_only, without_tests};
use crate::tree::{self, SourceFile};
use crate::{Breach, assert_none};

/// Folders whose code is the product.
const PRODUCTION: [&str; 4] = ["launcher/src", "proto/src", "src", "worker/src"];
/// Lines of Rust in all of them.
const LINES: usize = 71_215;
/// Files of `worker/src`.
const WORKER_FILES: usize = 272;
/// A file with fewer lines than this, comments included, is a part of a concept.
const SHORT_FILE_LINES: usize = 60;
/// Files of the product that may be shorter. A kernel of CUDA is a text of its own; a binary only
/// wires.
const SHORT_FILES: [&str; 18] = [
    "proto/src/codec.rs",
    "proto/src/exit.rs",
    "proto/src/utc.rs",
    "src/bin/ddp-rendezvous.rs",
    "src/bin/ddp-run.rs",
    "src/bin/ddp-train.rs",
    "worker/src/config/problem.rs",
    "worker/src/ops/cuda/attention_merge.cu",
    "worker/src/ops/cuda/cast.cu",
    "worker/src/ops/cuda/dropout.cu",
    "worker/src/ops/cuda/elementwise.cuh",
    "worker/src/ops/cuda/fill.cu",
    "worker/src/ops/cuda/heads.cuh",
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
/// Lines of code in a file: without blanks, comments and the tests in it.
const FILE_LINES: usize = 700;
/// All lines of a file, whatever it is written in.
const FILE_TEXT_LINES: usize = 900;
/// Endings of files that are programs.
const PROGRAMS: [&str; 12] = [
    "rs", "cu", "cuh", "cpp", "hpp", "h", "c", "py", "sh", "js", "css", "html",
];
/// Names under which code gathers that belongs nowhere.
const NAMELESS: [&str; 6] = ["util", "utils", "common", "helper", "helpers", "misc"];

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

/// The limit of lines in a text like `limits.toml`.
fn outer_limit(text: &str) -> Option<usize> {
    let lines = text
        .lines()
        .find_map(|line| line.strip_prefix("production_lines"))?;
    let number = lines.trim_start().strip_prefix('=')?.trim_start();
    let end = number
        .find(|c: char| !c.is_ascii_digit() && c != '_')
        .unwrap_or(number.len());
    number[..end].replace('_', "").parse().ok()
}

/// Most lines of production code: the limit of this file, or a lower one beside the checkout.
fn line_limit() -> usize {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/limits.toml");
    let Ok(text) = std::fs::read_to_string(&file) else {
        return LINES;
    };
    let outer = outer_limit(&text);
    LINES.min(outer.unwrap_or_else(|| panic!("{} has no `production_lines`", file.display())))
}

/// A file that is too long, or whose name names nothing.
fn file_breaches(file: &SourceFile) -> Vec<Breach> {
    let path = file.path.as_str();
    let all = file.text.lines().count();
    let code = if file.is_rust() { count(&file.text) } else { 0 };
    let (rest, stem) = path.rsplit_once('/').unwrap_or(("", path));
    let folder = rest.rsplit_once('/').map_or(rest, |(_, folder)| folder);
    let stem = stem.split('.').next().unwrap_or(stem);
    let nameless = NAMELESS.contains(&stem) || NAMELESS.contains(&folder);
    let named = nameless.then(|| Breach::new(path, 1, "its name names no noun"));
    let breaches = [
        limit(path, all, FILE_TEXT_LINES),
        limit(path, code, FILE_LINES),
        named,
    ];
    breaches.into_iter().flatten().collect()
}

#[test]
fn files_are_short_and_have_a_name() {
    let is_program =
        |file: &&SourceFile| PROGRAMS.contains(&file.path.rsplit('.').next().unwrap_or_default());
    let files = tree::files();
    assert_none(
        &files
            .iter()
            .filter(is_program)
            .flat_map(file_breaches)
            .collect::<Vec<_>>(),
    );
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
        limit("lines of Rust", Size::of(&files, "").rust, line_limit()),
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
    assert_eq!(
        outer_limit("# a\nproduction_lines = 73_700   # b\n"),
        Some(73_700)
    );
    assert_eq!(outer_limit("lines = 1\n"), None);
    let file = |path: &str, text: String| SourceFile {
        path: path.to_owned(),
        text,
    };
    let breaches =
        |path: &str, line: &str, lines: usize| file_breaches(&file(path, line.repeat(lines))).len();
    assert_eq!(breaches("a/b.rs", "f();\n", FILE_LINES), 0);
    assert_eq!(breaches("a/b.rs", "f();\n", FILE_LINES + 1), 1);
    assert_eq!(breaches("a/b.py", "# b\n", FILE_TEXT_LINES + 1), 1);
    assert_eq!(
        breaches("common/mod.rs", "", 1) + breaches("a/utils.rs", "", 1),
        2
    );
}
