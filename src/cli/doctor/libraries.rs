//! Shared libraries by file name, in the folders where the dynamic loader or a Python installation has them.

use std::path::{Path, PathBuf};

/// Deepest include of `ld.so.conf` that is followed.
const MAX_INCLUDE_DEPTH: u32 = 4;

/// What a library is for, and how its files are called.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Stem of the file: `libnccl.so`, followed by nothing or a version.
    pub stem: &'static str,
    /// What needs it.
    pub purpose: &'static str,
    /// How to get it.
    pub hint: &'static str,
}

/// The libraries that are loaded at run time.
pub const WANTED: [Wanted; 4] = [
    Wanted {
        stem: "libcuda.so",
        purpose: "the driver",
        hint: "install the NVIDIA driver; in a container, start it with `--gpus all`",
    },
    Wanted {
        stem: "libcublasLt.so",
        purpose: "matrix products on GPUs",
        hint: "`pip install nvidia-cublas-cu12`, or the CUDA toolkit, and its folder in LD_LIBRARY_PATH",
    },
    Wanted {
        stem: "libnvrtc.so",
        purpose: "kernels compiled on the machine",
        hint: "`pip install nvidia-cuda-nvrtc-cu12`, or the CUDA toolkit, and its folder in LD_LIBRARY_PATH",
    },
    Wanted {
        stem: "libnccl.so",
        purpose: "collectives between GPUs",
        hint: "`pip install nvidia-nccl-cu12`, or the package `libnccl2`, and its folder in LD_LIBRARY_PATH",
    },
];

/// One library, found or not.
#[derive(Clone, Debug)]
pub struct Found {
    /// Which one.
    pub wanted: Wanted,
    /// The first match, and whether the dynamic loader looks there by itself.
    pub at: Option<(PathBuf, bool)>,
}

/// Folders to search, in order, each with whether the dynamic loader looks there by itself.
pub fn search_folders(get_env: impl Fn(&str) -> Option<String>) -> Vec<(PathBuf, bool)> {
    let mut folders: Vec<(PathBuf, bool)> = Vec::new();
    let listed = get_env("LD_LIBRARY_PATH").unwrap_or_default();
    folders.extend(
        listed
            .split(':')
            .filter(|part| !part.is_empty())
            .map(|part| (part.into(), true)),
    );
    let mut configured = Vec::new();
    read_ld_conf(Path::new("/etc/ld.so.conf"), 0, &mut configured);
    folders.extend(configured.into_iter().map(|folder| (folder, true)));
    let arch = std::env::consts::ARCH;
    let defaults = [
        format!("/lib/{arch}-linux-gnu"),
        format!("/usr/lib/{arch}-linux-gnu"),
    ];
    folders.extend(defaults.into_iter().map(|folder| (folder.into(), true)));
    folders.extend(["/lib64", "/usr/lib64", "/lib", "/usr/lib"].map(|folder| (folder.into(), true)));
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        folders.extend(get_env(variable).map(|root| (Path::new(&root).join("lib64"), false)));
    }
    folders.push(("/usr/local/cuda/lib64".into(), false));
    folders.extend(python_folders(&get_env).into_iter().map(|folder| (folder, false)));
    let mut seen = std::collections::BTreeSet::new();
    folders.retain(|(folder, _)| seen.insert(folder.clone()));
    folders
}

/// Looks for each of [`WANTED`] in `folders`.
pub fn find(folders: &[(PathBuf, bool)]) -> Vec<Found> {
    WANTED
        .iter()
        .map(|wanted| {
            let mut matches = folders
                .iter()
                .filter_map(|(folder, loaded)| Some((first_match(folder, wanted.stem)?, *loaded)));
            Found {
                wanted: *wanted,
                at: matches.next(),
            }
        })
        .collect()
}

/// The file in `folder` called `stem` or `stem.<version>`; of several, the last by name.
fn first_match(folder: &Path, stem: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?;
    let fits = |name: &str| {
        name.strip_prefix(stem)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let mut names: Vec<_> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| fits(name) && folder.join(name).exists())
        .collect();
    names.sort();
    names.pop().map(|name| folder.join(name))
}

fn read_ld_conf(file: &Path, depth: u32, folders: &mut Vec<PathBuf>) {
    let Ok(text) = std::fs::read_to_string(file) else {
        return;
    };
    for line in text
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default().trim())
    {
        match line.strip_prefix("include ") {
            Some(pattern) if depth < MAX_INCLUDE_DEPTH => {
                for included in matches_of(Path::new(pattern.trim())) {
                    read_ld_conf(&included, depth + 1, folders);
                }
            }
            Some(_) => {}
            None if line.is_empty() => {}
            None => folders.push(line.into()),
        }
    }
}

/// `folder/*.ending`, the only pattern that distributions use.
fn matches_of(pattern: &Path) -> Vec<PathBuf> {
    let (Some(folder), Some(name)) = (pattern.parent(), pattern.file_name().and_then(|n| n.to_str())) else {
        return Vec::new();
    };
    let Some(ending) = name.strip_prefix('*') else {
        return vec![pattern.to_owned()];
    };
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.to_str().is_some_and(|path| path.ends_with(ending)))
        .collect();
    files.sort();
    files
}

/// `site-packages/nvidia/<library>/lib` of the active environment and of the system's Pythons.
fn python_folders(get_env: &impl Fn(&str) -> Option<String>) -> Vec<PathBuf> {
    let roots = ["VIRTUAL_ENV", "CONDA_PREFIX"]
        .into_iter()
        .filter_map(get_env)
        .map(PathBuf::from);
    let roots = roots.chain(["/usr/local".into(), "/usr".into()]);
    let mut folders = Vec::new();
    for versions in roots.map(|root| root.join("lib")) {
        for version in subfolders(&versions, |name| name.starts_with("python3")) {
            for packages in ["site-packages", "dist-packages"] {
                let nvidia = version.join(packages).join("nvidia");
                folders.extend(
                    subfolders(&nvidia, |_| true)
                        .into_iter()
                        .map(|folder| folder.join("lib")),
                );
            }
        }
    }
    folders
}

fn subfolders(folder: &Path, keep: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let mut found: Vec<_> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_str().is_some_and(&keep))
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_match_and_other_libraries_do_not() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        for name in ["libnccl.so.2", "libnccl.so.2.28", "libnccl-net.so", "libcuda.sox"] {
            std::fs::write(folder.path().join(name), b"").expect("writable");
        }
        let found = find(&[(folder.path().to_owned(), true)]);
        let at = |stem: &str| {
            found
                .iter()
                .find(|f| f.wanted.stem == stem)
                .and_then(|f| f.at.clone())
        };
        assert_eq!(
            at("libnccl.so"),
            Some((folder.path().join("libnccl.so.2.28"), true))
        );
        assert_eq!(at("libcuda.so"), None);
    }

    #[test]
    fn a_python_environment_is_searched() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let lib = root.path().join("lib/python3.11/site-packages/nvidia/nccl/lib");
        std::fs::create_dir_all(&lib).expect("writable");
        let env = root.path().to_str().map(str::to_owned);
        let folders = search_folders(|name| if name == "VIRTUAL_ENV" { env.clone() } else { None });
        assert!(folders.contains(&(lib, false)));
    }
}
