//! Values that several forms can be written in: paths, tokenizers, steps, groups of ranks.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// `data.train` and `data.val`: one file, or several that follow each other. A `*` in the last part of a path stands for
/// any characters: see [`crate::data::matching()`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Paths {
    /// As a string.
    One(PathBuf),
    /// As a list.
    Several(Vec<PathBuf>),
}

impl From<PathBuf> for Paths {
    fn from(path: PathBuf) -> Self {
        Self::One(path)
    }
}

impl From<Vec<PathBuf>> for Paths {
    fn from(paths: Vec<PathBuf>) -> Self {
        Self::Several(paths)
    }
}

impl Paths {
    /// In the order in which their contents follow each other.
    pub fn iter(&self) -> impl Iterator<Item = &Path> {
        let paths = match self {
            Self::One(path) => std::slice::from_ref(path),
            Self::Several(paths) => paths,
        };
        paths.iter().map(PathBuf::as_path)
    }

    /// Relative ones count from `folder`.
    #[must_use]
    pub(super) fn below(&self, folder: &Path) -> Self {
        match self {
            Self::One(path) => Self::One(folder.join(path)),
            Self::Several(paths) => Self::Several(paths.iter().map(|path| folder.join(path)).collect()),
        }
    }
}

/// `data.tokenizer`: how text becomes tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
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
/// Extension of a tokenizer's file.
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

impl TryFrom<String> for Tokenizer {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        Self::named(&text).ok_or_else(|| format!("`{text}` is no tokenizer"))
    }
}

impl From<Tokenizer> for String {
    fn from(tokenizer: Tokenizer) -> Self {
        tokenizer.to_string()
    }
}

/// `run.timeline`: `10-12`, or `10` for one step. Steps count from 1, as in `metrics.jsonl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "serde_json::Value", into = "String")]
pub struct StepRange {
    /// The first one.
    pub first: u64,
    /// The last one, not before the first.
    pub last: u64,
}

impl StepRange {
    /// As a range.
    #[must_use]
    pub fn steps(self) -> RangeInclusive<u64> {
        self.first..=self.last
    }

    /// How many.
    #[must_use]
    pub fn count(self) -> u64 {
        self.last - self.first + 1
    }
}

impl fmt::Display for StepRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { first, last } = self;
        if first == last {
            write!(f, "{first}")
        } else {
            write!(f, "{first}-{last}")
        }
    }
}

impl TryFrom<serde_json::Value> for StepRange {
    type Error = String;

    fn try_from(value: serde_json::Value) -> Result<Self, String> {
        let text = value
            .as_str()
            .map_or_else(|| value.to_string(), ToOwned::to_owned);
        let (first, last) = text.split_once('-').unwrap_or((&text, &text));
        let step = |text: &str| text.trim().parse::<u64>().ok();
        match (step(first), step(last)) {
            (Some(first), Some(last)) if first > 0 && first <= last => Ok(Self { first, last }),
            _ => Err(format!("`{text}` is no range of steps")),
        }
    }
}

impl From<StepRange> for String {
    fn from(range: StepRange) -> Self {
        range.to_string()
    }
}

/// `parallel.shard_group`: ranks that hold one copy of the state together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ShardGroup {
    /// The ranks of a node.
    Node,
    /// So many neighbours.
    #[serde(untagged)]
    Ranks(usize),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_range_reads_what_it_writes() {
        let read = |json: &str| serde_json::from_str::<StepRange>(json);
        for text in ["\"10-12\"", "\"7\""] {
            assert_eq!(serde_json::to_string(&read(text).unwrap()).unwrap(), text);
        }
        let number = read("7").unwrap();
        assert_eq!((number.steps(), number.count()), (7..=7, 1));
        for text in ["", "0", "0-3", "5-4", "a", "3-", "-3", "1-2-3", "1..3", "1.5"] {
            assert!(read(&format!("\"{text}\"")).is_err(), "{text}");
        }
    }
}
