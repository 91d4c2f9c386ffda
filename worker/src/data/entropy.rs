//! What a model with little or no context reaches: losses of counts.

use super::{DataError, Tokens};

const CHUNK_TOKENS: usize = 64 << 10;
/// The largest vocabulary whose pairs are counted. The table of a larger one would have billions of rows, most of them empty.
const MAX_PAIRED: usize = 256;
/// Each token counts as seen so much oftener than it was, so that one that was never seen is guessed too. (A whole count
/// would take a third of the probability from a short text of GPT-2's tokens.)
const UNSEEN: f64 = 0.1;

/// Losses on the validation tokens of models that only count, in nats per token: cross-entropies of these tokens under
/// the statistics of the training tokens.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Entropies {
    /// Loss of a guess by how often each token occurs.
    pub unigram: f64,
    /// Loss of a guess by the token before. A model with a lower loss uses more context. `None` for vocabularies
    /// of more than bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bigram: Option<f64>,
}

impl Entropies {
    /// The losses on `val` with counts from `train`, both with a vocabulary of `size` tokens. Zero if `val` has fewer than two tokens.
    pub fn of(train: &Tokens, val: &Tokens, size: usize) -> Result<Self, DataError> {
        let [train, val] = [Counts::of(train, size)?, Counts::of(val, size)?];
        let all = train.total() as f64 + UNSEEN * size as f64;
        let unigram = |token: usize| (train.tokens[token] as f64 + UNSEEN) / all;
        let guesses = val.tokens.iter().enumerate();
        let sum = guesses.map(|(token, n)| nats(*n, unigram(token))).sum::<f64>();
        let validated = val.total().max(1) as f64;
        let paired = train.pairs.zip(val.pairs);
        Ok(Self {
            unigram: sum / validated,
            bigram: paired.map(|(train, val)| {
                let rows = train.chunks(size).zip(val.chunks(size));
                // Each token counts as followed once more than it was, by the unigram's guess.
                let row = |(train, val): (&[u64], &[u64])| {
                    let followed = (train.iter().sum::<u64>() + 1) as f64;
                    let guess = |token: usize| (train[token] as f64 + unigram(token)) / followed;
                    let guesses = val.iter().enumerate();
                    guesses.map(|(token, n)| nats(*n, guess(token))).sum::<f64>()
                };
                rows.map(row).sum::<f64>() / validated
            }),
        })
    }
}

/// How often each token, and each pair of them, is in a text. The first token follows none, and is not counted.
struct Counts {
    tokens: Vec<u64>,
    /// `[previous, token]`
    pairs: Option<Vec<u64>>,
}

impl Counts {
    fn of(text: &Tokens, size: usize) -> Result<Self, DataError> {
        let mut tokens = vec![0_u64; size];
        let mut pairs = (size <= MAX_PAIRED).then(|| vec![0_u64; size * size]);
        let mut chunk = vec![0; CHUNK_TOKENS];
        let mut previous = None;
        let mut at = 0;
        while at < text.len() {
            let n = CHUNK_TOKENS.min(text.len() - at);
            text.read(at, &mut chunk[..n])?;
            for &token in &chunk[..n] {
                let token = token as usize;
                if let Some(previous) = previous.replace(token) {
                    tokens[token] += 1;
                    if let Some(pairs) = &mut pairs {
                        pairs[previous * size + token] += 1;
                    }
                }
            }
            at += n;
        }
        Ok(Self { tokens, pairs })
    }

    fn total(&self) -> u64 {
        self.tokens.iter().sum()
    }
}

/// The loss of `n` tokens that were thought to come with this probability.
fn nats(n: u64, probability: f64) -> f64 {
    match n {
        0 => 0.0,
        n => n as f64 * probability.recip().ln(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::{Data, LastBatch, Order, Tokenizer};
    use crate::data::Dataset;

    /// Unigram and bigram of bytes.
    fn at(train: &Path, val: Option<&Path>) -> (f64, f64) {
        let data = Data {
            train: train.to_owned().into(),
            val: val.map(|path| path.to_owned().into()),
            tokenizer: Tokenizer::Bytes,
            dtype: None,
            order: Order::Sequential,
            last_batch: LastBatch::Wrap,
        };
        let dataset = Dataset::open(&data, 1).unwrap();
        let Entropies { unigram, bigram } =
            Entropies::of(&dataset.train, &dataset.val, dataset.vocabulary.size).unwrap();
        (unigram, bigram.unwrap())
    }

    fn of(train: &[u8], val: &[u8]) -> (f64, f64) {
        let folder = tempfile::tempdir().unwrap();
        let paths = ["train", "val"].map(|name| folder.path().join(name));
        std::fs::write(&paths[0], train).unwrap();
        std::fs::write(&paths[1], val).unwrap();
        at(&paths[0], Some(&paths[1]))
    }

    #[test]
    fn a_strict_alternation_is_one_bit_without_context_and_none_with_it() {
        // Longer than a chunk, so that a pair across chunks is counted.
        let text = b"ab".repeat(CHUNK_TOKENS);
        let (unigram, bigram) = of(&text, &text);
        assert!((unigram - 2_f64.ln()).abs() < 3e-3, "{unigram}");
        assert!(bigram < 1e-4, "{bigram}");
    }

    #[test]
    fn the_validation_text_is_judged_by_the_training_text() {
        // What follows in training: b once, after a. To validate: a after a, then b after a, then c after b.
        let (unigram, bigram) = of(b"ab", b"aabc");
        let [a, b, c] = [0.1, 1.1, 0.1].map(|n: f64| n / 26.6);
        let mean = |p: [f64; 3]| -p.iter().map(|p| p.ln()).sum::<f64>() / 3.0;
        assert!((unigram - mean([a, b, c])).abs() < 1e-12, "{unigram}");
        assert!(
            (bigram - mean([a / 2.0, f64::midpoint(1.0, b), c])).abs() < 1e-12,
            "{bigram}"
        );
    }

    #[test]
    fn the_example_text_has_the_published_entropies() {
        let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
        let (unigram, bigram) = at(&examples.join("data/python-reference.txt"), None);
        assert_eq!(format!("{unigram:.3} {bigram:.3}"), "3.246 2.320");
    }
}
