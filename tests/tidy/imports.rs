//! Imports between the files of a package form no circle: a reader can begin at the bottom.
//!
//! A file depends on the files that define what it imports; what `mod.rs` only passes on (`pub use`) counts as imported
//! from the file that it comes from. Tests do not count. In the worker, in its `plan` and in its `train`, a table says what
//! stands above what.

use std::collections::{BTreeMap, BTreeSet};

use crate::rust_text::{code_only, is_name_byte, is_word_at, without_tests};
use crate::tree;

type Path = Vec<String>;

/// The files of a package by their module paths.
struct Package {
    files: BTreeMap<Path, String>,
    /// By module path: names that it passes on, and where they come from.
    passed_on: BTreeMap<Path, BTreeMap<String, Path>>,
}

fn words(path: &str) -> Path {
    path.split("::").map(str::to_owned).collect()
}

/// The module path of a file below the package's `src/`.
fn module(below: &str) -> Path {
    let stem = below.trim_end_matches(".rs");
    let stem = stem.trim_end_matches("/mod");
    match stem {
        "lib" | "mod" => Vec::new(),
        other => other.split('/').map(str::to_owned).collect(),
    }
}

fn is_test(below: &str) -> bool {
    let is_test = |part: &str| part == "tests" || part == "tests.rs" || part.ends_with("_tests.rs");
    below.split('/').any(is_test)
}

/// The paths of a tree of `use`: `a::{b, c::d as e}` names `a::b` and `a::c::d`, the latter as `e`.
fn leaves(tree: &str) -> Vec<(Path, String)> {
    let tree = tree.trim();
    if let Some(open) = tree.find('{') {
        let prefix = tree[..open].trim_end_matches("::");
        let inner = &tree[open + 1..tree.rfind('}').unwrap_or(tree.len())];
        let (mut parts, mut depth, mut from) = (Vec::new(), 0_usize, 0);
        for (at, byte) in inner.bytes().enumerate() {
            match byte {
                b'{' => depth += 1,
                b'}' => depth -= 1,
                b',' if depth == 0 => {
                    parts.push(&inner[from..at]);
                    from = at + 1;
                }
                _ => {}
            }
        }
        parts.push(&inner[from..]);
        let joined = parts
            .iter()
            .map(|part| part.trim())
            .filter(|part| !part.is_empty());
        let whole = |part: &str| match prefix {
            "" => part.to_owned(),
            prefix => format!("{prefix}::{part}"),
        };
        return joined.flat_map(|part| leaves(&whole(part))).collect();
    }
    let (path, name) = match tree.split_once(" as ") {
        Some((path, name)) => (path.trim(), Some(name.trim().to_owned())),
        None => (tree, None),
    };
    let path: Path = words(path.trim_end_matches("::self"));
    let name = name.unwrap_or_else(|| path.last().cloned().unwrap_or_default());
    vec![(path, name)]
}

/// What a file's `use` declarations name: path, name here, and whether it passes it on.
fn uses(code: &str) -> Vec<(Path, String, bool)> {
    let mut found = Vec::new();
    for (at, _) in code
        .match_indices("use ")
        .filter(|(at, _)| is_word_at(code, *at, "use"))
    {
        let line = code[..at].rfind('\n').map_or(0, |end| end + 1);
        let before = code[line..at].trim();
        let end = code[at..].find(';').map_or(code.len(), |end| at + end);
        let is_passed_on = before.starts_with("pub");
        if !before.is_empty() && !is_passed_on {
            continue;
        }
        let named = leaves(&code[at + 4..end]);
        found.extend(named.into_iter().map(|(path, name)| (path, name, is_passed_on)));
    }
    found
}

/// Paths that begin with `crate::` or `super::` outside of `use` declarations.
fn inline_paths(code: &str) -> Vec<Path> {
    let mut found = Vec::new();
    for start in ["crate::", "super::"] {
        for (at, _) in code.match_indices(start) {
            let is_inner =
                at > 0 && (code.as_bytes()[at - 1] == b':' || is_name_byte(code.as_bytes()[at - 1]));
            let end = code[at..]
                .bytes()
                .position(|byte| !is_name_byte(byte) && byte != b':')
                .map_or(code.len(), |len| at + len);
            // What ends in `::` is the beginning of a tree, which `uses` has read.
            if !is_inner && !code[at..end].ends_with("::") {
                found.push(words(&code[at..end]));
            }
        }
    }
    found
}

impl Package {
    fn of(root: &str) -> Self {
        let sources = tree::rust_files();
        let files: BTreeMap<Path, String> = sources
            .iter()
            .filter_map(|file| Some((file.path.strip_prefix(root)?, &file.text)))
            .filter(|(below, _)| !is_test(below))
            .map(|(below, text)| (module(below), without_tests(&code_only(text))))
            .collect();
        let mut package = Self {
            files,
            passed_on: BTreeMap::new(),
        };
        let mut all = BTreeMap::new();
        for (path, code) in &package.files {
            let passed_on = uses(code).into_iter().filter(|(.., is_passed_on)| *is_passed_on);
            let absolute = |used: &Path| package.absolute(path, used);
            let names = passed_on.filter_map(|(used, name, _)| Some((name, absolute(&used)?)));
            all.insert(path.clone(), names.collect());
        }
        package.passed_on = all;
        package
    }

    /// The path from the package's root; none if it is not of this package.
    fn absolute(&self, from: &Path, used: &Path) -> Option<Path> {
        let mut base = match used.first()?.as_str() {
            "crate" => Vec::new(),
            "self" | "super" => from.clone(),
            first => {
                let child: Path = from.iter().cloned().chain([first.to_owned()]).collect();
                return self
                    .files
                    .contains_key(&child)
                    .then(|| [from.clone(), used.clone()].concat());
            }
        };
        let mut rest = used.as_slice();
        if matches!(rest[0].as_str(), "crate" | "self") {
            rest = &rest[1..];
        }
        while rest.first().is_some_and(|word| word == "super") {
            base.pop();
            rest = &rest[1..];
        }
        base.extend_from_slice(rest);
        Some(base)
    }

    /// The file that defines what an absolute path names.
    fn defined_in(&self, path: &Path) -> Option<Path> {
        let len = (0..=path.len())
            .rev()
            .find(|len| self.files.contains_key(&path[..*len]))?;
        let (module, rest) = path.split_at(len);
        let from = self
            .passed_on
            .get(module)
            .and_then(|names| names.get(rest.first()?));
        match from {
            Some(from) if from != path => self.defined_in(from),
            _ => Some(module.to_vec()),
        }
    }

    /// By file: the files that it imports from.
    fn imports(&self) -> BTreeMap<Path, BTreeSet<Path>> {
        let of_file = |(path, code): (&Path, &String)| {
            let declared = uses(code)
                .into_iter()
                .filter(|(.., is_passed_on)| !is_passed_on)
                .map(|(used, ..)| used);
            let used = declared.chain(inline_paths(code));
            let targets = used.filter_map(|used| self.defined_in(&self.absolute(path, &used)?));
            (path.clone(), targets.filter(|target| target != path).collect())
        };
        self.files.iter().map(of_file).collect()
    }
}

/// Files that can be reached from themselves, with the files of the same circle.
fn circles(imports: &BTreeMap<Path, BTreeSet<Path>>) -> BTreeSet<BTreeSet<Path>> {
    let reached = |from: &Path| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
        while let Some(next) = open.pop() {
            for target in imports.get(next).into_iter().flatten() {
                if seen.insert(target.clone()) {
                    open.push(target);
                }
            }
        }
        seen
    };
    let all: BTreeMap<&Path, BTreeSet<Path>> = imports.keys().map(|path| (path, reached(path))).collect();
    let in_circles = all.iter().filter(|(path, reached)| reached.contains(**path));
    in_circles
        .map(|(path, reached)| {
            let back = |other: &&Path| all.get(other).is_some_and(|reached| reached.contains(*path));
            reached.iter().filter(back).cloned().collect()
        })
        .collect()
}

/// Where the code of each package is, and how many circles its files still form. The number only goes down.
const PACKAGES: [(&str, usize); 4] = [
    ("launcher/src/", 0),
    ("proto/src/", 0),
    ("src/", 1),
    ("worker/src/", 0),
];

#[test]
fn imports_form_no_new_circles() {
    let named = |circle: BTreeSet<Path>| {
        let files: Vec<String> = circle.iter().map(|path| path.join("::")).collect();
        files.join(", ")
    };
    for (root, known) in PACKAGES {
        let circles = circles(&Package::of(root).imports());
        let found: Vec<String> = circles.into_iter().map(named).collect();
        let count = found.len();
        assert!(
            count <= known,
            "files of {root} that import each other:\n{}",
            found.join("\n\n")
        );
        assert_eq!(count, known, "fewer circles in {root}: lower the number");
    }
}

/// Imports between the folders within one folder, such as `train::step` and `train::checkpointing`.
fn between_rooms(imports: &BTreeMap<Path, BTreeSet<Path>>) -> BTreeMap<Path, BTreeSet<Path>> {
    let rooms: BTreeSet<&[String]> = imports
        .keys()
        .filter(|path| path.len() > 2)
        .map(|path| &path[..2])
        .collect();
    let room = |path: &Path| rooms.get(path.get(..2)?).map(|room| room.to_vec());
    let mut between: BTreeMap<Path, BTreeSet<Path>> = BTreeMap::new();
    for (from, to) in imports
        .iter()
        .flat_map(|(from, to)| to.iter().map(move |to| (from, to)))
    {
        if let (Some(from), Some(to)) = (room(from), room(to))
            && from != to
            && from[0] == to[0]
        {
            between.entry(from).or_default().insert(to);
        }
    }
    between
}

#[test]
fn rooms_of_a_folder_import_each_other_in_one_direction() {
    for (root, _) in PACKAGES {
        let circles = circles(&between_rooms(&Package::of(root).imports()));
        assert!(
            circles.is_empty(),
            "folders of {root} that import each other: {circles:?}"
        );
    }
}

/// Folders of `worker/src` whose files and rooms stand above each other, and where a table lists them from top to bottom.
const LAYERED: [(&[&str], &str, &str); 6] = [
    (&[], "ARCHITECTURE.md", "| module |"),
    (&["plan"], "worker/src/plan/mod.rs", "| file |"),
    (&["train"], "worker/src/train/mod.rs", "| file or folder |"),
    (&["train", "step"], "worker/src/train/step/mod.rs", "| file |"),
    (
        &["train", "checkpointing"],
        "worker/src/train/checkpointing/mod.rs",
        "| file |",
    ),
    (
        &["train", "reporting"],
        "worker/src/train/reporting/mod.rs",
        "| file |",
    ),
];

/// The names in the first cells of the table whose head begins so.
fn listed(text: &str, head: &str) -> Path {
    let lines = text.lines().map(|line| line.trim_start_matches("//!").trim());
    let table = lines.skip_while(|line| !line.starts_with(head));
    let rows = table.skip(2).take_while(|line| line.starts_with('|'));
    let cells = rows.filter_map(|row| row.split('|').nth(1));
    let names = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    names
        .map(|name| name.trim_end_matches(".rs").trim_end_matches('/').to_owned())
        .collect()
}

/// What is wrong with the imports between the parts of a folder that stand in this order: a part that is not listed, and an
/// import that does not go down.
fn not_downward(imports: &BTreeMap<Path, BTreeSet<Path>>, folder: &[&str], order: &[String]) -> Vec<String> {
    let part = |path: &Path| {
        let is_below = path.len() > folder.len() && path.iter().zip(folder).all(|(a, b)| a == b);
        is_below.then(|| path[folder.len()].clone())
    };
    let place = |part: &String| order.iter().position(|name| name == part);
    let parts: BTreeSet<String> = imports.keys().filter_map(part).collect();
    let unlisted = parts.iter().filter(|part| place(part).is_none());
    let mut wrong: Vec<String> = unlisted.map(|part| format!("`{part}` is not listed")).collect();
    for (from, to) in imports
        .iter()
        .flat_map(|(from, all)| all.iter().map(move |to| (from, to)))
    {
        if let (Some(above), Some(below)) = (part(from), part(to))
            && above != below
            && place(&above) >= place(&below)
        {
            wrong.push(format!("{} imports {}", from.join("::"), to.join("::")));
        }
    }
    wrong
}

#[test]
fn what_stands_above_imports_what_stands_below() {
    let imports = Package::of("worker/src/").imports();
    for (folder, table, head) in LAYERED {
        let order = listed(&tree::text_of(table), head);
        let wrong = not_downward(&imports, folder, &order);
        assert!(
            wrong.is_empty(),
            "against the order in {table}:\n{}",
            wrong.join("\n")
        );
    }
}

#[test]
fn imports_against_the_order_are_found() {
    let table = "//! | file or folder | what |\n//! |---|---|\n//! | `run.rs`, `step/` | a |\n//! | `world.rs` | b |\n//!\n";
    let order = listed(table, "| file or folder |");
    assert_eq!(order, ["run", "step", "world"]);
    let import = |from: &str, to: &str| (words(from), BTreeSet::from([words(to)]));
    let down = [
        import("train::run", "train::step::trainer"),
        import("train::step::trainer", "train::world"),
    ];
    let mut imports: BTreeMap<Path, BTreeSet<Path>> = down.into_iter().collect();
    assert!(not_downward(&imports, &["train"], &order).is_empty());
    imports.extend([
        import("train::world", "train::step::trainer"),
        import("train::new", "data"),
    ]);
    assert_eq!(
        not_downward(&imports, &["train"], &order),
        ["`new` is not listed", "train::world imports train::step::trainer"]
    );
}

#[test]
fn circles_are_found() {
    let imports = [
        ("train::step::trainer", &["train::saving::thread"][..]),
        ("train::saving::thread", &["train::saving::disk"]),
        ("train::saving::disk", &["train::step::batch", "train::world"]),
        ("train::step::batch", &[]),
        ("train::world", &[]),
    ];
    let all = |names: &[&str]| names.iter().map(|name| words(name)).collect::<BTreeSet<Path>>();
    let mut imports: BTreeMap<Path, BTreeSet<Path>> = imports
        .map(|(from, to)| (words(from), all(to)))
        .into_iter()
        .collect();
    assert!(circles(&imports).is_empty());
    let rooms = all(&["train::saving", "train::step"]);
    assert_eq!(circles(&between_rooms(&imports)), BTreeSet::from([rooms]));
    imports.insert(words("train::step::batch"), all(&["train::saving::disk"]));
    let files = all(&["train::saving::disk", "train::step::batch"]);
    assert_eq!(circles(&imports), BTreeSet::from([files]));
}

#[test]
fn uses_are_understood() {
    let found = uses("use a::{b, c::{d as e, self}};\npub use super::f;\n").into_iter();
    let named: Vec<String> = found
        .map(|(path, name, is_passed_on)| format!("{} {name} {is_passed_on}", path.join("::")))
        .collect();
    assert_eq!(
        named,
        [
            "a::b b false",
            "a::c::d e false",
            "a::c c false",
            "super::f f true"
        ]
    );
}
