//! The secret that all nodes of a job have in common, and what is derived from it.
//!
//! It never goes over a network: both sides of a connection derive their keys from it ([`crate::trust::tls`]).

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

/// The secret. It has no `Display`, and its `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
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
    fn it_is_not_shown_and_each_side_has_a_key_of_its_own() {
        let (one, other) = (Token::random(), Token::random());
        assert_eq!(format!("{one:?}"), "Token(…)");
        Token::parse(one.reveal()).unwrap();
        assert_ne!(one.tls_seed(Side::Agent), one.tls_seed(Side::Daemon));
        assert_ne!(one.tls_seed(Side::Agent), other.tls_seed(Side::Agent));
    }
}
