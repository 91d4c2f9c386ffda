//! Several files of tokens, one behind the other.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::matching::files;
use super::{DataError, TokenFile, Vocabulary, Width};
use crate::config::{Paths, Tokenizer};

/// Bytes at either end of the tokens by which they are known again: of each file as much less as there are more.
const FINGERPRINT_BYTES: usize = 1 << 20;
/// The least of a file.
const MIN_FINGERPRINT_BYTES: usize = 4 << 10;
/// Digits of a hash that people compare.
const SHOWN_DIGITS: usize = 16;

/// The tokens of all files of a key, in order.
pub(super) struct TokenStream {
    files: Vec<TokenFile>,
    /// Where each file begins in the stream, and where the last one ends.
    borders: Vec<usize>,
}

impl TokenStream {
    pub(super) fn open(
        paths: &Paths,
        tokenizer: &Tokenizer,
        vocabulary: &Arc<Vocabulary>,
    ) -> Result<Self, DataError> {
        let name = tokenizer.to_string();
        let open = |path: &_| TokenFile::open(path, vocabulary, &name);
        let files: Vec<TokenFile> = files(paths)?
            .iter()
            .map(|path| open(path))
            .collect::<Result<_, _>>()?;
        Ok(Self::of(files))
    }

    /// At least one file.
    pub(super) fn of(files: Vec<TokenFile>) -> Self {
        assert!(!files.is_empty(), "a stream without files");
        let mut borders = vec![0];
        for file in &files {
            borders.push(borders[borders.len() - 1] + file.len());
        }
        Self { files, borders }
    }

    pub(super) fn len(&self) -> usize {
        self.borders[self.files.len()]
    }

    /// The first file.
    pub(super) fn path(&self) -> &Path {
        self.files[0].path()
    }

    /// Number of files.
    pub(super) fn file_count(&self) -> usize {
        self.files.len()
    }

    /// Bytes of text to a token, over all files; none if one of them does not tell.
    pub(super) fn bytes_per_token(&self) -> Option<f64> {
        let bytes = self.files.iter().map(|file| file.facts().text_bytes);
        let bytes: u64 = bytes.sum::<Option<u64>>()?;
        Some(bytes as f64 / self.len() as f64)
    }

    /// True if every token is a byte of a text.
    pub(super) fn is_text(&self) -> bool {
        self.files.iter().all(|file| file.width() == Width::U8)
    }

    /// True if every file says which tokenizer made it.
    pub(super) fn knows_tokenizer(&self) -> bool {
        self.files
            .iter()
            .all(|file| file.facts().tokenizer_hash.is_some())
    }

    /// Copies the tokens from `start` into `out`, over the borders of files. The caller has checked the range.
    pub(super) fn read(&self, start: usize, mut out: &mut [i32]) -> Result<(), DataError> {
        for (file, part) in self.parts(start..start + out.len()) {
            let (now, later) = out.split_at_mut(part.len());
            file.read(part.start, now)?;
            out = later;
        }
        Ok(())
    }

    /// The part of each file that a range of the stream covers, in order; none of them is empty.
    fn parts(&self, range: Range<usize>) -> impl Iterator<Item = (&TokenFile, Range<usize>)> {
        let first = self.borders.partition_point(|border| *border <= range.start) - 1;
        let files = self.files.iter().zip(&self.borders).skip(first);
        files
            .map(move |(file, &border)| {
                let start = range.start.max(border) - border;
                let end = range.end.saturating_sub(border).min(file.len());
                (file, start..end)
            })
            .take_while(|(_, part)| part.start < part.end)
    }

    /// By what the tokens of a range are known again: how many they are, and a hash of both ends of each file.
    pub(super) fn fingerprint(&self, range: Range<usize>) -> Result<String, DataError> {
        let parts: Vec<_> = self.parts(range.clone()).collect();
        let most = (FINGERPRINT_BYTES / parts.len().max(1)).max(MIN_FINGERPRINT_BYTES);
        let mut hash = blake3::Hasher::new();
        for (file, part) in &parts {
            let width = file.width().bytes();
            let tokens = part.len().min(most / width);
            let mut end = vec![0; tokens * width];
            for start in [part.start, part.end - tokens] {
                file.read_stored(start, &mut end)?;
                hash.update(&end);
            }
            if parts.len() > 1 {
                hash.update(&(part.len() as u64).to_le_bytes());
            }
        }
        let files = match parts.len() {
            0 | 1 => String::new(),
            several => format!(" in {several} files"),
        };
        Ok(format!(
            "{} tokens{files}, hash {}",
            range.len(),
            &hash.finalize().to_hex()[..SHOWN_DIGITS]
        ))
    }
}

/// Tokens of all files of a key, of which each is opened, checked and closed.
pub(crate) fn survey(
    paths: &Paths,
    tokenizer: &Tokenizer,
    vocabulary: &Arc<Vocabulary>,
) -> Result<u64, DataError> {
    let name = tokenizer.to_string();
    let lengths = files(paths)?.into_iter();
    lengths
        .map(|path| TokenFile::open(&path, vocabulary, &name).map(|file| file.len() as u64))
        .sum()
}
