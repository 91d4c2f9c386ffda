//! Kinds of token files, known by their first bytes and not by their names.
//!
//! | file | what it holds |
//! |---|---|
//! | `layout.rs` | [`Layout`]: where the tokens of a file lie, and what it says of them |
//! | `named.rs` | our own kind: a safetensors file with one tensor |
//! | `llm_c.rs` | the `.bin` of llm.c and modded-nanogpt |

mod layout;
mod llm_c;
mod named;

pub(super) use layout::Layout;
pub use layout::{TokenFacts, Width};
pub(crate) use named::{HEADER_BYTES, header};
