//! `data.tokenizer`: what the numbers of the data stand for.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{self, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// How text becomes tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Tokenizer {
    /// Every byte is a token; vocabulary 256. The data are texts.
    #[default]
    Bytes,
    /// The byte-pair encoding of GPT-2 (Radford et al. 2019); vocabulary 50,257. The data are token files.
    Gpt2,
    /// That of a `tokenizer.json`, as Hugging Face's tokenizers write it. The data are token files.
    File(PathBuf),
}

/// The words that are no path.
const BYTES: &str = "bytes";
const GPT2: &str = "gpt2";
/// What the name of a tokenizer's file ends with.
const EXTENSION: &str = "json";

impl Tokenizer {
    /// From the word or the path that people write; none for anything else.
    #[must_use]
    pub fn named(text: &str) -> Option<Self> {
        match text {
            BYTES => Some(Self::Bytes),
            GPT2 => Some(Self::Gpt2),
            path => {
                let path = Path::new(path);
                let is_file = path.extension().is_some_and(|extension| extension == EXTENSION);
                is_file.then(|| Self::File(path.to_owned()))
            }
        }
    }

    /// A relative path counts from `folder`.
    #[must_use]
    pub(super) fn below(self, folder: &Path) -> Self {
        match self {
            Self::File(path) => Self::File(folder.join(path)),
            word => word,
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

impl Serialize for Tokenizer {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Tokenizer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Name)
    }
}

struct Name;

impl Visitor<'_> for Name {
    type Value = Tokenizer;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`bytes`, `gpt2` or the path of a `tokenizer.json`")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Tokenizer, E> {
        Tokenizer::named(text).ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
    }
}
