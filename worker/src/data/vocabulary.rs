//! What training has to know of a tokenizer: how many tokens there are, and whose they are.

use std::fmt;
use std::io::Read as _;
use std::path::Path;

use serde::Deserialize;
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::DataError;
use super::data_file::open_regular;
use crate::config::{Tokenizer, Vocabulary};

/// Byte-pair tokens of GPT-2 and the end of a text.
const GPT2_SIZE: usize = 50_257;
/// BLAKE3 of OpenAI's `r50k_base.tiktoken`, which is one line a token: its bytes in base64, and its number.
const GPT2_HASH: &str = "5e60c911b5da8606450a7854ebe49de4952c86da03f51cea2ad9a3f3d40395e5";
/// Longest `tokenizer.json` that is read; those of a quarter of a million tokens have 35 MB.
const MAX_FILE_BYTES: u64 = 256 << 20;
/// Digits of a hash that people compare.
const SHOWN_DIGITS: usize = 16;

impl Vocabulary {
    /// The vocabulary of a configuration's tokenizer. A file is read and hashed here; the tokenizer parses it.
    pub fn of(tokenizer: &Tokenizer) -> Result<Self, DataError> {
        Ok(match tokenizer {
            Tokenizer::Bytes => Self::default(),
            Tokenizer::Gpt2 => Self {
                name: tokenizer.to_string(),
                size: GPT2_SIZE,
                hash: Some(GPT2_HASH.into()),
            },
            Tokenizer::File(path) => Self::of_file(path)?,
        })
    }

    fn of_file(path: &Path) -> Result<Self, DataError> {
        let json = read_tokenizer(path)?;
        let failed = |e: serde_json::Error| DataError::no_tokenizer(path, e);
        let contents: Contents = serde_json::from_slice(&json).map_err(failed)?;
        let added = contents.added_tokens.iter().map(|token| token.id as usize + 1);
        let size = added.fold(contents.model.vocab.0, usize::max);
        if size == 0 {
            return Err(DataError::no_tokenizer(path, "its vocabulary is empty"));
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        Ok(Self {
            name: name.into_owned(),
            size,
            hash: Some(blake3::hash(&json).to_hex().to_string()),
        })
    }

    /// True if every byte is a token.
    pub fn is_bytes(&self) -> bool {
        self.hash.is_none()
    }

    /// By what two runs know that they have the same tokens, wherever their files are.
    pub fn identity(&self, tokenizer: &Tokenizer) -> String {
        match (tokenizer, &self.hash) {
            (Tokenizer::File(_), Some(hash)) => format!("a file with hash {}", &hash[..SHOWN_DIGITS]),
            _ => self.name.clone(),
        }
    }
}

/// The bytes of a `tokenizer.json`.
pub(crate) fn read_tokenizer(path: &Path) -> Result<Vec<u8>, DataError> {
    let mut bytes = Vec::new();
    let mut file = open_regular(path)?.take(MAX_FILE_BYTES + 1);
    file.read_to_end(&mut bytes)
        .map_err(|e| DataError::unreadable(path, &e))?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let cause = format!("it is longer than {MAX_FILE_BYTES} bytes");
        return Err(DataError::no_tokenizer(path, cause));
    }
    Ok(bytes)
}

/// What matters here of a `tokenizer.json`.
#[derive(Deserialize)]
struct Contents {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    model: TokenizerModel,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
}

#[derive(Deserialize)]
struct TokenizerModel {
    vocab: VocabularySize,
}

/// One more than the largest number of a vocabulary: a table of words and numbers, or a list whose places are them. It is
/// read without being held: every rank reads it.
struct VocabularySize(usize);

impl<'de> Deserialize<'de> for VocabularySize {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(VocabularyVisitor)
    }
}

struct VocabularyVisitor;

impl<'de> Visitor<'de> for VocabularyVisitor {
    type Value = VocabularySize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a vocabulary")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut table: A) -> Result<VocabularySize, A::Error> {
        let mut size = 0;
        while let Some((_, id)) = table.next_entry::<IgnoredAny, u32>()? {
            size = size.max(id as usize + 1);
        }
        Ok(VocabularySize(size))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<VocabularySize, A::Error> {
        let mut size = 0;
        while list.next_element::<IgnoredAny>()?.is_some() {
            size += 1;
        }
        Ok(VocabularySize(size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(json: &str) -> Result<Vocabulary, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, json).unwrap();
        let shown = folder.path().display().to_string();
        Vocabulary::of(&Tokenizer::File(path)).map_err(|e| e.to_string().replace(&shown, "DIR"))
    }

    #[test]
    fn the_size_is_one_more_than_the_largest_token() {
        let size = |json| of(json).map(|vocabulary| vocabulary.size);
        assert_eq!(size(r#"{"model": {"vocab": {"a": 0, "b": 6}}}"#), Ok(7));
        assert_eq!(
            size(r#"{"added_tokens": [{"id": 9, "content": "x"}], "model": {"vocab": {"a": 0}}}"#),
            Ok(10)
        );
        assert_eq!(
            size(r#"{"added_tokens": [], "model": {"vocab": [["a", -1.5], ["b", -2]]}}"#),
            Ok(2)
        );
    }

    #[test]
    fn what_is_no_tokenizer_is_refused() {
        let message = |json| of(json).unwrap_err();
        insta::assert_snapshot!(message("{"), @r"
        `DIR/tokenizer.json` is not a tokenizer file: EOF while parsing an object at line 1 column 1
          hint: `data.tokenizer` expects a `tokenizer.json` of Hugging Face tokenizers
        ");
        insta::assert_snapshot!(message(r#"{"model": {"vocab": {}}}"#), @r"
        `DIR/tokenizer.json` is not a tokenizer file: its vocabulary is empty
          hint: `data.tokenizer` expects a `tokenizer.json` of Hugging Face tokenizers
        ");
        insta::assert_snapshot!(message(r#"{"version": "1.0"}"#), @r"
        `DIR/tokenizer.json` is not a tokenizer file: missing field `model` at line 1 column 18
          hint: `data.tokenizer` expects a `tokenizer.json` of Hugging Face tokenizers
        ");
    }

    #[test]
    fn a_tokenizer_is_the_same_wherever_its_file_is() {
        let (one, other) = (
            of(r#"{"model": {"vocab": {"a": 0}}}"#).unwrap(),
            of(r#"{"model": {"vocab": {"a": 0}}}"#).unwrap(),
        );
        assert_eq!(
            one.identity(&Tokenizer::File("a/x.json".into())),
            other.identity(&Tokenizer::File("b/x.json".into()))
        );
        let gpt2 = Vocabulary::of(&Tokenizer::Gpt2).unwrap();
        assert_eq!(gpt2.identity(&Tokenizer::Gpt2), "gpt2");
    }
}
