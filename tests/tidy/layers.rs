//! `src → launcher, worker → proto`, never sideways, never upward. Cargo refuses code that uses a package which its
//! manifest does not name, so the manifests are enough.

use crate::rust_text::code_only;
use crate::{Breach, assert_none, tree};

/// Manifest of a package, and the packages of this repository that it may depend on.
const LAYERS: [(&str, &[&str]); 5] = [
    ("proto/Cargo.toml", &[]),
    ("launcher/Cargo.toml", &["ddp-proto"]),
    ("worker/Cargo.toml", &["ddp-proto"]),
    ("examples/custom-worker/Cargo.toml", &["ddp-worker", "ddp-proto"]),
    ("Cargo.toml", &["ddp-launcher", "ddp-worker", "ddp-proto"]),
];

/// Modules of the worker that a command about files of a run knows.
const KNOWN_MODULES: [(&str, &str); 4] = [
    ("src/cli/train/ckpt/", "checkpoint"),
    ("src/cli/train/inference/", "inference"),
    ("src/cli/train/schedule.rs", "parallel::pipeline"),
    ("src/cli/train/tokenize.rs", "tokenize"),
];

/// Packages of this repository that a manifest depends on, those for tests included, with their lines.
fn dependencies(manifest: &str) -> Vec<(usize, String)> {
    let mut in_dependencies = false;
    let mut found = Vec::new();
    for (index, line) in manifest.lines().map(str::trim).enumerate() {
        if let Some(section) = line.strip_prefix('[') {
            let section = section.trim_end_matches(']');
            in_dependencies = section.ends_with("dependencies") && !section.contains("workspace");
        } else if in_dependencies && line.starts_with("ddp-") {
            let end = line.find(['.', ' ', '=']).unwrap_or(line.len());
            found.push((index + 1, line[..end].to_owned()));
        }
    }
    found
}

fn breaches(path: &str, manifest: &str, may_use: &[&str]) -> Vec<Breach> {
    let found = dependencies(manifest).into_iter();
    found
        .filter(|(_, name)| !may_use.contains(&name.as_str()))
        .map(|(line, name)| Breach::new(path, line, format!("must not depend on `{name}`")))
        .collect()
}

#[test]
fn packages_depend_in_one_direction() {
    for (path, may_use) in LAYERS {
        let manifest = tree::text_of(path);
        assert!(
            may_use.is_empty() || !dependencies(&manifest).is_empty(),
            "{path}"
        );
        assert_none(&breaches(path, &manifest, may_use));
    }
}

#[test]
fn only_one_file_calls_the_training_of_the_worker() {
    let knows_one_module = |path: &str, code: &str| {
        let uses = |module: &str| code.matches(&format!("ddp_worker::{module}")).count();
        let mut known = KNOWN_MODULES.iter().filter(|(place, _)| path.starts_with(place));
        known.any(|(_, module)| uses(&format!("{module}::")) == uses(""))
    };
    let files = tree::rust_files();
    let callers = files.iter().filter(|file| {
        let code = code_only(&file.text);
        let is_caller = file.path.starts_with("src/") && code.contains("ddp_worker::");
        is_caller && !knows_one_module(&file.path, &code)
    });
    let paths: Vec<_> = callers.map(|file| file.path.as_str()).collect();
    assert_eq!(
        paths,
        ["src/cli/native.rs"],
        "the command line must not know how training works"
    );
}

#[test]
fn a_dependency_upward_is_caught() {
    let manifest = "[package]\nname = \"ddp-worker\"\n[dependencies]\nddp-proto.workspace = true\n[dev-dependencies]\nddp-launcher = { path = \"..\" }\n";
    let lines: Vec<_> = breaches("a", manifest, &["ddp-proto"])
        .iter()
        .map(|breach| breach.line)
        .collect();
    assert_eq!(lines, [6]);
}
