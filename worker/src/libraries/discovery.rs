//! Which libraries there are, and their files: by name, in the folders where the dynamic loader, a CUDA toolkit or a
//! Python installation has them.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fmt;
use std::io::Read;
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

    /// Stem of the file: `libnccl.so`, followed by nothing or a version.
    pub const fn stem(self) -> &'static str {
        match self {
            Self::Cuda => "libcuda.so",
            Self::CublasLt => "libcublasLt.so",
            Self::Nvrtc => "libnvrtc.so",
            Self::Nccl => "libnccl.so",
        }
    }

    /// As its makers call it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cuda => "CUDA driver",
            Self::CublasLt => "cuBLASLt",
            Self::Nvrtc => "NVRTC",
            Self::Nccl => "NCCL",
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

/// Deepest include of `ld.so.conf` that is followed.
const MAX_INCLUDE_DEPTH: u32 = 4;

/// One library, found or not.
#[derive(Clone, Debug)]
pub struct Found {
    /// Which one.
    pub kind: LibraryKind,
    /// The file, and why its folder was searched.
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
    #[cfg(test)]
    fn of_folders(folders: Vec<PathBuf>) -> Self {
        Self(folders.into_iter().map(|folder| (folder, "given")).collect())
    }

    /// The first library of a kind that serves: a toolkit's stub and a library that is newer than the driver are
    /// passed over where there is another. `driver`: the CUDA that the driver is for; none: unknown.
    pub fn find(&self, kind: LibraryKind, driver: Option<Version>) -> Found {
        let mut candidates = self.candidates(kind).peekable();
        let first = candidates.peek().cloned();
        let at = candidates.find(|(file, _)| serves(kind, file, driver)).or(first);
        Found { kind, at }
    }

    /// The driver, where this file has turned out to be a stub; none: there is no other.
    pub fn driver_beside(&self, stub: &Path) -> Option<PathBuf> {
        let stub = stub.canonicalize().ok();
        let mut files = self.candidates(LibraryKind::Cuda).map(|(file, _)| file);
        files.find(|file| !is_stub(file) && file.canonicalize().ok() != stub)
    }

    /// All libraries of a kind with the reasons for their folders, the first is tried first.
    fn candidates(&self, kind: LibraryKind) -> impl Iterator<Item = (PathBuf, &'static str)> {
        let of_folder = move |(folder, why): &(PathBuf, &'static str)| {
            let why = *why;
            candidates_in(folder, kind)
                .into_iter()
                .map(move |file| (file, why))
        };
        self.0.iter().flat_map(of_folder)
    }

    /// The folders that exist.
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
    entries(folder, |name| name.ends_with(ending))
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
        for version in entries(&libraries, |name| name.starts_with("python3")) {
            for packages in ["site-packages", "dist-packages"] {
                let nvidia = entries(&version.join(packages).join("nvidia"), |_| true);
                let nvidia = nvidia.into_iter().filter(|folder| folder.is_dir());
                folders.extend(nvidia.map(|folder| folder.join("lib")));
            }
        }
    }
    folders
}

/// What a folder holds under names that are to be kept, in order; nothing if it cannot be read.
fn entries(folder: &Path, keep: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let kept = entries.filter(|entry| entry.file_name().to_str().is_some_and(&keep));
    let mut paths: Vec<_> = kept.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// The name by which programs ask for the driver. Its folder may hold drivers of other versions, left over from
/// another installation: the link of this name leads to the one that fits the kernel's part.
const DRIVER_NAME: &str = "libcuda.so.1";

/// Folder of a toolkit whose libraries are for linking only.
const STUBS: &str = "stubs";

/// Files in `folder` named as the library or `stem.<version>`, the best first: of several versions the highest. Links
/// that lead nowhere and libraries for other processors are left out.
fn candidates_in(folder: &Path, kind: LibraryKind) -> Vec<PathBuf> {
    let mut found = entries(folder, |name| version_in(name, kind).is_some());
    found.retain(|path| path.exists() && !is_for_another_processor(path));
    found.sort_by_key(|path| {
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        let asked_for = kind == LibraryKind::Cuda && name == DRIVER_NAME;
        Reverse((asked_for, version_in(name, kind)))
    });
    found
}

/// True unless the file is known not to work: a stub, or newer than a driver for this CUDA.
fn serves(kind: LibraryKind, file: &Path, driver: Option<Version>) -> bool {
    if kind == LibraryKind::Cuda {
        return !is_stub(file);
    }
    let newest = driver.filter(|_| kind.follows_cuda());
    match (newest, major_version(kind, file)) {
        (Some(driver), Some(major)) => major <= u64::from(driver.major),
        _ => true,
    }
}

/// True of what a toolkit has for linking, by its folder.
fn is_stub(file: &Path) -> bool {
    file.components().any(|part| part.as_os_str() == STUBS)
}

/// The major version that the file is named for, or the file that it is a link to.
fn major_version(kind: LibraryKind, file: &Path) -> Option<u64> {
    let of = |path: &Path| {
        let numbers = version_in(path.file_name()?.to_str()?, kind)?;
        numbers.first().copied()
    };
    of(file).or_else(|| of(&file.canonicalize().ok()?))
}

/// The numbers after the stem, if a file of that name is such a library.
fn version_in(name: &str, kind: LibraryKind) -> Option<Vec<u64>> {
    let rest = name.strip_prefix(kind.stem())?;
    if rest.is_empty() {
        return Some(Vec::new());
    }
    let numbers = rest.strip_prefix('.')?.split('.');
    numbers.map(|n| n.parse().ok()).collect()
}

/// True of a library for 32 bits, or of another architecture, beside which the right one may lie in another folder. A
/// file that cannot be read is tried.
fn is_for_another_processor(path: &Path) -> bool {
    // Of an ELF file's header: four bytes of magic, the width; at 18 the processor.
    const WIDE: u8 = 2;
    let machine: Option<u16> = match std::env::consts::ARCH {
        "x86_64" => Some(62),
        "aarch64" => Some(183),
        _ => None,
    };
    let mut header = [0; 20];
    let read = std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut header));
    if read.is_err() || !header.starts_with(b"\x7fELF") {
        return false;
    }
    let found = u16::from_ne_bytes([header[18], header[19]]);
    header[4] != WIDE || machine.is_some_and(|machine| machine != found)
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
    fn it_is_told_with_what_to_install() {
        let path = Path::new("/x/libcublasLt.so.13");
        let newer = Newer::of(LibraryKind::CublasLt, path, version(13, 1), version(12, 4)).unwrap();
        insta::assert_snapshot!(LibraryError::Newer(newer), @r"
        `/x/libcublasLt.so.13` (cuBLASLt 13.1) is newer than the driver, which supports CUDA 12.4
          hint: `pip install nvidia-cublas-cu12` in an active Python environment, or a driver for CUDA 13
        ");
    }

    #[test]
    fn a_stub_and_what_is_newer_than_the_driver_are_passed_over_where_there_is_another() {
        let root = tempfile::tempdir().unwrap();
        let inside = |path: &str| root.path().join(path);
        let files = [
            "stubs/libcuda.so",
            "thirteen/libnvrtc.so.13",
            "thirteen/libcublasLt.so.13",
            "driver/libcuda.so.1",
            "driver/libnvrtc.so.12",
        ];
        for file in files.map(inside) {
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, b"").unwrap();
        }
        let folders = ["stubs", "thirteen", "driver"].map(inside);
        let at = |folders: &[PathBuf], kind, driver| {
            let found = SearchPath::of_folders(folders.to_vec()).find(kind, driver);
            let (path, _) = found.at.unwrap();
            path.strip_prefix(root.path())
                .unwrap()
                .to_str()
                .unwrap()
                .to_owned()
        };
        let driver = |major| {
            Some(Version {
                major,
                minor: 4,
                patch: 0,
            })
        };
        assert_eq!(at(&folders, LibraryKind::Cuda, None), "driver/libcuda.so.1");
        assert_eq!(at(&folders[..1], LibraryKind::Cuda, None), "stubs/libcuda.so");
        assert_eq!(at(&folders, LibraryKind::Nvrtc, None), "thirteen/libnvrtc.so.13");
        assert_eq!(
            at(&folders, LibraryKind::Nvrtc, driver(13)),
            "thirteen/libnvrtc.so.13"
        );
        assert_eq!(
            at(&folders, LibraryKind::Nvrtc, driver(12)),
            "driver/libnvrtc.so.12"
        );
        assert_eq!(
            at(&folders, LibraryKind::CublasLt, driver(12)),
            "thirteen/libcublasLt.so.13",
            "there is no other"
        );
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

    /// Names of the candidates in a folder with these files.
    fn names(kind: LibraryKind, files: &[(&str, &[u8])]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            std::fs::write(folder.path().join(name), content).unwrap();
        }
        let found = candidates_in(folder.path(), kind);
        let name = |file: &PathBuf| file.file_name().unwrap().to_str().unwrap().to_owned();
        found.iter().map(name).collect()
    }

    #[test]
    fn versions_match_and_other_libraries_do_not() {
        let files = [
            "libnccl.so.2",
            "libnccl.so.2.9",
            "libnccl.so.2.28",
            "libnccl.so.bak",
            "libnccl-net.so",
            "libcuda.sox",
        ];
        let files = files.map(|name| (name, &b""[..]));
        assert_eq!(
            names(LibraryKind::Nccl, &files),
            ["libnccl.so.2.28", "libnccl.so.2.9", "libnccl.so.2"]
        );
        assert!(names(LibraryKind::Cuda, &files).is_empty());
    }

    #[test]
    fn the_driver_is_the_one_that_programs_ask_for() {
        let files = ["libcuda.so", "libcuda.so.1", "libcuda.so.580.95.05"].map(|name| (name, &b""[..]));
        assert_eq!(names(LibraryKind::Cuda, &files)[0], "libcuda.so.1");
        assert_eq!(names(LibraryKind::Cuda, &files[2..]), ["libcuda.so.580.95.05"]);
    }

    #[test]
    fn a_link_that_leads_nowhere_is_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/nowhere/at/all", folder.path().join("libnvrtc.so.13")).unwrap();
        std::fs::write(folder.path().join("libnvrtc.so.12"), b"").unwrap();
        let found = candidates_in(folder.path(), LibraryKind::Nvrtc);
        assert_eq!(found, [folder.path().join("libnvrtc.so.12")]);
    }

    #[test]
    fn a_library_of_another_processor_is_passed_over() {
        let own = std::fs::read("/proc/self/exe").unwrap()[..64].to_vec();
        let (mut narrow, mut other) = (own.clone(), own.clone());
        narrow[4] = 1;
        other[18] ^= 1;
        let files = [
            ("libcuda.so.1", &narrow[..]),
            ("libcuda.so.2", &other),
            ("libcuda.so.3", &own),
        ];
        assert_eq!(names(LibraryKind::Cuda, &files), ["libcuda.so.3"]);
    }

    #[test]
    fn a_link_is_of_the_version_that_it_leads_to() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("real")).unwrap();
        let target = folder.path().join("real/libnvrtc.so.13.0.88");
        std::fs::write(&target, b"").unwrap();
        std::os::unix::fs::symlink(&target, folder.path().join("libnvrtc.so")).unwrap();
        let [link] = &candidates_in(folder.path(), LibraryKind::Nvrtc)[..] else {
            panic!("one file");
        };
        let serves_with = |driver| serves(LibraryKind::Nvrtc, link, driver);
        assert!(serves_with(None) && serves_with(Some(version(13, 0))));
        assert!(!serves_with(Some(version(12, 0))));
    }
}
