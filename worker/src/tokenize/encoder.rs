//! A tokenizer, and the token that separates documents.

use std::path::Path;
use std::str::FromStr as _;

use super::TokenizeError;
use crate::config::Tokenizer;
use crate::data::{DataError, Vocabulary, read_tokenizer};

/// What vocabularies call the token between documents: most, Llama's, and SentencePiece's.
pub const ENDS_OF_TEXT: [&str; 3] = ["<|endoftext|>", "<|end_of_text|>", "</s>"];
/// Its number in GPT-2's.
const GPT2_END_OF_TEXT: u32 = 50_256;
/// What the library calls GPT-2's vocabulary.
const GPT2_NAME: &str = "r50k_base";

/// From text to tokens; the same in all threads.
pub struct Encoder {
    pub(super) library: TokenizerLibrary,
    /// The vocabulary of its tokens.
    pub vocabulary: Vocabulary,
    /// The token before each document, by which a model ends a text, if the vocabulary has one.
    pub end_of_text: Option<u32>,
}

pub(super) enum TokenizerLibrary {
    /// None: every byte is a token.
    Bytes,
    Gpt2(&'static tiktoken::CoreBpe),
    File(Box<tokenizers::Tokenizer>),
}

impl Encoder {
    /// The encoder of a tokenizer. `end_of_text` is the separator that was asked for, which must exist; without one
    /// the first of [`ENDS_OF_TEXT`] is taken that the vocabulary has.
    pub fn new(tokenizer: &Tokenizer, end_of_text: Option<&str>) -> Result<Self, TokenizeError> {
        let vocabulary = Vocabulary::of(tokenizer)?;
        let library = match tokenizer {
            Tokenizer::Bytes => TokenizerLibrary::Bytes,
            Tokenizer::Gpt2 => {
                TokenizerLibrary::Gpt2(tiktoken::get_encoding(GPT2_NAME).expect("the vocabulary is built in"))
            }
            Tokenizer::File(path) => TokenizerLibrary::File(Box::new(load(path)?)),
        };
        let number = |token: &str| match &library {
            TokenizerLibrary::Bytes => None,
            TokenizerLibrary::Gpt2(_) => (token == ENDS_OF_TEXT[0]).then_some(GPT2_END_OF_TEXT),
            TokenizerLibrary::File(tokenizer) => tokenizer.token_to_id(token),
        };
        let separator = end_of_text.map_or_else(|| ENDS_OF_TEXT.into_iter().find_map(number), number);
        if let (Some(token), None) = (end_of_text, separator) {
            let name = vocabulary.name;
            return Err(TokenizeError::Refused(format!(
                "`--end-of-text {token}`: `{name}` has no such token\n  hint: most tokenizers list it in \
                 `added_tokens`; `{name}` is searched for exactly this token"
            )));
        }
        Ok(Self {
            library,
            vocabulary,
            end_of_text: separator,
        })
    }

    /// True if a text may be cut at a [border](super::source::last_border). Of a file's tokenizer nothing is known: it
    /// may put a mark before every text, or merge across white space.
    pub(super) fn may_cut(&self) -> bool {
        matches!(self.library, TokenizerLibrary::Gpt2(_))
    }

    /// Appends the tokens of `text`. The names of special tokens in it are text as any other: a document cannot end
    /// another one.
    pub fn encode(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), String> {
        match &self.library {
            TokenizerLibrary::Bytes => tokens.extend(text.bytes().map(u32::from)),
            TokenizerLibrary::Gpt2(gpt2) => tokens.append(&mut gpt2.encode(text)),
            TokenizerLibrary::File(tokenizer) => {
                let encoding = tokenizer.encode_fast(text, false).map_err(|e| e.to_string())?;
                tokens.extend_from_slice(encoding.get_ids());
            }
        }
        Ok(())
    }
}

/// Reads a `tokenizer.json`, and takes from it what belongs to the inputs of a finished model: shortened, filled up.
fn load(path: &Path) -> Result<tokenizers::Tokenizer, TokenizeError> {
    let failed = |cause: String| DataError::no_tokenizer(path, cause);
    let json = read_tokenizer(path)?;
    let json = String::from_utf8(json).map_err(|e| failed(e.to_string()))?;
    let mut tokenizer = tokenizers::Tokenizer::from_str(&json).map_err(|e| failed(e.to_string()))?;
    tokenizer
        .with_truncation(None)
        .map_err(|e| failed(e.to_string()))?;
    tokenizer.with_padding(None);
    tokenizer.set_encode_special_tokens(true);
    if let tokenizers::ModelWrapper::BPE(model) = tokenizer.get_model()
        && model.dropout.is_some_and(|dropout| dropout > 0.0)
    {
        return Err(failed("its `dropout` gives different tokens each time; set it to `null`".into()).into());
    }
    Ok(tokenizer)
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use proptest::prelude::*;

    use super::super::source::last_border;
    use super::*;

    fn gpt2() -> Encoder {
        Encoder::new(&Tokenizer::Gpt2, None).unwrap()
    }

    fn tokens(encoder: &Encoder, text: &str) -> Vec<u32> {
        let mut tokens = Vec::new();
        encoder.encode(text, &mut tokens).unwrap();
        tokens
    }

    #[test]
    fn gpt2_has_the_published_tokens() {
        // From OpenAI's tiktoken 0.14.
        let table: [(&str, &[u32]); 9] = [
            ("Hello world", &[15496, 995]),
            ("hello world", &[31373, 995]),
            ("", &[]),
            (" \n\n  x", &[220, 628, 220, 2124]),
            ("naïve café", &[2616, 38776, 40304]),
            ("日本語 text", &[33768, 98, 17312, 105, 45739, 252, 2420]),
            ("🦀 crab's", &[8582, 99, 222, 32202, 338]),
            (
                "tabs\t\tand  spaces   ",
                &[8658, 82, 197, 197, 392, 220, 9029, 220, 220, 220],
            ),
            ("<|endoftext|>", &[27, 91, 437, 1659, 5239, 91, 29]),
        ];
        let gpt2 = gpt2();
        for (text, expected) in table {
            assert_eq!(tokens(&gpt2, text), expected, "{text:?}");
        }
        assert_eq!(gpt2.end_of_text, Some(50_256));
    }

    #[test]
    fn the_built_in_vocabulary_is_the_published_one() {
        let TokenizerLibrary::Gpt2(gpt2) = gpt2().library else {
            unreachable!("of GPT-2");
        };
        let mut file = String::new();
        for token in 0..GPT2_END_OF_TEXT {
            writeln!(file, "{} {token}", STANDARD.encode(gpt2.decode(&[token]))).unwrap();
        }
        let hash = blake3::hash(file.as_bytes()).to_hex().to_string();
        let vocabulary = Vocabulary::of(&Tokenizer::Gpt2).unwrap();
        assert_eq!(Some(hash), vocabulary.hash);
        assert_eq!(vocabulary.size, GPT2_END_OF_TEXT as usize + 1);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        #[test]
        fn a_cut_at_a_border_changes_no_token(
            words in proptest::collection::vec("[a-c'sé漢0-9!.\u{a0}\u{3000} \t\n\r]{0,6}", 0..12),
            cut in 0_usize..60,
        ) {
            let (gpt2, text) = (gpt2(), words.concat());
            let head = &text.as_bytes()[..cut.min(text.len())];
            if let Some(border) = last_border(head) {
                let mut pieces = tokens(&gpt2, &text[..border]);
                pieces.extend(tokens(&gpt2, &text[border..]));
                prop_assert_eq!(pieces, tokens(&gpt2, &text));
            }
        }
    }
}
