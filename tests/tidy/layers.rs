//! `src → launcher, worker → proto`, never sideways, never upward.

use crate::rust_text::{code_only, is_word_at, line_of};
use crate::{Breach, assert_none, tree};

/// A package, its folder, and the packages of this repository that it may know.
struct Layer {
    package: &'static str,
    folder: &'static str,
    may_use: &'static [&'static str],
}

const LAYERS: [Layer; 5] = [
    Layer {
        package: "ddp-proto",
        folder: "proto/",
        may_use: &[],
    },
    Layer {
        package: "ddp-launcher",
        folder: "launcher/",
        may_use: &["ddp-proto"],
    },
    Layer {
        package: "ddp-worker",
        folder: "worker/",
        may_use: &["ddp-proto"],
    },
    Layer {
        package: "custom-worker",
        folder: "examples/custom-worker/",
        may_use: &["ddp-worker", "ddp-proto"],
    },
    Layer {
        package: "ddp-run",
        folder: "src/",
        may_use: &["ddp-launcher", "ddp-worker", "ddp-proto"],
    },
];

/// Packages that `manifest` depends on, those for tests included, with their lines.
fn dependencies(manifest: &str) -> Vec<(usize, String)> {
    let mut in_dependencies = false;
    let mut found = Vec::new();
    for (index, line) in manifest.lines().map(str::trim).enumerate() {
        if let Some(section) = line.strip_prefix('[') {
            in_dependencies =
                section.trim_end_matches(']').ends_with("dependencies") && !section.contains("workspace");
        } else if in_dependencies && !line.starts_with('#') {
            let name: String = line
                .chars()
                .take_while(|c| c.is_alphanumeric() || matches!(c, '-' | '_'))
                .collect();
            found.push((index + 1, name));
        }
    }
    found
}

fn manifest_breaches(layer: &Layer, path: &str, manifest: &str) -> Vec<Breach> {
    let forbidden = |name: &str| LAYERS.iter().any(|l| l.package == name) && !layer.may_use.contains(&name);
    dependencies(manifest)
        .into_iter()
        .filter(|(_, name)| forbidden(name))
        .map(|(line, name)| Breach::new(path, line, format!("`{}` must not know `{name}`", layer.package)))
        .collect()
}

fn source_breaches(layer: &Layer, path: &str, text: &str) -> Vec<Breach> {
    let code = code_only(text);
    let mut breaches = Vec::new();
    for other in LAYERS.iter().filter(|other| other.package != layer.package) {
        let name = other.package.replace('-', "_");
        let uses = code
            .match_indices(&format!("{name}::"))
            .map(|(at, _)| at)
            .collect::<Vec<_>>();
        for at in uses.into_iter().filter(|at| is_word_at(&code, *at, &name)) {
            if !layer.may_use.contains(&other.package) {
                let what = format!("`{}` must not know `{}`", layer.package, other.package);
                breaches.push(Breach::new(path, line_of(&code, at), what));
            }
        }
    }
    breaches
}

#[test]
fn packages_depend_in_one_direction() {
    let files = tree::files();
    let mut breaches = Vec::new();
    for layer in &LAYERS {
        let manifest_path = if layer.folder == "src/" {
            "Cargo.toml".to_owned()
        } else {
            format!("{}Cargo.toml", layer.folder)
        };
        let manifest = files
            .iter()
            .find(|f| f.path == manifest_path)
            .expect("a manifest");
        assert!(
            !dependencies(&manifest.text).is_empty(),
            "`{manifest_path}` was not understood"
        );
        breaches.extend(manifest_breaches(layer, &manifest_path, &manifest.text));
        let sources = files
            .iter()
            .filter(|f| f.is_rust() && f.path.starts_with(layer.folder));
        breaches.extend(sources.flat_map(|f| source_breaches(layer, &f.path, &f.text)));
    }
    assert_none(&breaches);
}

#[test]
fn only_one_file_calls_the_training_of_the_worker() {
    let files = tree::rust_files();
    // Commands about files of the worker, which no training has to do with.
    let knows_only_files = |path: &str, code: &str| {
        let known = [
            ("src/cli/train/ckpt/", "checkpoint"),
            ("src/cli/train/inference/", "inference"),
            ("src/cli/train/plot.rs", "metrics"),
            ("src/cli/train/schedule.rs", "parallel::pipeline"),
            ("src/cli/train/tokenize.rs", "tokenize"),
        ];
        known.iter().any(|(folder, module)| {
            let known = code.matches(&format!("ddp_worker::{module}::")).count();
            path.starts_with(folder) && code.matches("ddp_worker::").count() == known
        })
    };
    let callers = files.iter().filter(|f| {
        let code = code_only(&f.text);
        f.path.starts_with("src/") && code.contains("ddp_worker::") && !knows_only_files(&f.path, &code)
    });
    let paths: Vec<_> = callers.map(|f| f.path.as_str()).collect();
    assert_eq!(
        paths,
        ["src/cli/native.rs"],
        "the command line must not know how training works"
    );
}

#[test]
fn a_dependency_upward_is_caught() {
    let worker = LAYERS.iter().find(|l| l.package == "ddp-worker").expect("listed");
    let manifest = "[package]\nname = \"ddp-worker\"\n[dependencies]\nddp-proto.workspace = true\n[dev-dependencies]\nddp-launcher = { path = \"..\" }\n";
    assert_eq!(manifest_breaches(worker, "worker/Cargo.toml", manifest).len(), 1);
    let source = "// ddp_launcher::run\nuse ddp_proto::env;\nuse ddp_launcher::run;\n";
    let breaches = source_breaches(worker, "worker/src/a.rs", source);
    assert_eq!(breaches.iter().map(|b| b.line).collect::<Vec<_>>(), [3]);
}
