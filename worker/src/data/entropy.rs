//! What a model without context can reach: entropies of the text itself.

use super::{DataError, Tokens};

const CHUNK_BYTES: usize = 64 << 10;
const VALUES: usize = 256;

/// Entropies of a text of bytes, in nats a byte (Shannon 1948, from the counts of the text itself).
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Entropies {
    /// `H(X)`: the loss of the best guess that looks at nothing.
    pub unigram: f64,
    /// `H(X | previous byte)`: the loss of the best guess that looks at one byte. Below it, a model uses
    /// more context than that.
    pub bigram: f64,
}

impl Entropies {
    /// Counts the text. Zero for a text of fewer than two bytes.
    pub fn of(tokens: &Tokens) -> Result<Self, DataError> {
        let mut counts = vec![0_u64; VALUES];
        let mut pairs = vec![0_u64; VALUES * VALUES];
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut previous = None;
        let mut at = 0;
        while at < tokens.len() {
            let n = CHUNK_BYTES.min(tokens.len() - at);
            tokens.read(at, &mut chunk[..n])?;
            for &byte in &chunk[..n] {
                let byte = usize::from(byte);
                counts[byte] += 1;
                if let Some(previous) = previous {
                    pairs[previous * VALUES + byte] += 1;
                }
                previous = Some(byte);
            }
            at += n;
        }
        Ok(Self {
            unigram: entropy(&counts),
            bigram: conditional(&pairs),
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
fn conditional(pairs: &[u64]) -> f64 {
    let total: u64 = pairs.iter().sum();
    let rows = pairs.chunks(VALUES).map(|row| (row.iter().sum::<u64>(), row));
    rows.filter(|(n, _)| *n > 0)
        .map(|(n, row)| n as f64 / total as f64 * entropy(row))
        .sum()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::data::TokenFile;

    fn of(text: &[u8]) -> Entropies {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        std::fs::write(&path, text).unwrap();
        let file = Arc::new(TokenFile::open(&path).unwrap());
        let all = file.len();
        Entropies::of(&Tokens::new(file, 0..all)).unwrap()
    }

    #[test]
    fn a_strict_alternation_is_one_bit_without_context_and_none_with_it() {
        // Longer than a chunk, so that a pair across chunks is counted.
        let found = of(&b"ab".repeat(CHUNK_BYTES));
        assert!((found.unigram - 2_f64.ln()).abs() < 1e-12, "{found:?}");
        assert!(found.bigram.abs() < 1e-12, "{found:?}");
    }

    #[test]
    fn four_equal_letters_in_all_pairs() {
        // A de Bruijn cycle of order 2 over four letters, closed: each pair occurs exactly once.
        let found = of(b"aabacadbbcbdccdda");
        assert!((found.bigram - 4_f64.ln()).abs() < 1e-12, "{found:?}");
    }

    #[test]
    fn the_example_text_has_the_published_entropies() {
        let path =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/data/python-reference.txt");
        let file = Arc::new(TokenFile::open(&path).unwrap());
        let all = file.len();
        let found = Entropies::of(&Tokens::new(file, 0..all)).unwrap();
        assert_eq!(format!("{:.2} {:.2}", found.unigram, found.bigram), "3.26 2.45");
    }

    #[test]
    fn short_texts_have_none() {
        assert_eq!(
            of(b""),
            Entropies {
                unigram: 0.0,
                bigram: 0.0
            }
        );
        assert_eq!(
            of(b"x"),
            Entropies {
                unigram: 0.0,
                bigram: 0.0
            }
        );
    }
}
