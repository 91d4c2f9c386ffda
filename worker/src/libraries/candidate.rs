//! A file that may be the library that is looked for.

use std::cmp::Reverse;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::{Kind, Version};

/// The name by which programs ask for the driver. Its folder may hold drivers of other versions, left over from
/// another installation: the link of this name leads to the one that fits the kernel's part.
const DRIVER_NAME: &str = "libcuda.so.1";

/// Folder of a toolkit whose libraries are for linking only.
const STUBS: &str = "stubs";

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    kind: Kind,
    path: PathBuf,
}

impl Candidate {
    /// Files in `folder` called as the library or `stem.<version>`, the best first: of several versions the highest.
    /// Links that lead nowhere and libraries for other processors are none.
    pub(super) fn in_folder(folder: &Path, kind: Kind) -> Vec<Self> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let mut found: Vec<_> = names
            .filter_map(|name| Some((version_in(&name, kind)?, name)))
            .collect();
        found.sort_by_key(|(version, name)| {
            let asked_for = kind == Kind::Cuda && name == DRIVER_NAME;
            Reverse((asked_for, version.clone()))
        });
        let paths = found.into_iter().map(|(_, name)| folder.join(name));
        paths
            .filter(|path| path.exists() && !is_for_another_processor(path))
            .map(|path| Self { kind, path })
            .collect()
    }

    /// True unless it is known not to work: a stub, or newer than a driver for this CUDA.
    pub(super) fn serves(&self, driver: Option<Version>) -> bool {
        if self.kind == Kind::Cuda {
            return !self.is_stub();
        }
        let newest = driver.filter(|_| self.kind.follows_cuda());
        match (newest, self.major()) {
            (Some(driver), Some(major)) => major <= u64::from(driver.major),
            _ => true,
        }
    }

    /// True of what a toolkit has for linking, by its folder.
    pub(super) fn is_stub(&self) -> bool {
        self.path.components().any(|part| part.as_os_str() == STUBS)
    }

    /// The file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The file.
    pub(super) fn into_path(self) -> PathBuf {
        self.path
    }

    /// Major version, as the file is named for it, or the one that it is a link to.
    fn major(&self) -> Option<u64> {
        let of = |path: &Path| {
            version_in(path.file_name()?.to_str()?, self.kind)?
                .first()
                .copied()
        };
        of(&self.path).or_else(|| of(&self.path.canonicalize().ok()?))
    }
}

/// The numbers after the stem, if a file of that name is such a library.
fn version_in(name: &str, kind: Kind) -> Option<Vec<u64>> {
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

    /// Names of the candidates in a folder with these files.
    fn names(kind: Kind, files: &[(&str, &[u8])]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            std::fs::write(folder.path().join(name), content).unwrap();
        }
        let found = Candidate::in_folder(folder.path(), kind);
        let name = |candidate: &Candidate| candidate.path.file_name().unwrap().to_str().unwrap().to_owned();
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
            names(Kind::Nccl, &files),
            ["libnccl.so.2.28", "libnccl.so.2.9", "libnccl.so.2"]
        );
        assert!(names(Kind::Cuda, &files).is_empty());
    }

    #[test]
    fn the_driver_is_the_one_that_programs_ask_for() {
        let files = ["libcuda.so", "libcuda.so.1", "libcuda.so.580.95.05"].map(|name| (name, &b""[..]));
        assert_eq!(names(Kind::Cuda, &files)[0], "libcuda.so.1");
        assert_eq!(names(Kind::Cuda, &files[2..]), ["libcuda.so.580.95.05"]);
    }

    #[test]
    fn a_link_that_leads_nowhere_is_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/nowhere/at/all", folder.path().join("libnvrtc.so.13")).unwrap();
        std::fs::write(folder.path().join("libnvrtc.so.12"), b"").unwrap();
        let found = Candidate::in_folder(folder.path(), Kind::Nvrtc);
        let paths: Vec<_> = found.iter().map(Candidate::path).collect();
        assert_eq!(paths, [folder.path().join("libnvrtc.so.12")]);
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
        assert_eq!(names(Kind::Cuda, &files), ["libcuda.so.3"]);
    }

    #[test]
    fn a_link_is_of_the_version_that_it_leads_to() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("real")).unwrap();
        let target = folder.path().join("real/libnvrtc.so.13.0.88");
        std::fs::write(&target, b"").unwrap();
        std::os::unix::fs::symlink(&target, folder.path().join("libnvrtc.so")).unwrap();
        let [link] = &Candidate::in_folder(folder.path(), Kind::Nvrtc)[..] else {
            panic!("one file");
        };
        let driver = |major| Version {
            major,
            minor: 0,
            patch: 0,
        };
        assert!(link.serves(None) && link.serves(Some(driver(13))));
        assert!(!link.serves(Some(driver(12))));
    }
}
