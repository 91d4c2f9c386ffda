//! Libraries of the machine that are loaded at run time: which file, and its functions.
//!
//! One binary serves every machine, so nothing of CUDA is linked. The first file on the search path that can be opened
//! is taken, and a table of function pointers is filled from it. The error for a missing library or function names it,
//! and says where it was looked for and how to install it.
//!
//! | file | what it is |
//! |---|---|
//! | `discovery` | [`LibraryKind`]: which there are, and where they can be |
//! | `library` | [`Library`]: one opened file, never closed again; `table!`: a struct of function pointers, filled from it; [`exit_at_once`]: the end of a process whose libraries may still be at work |
//!
//! What it must not know: what the functions do.

mod discovery;
mod library;

pub use discovery::{LibraryKind, Version};
pub(crate) use library::table;
pub use library::{Library, LibraryError, exit_at_once};
