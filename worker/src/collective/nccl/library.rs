//! The library as a whole: its version, meeting points, and its words for errors.
#![allow(unsafe_code, reason = "functions of a C library")]

use std::ffi::{CStr, c_char};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::sys::{Functions, RawComm, Status, UNIQUE_ID_BYTES, UniqueId, Version};
use crate::collective::Failure;
use crate::libraries::{Kind, Library, LibraryError};

/// NCCL, loaded. Clones are the same.
#[derive(Clone)]
pub struct Nccl(Arc<Inner>);

struct Inner {
    functions: Functions,
    version: Version,
    path: PathBuf,
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL {} of `{}`", self.0.version, self.0.path.display())
    }
}

/// A call that failed, in the library's words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CallError {
    /// The function.
    pub(super) call: &'static str,
    /// What it said.
    pub(super) status: Status,
    /// In words, with what the library said last.
    pub(super) words: String,
}

impl From<CallError> for Failure {
    fn from(error: CallError) -> Self {
        Self::Library {
            call: error.call.to_owned(),
            words: error.words,
            of_peer: error.status == Status::REMOTE_ERROR,
        }
    }
}

impl Nccl {
    /// Loads the first NCCL of the search path of this process.
    pub fn load() -> Result<Self, LibraryError> {
        let library = Library::open(Kind::Nccl)?;
        let functions = Functions::load(&library)?;
        let unusable = |problem| LibraryError::Unusable {
            kind: Kind::Nccl,
            path: library.path().to_owned(),
            problem,
        };
        Self::with(functions, library.path()).map_err(unusable)
    }

    /// NCCL behind these functions; an error in words if it is too old.
    pub(super) fn with(functions: Functions, path: &Path) -> Result<Self, String> {
        let mut code = 0;
        // SAFETY: writes a number where it is told to.
        let status = unsafe { (functions.get_version)(&raw mut code) };
        let version = Version(code);
        if status != Status::SUCCESS || version < Version::LEAST {
            return Err(format!("is NCCL {version}, and {} is the least", Version::LEAST));
        }
        let path = path.to_owned();
        Ok(Self(Arc::new(Inner {
            functions,
            version,
            path,
        })))
    }

    /// Its version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.0.version
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.0.functions
    }

    /// A meeting point at this process, which listens there from now on.
    pub(super) fn unique_id(&self) -> Result<UniqueId, CallError> {
        let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
        // SAFETY: writes an identifier where it is told to.
        let status = unsafe { (self.functions().get_unique_id)(&raw mut id) };
        // SAFETY: no communicator is asked about.
        unsafe { self.check("ncclGetUniqueId", status, std::ptr::null_mut()) }?;
        Ok(id)
    }

    /// An error unless a call has succeeded or goes on; true if it has succeeded.
    ///
    /// # Safety
    /// `comm` must be null or a communicator that is alive.
    pub(super) unsafe fn check(
        &self,
        call: &'static str,
        status: Status,
        comm: RawComm,
    ) -> Result<bool, CallError> {
        match status {
            Status::SUCCESS => Ok(true),
            Status::IN_PROGRESS => Ok(false),
            _ => {
                // SAFETY: any status may be asked for; the caller vouches for the communicator.
                let (meaning, last) = unsafe {
                    (
                        text((self.functions().get_error_string)(status)),
                        text((self.functions().get_last_error)(comm)),
                    )
                };
                let words = match last.trim() {
                    "" => meaning,
                    last => format!("{meaning}: {}", last.replace('\n', " ")),
                };
                Err(CallError { call, status, words })
            }
        }
    }
}

/// # Safety
/// `text` must be null or end with a zero.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
