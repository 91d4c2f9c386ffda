//! Checkpoints: tensors in safetensors files, and a manifest that says what they are.
//!
//! | file | what it holds |
//! |---|---|
//! | `manifest.rs` | [`Manifest`], version 1: logical tensors and the pieces that they are stored in |
//! | `writer.rs` | [`Writer`]: pieces of many ranks to one checkpoint, all of it or nothing |
//! | `coverage.rs` | do the pieces make up each tensor, without gaps and overlaps |
//! | `part.rs` | one safetensors file, and the index of what is in it |
//! | `reader.rs` | [`Reader`]: any range of any tensor, verified |
//! | `storage.rs` | the steps that touch the disk, so that a test can stop after each |
//! | `layout.rs` | names and paths below `checkpoints/` |
//!
//! A checkpoint names logical tensors with global shapes; which rank held which elements when it was
//! written is not recorded, so that any number of ranks can read it.
//!
//! A checkpoint is written to a temporary folder, synced, renamed to `checkpoints/step_NNNNNNNN`, and named
//! by `checkpoints/latest` last. A crash at any point leaves the checkpoint before it usable. `latest` is a
//! text file with the name of the folder.

mod coverage;
mod error;
mod layout;
mod manifest;
mod part;
mod reader;
mod storage;
#[cfg(test)]
mod tests;
mod writer;

pub use error::CheckpointError;
pub use layout::{latest_step, step_name};
pub use manifest::{FORMAT_VERSION, Manifest, PieceRecord, Rng, State, TensorRecord};
pub use reader::{Expected, Reader, Which};
pub use writer::{Piece, Writer, delete_unfinished};
