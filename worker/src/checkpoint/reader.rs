//! Any range of any region of any tensor of a checkpoint, verified.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use super::error::type_and_shape;
use super::folder::{self, LATEST, MANIFEST};
use super::manifest::{FileRecord, Manifest, RangeRecord, TensorKind, TensorName, TensorRecord};
use super::part::{Extent, Header, dtype_on_disk, read_header};
use super::{CheckpointError, storage};
use crate::config::{self, OptimizerConfig};
use crate::model::{self, Names, Overlap, Region};
use crate::optim;

/// Which checkpoint of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// The one that `checkpoints/latest` names; where that is lost, the newest whole one.
    Latest,
    /// The one after this many finished steps.
    Step(u64),
}

/// An opened checkpoint. Sizes and headers of all files are checked when it is opened; the hash of a block of a
/// range when its first byte is read.
pub struct Reader {
    path: PathBuf,
    manifest: Manifest,
    files: HashMap<String, DataFile>,
    /// Blocks whose hash was right: the name of the file, and where in it the block begins.
    verified: Mutex<HashSet<(String, u64)>>,
}

/// A file, opened for each range that is read of it: thousands of ranks may have written one each.
struct DataFile {
    path: PathBuf,
    header: Header,
}

impl DataFile {
    /// Reads the header of a file that is as long as the manifest says.
    fn new(folder: &Path, record: &FileRecord) -> Result<Self, CheckpointError> {
        let (name, expected) = (&record.name, record.bytes);
        // Names come from the manifest: they must not lead out of the folder.
        if Path::new(name).file_name() != Some(name.as_ref()) {
            let what = format!("`{name}` is not a valid file name");
            return Err(CheckpointError::damaged(&folder.join(MANIFEST), what));
        }
        let path = folder.join(name);
        let failed = |e: io::Error| CheckpointError::unread(&path, &e);
        let mut file = storage::open_to_read(&path).map_err(failed)?;
        let found = file.metadata().map_err(failed)?.len();
        if found != expected {
            let what = format!(" has {found} bytes, expected {expected}: truncated or overwritten");
            return Err(CheckpointError::of_file(&path, what));
        }
        let header = read_header(&mut file).map_err(failed)?;
        let described = header.file_len();
        if described != found {
            let what = format!(" has {found} bytes, but its header describes {described}");
            return Err(CheckpointError::of_file(&path, what));
        }
        Ok(Self { path, header })
    }

    fn open(&self) -> Result<File, CheckpointError> {
        storage::open_to_read(&self.path).map_err(|e| CheckpointError::unread(&self.path, &e))
    }
}

/// A range of a tensor's region, in one file.
struct StoredRange<'a> {
    tensor: &'a TensorRecord,
    region: &'a Region,
    range: &'a RangeRecord,
    data: &'a DataFile,
    /// Bytes from the start of the file.
    offset: u64,
    bytes: u64,
}

impl StoredRange<'_> {
    /// Reads some bytes of the range.
    fn read(&self, bytes: &Range<u64>) -> Result<Vec<u8>, CheckpointError> {
        let mut read = vec![0; (bytes.end - bytes.start) as usize];
        let done = self
            .data
            .open()?
            .read_exact_at(&mut read, self.offset + bytes.start);
        done.map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => {
                CheckpointError::of_file(&self.data.path, " ends before its last tensor")
            }
            _ => CheckpointError::io("read", &self.data.path, &error),
        })?;
        Ok(read)
    }

    /// Names a block of the range among those of all files.
    fn block_name(&self, block: &Range<u64>) -> (String, u64) {
        (self.range.file.clone(), self.offset + block.start)
    }

    /// The content of these bytes of the range is not what was written.
    fn changed(&self, bytes: &Range<u64>) -> CheckpointError {
        let tensor = self.tensor;
        let name = tensor.name.of_region(self.region, &tensor.shape);
        let width = tensor.dtype.bytes() as u64;
        let [start, end] = [bytes.start, bytes.end].map(|byte| self.range.start + byte / width);
        let what =
            format!(": the content of tensor `{name}`, elements {start}..{end}, does not match its hash");
        CheckpointError::of_file(&self.data.path, what)
    }
}

/// Neighbouring bytes of a range that are neighbours where they are read to.
struct ByteRun {
    target: u64,
    source: u64,
    len: u64,
}

impl ByteRun {
    /// The part of it within `bytes` of the range; `None` if it lies elsewhere.
    fn within(&self, bytes: &Range<u64>) -> Option<Self> {
        let source = self.source.max(bytes.start);
        let end = (self.source + self.len).min(bytes.end);
        Some(Self {
            target: self.target + (source.saturating_sub(self.source)),
            source,
            len: end.checked_sub(source).filter(|len| *len > 0)?,
        })
    }
}

impl Reader {
    /// Opens a checkpoint below the folder of a run.
    pub fn open(out_dir: &Path, which: Which) -> Result<Self, CheckpointError> {
        let root = folder::checkpoints(out_dir);
        let step = match which {
            Which::Step(step) => step,
            Which::Latest => folder::step_to_go_on_from(out_dir)
                .map_err(|e| CheckpointError::io("read", &root.join(LATEST), &e))?
                .ok_or(CheckpointError::None { path: root.clone() })?,
        };
        Self::open_folder(&root.join(folder::step_name(step)))
    }

    /// Opens the checkpoint in this very folder.
    pub fn open_folder(path: &Path) -> Result<Self, CheckpointError> {
        let manifest_path = path.join(MANIFEST);
        let mut manifest = Manifest::read(&manifest_path)?;
        check_name(path, &manifest)?;
        let mut files = HashMap::new();
        for record in &manifest.files {
            files.insert(record.name.clone(), DataFile::new(path, record)?);
        }
        for tensor in &mut manifest.tensors {
            let covered = tensor.check();
            covered.map_err(|what| CheckpointError::damaged(&manifest_path, what))?;
        }
        let reader = Self {
            path: path.to_owned(),
            manifest,
            files,
            verified: Mutex::default(),
        };
        reader.check_ranges()?;
        Ok(reader)
    }

    /// What the checkpoint holds.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The bytes of all of a tensor.
    pub fn read_whole(&self, tensor: &TensorName) -> Result<Vec<u8>, CheckpointError> {
        let tensor = self.tensor(tensor)?;
        let all = 0..tensor.elements().unwrap_or(0);
        self.read(&Extent::of(tensor, Region::whole(&tensor.shape), all))
    }

    /// Reads everything and compares every hash: all that is damaged, and whether something is missing.
    pub fn damages(&self) -> Vec<CheckpointError> {
        let stored = self
            .manifest
            .tensors
            .iter()
            .flat_map(|tensor| self.stored(tensor));
        let damaged = stored.filter_map(|stored| {
            let mut blocks = RangeRecord::blocks_of(&(0..stored.bytes));
            blocks.find_map(|index| self.verify_block(&stored, index).err())
        });
        self.check_model().err().into_iter().chain(damaged).collect()
    }

    /// Checks that the tensors are those of the model and of the optimizer that the checkpoint's own configuration
    /// describes.
    pub fn check_model(&self) -> Result<(), CheckpointError> {
        let config = self.model_config()?;
        let model = model::build(&config, 1).map_err(|e| self.describes_none("model", e))?;
        let optimizer = self.manifest.state.config.pointer("/train/optimizer").cloned();
        let optimizer: OptimizerConfig = config::section(
            "train.optimizer",
            optimizer.unwrap_or_else(|| serde_json::json!({})),
        )
        .map_err(|e| self.describes_none("optimizer", e))?;
        let kinds = TensorKind::with_slots(optim::rule(&optimizer).slots);
        self.expect(&Extent::of_model(&kinds, &model.params))
    }

    /// The `model` section of the checkpoint's own configuration, with the size of the vocabulary.
    pub(crate) fn model_config(&self) -> Result<config::Model, CheckpointError> {
        let section = &self.manifest.state.config["model"];
        let mut config: config::Model =
            config::section("model", section.clone()).map_err(|e| self.describes_none("model", e))?;
        // Else the tokenizer's, which need not be here.
        if config.vocab_size.is_none() {
            let embedding = TensorKind::Parameter.of(Names::of(config.kind).tokens);
            let rows = self.tensor(&embedding)?.shape.first();
            config.vocab_size = rows.map(|rows| *rows as usize);
        }
        Ok(config)
    }

    fn describes_none(&self, what: &str, cause: impl Display) -> CheckpointError {
        let what = format!("its configuration describes no {what}: {cause}");
        CheckpointError::damaged(&self.path.join(MANIFEST), what)
    }

    /// Folder of the checkpoint.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks that it has exactly the tensors of which these are parts. The error names the first difference, in the order
    /// given.
    pub fn expect(&self, expected: &[Extent]) -> Result<(), CheckpointError> {
        for extent in expected {
            let found = self.tensor(&extent.tensor)?;
            if found.dtype != extent.dtype || found.shape != extent.shape {
                let [found, expected] = [(found.dtype, &found.shape), (extent.dtype, &extent.shape)]
                    .map(|(dtype, shape)| type_and_shape(dtype, shape));
                return Err(CheckpointError::Foreign {
                    path: self.path.clone(),
                    what: format!(
                        ": tensor `{}` is {found}, but {expected} in this model",
                        extent.tensor
                    ),
                    hint: "resume with the model section that it was written with",
                });
            }
        }
        let names: HashSet<&TensorName> = expected.iter().map(|extent| &extent.tensor).collect();
        match self.manifest.tensors.iter().find(|t| !names.contains(&t.name)) {
            None => Ok(()),
            Some(extra) => Err(self.of_another(&format!(
                "has a tensor `{}`, which this model does not have",
                extra.name
            ))),
        }
    }

    /// The bytes of a range of the elements of any region of a tensor, from however many regions and ranges.
    pub fn read(&self, part: &Extent) -> Result<Vec<u8>, CheckpointError> {
        let tensor = self.tensor(&part.tensor)?;
        let extent = Extent::of(tensor, part.region.clone(), part.range.clone());
        extent.check()?;
        let (start, width) = (extent.range.start, tensor.dtype.bytes() as u64);
        let mut bytes = vec![0; extent.bytes() as usize];
        for stored in self.stored(tensor) {
            let Some(overlap) = Overlap::of(&part.region, stored.region) else {
                continue;
            };
            let piece = stored.range.start..stored.range.end;
            let runs = overlap.runs([extent.range.clone(), piece.clone()]);
            let runs = runs.map(|run| ByteRun {
                target: (run.starts[0] - start) * width,
                source: (run.starts[1] - piece.start) * width,
                len: run.len * width,
            });
            self.read_runs(&stored, &runs.collect::<Vec<_>>(), &mut bytes)?;
        }
        Ok(bytes)
    }

    fn tensor(&self, name: &TensorName) -> Result<&TensorRecord, CheckpointError> {
        let found = self.manifest.tensor(name);
        found.ok_or_else(|| self.of_another(&format!("has no tensor `{name}`")))
    }

    fn of_another(&self, what: &str) -> CheckpointError {
        CheckpointError::Foreign {
            path: self.path.clone(),
            what: format!(" {what}"),
            hint: "it belongs to a different model or optimizer",
        }
    }

    /// All that files hold of a tensor.
    fn stored<'a>(&'a self, tensor: &'a TensorRecord) -> impl Iterator<Item = StoredRange<'a>> {
        tensor.ranges().map(|(region, range)| {
            let data = &self.files[&range.file];
            // Opening the checkpoint has checked that it exists.
            let (start, end) = data
                .header
                .metadata
                .info(&range.entry)
                .map_or((0, 0), |e| e.data_offsets);
            StoredRange {
                tensor,
                region,
                range,
                data,
                offset: data.header.data + start as u64,
                bytes: (end - start) as u64,
            }
        })
    }

    /// Each range has the entry of its tensor, region and elements: no two have the same.
    fn check_ranges(&self) -> Result<(), CheckpointError> {
        for tensor in &self.manifest.tensors {
            for (region, range) in tensor.ranges() {
                self.check_range(tensor, range)?;
                let RangeRecord { file, entry, .. } = range;
                let expected = Extent::of(tensor, region.clone(), range.start..range.end).entry()?;
                if *entry != expected {
                    let what = format!("entry `{entry}` of `{file}` is listed as `{expected}`");
                    return Err(CheckpointError::damaged(&self.path.join(MANIFEST), what));
                }
            }
        }
        Ok(())
    }

    /// The manifest and the file must agree on where a range is and how large.
    fn check_range(&self, tensor: &TensorRecord, range: &RangeRecord) -> Result<(), CheckpointError> {
        let RangeRecord { file, entry, .. } = range;
        let dtype = tensor.dtype;
        let damaged = |file: &str, what: String| Err(CheckpointError::damaged(&self.path.join(file), what));
        let data = self.files.get(file);
        let Some(found) = data.and_then(|data| data.header.metadata.info(entry)) else {
            return damaged(file, format!("it has no entry `{entry}`"));
        };
        let found_bytes = (found.data_offsets.1 - found.data_offsets.0) as u64;
        let bytes = (range.end - range.start).saturating_mul(dtype.bytes() as u64);
        if found.dtype != dtype_on_disk(dtype) || found_bytes != bytes {
            let found = found.dtype.to_string().to_lowercase();
            let what =
                format!("entry `{entry}` has {found_bytes} bytes of {found}, expected {bytes} of {dtype}");
            return damaged(file, what);
        }
        if !range.has_all_blocks(bytes) {
            let what = format!("entry `{entry}` does not have one hash per block");
            return damaged(MANIFEST, what);
        }
        Ok(())
    }

    /// Copies runs of a stored range, which ascend, to their places in `out`. A block is verified when it is first read.
    fn read_runs(
        &self,
        stored: &StoredRange<'_>,
        runs: &[ByteRun],
        out: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let (Some(first), Some(last)) = (runs.first(), runs.last()) else {
            return Ok(());
        };
        for index in RangeRecord::blocks_of(&(first.source..last.source + last.len)) {
            let mut bytes = RangeRecord::block(index, stored.bytes);
            let after = runs.partition_point(|run| run.source + run.len <= bytes.start);
            let here: Vec<ByteRun> = runs[after..].iter().map_while(|run| run.within(&bytes)).collect();
            let (Some(first), Some(last)) = (here.first(), here.last()) else {
                continue;
            };
            let read = if self.verified.lock().contains(&stored.block_name(&bytes)) {
                bytes = first.source..last.source + last.len;
                stored.read(&bytes)?
            } else {
                self.verify_block(stored, index)?
            };
            for run in &here {
                let [source, target] = [run.source - bytes.start, run.target].map(|start| start as usize);
                let len = run.len as usize;
                out[target..target + len].copy_from_slice(&read[source..source + len]);
            }
        }
        Ok(())
    }

    /// Reads a block of a stored range, and compares its hash.
    fn verify_block(&self, stored: &StoredRange<'_>, index: usize) -> Result<Vec<u8>, CheckpointError> {
        let block = RangeRecord::block(index, stored.bytes);
        let read = stored.read(&block)?;
        if !stored.range.is_block(index, &read) {
            return Err(stored.changed(&block));
        }
        self.verified.lock().insert(stored.block_name(&block));
        Ok(read)
    }
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
    match folder::parse_step(name) {
        Some(other) if other != step => Err(CheckpointError::damaged(
            &folder.join(MANIFEST),
            format!("its directory is `{name}`, but it records step {step}"),
        )),
        _ => Ok(()),
    }
}
