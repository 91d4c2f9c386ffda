//! Libraries of the machine that are loaded at run time: which file, and its functions.
//!
//! One binary serves every machine, so nothing of CUDA is linked. Discovery looks through the file system and
//! chooses an absolute path; a table of function pointers is filled from it. What is missing is an error that
//! says which library or function, where it was looked for and how to install it.
//!
//! | file | what it is |
//! |---|---|
//! | `kind` | [`Kind`]: which there are |
//! | `discovery` | [`SearchPath`]: where libraries can be, and which one of a kind is taken |
//! | `candidate` | one file that may be taken |
//! | `library` | [`Library`]: one opened file, never closed again |
//! | `version` | [`Version`]: what a library says of itself |
//! | `newer` | [`Newer`]: a library that is too new for the driver |
//! | `table` | `table!`: a struct of function pointers, filled from a library |
//!
//! What it must not know: what the functions do.

mod candidate;
mod discovery;
mod error;
mod kind;
mod library;
mod newer;
mod table;
mod version;

pub use discovery::{Found, SearchPath};
pub use error::LibraryError;
pub use kind::Kind;
pub use library::Library;
pub use newer::Newer;
pub(crate) use table::table;
pub use version::Version;
