//! Where the tokens of a file lie, and what it says of them.

use super::{llm_c, named};
use crate::data::mapped_file::MappedFile;
use crate::data::{DataError, FileProblem};

/// Bytes of a token in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// A byte of a text.
    U8,
    /// Two bytes, little-endian.
    U16,
    /// Four bytes, little-endian.
    U32,
}

impl Width {
    /// The smallest in which every token of a vocabulary has room.
    #[must_use]
    pub fn of_vocabulary(size: usize) -> Self {
        if size <= 1 << 16 { Self::U16 } else { Self::U32 }
    }

    /// How many.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }
}

/// What a token file says of its contents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenFacts {
    /// Name of the tokenizer.
    pub tokenizer: Option<String>,
    /// Hash of the tokenizer: see [`Vocabulary::hash`](crate::data::Vocabulary::hash).
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
pub(in crate::data) struct Layout {
    /// Bytes before the first token.
    pub(in crate::data) start: usize,
    pub(in crate::data) width: Width,
    pub(in crate::data) tokens: usize,
    pub(in crate::data) facts: TokenFacts,
}

impl Layout {
    /// Of a text.
    pub(in crate::data) fn of_text(file: &MappedFile) -> Self {
        Self {
            start: 0,
            width: Width::U8,
            tokens: file.len(),
            facts: TokenFacts {
                text_bytes: Some(file.len() as u64),
                ..TokenFacts::default()
            },
        }
    }

    /// Of a token file; none if it is not one of a known kind.
    pub(in crate::data) fn recognise(file: &MappedFile) -> Result<Option<Self>, DataError> {
        match llm_c::layout(file)? {
            Some(layout) => Ok(Some(layout)),
            None => named::layout(file),
        }
    }
}

/// The file is not as long as its header says.
pub(super) fn check_length(file: &MappedFile, promised: u64) -> Result<(), DataError> {
    let found = file.len() as u64;
    if found == promised {
        return Ok(());
    }
    Err(DataError::file(
        file.path(),
        FileProblem::Length { promised, found },
    ))
}
