//! What `--version` says beside the version: the commit, and how the programs were built.
//!
//! `DDP_COMMIT` names the commit, where it is set. Else git does, but for release builds only: in a development build, each
//! commit would compile the crate and its tests once more.

use std::env;
use std::path::Path;
use std::process::Command;

/// Changes in these make a commit's programs others than its own.
const SOURCES: [&str; 7] = [
    "Cargo.toml",
    "Cargo.lock",
    "src",
    "launcher/src",
    "proto/proto",
    "proto/src",
    "worker/src",
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=DDP_COMMIT");
    let variable = |name: &str| env::var(name).unwrap_or_default();
    let (version, profile) = (variable("CARGO_PKG_VERSION"), variable("PROFILE"));
    let commit = match variable("DDP_COMMIT") {
        given if !given.is_empty() => Some(given),
        _ if profile == "release" => commit_of_git(),
        _ => None,
    };
    let commit = commit.map_or_else(|| format!("{profile} build"), |commit| format!("commit {commit}"));
    println!("cargo::rustc-env=DDP_VERSION={version} ({commit})");
    let features = "backends: cpu, nccl (CUDA's libraries are loaded at run time)";
    println!(
        "cargo::rustc-env=DDP_BUILD={}, {profile}; {features}",
        variable("TARGET")
    );
}

/// None outside of a checkout, or without git.
fn commit_of_git() -> Option<String> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let git = |arguments: &[&str]| {
        let mut git = Command::new("git");
        // Sources that were unpacked inside another checkout are not that one's.
        git.env("GIT_CEILING_DIRECTORIES", here.parent()?)
            .current_dir(here);
        let said = git
            .args(arguments)
            .output()
            .ok()
            .filter(|said| said.status.success())?;
        Some(String::from_utf8(said.stdout).ok()?.trim().to_owned())
    };
    let commit = git(&["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"])?;
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|log| here.join(log).exists());
    for file in SOURCES.into_iter().chain(log.as_deref()) {
        println!("cargo::rerun-if-changed={file}");
    }
    Some(commit)
}
