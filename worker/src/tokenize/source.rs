//! Texts and lines of JSON, read piece by piece.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use super::TokenizeError;
use super::border::last_border;
use crate::data::{DataError, FileProblem};

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
pub(super) enum Kind {
    /// One document.
    Text,
    /// A document a line, in JSON.
    Lines,
}

/// A part of an input.
pub(super) struct Piece {
    pub(super) kind: Kind,
    pub(super) bytes: Vec<u8>,
    /// Where it comes from.
    pub(super) path: PathBuf,
    /// The line of the file in which it begins, from 1.
    pub(super) line: u64,
    /// True for the first piece of a file.
    pub(super) is_first: bool,
}

/// All inputs, one after the other.
pub(super) struct Source<'a> {
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
    kind: Kind,
    /// Read, and not given out.
    rest: Vec<u8>,
    has_ended: bool,
    is_first: bool,
    line: u64,
}

impl<'a> Source<'a> {
    /// Looks at every input, so that one that is missing is noticed at once. `may_cut`: a text may be given out in
    /// several pieces.
    pub(super) fn new(paths: &'a [PathBuf], may_cut: bool) -> Result<Self, TokenizeError> {
        let mut total = 0;
        for path in paths {
            total += open(path)?.metadata().map_err(|e| unreadable(path, &e))?.len();
        }
        Ok(Self {
            paths: paths.iter(),
            may_cut,
            open: None,
            total,
            read: 0,
        })
    }

    /// The next pieces; none at the end of the last input.
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
        let is_lines = path
            .extension()
            .is_some_and(|extension| extension == LINES_EXTENSION);
        Ok(Self {
            file: open(&path)?,
            kind: if is_lines { Kind::Lines } else { Kind::Text },
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
        if end == 0 && !(self.is_first && self.kind == Kind::Text) {
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

    /// Where the next piece ends; none if that is not known yet.
    fn cut(&self, may_cut: bool) -> Option<usize> {
        match self.kind {
            _ if self.has_ended => Some(self.rest.len()),
            Kind::Lines => self
                .rest
                .iter()
                .rposition(|byte| *byte == b'\n')
                .map(|last| last + 1),
            Kind::Text if may_cut => last_border(&self.rest),
            Kind::Text => None,
        }
    }

    fn too_long(&self, may_cut: bool) -> TokenizeError {
        TokenizeError::TooLong {
            path: self.path.clone(),
            line: self.line,
            limit: MAX_PIECE_BYTES,
            hint: match self.kind {
                Kind::Lines => "a line of JSON is one document: make shorter ones",
                Kind::Text if may_cut => "a text is cut at white space: is it one?",
                Kind::Text => {
                    "only GPT-2's tokens are known to be the same when a text is cut: give shorter texts, or a `.jsonl` with a document a line"
                }
            },
        }
    }
}

/// How many lines end in `bytes`.
pub(super) fn line_ends(bytes: &[u8]) -> u64 {
    bytes.split(|byte| *byte == b'\n').count() as u64 - 1
}

/// Opens a regular file; a pipe would be waited for, and has no size.
fn open(path: &Path) -> Result<File, TokenizeError> {
    let mut options = File::options();
    options.read(true).custom_flags(libc::O_NONBLOCK);
    let file = options.open(path).map_err(|e| unreadable(path, &e))?;
    let metadata = file.metadata().map_err(|e| unreadable(path, &e))?;
    if metadata.is_file() {
        Ok(file)
    } else {
        Err(DataError::file(path, FileProblem::NotAFile).into())
    }
}

fn unreadable(path: &Path, error: &std::io::Error) -> TokenizeError {
    let cause = error.to_string();
    DataError::file(path, FileProblem::Unreadable { cause }).into()
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
        let mut source = Source::new(&paths, may_cut).unwrap();
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
        `DIR/a.txt`, line 1: 16777216 bytes without a place to cut them
          hint: a text is cut at white space: is it one?
        ");
        insta::assert_snapshot!(pieces("a.txt", &content, false).unwrap_err(), @r"
        `DIR/a.txt`, line 1: 16777216 bytes without a place to cut them
          hint: only GPT-2's tokens are known to be the same when a text is cut: give shorter texts, or a `.jsonl` with a document a line
        ");
        insta::assert_snapshot!(pieces("a.jsonl", &content, true).unwrap_err(), @r"
        `DIR/a.jsonl`, line 1: 16777216 bytes without a place to cut them
          hint: a line of JSON is one document: make shorter ones
        ");
    }
}
