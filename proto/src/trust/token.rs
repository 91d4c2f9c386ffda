//! The secret that all nodes of a job have in common, and what is derived from it.
//!
//! It never goes over a network. Both sides of a connection derive their keys from it ([`crate::trust::tls`]), and a daemon that serves several users is told one hash for each job.

use std::collections::BTreeSet;
use std::fmt;

/// Shortest token: 32 hexadecimal digits are 128 bits.
const MIN_CHARS: usize = 32;
/// Longest token.
pub const MAX_CHARS: usize = 512;
/// A text of fewer different characters was not made by chance.
const MIN_DIFFERENT: usize = 8;

/// What each derived key is for: a key of one purpose says nothing about that of another.
const DAEMON_KEY: &str = "ddp-run 2026-11 TLS key of a daemon";
const AGENT_KEY: &str = "ddp-run 2026-11 TLS key of an agent";
const PROOF: &str = "ddp-run 2026-11 proof of the token of a job";

/// The secret. It has no `Display`, and its `Debug` does not show it.
#[derive(Clone)]
pub struct Token(String);

/// One side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Daemon,
    Agent,
}

/// Why a text is no token. The text itself is not shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadToken {
    /// It can be guessed.
    #[error("it has {0} characters, and a token has {MIN_CHARS} to {MAX_CHARS}")]
    Length(usize),
    /// It has a space, a control character or one that is not ASCII.
    #[error("a token consists of ASCII letters, digits and punctuation")]
    Characters,
    /// It repeats itself.
    #[error("a token has at least {MIN_DIFFERENT} different characters")]
    Repetitive,
}

impl Token {
    /// Reads a token; spaces and line ends around it do not count.
    pub fn parse(text: &str) -> Result<Self, BadToken> {
        let text = text.trim();
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(BadToken::Characters);
        }
        if text.len() < MIN_CHARS || text.len() > MAX_CHARS {
            return Err(BadToken::Length(text.len()));
        }
        if text.bytes().collect::<BTreeSet<u8>>().len() < MIN_DIFFERENT {
            return Err(BadToken::Repetitive);
        }
        Ok(Self(text.to_owned()))
    }

    /// A new one of 256 bits, as 64 hexadecimal digits.
    pub fn random() -> Self {
        let bytes: [u8; 32] = rand::random();
        Self(blake3::Hash::from(bytes).to_hex().to_string())
    }

    /// The text, for the file that the other nodes read.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Shows a daemon that its caller has the token of `job`, and of no other job.
    pub fn proof(&self, job: &str) -> [u8; 32] {
        let key = blake3::derive_key(PROOF, self.0.as_bytes());
        blake3::keyed_hash(&key, job.as_bytes()).into()
    }

    /// Seed of the Ed25519 key that this side of a connection proves to have.
    pub(super) fn tls_seed(&self, side: Side) -> [u8; 32] {
        let purpose = match side {
            Side::Daemon => DAEMON_KEY,
            Side::Agent => AGENT_KEY,
        };
        blake3::derive_key(purpose, self.0.as_bytes())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// Compares two secrets in a time that does not depend on where they differ.
pub fn is_same_secret(one: &[u8], other: &[u8]) -> bool {
    // `blake3::Hash` compares in constant time.
    blake3::hash(one) == blake3::hash(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_repetitive_and_unprintable_texts_are_refused() {
        let good = "0123456789abcdef0123456789abcdef";
        assert_eq!(Token::parse(&format!(" {good}\n")).unwrap().reveal(), good);
        for (text, error) in [
            (&good[1..], BadToken::Length(31)),
            ("", BadToken::Length(0)),
            (&"0123456".repeat(10), BadToken::Repetitive),
            (&format!("{good} {good}"), BadToken::Characters),
            (&format!("{good}\0"), BadToken::Characters),
        ] {
            assert_eq!(Token::parse(text).unwrap_err(), error, "{text:?}");
        }
        Token::parse(&"0123456789".repeat(52)).unwrap_err();
    }

    #[test]
    fn it_is_not_shown_and_each_has_its_own_proofs() {
        let (one, other) = (Token::random(), Token::random());
        assert_eq!(format!("{one:?}"), "Token(…)");
        Token::parse(one.reveal()).unwrap();
        assert_ne!(one.proof("a"), one.proof("b"));
        assert_ne!(one.proof("a"), other.proof("a"));
        assert_ne!(one.tls_seed(Side::Agent), one.tls_seed(Side::Daemon));
        assert_ne!(one.tls_seed(Side::Agent), one.proof(""));
        assert!(is_same_secret(&one.proof("a"), &one.proof("a")));
        assert!(!is_same_secret(&one.proof("a"), b""));
    }
}
