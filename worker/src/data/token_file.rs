//! A file of tokens: a text in which every byte is one, or a token file of a kind that its first bytes identify.
//!
//! - Our own kind: safetensors with one tensor `tokens` of one dimension, `U16` or `U32`, and metadata. A file that somebody
//!   else wrote with such a tensor is taken too; what its metadata leave out is not known.
//! - The `.bin` of llm.c and modded-nanogpt: a header of 256 integers of 4 bytes, then the tokens. The first integer is
//!   the kind, the second its version, the third how many tokens follow. The tokenizer that made them is not recorded.
//! - NumPy's `.npy`, with one dimension of whole numbers.
//!
//! A file without a header, such as nanoGPT's `.bin`, is read as numbers of the type that the user names.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use ddp_proto::words::quoted;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::Serialize;

use super::data_file::DataFile;
use super::{DataError, Vocabulary};
use crate::config::TokenDtype;

/// What a token file made of a text is called: the text's name with this behind it.
const SUFFIX: &str = "safetensors";

/// Tokens of one vocabulary in a file that is read as they are asked for.
pub(super) struct TokenFile {
    file: DataFile,
    layout: Layout,
    vocabulary: Arc<Vocabulary>,
}

impl TokenFile {
    /// Opens a file for a vocabulary: a text for bytes, a token file for all others. `without_header` is the type of the
    /// tokens in a file that does not say it. `tokenizer` is what the user calls the vocabulary, for the command that would
    /// make tokens of a text.
    pub(super) fn open(
        path: &Path,
        vocabulary: &Arc<Vocabulary>,
        without_header: Option<TokenDtype>,
        tokenizer: &str,
    ) -> Result<Self, DataError> {
        let file = DataFile::open(path)?;
        let empty = || DataError::file(path, "is empty", None);
        if file.len() == 0 {
            return Err(empty());
        }
        let refused = |problem: String, hint: &str| Err(DataError::file(path, problem, Some(hint)));
        let wanted = &vocabulary.name;
        let layouts = [llm_c_layout, npy_layout, named_layout];
        let recognised = layouts.iter().find_map(|layout| layout(&file).transpose());
        let given = || without_header.map(|dtype| raw_layout(&file, dtype));
        let layout = match (recognised.or_else(given).transpose()?, vocabulary.is_bytes()) {
            (None, true) => text_layout(&file)?,
            (Some(Layout { facts, .. }), true) => {
                let made_with = facts.tokenizer.map_or_else(
                    || "set `data.tokenizer` to the one that it was made with".into(),
                    |tokenizer| format!("set `data.tokenizer: {tokenizer}`"),
                );
                let problem = "is a token file, but `data.tokenizer: bytes` expects text";
                return refused(problem.into(), &made_with);
            }
            (None, false) if !is_text(&file)? => {
                let problem = format!(
                    "is neither text nor a token file with a header, but `data.tokenizer: {wanted}` needs one"
                );
                let hint = "if it holds nothing but numbers, as nanoGPT's `.bin`, set `data.dtype: uint16` (or `uint32`)";
                return refused(problem, hint);
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
        let last = (self.vocabulary.size - 1) as u64;
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

/// A token of at most 8 bytes. A negative number becomes a large one, which no vocabulary has.
fn stored(bytes: &[u8]) -> u64 {
    let mut all = [0; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(all)
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

impl Layout {
    fn of(start: usize, dtype: Dtype, tokens: usize) -> Self {
        let facts = TokenFacts::default();
        Self {
            start,
            dtype,
            tokens,
            facts,
        }
    }
}

/// The header of the file at `path` has contents that are not known.
fn wrong_header(path: &Path, what: impl std::fmt::Display) -> DataError {
    let hint = "supported are the files of `ddp-train tokenize`, llm.c and NumPy: see `Tokens` in docs/configuration.md";
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

/// What editors put before a text to say that it is UTF-8. It is no part of the text.
pub(crate) const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

fn text_layout(file: &DataFile) -> Result<Layout, DataError> {
    let mut first = [0; BYTE_ORDER_MARK.len()];
    if file.len() >= first.len() {
        file.read(0, &mut first)?;
    }
    let start = if first == BYTE_ORDER_MARK { first.len() } else { 0 };
    let mut layout = Layout::of(start, Dtype::U8, file.len() - start);
    layout.facts.text_bytes = Some(layout.tokens as u64);
    Ok(layout)
}

/// Bytes at the beginning of a file that show whether it is text.
const MAX_SHOWN_BYTES: usize = 4096;

/// True if the beginning of `file` is text, and not numbers.
fn is_text(file: &DataFile) -> Result<bool, DataError> {
    let mut first = vec![0; file.len().min(MAX_SHOWN_BYTES)];
    file.read(0, &mut first)?;
    // A character may be cut at the end.
    let is_utf8 = std::str::from_utf8(&first).map_or_else(|e| e.error_len().is_none(), |_| true);
    Ok(is_utf8 && !first.contains(&0))
}

/// Layout of a file that holds nothing but tokens.
fn raw_layout(file: &DataFile, dtype: TokenDtype) -> Result<Layout, DataError> {
    let dtype = match dtype {
        TokenDtype::Uint16 => Dtype::U16,
        TokenDtype::Uint32 => Dtype::U32,
    };
    let (length, width) = (file.len(), width(dtype));
    if !length.is_multiple_of(width) {
        let problem = format!("is {length} bytes long, expected a multiple of {width}");
        let hint = "check `data.dtype`, or create the file again";
        return Err(DataError::file(file.path(), problem, Some(hint)));
    }
    Ok(Layout::of(0, dtype, length / width))
}

/// Begins the file, with the version. Later versions are for headers that are longer than that of an array of numbers.
const NPY_MAGIC: &[u8] = b"\x93NUMPY\x01\x00";
/// Bytes of the magic and of the length of the header, which is a Python literal, such as
/// `{'descr': '<u2', 'fortran_order': False, 'shape': (1000,), }`.
const NPY_BEGIN: usize = 10;

/// Layout of `file`, if NumPy wrote it.
fn npy_layout(file: &DataFile) -> Result<Option<Layout>, DataError> {
    let mut begin = [0; NPY_BEGIN];
    if file.len() < begin.len() {
        return Ok(None);
    }
    file.read(0, &mut begin)?;
    if !begin.starts_with(NPY_MAGIC) {
        return Ok(None);
    }
    let length = usize::from(u16::from_le_bytes([begin[8], begin[9]]));
    let start = NPY_BEGIN + length;
    let mut header = vec![0; length.min(file.len() - NPY_BEGIN)];
    file.read(NPY_BEGIN, &mut header)?;
    let header = String::from_utf8_lossy(&header);
    let value = |key: &str, close: char| {
        let (_, rest) = header.split_once(key)?;
        Some(rest.split_once(close)?.0)
    };
    let wrong = |what: &str| wrong_header(file.path(), format!("{what}: `{}`", header.trim_end()));
    let dtype = match value("'descr': '", '\'') {
        Some("<u2") => Dtype::U16,
        Some("<u4") => Dtype::U32,
        Some("<i4") => Dtype::I32,
        Some("<i8") => Dtype::I64,
        _ => return Err(wrong("only whole numbers of 2, 4 or 8 bytes are read, as `<u2`")),
    };
    let shape = value("'shape': (", ')').map(|shape| shape.trim_end_matches(',').parse::<usize>());
    let Some(Ok(tokens)) = shape else {
        return Err(wrong("only arrays of one dimension are read"));
    };
    let bytes = (tokens as u64).saturating_mul(width(dtype) as u64);
    check_length(file, bytes.saturating_add(start as u64))?;
    Ok(Some(Layout::of(start, dtype, tokens)))
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
    Ok(Some(Layout::of(LLM_C_HEADER_BYTES, dtype, tokens)))
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
