//! Any range of any parameter of published weights, as f32.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use bytemuck::Pod;
use safetensors::tensor::Dtype;

use super::files::{PretrainedError, StoredTensor, WeightFile, WeightFiles};
use super::fit::{Expected, Misfit, Named, ParamSource, Piece};
use super::settings::{self, Settings};
use crate::config;
use crate::model::{HEAD, ParamId, ParamSpec, Published};

/// Elements that are widened at once.
const CHUNK: usize = 1 << 16;
/// Bytes at either end of a file that stand for all of it.
const FINGERPRINT_BYTES: u64 = 1 << 20;

/// Weights that fit a model. Every parameter has them, from its first element on.
pub struct PretrainedWeights {
    path: PathBuf,
    files: Vec<WeightFile>,
    /// One for each parameter.
    sources: Vec<ParamSource>,
    /// See [`Expected::remainder`].
    remainder: Option<String>,
}

impl PretrainedWeights {
    /// Opens the folder or file at `path`, and compares names, shapes and settings with the model that `model` describes
    /// and whose parameters are `params`. The error names all that differs, and what to write in the YAML.
    ///
    /// No values are read, except that the head is compared if nothing says whether it is tied.
    pub fn open(path: &Path, model: &config::Model, params: &[ParamSpec]) -> Result<Self, PretrainedError> {
        let WeightFiles {
            files,
            tensors,
            config,
        } = WeightFiles::open(path)?;
        let mut misfit = Misfit::default();
        let mut is_tied = None;
        if let Some(config) = config {
            let there = Settings::read(&config)?.model(model, &mut misfit)?;
            settings::compare(&there, model, &mut misfit);
            is_tied = Some(there.is_tied());
            // Another kind has other names for everything.
            if there.kind != model.kind {
                return Err(misfit.into_error(path));
            }
        } else {
            settings::check_published(model, &mut misfit);
        }
        let expected = Expected::new(model, params);
        let mut named = expected.by_name(&tensors, &mut misfit);
        compare_heads(&files, is_tied, &expected, &mut named, &mut misfit)?;
        let sources = expected.sources(&named, &mut misfit);
        let remainder = expected.remainder(&named);
        misfit.into_result(path)?;
        Ok(Self {
            path: path.to_owned(),
            files,
            sources,
            remainder,
        })
    }

    /// How many elements of a parameter there are, from its first.
    ///
    /// # Panics
    /// If there is no such parameter.
    pub fn elements(&self, id: ParamId) -> usize {
        self.sources[id.0].elements()
    }

    /// Reads elements `range` of a parameter into `out`. What the file has in 16 bits is widened, which is exact.
    ///
    /// # Panics
    /// If the range is not within [`PretrainedWeights::elements`], or `out` has another length.
    pub fn read(&self, id: ParamId, range: Range<usize>, out: &mut [f32]) -> Result<(), PretrainedError> {
        let source = &self.sources[id.0];
        assert!(range.end <= source.elements(), "{range:?} of {source:?}");
        assert_eq!(range.len(), out.len(), "elements of {source:?}");
        let mut rest = out;
        for Piece { tensor, elements } in &source.pieces {
            let start = range.start.max(elements.start);
            let end = range.end.min(elements.end);
            if start < end {
                let (now, later) = rest.split_at_mut(end - start);
                self.read_tensor(tensor, start - elements.start, now)?;
                rest = later;
            }
        }
        Ok(())
    }

    /// Reads elements of a tensor, from `start` on.
    fn read_tensor(
        &self,
        tensor: &StoredTensor,
        start: usize,
        out: &mut [f32],
    ) -> Result<(), PretrainedError> {
        let StoredTensor { name, offset, .. } = tensor;
        let WeightFile { path, file, .. } = &self.files[tensor.file];
        let at = |bytes: usize| offset + (start * bytes) as u64;
        match tensor.dtype {
            Dtype::F16 => widen::<half::f16>(file, at(2), out),
            Dtype::BF16 => widen::<half::bf16>(file, at(2), out),
            _ => widen::<f32>(file, at(4), out),
        }
        .map_err(|e| PretrainedError::io(path, &e))?;
        if out.iter().all(|value| value.is_finite()) {
            return Ok(());
        }
        let what = format!(": tensor `{name}` has a value that is not finite");
        let hint = "the training that produced it diverged, or the file is damaged";
        Err(PretrainedError::unusable(path, what, hint))
    }

    /// What `model.init_from` names.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Elements of all parameters that are taken.
    pub fn parameters(&self) -> usize {
        self.sources.iter().map(ParamSource::elements).sum()
    }

    /// Types in which they are stored: `f16`, or `f16 and f32`.
    pub fn types(&self) -> String {
        let types = [(Dtype::F16, "f16"), (Dtype::BF16, "bf16"), (Dtype::F32, "f32")];
        let pieces = self.sources.iter().flat_map(|source| &source.pieces);
        let is_there = |dtype: Dtype| pieces.clone().any(|piece| piece.tensor.dtype == dtype);
        let types = types.into_iter().filter(|(dtype, _)| is_there(*dtype));
        types.map(|(_, name)| name).collect::<Vec<_>>().join(" and ")
    }

    /// What is not taken from the files, or not all of it, in words.
    pub fn remainder(&self) -> Option<&str> {
        self.remainder.as_deref()
    }

    /// Lengths of the files, and a hash of both ends of each: ranks that read copies compare it.
    pub fn fingerprint(&self) -> Result<String, PretrainedError> {
        let mut hash = blake3::Hasher::new();
        for WeightFile { path, file, len } in &self.files {
            let mut end = vec![0; FINGERPRINT_BYTES.min(*len) as usize];
            for start in [0, len - end.len() as u64] {
                file.read_exact_at(&mut end, start)
                    .map_err(|e| PretrainedError::io(path, &e))?;
                hash.update(&end);
            }
        }
        let bytes: u64 = self.files.iter().map(|file| file.len).sum();
        Ok(format!("{bytes} bytes, hash {}", &hash.finalize().to_hex()[..16]))
    }
}

/// Reads numbers that lie at `offset`, a few at a time, whatever their width.
fn widen<T: Pod + Into<f32>>(file: &File, offset: u64, out: &mut [f32]) -> std::io::Result<()> {
    let mut stored = vec![T::zeroed(); CHUNK.min(out.len())];
    let mut at = offset;
    for out in out.chunks_mut(CHUNK) {
        let stored = &mut stored[..out.len()];
        file.read_exact_at(bytemuck::cast_slice_mut(stored), at)?;
        at += size_of_val(stored) as u64;
        for (out, stored) in out.iter_mut().zip(stored) {
            *out = (*stored).into();
        }
    }
    Ok(())
}

/// Compares whether the head is the token embedding: here, and in the file, if that says it. Takes out of `named` a head
/// that is none.
fn compare_heads(
    files: &[WeightFile],
    there: Option<bool>,
    expected: &Expected,
    named: &mut Named<'_>,
    misfit: &mut Misfit,
) -> Result<(), PretrainedError> {
    let tokens = expected.decoder.names.tokens;
    if !expected.decoder.is_tied {
        if there == Some(true) {
            misfit.differs(format!(
                "`{}` is true in the file, but `tied` is false in this model",
                Published::TIED
            ));
        }
        if there == Some(true) || there.is_none() && !named.contains_key(HEAD) {
            misfit.write("tied", true);
        }
        return Ok(());
    }
    let Some(head) = named.remove(HEAD) else {
        return Ok(());
    };
    let is_same = match named.get(tokens) {
        _ if there == Some(true) => true,
        Some(tokens) => is_same(files, head, tokens)?,
        None => false,
    };
    if !is_same {
        misfit.differs(format!(
            "`{HEAD}` differs from `{tokens}` in the file, but this model ties them"
        ));
        misfit.write("tied", false);
    }
    Ok(())
}

/// True if two tensors have the same type, shape and bytes.
fn is_same(files: &[WeightFile], one: &StoredTensor, other: &StoredTensor) -> Result<bool, PretrainedError> {
    let hash = |tensor: &StoredTensor| {
        let bytes = tensor.shape.iter().product::<usize>() * tensor.dtype.bitsize() / 8;
        let WeightFile { path, file, .. } = &files[tensor.file];
        let (mut reader, mut hasher) = (file, blake3::Hasher::new());
        reader
            .seek(SeekFrom::Start(tensor.offset))
            .and_then(|_| {
                hasher
                    .update_reader(reader.take(bytes as u64))
                    .map(|h| h.finalize())
            })
            .map_err(|e| PretrainedError::io(path, &e))
    };
    Ok((one.dtype, &one.shape) == (other.dtype, &other.shape) && hash(one)? == hash(other)?)
}
