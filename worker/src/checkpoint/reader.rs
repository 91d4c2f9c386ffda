//! Any range of any region of any tensor of a checkpoint, verified.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read as _;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::error::type_and_shape;
use super::layout::{self, LATEST, MANIFEST};
use super::manifest::{
    MAX_MANIFEST_BYTES, Manifest, RangeRecord, RegionRecord, TensorKind, TensorName, TensorRecord,
};
use super::part::{self, Entry, HashBlock};
use super::{CheckpointError, Extent, coverage, storage};
use crate::config::{self, OptimizerConfig};
use crate::device::DType;
use crate::model::{self, Overlap, Region};
use crate::optim;

/// Bytes that are hashed at once.
const CHUNK_BYTES: u64 = 1 << 20;
/// Most bytes of several runs that are read at once.
const BATCH_BYTES: u64 = 4 << 20;
/// Bytes that are read and dropped rather than left out by a second read.
const MAX_GAP_BYTES: u64 = 16 << 10;
/// The parameter whose rows are the vocabulary.
const EMBEDDING: &str = "wte.weight";

/// Which checkpoint of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// The one that `checkpoints/latest` names; where that is lost, the newest whole one.
    Latest,
    /// The one after this many finished steps.
    Step(u64),
}

/// A tensor that a model has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected<'a> {
    /// Its name.
    pub tensor: &'a TensorName,
    /// Its global shape.
    pub shape: &'a [u64],
    /// Type of its elements.
    pub dtype: DType,
}

impl<'a> Expected<'a> {
    /// The tensor of which this is a part.
    #[must_use]
    pub fn of(extent: &'a Extent) -> Self {
        Self {
            tensor: &extent.tensor,
            shape: &extent.shape,
            dtype: extent.dtype,
        }
    }
}

/// An opened checkpoint. Sizes and headers of all files are checked when it is opened; the hash of a block of a
/// range when its first byte is read.
pub struct Reader {
    path: PathBuf,
    manifest: Manifest,
    files: HashMap<String, Part>,
    /// File, entry and number of the blocks whose hash was right.
    verified: Mutex<HashSet<(String, String, usize)>>,
}

/// A file, opened for each range that is read of it: thousands of ranks may have written one each.
struct Part {
    path: PathBuf,
    entries: HashMap<String, Entry>,
}

impl Part {
    fn open(&self) -> Result<File, CheckpointError> {
        storage::open_to_read(&self.path).map_err(|e| CheckpointError::unread(&self.path, &e))
    }

    fn read_at(&self, file: &File, out: &mut [u8], offset: u64) -> Result<(), CheckpointError> {
        file.read_exact_at(out, offset)
            .map_err(|e| CheckpointError::io("read", &self.path, &e))
    }
}

impl Reader {
    /// Opens a checkpoint below the folder of a run.
    pub fn open(out_dir: &Path, which: Which) -> Result<Self, CheckpointError> {
        let root = layout::folder(out_dir);
        let step = match which {
            Which::Step(step) => step,
            Which::Latest => layout::step_to_go_on_from(out_dir)
                .map_err(|e| CheckpointError::io("read", &root.join(LATEST), &e))?
                .ok_or(CheckpointError::None { path: root.clone() })?,
        };
        Self::open_folder(&root.join(layout::step_name(step)))
    }

    /// Opens the checkpoint in this very folder.
    pub fn open_folder(path: &Path) -> Result<Self, CheckpointError> {
        let manifest_path = path.join(MANIFEST);
        let mut manifest = read_manifest(&manifest_path)?;
        check_name(path, &manifest)?;
        let mut files = HashMap::new();
        for record in &manifest.files {
            let part = open_part(path, &record.name, record.bytes)?;
            files.insert(record.name.clone(), part);
        }
        for tensor in &mut manifest.tensors {
            coverage::check(tensor).map_err(|e| CheckpointError::damaged(&manifest_path, e.to_string()))?;
            for range in tensor.ranges() {
                check_range(path, &files, tensor.dtype, range)?;
            }
        }
        Ok(Self {
            path: path.to_owned(),
            manifest,
            files,
            verified: Mutex::default(),
        })
    }

    /// What the checkpoint holds.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Checks that the checkpoint has exactly these tensors; the error names the first difference, in the
    /// order given.
    pub fn expect(&self, expected: &[Expected<'_>]) -> Result<(), CheckpointError> {
        for tensor in expected {
            let found = self.tensor(tensor.tensor)?;
            if found.dtype != tensor.dtype || found.shape != tensor.shape {
                return Err(CheckpointError::Differs {
                    path: self.path.clone(),
                    tensor: tensor.tensor.to_string(),
                    found: type_and_shape(found.dtype, &found.shape),
                    expected: type_and_shape(tensor.dtype, tensor.shape),
                });
            }
        }
        let names: HashSet<&TensorName> = expected.iter().map(|t| t.tensor).collect();
        match self.manifest.tensors.iter().find(|t| !names.contains(&t.name)) {
            None => Ok(()),
            Some(extra) => Err(CheckpointError::Unexpected {
                path: self.path.clone(),
                tensor: extra.name.to_string(),
            }),
        }
    }

    /// The bytes of all of a tensor.
    pub fn read_whole(&self, tensor: &TensorName) -> Result<Vec<u8>, CheckpointError> {
        let tensor = self.tensor(tensor)?;
        let region = Region::whole(&tensor.shape);
        self.read(&tensor.name, &region, 0..tensor.elements().unwrap_or(0))
    }

    /// The bytes of a range of the elements of any region of a tensor, from however many regions and ranges.
    pub fn read(
        &self,
        tensor: &TensorName,
        region: &Region,
        range: Range<u64>,
    ) -> Result<Vec<u8>, CheckpointError> {
        let tensor = self.tensor(tensor)?;
        let elements = region.elements().filter(|_| region.is_within(&tensor.shape));
        if range.start > range.end || elements.is_none_or(|elements| range.end > elements) {
            let Range { start, end } = range;
            return Err(CheckpointError::Misuse(format!(
                "elements {start}..{end} of region {region} of tensor `{}`, {}",
                tensor.name,
                type_and_shape(tensor.dtype, &tensor.shape)
            )));
        }
        let width = tensor.dtype.bytes() as u64;
        let mut bytes = vec![0; ((range.end - range.start) * width) as usize];
        for RegionRecord {
            region: stored,
            ranges,
        } in &tensor.regions
        {
            let Some(overlap) = Overlap::of(region, stored) else {
                continue;
            };
            for piece in ranges {
                let source = StoredRange {
                    tensor,
                    region: stored,
                    range: piece,
                };
                let runs = overlap.runs([range.clone(), piece.start..piece.end]);
                let runs = runs.map(|run| ByteRun {
                    target: (run.starts[0] - range.start) * width,
                    source: (run.starts[1] - piece.start) * width,
                    len: run.len * width,
                });
                self.read_runs(&source, runs, &mut bytes)?;
            }
        }
        Ok(bytes)
    }

    /// Reads everything and compares every hash.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        self.stored().try_for_each(|stored| self.verify_range(&stored))
    }

    /// As [`Reader::verify`], to the end: all that is damaged, and whether something is missing.
    #[must_use]
    pub fn damages(&self) -> Vec<CheckpointError> {
        let damaged = self
            .stored()
            .filter_map(|stored| self.verify_range(&stored).err());
        self.check_model().err().into_iter().chain(damaged).collect()
    }

    /// Checks that the tensors are those of the model and of the optimizer that the checkpoint's own configuration
    /// describes.
    pub fn check_model(&self) -> Result<(), CheckpointError> {
        let describes_none = |cause: String| {
            let what = format!("its configuration describes no model: {cause}");
            CheckpointError::damaged(&self.path.join(MANIFEST), what)
        };
        let section = &self.manifest.state.config["model"];
        let mut config: config::Model =
            config::section("model", section.clone()).map_err(|e| describes_none(e.to_string()))?;
        // Else the tokenizer's, which need not be here.
        if config.vocab_size.is_none() {
            let rows = self.tensor(&TensorKind::Parameter.of(EMBEDDING))?.shape.first();
            config.vocab_size = rows.map(|rows| *rows as usize);
        }
        let model = model::build(&config, 1).map_err(|e| describes_none(e.to_string()))?;
        let optimizer = self.manifest.state.config.pointer("/train/optimizer").cloned();
        let optimizer: OptimizerConfig = config::section(
            "train.optimizer",
            optimizer.unwrap_or_else(|| serde_json::json!({})),
        )
        .map_err(|e| describes_none(e.to_string()))?;
        let kinds = TensorKind::with_slots(optim::rule(&optimizer).slots);
        let of_kind = |kind| model.params.iter().map(move |spec| Extent::whole(kind, spec));
        let tensors: Vec<Extent> = kinds.iter().flat_map(of_kind).collect();
        self.expect(&tensors.iter().map(Expected::of).collect::<Vec<_>>())
    }

    /// Folder of the checkpoint.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All that files hold.
    fn stored(&self) -> impl Iterator<Item = StoredRange<'_>> {
        let tensors = self.manifest.tensors.iter();
        let regions = tensors.flat_map(|tensor| tensor.regions.iter().map(move |region| (tensor, region)));
        regions.flat_map(|(tensor, RegionRecord { region, ranges })| {
            ranges.iter().map(move |range| StoredRange {
                tensor,
                region,
                range,
            })
        })
    }

    fn tensor(&self, name: &TensorName) -> Result<&TensorRecord, CheckpointError> {
        self.manifest
            .tensor(name)
            .ok_or_else(|| CheckpointError::Missing {
                path: self.path.clone(),
                tensor: name.to_string(),
            })
    }

    /// Copies runs of a stored range, which ascend, to their places in `out`, in few reads: runs that lie close together
    /// are read at once. A whole range is hashed as it is read; of a part of one, the blocks that hold it are verified
    /// first, once.
    fn read_runs(
        &self,
        stored: &StoredRange<'_>,
        mut runs: impl Iterator<Item = ByteRun>,
        out: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let Some(mut next) = runs.next() else {
            return Ok(());
        };
        let (part, entry) = self.entry(stored.range);
        let file = part.open()?;
        if next.len == entry.bytes {
            let out = next.within(out);
            part.read_at(&file, out, entry.offset)?;
            return self.check_whole(stored, out);
        }
        let mut batch: Vec<ByteRun> = Vec::new();
        let mut buffer = Vec::new();
        loop {
            let start = next.source;
            let mut end = start + next.len;
            batch.clear();
            batch.push(next);
            let beyond = loop {
                match runs.next() {
                    Some(run)
                        if run.source - end <= MAX_GAP_BYTES
                            && run.source + run.len - start <= BATCH_BYTES =>
                    {
                        end = run.source + run.len;
                        batch.push(run);
                    }
                    other => break other,
                }
            };
            HashBlock::holding(stored.range, &(start..end))
                .try_for_each(|index| self.verify_block(stored, index))?;
            if let [only] = batch.as_slice() {
                part.read_at(&file, only.within(out), entry.offset + start)?;
            } else {
                buffer.resize((end - start) as usize, 0);
                part.read_at(&file, &mut buffer, entry.offset + start)?;
                for run in &batch {
                    let from = (run.source - start) as usize;
                    run.within(out)
                        .copy_from_slice(&buffer[from..from + run.len as usize]);
                }
            }
            match beyond {
                Some(run) => next = run,
                None => return Ok(()),
            }
        }
    }

    /// Compares the hash of a whole range that was read.
    fn check_whole(&self, stored: &StoredRange<'_>, bytes: &[u8]) -> Result<(), CheckpointError> {
        let range = stored.range;
        if blake3::hash(bytes).to_hex().as_str() != range.blake3 {
            return Err(self.damaged(stored, range.start..range.end));
        }
        (0..HashBlock::count(range)).for_each(|index| self.note(range, index));
        Ok(())
    }

    fn verify_range(&self, stored: &StoredRange<'_>) -> Result<(), CheckpointError> {
        (0..HashBlock::count(stored.range)).try_for_each(|index| self.verify_block(stored, index))
    }

    fn verify_block(&self, stored: &StoredRange<'_>, index: usize) -> Result<(), CheckpointError> {
        let range = stored.range;
        let name = (range.file.clone(), range.entry.clone(), index);
        if self.verified().contains(&name) {
            return Ok(());
        }
        let (part, entry) = self.entry(range);
        let file = part.open()?;
        let mut block = HashBlock::of(range, entry.bytes, index);
        let Range { start, end } = block.bytes.clone();
        let mut chunk = vec![0; CHUNK_BYTES.min(end - start) as usize];
        let mut done = start;
        while done < end {
            let n = CHUNK_BYTES.min(end - done) as usize;
            part.read_at(&file, &mut chunk[..n], entry.offset + done)?;
            block.update(&chunk[..n]);
            done += n as u64;
        }
        let expected = range.blocks.get(index).unwrap_or(&range.blake3);
        if block.hash().to_hex().as_str() != expected {
            let width = stored.tensor.dtype.bytes() as u64;
            let elements = range.start + start / width..range.start + end / width;
            return Err(self.damaged(stored, elements));
        }
        self.note(range, index);
        Ok(())
    }

    fn damaged(&self, stored: &StoredRange<'_>, range: Range<u64>) -> CheckpointError {
        let StoredRange { tensor, region, .. } = stored;
        let is_whole = region.is_whole(&tensor.shape);
        let region = if is_whole {
            String::new()
        } else {
            region.to_string()
        };
        CheckpointError::Hash {
            path: self.path.join(&stored.range.file),
            tensor: format!("{}{region}", tensor.name),
            range,
        }
    }

    /// The hash of a block was right.
    fn note(&self, range: &RangeRecord, index: usize) {
        let name = (range.file.clone(), range.entry.clone(), index);
        self.verified().insert(name);
    }

    fn verified(&self) -> MutexGuard<'_, HashSet<(String, String, usize)>> {
        self.verified.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where a range is. Opening the checkpoint has checked that it exists.
    fn entry(&self, range: &RangeRecord) -> (&Part, &Entry) {
        let part = &self.files[&range.file];
        (part, &part.entries[&range.entry])
    }
}

/// A range of a tensor's region, in one file.
struct StoredRange<'a> {
    tensor: &'a TensorRecord,
    region: &'a Region,
    range: &'a RangeRecord,
}

/// Neighbouring bytes of an entry that are neighbours where they are read to.
struct ByteRun {
    target: u64,
    source: u64,
    len: u64,
}

impl ByteRun {
    fn within<'a>(&self, out: &'a mut [u8]) -> &'a mut [u8] {
        &mut out[self.target as usize..(self.target + self.len) as usize]
    }
}

pub(super) fn read_manifest(path: &Path) -> Result<Manifest, CheckpointError> {
    let failed = |e: std::io::Error| CheckpointError::unread(path, &e);
    let file = storage::open_to_read(path).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(MAX_MANIFEST_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() as u64 > MAX_MANIFEST_BYTES {
        return Err(CheckpointError::damaged(
            path,
            format!("it is longer than {MAX_MANIFEST_BYTES} bytes"),
        ));
    }
    Manifest::from_bytes(path, &bytes)
}

fn open_part(folder: &Path, name: &str, expected: u64) -> Result<Part, CheckpointError> {
    // Names come from the manifest: they must not lead out of the folder.
    if Path::new(name).file_name() != Some(name.as_ref()) {
        return Err(CheckpointError::damaged(
            &folder.join(MANIFEST),
            format!("`{name}` is no name of a file"),
        ));
    }
    let path = folder.join(name);
    let failed = |e: std::io::Error| CheckpointError::unread(&path, &e);
    let mut file = storage::open_to_read(&path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?.len();
    if found != expected {
        return Err(CheckpointError::Size {
            path,
            found,
            expected,
        });
    }
    let entries = part::read_entries(&path, &mut file)?;
    Ok(Part { path, entries })
}

/// A folder that is named for a step holds the checkpoint of that step.
fn check_name(folder: &Path, manifest: &Manifest) -> Result<(), CheckpointError> {
    // `.` has no name.
    let named = match folder.file_name() {
        Some(_) => folder.to_owned(),
        None => folder.canonicalize().unwrap_or_default(),
    };
    let name = named.file_name().and_then(OsStr::to_str).unwrap_or_default();
    let step = manifest.state.step;
    match layout::parse_step(name) {
        Some(other) if other != step => Err(CheckpointError::damaged(
            &folder.join(MANIFEST),
            format!("its folder is `{name}`, and it says step {step}"),
        )),
        _ => Ok(()),
    }
}

/// The manifest and the file must agree on where a range is and how large.
fn check_range(
    folder: &Path,
    files: &HashMap<String, Part>,
    dtype: DType,
    range: &RangeRecord,
) -> Result<(), CheckpointError> {
    let damaged = |what: String| CheckpointError::damaged(&folder.join(&range.file), what);
    let entry = files
        .get(&range.file)
        .and_then(|part| part.entries.get(&range.entry));
    let Some(entry) = entry else {
        return Err(damaged(format!("it has no entry `{}`", range.entry)));
    };
    let bytes = (range.end - range.start).saturating_mul(dtype.bytes() as u64);
    if entry.dtype != dtype || entry.bytes != bytes {
        return Err(damaged(format!(
            "entry `{}` has {} bytes of {}, expected {bytes} of {dtype}",
            range.entry, entry.bytes, entry.dtype
        )));
    }
    if !part::agree(range, bytes) {
        let what = format!(
            "the hashes of the blocks of entry `{}` are not those of its hash",
            range.entry
        );
        return Err(CheckpointError::damaged(&folder.join(MANIFEST), what));
    }
    Ok(())
}
