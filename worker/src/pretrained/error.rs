//! Why weights cannot be used.

use std::io;
use std::path::{Path, PathBuf};

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
        kind: io::ErrorKind,
    },
    /// There is no file with weights.
    #[error(
        "`{}` holds neither `model.safetensors` nor `model.safetensors.index.json`\n  hint: {}",
        path.display(),
        if *is_run {
            format!("it is of a run: `ddp-train ckpt export {} --to FOLDER` makes such a file of its checkpoint", path.display())
        } else {
            "name a folder that `save_pretrained` or `ddp-train ckpt export` has written, or one `.safetensors` file".into()
        }
    )]
    None {
        /// The folder.
        path: PathBuf,
        /// It holds a run, or a checkpoint of one.
        is_run: bool,
    },
    /// Objects of Python, not numbers.
    #[error(
        "`{}` is a pickle, which only Python can read, and only by running it\n  hint: convert it once: `python3 -c \"from transformers import GPT2LMHeadModel as M; M.from_pretrained('{}').save_pretrained('NEW_FOLDER')\"`, and name the new folder",
        path.display(),
        folder_of(path).display()
    )]
    Pickle {
        /// The file.
        path: PathBuf,
    },
    /// Something else stands where a file is expected.
    #[error("`{}` is not a regular file", path.display())]
    NotAFile {
        /// What it is called.
        path: PathBuf,
    },
    /// A file says nothing that can be used.
    #[error("`{}` is no safetensors file, or a damaged one: {what}\n  hint: {AGAIN}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A file of JSON says nothing that can be used.
    #[error("`{}` cannot be used: {what}\n  hint: {AGAIN}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// What lies there is a name for the file, as Git without its extension for large files leaves it.
    #[error("`{}` is a pointer of Git LFS, not the file itself\n  hint: `git lfs pull` in its folder fetches it", path.display())]
    Pointer {
        /// The file.
        path: PathBuf,
    },
    /// They are another model's.
    #[error("`{}` does not fit the `model` section: {differences}\n  hint: {hint}", path.display())]
    Misfit {
        /// What `model.init_from` names.
        path: PathBuf,
        /// The first few, in words.
        differences: String,
        /// What to change.
        hint: String,
    },
    /// A value is infinite or no number.
    #[error(
        "`{}`: tensor `{tensor}` has a value that is not finite\n  hint: the training that made it has diverged, or the file is damaged",
        path.display()
    )]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
    },
}

const AGAIN: &str = "fetch it, or write it, once more";

impl PretrainedError {
    pub(super) fn io(path: &Path, error: &io::Error) -> Self {
        Self::Io {
            path: path.to_owned(),
            cause: error.to_string(),
            kind: error.kind(),
        }
    }

    pub(super) fn damaged(path: &Path, what: impl Into<String>) -> Self {
        Self::Damaged {
            path: path.to_owned(),
            what: what.into(),
        }
    }

    pub(super) fn json(path: &Path, what: impl Into<String>) -> Self {
        Self::Json {
            path: path.to_owned(),
            what: what.into(),
        }
    }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn hint_of(kind: io::ErrorKind) -> &'static str {
    match kind {
        io::ErrorKind::NotFound => {
            "\n  hint: a relative path of `model.init_from` counts from the folder of the configuration"
        }
        _ => "",
    }
}
