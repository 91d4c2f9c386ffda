//! Which libraries there are, and which files are tried for each: in the folders that the user named, by the dynamic
//! loader, and in those of a CUDA toolkit or a Python installation.

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

impl LibraryKind {
    /// All of them, in the order of reports.
    pub const ALL: [Self; 4] = [Self::Cuda, Self::CublasLt, Self::Nvrtc, Self::Nccl];

    /// Names of the files that are tried, the newest first.
    const fn file_names(self) -> &'static [&'static str] {
        match self {
            Self::Cuda => &["libcuda.so.1"],
            Self::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12"],
            Self::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12"],
            Self::Nccl => &["libnccl.so.2"],
        }
    }

    /// Name of the file without its version, for messages.
    pub const fn stem(self) -> &'static str {
        match self {
            Self::Cuda => "libcuda.so",
            Self::CublasLt => "libcublasLt.so",
            Self::Nvrtc => "libnvrtc.so",
            Self::Nccl => "libnccl.so",
        }
    }

    /// Its name in NVIDIA's documents.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cuda => "CUDA driver",
            Self::CublasLt => "cuBLASLt",
            Self::Nvrtc => "NVRTC",
            Self::Nccl => "NCCL",
        }
    }

    /// The function that reports the version.
    pub(super) const fn version_function(self) -> &'static str {
        match self {
            Self::Cuda => "cuDriverGetVersion",
            Self::CublasLt => "cublasLtGetVersion",
            Self::Nvrtc => "nvrtcVersion",
            Self::Nccl => "ncclGetVersion",
        }
    }

    /// True of what belongs to one version of CUDA, as its file is named for, and needs a driver that is as new.
    pub const fn follows_cuda(self) -> bool {
        matches!(self, Self::CublasLt | Self::Nvrtc)
    }

    /// What needs it.
    pub const fn purpose(self) -> &'static str {
        match self {
            Self::Cuda => "the driver",
            Self::CublasLt => "matrix products on GPUs",
            Self::Nvrtc => "kernels compiled on the machine",
            Self::Nccl => "collectives between GPUs",
        }
    }

    /// How to get it.
    pub const fn hint(self) -> &'static str {
        match self {
            Self::Cuda => "install the NVIDIA driver; in a container, start it with `--gpus all`",
            Self::CublasLt => {
                "`pip install nvidia-cublas-cu12` in an active Python environment, or the CUDA toolkit"
            }
            Self::Nvrtc => {
                "`pip install nvidia-cuda-nvrtc-cu12` in an active Python environment, or the CUDA toolkit"
            }
            Self::Nccl => {
                "`pip install nvidia-nccl-cu12` in an active Python environment, or the package `libnccl2`"
            }
        }
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

/// A library whose CUDA is of a later major version than the driver's, which does not run it. Within one major version
/// all run on all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Newer {
    kind: LibraryKind,
    path: PathBuf,
    version: Version,
    driver: Version,
}

impl Newer {
    /// None where the library follows no version of CUDA, or the driver can run it.
    pub fn of(kind: LibraryKind, path: &Path, version: Version, driver: Version) -> Option<Self> {
        let path = path.to_owned();
        (kind.follows_cuda() && version.major > driver.major).then_some(Self {
            kind,
            path,
            version,
            driver,
        })
    }

    /// What to install instead.
    pub fn hint(&self) -> String {
        let (ours, theirs) = (self.driver.major, self.version.major);
        let package = match self.kind {
            LibraryKind::CublasLt => "nvidia-cublas-cu",
            LibraryKind::Nvrtc => "nvidia-cuda-nvrtc-cu",
            LibraryKind::Cuda | LibraryKind::Nccl => unreachable!("they follow no version of CUDA"),
        };
        format!(
            "`pip install {package}{ours}` in an active Python environment, or a driver for CUDA {theirs}"
        )
    }
}

impl fmt::Display for Newer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "`{}` ({} {}) is newer than the driver, which supports CUDA {}",
            self.path.display(),
            self.kind.name(),
            self.version,
            self.driver
        )
    }
}

/// Where libraries are looked for, in order.
#[derive(Clone, Debug)]
pub struct SearchPath(Vec<Place>);

/// A folder, or the dynamic loader, and why it is searched.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    /// Empty: the dynamic loader is asked for the bare name of the file.
    folder: PathBuf,
    reason: &'static str,
}

/// A file to open, or a bare name for the dynamic loader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) file: PathBuf,
    /// Why it is tried: `LD_LIBRARY_PATH`.
    pub(super) reason: &'static str,
}

impl Candidate {
    /// The dynamic loader looks for the file.
    pub(super) fn is_bare_name(&self) -> bool {
        self.file.parent() == Some(Path::new(""))
    }
}

impl SearchPath {
    /// The search path that the environment of this process gives.
    pub fn of_process() -> Self {
        Self::of(|name| std::env::var(name).ok())
    }

    /// What the user pointed at comes first: `LD_LIBRARY_PATH`, `CUDA_HOME`, the active Python environment. Then the
    /// dynamic loader is asked, and last come the usual folders of a toolkit and of Python packages.
    fn of(get_env: impl Fn(&str) -> Option<String>) -> Self {
        let get = |name: &str| get_env(name).filter(|value| !value.is_empty());
        let listed = get("LD_LIBRARY_PATH").unwrap_or_default();
        let listed = listed.split(':').filter(|folder| !folder.is_empty());
        let mut path = Self(Vec::new());
        path.add(listed.map(PathBuf::from), "LD_LIBRARY_PATH");
        for variable in ["CUDA_HOME", "CUDA_PATH"] {
            path.add(
                get(variable).iter().flat_map(|root| toolkit(Path::new(root))),
                variable,
            );
        }
        for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
            path.add(
                get(variable).iter().flat_map(|root| packages(Path::new(root))),
                variable,
            );
        }
        path.add([PathBuf::new()], "the dynamic loader");
        path.add(toolkit(Path::new("/usr/local/cuda")), "the CUDA toolkit");
        let user = get("HOME").map(|home| Path::new(&home).join(".local"));
        let roots = user.into_iter().chain(["/usr/local", "/usr"].map(PathBuf::from));
        path.add(roots.flat_map(|root| packages(&root)), "Python");
        path
    }

    fn add(&mut self, folders: impl IntoIterator<Item = PathBuf>, reason: &'static str) {
        let folders = folders.into_iter();
        self.0.extend(folders.map(|folder| Place { folder, reason }));
    }

    /// What to open until one can be opened. `driver` is the CUDA that the driver is for, if that is known: what is
    /// newer comes last.
    pub(super) fn candidates(&self, kind: LibraryKind, driver: Option<Version>) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        for Place { folder, reason } in &self.0 {
            let files = kind.file_names().iter().map(|name| folder.join(name));
            let files = files.filter(|file| folder.as_os_str().is_empty() || file.exists());
            candidates.extend(files.map(|file| Candidate { file, reason }));
        }
        candidates.sort_by_key(|candidate| is_newer(kind, &candidate.file, driver));
        candidates
    }

    /// The folders that exist.
    pub fn existing(&self) -> Vec<PathBuf> {
        let folders = self.0.iter().map(|place| &place.folder);
        folders.filter(|folder| folder.is_dir()).cloned().collect()
    }
}

/// Folders with the libraries of a toolkit.
fn toolkit(root: &Path) -> [PathBuf; 2] {
    ["lib64", "lib"].map(|folder| root.join(folder))
}

/// `lib/python3*/{site,dist}-packages/nvidia/<library>/lib` below the root of a Python installation.
fn packages(root: &Path) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for version in entries(&root.join("lib")) {
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

/// True if the file is named for a later CUDA than the driver's.
fn is_newer(kind: LibraryKind, file: &Path, driver: Option<Version>) -> bool {
    let major = file
        .extension()
        .and_then(|major| major.to_str()?.parse::<u32>().ok());
    let driver = driver.filter(|_| kind.follows_cuda());
    matches!((major, driver), (Some(major), Some(driver)) if major > driver.major)
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
        let path = Path::new("/x/lib");
        let newer = |kind, of, driver| Newer::of(kind, path, of, driver).is_some();
        assert!(newer(LibraryKind::CublasLt, version(13, 0), version(12, 9)));
        assert!(newer(LibraryKind::Nvrtc, version(13, 0), version(12, 9)));
        assert!(!newer(LibraryKind::Nvrtc, version(12, 9), version(12, 0)));
        assert!(!newer(LibraryKind::Nvrtc, version(12, 9), version(13, 0)));
        assert!(!newer(LibraryKind::Nccl, version(13, 0), version(12, 0)));
    }

    #[test]
    fn a_newer_library_is_reported_with_what_to_install() {
        let path = Path::new("/x/libcublasLt.so.13");
        let newer = Newer::of(LibraryKind::CublasLt, path, version(13, 1), version(12, 4)).unwrap();
        insta::assert_snapshot!(LibraryError::Newer(newer), @r"
        `/x/libcublasLt.so.13` (cuBLASLt 13.1) is newer than the driver, which supports CUDA 12.4
          hint: `pip install nvidia-cublas-cu12` in an active Python environment, or a driver for CUDA 13
        ");
    }

    /// A folder with these empty files, which a variable points at.
    fn places(files: &[&str], variable: &'static str) -> (tempfile::TempDir, SearchPath) {
        let root = tempfile::tempdir().unwrap();
        for file in files.iter().map(|file| root.path().join(file)) {
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, b"").unwrap();
        }
        let value = root.path().to_str().map(str::to_owned);
        let path = SearchPath::of(|asked| value.clone().filter(|_| asked == variable));
        (root, path)
    }

    /// The files that are tried before the dynamic loader looks for one, below the root.
    fn tried(files: &[&str], variable: &'static str, kind: LibraryKind) -> Vec<String> {
        let (root, path) = places(files, variable);
        let candidates = path.candidates(kind, None).into_iter();
        let named = candidates.take_while(|candidate| !candidate.is_bare_name());
        named
            .map(|Candidate { file, reason }| {
                assert_eq!(reason, variable);
                file.strip_prefix(root.path()).unwrap().display().to_string()
            })
            .collect()
    }

    #[test]
    fn what_the_user_pointed_at_comes_before_the_dynamic_loader() {
        let nccl = |files: &[&str], variable| tried(files, variable, LibraryKind::Nccl);
        let file = "libnccl.so.2";
        assert_eq!(nccl(&[file], "LD_LIBRARY_PATH"), [file]);
        for variable in ["CUDA_HOME", "CUDA_PATH"] {
            assert_eq!(nccl(&["lib64/libnccl.so.2"], variable), ["lib64/libnccl.so.2"]);
        }
        let file = "lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2";
        for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
            assert_eq!(nccl(&[file], variable), [file]);
        }
    }

    #[test]
    fn the_dynamic_loader_is_asked_for_each_name() {
        let (_root, path) = places(&[], "LD_LIBRARY_PATH");
        let candidates = path.candidates(LibraryKind::Nvrtc, None);
        let bare = candidates.iter().filter(|candidate| candidate.is_bare_name());
        let names: Vec<_> = bare.map(|candidate| candidate.file.to_str().unwrap()).collect();
        assert_eq!(names, ["libnvrtc.so.13", "libnvrtc.so.12"]);
    }

    #[test]
    fn only_files_with_the_name_that_programs_ask_for_are_tried() {
        let files = [
            "libcuda.so",
            "libcuda.so.580.95.05",
            "libcuda.sox",
            "libnccl-net.so",
        ];
        let found = |files: &[&str]| tried(files, "LD_LIBRARY_PATH", LibraryKind::Cuda);
        assert_eq!(found(&files), [""; 0], "a toolkit's stub is `libcuda.so`");
        assert_eq!(found(&["libcuda.so", "libcuda.so.1"]), ["libcuda.so.1"]);
    }

    #[test]
    fn what_is_newer_than_the_driver_is_tried_last() {
        let files = ["libnvrtc.so.13", "libnvrtc.so.12"];
        let (_root, path) = places(&files, "LD_LIBRARY_PATH");
        let order = |kind, driver| -> Vec<String> {
            let candidates = path.candidates(kind, driver).into_iter();
            candidates
                .map(|candidate| candidate.file.display().to_string())
                .collect()
        };
        for driver in [None, Some(version(13, 0))] {
            assert!(order(LibraryKind::Nvrtc, driver)[0].ends_with("libnvrtc.so.13"));
        }
        let names = order(LibraryKind::Nvrtc, Some(version(12, 4)));
        let newer = names.iter().position(|name| name.ends_with(".13")).unwrap();
        assert!(
            names[..newer].iter().all(|name| name.ends_with(".12")),
            "{names:?}"
        );
        assert!(
            names[newer..].iter().all(|name| name.ends_with(".13")),
            "{names:?}"
        );
    }

    #[test]
    fn a_link_that_leads_nowhere_is_passed_over() {
        let (root, path) = places(&["libnvrtc.so.12"], "LD_LIBRARY_PATH");
        std::os::unix::fs::symlink("/nowhere/at/all", root.path().join("libnvrtc.so.13")).unwrap();
        let first = &path.candidates(LibraryKind::Nvrtc, None)[0];
        assert_eq!(first.file, root.path().join("libnvrtc.so.12"));
    }
}
