//! What a model without context can reach: entropies of the tokens themselves.

use super::{DataError, Tokens};

const CHUNK_TOKENS: usize = 64 << 10;
/// Of a larger vocabulary pairs are not counted: the table would have billions of rows, and hardly any text fills it.
const MAX_PAIRED: usize = 256;

/// Entropies of tokens, in nats per token (Shannon 1948, from the counts of the tokens themselves).
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Entropies {
    /// `H(X)`: the loss of the best guess that looks at nothing.
    pub unigram: f64,
    /// `H(X | previous token)`: the loss of the best guess that looks at one token. Below it, a model uses
    /// more context than that. None for vocabularies of more than bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bigram: Option<f64>,
}

impl Entropies {
    /// Counts the tokens, of a vocabulary of `size`. Zero for fewer than two of them.
    pub fn of(tokens: &Tokens, size: usize) -> Result<Self, DataError> {
        let mut counts = vec![0_u64; size];
        let mut pairs = (size <= MAX_PAIRED).then(|| vec![0_u64; size * size]);
        let mut chunk = vec![0; CHUNK_TOKENS];
        let mut previous = None;
        let mut at = 0;
        while at < tokens.len() {
            let n = CHUNK_TOKENS.min(tokens.len() - at);
            tokens.read(at, &mut chunk[..n])?;
            for &token in &chunk[..n] {
                let token = token as usize;
                counts[token] += 1;
                if let (Some(previous), Some(pairs)) = (previous, &mut pairs) {
                    pairs[previous * size + token] += 1;
                }
                previous = Some(token);
            }
            at += n;
        }
        Ok(Self {
            unigram: entropy(&counts),
            bigram: pairs.map(|pairs| conditional(&pairs, size)),
        })
    }
}

/// `−Σ p ln p` of the distribution with these counts.
fn entropy(counts: &[u64]) -> f64 {
    let total: u64 = counts.iter().sum();
    let term = |&n: &u64| {
        let p = n as f64 / total as f64;
        // `ln(1/p)`, so that certainty is 0, not −0.
        p * p.recip().ln()
    };
    counts.iter().filter(|n| **n > 0).map(term).sum()
}

/// Entropy of the second of a pair, given the first: the rows' entropies, weighted by the rows.
fn conditional(pairs: &[u64], size: usize) -> f64 {
    let total: u64 = pairs.iter().sum();
    let rows = pairs.chunks(size).map(|row| (row.iter().sum::<u64>(), row));
    rows.filter(|(n, _)| *n > 0)
        .map(|(n, row)| n as f64 / total as f64 * entropy(row))
        .sum()
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::sync::Arc;

    use super::*;
    use crate::config::Tokenizer;
    use crate::data::Vocabulary;

    /// Unigram and bigram.
    fn at(path: PathBuf) -> (f64, f64) {
        let vocabulary = Arc::new(Vocabulary::of(&Tokenizer::Bytes).unwrap());
        let tokens = Tokens::open(&path.into(), &Tokenizer::Bytes, &vocabulary).unwrap();
        let Entropies { unigram, bigram } = Entropies::of(&tokens, vocabulary.size).unwrap();
        (unigram, bigram.unwrap())
    }

    fn of(text: &[u8]) -> (f64, f64) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        std::fs::write(&path, text).unwrap();
        at(path)
    }

    #[test]
    fn a_strict_alternation_is_one_bit_without_context_and_none_with_it() {
        // Longer than a chunk, so that a pair across chunks is counted.
        let (unigram, bigram) = of(&b"ab".repeat(CHUNK_TOKENS));
        assert!((unigram - 2_f64.ln()).abs() < 1e-12, "{unigram}");
        assert!(bigram.abs() < 1e-12, "{bigram}");
    }

    #[test]
    fn four_equal_letters_in_all_pairs() {
        // A de Bruijn cycle of order 2 over four letters, closed: each pair occurs exactly once.
        let (_, bigram) = of(b"aabacadbbcbdccdda");
        assert!((bigram - 4_f64.ln()).abs() < 1e-12, "{bigram}");
    }

    #[test]
    fn the_example_text_has_the_published_entropies() {
        let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
        let (unigram, bigram) = at(examples.join("data/python-reference.txt"));
        assert_eq!(format!("{unigram:.2} {bigram:.2}"), "3.26 2.45");
    }

    #[test]
    fn a_single_byte_has_none() {
        assert_eq!(of(b"x"), (0.0, 0.0));
    }
}
