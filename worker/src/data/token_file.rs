//! A file of tokens: a text in which every byte is one, or a token file.

use std::path::Path;
use std::sync::Arc;

use super::mapped_file::MappedFile;
use super::token_format::{Layout, TokenFacts, Width};
use super::{DataError, FileProblem, Vocabulary};

/// What a token file made of a text is called: the text's name with this behind it.
const SUFFIX: &str = "safetensors";

/// Tokens of one vocabulary in a file that is read as they are asked for.
pub struct TokenFile {
    file: MappedFile,
    layout: Layout,
    vocabulary: Arc<Vocabulary>,
}

impl TokenFile {
    /// Opens a file for a vocabulary: a text for bytes, a token file for all others. `tokenizer` is what the user
    /// calls the vocabulary, for the command that would make tokens of a text.
    pub fn open(path: &Path, vocabulary: &Arc<Vocabulary>, tokenizer: &str) -> Result<Self, DataError> {
        let file = MappedFile::open(path)?;
        let refused = |problem| Err(DataError::file(path, problem));
        if file.is_empty() {
            return refused(FileProblem::Empty);
        }
        let layout = match (Layout::recognise(&file)?, vocabulary.is_bytes()) {
            (None, true) => Layout::of_text(&file),
            (Some(layout), true) => {
                let tokenizer = layout.facts.tokenizer;
                return refused(FileProblem::Tokens { tokenizer });
            }
            (None, false) => {
                return refused(FileProblem::NoTokens {
                    tokenizer: vocabulary.name.clone(),
                    command: command(path, tokenizer, &vocabulary.name),
                });
            }
            (Some(layout), false) => layout,
        };
        let hash = &layout.facts.tokenizer_hash;
        if hash.is_some() && *hash != vocabulary.hash {
            return refused(FileProblem::OtherTokenizer {
                found: layout.facts.tokenizer.unwrap_or_else(|| "another one".into()),
                wanted: vocabulary.name.clone(),
            });
        }
        if layout.tokens == 0 {
            return refused(FileProblem::Empty);
        }
        Ok(Self {
            file,
            layout,
            vocabulary: Arc::clone(vocabulary),
        })
    }

    /// Where it was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Number of tokens, at least one.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "an empty file is not opened")]
    pub fn len(&self) -> usize {
        self.layout.tokens
    }

    /// What the file says of its contents.
    #[must_use]
    pub fn facts(&self) -> &TokenFacts {
        &self.layout.facts
    }

    /// Bytes of a token.
    pub(super) fn width(&self) -> Width {
        self.layout.width
    }

    /// Copies the tokens from `start` into `out`. A number that the vocabulary does not have is an error: a model
    /// has no row for it.
    pub fn read(&self, start: usize, out: &mut [i32]) -> Result<(), DataError> {
        let width = self.layout.width.bytes();
        let mut bytes = vec![0; out.len() * width];
        self.read_stored(start, &mut bytes)?;
        let last = (self.vocabulary.size - 1) as u32;
        let mut highest = 0;
        for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(width)) {
            let token = stored(bytes);
            highest = highest.max(token);
            *out = token as i32;
        }
        if highest <= last {
            return Ok(());
        }
        let at = bytes.chunks_exact(width).position(|bytes| stored(bytes) > last);
        Err(DataError::file(
            self.path(),
            FileProblem::NoSuchToken {
                token: at.map_or(highest, |at| stored(&bytes[at * width..][..width])),
                position: (start + at.unwrap_or(0)) as u64,
                tokenizer: self.vocabulary.name.clone(),
                last,
            },
        ))
    }

    /// Copies the bytes of the tokens from `start`, as they are stored, into `out`, which has room for whole ones.
    pub(super) fn read_stored(&self, start: usize, out: &mut [u8]) -> Result<(), DataError> {
        let width = self.layout.width.bytes();
        let tokens = out.len() / width;
        let fits = start.checked_add(tokens).is_some_and(|end| end <= self.len());
        if !fits || !out.len().is_multiple_of(width) {
            return Err(DataError::Misuse {
                path: self.path().to_owned(),
                what: format!("tokens {start}..+{tokens} of {} were asked for", self.len()),
            });
        }
        self.file.read(self.layout.start + start * width, out)
    }
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

/// As a shell takes it for one word.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "_-./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}
