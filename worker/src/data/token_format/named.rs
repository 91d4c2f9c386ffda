//! Our own token files: safetensors with one tensor `tokens` of one dimension, `U16` or `U32`, and metadata. A file that
//! somebody else wrote with such a tensor is taken too; what its metadata do not say is not known.

use std::collections::HashMap;

use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use super::Layout;
use super::layout::{TokenFacts, Width, check_length};
use crate::data::mapped_file::MappedFile;
use crate::data::{DataError, FileProblem};

/// Bytes of all that is before the first token in a file that we write. Fixed, since how many tokens there are is
/// known at the end only; a multiple of the width of every token, so that a mapped file is aligned.
pub(crate) const HEADER_BYTES: usize = 4096;
/// Bytes of the length of the JSON, which comes first.
const LENGTH_BYTES: usize = 8;
/// Longest header that is read; the format's own limit.
const MAX_JSON_BYTES: u64 = 100_000_000;

/// Name of the tensor.
const TENSOR: &str = "tokens";
/// Names of the metadata.
const KIND: &str = "format";
const TOKENIZER: &str = "tokenizer";
const TOKENIZER_HASH: &str = "tokenizer_hash";
const VOCAB_SIZE: &str = "vocab_size";
const DOCUMENTS: &str = "documents";
const TEXT_BYTES: &str = "text_bytes";
/// What the metadata call the kind, version included.
const OURS: &str = "ddp-tokens/1";

/// The header of a file of `tokens` tokens, [`HEADER_BYTES`] long; none if what `facts` say does not fit.
pub(crate) fn header(width: Width, tokens: usize, facts: &TokenFacts) -> Option<Vec<u8>> {
    let numbers = [
        (VOCAB_SIZE, facts.vocab_size.map(|size| size.to_string())),
        (DOCUMENTS, facts.documents.map(|documents| documents.to_string())),
        (TEXT_BYTES, facts.text_bytes.map(|bytes| bytes.to_string())),
        (TOKENIZER, facts.tokenizer.clone()),
        (TOKENIZER_HASH, facts.tokenizer_hash.clone()),
        (KIND, Some(OURS.to_owned())),
    ];
    let said = numbers.into_iter();
    // Sorted, so that the same tokens are the same file.
    let metadata: std::collections::BTreeMap<&str, String> =
        said.filter_map(|(key, value)| Some((key, value?))).collect();
    let dtype = match width {
        Width::U8 => Dtype::U8,
        Width::U16 => Dtype::U16,
        Width::U32 => Dtype::U32,
    };
    let info = TensorInfo {
        dtype,
        shape: vec![tokens],
        data_offsets: (0, tokens * width.bytes()),
    };
    let mut json = serde_json::to_vec(&serde_json::json!({
        "__metadata__": metadata,
        TENSOR: info,
    }))
    .ok()?;
    let room = HEADER_BYTES - LENGTH_BYTES;
    if json.len() > room {
        return None;
    }
    json.resize(room, b' ');
    let mut bytes = (room as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    Some(bytes)
}

/// Layout of `file`, if it is a safetensors file.
pub(super) fn layout(file: &MappedFile) -> Result<Option<Layout>, DataError> {
    let mut first = [0; LENGTH_BYTES + 1];
    if file.len() < first.len() {
        return Ok(None);
    }
    file.read(0, &mut first)?;
    let [length @ .., brace] = first;
    let length = u64::from_le_bytes(length);
    // In a text the length would be astronomic.
    if length > MAX_JSON_BYTES || brace != b'{' {
        return Ok(None);
    }
    let start = LENGTH_BYTES + length as usize;
    if file.len() < start {
        check_length(file, start as u64)?;
    }
    let mut json = vec![0; length as usize];
    file.read(LENGTH_BYTES, &mut json)?;
    let wrong = |what: String| DataError::file(file.path(), FileProblem::Header(what));
    let metadata: Metadata = serde_json::from_slice(&json).map_err(|e| wrong(e.to_string()))?;
    let Some(info) = metadata.info(TENSOR) else {
        return Err(wrong(format!("there is no tensor `{TENSOR}`")));
    };
    let width = match info.dtype {
        Dtype::U16 => Width::U16,
        Dtype::U32 => Width::U32,
        other => {
            return Err(wrong(format!(
                "tensor `{TENSOR}` is {other:?}, expected U16 or U32"
            )));
        }
    };
    let &[tokens] = info.shape.as_slice() else {
        let what = format!(
            "tensor `{TENSOR}` has the shape {:?}, expected one dimension",
            info.shape
        );
        return Err(wrong(what));
    };
    let (from, to) = info.data_offsets;
    if tokens
        .checked_mul(width.bytes())
        .is_none_or(|bytes| to.checked_sub(from) != Some(bytes))
    {
        return Err(wrong(format!(
            "tensor `{TENSOR}` has no room for {tokens} tokens"
        )));
    }
    check_length(file, (start as u64).saturating_add(metadata.data_len() as u64))?;
    let facts = facts(metadata.metadata().as_ref()).map_err(wrong)?;
    Ok(Some(Layout {
        start: start + from,
        width,
        tokens,
        facts,
    }))
}

/// What the metadata say.
fn facts(metadata: Option<&HashMap<String, String>>) -> Result<TokenFacts, String> {
    let Some(metadata) = metadata.filter(|metadata| metadata.contains_key(TOKENIZER_HASH)) else {
        return Ok(TokenFacts::default());
    };
    let word = |key: &str| metadata.get(key).cloned();
    if let Some(kind) = word(KIND)
        && kind != OURS
    {
        return Err(format!("`{OURS}` is known, and it is `{kind}`"));
    }
    let number = |key: &str| {
        let value = metadata.get(key);
        let number = value.map(|value| value.parse::<u64>().map_err(|_| format!("`{key}` is `{value}`")));
        number.transpose()
    };
    Ok(TokenFacts {
        tokenizer: word(TOKENIZER),
        tokenizer_hash: word(TOKENIZER_HASH),
        vocab_size: number(VOCAB_SIZE)?.map(|size| size as usize),
        documents: number(DOCUMENTS)?,
        text_bytes: number(TEXT_BYTES)?,
    })
}
