//! One opened library: its functions as tables, its version, and why it cannot be used.
#![allow(
    unsafe_code,
    reason = "shared libraries are opened and their functions taken by name"
)]

use std::ffi::{CStr, OsStr, c_int, c_void};
use std::io::Write;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::discovery::{LibraryKind, Version, candidates, library_folders};

/// An opened library. It is never closed: its functions are kept as plain pointers, and those of CUDA start
/// threads of their own. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Library {
    kind: LibraryKind,
    path: PathBuf,
    handle: &'static libloading::Library,
}

/// Ends the process without the exit handlers of its libraries. They take away what a thread of the library may still
/// use: NCCL's unload its kernels while another thread aborts a communicator, and the process dies of SIGSEGV.
pub fn exit_at_once(code: u8) -> ! {
    let _ = std::io::stdout().flush();
    // SAFETY: the function has no preconditions; that no exit handler runs is what it is for.
    unsafe { libc::_exit(i32::from(code)) }
}

impl Library {
    /// The first library of this kind on the search path of this process that can be opened.
    pub fn open(kind: LibraryKind) -> Result<Self, LibraryError> {
        let driver = if kind == LibraryKind::Cuda {
            None
        } else {
            cuda_of_driver()
        };
        let searched = library_folders();
        let (mut refused, mut loader) = (None, String::new());
        for path in candidates(kind, &searched, driver) {
            match Self::open_at(kind, &path) {
                Ok(library) => return Ok(library),
                Err(error) if is_absence(&words(&error), &path) => loader = words(&error),
                Err(error) => {
                    let problem = format!("cannot be loaded: {}", words(&error));
                    refused.get_or_insert(LibraryError::Unusable { kind, path, problem });
                }
            }
        }
        Err(refused.unwrap_or(LibraryError::NotFound {
            kind,
            searched,
            loader,
        }))
    }

    fn open_at(kind: LibraryKind, file: &Path) -> Result<Self, libloading::Error> {
        // SAFETY: opening runs the library's initialisers. The file has the name of a library of NVIDIA's, whose
        // initialisers may run in any thread at any time.
        let library = unsafe { libloading::Library::new(file) }?;
        let handle = Box::leak(Box::new(library));
        let mut opened = Self {
            kind,
            path: file.to_owned(),
            handle,
        };
        opened.path = opened.loaded_file().unwrap_or(opened.path);
        Ok(opened)
    }

    /// The file that the dynamic loader took, by the address of a function in it.
    fn loaded_file(&self) -> Option<PathBuf> {
        let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
        // SAFETY: the symbol is only an address here. `dladdr` fills the structure if it returns nonzero, with a string
        // that lives as long as the library, which is never closed.
        let name = unsafe {
            let function = self
                .handle
                .get::<*const c_void>(self.kind.facts().version_function)
                .ok()?;
            if libc::dladdr(*function, info.as_mut_ptr()) == 0 || info.assume_init_ref().dli_fname.is_null() {
                return None;
            }
            CStr::from_ptr(info.assume_init_ref().dli_fname)
        };
        Some(OsStr::from_bytes(name.to_bytes()).into())
    }

    /// Its own version; of the driver, the CUDA that it is for.
    pub fn version(&self) -> Result<Version, LibraryError> {
        type Writes = unsafe extern "C" fn(*mut c_int) -> c_int;
        type WritesTwo = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
        type Returns = unsafe extern "C" fn() -> usize;
        let (mut first, mut second) = (0, 0);
        let name = self.kind.facts().version_function;
        // SAFETY: the signatures are those of the libraries' public headers; the functions have no conditions but
        // room for one integer at each address.
        let outcome = unsafe {
            match self.kind {
                LibraryKind::Cuda | LibraryKind::Nccl => self.function::<Writes>(name)?(&raw mut first),
                LibraryKind::Nvrtc => self.function::<WritesTwo>(name)?(&raw mut first, &raw mut second),
                LibraryKind::CublasLt => {
                    first = self.function::<Returns>(name)?() as c_int;
                    0
                }
            }
        };
        if outcome != 0 {
            return Err(self.unusable(format!("does not report its version (error {outcome})")));
        }
        let (first, second) = (first.max(0) as u32, second.max(0) as u32);
        Ok(match self.kind {
            LibraryKind::Cuda => Version::packed(first, 1000, 10),
            LibraryKind::Nccl | LibraryKind::CublasLt => Version::packed(first, 10_000, 100),
            LibraryKind::Nvrtc => Version {
                major: first,
                minor: second,
                patch: 0,
            },
        })
    }

    /// It works, but not with what is asked of it.
    pub(crate) fn unusable(&self, problem: String) -> LibraryError {
        LibraryError::Unusable {
            kind: self.kind,
            path: self.path.clone(),
            problem,
        }
    }

    /// Set, by its own version, if the driver of this process is too old for it.
    pub fn newer_than_driver(&self) -> Option<LibraryError> {
        LibraryError::newer(self.kind, &self.path, self.version().ok()?, cuda_of_driver()?)
    }

    /// The file.
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
        let found = unsafe { self.handle.get::<F>(symbol) };
        let problem =
            || format!("has no function `{symbol}`: it is too old, or a different library of that name");
        found
            .map(|function| *function)
            .map_err(|_| self.unusable(problem()))
    }
}

/// The CUDA that the driver of this process is for; none: there is no driver, or its version is unknown.
fn cuda_of_driver() -> Option<Version> {
    static CUDA: OnceLock<Option<Version>> = OnceLock::new();
    *CUDA.get_or_init(|| Library::open(LibraryKind::Cuda).ok()?.version().ok())
}

/// The loader's own words; they are in the cause of the error.
/// Whether the dynamic loader says that there is no file of this name, and not that it cannot be loaded.
fn is_absence(words: &str, name: &Path) -> bool {
    let absent = format!(
        "{}: cannot open shared object file: No such file or directory",
        name.display()
    );
    name.is_relative() && words == absent
}

fn words(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Defines a struct of function pointers and how it is filled.
///
/// ```ignore
/// table! {
///     /// What of the C library is called.
///     pub(crate) struct C {
///         /// Length of a string.
///         strlen: fn(*const c_char) -> usize = "strlen";
///     }
/// }
/// let c = C::load(&library)?; // an error names the function that is missing
/// ```
///
/// The fields are plain `unsafe extern "C"` function pointers, so a test makes a table of functions of its own by a
/// struct literal. A table is `Copy`, and valid for ever, because libraries are
/// never closed. The module that invokes it must allow `unsafe_code`; the signatures are that module's to get right.
macro_rules! table {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident {
            $($(#[$doc:meta])* $field:ident: fn($($arg:ty),* $(,)?) $(-> $out:ty)? = $symbol:literal;)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug)]
        $vis struct $name {
            $($(#[$doc])* $vis $field: unsafe extern "C" fn($($arg),*) $(-> $out)?,)*
        }

        impl $name {
            /// Takes the functions from a library.
            $vis fn load(
                library: &$crate::libraries::Library,
            ) -> Result<Self, $crate::libraries::LibraryError> {
                Ok(Self {
                    // SAFETY: the signature is the one that the library's public header declares.
                    $($field: unsafe { library.function($symbol) }?,)*
                })
            }
        }
    };
}
pub(crate) use table;

/// A library cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// No file of that name in any of the folders, and none that the dynamic loader finds.
    #[error(
        "`{}` not found; it is needed for {}; searched {}; the dynamic loader: {loader}\n  hint: {}",
        kind.facts().stem, kind.facts().purpose, list(searched), kind.facts().hint
    )]
    NotFound {
        /// What was looked for.
        kind: LibraryKind,
        /// Folders that exist, in the order in which they were searched.
        searched: Vec<PathBuf>,
        /// The answer of the dynamic loader.
        loader: String,
    },
    /// The dynamic loader refuses the file, it lacks a function, or it does not do what is asked of it.
    #[error("`{}` {problem}\n  hint: {}", path.display(), kind.facts().hint)]
    Unusable {
        /// What it is.
        kind: LibraryKind,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// It is what a toolkit has for linking, in place of the driver.
    #[error(
        "`{}` is not the driver but a stub of the CUDA toolkit, for linking only\n  hint: {}",
        path.display(), way_to_the_driver(path)
    )]
    Stub {
        /// The file.
        path: PathBuf,
    },
    /// The driver cannot run it.
    #[error(
        "`{}` ({} {version}) is newer than the driver, which supports CUDA {driver}\n  hint: `pip install {package}` in an \
         active Python environment, or a driver for CUDA {}",
        path.display(), kind.facts().name, version.major
    )]
    Newer {
        /// What it is.
        kind: LibraryKind,
        /// The file.
        path: PathBuf,
        /// Its own version.
        version: Version,
        /// The CUDA that the driver is for.
        driver: Version,
        /// One that the driver runs.
        package: String,
    },
}

impl LibraryError {
    /// None where the driver can run the library.
    pub fn newer(kind: LibraryKind, path: &Path, version: Version, driver: Version) -> Option<Self> {
        let (package, path) = (kind.older_package(version, driver)?, path.to_owned());
        Some(Self::Newer {
            kind,
            path,
            version,
            driver,
            package,
        })
    }

    /// True if there is no such file: nothing is broken.
    pub const fn is_absence(&self) -> bool {
        matches!(self, Self::NotFound { .. })
    }
}

/// What to change so that the driver is found in place of a stub.
fn way_to_the_driver(stub: &Path) -> String {
    format!(
        "remove `{}` from LD_LIBRARY_PATH, and {}; `ldconfig -p | grep libcuda` shows where the driver's library is",
        stub.parent().unwrap_or(stub).display(),
        LibraryKind::Cuda.facts().hint
    )
}

fn list(folders: &[PathBuf]) -> String {
    if folders.is_empty() {
        return "no directory at all".to_owned();
    }
    let names: Vec<_> = folders.iter().map(|f| format!("`{}`", f.display())).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use std::ffi::{c_char, c_int};

    use super::*;
    use crate::libraries::{Library, LibraryError, LibraryKind};

    /// A driver that cannot be loaded is not taken for no driver.
    #[test]
    fn only_a_missing_file_is_an_absence() {
        let name = Path::new("libcuda.so.1");
        let missing = "libcuda.so.1: cannot open shared object file: No such file or directory";
        assert!(is_absence(missing, name));
        for broken in [
            "/images/libcuda.so.1: file too short",
            "libnvidia-ptx.so: cannot open shared object file: No such file or directory",
        ] {
            assert!(!is_absence(broken, name), "{broken}");
        }
        assert!(!is_absence(missing, Path::new("/x/libcuda.so.1")));
    }

    #[test]
    fn a_library_that_is_nowhere_is_reported_with_where_it_was_looked_for() {
        let error = LibraryError::NotFound {
            kind: LibraryKind::Nccl,
            searched: vec!["/a".into(), "/b".into()],
            loader: "libnccl.so.2: cannot open shared object file".to_owned(),
        };
        insta::assert_snapshot!(error, @r"
        `libnccl.so` not found; it is needed for collectives between GPUs; searched `/a`, `/b`; the dynamic loader: libnccl.so.2: cannot open shared object file
          hint: the package `libnccl2`, or `pip install nvidia-nccl-cu12` and its folder `nvidia/nccl/lib` in LD_LIBRARY_PATH
        ");
    }

    table! {
        struct Math {
            abs: fn(c_int) -> c_int = "abs";
            strlen: fn(*const c_char) -> usize = "strlen";
        }
    }

    table! {
        struct Absent {
            absent: fn() = "no_such_function";
        }
    }

    /// The C library that this very process runs on.
    fn libc() -> Library {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let path = maps
            .lines()
            .filter_map(|line| line.split_whitespace().nth(5))
            .find(|path| path.contains("/libc.so") || path.contains("/libc-") || path.contains("/ld-musl"));
        Library::open_at(LibraryKind::Nvrtc, Path::new(path.expect("a C library"))).unwrap()
    }

    #[test]
    fn functions_are_found_and_called() {
        let table = Math::load(&libc()).unwrap();
        // SAFETY: functions of the C library, with a string that ends in a zero.
        let (abs, length) = unsafe { ((table.abs)(-3), (table.strlen)(c"four".as_ptr())) };
        assert_eq!((abs, length), (3, 4));
    }

    #[test]
    fn a_missing_function_is_named() {
        let library = libc();
        let error = Absent::load(&library).map(|table| table.absent).unwrap_err();
        let expected = format!(
            "`{}` has no function `no_such_function`: it is too old, or a different library of that name\n  hint: {}",
            library.path().display(),
            LibraryKind::Nvrtc.facts().hint
        );
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn a_stub_is_reported_with_the_way_to_the_driver() {
        let path = "/usr/local/cuda/lib64/stubs/libcuda.so".into();
        insta::assert_snapshot!(LibraryError::Stub { path }, @r"
        `/usr/local/cuda/lib64/stubs/libcuda.so` is not the driver but a stub of the CUDA toolkit, for linking only
          hint: remove `/usr/local/cuda/lib64/stubs` from LD_LIBRARY_PATH, and install the NVIDIA driver; in a container, start it with `--gpus all`; `ldconfig -p | grep libcuda` shows where the driver's library is
        ");
    }

    #[test]
    fn versions_are_unpacked() {
        assert_eq!(Version::packed(12_080, 1000, 10).to_string(), "12.8");
        assert_eq!(Version::packed(22_803, 10_000, 100).to_string(), "2.28.3");
        assert_eq!(Version::packed(130_401, 10_000, 100).to_string(), "13.4.1");
        assert!(Version::packed(13_000, 1000, 10) > Version::packed(12_090, 1000, 10));
    }

    /// Whatever this machine has: each has a version, or an error.
    #[test]
    fn libraries_that_are_there_say_theirs() {
        for kind in LibraryKind::ALL {
            match Library::open(kind) {
                Ok(library) => assert!(library.version().unwrap().major >= 2, "{library:?}"),
                Err(error) => eprintln!("SKIPPED: {error}"),
            }
        }
    }
}
