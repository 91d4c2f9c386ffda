//! Which libraries there are, and which files are tried for each: by the dynamic loader, in the folders of a CUDA
//! toolkit and in those of a Python installation.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

/// A library that is loaded at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LibraryKind {
    /// The driver.
    Cuda,
    /// Matrix products.
    CublasLt,
    /// The compiler of kernels.
    Nvrtc,
    /// Collectives between GPUs.
    Nccl,
}

/// What there is to say of a library.
#[derive(Debug)]
pub struct LibraryFacts {
    /// Its name in NVIDIA's documents.
    pub name: &'static str,
    /// Name of the file without its version, for messages.
    pub stem: &'static str,
    /// Names of the files that are tried, the newest first.
    pub(super) files: &'static [&'static str],
    /// The function that reports the version.
    pub(super) version_function: &'static str,
    /// The Python package without CUDA's version, of a library that needs a driver as new as its own CUDA.
    package: Option<&'static str>,
    /// What needs it.
    pub purpose: &'static str,
    /// How to get it.
    pub hint: &'static str,
}

impl LibraryKind {
    /// All of them, in the order of reports.
    pub const ALL: [Self; 4] = [Self::Cuda, Self::CublasLt, Self::Nvrtc, Self::Nccl];

    /// What there is to say of it.
    pub const fn facts(self) -> &'static LibraryFacts {
        match self {
            Self::Cuda => &LibraryFacts {
                name: "CUDA driver",
                stem: "libcuda.so",
                files: &["libcuda.so.1"],
                version_function: "cuDriverGetVersion",
                package: None,
                purpose: "the driver",
                hint: "install the NVIDIA driver; in a container, start it with `--gpus all`",
            },
            Self::CublasLt => &LibraryFacts {
                name: "cuBLASLt",
                stem: "libcublasLt.so",
                files: &["libcublasLt.so.13", "libcublasLt.so.12"],
                version_function: "cublasLtGetVersion",
                package: Some("nvidia-cublas-cu"),
                purpose: "matrix products on GPUs",
                hint: "`pip install nvidia-cublas-cu12` in an active Python environment, or the CUDA toolkit",
            },
            Self::Nvrtc => &LibraryFacts {
                name: "NVRTC",
                stem: "libnvrtc.so",
                files: &["libnvrtc.so.13", "libnvrtc.so.12"],
                version_function: "nvrtcVersion",
                package: Some("nvidia-cuda-nvrtc-cu"),
                purpose: "kernels compiled on the machine",
                hint: "`pip install nvidia-cuda-nvrtc-cu12` in an active Python environment, or the CUDA toolkit",
            },
            Self::Nccl => &LibraryFacts {
                name: "NCCL",
                stem: "libnccl.so",
                files: &["libnccl.so.2"],
                version_function: "ncclGetVersion",
                package: None,
                purpose: "collectives between GPUs",
                hint: "the package `libnccl2`, or `pip install nvidia-nccl-cu12` and its folder `nvidia/nccl/lib` in LD_LIBRARY_PATH",
            },
        }
    }

    /// The package of this library that a driver for `driver` runs, where it does not run one of `version`: its major
    /// version of CUDA is later. Within one major version all run on all.
    pub fn older_package(self, version: Version, driver: Version) -> Option<String> {
        let package = self.facts().package.filter(|_| version.major > driver.major)?;
        Some(format!("{package}{}", driver.major))
    }
}

/// A version: `12.8`, `2.28.3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Version {
    /// Before the first point.
    pub major: u32,
    /// After it.
    pub minor: u32,
    /// After the second; 0 where there is none.
    pub patch: u32,
}

impl Version {
    /// `thousands` a major, `tens` a minor number: as CUDA writes 12.8 as 12080 and NCCL 2.28.3 as 22803.
    pub(super) const fn packed(number: u32, major: u32, minor: u32) -> Self {
        Self {
            major: number / major,
            minor: number % major / minor,
            patch: number % minor,
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)?;
        if self.patch > 0 {
            write!(f, ".{}", self.patch)?;
        }
        Ok(())
    }
}

/// What to open until one can be opened: the names that the dynamic loader looks for (`LD_LIBRARY_PATH` included), then
/// files. `driver` is the CUDA that the driver is for, if that is known: what is newer comes last.
pub(super) fn candidates(kind: LibraryKind, folders: &[PathBuf], driver: Option<Version>) -> Vec<PathBuf> {
    let names = || kind.facts().files.iter().map(PathBuf::from);
    let files = folders
        .iter()
        .flat_map(|folder| names().map(|name| folder.join(name)));
    let mut candidates: Vec<_> = names().chain(files.filter(|file| file.exists())).collect();
    candidates.sort_by_key(|file| {
        let major = file.extension().and_then(|major| major.to_str()?.parse().ok());
        let version = major.map(|major| Version {
            major,
            minor: 0,
            patch: 0,
        });
        version
            .zip(driver)
            .and_then(|(version, driver)| kind.older_package(version, driver))
            .is_some()
    });
    candidates
}

/// Folders where the dynamic loader does not look: those of the toolkit, then of the packages of Python, first of the
/// active environment.
pub(super) fn library_folders() -> Vec<PathBuf> {
    folders_of(|name| std::env::var_os(name))
}

fn folders_of(get: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let root = |name| get(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let toolkit = root("CUDA_HOME").or_else(|| root("CUDA_PATH"));
    let toolkit = toolkit.unwrap_or_else(|| "/usr/local/cuda".into());
    let mut folders = vec![toolkit.join("lib64"), toolkit.join("lib")];
    let user = root("HOME").map(|home| home.join(".local"));
    let installed = ["/usr/local", "/usr"].map(|root| Some(root.into()));
    let pythons = [root("VIRTUAL_ENV"), root("CONDA_PREFIX"), user]
        .into_iter()
        .chain(installed);
    for version in pythons.flatten().flat_map(|root| entries(&root.join("lib"))) {
        for packages in ["site-packages", "dist-packages"] {
            let libraries = entries(&version.join(packages).join("nvidia"));
            folders.extend(libraries.into_iter().map(|library| library.join("lib")));
        }
    }
    folders.retain(|folder| folder.is_dir());
    folders
}

/// What a folder holds, in order; nothing if it cannot be read.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::libraries::LibraryError;

    const fn version(major: u32, minor: u32) -> Version {
        Version {
            major,
            minor,
            patch: 0,
        }
    }

    #[test]
    fn only_a_later_major_version_of_what_follows_cuda_is_newer() {
        let newer = |kind: LibraryKind, of, driver| kind.older_package(of, driver).is_some();
        assert!(newer(LibraryKind::CublasLt, version(13, 0), version(12, 9)));
        assert!(newer(LibraryKind::Nvrtc, version(13, 0), version(12, 9)));
        assert!(!newer(LibraryKind::Nvrtc, version(12, 9), version(12, 0)));
        assert!(!newer(LibraryKind::Nvrtc, version(12, 9), version(13, 0)));
        assert!(!newer(LibraryKind::Nccl, version(13, 0), version(12, 0)));
    }

    #[test]
    fn a_newer_library_is_reported_with_what_to_install() {
        let path = Path::new("/x/libcublasLt.so.13");
        let newer = LibraryError::newer(LibraryKind::CublasLt, path, version(13, 1), version(12, 4));
        insta::assert_snapshot!(newer.unwrap(), @r"
        `/x/libcublasLt.so.13` (cuBLASLt 13.1) is newer than the driver, which supports CUDA 12.4
          hint: `pip install nvidia-cublas-cu12` in an active Python environment, or a driver for CUDA 13
        ");
    }

    #[test]
    fn the_loader_is_asked_first_then_the_toolkit_then_python() {
        let root = tempfile::tempdir().unwrap();
        let python = root
            .path()
            .join("venv/lib/python3.11/site-packages/nvidia/nvrtc/lib");
        let folders = [root.path().join("cuda/lib64"), python];
        for (folder, file) in folders.iter().zip(["libnvrtc.so.13", "libnvrtc.so.12"]) {
            std::fs::create_dir_all(folder).unwrap();
            std::fs::write(folder.join(file), b"").unwrap();
        }
        // A link that leads nowhere is passed over, and so is the name for linking.
        std::os::unix::fs::symlink("/nowhere/at/all", folders[1].join("libnvrtc.so.13")).unwrap();
        std::fs::write(folders[1].join("libnvrtc.so"), b"").unwrap();
        let found = folders_of(|name| match name {
            "CUDA_HOME" => Some(root.path().join("cuda").into()),
            "VIRTUAL_ENV" => Some(root.path().join("venv").into()),
            _ => None,
        });
        assert_eq!(found[..2], folders);
        let tried = |driver| candidates(LibraryKind::Nvrtc, &folders, driver);
        let [new, old] = ["libnvrtc.so.13", "libnvrtc.so.12"].map(PathBuf::from);
        let [toolkit, python] = [folders[0].join(&new), folders[1].join(&old)];
        for driver in [None, Some(version(13, 0))] {
            assert_eq!(tried(driver), [&new, &old, &toolkit, &python].map(Clone::clone));
        }
        assert_eq!(tried(Some(version(12, 4))), [old, python, new, toolkit]);
    }
}
