//! The manifest of a checkpoint, version 1.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::CheckpointError;
use crate::device::DType;

/// Version of the manifest that this build writes and reads.
pub const FORMAT_VERSION: u32 = 1;
/// Longest manifest that is read.
pub(super) const MAX_MANIFEST_BYTES: u64 = 256 << 20;

/// Where the run stood.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Steps finished.
    pub step: u64,
    /// Samples of the global stream consumed.
    pub consumed_samples: u64,
    /// What a step was made of; none: saved by a build that did not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<Batch>,
    /// The keys of everything random.
    pub rng: Rng,
    /// The configuration, as the run used it.
    pub config: serde_json::Value,
    /// The training text: its length, and a hash. None in checkpoints of builds that did not record it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
}

/// What a step was made of when a checkpoint was saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    /// Samples of a step that is not short, over all ranks.
    pub samples: u64,
    /// Ranks that trained them. Nothing else in a checkpoint depends on it.
    pub ranks: u64,
}

/// Everything random is a function of these, the step, and a position: no state of a generator is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rng {
    /// `run.seed`.
    pub seed: u64,
    /// Rule of the data order: [`crate::data::ORDER_VERSION`].
    pub data_order: String,
}

/// What a checkpoint holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT_VERSION`].
    pub format_version: u32,
    /// BLAKE3 of the whole file, with zeros in the place of these 64 digits.
    pub(super) blake3: String,
    /// Where the run stood.
    #[serde(flatten)]
    pub state: State,
    /// Files of the checkpoint, with their sizes.
    pub files: Vec<FileRecord>,
    /// Logical tensors, by name.
    pub tensors: Vec<TensorRecord>,
}

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Name in the folder of the checkpoint.
    pub name: String,
    /// Its size.
    pub bytes: u64,
}

/// A logical tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorRecord {
    /// Its name.
    pub name: String,
    /// Its global shape.
    pub shape: Vec<u64>,
    /// Type of its elements.
    pub dtype: DType,
    /// Where its elements are, in order, without gaps and overlaps.
    pub pieces: Vec<PieceRecord>,
}

/// A range of a tensor's elements, in one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PieceRecord {
    /// Name of the file.
    pub file: String,
    /// Name of the entry in that file.
    pub entry: String,
    /// First element, counted in row-major order.
    pub start: u64,
    /// One beyond the last element.
    pub end: u64,
    /// BLAKE3 of the elements' bytes, little-endian.
    pub blake3: String,
}

impl TensorRecord {
    /// Number of elements; `None` where it does not fit.
    #[must_use]
    pub fn elements(&self) -> Option<u64> {
        self.shape.iter().try_fold(1_u64, |n, d| n.checked_mul(*d))
    }
}

impl Manifest {
    /// The tensor of this name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&TensorRecord> {
        let at = self
            .tensors
            .binary_search_by(|t| t.name.as_str().cmp(name))
            .ok()?;
        Some(&self.tensors[at])
    }

    /// The bytes of `manifest.json`.
    pub(super) fn to_bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        let unsealed = Self {
            blake3: NO_SEAL.into(),
            ..self.clone()
        };
        let text = serde_json::to_string_pretty(&unsealed)? + "\n";
        // The field comes before everything that could contain 64 zeros of its own.
        let seal = blake3::hash(text.as_bytes()).to_hex();
        Ok(text.replacen(NO_SEAL, &seal, 1).into_bytes())
    }

    /// Reads `manifest.json`, found at `path`.
    pub(super) fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Self, CheckpointError> {
        let damaged = |e: &dyn std::fmt::Display| CheckpointError::damaged(path, e.to_string());
        let text = std::str::from_utf8(bytes).map_err(|e| damaged(&e))?;
        // Before all else: a later version may have other fields, and another seal.
        let version: OnlyVersion = serde_json::from_str(text).map_err(|e| damaged(&e))?;
        if version.format_version != FORMAT_VERSION {
            return Err(CheckpointError::Version {
                path: path.to_owned(),
                found: version.format_version,
                expected: FORMAT_VERSION,
            });
        }
        let mut manifest: Self = serde_json::from_str(text).map_err(|e| damaged(&e))?;
        let is_seal = manifest.blake3.len() == NO_SEAL.len();
        let unsealed = text.replacen(&manifest.blake3, NO_SEAL, 1);
        if !is_seal || blake3::hash(unsealed.as_bytes()).to_hex().as_str() != manifest.blake3 {
            return Err(damaged(&"its content does not match its own hash"));
        }
        manifest.tensors.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(manifest)
    }
}

/// Stands in the place of the hash while the file is hashed.
const NO_SEAL: &str = "0000000000000000000000000000000000000000000000000000000000000000";

#[derive(Deserialize)]
struct OnlyVersion {
    format_version: u32,
}
