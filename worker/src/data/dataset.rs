//! The training and the validation tokens of a configuration.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::{DataError, TokenFile};
use crate::config;

/// Without a validation file, one in this many tokens is held out at the end of the training file.
pub const HELD_OUT_PART: usize = 10;

/// A range of a token file.
#[derive(Clone)]
pub struct Tokens {
    file: Arc<TokenFile>,
    range: Range<usize>,
}

impl Tokens {
    /// The range of `file`, which must lie within it.
    #[must_use]
    pub fn new(file: Arc<TokenFile>, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= file.len(),
            "{range:?} of {} tokens",
            file.len()
        );
        Self { file, range }
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.file.path()
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

    /// Copies the tokens from `start` into `out`.
    pub fn read(&self, start: usize, out: &mut [u8]) -> Result<(), DataError> {
        if start.checked_add(out.len()).is_none_or(|end| end > self.len()) {
            return Err(DataError::Misuse {
                path: self.path().to_owned(),
                what: format!("tokens {start}..+{} of {} were asked for", out.len(), self.len()),
            });
        }
        self.file.read(self.range.start + start, out)
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
        let mut bytes = vec![0; block_size + 1];
        self.read(k as usize * block_size, &mut bytes)?;
        for i in 0..block_size {
            inputs[i] = i32::from(bytes[i]);
            targets[i] = i32::from(bytes[i + 1]);
        }
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
}

impl Dataset {
    /// Opens the files of a configuration. Both parts hold at least one sample of `block_size`.
    pub fn open(data: &config::Data, block_size: usize) -> Result<Self, DataError> {
        let file = Arc::new(TokenFile::open(&data.train)?);
        let all = file.len();
        let dataset = if let Some(path) = &data.val {
            let val = Arc::new(TokenFile::open(path)?);
            let end = val.len();
            Self {
                train: Tokens::new(file, 0..all),
                val: Tokens::new(val, 0..end),
            }
        } else {
            let split = all - all / HELD_OUT_PART;
            Self {
                train: Tokens::new(Arc::clone(&file), 0..split),
                val: Tokens::new(file, split..all),
            }
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

    /// Number of tokens that the vocabulary must have.
    #[must_use]
    pub const fn vocab_size(tokenizer: config::Tokenizer) -> usize {
        match tokenizer {
            config::Tokenizer::Bytes => 256,
        }
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
            train: write("train", train),
            val: val.map(|v| write("val", v)),
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
