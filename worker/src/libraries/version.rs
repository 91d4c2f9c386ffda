//! Versions, as libraries say them of themselves.
#![allow(unsafe_code, reason = "functions of shared libraries are called")]

use std::ffi::c_int;

use super::{Kind, Library, LibraryError, table};

table! {
    struct Cuda {
        version: fn(*mut c_int) -> c_int = "cuDriverGetVersion";
    }
}

table! {
    struct CublasLt {
        version: fn() -> usize = "cublasLtGetVersion";
    }
}

table! {
    struct Nvrtc {
        version: fn(*mut c_int, *mut c_int) -> c_int = "nvrtcVersion";
    }
}

table! {
    struct Nccl {
        version: fn(*mut c_int) -> c_int = "ncclGetVersion";
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
    const fn packed(number: u64, major: u64, minor: u64) -> Self {
        Self {
            major: (number / major) as u32,
            minor: (number % major / minor) as u32,
            patch: (number % minor) as u32,
        }
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)?;
        if self.patch > 0 {
            write!(f, ".{}", self.patch)?;
        }
        Ok(())
    }
}

impl Library {
    /// What it says its version is. The driver says which CUDA it is for.
    pub fn version(&self) -> Result<Version, LibraryError> {
        let (mut first, mut second) = (0, 0);
        // SAFETY, here and below: the functions have no conditions but room for one integer at each address.
        let (outcome, version) = match self.kind() {
            Kind::Cuda => {
                let table = Cuda::load(self)?;
                // SAFETY: as above.
                let outcome = unsafe { (table.version)(&raw mut first) };
                (outcome, Version::packed(first.max(0) as u64, 1000, 10))
            }
            Kind::Nccl => {
                let table = Nccl::load(self)?;
                // SAFETY: as above.
                let outcome = unsafe { (table.version)(&raw mut first) };
                (outcome, Version::packed(first.max(0) as u64, 10_000, 100))
            }
            Kind::Nvrtc => {
                let table = Nvrtc::load(self)?;
                // SAFETY: as above.
                let outcome = unsafe { (table.version)(&raw mut first, &raw mut second) };
                let (major, minor) = (first.max(0) as u32, second.max(0) as u32);
                (
                    outcome,
                    Version {
                        major,
                        minor,
                        patch: 0,
                    },
                )
            }
            Kind::CublasLt => {
                let table = CublasLt::load(self)?;
                // SAFETY: as above.
                let number = unsafe { (table.version)() } as u64;
                // 120804 is 12.8.4, 130401 is 13.4.1.
                (0, Version::packed(number, 10_000, 100))
            }
        };
        if outcome == 0 {
            return Ok(version);
        }
        Err(LibraryError::Unusable {
            kind: self.kind(),
            path: self.path().to_owned(),
            problem: format!("does not say its version (error {outcome})"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_unpacked() {
        assert_eq!(Version::packed(12_080, 1000, 10).to_string(), "12.8");
        assert_eq!(Version::packed(22_803, 10_000, 100).to_string(), "2.28.3");
        assert_eq!(Version::packed(130_401, 10_000, 100).to_string(), "13.4.1");
        assert!(Version::packed(13_000, 1000, 10) > Version::packed(12_090, 1000, 10));
    }

    /// Whatever this machine has: each says something, or why not.
    #[test]
    fn libraries_that_are_there_say_theirs() {
        for kind in Kind::ALL {
            match Library::open(kind) {
                Ok(library) => assert!(library.version().unwrap().major >= 2, "{library:?}"),
                Err(error) => eprintln!("SKIPPED: {error}"),
            }
        }
    }
}
