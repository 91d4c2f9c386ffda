//! Checkpoints: tensors in safetensors files, and a manifest that says what they are.
//!
//! | file | what it holds |
//! |---|---|
//! | `manifest.rs` | [`Manifest`], version 1: logical tensors and the pieces that they are stored in |
//! | `writer.rs` | [`Writer`]: pieces of many ranks to one checkpoint, all of it or nothing |
//! | `replacement.rs` | the latest step saved once more, with another content |
//! | `coverage.rs` | do the pieces make up each tensor, without gaps and overlaps |
//! | `extent.rs` | [`Extent`]: ranges of tensors, and their fair division |
//! | `header.rs` | what a safetensors file says of itself |
//! | `part.rs`, `part_writer.rs` | one safetensors file and the index of what is in it; writing it in bounded memory |
//! | `reader.rs` | [`Reader`]: any range of any tensor, verified |
//! | `retention.rs` | [`Keep`]: which checkpoints stay, and how the others go |
//! | `deletion.rs` | all checkpoints of a run deleted, for another run in its folder |
//! | `reshard.rs`, `export.rs` | the same state for another number of ranks; one file for other tools |
//! | `storage.rs` | the steps that touch the disk, so that a test can stop after each |
//! | `file_size.rs` | a limit on file sizes as an error, not a signal |
//! | `layout.rs` | names and paths below `checkpoints/` |
//!
//! A checkpoint names logical tensors with global shapes; which rank held which elements when it was
//! written is not recorded, so that any number of ranks can read it.
//!
//! A checkpoint is written to a temporary folder, synced, renamed to `checkpoints/step_NNNNNNNN`, and named
//! by `checkpoints/latest` last. A crash at any point leaves the checkpoint before it usable. `latest` is a
//! text file with the name of the folder.

mod coverage;
mod deletion;
mod error;
mod export;
mod extent;
mod file_size;
mod header;
mod layout;
mod manifest;
mod part;
mod part_writer;
mod reader;
mod replacement;
mod reshard;
mod retention;
mod storage;
#[cfg(test)]
mod tests;
mod writer;

pub use deletion::delete_all;
pub use error::CheckpointError;
pub use export::export;
pub use extent::{Extent, share_of};
pub use file_size::ignore_file_size_signal;
pub(crate) use header::{Header, HeaderError, read_header};
pub use layout::{Kind, file_stem, latest_step, step_name, step_to_go_on_from};
pub use manifest::{Batch, FORMAT_VERSION, FileRecord, Manifest, PieceRecord, Rng, State, TensorRecord};
pub use part_writer::PartWriter;
pub use reader::{Expected, Reader, Which};
pub use reshard::reshard;
pub use retention::{Keep, retain};
pub use storage::{Disk, Storage};
pub use writer::{Piece, Writer, delete_unfinished};
