//! The training and the validation tokens of a configuration.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::token_stream::{TokenStream, survey};
use super::{DataError, Vocabulary};
use crate::config;

/// Without validation data, one in this many tokens is held out at the end of the training data.
pub const HELD_OUT_PART: usize = 10;

/// A range of the tokens of one file, or of several that follow each other.
#[derive(Clone)]
pub struct Tokens {
    stream: Arc<TokenStream>,
    range: Range<usize>,
}

impl Tokens {
    /// All tokens of the files of `paths`.
    pub fn open(
        paths: &config::Paths,
        tokenizer: &config::Tokenizer,
        vocabulary: &Arc<Vocabulary>,
    ) -> Result<Self, DataError> {
        let stream = TokenStream::open(paths, tokenizer, vocabulary)?;
        Ok(Self {
            range: 0..stream.len(),
            stream: Arc::new(stream),
        })
    }

    /// A part of them, which must lie within.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.len(),
            "{range:?} of {} tokens",
            self.len()
        );
        Self {
            stream: Arc::clone(&self.stream),
            range: self.range.start + range.start..self.range.start + range.end,
        }
    }

    /// All tokens of the same files.
    #[must_use]
    pub fn whole(&self) -> Self {
        Self {
            stream: Arc::clone(&self.stream),
            range: 0..self.stream.len(),
        }
    }

    /// The file, or the first of several.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.stream.path()
    }

    /// Number of files.
    #[must_use]
    pub fn file_count(&self) -> usize {
        self.stream.file_count()
    }

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// True without any token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Bytes of text per token. None if a file does not tell, or if these are only a part of the tokens of its files:
    /// files tell their total, and a part may differ from it by a fifth.
    #[must_use]
    pub fn bytes_per_token(&self) -> Option<f64> {
        let is_whole = self.range == (0..self.stream.len());
        (is_whole || self.stream.is_text())
            .then(|| self.stream.bytes_per_token())
            .flatten()
    }

    /// True if every file says which tokenizer made it.
    #[must_use]
    pub fn knows_tokenizer(&self) -> bool {
        self.stream.knows_tokenizer()
    }

    /// By what the tokens are known again: how many they are, and a hash of both ends of each file.
    pub fn fingerprint(&self) -> Result<String, DataError> {
        self.stream.fingerprint(self.range.clone())
    }

    /// Copies the tokens from `start` into `out`. Each is below the size of the vocabulary.
    pub fn read(&self, start: usize, out: &mut [i32]) -> Result<(), DataError> {
        if start.checked_add(out.len()).is_none_or(|end| end > self.len()) {
            return Err(DataError::Misuse {
                path: self.path().to_owned(),
                what: format!("tokens {start}..+{} of {} were asked for", out.len(), self.len()),
            });
        }
        self.stream.read(self.range.start + start, out)
    }

    /// Number of samples of `block_size` tokens: `floor((T − 1) / block_size)`, since each token's target
    /// is the next one.
    #[must_use]
    pub fn blocks(&self, block_size: usize) -> u64 {
        (self.len().saturating_sub(1) / block_size.max(1)) as u64
    }

    /// Block `k`: `inputs` are tokens `k·T … k·T + T − 1`, `targets` those one further, where `T` is the
    /// length of both.
    pub fn read_block(&self, k: u64, inputs: &mut [i32], targets: &mut [i32]) -> Result<(), DataError> {
        let block_size = inputs.len();
        if targets.len() != block_size {
            return Err(DataError::Misuse {
                path: self.path().to_owned(),
                what: format!("{block_size} inputs, but {} targets", targets.len()),
            });
        }
        let mut tokens = vec![0; block_size + 1];
        self.read(k as usize * block_size, &mut tokens)?;
        inputs.copy_from_slice(&tokens[..block_size]);
        targets.copy_from_slice(&tokens[1..]);
        Ok(())
    }
}

/// Both parts of the data.
#[derive(Clone)]
pub struct Dataset {
    /// What the model learns from.
    pub train: Tokens,
    /// What it never sees.
    pub val: Tokens,
    /// Whose tokens they are.
    pub vocabulary: Arc<Vocabulary>,
}

impl Dataset {
    /// Opens the files of a configuration. Both parts hold at least one sample of `block_size`.
    pub fn open(data: &config::Data, block_size: usize) -> Result<Self, DataError> {
        let vocabulary = Arc::new(Vocabulary::of(&data.tokenizer)?);
        let open = |paths| Tokens::open(paths, &data.tokenizer, &vocabulary);
        let all = open(&data.train)?;
        let (train, val) = if let Some(paths) = &data.val {
            (all, open(paths)?)
        } else {
            let split = all.len() - all.len() / HELD_OUT_PART;
            (all.part(0..split), all.part(split..all.len()))
        };
        let dataset = Self {
            train,
            val,
            vocabulary,
        };
        for (part, tokens) in [("training", &dataset.train), ("validation", &dataset.val)] {
            if tokens.blocks(block_size) == 0 {
                return Err(DataError::TooShort {
                    path: tokens.path().to_owned(),
                    tokens: tokens.len() as u64,
                    part,
                    needed: block_size as u64 + 1,
                });
            }
        }
        Ok(dataset)
    }

    /// Number of tokens of the files of `paths`, each of which is opened, checked as far as its header tells, and closed.
    pub fn survey(
        paths: &config::Paths,
        tokenizer: &config::Tokenizer,
        vocabulary: &Arc<Vocabulary>,
    ) -> Result<u64, DataError> {
        survey(paths, tokenizer, vocabulary)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Data, LastBatch, Order, Tokenizer};

    fn data(folder: &Path, train: &[u8], val: Option<&[u8]>) -> Data {
        let write = |name: &str, bytes: &[u8]| {
            let path = folder.join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        Data {
            train: write("train", train).into(),
            val: val.map(|v| write("val", v).into()),
            tokenizer: Tokenizer::Bytes,
            order: Order::Sequential,
            last_batch: LastBatch::Wrap,
        }
    }

    #[test]
    fn the_last_tenth_is_held_out() {
        let folder = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..105).collect();
        let dataset = Dataset::open(&data(folder.path(), &bytes, None), 4).unwrap();
        assert_eq!((dataset.train.len(), dataset.val.len()), (95, 10));
        assert_eq!((dataset.train.blocks(4), dataset.val.blocks(4)), (23, 2));
        let (mut inputs, mut targets) = ([0; 4], [0; 4]);
        dataset.val.read_block(1, &mut inputs, &mut targets).unwrap();
        assert_eq!((inputs, targets), ([99, 100, 101, 102], [100, 101, 102, 103]));
        assert!(dataset.val.read_block(2, &mut inputs, &mut targets).is_err());
    }

    #[test]
    fn both_parts_hold_a_sample() {
        let folder = tempfile::tempdir().unwrap();
        let dataset = Dataset::open(&data(folder.path(), &[1; 5], Some(&[2; 5])), 4).unwrap();
        assert_eq!((dataset.train.blocks(4), dataset.val.blocks(4)), (1, 1));
        let error = Dataset::open(&data(folder.path(), &[1; 5], Some(&[2; 4])), 4)
            .err()
            .unwrap();
        assert!(
            matches!(
                error,
                DataError::TooShort {
                    part: "validation",
                    tokens: 4,
                    needed: 5,
                    ..
                }
            ),
            "{error}"
        );
    }
}
