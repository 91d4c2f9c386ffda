//! Why a library cannot be used.

use std::path::{Path, PathBuf};

use super::{Kind, Newer};

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// No file of that name in any of the folders.
    #[error(
        "`{}` is not found, which is needed for {}; looked in {}\n  hint: {}",
        kind.stem(), kind.purpose(), list(searched), kind.hint()
    )]
    NotFound {
        /// What was looked for.
        kind: Kind,
        /// Folders that exist, in the order in which they were searched.
        searched: Vec<PathBuf>,
    },
    /// The dynamic loader refused the file.
    #[error("`{}` cannot be loaded: {cause}\n  hint: {}", path.display(), kind.hint())]
    NotLoaded {
        /// What it should be.
        kind: Kind,
        /// The file.
        path: PathBuf,
        /// The loader's words.
        cause: String,
    },
    /// The file lacks a function.
    #[error(
        "`{}` has no function `{symbol}`: it is too old, or another library of that name\n  hint: {}",
        path.display(), kind.hint()
    )]
    NoSymbol {
        /// What it should be.
        kind: Kind,
        /// The file.
        path: PathBuf,
        /// The function.
        symbol: &'static str,
    },
    /// The library works, but not with what is asked of it.
    #[error("`{}` {problem}\n  hint: {}", path.display(), kind.hint())]
    Unusable {
        /// What it is.
        kind: Kind,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// It is what a toolkit has for linking, in place of the driver.
    #[error(
        "`{}` is not the driver, but a stub of the CUDA toolkit, for linking only\n  hint: {}",
        path.display(), way_to_the_driver(path, driver.as_deref())
    )]
    Stub {
        /// The file.
        path: PathBuf,
        /// The driver, if there is one behind it on the search path.
        driver: Option<PathBuf>,
    },
    /// The driver cannot run it.
    #[error("{0}\n  hint: {hint}", hint = .0.hint())]
    Newer(Newer),
}

impl LibraryError {
    /// True if there is no such file: nothing is broken.
    #[must_use]
    pub const fn is_absence(&self) -> bool {
        matches!(self, Self::NotFound { .. })
    }
}

/// What to change so that the driver is found in place of a stub.
fn way_to_the_driver(stub: &Path, driver: Option<&Path>) -> String {
    let folder = |path: &Path| path.parent().unwrap_or(path).display().to_string();
    match driver {
        Some(driver) => format!(
            "the driver is `{}`: put `{}` first in LD_LIBRARY_PATH",
            driver.display(),
            folder(driver)
        ),
        None => format!(
            "take `{}` out of LD_LIBRARY_PATH, and {}; `ldconfig -p | grep libcuda` shows where the driver's is",
            folder(stub),
            Kind::Cuda.hint()
        ),
    }
}

fn list(folders: &[PathBuf]) -> String {
    if folders.is_empty() {
        return "no folder at all".to_owned();
    }
    let names: Vec<_> = folders.iter().map(|f| format!("`{}`", f.display())).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stub_is_told_with_the_way_to_the_driver() {
        let stub = |driver: Option<&str>| LibraryError::Stub {
            path: "/usr/local/cuda/lib64/stubs/libcuda.so".into(),
            driver: driver.map(PathBuf::from),
        };
        insta::assert_snapshot!(stub(None), @r"
        `/usr/local/cuda/lib64/stubs/libcuda.so` is not the driver, but a stub of the CUDA toolkit, for linking only
          hint: take `/usr/local/cuda/lib64/stubs` out of LD_LIBRARY_PATH, and install the NVIDIA driver; in a container, start it with `--gpus all`; `ldconfig -p | grep libcuda` shows where the driver's is
        ");
        insta::assert_snapshot!(stub(Some("/usr/lib64/libcuda.so.1")), @r"
        `/usr/local/cuda/lib64/stubs/libcuda.so` is not the driver, but a stub of the CUDA toolkit, for linking only
          hint: the driver is `/usr/lib64/libcuda.so.1`: put `/usr/lib64` first in LD_LIBRARY_PATH
        ");
    }
}
