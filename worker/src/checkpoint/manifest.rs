//! The manifest of a checkpoint: how far the run was, and where the elements of each tensor are.
//!
//! It names a tensor by the key of its parameter and by its kind. The tensor consists of regions, boxes of its global
//! shape, and each region of ranges of its elements, which files hold. So a checkpoint describes any layout, and names no
//! rank. [`TensorRecord::check`] finds gaps and overlaps.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::CheckpointError;
use super::error::type_and_shape;
use super::storage::read_bounded;
use crate::device::DType;
use crate::model::Region;

/// Version of the manifest that this build reads and writes.
pub const FORMAT_VERSION: u32 = 3;
/// Most steps, and most samples, of a run: far from where sums of them wrap, and exact in every reader of JSON.
const MAX_COUNT: u64 = 1 << 53;
/// Longest manifest that is read.
const MAX_MANIFEST_BYTES: u64 = 256 << 20;
/// Most corners that the regions of a tensor may have, 2 to the number of cut dimensions each: it bounds memory and time.
const MAX_CORNERS: u64 = 1 << 18;
/// Most dimensions along which a tensor may be cut. Layouts cut along one or two; the bound is for a few bytes of a
/// manifest that would have all [`MAX_CORNERS`].
const MAX_CUT_DIMS: usize = 4;

/// Key in section `data` of a manifest's configuration: where the tokenizer's file was, whose hash `tokenizer` has.
pub(crate) const TOKENIZER_FILE: &str = "tokenizer_file";

/// How far the run was.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Steps finished.
    pub step: u64,
    /// Samples of the global stream consumed.
    pub consumed_samples: u64,
    /// Steps among them without an update, because their numbers were not finite.
    pub skipped: u64,
    /// What a step was made of; `None` before the run knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<Batch>,
    /// The keys of everything random.
    pub rng: Rng,
    /// The configuration, as the run used it.
    pub config: serde_json::Value,
    /// The training text: its length, and a hash.
    pub data: String,
    /// The same of `data.val`; `None` if that was not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub val_data: Option<String>,
}

impl State {
    /// Updates of the optimizer until this step.
    pub const fn updates(&self) -> u64 {
        self.step.saturating_sub(self.skipped)
    }

    /// Checks that `step` steps can have consumed `consumed_samples` samples; the error is in words.
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
        Ok(())
    }
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
    pub fn with_slots(slots: &[&str]) -> Vec<Self> {
        let states = slots.iter().map(|slot| Self::State((*slot).to_owned()));
        std::iter::once(Self::Parameter).chain(states).collect()
    }

    /// The tensor of this kind of a parameter.
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
    /// What a box of the tensor is called, which has this shape: `h.0.ln_1.bias[0..8]`, and as the tensor if it is all.
    pub(super) fn of_region(&self, region: &Region, shape: &[u64]) -> String {
        if region.is_whole(shape) {
            return self.to_string();
        }
        format!("{self}{region}")
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

/// What a checkpoint holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT_VERSION`].
    pub format_version: u32,
    /// BLAKE3 of the whole file, with zeros in the place of these 64 digits.
    pub(super) blake3: String,
    /// How far the run was.
    #[serde(flatten)]
    pub state: State,
    /// Files of the checkpoint, with their sizes.
    pub files: Vec<FileRecord>,
    /// Tensors, by name.
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
    /// BLAKE3 of each 16 MiB of the elements' bytes, little-endian, in their order.
    pub blocks: Vec<String>,
}

impl TensorRecord {
    /// Number of elements; `None` where it does not fit.
    pub fn elements(&self) -> Option<u64> {
        Region::whole(&self.shape).elements()
    }

    /// The ranges of all regions, with their region.
    pub fn ranges(&self) -> impl Iterator<Item = (&Region, &RangeRecord)> {
        let regions = self.regions.iter();
        regions.flat_map(|RegionRecord { region, ranges }| ranges.iter().map(move |range| (region, range)))
    }

    /// Sorts the regions of a tensor and their ranges, and checks that each element is in exactly one range; the error
    /// is in words.
    pub(super) fn check(&mut self) -> Result<(), String> {
        self.regions.sort_by(|a, b| a.region.cmp(&b.region));
        let tiled = check_regions(self).and_then(|()| self.regions.iter_mut().try_for_each(check_ranges));
        tiled.map_err(|what| self.contradiction(&what))
    }

    /// Adds what another file holds of the tensor; the error is in words.
    fn add(&mut self, other: Self) -> Result<(), String> {
        if (self.dtype, &self.shape) != (other.dtype, &other.shape) {
            let [one, other] = [&*self, &other].map(|tensor| type_and_shape(tensor.dtype, &tensor.shape));
            return Err(self.contradiction(&format!("one file says {one}, another {other}")));
        }
        self.regions.extend(other.regions);
        Ok(())
    }

    fn contradiction(&self, what: &str) -> String {
        let name = &self.name;
        format!("the regions and ranges of tensor `{name}` do not cover it exactly: {what}")
    }
}

/// Joins what each file holds to whole tensors, by name, in which each box is one region; the error is in words.
pub(super) fn join(parts: Vec<TensorRecord>) -> Result<Vec<TensorRecord>, String> {
    let mut tensors: BTreeMap<TensorName, TensorRecord> = BTreeMap::new();
    for part in parts {
        match tensors.get_mut(&part.name) {
            Some(known) => known.add(part)?,
            None => {
                tensors.insert(part.name.clone(), part);
            }
        }
    }
    let mut tensors: Vec<TensorRecord> = tensors.into_values().collect();
    for tensor in &mut tensors {
        tensor.regions.sort_by(|a, b| a.region.cmp(&b.region));
        tensor.regions.dedup_by(|next, kept| {
            let is_same = next.region == kept.region;
            if is_same {
                kept.ranges.append(&mut next.ranges);
            }
            is_same
        });
        tensor.check()?;
    }
    Ok(tensors)
}

impl Manifest {
    /// The tensor of this name.
    pub fn tensor(&self, name: &TensorName) -> Option<&TensorRecord> {
        let at = self.tensors.binary_search_by(|t| t.name.cmp(name)).ok()?;
        Some(&self.tensors[at])
    }

    /// The bytes of `manifest.json`.
    pub(super) fn to_bytes(&self) -> Result<Vec<u8>, CheckpointError> {
        let unsealed = Self {
            format_version: FORMAT_VERSION,
            blake3: NO_SEAL.into(),
            ..self.clone()
        };
        let text = serde_json::to_string_pretty(&unsealed);
        let text = text.map_err(|e| CheckpointError::Misuse(e.to_string()))? + "\n";
        // The field comes before everything that could contain 64 zeros of its own.
        let seal = blake3::hash(text.as_bytes()).to_hex();
        Ok(text.replacen(NO_SEAL, &seal, 1).into_bytes())
    }

    /// Reads `manifest.json`, which is at `path`.
    pub(super) fn read(path: &Path) -> Result<Self, CheckpointError> {
        let bytes = read_bounded(path, MAX_MANIFEST_BYTES).map_err(|e| CheckpointError::unread(path, &e))?;
        let damaged = |e: &dyn fmt::Display| CheckpointError::damaged(path, e.to_string());
        let text = std::str::from_utf8(&bytes).map_err(|e| damaged(&e))?;
        // Before all else: a later version may have other fields, and another seal.
        let version: OnlyVersion = serde_json::from_str(text).map_err(|e| damaged(&e))?;
        if version.format_version != FORMAT_VERSION {
            let found = version.format_version;
            return Err(CheckpointError::Foreign {
                path: path.to_owned(),
                what: format!(" has format version {found}, this build reads {FORMAT_VERSION}"),
                hint: "resume with the release that wrote it",
            });
        }
        let mut manifest: Self = serde_json::from_str(text).map_err(|e| damaged(&e))?;
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

/// Stands in the place of the hash while the file is hashed.
const NO_SEAL: &str = "0000000000000000000000000000000000000000000000000000000000000000";

#[derive(Deserialize)]
struct OnlyVersion {
    format_version: u32,
}

/// Each element of the tensor is in one region; the error is in words.
///
/// A corner of a box counts +1 or −1, by whether it has an even or an odd number of ends. These sums determine how many
/// boxes each element is in: they are those of the whole tensor exactly if the boxes tile it. At the first corner that
/// differs no earlier one contributes, so its sum is by how much the element there is counted wrongly.
fn check_regions(tensor: &TensorRecord) -> Result<(), String> {
    let shape = &tensor.shape;
    if tensor.elements().is_none() {
        return Err(format!("shape {shape:?} has more elements than can be counted"));
    }
    if let Some(found) = tensor.regions.iter().find(|found| !found.region.is_within(shape)) {
        return Err(format!("region {} does not fit shape {shape:?}", found.region));
    }
    if tensor.elements() == Some(0) {
        return Ok(());
    }
    let is_cut = |dim: &usize| {
        let mut bounds = tensor.regions.iter().map(|found| found.region.bounds()[*dim]);
        bounds.any(|bounds| bounds != [0, shape[*dim]])
    };
    let cut: Vec<usize> = (0..shape.len()).filter(is_cut).collect();
    let each = (cut.len() <= MAX_CUT_DIMS).then(|| 1_u64 << cut.len());
    let corners = each.and_then(|each| each.checked_mul(tensor.regions.len() as u64 + 1));
    let Some(each) = each.filter(|_| corners.is_some_and(|corners| corners <= MAX_CORNERS)) else {
        let regions = tensor.regions.len();
        return Err(format!(
            "it has {regions} regions, cut along {} dimensions: more than can be checked",
            cut.len()
        ));
    };
    let whole = cut.iter().map(|&dim| [0, shape[dim]]).collect::<Vec<_>>();
    let boxes = tensor.regions.iter().map(|found| {
        let bounds = found.region.bounds();
        (1_i64, cut.iter().map(|&dim| bounds[dim]).collect())
    });
    let mut sums: BTreeMap<Vec<u64>, i64> = BTreeMap::new();
    for (weight, bounds) in boxes.chain([(-1, whole)]) {
        for corner in 0..each {
            let ends = |dim: usize| (corner >> dim & 1) as usize;
            let at = bounds
                .iter()
                .enumerate()
                .map(|(dim, bounds)| bounds[ends(dim)])
                .collect();
            let sign = if corner.count_ones().is_multiple_of(2) {
                weight
            } else {
                -weight
            };
            *sums.entry(at).or_default() += sign;
        }
    }
    let Some((at, sum)) = sums.into_iter().find(|(_, sum)| *sum != 0) else {
        return Ok(());
    };
    let mut element = vec![0; shape.len()];
    cut.iter().zip(at).for_each(|(&dim, index)| element[dim] = index);
    let times = if sum < 0 {
        "no region"
    } else {
        "more than one region"
    };
    Err(format!("element {element:?} is in {times}"))
}

/// Sorts the ranges of a region, and checks that each element is in one of them; the error is in words.
fn check_ranges(found: &mut RegionRecord) -> Result<(), String> {
    let elements = found.region.elements().unwrap_or(0);
    let region = &found.region;
    found.ranges.sort_by_key(|range| (range.start, range.end));
    let mut covered = 0;
    for range in &found.ranges {
        let (start, end, file) = (range.start, range.end, &range.file);
        if start > end || end > elements {
            return Err(format!(
                "`{file}` has elements {start}..{end} of {elements} of region {region}"
            ));
        }
        if start > covered {
            return Err(format!(
                "elements {covered}..{start} of region {region} are in no file"
            ));
        }
        if start < covered {
            let both = covered.min(end);
            return Err(format!(
                "elements {start}..{both} of region {region} are stored twice, also in `{file}`"
            ));
        }
        covered = end;
    }
    if covered < elements {
        return Err(format!(
            "elements {covered}..{elements} of region {region} are in no file"
        ));
    }
    Ok(())
}

#[cfg(test)]
#[path = "manifest_tests.rs"]
mod tests;
