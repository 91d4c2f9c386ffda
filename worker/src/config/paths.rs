//! `data.train` and `data.val`: one file, or several that follow each other.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Paths in the order in which their contents follow each other. A `*` in the last part of one stands for any
/// characters: see [`crate::data::matching()`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths(Vec<PathBuf>);

impl Paths {
    /// As they were given.
    pub fn iter(&self) -> impl Iterator<Item = &Path> {
        self.0.iter().map(PathBuf::as_path)
    }

    /// Relative ones count from `folder`.
    #[must_use]
    pub(super) fn below(&self, folder: &Path) -> Self {
        Self(self.iter().map(|path| folder.join(path)).collect())
    }
}

impl From<PathBuf> for Paths {
    fn from(path: PathBuf) -> Self {
        Self(vec![path])
    }
}

impl From<Vec<PathBuf>> for Paths {
    fn from(paths: Vec<PathBuf>) -> Self {
        Self(paths)
    }
}

impl Serialize for Paths {
    /// One path is a string, as it is written.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.as_slice() {
            [path] => path.serialize(serializer),
            paths => paths.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Paths {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(OneOrMore)
    }
}

struct OneOrMore;

impl<'de> Visitor<'de> for OneOrMore {
    type Value = Paths;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a path (a string), or a list of them")
    }

    fn visit_str<E: de::Error>(self, path: &str) -> Result<Paths, E> {
        Ok(PathBuf::from(path).into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Paths, A::Error> {
        let mut paths = Vec::new();
        while let Some(path) = list.next_element::<PathBuf>()? {
            paths.push(path);
        }
        if paths.is_empty() {
            return Err(de::Error::invalid_length(0, &self));
        }
        Ok(Paths(paths))
    }
}
