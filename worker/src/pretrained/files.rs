//! Which files hold the weights, which tensors their headers name, and why they cannot be used.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;
use serde::Deserialize;

use crate::checkpoint::{Header, open_to_read, read_bounded, read_header};

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
/// A folder that holds one of these belongs to a run.
const MARKS_OF_RUNS: &[&str] = &["checkpoints", "manifest.json", "latest"];
/// Longest index and configuration that are read.
const MAX_JSON_BYTES: u64 = 16 << 20;

/// What to do about a file that is damaged.
const AGAIN: &str = "download or create it again";

/// The weights that `model.init_from` names cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PretrainedError {
    /// The system refused.
    #[error("cannot read `{}`: {cause}{}", path.display(), hint_of(*kind))]
    Io {
        /// Which file or folder.
        path: PathBuf,
        /// The system's words.
        cause: String,
        /// Its kind.
        kind: ErrorKind,
    },
    /// They are no weights, or another model's: what is wrong, and what to do, in words.
    #[error("{0}")]
    Unusable(String),
}

impl PretrainedError {
    pub(super) fn io(path: &Path, error: &io::Error) -> Self {
        Self::Io {
            path: path.to_owned(),
            cause: error.to_string(),
            kind: error.kind(),
        }
    }

    /// `what` is the rest of the sentence that begins with the path.
    pub(super) fn unusable(path: &Path, what: impl Display, hint: impl Display) -> Self {
        Self::Unusable(format!("`{}`{what}\n  hint: {hint}", path.display()))
    }

    fn damaged(path: &Path, what: impl Display) -> Self {
        let what = format!(" is not a safetensors file, or it is damaged: {what}");
        Self::unusable(path, what, AGAIN)
    }

    pub(super) fn json(path: &Path, what: impl Display) -> Self {
        Self::unusable(path, format!(" cannot be used: {what}"), AGAIN)
    }

    fn pickle(path: &Path) -> Self {
        let folder = ddp_proto::paths::folder_of(path).display();
        let hint = format!(
            "convert it once: `python3 -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{folder}').save_pretrained('NEW_DIR')\"`, and use the new directory"
        );
        let what = " is a pickle, which only Python can read, and only by running it";
        Self::unusable(path, what, hint)
    }

    /// A folder without weights, perhaps that of a run.
    fn none(folder: &Path) -> Self {
        let hint = if MARKS_OF_RUNS.iter().any(|mark| folder.join(mark).exists()) {
            let folder = folder.display();
            format!(
                "it belongs to a run: `ddp-train ckpt export {folder} --to DIR` exports its checkpoint to such a file"
            )
        } else {
            "give a directory that `save_pretrained` or `ddp-train ckpt export` has written, or one `.safetensors` file".into()
        };
        Self::unusable(folder, format!(" holds neither `{MODEL}` nor `{INDEX}`"), hint)
    }
}

fn hint_of(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::NotFound => {
            "\n  hint: relative paths in `model.init_from` are resolved from the YAML's directory"
        }
        _ => "",
    }
}

/// The files, opened, and what is in them.
pub(super) struct WeightFiles {
    pub(super) files: Vec<WeightFile>,
    /// Sorted by name.
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
    /// Opens a folder, or one file.
    pub(super) fn open(path: &Path) -> Result<Self, PretrainedError> {
        let metadata = fs::metadata(path).map_err(|e| PretrainedError::io(path, &e))?;
        let folder = if metadata.is_dir() {
            Some(path)
        } else {
            path.parent()
        };
        // Beside a file of another name lies perhaps the configuration of another model.
        let is_ours = metadata.is_dir() || path.file_name().is_some_and(|name| name == MODEL);
        let config = folder.filter(|_| is_ours).map(|folder| folder.join(CONFIG));
        let mut files = Self {
            files: Vec::new(),
            tensors: Vec::new(),
            config: config.filter(|config| config.exists()),
        };
        let is_pickle = |ending| PICKLE_EXTENSIONS.iter().any(|pickle| ending == *pickle);
        if metadata.is_dir() {
            files.add_folder(path)?;
        } else if path.extension().is_some_and(is_pickle) {
            return Err(PretrainedError::pickle(path));
        } else {
            files.add(path.to_owned(), |_| true)?;
        }
        files.tensors.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(files)
    }

    fn add_folder(&mut self, folder: &Path) -> Result<(), PretrainedError> {
        let [model, index, pickle] = [MODEL, INDEX, PICKLE].map(|name| folder.join(name));
        if model.exists() {
            self.add(model, |_| true)
        } else if index.exists() {
            self.add_indexed(folder, &index)
        } else if pickle.exists() {
            Err(PretrainedError::pickle(&pickle))
        } else {
            Err(PretrainedError::none(folder))
        }
    }

    /// All files that an index names.
    fn add_indexed(&mut self, folder: &Path, index: &Path) -> Result<(), PretrainedError> {
        let Index { weight_map } =
            serde_json::from_slice(&read_json(index)?).map_err(|e| PretrainedError::json(index, e))?;
        let names: BTreeSet<&str> = weight_map.values().map(String::as_str).collect();
        for name in names {
            // They must not lead out of the folder.
            if Path::new(name).file_name() != Some(name.as_ref()) {
                let what = format!("`{name}` is not a valid file name");
                return Err(PretrainedError::json(index, what));
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

fn open(path: PathBuf) -> Result<WeightFile, PretrainedError> {
    let opened = open_to_read(&path).and_then(|file| Ok((file.metadata()?.len(), file)));
    match opened {
        Ok((len, file)) => Ok(WeightFile { path, file, len }),
        // It is no file.
        Err(e) if e.kind() == ErrorKind::InvalidData => {
            Err(PretrainedError::Unusable(format!("`{}` is {e}", path.display())))
        }
        Err(e) => Err(PretrainedError::io(&path, &e)),
    }
}

/// The header of a file that is as long as it says.
fn header(WeightFile { path, file, len }: &mut WeightFile) -> Result<Header, PretrainedError> {
    let mut start = [0; POINTER.len()];
    if file.read_exact_at(&mut start, 0).is_ok() && start == POINTER {
        let what = " is a Git LFS pointer, not the file itself";
        return Err(PretrainedError::unusable(
            path,
            what,
            "download it with `git lfs pull` in its directory",
        ));
    }
    let header = read_header(file).map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof => {
            PretrainedError::damaged(path, format!("it ends within its header, after {len} bytes"))
        }
        ErrorKind::InvalidData => PretrainedError::damaged(path, error),
        _ => PretrainedError::io(path, &error),
    })?;
    let expected = header.file_len();
    if *len != expected {
        let what = format!("it has {len} bytes, expected {expected}");
        return Err(PretrainedError::damaged(path, what));
    }
    Ok(header)
}

/// The bytes of a file of JSON.
pub(super) fn read_json(path: &Path) -> Result<Vec<u8>, PretrainedError> {
    read_bounded(path, MAX_JSON_BYTES).map_err(|error| match error.kind() {
        ErrorKind::FileTooLarge => PretrainedError::json(path, error),
        _ => PretrainedError::io(path, &error),
    })
}
