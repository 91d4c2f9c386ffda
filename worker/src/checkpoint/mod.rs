//! Checkpoints: tensors in safetensors files, and a manifest that says what they are.
//!
//! | file | what it holds |
//! |---|---|
//! | `manifest.rs` | [`Manifest`]: tensors, their regions, the ranges that files hold, and whether they make up each tensor |
//! | `part.rs` | [`Extent`]: the elements of a tensor that a file holds; one safetensors file, its header and its hashes |
//! | `writer.rs` | [`Writer`]: files of many ranks to one checkpoint, all of it or nothing |
//! | `reader.rs` | [`Reader`]: any range of any region of any tensor, verified |
//! | `export.rs` | the parameters in one file for other tools |
//! | `folder.rs` | names and paths below `checkpoints/`; which steps are there, and which stay |
//! | `storage.rs` | the steps that touch the disk, so that a test can stop after each |
//!
//! A checkpoint names tensors by the keys of parameters, with global shapes, and the boxes of them that files hold. Which
//! rank held which elements is not recorded, so that any layout reads it.
//!
//! A checkpoint is written to a temporary folder, synced, renamed to `checkpoints/step_NNNNNNNN`, and named
//! by `checkpoints/latest` last. A crash at any point leaves the checkpoint before it usable. `latest` is a
//! text file with the name of the folder.

mod error;
mod export;
mod folder;
mod manifest;
mod part;
mod reader;
mod storage;
#[cfg(test)]
mod tests;
mod writer;

pub use error::CheckpointError;
pub use export::{ExportedTokenizer, export};
pub use folder::{
    delete_all, delete_unfinished, file_stem, latest_step, point_latest, retain, run_of, step_name,
    step_to_go_on_from, steps_before,
};
pub(crate) use manifest::TOKENIZER_FILE;
pub use manifest::{
    Batch, FORMAT_VERSION, FileRecord, Manifest, RangeRecord, RegionRecord, Rng, State, TensorKind,
    TensorName, TensorRecord,
};
pub use part::{Extent, PartWriter, share_of};
pub(crate) use part::{Header, read_header};
pub use reader::{Reader, Which};
pub(crate) use storage::open_to_read;
pub use storage::{Disk, DiskStep, Storage, ignore_file_size_signal, read_bounded};
pub use writer::{Fence, Writer};
