//! Which libraries there are, their versions, and which of them a driver is too old for.

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

    /// As its makers call it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cuda => "CUDA driver",
            Self::CublasLt => "cuBLASLt",
            Self::Nvrtc => "NVRTC",
            Self::Nccl => "NCCL",
        }
    }

    /// True of what belongs to one version of CUDA, as its file is named for, and needs a driver that is as new.
    #[must_use]
    pub const fn follows_cuda(self) -> bool {
        matches!(self, Self::CublasLt | Self::Nvrtc)
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
    pub(super) const fn packed(number: u64, major: u64, minor: u64) -> Self {
        Self {
            major: (number / major) as u32,
            minor: (number % major / minor) as u32,
            patch: (number % minor) as u32,
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
    #[must_use]
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
    #[must_use]
    pub fn hint(&self) -> String {
        let (ours, theirs) = (self.driver.major, self.version.major);
        let package = match self.kind {
            LibraryKind::CublasLt => "nvidia-cublas-cu",
            LibraryKind::Nvrtc => "nvidia-cuda-nvrtc-cu",
            LibraryKind::Cuda | LibraryKind::Nccl => unreachable!("they follow no version of CUDA"),
        };
        format!(
            "`pip install {package}{ours}` in a Python environment that is active, or a driver for CUDA {theirs}"
        )
    }
}

impl fmt::Display for Newer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "`{}` ({} {}) is newer than the driver, which is for CUDA {}",
            self.path.display(),
            self.kind.name(),
            self.version,
            self.driver
        )
    }
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
        `/x/libcublasLt.so.13` (cuBLASLt 13.1) is newer than the driver, which is for CUDA 12.4
          hint: `pip install nvidia-cublas-cu12` in a Python environment that is active, or a driver for CUDA 13
        ");
    }
}
