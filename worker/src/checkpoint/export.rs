//! The parameters of a checkpoint in one file for other tools, under their published names, with a configuration beside it.

use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::CheckpointError;
use super::manifest::TensorKind;
use super::part::{Extent, PartWriter, write_part};
use super::reader::Reader;
use super::storage::{DiskStep, Storage, write_file};
use crate::model::{Decoder, Published, Region};

/// Name of the file with the parameters, as other tools expect it.
const MODEL: &str = "model.safetensors";
/// Name of the configuration, as other tools expect it.
const CONFIG: &str = "config.json";
/// Name of the tokenizer, as other tools expect it.
const TOKENIZER: &str = "tokenizer.json";
/// Says which class reads [`TOKENIZER`] as it is; that of a model's kind would add tokens.
const TOKENIZER_CONFIG: (&str, &str) = (
    "tokenizer_config.json",
    "{\"tokenizer_class\": \"PreTrainedTokenizerFast\"}\n",
);

/// What an export tells of the tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportedTokenizer {
    /// Content of the run's `tokenizer.json`; none: it has no such file.
    pub json: Option<Vec<u8>>,
    /// The token before each text, by which the model also ends a text, if it is known.
    pub end_of_text: Option<u32>,
}

/// Writes the parameters of a checkpoint as one `model.safetensors`, with a `config.json` and a `tokenizer.json`, to the new
/// folder `target`, which appears when it is whole. GPT-2 and Llama have the names, shapes and settings of Hugging Face
/// ([`Published`]); [`crate::pretrained`] reads them back. Memory is bounded by a few megabytes; every hash is checked on
/// the way.
pub fn export(
    storage: &dyn Storage,
    source: &Reader,
    target: &Path,
    tokenizer: &ExportedTokenizer,
) -> Result<(), CheckpointError> {
    if target.symlink_metadata().is_ok() {
        return Err(CheckpointError::Occupied {
            path: target.to_owned(),
        });
    }
    source.check_model()?;
    let temporary = beside(target)?;
    storage.run(DiskStep::CreateFolder(&temporary))?;
    let written = export_to(storage, source, &temporary, tokenizer).and_then(|()| {
        storage.run(DiskStep::SyncFolder(&temporary))?;
        storage.run(DiskStep::Rename(&temporary, target))?;
        storage.run(DiskStep::SyncFolder(ddp_proto::paths::folder_of(target)))
    });
    if written.is_err() {
        // The error that counts is on its way.
        let _ = storage.run(DiskStep::RemoveFolder(&temporary));
    }
    written
}

fn export_to(
    storage: &dyn Storage,
    source: &Reader,
    folder: &Path,
    tokenizer: &ExportedTokenizer,
) -> Result<(), CheckpointError> {
    let model = source.model_config()?;
    let (published, decoder) = (Published::of(model.kind), Decoder::of(&model));
    let (mut files, mut sources) = (Vec::new(), Vec::new());
    let tensors = source.manifest().tensors.iter();
    for parameter in tensors.filter(|tensor| tensor.name.kind == TensorKind::Parameter) {
        let shape: Vec<usize> = parameter.shape.iter().map(|len| *len as usize).collect();
        for tensor in published.tensors(&decoder, &parameter.name.key, &shape) {
            let shape: Vec<u64> = tensor.shape.iter().map(|len| *len as u64).collect();
            let Range { start, end } = tensor.elements;
            files.push(Extent {
                tensor: TensorKind::Parameter.of(&published.name_in_file(&tensor.name, &decoder)),
                region: Region::whole(&shape),
                range: 0..(end - start) as u64,
                dtype: parameter.dtype,
                shape,
            });
            let whole = Region::whole(&parameter.shape);
            sources.push(Extent::of(parameter, whole, start as u64..end as u64));
        }
    }
    let fill = |index: usize, part: &mut PartWriter<'_>| copy(source, &sources[index], part);
    write_part(storage, &folder.join(MODEL), &files, fill)?;
    if let Some(json) = &tokenizer.json {
        let (name, class) = TOKENIZER_CONFIG;
        write_file(storage, &folder.join(TOKENIZER), json)?;
        write_file(storage, &folder.join(name), class.as_bytes())?;
    }
    let vocab = model.vocab_size.unwrap_or_default();
    let settings = published.settings(&model, vocab, tokenizer.end_of_text);
    write_file(
        storage,
        &folder.join(CONFIG),
        format!("{settings:#}\n").as_bytes(),
    )
}

/// A hidden folder in the same file system, of this process alone.
fn beside(target: &Path) -> Result<PathBuf, CheckpointError> {
    let Some(name) = target.file_name() else {
        return Err(CheckpointError::Misuse(format!(
            "`{}` is not a valid directory name",
            target.display()
        )));
    };
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".exporting-{}", std::process::id()));
    Ok(ddp_proto::paths::folder_of(target).join(hidden))
}

/// Bytes of a tensor that are in memory at once.
const CHUNK_BYTES: u64 = 4 << 20;

/// Copies an extent to a file.
fn copy(source: &Reader, extent: &Extent, part: &mut PartWriter<'_>) -> Result<(), CheckpointError> {
    let Range { start, end } = extent.range;
    let (step, mut chunk) = (CHUNK_BYTES / extent.dtype.bytes() as u64, extent.clone());
    for first in (start..end).step_by(step as usize) {
        chunk.range = first..end.min(first + step);
        part.put(&source.read(&chunk)?)?;
    }
    Ok(())
}
