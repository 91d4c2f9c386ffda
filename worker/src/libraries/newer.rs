//! Libraries of a later CUDA than the driver's.

use std::fmt;
use std::path::{Path, PathBuf};

use super::{Kind, Version};

/// A library whose CUDA is of a later major version than the driver's, which does not run it. Within one major version
/// all run on all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Newer {
    kind: Kind,
    path: PathBuf,
    version: Version,
    driver: Version,
}

impl Newer {
    /// None where the library follows no version of CUDA, or the driver can run it.
    #[must_use]
    pub fn of(kind: Kind, path: &Path, version: Version, driver: Version) -> Option<Self> {
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
            Kind::CublasLt => "nvidia-cublas-cu",
            Kind::Nvrtc => "nvidia-cuda-nvrtc-cu",
            Kind::Cuda | Kind::Nccl => unreachable!("they follow no version of CUDA"),
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
        assert!(newer(Kind::CublasLt, version(13, 0), version(12, 9)));
        assert!(newer(Kind::Nvrtc, version(13, 0), version(12, 9)));
        assert!(!newer(Kind::Nvrtc, version(12, 9), version(12, 0)));
        assert!(!newer(Kind::Nvrtc, version(12, 9), version(13, 0)));
        assert!(!newer(Kind::Nccl, version(13, 0), version(12, 0)));
    }

    #[test]
    fn it_is_told_with_what_to_install() {
        let path = Path::new("/x/libcublasLt.so.13");
        let newer = Newer::of(Kind::CublasLt, path, version(13, 1), version(12, 4)).unwrap();
        insta::assert_snapshot!(LibraryError::Newer(newer), @r"
        `/x/libcublasLt.so.13` (cuBLASLt 13.1) is newer than the driver, which is for CUDA 12.4
          hint: `pip install nvidia-cublas-cu12` in a Python environment that is active, or a driver for CUDA 13
        ");
    }
}
