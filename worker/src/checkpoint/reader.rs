//! Any range of any tensor of a checkpoint, verified.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Read as _;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::error::type_and_shape;
use super::layout::{self, LATEST, MANIFEST};
use super::manifest::{MAX_MANIFEST_BYTES, Manifest, PieceRecord, TensorRecord};
use super::part::{self, Entry};
use super::{CheckpointError, coverage};
use crate::device::DType;

const CHUNK_BYTES: u64 = 1 << 20;

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
    pub tensor: &'a str,
    /// Its global shape.
    pub shape: &'a [u64],
    /// Type of its elements.
    pub dtype: DType,
}

/// An opened checkpoint. Sizes and headers of all files are checked when it is opened; the hash of a piece
/// when its first byte is read.
pub struct Reader {
    path: PathBuf,
    manifest: Manifest,
    files: HashMap<String, Part>,
    /// File and entry of the pieces whose hash was right.
    verified: Mutex<HashSet<(String, String)>>,
}

/// A file, opened for each piece that is read of it: thousands of ranks may have written one each.
struct Part {
    path: PathBuf,
    entries: HashMap<String, Entry>,
}

impl Part {
    fn open(&self) -> Result<File, CheckpointError> {
        File::open(&self.path).map_err(|e| CheckpointError::unread(&self.path, &e))
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
        let manifest = read_manifest(&path.join(MANIFEST))?;
        let mut files = HashMap::new();
        for record in &manifest.files {
            let part = open_part(path, &record.name, record.bytes)?;
            files.insert(record.name.clone(), part);
        }
        for tensor in &manifest.tensors {
            coverage::check(&mut tensor.clone())?;
            for piece in &tensor.pieces {
                check_piece(path, &files, tensor, piece)?;
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
                    tensor: tensor.tensor.to_owned(),
                    found: type_and_shape(found.dtype, &found.shape),
                    expected: type_and_shape(tensor.dtype, tensor.shape),
                });
            }
        }
        let names: HashSet<&str> = expected.iter().map(|t| t.tensor).collect();
        match self
            .manifest
            .tensors
            .iter()
            .find(|t| !names.contains(t.name.as_str()))
        {
            None => Ok(()),
            Some(extra) => Err(CheckpointError::Unexpected {
                path: self.path.clone(),
                tensor: extra.name.clone(),
            }),
        }
    }

    /// The bytes of a range of a tensor's elements, from however many pieces.
    pub fn read(&self, tensor: &str, range: Range<u64>) -> Result<Vec<u8>, CheckpointError> {
        let tensor = self.tensor(tensor)?;
        let width = tensor.dtype.bytes() as u64;
        let elements = tensor.elements().unwrap_or(0);
        if range.start > range.end || range.end > elements {
            let Range { start, end } = range;
            let name = &tensor.name;
            return Err(CheckpointError::Misuse(format!(
                "elements {start}..{end} of {elements} of tensor `{name}`"
            )));
        }
        let mut bytes = vec![0; ((range.end - range.start) * width) as usize];
        for piece in &tensor.pieces {
            let (start, end) = (piece.start.max(range.start), piece.end.min(range.end));
            if start >= end {
                continue;
            }
            let out =
                &mut bytes[((start - range.start) * width) as usize..((end - range.start) * width) as usize];
            self.read_piece(tensor, piece, (start - piece.start) * width, out)?;
        }
        Ok(bytes)
    }

    /// Reads everything and compares every hash.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        self.pieces()
            .try_for_each(|(tensor, piece)| self.verify_piece(tensor, piece))
    }

    /// As [`Reader::verify`], to the end: all that is damaged.
    #[must_use]
    pub fn damages(&self) -> Vec<CheckpointError> {
        self.pieces()
            .filter_map(|(tensor, piece)| self.verify_piece(tensor, piece).err())
            .collect()
    }

    /// Folder of the checkpoint.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn pieces(&self) -> impl Iterator<Item = (&TensorRecord, &PieceRecord)> {
        let tensors = self.manifest.tensors.iter();
        tensors.flat_map(|tensor| tensor.pieces.iter().map(move |piece| (tensor, piece)))
    }

    fn tensor(&self, name: &str) -> Result<&TensorRecord, CheckpointError> {
        self.manifest
            .tensor(name)
            .ok_or_else(|| CheckpointError::Missing {
                path: self.path.clone(),
                tensor: name.to_owned(),
            })
    }

    /// Bytes of a piece from `offset`. A whole piece is hashed as it is read; for a part of one the piece is
    /// verified first, once.
    fn read_piece(
        &self,
        tensor: &TensorRecord,
        piece: &PieceRecord,
        offset: u64,
        out: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let (part, entry) = self.entry(piece);
        let whole = out.len() as u64 == entry.bytes;
        if !whole {
            self.verify_piece(tensor, piece)?;
        }
        part.open()?
            .read_exact_at(out, entry.offset + offset)
            .map_err(|e| CheckpointError::io("read", &part.path, &e))?;
        if whole {
            return self.settle(tensor, piece, &blake3::hash(out));
        }
        Ok(())
    }

    fn verify_piece(&self, tensor: &TensorRecord, piece: &PieceRecord) -> Result<(), CheckpointError> {
        let name = (piece.file.clone(), piece.entry.clone());
        if self
            .verified
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .contains(&name)
        {
            return Ok(());
        }
        let (part, entry) = self.entry(piece);
        let file = part.open()?;
        let mut hasher = blake3::Hasher::new();
        let mut chunk = vec![0; CHUNK_BYTES.min(entry.bytes) as usize];
        let mut done = 0;
        while done < entry.bytes {
            let n = CHUNK_BYTES.min(entry.bytes - done) as usize;
            file.read_exact_at(&mut chunk[..n], entry.offset + done)
                .map_err(|e| CheckpointError::io("read", &part.path, &e))?;
            hasher.update(&chunk[..n]);
            done += n as u64;
        }
        self.settle(tensor, piece, &hasher.finalize())
    }

    fn settle(
        &self,
        tensor: &TensorRecord,
        piece: &PieceRecord,
        found: &blake3::Hash,
    ) -> Result<(), CheckpointError> {
        if found.to_hex().as_str() != piece.blake3 {
            return Err(CheckpointError::Hash {
                path: self.path.join(&piece.file),
                tensor: tensor.name.clone(),
                range: piece.start..piece.end,
            });
        }
        let name = (piece.file.clone(), piece.entry.clone());
        self.verified
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(name);
        Ok(())
    }

    /// Where a piece lies. Opening the checkpoint has checked that it exists.
    fn entry(&self, piece: &PieceRecord) -> (&Part, &Entry) {
        let part = &self.files[&piece.file];
        (part, &part.entries[&piece.entry])
    }
}

pub(super) fn read_manifest(path: &Path) -> Result<Manifest, CheckpointError> {
    let failed = |e: std::io::Error| CheckpointError::unread(path, &e);
    let file = File::open(path).map_err(failed)?;
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
    let mut file = File::open(&path).map_err(failed)?;
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

/// The manifest and the file must agree on where a piece is and how large.
fn check_piece(
    folder: &Path,
    files: &HashMap<String, Part>,
    tensor: &TensorRecord,
    piece: &PieceRecord,
) -> Result<(), CheckpointError> {
    let damaged = |what: String| CheckpointError::damaged(&folder.join(&piece.file), what);
    let entry = files
        .get(&piece.file)
        .and_then(|part| part.entries.get(&piece.entry));
    let Some(entry) = entry else {
        return Err(damaged(format!("it has no entry `{}`", piece.entry)));
    };
    let bytes = (piece.end - piece.start) * tensor.dtype.bytes() as u64;
    if entry.dtype != tensor.dtype || entry.bytes != bytes {
        return Err(damaged(format!(
            "entry `{}` has {} bytes of {}, expected {bytes} of {}",
            piece.entry, entry.bytes, entry.dtype, tensor.dtype
        )));
    }
    Ok(())
}
