//! A file of tokens: a text in which every byte is one, or a token file of a kind that its first bytes identify.
//!
//! - Our own kind: safetensors with one tensor `tokens` of one dimension, `U16` or `U32`, and metadata. A file that somebody
//!   else wrote with such a tensor is taken too; what its metadata leave out is not known.
//! - The `.bin` of llm.c and modded-nanogpt: a header of 256 integers of 4 bytes, then the tokens. The first integer is
//!   the kind, the second its version, the third how many tokens follow. The tokenizer that made them is not recorded.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use ddp_proto::words::quoted;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::Serialize;

use super::data_file::DataFile;
use super::{DataError, Vocabulary};

/// What a token file made of a text is called: the text's name with this behind it.
const SUFFIX: &str = "safetensors";

/// Tokens of one vocabulary in a file that is read as they are asked for.
pub(super) struct TokenFile {
    file: DataFile,
    layout: Layout,
    vocabulary: Arc<Vocabulary>,
}

impl TokenFile {
    /// Opens a file for a vocabulary: a text for bytes, a token file for all others. `tokenizer` is what the user
    /// calls the vocabulary, for the command that would make tokens of a text.
    pub(super) fn open(
        path: &Path,
        vocabulary: &Arc<Vocabulary>,
        tokenizer: &str,
    ) -> Result<Self, DataError> {
        let file = DataFile::open(path)?;
        let empty = || DataError::file(path, "is empty", None);
        if file.len() == 0 {
            return Err(empty());
        }
        let refused = |problem: String, hint: &str| Err(DataError::file(path, problem, Some(hint)));
        let wanted = &vocabulary.name;
        let recognised = match llm_c_layout(&file)? {
            Some(layout) => Some(layout),
            None => named_layout(&file)?,
        };
        let layout = match (recognised, vocabulary.is_bytes()) {
            (None, true) => Layout {
                start: 0,
                dtype: Dtype::U8,
                tokens: file.len(),
                facts: TokenFacts {
                    text_bytes: Some(file.len() as u64),
                    ..TokenFacts::default()
                },
            },
            (Some(Layout { facts, .. }), true) => {
                let made_with = facts.tokenizer.map_or_else(
                    || "set `data.tokenizer` to the one that it was made with".into(),
                    |tokenizer| format!("set `data.tokenizer: {tokenizer}`"),
                );
                let problem = "is a token file, but `data.tokenizer: bytes` expects text";
                return refused(problem.into(), &made_with);
            }
            (None, false) => {
                let command = command(path, tokenizer, wanted);
                return refused(
                    format!("is not a token file, but `data.tokenizer: {wanted}` needs one"),
                    &format!("create one and use it instead: `{command}`"),
                );
            }
            (Some(layout), false) => layout,
        };
        let facts = &layout.facts;
        if facts.tokenizer_hash.is_some() && facts.tokenizer_hash != vocabulary.hash {
            let found = facts.tokenizer.as_deref().unwrap_or("another one");
            return refused(other_tokenizer(found, wanted), OTHER_TOKENIZER);
        }
        if layout.tokens == 0 {
            return Err(empty());
        }
        Ok(Self {
            file,
            layout,
            vocabulary: Arc::clone(vocabulary),
        })
    }

    /// The path that was opened.
    pub(super) fn path(&self) -> &Path {
        self.file.path()
    }

    /// Number of tokens, at least one.
    pub(super) fn len(&self) -> usize {
        self.layout.tokens
    }

    /// The metadata of the file.
    pub(super) fn facts(&self) -> &TokenFacts {
        &self.layout.facts
    }

    /// How a token is stored, little-endian.
    pub(super) fn dtype(&self) -> Dtype {
        self.layout.dtype
    }

    /// Copies the tokens from `start` into `out`. A number that the vocabulary does not have is an error: a model
    /// has no row for it.
    pub(super) fn read(&self, start: usize, out: &mut [i32]) -> Result<(), DataError> {
        let width = width(self.layout.dtype);
        let mut bytes = vec![0; out.len() * width];
        self.read_stored(start, &mut bytes)?;
        let last = (self.vocabulary.size - 1) as u32;
        for (i, (out, bytes)) in out.iter_mut().zip(bytes.chunks_exact(width)).enumerate() {
            let token = stored(bytes);
            if token > last {
                let (position, tokenizer) = (start + i, &self.vocabulary.name);
                let problem = format!(
                    "has the number {token} at position {position}, but the last token of `{tokenizer}` is {last}"
                );
                return Err(DataError::file(self.path(), problem, Some(OTHER_TOKENIZER)));
            }
            *out = token as i32;
        }
        Ok(())
    }

    /// Copies the bytes of the tokens from `start`, as they are stored, into `out`, which has room for whole ones of
    /// this file.
    pub(super) fn read_stored(&self, start: usize, out: &mut [u8]) -> Result<(), DataError> {
        let width = width(self.layout.dtype);
        self.file.read(self.layout.start + start * width, out)
    }
}

/// The next step where the tokens are not those of the vocabulary.
const OTHER_TOKENIZER: &str =
    "set `data.tokenizer` to the one that the file was made with, or make it again with `ddp-train tokenize`";

/// Two versions of one tokenizer have the same name.
pub(super) fn other_tokenizer(found: &str, wanted: &str) -> String {
    let version = if found == wanted {
        ", which is a different version of it"
    } else {
        ""
    };
    format!("holds tokens of `{found}`, but `data.tokenizer` is `{wanted}`{version}")
}

/// A token of 1, 2 or 4 bytes.
fn stored(bytes: &[u8]) -> u32 {
    match *bytes {
        [a] => u32::from(a),
        [a, b] => u32::from(u16::from_le_bytes([a, b])),
        [a, b, c, d] => u32::from_le_bytes([a, b, c, d]),
        _ => unreachable!("a token has 1, 2 or 4 bytes"),
    }
}

/// What to type to make tokens of the text at `path`.
fn command(path: &Path, tokenizer: &str, name: &str) -> String {
    let stem = name.trim_end_matches(".json");
    let out = path.with_extension(format!("{stem}.{SUFFIX}"));
    format!(
        "ddp-train tokenize --tokenizer {} -o {} {}",
        quoted(tokenizer),
        quoted(&out.display().to_string()),
        quoted(&path.display().to_string())
    )
}

/// The narrowest type in which every token of a vocabulary has room.
pub(crate) fn dtype_of_vocabulary(size: usize) -> Dtype {
    if size <= 1 << 16 { Dtype::U16 } else { Dtype::U32 }
}

/// Bytes of a token.
pub(crate) fn width(dtype: Dtype) -> usize {
    dtype.bitsize() / 8
}

/// The metadata of a token file, under the names of these fields.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TokenFacts {
    /// Name of the tokenizer.
    pub tokenizer: Option<String>,
    /// Hash of the tokenizer: see [`Vocabulary::hash`](super::Vocabulary::hash).
    pub tokenizer_hash: Option<String>,
    /// Size of its vocabulary.
    pub vocab_size: Option<usize>,
    /// Documents that the file was made from.
    pub documents: Option<u64>,
    /// Bytes of the text that the tokens stand for.
    pub text_bytes: Option<u64>,
}

/// Where the tokens of a file lie.
#[derive(Debug)]
struct Layout {
    /// Bytes before the first token.
    start: usize,
    dtype: Dtype,
    tokens: usize,
    facts: TokenFacts,
}

/// The header of the file at `path` has contents that are not known.
fn wrong_header(path: &Path, what: impl std::fmt::Display) -> DataError {
    let hint =
        "supported are the files of `ddp-train tokenize` and of llm.c: see `Tokens` in docs/configuration.md";
    DataError::file(
        path,
        format!("is a token file with an invalid header: {what}"),
        Some(hint),
    )
}

/// An error if the file is not as long as its header says.
fn check_length(file: &DataFile, promised: u64) -> Result<(), DataError> {
    let found = file.len() as u64;
    if found == promised {
        return Ok(());
    }
    Err(DataError::file(
        file.path(),
        format!("is {found} bytes long, but its header promises {promised}"),
        Some("it was truncated or extended: create or download it again"),
    ))
}

/// Bytes before the first token.
const LLM_C_HEADER_BYTES: usize = 256 * 4;

/// First integer, second integer, and what follows.
const KINDS: [(i32, i32, Dtype); 2] = [(20_240_520, 1, Dtype::U16), (20_240_801, 7, Dtype::U32)];

/// Layout of `file`, if it is of this kind.
fn llm_c_layout(file: &DataFile) -> Result<Option<Layout>, DataError> {
    let mut header = [0; 3 * 4];
    if file.len() < header.len() {
        return Ok(None);
    }
    file.read(0, &mut header)?;
    let number = |i: usize| i32::from_le_bytes([0, 1, 2, 3].map(|j| header[4 * i + j]));
    let (magic, version, count) = (number(0), number(1), number(2));
    let Some((_, known, dtype)) = KINDS.into_iter().find(|kind| kind.0 == magic) else {
        return Ok(None);
    };
    let wrong = |what: String| wrong_header(file.path(), what);
    if version != known {
        let what = format!("of llm.c's kind {magic} version {known} is known, and it has version {version}");
        return Err(wrong(what));
    }
    let tokens = usize::try_from(count).map_err(|_| wrong(format!("it promises {count} tokens")))?;
    check_length(file, (LLM_C_HEADER_BYTES + tokens * width(dtype)) as u64)?;
    Ok(Some(Layout {
        start: LLM_C_HEADER_BYTES,
        dtype,
        tokens,
        facts: TokenFacts::default(),
    }))
}

/// Bytes of all that is before the first token in a file that we write. Fixed, since how many tokens there are is
/// known at the end only; a multiple of the width of every token, so that every token is aligned.
pub(crate) const HEADER_BYTES: usize = 4096;
/// Bytes of the length of the JSON, which comes first.
const LENGTH_BYTES: usize = 8;
/// Longest header that is read; the format's own limit.
const MAX_JSON_BYTES: u64 = 100_000_000;

/// Name of the tensor.
const TENSOR: &str = "tokens";
/// Name of the kind in the metadata.
const KIND: &str = "format";
/// What the metadata call the kind, version included.
const OURS: &str = "ddp-tokens/1";

/// The header of a file of `tokens` tokens, [`HEADER_BYTES`] long, or `None` if `facts` do not fit.
pub(crate) fn header(dtype: Dtype, tokens: usize, facts: &TokenFacts) -> Option<Vec<u8>> {
    // Sorted, so that the same tokens are the same file.
    let mut metadata = BTreeMap::from([(KIND.to_owned(), OURS.to_owned())]);
    for (key, value) in serde_json::to_value(facts).ok()?.as_object()? {
        if !value.is_null() {
            let text = value
                .as_str()
                .map_or_else(|| value.to_string(), ToOwned::to_owned);
            metadata.insert(key.clone(), text);
        }
    }
    let info = TensorInfo {
        dtype,
        shape: vec![tokens],
        data_offsets: (0, tokens * width(dtype)),
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
fn named_layout(file: &DataFile) -> Result<Option<Layout>, DataError> {
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
    let wrong = |what: String| wrong_header(file.path(), what);
    let metadata: Metadata = serde_json::from_slice(&json).map_err(|e| wrong(e.to_string()))?;
    let Some(info) = metadata.info(TENSOR) else {
        return Err(wrong(format!("there is no tensor `{TENSOR}`")));
    };
    let dtype = info.dtype;
    if !matches!(dtype, Dtype::U16 | Dtype::U32) {
        let what = format!("tensor `{TENSOR}` is {dtype:?}, expected U16 or U32");
        return Err(wrong(what));
    }
    let &[tokens] = info.shape.as_slice() else {
        let what = format!(
            "tensor `{TENSOR}` has the shape {:?}, expected one dimension",
            info.shape
        );
        return Err(wrong(what));
    };
    let (from, to) = info.data_offsets;
    if tokens
        .checked_mul(width(dtype))
        .is_none_or(|bytes| to.checked_sub(from) != Some(bytes))
    {
        return Err(wrong(format!(
            "tensor `{TENSOR}` is too small for {tokens} tokens"
        )));
    }
    check_length(file, (start as u64).saturating_add(metadata.data_len() as u64))?;
    let facts = facts(metadata.metadata().as_ref()).map_err(wrong)?;
    Ok(Some(Layout {
        start: start + from,
        dtype,
        tokens,
        facts,
    }))
}

fn facts(metadata: Option<&HashMap<String, String>>) -> Result<TokenFacts, String> {
    let Some(metadata) = metadata.filter(|metadata| metadata.contains_key("tokenizer_hash")) else {
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
        tokenizer: word("tokenizer"),
        tokenizer_hash: word("tokenizer_hash"),
        vocab_size: number("vocab_size")?.map(|size| size as usize),
        documents: number("documents")?,
        text_bytes: number("text_bytes")?,
    })
}
