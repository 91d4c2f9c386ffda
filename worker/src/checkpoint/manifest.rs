//! The manifest of a checkpoint: how far the run was, and where the elements of each tensor are.
//!
//! Version 2 names a tensor by the key of its parameter and by its kind. The tensor consists of regions, boxes of its
//! global shape, and each region of ranges of its elements, which files hold. So a checkpoint describes any layout, and
//! names no rank. Version 1 has no regions: its tensors are read as one region, the whole.

use std::fmt;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::CheckpointError;
use crate::device::DType;
use crate::model::Region;

/// Version of the manifest that this build writes.
pub const FORMAT_VERSION: u32 = 2;
/// The version before, which is read too.
const VERSION_1: u32 = 1;
/// Most steps, and most samples, of a run: far from where sums of them wrap, and exact in every reader of JSON.
const MAX_COUNT: u64 = 1 << 53;
/// Longest manifest that is read.
pub(super) const MAX_MANIFEST_BYTES: u64 = 256 << 20;

/// How far the run was.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Steps finished.
    pub step: u64,
    /// Samples of the global stream consumed.
    pub consumed_samples: u64,
    /// Steps among them without an update, because their numbers were not finite. 0 in checkpoints of builds that did not
    /// count them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skipped: u64,
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

impl State {
    /// Updates of the optimizer so far.
    #[must_use]
    pub const fn updates(&self) -> u64 {
        self.step.saturating_sub(self.skipped)
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
const fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// What a step was made of when a checkpoint was saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    /// Samples of a step that is not short, over all ranks.
    pub samples: u64,
    /// Ranks that trained them. Nothing else in a checkpoint depends on it.
    pub ranks: u64,
    /// Where the life of the run began that saved the checkpoint; none: its build did not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Since>,
}

/// How far the run was when a life of it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Since {
    /// Steps finished.
    pub step: u64,
    /// Samples consumed by them.
    pub consumed_samples: u64,
}

impl Since {
    /// The life goes on from this state.
    #[must_use]
    pub fn of(state: &State) -> Self {
        Self {
            step: state.step,
            consumed_samples: state.consumed_samples,
        }
    }
}

impl State {
    /// Checks that so many steps can have consumed so many samples; the error is in words.
    fn check(&self) -> Result<(), String> {
        let (step, samples) = (self.step, self.consumed_samples);
        let contradiction = |why: &str| Err(format!("step {step} after {samples} samples, {why}"));
        if step.max(samples) > MAX_COUNT {
            return contradiction("which is more than a run can count");
        }
        if samples < step || (step == 0) != (samples == 0) {
            return contradiction("but each step has at least one");
        }
        if self.skipped > step {
            return contradiction(&format!("but {} steps skipped", self.skipped));
        }
        let Some((batch, since)) = self.batch.and_then(|batch| Some((batch, batch.since?))) else {
            return Ok(());
        };
        let counts = step
            .checked_sub(since.step)
            .zip(samples.checked_sub(since.consumed_samples));
        // The last batch of an epoch may be short.
        let is_exact = self
            .config
            .pointer("/data/last_batch")
            .is_none_or(|last| last != "short");
        let is_possible = counts.is_some_and(|(steps, samples)| {
            let most = u128::from(steps) * u128::from(batch.samples);
            let least = if is_exact { most } else { steps.into() };
            (least..=most).contains(&samples.into())
        });
        if is_possible {
            return Ok(());
        }
        contradiction(&format!(
            "but steps of {} samples from step {} after {} samples on",
            batch.samples, since.step, since.consumed_samples
        ))
    }
}

/// Everything random is a function of these, the step, and a position: no state of a generator is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rng {
    /// `run.seed`.
    pub seed: u64,
    /// Rule of the data order: [`crate::data::ORDER_VERSION`].
    pub data_order: String,
}

/// What a tensor holds of a parameter. Each kind has files of its own, so that parameters can be read alone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TensorKind {
    /// Its values.
    Parameter,
    /// A state slot of the optimizer, by PyTorch's name: `exp_avg`.
    State(String),
}

impl TensorKind {
    /// Parameters, and these slots of the optimizer.
    #[must_use]
    pub fn with_slots(slots: &[&str]) -> Vec<Self> {
        let states = slots.iter().map(|slot| Self::State((*slot).to_owned()));
        std::iter::once(Self::Parameter).chain(states).collect()
    }

    /// The tensor of this kind of a parameter.
    #[must_use]
    pub fn of(&self, key: &str) -> TensorName {
        TensorName {
            kind: self.clone(),
            key: key.to_owned(),
        }
    }
}

/// Names a tensor of a checkpoint: `h.0.ln_1.bias`, or `optimizer.exp_avg.h.0.ln_1.bias`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TensorName {
    /// What it holds of the parameter.
    pub kind: TensorKind,
    /// Key of the parameter.
    pub key: String,
}

impl TensorName {
    /// The name that version 1 gave as one text.
    fn of_version_1(name: &str) -> Self {
        let slots = [("optimizer.m.", "exp_avg"), ("optimizer.v.", "exp_avg_sq")];
        let state = slots.iter().find_map(|(prefix, slot)| {
            let kind = TensorKind::State((*slot).to_owned());
            Some(kind.of(name.strip_prefix(prefix)?))
        });
        state.unwrap_or_else(|| TensorKind::Parameter.of(name))
    }
}

impl fmt::Display for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            TensorKind::Parameter => f.write_str(&self.key),
            TensorKind::State(slot) => write!(f, "optimizer.{slot}.{}", self.key),
        }
    }
}

/// What a checkpoint holds. `T` is a tensor, as the manifest's version describes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest<T = TensorRecord> {
    /// Version that was read, or [`FORMAT_VERSION`].
    pub format_version: u32,
    /// BLAKE3 of the whole file, with zeros in the place of these 64 digits.
    pub(super) blake3: String,
    /// How far the run was.
    #[serde(flatten)]
    pub state: State,
    /// Files of the checkpoint, with their sizes.
    pub files: Vec<FileRecord>,
    /// Tensors, by name.
    pub tensors: Vec<T>,
}

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Name in the folder of the checkpoint.
    pub name: String,
    /// Its size.
    pub bytes: u64,
}

/// A tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorRecord {
    /// Its name.
    #[serde(flatten)]
    pub name: TensorName,
    /// Its global shape.
    pub shape: Vec<u64>,
    /// Type of its elements.
    pub dtype: DType,
    /// The boxes that it consists of: each element is in one of them.
    pub regions: Vec<RegionRecord>,
}

/// A box of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionRecord {
    /// First element and one beyond the last, along each dimension of the tensor.
    #[serde(rename = "box")]
    pub region: Region,
    /// Where its elements are, in order, without gaps and overlaps.
    pub ranges: Vec<RangeRecord>,
}

/// A range of a region's elements, in one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RangeRecord {
    /// Name of the file.
    pub file: String,
    /// Name of the entry in that file.
    pub entry: String,
    /// First element, counted in row-major order of the region.
    pub start: u64,
    /// One beyond the last element.
    pub end: u64,
    /// BLAKE3 of the elements' bytes, little-endian.
    pub blake3: String,
    /// The nodes of its tree above each 16 MiB of them. None where there is no more, and in checkpoints of builds that did
    /// not record them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<String>,
}

impl TensorRecord {
    /// Number of elements; `None` where it does not fit.
    #[must_use]
    pub fn elements(&self) -> Option<u64> {
        Region::whole(&self.shape).elements()
    }

    /// The ranges of all regions.
    pub fn ranges(&self) -> impl Iterator<Item = &RangeRecord> {
        self.regions.iter().flat_map(|region| &region.ranges)
    }
}

/// A tensor of version 1.
#[derive(Deserialize)]
struct TensorVersion1 {
    name: String,
    shape: Vec<u64>,
    dtype: DType,
    pieces: Vec<RangeRecord>,
}

impl From<TensorVersion1> for TensorRecord {
    fn from(tensor: TensorVersion1) -> Self {
        Self {
            name: TensorName::of_version_1(&tensor.name),
            dtype: tensor.dtype,
            regions: vec![RegionRecord {
                region: Region::whole(&tensor.shape),
                ranges: tensor.pieces,
            }],
            shape: tensor.shape,
        }
    }
}

impl Manifest {
    /// The tensor of this name.
    #[must_use]
    pub fn tensor(&self, name: &TensorName) -> Option<&TensorRecord> {
        let at = self.tensors.binary_search_by(|t| t.name.cmp(name)).ok()?;
        Some(&self.tensors[at])
    }

    /// The bytes of `manifest.json`.
    pub(super) fn to_bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        let unsealed = Self {
            format_version: FORMAT_VERSION,
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
        let damaged = |e: &dyn fmt::Display| CheckpointError::damaged(path, e.to_string());
        let text = std::str::from_utf8(bytes).map_err(|e| damaged(&e))?;
        // Before all else: a later version may have other fields, and another seal.
        let version: OnlyVersion = serde_json::from_str(text).map_err(|e| damaged(&e))?;
        let read = match version.format_version {
            FORMAT_VERSION => parse::<TensorRecord>(text),
            VERSION_1 => parse::<TensorVersion1>(text),
            found => {
                return Err(CheckpointError::Version {
                    path: path.to_owned(),
                    found,
                    newest: FORMAT_VERSION,
                });
            }
        };
        let mut manifest = read.map_err(|e| damaged(&e))?;
        let is_seal = manifest.blake3.len() == NO_SEAL.len();
        let unsealed = text.replacen(&manifest.blake3, NO_SEAL, 1);
        if !is_seal || blake3::hash(unsealed.as_bytes()).to_hex().as_str() != manifest.blake3 {
            return Err(damaged(&"its content does not match its own hash"));
        }
        manifest.state.check().map_err(|what| damaged(&what))?;
        manifest.tensors.sort_by(|a, b| a.name.cmp(&b.name));
        let mut neighbours = manifest.tensors.windows(2);
        match neighbours.find(|pair| pair[0].name == pair[1].name) {
            Some(pair) => Err(damaged(&format!("it has tensor `{}` twice", pair[0].name))),
            None => Ok(manifest),
        }
    }
}

/// A manifest whose tensors are described as `T`.
fn parse<T: DeserializeOwned + Into<TensorRecord>>(text: &str) -> Result<Manifest, serde_json::Error> {
    let read: Manifest<T> = serde_json::from_str(text)?;
    Ok(Manifest {
        format_version: read.format_version,
        blake3: read.blake3,
        state: read.state,
        files: read.files,
        tensors: read.tensors.into_iter().map(Into::into).collect(),
    })
}

/// Stands in the place of the hash while the file is hashed.
const NO_SEAL: &str = "0000000000000000000000000000000000000000000000000000000000000000";

#[derive(Deserialize)]
struct OnlyVersion {
    format_version: u32,
}
