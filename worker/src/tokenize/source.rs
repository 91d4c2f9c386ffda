//! Texts and lines of JSON, read piece by piece.
//!
//! A text is cut where that changes no token. GPT-2 splits a text by a pattern before it merges bytes, and merges nothing
//! across a split. Every alternative of that pattern which holds white space has it at its start, or is nothing else; so a
//! split is at every place where white space follows something else, and what is left of such a place is split as if the
//! text ended there: the pattern looks ahead behind white space only. A text in pieces that begin with the white space has
//! the tokens of the whole.

use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use serde::de::{Deserialize, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::TokenizeError;
use crate::data::{DataError, open_regular};

/// Bytes of a piece, unless it cannot be cut there: enough to make little of what comes with each.
const PIECE_BYTES: usize = 128 << 10;
/// Bytes of the pieces that are encoded together: many more than machines have threads.
const BATCH_BYTES: usize = 16 << 20;
/// More threads have nothing to do: a piece is encoded by one, and a batch has no more pieces unless texts are short.
pub(super) const MAX_THREADS: usize = BATCH_BYTES / PIECE_BYTES;
/// Most bytes that are taken at once: a line of JSON, or a text without a place to cut it.
const MAX_PIECE_BYTES: usize = 16 << 20;
/// What the names of files end with that hold a document a line.
const LINES_EXTENSION: &str = "jsonl";

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InputKind {
    /// One document.
    Text,
    /// A document a line, in JSON.
    Lines,
}

/// A part of an input.
pub(super) struct Piece {
    pub(super) kind: InputKind,
    pub(super) bytes: Vec<u8>,
    /// The file of the piece.
    pub(super) path: PathBuf,
    /// The line of the file in which it begins, from 1.
    pub(super) line: u64,
    /// True for the first piece of a file.
    pub(super) is_first: bool,
}

/// All inputs, one after the other.
pub(super) struct InputReader<'a> {
    paths: std::slice::Iter<'a, PathBuf>,
    may_cut: bool,
    open: Option<Input>,
    /// Bytes of all inputs.
    pub(super) total: u64,
    /// Bytes that have been read.
    pub(super) read: u64,
}

struct Input {
    path: PathBuf,
    file: File,
    kind: InputKind,
    /// Read, and not given out.
    rest: Vec<u8>,
    has_ended: bool,
    is_first: bool,
    line: u64,
}

impl<'a> InputReader<'a> {
    /// Looks at every input, so that one that is missing is noticed at once. `may_cut`: a text may be given out in
    /// several pieces.
    pub(super) fn new(paths: &'a [PathBuf], may_cut: bool) -> Result<Self, TokenizeError> {
        let mut total = 0;
        for path in paths {
            total += open_regular(path)?
                .metadata()
                .map_err(|e| unreadable(path, &e))?
                .len();
        }
        Ok(Self {
            paths: paths.iter(),
            may_cut,
            open: None,
            total,
            read: 0,
        })
    }

    /// The next pieces; empty at the end of the last input.
    pub(super) fn next_batch(&mut self) -> Result<Vec<Piece>, TokenizeError> {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while bytes < BATCH_BYTES {
            let Some(piece) = self.next_piece()? else {
                break;
            };
            bytes += piece.bytes.len();
            batch.push(piece);
        }
        self.read += bytes as u64;
        Ok(batch)
    }

    fn next_piece(&mut self) -> Result<Option<Piece>, TokenizeError> {
        loop {
            if let Some(input) = &mut self.open
                && let Some(piece) = input.next_piece(self.may_cut)?
            {
                return Ok(Some(piece));
            }
            let Some(path) = self.paths.next() else {
                return Ok(None);
            };
            self.open = Some(Input::open(path.clone())?);
        }
    }
}

impl Input {
    fn open(path: PathBuf) -> Result<Self, TokenizeError> {
        let kind = match path.extension() {
            Some(ending) if ending == LINES_EXTENSION => InputKind::Lines,
            _ => InputKind::Text,
        };
        Ok(Self {
            file: open_regular(&path)?,
            kind,
            path,
            rest: Vec::new(),
            has_ended: false,
            is_first: true,
            line: 1,
        })
    }

    fn next_piece(&mut self, may_cut: bool) -> Result<Option<Piece>, TokenizeError> {
        let mut wanted = PIECE_BYTES;
        let end = loop {
            self.fill(wanted)?;
            if let Some(end) = self.cut(may_cut) {
                break end;
            }
            if wanted >= MAX_PIECE_BYTES {
                return Err(self.too_long(may_cut));
            }
            wanted *= 2;
        };
        // A file without a byte is an empty document, a line without one is none.
        if end == 0 && !(self.is_first && self.kind == InputKind::Text) {
            return Ok(None);
        }
        let rest = self.rest.split_off(end);
        let bytes = std::mem::replace(&mut self.rest, rest);
        let line = self.line;
        self.line += line_ends(&bytes);
        Ok(Some(Piece {
            kind: self.kind,
            bytes,
            path: self.path.clone(),
            line,
            is_first: std::mem::take(&mut self.is_first),
        }))
    }

    /// Reads until there are `wanted` bytes, or to the end of the file.
    fn fill(&mut self, wanted: usize) -> Result<(), TokenizeError> {
        let missing = wanted.saturating_sub(self.rest.len());
        if missing > 0 && !self.has_ended {
            let mut part = (&self.file).take(missing as u64);
            let read = part.read_to_end(&mut self.rest);
            self.has_ended = read.map_err(|e| unreadable(&self.path, &e))? < missing;
        }
        Ok(())
    }

    /// The end of the next piece, or `None` if more must be read first.
    fn cut(&self, may_cut: bool) -> Option<usize> {
        match self.kind {
            _ if self.has_ended => Some(self.rest.len()),
            InputKind::Lines => self
                .rest
                .iter()
                .rposition(|byte| *byte == b'\n')
                .map(|last| last + 1),
            InputKind::Text if may_cut => last_border(&self.rest),
            InputKind::Text => None,
        }
    }

    fn too_long(&self, may_cut: bool) -> TokenizeError {
        let hint = match self.kind {
            InputKind::Lines => "each JSON line is one document: use shorter ones",
            InputKind::Text if may_cut => "text is split at white space: check that this is text",
            InputKind::Text => {
                "only GPT-2's tokenizer is known to give the same tokens for a split text: use shorter texts, or a `.jsonl` with one document per line"
            }
        };
        let problem = format!("{MAX_PIECE_BYTES} bytes without a place to split them\n  hint: {hint}");
        TokenizeError::input(&self.path, self.line, &problem)
    }
}

/// The number of line ends in `bytes`.
pub(super) fn line_ends(bytes: &[u8]) -> u64 {
    bytes.split(|byte| *byte == b'\n').count() as u64 - 1
}

fn unreadable(path: &Path, error: &std::io::Error) -> TokenizeError {
    DataError::unreadable(path, error).into()
}

/// The last place in `bytes` before which a cut changes no token of GPT-2: white space of ASCII that follows a character
/// which is none. None if there is no such place behind the first byte.
pub(super) fn last_border(bytes: &[u8]) -> Option<usize> {
    (1..bytes.len())
        .rev()
        .find(|&at| is_space(bytes[at]) && ends_with_black(&bytes[..at]))
}

/// White space of one byte.
fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

/// True if the last character of `bytes` is not white space. Bytes that are no UTF-8 have no characters.
fn ends_with_black(bytes: &[u8]) -> bool {
    let mut tails = (1..=bytes.len().min(4)).map(|length| &bytes[bytes.len() - length..]);
    let last = tails.find_map(|tail| std::str::from_utf8(tail).ok());
    last.is_some_and(|character| !character.trim().is_empty())
}

/// The string at `key` of the object that `line` is; all else in it is checked to be JSON, or what Python writes for it, and
/// passed over. Of two fields of that name the last one counts, as in most programs.
pub(super) fn text_of(line: &str, key: &str) -> Result<String, String> {
    let line = line.trim_start_matches('\u{feff}');
    text_of_json(line, key).or_else(|error| text_of_json(&with_finite_numbers(line), key).map_err(|_| error))
}

/// Python writes `NaN` and `Infinity`, which JSON does not have. They become numbers of the same length.
fn with_finite_numbers(line: &str) -> String {
    let mut is_text = false;
    let parts = line.split('"').map(|part| {
        let escapes = part.bytes().rev().take_while(|byte| *byte == b'\\').count();
        let was_text = is_text;
        is_text = !is_text || escapes % 2 == 1;
        if was_text {
            return part.to_owned();
        }
        part.replace("NaN", "0.0").replace("Infinity", "0.000000")
    });
    parts.collect::<Vec<_>>().join("\"")
}

fn text_of_json(line: &str, key: &str) -> Result<String, String> {
    let mut json = serde_json::Deserializer::from_str(line);
    let found = Field(key).deserialize(&mut json);
    match found.and_then(|text| json.end().map(|()| text)) {
        Ok(Some(text)) => Ok(text),
        Ok(None) => Err(format!(
            "the object has no field `{key}`\n  hint: set the field with the text by `--key`"
        )),
        Err(e) => Err(format!("not a document: {}", without_line(&e))),
    }
}

/// The error counts lines too, and all of its lines are one.
fn without_line(error: &serde_json::Error) -> String {
    let words = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    match words.strip_suffix(&place) {
        Some(what) => format!("{what} at column {}", error.column()),
        None => words,
    }
}

struct Field<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Field<'_> {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Field<'_> {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with the string `{}`", self.0)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
        let mut text = None;
        while let Some(name) = fields.next_key::<String>()? {
            if name == self.0 {
                text = Some(fields.next_value::<Text>()?.0);
            } else {
                fields.next_value::<IgnoredAny>()?;
            }
        }
        Ok(text)
    }
}

/// A string, in which half of a surrogate pair, as Python writes one, becomes U+FFFD.
struct Text(String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_bytes(TextVisitor)
    }
}

struct TextVisitor;

impl Visitor<'_> for TextVisitor {
    type Value = Text;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Text, E> {
        let mut text = String::new();
        for chunk in bytes.utf8_chunks() {
            text.push_str(chunk.valid());
            // The first of the three bytes of a surrogate.
            text.extend((chunk.invalid() == [0xed]).then_some(char::REPLACEMENT_CHARACTER));
        }
        Ok(Text(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lengths of the pieces of one file, and the lines in which they begin; or the error.
    fn pieces(name: &str, content: &[u8], may_cut: bool) -> Result<Vec<(usize, u64)>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        let shown = folder.path().display().to_string();
        let paths = [path];
        let mut source = InputReader::new(&paths, may_cut).unwrap();
        let (mut found, mut joined) = (Vec::new(), Vec::new());
        loop {
            let batch = source
                .next_batch()
                .map_err(|e| e.to_string().replace(&shown, "DIR"))?;
            if batch.is_empty() {
                break;
            }
            for piece in batch {
                assert_eq!(piece.is_first, found.is_empty());
                found.push((piece.bytes.len(), piece.line));
                joined.extend(piece.bytes);
            }
        }
        assert_eq!(joined, content);
        assert_eq!(
            (source.read, source.total),
            (content.len() as u64, content.len() as u64)
        );
        Ok(found)
    }

    #[test]
    fn a_text_comes_in_pieces_that_end_before_white_space() {
        let line = [b"x".repeat(99), b"\n".to_vec()].concat();
        let found = pieces("a.txt", &line.repeat(3000), true).unwrap();
        // A piece ends before the end of a line, so that the next one begins with it.
        assert_eq!(found, [(130_999, 1), (131_000, 1310), (38_001, 2620)]);
    }

    #[test]
    fn lines_stay_whole_and_long_ones_make_long_pieces() {
        let content = [b"y".repeat(300_000), b"\n".to_vec(), b"z".repeat(300_000)].concat();
        let found = pieces("a.jsonl", &content, false).unwrap();
        assert_eq!(found, [(300_001, 1), (300_000, 2)]);
        assert_eq!(pieces("a.jsonl", b"", false).unwrap(), []);
    }

    #[test]
    fn a_text_that_may_not_be_cut_stays_whole() {
        let content = b"word ".repeat(100_000);
        assert_eq!(pieces("a.txt", &content, false).unwrap(), [(500_000, 1)]);
        assert_eq!(
            pieces("a.txt", b"", false).unwrap(),
            [(0, 1)],
            "an empty document"
        );
    }

    #[test]
    fn what_cannot_be_cut_is_refused_beyond_a_limit() {
        let content = vec![b'x'; MAX_PIECE_BYTES + 1];
        insta::assert_snapshot!(pieces("a.txt", &content, true).unwrap_err(), @r"
        `DIR/a.txt`, line 1: 16777216 bytes without a place to split them
          hint: text is split at white space: check that this is text
        ");
        insta::assert_snapshot!(pieces("a.txt", &content, false).unwrap_err(), @r"
        `DIR/a.txt`, line 1: 16777216 bytes without a place to split them
          hint: only GPT-2's tokenizer is known to give the same tokens for a split text: use shorter texts, or a `.jsonl` with one document per line
        ");
        insta::assert_snapshot!(pieces("a.jsonl", &content, true).unwrap_err(), @r"
        `DIR/a.jsonl`, line 1: 16777216 bytes without a place to split them
          hint: each JSON line is one document: use shorter ones
        ");
    }

    #[test]
    fn a_border_is_where_white_space_follows_something_else() {
        let table = [
            ("a b", Some(1)),
            ("a  b", Some(1)),
            ("a b c", Some(3)),
            (" ab", None),
            ("ab", None),
            ("a\n", Some(1)),
            ("", None),
            ("漢字 x", Some(6)),
            // An ideographic space and a no-break space are white space of more than one byte.
            ("漢\u{3000} x", None),
            ("a\u{a0} x", None),
        ];
        for (text, expected) in table {
            assert_eq!(last_border(text.as_bytes()), expected, "{text:?}");
        }
        assert_eq!(last_border(b"\xff\xff x"), None);
        assert_eq!(last_border(b"\x80\x80\x80\x80\x80\x80 x"), None);
    }

    #[test]
    fn the_field_is_found_among_others() {
        let line = r#"{"id": 7, "meta": {"text": "not this"}, "text": "a \"b\"\n\u00e9", "n": [1, {}]}"#;
        assert_eq!(text_of(line, "text").unwrap(), "a \"b\"\né");
        assert_eq!(text_of(r#"{"a": "x"} "#, "a").unwrap(), "x");
        assert_eq!(text_of(r#"{"a": "x", "a": "y"}"#, "a").unwrap(), "y");
    }

    #[test]
    fn what_is_wrong_with_a_line_is_said() {
        let message = |line: &str| text_of(line, "text").unwrap_err();
        insta::assert_snapshot!(message(r#"{"txt": "x"}"#), @r"
        the object has no field `text`
          hint: set the field with the text by `--key`
        ");
        insta::assert_snapshot!(message(r#"{"text": 5}"#), @"not a document: invalid type: integer `5`, expected a string at column 10");
        insta::assert_snapshot!(message("[1]"), @"not a document: invalid type: sequence, expected an object with the string `text` at column 0");
        insta::assert_snapshot!(message(r#"{"text": "x""#), @"not a document: EOF while parsing an object at column 12");
        insta::assert_snapshot!(message(r#"{"text": "x"} y"#), @"not a document: trailing characters at column 15");
    }
}
