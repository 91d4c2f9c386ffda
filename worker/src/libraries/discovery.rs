//! Shared libraries by file name, in the folders where the dynamic loader, a CUDA toolkit or a Python
//! installation has them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Deepest include of `ld.so.conf` that is followed.
const MAX_INCLUDE_DEPTH: u32 = 4;

/// A library that is loaded at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The driver.
    Cuda,
    /// Matrix products.
    CublasLt,
    /// The compiler of kernels.
    Nvrtc,
    /// Collectives between GPUs.
    Nccl,
}

impl Kind {
    /// All of them, in the order of reports.
    pub const ALL: [Self; 4] = [Self::Cuda, Self::CublasLt, Self::Nvrtc, Self::Nccl];

    /// Stem of the file: `libnccl.so`, followed by nothing or a version.
    #[must_use]
    pub const fn stem(self) -> &'static str {
        match self {
            Self::Cuda => "libcuda.so",
            Self::CublasLt => "libcublasLt.so",
            Self::Nvrtc => "libnvrtc.so",
            Self::Nccl => "libnccl.so",
        }
    }

    /// What needs it.
    #[must_use]
    pub const fn purpose(self) -> &'static str {
        match self {
            Self::Cuda => "the driver",
            Self::CublasLt => "matrix products on GPUs",
            Self::Nvrtc => "kernels compiled on the machine",
            Self::Nccl => "collectives between GPUs",
        }
    }

    /// How to get it.
    #[must_use]
    pub const fn hint(self) -> &'static str {
        match self {
            Self::Cuda => "install the NVIDIA driver; in a container, start it with `--gpus all`",
            Self::CublasLt => {
                "`pip install nvidia-cublas-cu12` in a Python environment that is active, or the CUDA toolkit"
            }
            Self::Nvrtc => {
                "`pip install nvidia-cuda-nvrtc-cu12` in a Python environment that is active, or the CUDA toolkit"
            }
            Self::Nccl => {
                "`pip install nvidia-nccl-cu12` in a Python environment that is active, or the package `libnccl2`"
            }
        }
    }
}

/// One library, found or not.
#[derive(Clone, Debug)]
pub struct Found {
    /// Which one.
    pub kind: Kind,
    /// The first match, and why its folder was searched.
    pub at: Option<(PathBuf, &'static str)>,
}

/// Folders in which libraries are looked for, in order, each with what made it one.
///
/// What the user pointed at comes first: `LD_LIBRARY_PATH`, `CUDA_HOME`, the active Python environment. Then the
/// system's folders, and last the environments of the `python3` that would be run.
#[derive(Clone, Debug, Default)]
pub struct SearchPath(Vec<(PathBuf, &'static str)>);

impl SearchPath {
    /// By the environment of this process.
    #[must_use]
    pub fn of_process() -> Self {
        Self::of(|name| std::env::var(name).ok())
    }

    /// By these environment variables.
    pub fn of(get_env: impl Fn(&str) -> Option<String>) -> Self {
        let mut folders: Vec<(PathBuf, &'static str)> = Vec::new();
        let mut add = |list: Vec<PathBuf>, why| folders.extend(list.into_iter().map(|folder| (folder, why)));
        add(path_list(get_env("LD_LIBRARY_PATH")), "LD_LIBRARY_PATH");
        for variable in ["CUDA_HOME", "CUDA_PATH"] {
            add(toolkit(get_env(variable)), variable);
        }
        for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
            add(python_folders(get_env(variable).map(PathBuf::from)), variable);
        }
        let mut configured = Vec::new();
        read_ld_conf(Path::new("/etc/ld.so.conf"), 0, &mut configured);
        add(configured, "ld.so.conf");
        add(default_folders(), "the system");
        add(toolkit(Some("/usr/local/cuda".to_owned())), "the CUDA toolkit");
        add(python_folders(python_roots(&get_env)), "Python");
        let mut seen = BTreeSet::new();
        folders.retain(|(folder, _)| seen.insert(folder.clone()));
        Self(folders)
    }

    /// Just these folders.
    #[must_use]
    pub fn of_folders(folders: Vec<PathBuf>) -> Self {
        Self(folders.into_iter().map(|folder| (folder, "given")).collect())
    }

    /// The first library of a kind.
    #[must_use]
    pub fn find(&self, kind: Kind) -> Found {
        let mut matches = self
            .0
            .iter()
            .filter_map(|(folder, why)| Some((first_match(folder, kind.stem())?, *why)));
        Found {
            kind,
            at: matches.next(),
        }
    }

    /// The folders that exist.
    #[must_use]
    pub fn existing(&self) -> Vec<PathBuf> {
        let folders = self.0.iter().map(|(folder, _)| folder);
        folders.filter(|folder| folder.is_dir()).cloned().collect()
    }
}

fn path_list(value: Option<String>) -> Vec<PathBuf> {
    let value = value.unwrap_or_default();
    let parts = value.split(':').filter(|part| !part.is_empty());
    parts.map(PathBuf::from).collect()
}

/// The folders of a toolkit at `root`.
fn toolkit(root: Option<String>) -> Vec<PathBuf> {
    let folders = root.map(|root| ["lib64", "lib"].map(|folder| Path::new(&root).join(folder)));
    folders.into_iter().flatten().collect()
}

fn default_folders() -> Vec<PathBuf> {
    let arch = std::env::consts::ARCH;
    let multiarch = ["/lib", "/usr/lib"].map(|lib| PathBuf::from(format!("{lib}/{arch}-linux-gnu")));
    let plain = ["/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib"].map(PathBuf::from);
    // Where WSL keeps its driver.
    let wsl = [PathBuf::from("/usr/lib/wsl/lib")];
    multiarch.into_iter().chain(plain).chain(wsl).collect()
}

/// The file in `folder` called `stem` or `stem.<version>`; of several, the highest version.
fn first_match(folder: &Path, stem: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?;
    let version = |name: &str| -> Option<Vec<u64>> {
        let rest = name.strip_prefix(stem)?;
        if rest.is_empty() {
            return Some(Vec::new());
        }
        let numbers = rest.strip_prefix('.')?.split('.');
        numbers.map(|n| n.parse().ok()).collect()
    };
    let names = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok());
    let fitting = names.filter_map(|name| Some((version(&name)?, name)));
    let (_, name) = fitting.filter(|(_, name)| folder.join(name).exists()).max()?;
    Some(folder.join(name))
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

/// Roots of the Pythons that would be run: for each `python3` of `PATH` the folder above it, unresolved, because the
/// `python3` of a virtual environment is a link to another one's, and where it is a link the folder above what it
/// names, because `/usr/local/bin/python3` may be one into a virtual environment; the user's own packages; and the
/// system's.
fn python_roots(get_env: &impl Fn(&str) -> Option<String>) -> Vec<PathBuf> {
    let folders = path_list(get_env("PATH")).into_iter();
    let with_python = folders.filter(|folder| folder.join("python3").exists());
    let in_path = with_python.flat_map(|folder| {
        let named = std::fs::read_link(folder.join("python3")).ok();
        let named = named.and_then(|python| Some(folder.join(python.parent()?)));
        let above = |folder: &Path| folder.parent().map(Path::to_owned);
        [above(&folder), named.as_deref().and_then(above)]
            .into_iter()
            .flatten()
    });
    let user = get_env("HOME").map(|home| Path::new(&home).join(".local"));
    let system = ["/usr/local", "/usr"].map(PathBuf::from);
    in_path.chain(user).chain(system).collect()
}

/// `lib/python3*/{site,dist}-packages/nvidia/<library>/lib` of each root.
fn python_folders(roots: impl IntoIterator<Item = PathBuf>) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for libraries in roots.into_iter().map(|root| root.join("lib")) {
        for version in subfolders(&libraries, |name| name.starts_with("python3")) {
            for packages in ["site-packages", "dist-packages"] {
                let nvidia = subfolders(&version.join(packages).join("nvidia"), |_| true);
                folders.extend(nvidia.into_iter().map(|folder| folder.join("lib")));
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
        let folder = tempfile::tempdir().unwrap();
        for name in [
            "libnccl.so.2",
            "libnccl.so.2.9",
            "libnccl.so.2.28",
            "libnccl.so.bak",
            "libnccl-net.so",
            "libcuda.sox",
        ] {
            std::fs::write(folder.path().join(name), b"").unwrap();
        }
        let path = SearchPath::of_folders(vec![folder.path().to_owned()]);
        let at = |kind| path.find(kind).at.map(|(file, _)| file);
        assert_eq!(at(Kind::Nccl), Some(folder.path().join("libnccl.so.2.28")));
        assert_eq!(at(Kind::Cuda), None);
    }

    #[test]
    fn a_link_that_leads_nowhere_is_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/nowhere/at/all", folder.path().join("libnvrtc.so.13")).unwrap();
        std::fs::write(folder.path().join("libnvrtc.so.12"), b"").unwrap();
        let found = SearchPath::of_folders(vec![folder.path().to_owned()]).find(Kind::Nvrtc);
        assert_eq!(found.at.unwrap().0, folder.path().join("libnvrtc.so.12"));
    }

    #[test]
    fn a_python_that_is_a_link_into_a_virtual_environment_leads_to_its_libraries() {
        let root = tempfile::tempdir().unwrap();
        let inside = |path: &str| root.path().join(path);
        let libraries = |root: &Path| root.join("lib/python3.12/site-packages/nvidia/nccl/lib");
        for folder in ["usr/bin", "venv/bin", "base/bin"] {
            std::fs::create_dir_all(inside(folder)).unwrap();
        }
        std::fs::create_dir_all(libraries(&inside("venv"))).unwrap();
        std::fs::write(inside("base/bin/python3"), b"").unwrap();
        std::os::unix::fs::symlink(inside("base/bin/python3"), inside("venv/bin/python3")).unwrap();
        for link in [inside("venv/bin/python3"), "../../venv/bin/python3".into()] {
            std::os::unix::fs::symlink(link, inside("usr/bin/python3")).unwrap();
            let path = inside("usr/bin").to_str().map(str::to_owned);
            let SearchPath(folders) = SearchPath::of(|asked| path.clone().filter(|_| asked == "PATH"));
            let venv = libraries(&inside("venv")).canonicalize().unwrap();
            let mut found = folders.iter().filter(|(_, why)| *why == "Python");
            assert!(
                found.any(|(folder, _)| folder.canonicalize().is_ok_and(|folder| folder == venv)),
                "{folders:?}"
            );
            std::fs::remove_file(inside("usr/bin/python3")).unwrap();
        }
    }

    #[test]
    fn what_the_user_pointed_at_comes_first() {
        let root = tempfile::tempdir().unwrap();
        let inside = |path: &str| root.path().join(path);
        let lib = |library: &str| inside(&format!("lib/python3.11/site-packages/nvidia/{library}/lib"));
        for folder in [lib("nccl"), lib("cu13"), inside("bin")] {
            std::fs::create_dir_all(folder).unwrap();
        }
        std::fs::write(inside("bin/python3"), b"").unwrap();
        let env = root.path().to_str().map(str::to_owned);
        let folders = |name: &'static str| {
            let value = match name {
                "PATH" => inside("bin").to_str().map(str::to_owned),
                _ => env.clone(),
            };
            let SearchPath(folders) = SearchPath::of(|asked| value.clone().filter(|_| asked == name));
            folders
        };
        let active = folders("VIRTUAL_ENV");
        assert_eq!(
            active[..2],
            [(lib("cu13"), "VIRTUAL_ENV"), (lib("nccl"), "VIRTUAL_ENV")]
        );
        assert_eq!(
            folders("LD_LIBRARY_PATH")[0],
            (root.path().to_owned(), "LD_LIBRARY_PATH")
        );
        assert_eq!(folders("CUDA_HOME")[0], (inside("lib64"), "CUDA_HOME"));
        let in_path = folders("PATH");
        let python = in_path
            .iter()
            .position(|f| *f == (lib("nccl"), "Python"))
            .unwrap();
        let system = in_path.iter().position(|(_, why)| *why == "the system").unwrap();
        assert!(
            system < python,
            "the system's libraries come before those of a Python in `PATH`"
        );
    }
}
