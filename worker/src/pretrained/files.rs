//! Which files hold the weights, and which tensors they say that they hold.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;
use serde::Deserialize;

use super::PretrainedError;
use crate::checkpoint::{Header, HeaderError, read_header};

/// One file with all tensors.
const MODEL: &str = "model.safetensors";
/// Which of several files has which tensor.
const INDEX: &str = "model.safetensors.index.json";
/// What no tensor tells.
const CONFIG: &str = "config.json";
/// What PyTorch wrote before there was safetensors.
const PICKLE: &str = "pytorch_model.bin";
const PICKLE_EXTENSIONS: &[&str] = &["bin", "pt", "pth", "ckpt"];
/// How a file begins whose content Git keeps elsewhere.
const POINTER: &[u8] = b"version https://git-lfs";
/// By these names a folder is known to be of a run.
const MARKS_OF_RUNS: &[&str] = &["checkpoints", "manifest.json", "latest"];
/// Longest index and configuration that are read.
const MAX_JSON_BYTES: u64 = 16 << 20;

/// The files, opened, and what is in them.
pub(super) struct WeightFiles {
    pub(super) files: Vec<WeightFile>,
    /// By name.
    pub(super) tensors: Vec<StoredTensor>,
    /// `config.json` beside them, if there is one.
    pub(super) config: Option<PathBuf>,
}

/// A file with tensors. It stays open, so that what is read is what was looked at.
pub(super) struct WeightFile {
    pub(super) path: PathBuf,
    pub(super) file: File,
    /// In bytes.
    pub(super) len: u64,
}

/// A tensor as its file's header describes it.
#[derive(Clone, Debug)]
pub(super) struct StoredTensor {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// Which file.
    pub(super) file: usize,
    /// Bytes from its start.
    pub(super) offset: u64,
}

/// `model.safetensors.index.json`.
#[derive(Deserialize)]
struct Index {
    /// File of each tensor.
    weight_map: BTreeMap<String, String>,
}

impl WeightFiles {
    /// Of a folder, or of one file.
    pub(super) fn open(path: &Path) -> Result<Self, PretrainedError> {
        let metadata = fs::metadata(path).map_err(|e| PretrainedError::io(path, &e))?;
        if metadata.is_dir() {
            return Self::of_folder(path);
        }
        if path
            .extension()
            .is_some_and(|found| PICKLE_EXTENSIONS.iter().any(|e| found == *e))
        {
            return Err(PretrainedError::Pickle {
                path: path.to_owned(),
            });
        }
        // Beside a file of another name lies perhaps the configuration of another model.
        let config = path
            .file_name()
            .filter(|name| *name == MODEL)
            .and_then(|_| config_in(path.parent()?));
        let mut files = Self::empty(config);
        files.add(path.to_owned(), |_| true)?;
        Ok(files.sorted())
    }

    fn of_folder(folder: &Path) -> Result<Self, PretrainedError> {
        let mut files = Self::empty(config_in(folder));
        let (model, index) = (folder.join(MODEL), folder.join(INDEX));
        if model.exists() {
            files.add(model, |_| true)?;
        } else if index.exists() {
            files.add_indexed(folder, &index)?;
        } else if folder.join(PICKLE).exists() {
            return Err(PretrainedError::Pickle {
                path: folder.join(PICKLE),
            });
        } else {
            return Err(PretrainedError::None {
                path: folder.to_owned(),
                is_run: MARKS_OF_RUNS.iter().any(|mark| folder.join(mark).exists()),
            });
        }
        Ok(files.sorted())
    }

    fn empty(config: Option<PathBuf>) -> Self {
        Self {
            files: Vec::new(),
            tensors: Vec::new(),
            config,
        }
    }

    fn sorted(mut self) -> Self {
        self.tensors.sort_by(|a, b| a.name.cmp(&b.name));
        self
    }

    /// All files that an index names.
    fn add_indexed(&mut self, folder: &Path, index: &Path) -> Result<(), PretrainedError> {
        let Index { weight_map } = serde_json::from_slice(&read_json(index)?)
            .map_err(|e| PretrainedError::json(index, e.to_string()))?;
        let names: BTreeSet<&str> = weight_map.values().map(String::as_str).collect();
        for name in names {
            // They must not lead out of the folder.
            if Path::new(name).file_name() != Some(name.as_ref()) {
                return Err(PretrainedError::json(
                    index,
                    format!("`{name}` is no name of a file"),
                ));
            }
            if !folder.join(name).exists() {
                let what = format!("it names `{name}`, which is missing");
                return Err(PretrainedError::json(index, what));
            }
            self.add(folder.join(name), |tensor| {
                weight_map.get(tensor).is_some_and(|home| home == name)
            })?;
        }
        let found: BTreeSet<&str> = self.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        match weight_map
            .iter()
            .find(|(tensor, _)| !found.contains(tensor.as_str()))
        {
            None => Ok(()),
            Some((tensor, home)) => {
                let what =
                    format!("it says that tensor `{tensor}` is in `{home}`, which has none of that name");
                Err(PretrainedError::json(index, what))
            }
        }
    }

    /// The tensors of one file that are `wanted`.
    fn add(&mut self, path: PathBuf, wanted: impl Fn(&str) -> bool) -> Result<(), PretrainedError> {
        let mut opened = open(path)?;
        let Header { metadata, data } = header(&mut opened)?;
        for (name, info) in metadata.tensors() {
            if wanted(&name) {
                self.tensors.push(StoredTensor {
                    name,
                    dtype: info.dtype,
                    shape: info.shape.clone(),
                    file: self.files.len(),
                    offset: data + info.data_offsets.0 as u64,
                });
            }
        }
        self.files.push(opened);
        Ok(())
    }
}

/// The configuration in a folder.
fn config_in(folder: &Path) -> Option<PathBuf> {
    let path = folder.join(CONFIG);
    path.exists().then_some(path)
}

fn open(path: PathBuf) -> Result<WeightFile, PretrainedError> {
    // A pipe would otherwise be waited for until somebody writes to it.
    let mut options = File::options();
    options.read(true).custom_flags(libc::O_NONBLOCK);
    let file = options.open(&path).map_err(|e| PretrainedError::io(&path, &e))?;
    let metadata = file.metadata().map_err(|e| PretrainedError::io(&path, &e))?;
    if !metadata.is_file() {
        return Err(PretrainedError::NotAFile { path });
    }
    Ok(WeightFile {
        file,
        len: metadata.len(),
        path,
    })
}

/// The header of a file that is as long as it says.
fn header(WeightFile { path, file, len }: &mut WeightFile) -> Result<Header, PretrainedError> {
    let mut start = [0; POINTER.len()];
    if file.read_exact_at(&mut start, 0).is_ok() && start == POINTER {
        return Err(PretrainedError::Pointer { path: path.clone() });
    }
    let header = read_header(file).map_err(|error| match error {
        HeaderError::Io(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
            PretrainedError::damaged(path, format!("it ends within its header, after {len} bytes"))
        }
        HeaderError::Io(e) => PretrainedError::io(path, &e),
        HeaderError::Damaged(what) => PretrainedError::damaged(path, what),
    })?;
    let expected = header.data + header.metadata.data_len() as u64;
    if *len != expected {
        let what = format!("it has {len} bytes, expected {expected}");
        return Err(PretrainedError::damaged(path, what));
    }
    Ok(header)
}

/// The bytes of a file of JSON.
pub(super) fn read_json(path: &Path) -> Result<Vec<u8>, PretrainedError> {
    let failed = |e: io::Error| PretrainedError::io(path, &e);
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(failed)?;
    file.take(MAX_JSON_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() as u64 > MAX_JSON_BYTES {
        return Err(PretrainedError::json(
            path,
            format!("it is longer than {MAX_JSON_BYTES} bytes"),
        ));
    }
    Ok(bytes)
}
