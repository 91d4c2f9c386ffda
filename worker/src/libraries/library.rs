//! One opened library.
#![allow(
    unsafe_code,
    reason = "shared libraries are opened and their functions taken by name"
)]

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::{Kind, LibraryError, Newer, SearchPath, Version};

/// An opened library. It is never closed: its functions are kept as plain pointers, and those of CUDA start
/// threads of their own. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Library {
    kind: Kind,
    path: PathBuf,
    handle: &'static libloading::Library,
}

impl Library {
    /// The library of this kind that discovery takes on the search path of this process.
    pub fn open(kind: Kind) -> Result<Self, LibraryError> {
        let path = SearchPath::of_process();
        let driver = if kind.follows_cuda() {
            cuda_of_driver()
        } else {
            None
        };
        match path.find(kind, driver).at {
            Some((file, _)) => Self::open_at(kind, &file),
            None => Err(LibraryError::NotFound {
                kind,
                searched: path.existing(),
            }),
        }
    }

    /// The file at an absolute path.
    pub fn open_at(kind: Kind, path: &Path) -> Result<Self, LibraryError> {
        // SAFETY: opening runs the library's initialisers. Discovery chose a file by the name of a library of
        // NVIDIA's, whose initialisers may run in any thread at any time.
        let opened = unsafe { libloading::Library::new(path) };
        let library = opened.map_err(|error| LibraryError::NotLoaded {
            kind,
            path: path.to_owned(),
            cause: words(&error),
        })?;
        Ok(Self {
            kind,
            path: path.to_owned(),
            handle: Box::leak(Box::new(library)),
        })
    }

    /// Set, by its own version, if the driver of this process is too old for it.
    #[must_use]
    pub fn newer_than_driver(&self) -> Option<Newer> {
        if !self.kind.follows_cuda() {
            return None;
        }
        Newer::of(self.kind, &self.path, self.version().ok()?, cuda_of_driver()?)
    }

    /// What it is.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A function, as a pointer.
    ///
    /// # Safety
    /// `F` must be the type of an `extern "C"` function pointer with the signature of that function.
    pub unsafe fn function<F: Copy>(&self, symbol: &'static str) -> Result<F, LibraryError> {
        const { assert!(size_of::<F>() == size_of::<fn()>()) }
        // SAFETY: the caller vouches for the type; the library stays open for the rest of the process.
        match unsafe { self.handle.get::<F>(symbol) } {
            Ok(function) => Ok(*function),
            Err(_) => Err(LibraryError::NoSymbol {
                kind: self.kind,
                path: self.path.clone(),
                symbol,
            }),
        }
    }
}

/// The CUDA that the driver of this process is for; none: there is no driver, or it does not say.
fn cuda_of_driver() -> Option<Version> {
    static CUDA: OnceLock<Option<Version>> = OnceLock::new();
    *CUDA.get_or_init(|| Library::open(Kind::Cuda).ok()?.version().ok())
}

/// The loader's own words; they are in the cause of the error.
fn words(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_library_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libnccl.so.2");
        std::fs::write(&path, b"not a library").unwrap();
        let error = Library::open_at(Kind::Nccl, &path).unwrap_err().to_string();
        assert!(error.contains("libnccl.so.2` cannot be loaded"), "{error}");
        assert!(
            error.contains("\n  hint: `pip install nvidia-nccl-cu12`"),
            "{error}"
        );
    }
}
