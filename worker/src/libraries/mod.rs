//! Libraries of the machine that are loaded at run time: which file, and its functions.
//!
//! One binary serves every machine, so nothing of CUDA is linked. Discovery looks through the file system and
//! chooses an absolute path; a table of function pointers is filled from it. What is missing is an error that
//! says which library or function, where it was looked for and how to install it.
//!
//! | file | what it is |
//! |---|---|
//! | `discovery` | [`Kind`], [`SearchPath`]: where libraries can be, and the first of a kind |
//! | `library` | [`Library`]: one opened file, never closed again |
//! | `version` | [`Version`]: what a library says of itself |
//! | `table` | `table!`: a struct of function pointers, filled from a library |
//!
//! What it must not know: what the functions do.

mod discovery;
mod error;
mod library;
mod table;
mod version;

pub use discovery::{Found, Kind, SearchPath};
pub use error::LibraryError;
pub use library::Library;
pub(crate) use table::table;
pub use version::Version;
