//! From tokens to text, while they come: a character is given when all of its bytes are there.

use tokenizers::Tokenizer;

use super::TokenizeError;
use super::encoder::{Encoder, TokenizerLibrary};

/// Tokens of a file's tokenizer that are held back at most, because their text ends with U+FFFD, which may become a
/// character, or because they have none. Longer ones are given as they are.
const MOST_HELD_BACK: usize = 32;

/// The text of tokens that come one by one. Bytes that are no UTF-8 are shown as U+FFFD.
pub struct Decoder<'a> {
    library: &'a TokenizerLibrary,
    /// Bytes of a character that is not complete yet.
    bytes: Vec<u8>,
    /// For a file's tokenizer, whose text of a token may depend on the tokens before.
    tokens: Vec<u32>,
    /// Text of the first `given` of them, which was given.
    prefix: String,
    given: usize,
}

impl<'a> Decoder<'a> {
    /// For tokens that follow `context`, whose text is not given again.
    pub fn new(encoder: &'a Encoder, context: &[u32]) -> Result<Self, TokenizeError> {
        let mut decoder = Self {
            library: &encoder.library,
            bytes: Vec::new(),
            tokens: context[context.len().saturating_sub(MOST_HELD_BACK)..].to_vec(),
            prefix: String::new(),
            given: 0,
        };
        if let TokenizerLibrary::File(tokenizer) = decoder.library {
            decoder.mark_as_given(tokenizer)?;
        }
        Ok(decoder)
    }

    /// The text that is whole with this token; it may be empty.
    pub fn push(&mut self, token: u32) -> Result<String, TokenizeError> {
        match self.library {
            TokenizerLibrary::Bytes => self.bytes.extend(u8::try_from(token)),
            TokenizerLibrary::Gpt2(gpt2) => self.bytes.extend(gpt2.decode(&[token])),
            TokenizerLibrary::File(tokenizer) => return self.push_to(tokenizer, token),
        }
        Ok(whole_characters(&mut self.bytes))
    }

    fn push_to(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<String, TokenizeError> {
        let special = tokenizer.get_added_vocabulary();
        let has_text = |name: String| !special.is_special_token(&name);
        if !tokenizer.id_to_token(token).is_some_and(has_text) {
            return Ok(String::new());
        }
        self.tokens.push(token);
        let text = self.new_text(tokenizer)?;
        let is_whole = !text.is_empty() && !text.ends_with(char::REPLACEMENT_CHARACTER);
        if !is_whole && self.tokens.len() - self.given < MOST_HELD_BACK {
            return Ok(String::new());
        }
        self.tokens.drain(..self.given);
        self.mark_as_given(tokenizer)?;
        Ok(text)
    }

    /// Text of the tokens that were held back.
    fn new_text(&self, tokenizer: &Tokenizer) -> Result<String, TokenizeError> {
        let text = decode(tokenizer, &self.tokens)?;
        match text.strip_prefix(&self.prefix) {
            Some(new) => Ok(new.to_owned()),
            // What was given would be another text now: a byte that can never be part of a character turns all bytes beside
            // it into U+FFFD (`ByteFallback`, as in the tokenizer of Llama 2).
            None => decode(tokenizer, &self.tokens[self.given..]),
        }
    }

    fn mark_as_given(&mut self, tokenizer: &Tokenizer) -> Result<(), TokenizeError> {
        self.prefix = decode(tokenizer, &self.tokens)?;
        self.given = self.tokens.len();
        Ok(())
    }

    /// What is left at the end: a character that never became whole.
    pub fn finish(self) -> Result<String, TokenizeError> {
        match self.library {
            TokenizerLibrary::File(tokenizer) => self.new_text(tokenizer),
            _ => Ok(String::from_utf8_lossy(&self.bytes).into_owned()),
        }
    }
}

fn decode(tokenizer: &Tokenizer, tokens: &[u32]) -> Result<String, TokenizeError> {
    let refused =
        |cause| TokenizeError::Refused(format!("the tokenizer has no text for its tokens: {cause}"));
    tokenizer.decode(tokens, true).map_err(refused)
}

/// Takes whole characters from the front, and U+FFFD for what can never be one. The start of a character stays.
fn whole_characters(bytes: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut done = 0;
    loop {
        let rest = &bytes[done..];
        let (valid, bad) = match std::str::from_utf8(rest) {
            Ok(_) => (rest.len(), None),
            Err(error) => (error.valid_up_to(), error.error_len()),
        };
        text.push_str(&String::from_utf8_lossy(&rest[..valid]));
        done += valid;
        let Some(bad) = bad else { break };
        text.push(char::REPLACEMENT_CHARACTER);
        done += bad;
    }
    bytes.drain(..done);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    /// What is given with each token, and at the end.
    fn stream(encoder: &Encoder, context: &[u32], tokens: &[u32]) -> Vec<String> {
        let mut decoder = Decoder::new(encoder, context).unwrap();
        let mut parts: Vec<String> = tokens.iter().map(|&token| decoder.push(token).unwrap()).collect();
        parts.push(decoder.finish().unwrap());
        parts
    }

    fn of_bytes(bytes: &[u8]) -> Vec<String> {
        let encoder = Encoder::new(&config::Tokenizer::Bytes, None).unwrap();
        stream(
            &encoder,
            &[],
            &bytes.iter().map(|&byte| byte.into()).collect::<Vec<_>>(),
        )
    }

    #[test]
    fn characters_come_when_they_are_whole() {
        assert_eq!(of_bytes("aé€".as_bytes()), ["a", "", "é", "", "", "€", ""]);
        assert_eq!(
            of_bytes(b"\xc3"),
            ["", "\u{fffd}"],
            "one that never becomes whole"
        );
        assert_eq!(
            of_bytes(b"\xffa"),
            ["\u{fffd}", "a", ""],
            "never the start of one"
        );
        assert_eq!(
            of_bytes(b"\xe2\x82a"),
            ["", "", "\u{fffd}a", ""],
            "ended too early"
        );
    }

    #[test]
    fn any_bytes_give_the_text_that_they_give_at_once() {
        let mut state = 1_u32;
        for len in 0..300 {
            let bytes: Vec<u8> = (0..len)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    // Many starts of characters, and their other bytes.
                    [b'a', 0xc3, 0xa9, 0xe2, 0x82, 0xac, 0xf0, 0x9f, 0xa6, 0x80, 0xff]
                        [(state >> 24) as usize % 11]
                })
                .collect();
            assert_eq!(
                of_bytes(&bytes).concat(),
                String::from_utf8_lossy(&bytes),
                "{bytes:x?}"
            );
        }
    }

    #[test]
    fn tokens_of_gpt2_come_back_as_text() {
        let encoder = Encoder::new(&config::Tokenizer::Gpt2, None).unwrap();
        let text = "🦀 crab's naïve café, 日本語";
        let mut tokens = Vec::new();
        encoder.encode(text, &mut tokens).unwrap();
        let parts = stream(&encoder, &[], &tokens);
        assert_eq!(parts.concat(), text);
        assert_eq!(parts[..3], ["", "", "🦀"], "three tokens make it");
        // Beyond the vocabulary, as in a model whose vocabulary is padded.
        assert_eq!(stream(&encoder, &[], &[60_000, 64]).concat(), "a");
    }

    /// Byte-level, as GPT-2's: `Ã` and `©` are the bytes of `é`, `Ġ` is a blank.
    const BYTE_LEVEL: &str = r#"{"version": "1.0", "added_tokens": [{"id": 4, "content": "<end>", "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": {"Ã": 0, "©": 1, "Ġ": 2, "a": 3}, "merges": []}}"#;

    fn of_file(json: &str) -> Encoder {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, json).unwrap();
        Encoder::new(&config::Tokenizer::File(path), None).unwrap()
    }

    #[test]
    fn tokens_of_a_file_come_back_as_text() {
        let encoder = of_file(BYTE_LEVEL);
        let mut tokens = Vec::new();
        encoder.encode("aé a", &mut tokens).unwrap();
        assert_eq!(tokens, [3, 0, 1, 2, 3]);
        assert_eq!(stream(&encoder, &[3], &tokens[1..]), ["", "é", " ", "a", ""]);
        assert_eq!(stream(&encoder, &[3], &[0]), ["", "\u{fffd}"], "never whole");
        assert_eq!(
            stream(&encoder, &[], &[4, 3]).concat(),
            "a",
            "special tokens are no text"
        );
    }

    /// As Llama 2's: a run of bytes is text if all of it is, and else U+FFFD for each byte.
    const BYTE_FALLBACK: &str = r#"{"version": "1.0", "added_tokens": [{"id": 0, "content": "</s>", "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
        "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "byte_fallback": true, "merges": [], "vocab": {"</s>": 0, "▁a": 1, "b": 2,
            "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5, "<0xFF>": 6}}}"#;

    #[test]
    fn bytes_that_are_no_text_do_not_end_the_text_of_byte_fallback() {
        let encoder = of_file(BYTE_FALLBACK);
        let of = |tokens: &[u32]| stream(&encoder, &[1], tokens);
        assert_eq!(of(&[2, 1, 2]), ["b", " a", "b", ""]);
        assert_eq!(of(&[3, 4, 5, 2]), ["", "", "€", "b", ""]);
        // Together with the next byte the tokenizer would take the euro sign back.
        assert_eq!(of(&[3, 4, 5, 6, 2, 1]), ["", "", "€", "", "\u{fffd}b", " a", ""]);
        assert_eq!(of(&[3, 4, 5, 6]), ["", "", "€", "", "\u{fffd}"], "nor at the end");
        assert_eq!(of(&[6; 40]).concat(), "\u{fffd}".repeat(40));
        assert_eq!(
            of(&[0, 0, 1, 60_000, 2]),
            ["", "", " a", "", "b", ""],
            "no text at all"
        );
        assert_eq!(encoder.end_of_text, Some(0), "SentencePiece's name");
    }

    /// Whatever the tokens: what is given is bounded by what is held back.
    #[test]
    fn tokens_without_text_are_not_kept() {
        let encoder = of_file(BYTE_FALLBACK);
        let mut decoder = Decoder::new(&encoder, &[1; 1000]).unwrap();
        for token in [[0; 1000], [6; 1000], [2; 1000]].concat() {
            decoder.push(token).unwrap();
            assert!(decoder.tokens.len() < 2 * MOST_HELD_BACK);
        }
    }
}
