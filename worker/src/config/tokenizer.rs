//! What `data.tokenizer` names.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// `data.tokenizer`: how text becomes tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Tokenizer {
    /// Every byte is a token; vocabulary 256. The data are texts.
    Bytes,
    /// The byte-pair encoding of GPT-2 (Radford et al. 2019); vocabulary 50,257. The data are token files.
    Gpt2,
    /// A `tokenizer.json`, as Hugging Face's tokenizers write it. The data are token files.
    File(PathBuf),
}

/// The words that are no path.
const BYTES: &str = "bytes";
const GPT2: &str = "gpt2";
/// Extension of a tokenizer's file.
const EXTENSION: &str = "json";

/// The vocabulary of a tokenizer, `0..size`, and what identifies it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vocabulary {
    /// `bytes`, `gpt2`, or the name of a file.
    pub name: String,
    /// One more than the largest token.
    pub size: usize,
    /// Hash of the tokenizer; `None` for bytes.
    pub hash: Option<String>,
}

impl Default for Vocabulary {
    fn default() -> Self {
        Self {
            name: BYTES.into(),
            size: 256,
            hash: None,
        }
    }
}

impl Tokenizer {
    /// A relative path counts from `folder`.
    #[must_use]
    pub(super) fn below(&self, folder: &Path) -> Self {
        match self {
            Self::File(path) => Self::File(folder.join(path)),
            word => word.clone(),
        }
    }
}

impl fmt::Display for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes => f.write_str(BYTES),
            Self::Gpt2 => f.write_str(GPT2),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

impl TryFrom<String> for Tokenizer {
    type Error = String;

    /// From the word or the path that people write.
    fn try_from(text: String) -> Result<Self, String> {
        match text.as_str() {
            BYTES => Ok(Self::Bytes),
            GPT2 => Ok(Self::Gpt2),
            path if Path::new(path).extension() == Some(EXTENSION.as_ref()) => Ok(Self::File(text.into())),
            _ => Err(format!("`{text}` is not a tokenizer")),
        }
    }
}

impl From<Tokenizer> for String {
    fn from(tokenizer: Tokenizer) -> Self {
        tokenizer.to_string()
    }
}
