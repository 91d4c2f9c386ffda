//! The `.bin` of llm.c and modded-nanogpt: a header of 256 integers of 4 bytes, then the tokens. The first integer tells
//! the kind, the second its version, the third how many tokens follow. It does not say which tokenizer made them.

use super::Layout;
use super::layout::{TokenFacts, Width, check_length};
use crate::data::mapped_file::MappedFile;
use crate::data::{DataError, FileProblem};

/// Bytes before the first token.
const HEADER_BYTES: usize = 256 * 4;

/// First integer, second integer, and what follows.
const KINDS: [(i32, i32, Width); 2] = [(20_240_520, 1, Width::U16), (20_240_801, 7, Width::U32)];

/// Layout of `file`, if it is of this kind.
pub(super) fn layout(file: &MappedFile) -> Result<Option<Layout>, DataError> {
    let mut header = [0; 3 * 4];
    if file.len() < header.len() {
        return Ok(None);
    }
    file.read(0, &mut header)?;
    let number = |i: usize| i32::from_le_bytes([0, 1, 2, 3].map(|j| header[4 * i + j]));
    let (magic, version, count) = (number(0), number(1), number(2));
    let Some((_, known, width)) = KINDS.into_iter().find(|kind| kind.0 == magic) else {
        return Ok(None);
    };
    let wrong = |what: String| DataError::file(file.path(), FileProblem::Header(what));
    if version != known {
        let what = format!("of llm.c's kind {magic} version {known} is known, and it has version {version}");
        return Err(wrong(what));
    }
    let tokens = usize::try_from(count).map_err(|_| wrong(format!("it promises {count} tokens")))?;
    check_length(file, (HEADER_BYTES + tokens * width.bytes()) as u64)?;
    Ok(Some(Layout {
        start: HEADER_BYTES,
        width,
        tokens,
        facts: TokenFacts::default(),
    }))
}
