//! From tokens to text, while they come: a character is given when all of its bytes are there.

use super::TokenizeError;
use super::encoder::{Encoder, TokenizerLibrary};

/// The text of tokens that come one by one. Bytes that are no UTF-8 are shown as U+FFFD.
pub struct Decoder<'a> {
    library: &'a TokenizerLibrary,
    /// Of a character that is not whole yet.
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
        let library = &encoder.library;
        let prefix = match library {
            TokenizerLibrary::File(tokenizer) => tokenizer.decode(context, true).map_err(refused)?,
            _ => String::new(),
        };
        Ok(Self {
            library,
            bytes: Vec::new(),
            tokens: context.to_vec(),
            prefix,
            given: context.len(),
        })
    }

    /// The text that is whole with this token; it may be empty.
    pub fn push(&mut self, token: u32) -> Result<String, TokenizeError> {
        match self.library {
            TokenizerLibrary::Bytes => self.bytes.extend(u8::try_from(token)),
            TokenizerLibrary::Gpt2(gpt2) => self.bytes.extend(gpt2.decode(&[token])),
            TokenizerLibrary::File(tokenizer) => {
                let (tokens, prefix, given) = (&mut self.tokens, &mut self.prefix, &mut self.given);
                let step =
                    tokenizers::step_decode_stream(tokenizer, vec![token], true, tokens, prefix, given);
                return Ok(step.map_err(refused)?.unwrap_or_default());
            }
        }
        Ok(whole_characters(&mut self.bytes))
    }

    /// What is left at the end: a character that never became whole.
    pub fn finish(self) -> Result<String, TokenizeError> {
        let TokenizerLibrary::File(tokenizer) = self.library else {
            return Ok(String::from_utf8_lossy(&self.bytes).into_owned());
        };
        let text = tokenizer.decode(&self.tokens, true).map_err(refused)?;
        let rest = text.strip_prefix(&self.prefix);
        Ok(rest.unwrap_or_default().to_owned())
    }
}

#[expect(clippy::needless_pass_by_value, reason = "given to `map_err`")]
fn refused(cause: tokenizers::Error) -> TokenizeError {
    TokenizeError::Refused(format!("the tokenizer has no text for its tokens: {cause}"))
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
    use crate::config::Tokenizer;

    /// What is given with each token, and at the end.
    fn stream(encoder: &Encoder, context: &[u32], tokens: &[u32]) -> Vec<String> {
        let mut decoder = Decoder::new(encoder, context).unwrap();
        let mut parts: Vec<String> = tokens.iter().map(|&token| decoder.push(token).unwrap()).collect();
        parts.push(decoder.finish().unwrap());
        parts
    }

    fn of_bytes(bytes: &[u8]) -> Vec<String> {
        let encoder = Encoder::new(&Tokenizer::Bytes, None).unwrap();
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
        let encoder = Encoder::new(&Tokenizer::Gpt2, None).unwrap();
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

    #[test]
    fn tokens_of_a_file_come_back_as_text() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, BYTE_LEVEL).unwrap();
        let encoder = Encoder::new(&Tokenizer::File(path), None).unwrap();
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
}
