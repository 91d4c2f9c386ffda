//! Token files of all kinds, read as one stream; and what is wrong with others.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use safetensors::tensor::Dtype;

use super::token_file::{header, other_tokenizer};
use super::{DataError, TokenFacts, Tokens, Vocabulary};
use crate::config::{Paths, TokenDtype, Tokenizer};

/// A llm.c file with this header, and `tokens` as 16 bits.
fn llm_c(header: [i32; 3], tokens: &[u16]) -> Vec<u8> {
    let mut bytes: Vec<u8> = header.iter().flat_map(|number| number.to_le_bytes()).collect();
    bytes.resize(1024, 0);
    bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    bytes
}

/// The same, well-formed.
fn good_llm_c(tokens: &[u16]) -> Vec<u8> {
    llm_c([20_240_520, 1, tokens.len() as i32], tokens)
}

fn gpt2() -> Arc<Vocabulary> {
    Arc::new(Vocabulary::of(&Tokenizer::Gpt2).unwrap())
}

/// What our own files say of GPT-2's tokens.
fn facts(text_bytes: u64) -> TokenFacts {
    TokenFacts {
        tokenizer: Some("gpt2".into()),
        tokenizer_hash: gpt2().hash.clone(),
        vocab_size: Some(50_257),
        documents: Some(1),
        text_bytes: Some(text_bytes),
    }
}

fn ours(tokens: &[u16], facts: &TokenFacts) -> Vec<u8> {
    let mut bytes = header(Dtype::U16, tokens.len(), facts).unwrap();
    bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    bytes
}

/// Files, and the type of those without a header.
struct Folder(tempfile::TempDir, Option<TokenDtype>);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap(), None)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn open(&self, paths: &[&str]) -> Result<Tokens, DataError> {
        let paths: Vec<PathBuf> = paths.iter().map(|path| self.0.path().join(path)).collect();
        Tokens::open(&Paths::Several(paths), &Tokenizer::Gpt2, self.1, &gpt2())
    }

    /// Why a file of these bytes is refused, under `tokenizer`.
    fn refusal(&self, bytes: &[u8], tokenizer: &Tokenizer) -> String {
        let path = self.write("data.bin", bytes);
        let vocabulary = Arc::new(Vocabulary::of(tokenizer).unwrap());
        let error = Tokens::open(&path.into(), tokenizer, self.1, &vocabulary)
            .err()
            .unwrap();
        self.shown(&error)
    }

    fn shown(&self, error: &DataError) -> String {
        let folder: &Path = self.0.path();
        error.to_string().replace(&folder.display().to_string(), "DIR")
    }
}

fn all(tokens: &Tokens) -> Vec<i32> {
    let mut out = vec![0; tokens.len()];
    tokens.read(0, &mut out).unwrap();
    out
}

#[test]
fn files_of_both_kinds_are_one_stream() {
    let folder = Folder::new();
    folder.write("b.bin", &good_llm_c(&[7, 50_256]));
    folder.write("a.safetensors", &ours(&[1, 2, 3], &facts(12)));
    let mut wide = llm_c([20_240_801, 7, 2], &[]);
    wide.extend([9_u32, 10].iter().flat_map(|token| token.to_le_bytes()));
    folder.write("c.bin", &wide);
    let tokens = folder.open(&["a.safetensors", "b.bin", "c.bin"]).unwrap();
    assert_eq!(all(&tokens), [1, 2, 3, 7, 50_256, 9, 10]);
    assert_eq!((tokens.file_count(), tokens.bytes_per_token()), (3, None));
    assert!(!tokens.knows_tokenizer());
    let (mut inputs, mut targets) = ([0; 3], [0; 3]);
    tokens.read_sample(3, &mut inputs, &mut targets).unwrap();
    assert_eq!((inputs, targets), ([7, 50_256, 9], [50_256, 9, 10]));

    let own = folder.open(&["*.safetensors"]).unwrap();
    assert_eq!(own.bytes_per_token(), Some(4.0));
    assert_eq!(
        own.part(1..3).bytes_per_token(),
        None,
        "the file tells its total only"
    );
    assert!(own.knows_tokenizer());
}

#[test]
fn a_file_that_another_program_wrote_is_read() {
    let folder = Folder::new();
    let view =
        safetensors::tensor::TensorView::new(safetensors::Dtype::U32, vec![2], &[5, 0, 0, 0, 6, 0, 0, 0]);
    let bytes = safetensors::serialize([("tokens", view.unwrap())], None).unwrap();
    folder.write("a", &bytes);
    let tokens = folder.open(&["a"]).unwrap();
    assert_eq!(all(&tokens), [5, 6]);
    assert!(!tokens.knows_tokenizer());
}

/// A file of NumPy with this header, as `numpy.save` fills it up.
fn numpy(literal: &str, data: &[u8]) -> Vec<u8> {
    let mut header = literal.to_owned();
    header += &" ".repeat(117 - literal.len());
    header.push('\n');
    let length = (header.len() as u16).to_le_bytes();
    [b"\x93NUMPY\x01\x00", &length[..], header.as_bytes(), data].concat()
}

#[test]
fn an_array_of_numpy_is_read_by_its_header() {
    let folder = Folder::new();
    let literal = |dtype: &str, shape: &str| {
        format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}")
    };
    for (dtype, data) in [
        ("<u2", &[7, 0, 80, 196][..]),
        ("<i4", &[7, 0, 0, 0, 80, 196, 0, 0]),
        ("<i8", &[7, 0, 0, 0, 0, 0, 0, 0, 80, 196, 0, 0, 0, 0, 0, 0]),
    ] {
        folder.write("a.npy", &numpy(&literal(dtype, "(2,)"), data));
        let tokens = folder.open(&["a.npy"]).unwrap();
        assert_eq!(all(&tokens), [7, 50_256], "{dtype}");
    }
    let refusal = |bytes: &[u8]| folder.refusal(bytes, &Tokenizer::Gpt2);
    insta::assert_snapshot!(refusal(&numpy(&literal("<f4", "(1,)"), &[0; 4])), @r"
    `DIR/data.bin` is a token file with an invalid header: only whole numbers of 2, 4 or 8 bytes are read, as `<u2`: `{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }`
      hint: supported are the files of `ddp-train tokenize`, llm.c and NumPy: see `Tokens` in docs/configuration.md
    ");
    insta::assert_snapshot!(refusal(&numpy(&literal("<u2", "(1, 1)"), &[0; 2])), @r"
    `DIR/data.bin` is a token file with an invalid header: only arrays of one dimension are read: `{'descr': '<u2', 'fortran_order': False, 'shape': (1, 1), }`
      hint: supported are the files of `ddp-train tokenize`, llm.c and NumPy: see `Tokens` in docs/configuration.md
    ");
    insta::assert_snapshot!(refusal(&numpy(&literal("<u2", "(3,)"), &[0; 4])), @r"
    `DIR/data.bin` is 132 bytes long, but its header promises 134
      hint: it was truncated or extended: create or download it again
    ");
    insta::assert_snapshot!(folder.refusal(&numpy(&literal("<u2", "(1,)"), &[0; 2]), &Tokenizer::Bytes), @r"
    `DIR/data.bin` is a token file, but `data.tokenizer: bytes` expects text
      hint: set `data.tokenizer` to the one that it was made with
    ");
    folder.write("a.npy", &numpy(&literal("<i8", "(1,)"), &[255; 8]));
    let negative = folder.open(&["a.npy"]).unwrap().read(0, &mut [0]).unwrap_err();
    assert!(
        negative.to_string().contains("the last token of `gpt2` is 50256"),
        "{negative}"
    );
}

/// The hint was to tokenize it, which made garbage of it.
#[test]
fn numbers_without_a_header_are_read_only_as_the_user_says() {
    let mut folder = Folder::new();
    let raw: Vec<u8> = [18_u16, 47, 50_256, 0]
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect();
    insta::assert_snapshot!(folder.refusal(&raw, &Tokenizer::Gpt2), @r"
    `DIR/data.bin` is neither text nor a token file with a header, but `data.tokenizer: gpt2` needs one
      hint: if it holds nothing but numbers, as nanoGPT's `.bin`, set `data.dtype: uint16` (or `uint32`)
    ");
    folder.1 = Some(TokenDtype::Uint16);
    let path = folder.write("train.bin", &raw);
    assert_eq!(all(&folder.open(&["train.bin"]).unwrap()), [18, 47, 50_256, 0]);
    insta::assert_snapshot!(folder.refusal(&raw[1..], &Tokenizer::Gpt2), @r"
    `DIR/data.bin` is 7 bytes long, expected a multiple of 2
      hint: check `data.dtype`, or create the file again
    ");
    assert!(
        folder
            .refusal(&raw, &Tokenizer::Bytes)
            .contains("is a token file, but `data.tokenizer: bytes`")
    );
    // A header counts all the same.
    std::fs::write(path, good_llm_c(&[7])).unwrap();
    assert_eq!(all(&folder.open(&["train.bin"]).unwrap()), [7]);
    folder.1 = Some(TokenDtype::Uint32);
    folder.write("wide.bin", &raw);
    let error = folder.open(&["wide.bin"]).unwrap().read(0, &mut [0]).unwrap_err();
    insta::assert_snapshot!(folder.shown(&error), @r"
    `DIR/wide.bin` has the number 3080210 at position 0, but the last token of `gpt2` is 50256
      hint: set `data.tokenizer` to the one that the file was made with, or make it again with `ddp-train tokenize`
    ");
}

#[test]
fn a_byte_order_mark_is_no_part_of_a_text() {
    let folder = Folder::new();
    let bytes = Arc::new(Vocabulary::of(&Tokenizer::Bytes).unwrap());
    let of = |text: &str| {
        let path = folder.write("a.txt", text.as_bytes());
        Tokens::open(&path.into(), &Tokenizer::Bytes, None, &bytes).map(|tokens| all(&tokens))
    };
    assert_eq!(of("\u{feff}ab").unwrap(), [97, 98]);
    assert_eq!(of("ab").unwrap(), [97, 98]);
    assert!(of("\u{feff}").unwrap_err().to_string().ends_with("is empty"));
}

#[test]
fn our_files_are_safetensors_for_others() {
    let bytes = ours(&[1, 2, 3], &facts(12));
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tokens = tensors.tensor("tokens").unwrap();
    assert_eq!(
        (tokens.dtype(), tokens.shape()),
        (safetensors::Dtype::U16, &[3][..])
    );
    assert_eq!(tokens.data(), [1, 0, 2, 0, 3, 0]);
}

#[test]
fn texts_and_tokens_are_not_taken_for_each_other() {
    let folder = Folder::new();
    let refusal = |bytes: &[u8], tokenizer| folder.refusal(bytes, tokenizer);
    insta::assert_snapshot!(refusal(b"It was a dark night.", &Tokenizer::Gpt2), @r"
    `DIR/data.bin` is not a token file, but `data.tokenizer: gpt2` needs one
      hint: create one and use it instead: `ddp-train tokenize --tokenizer gpt2 -o DIR/data.gpt2.safetensors DIR/data.bin`
    ");
    insta::assert_snapshot!(refusal(&good_llm_c(&[1]), &Tokenizer::Bytes), @r"
    `DIR/data.bin` is a token file, but `data.tokenizer: bytes` expects text
      hint: set `data.tokenizer` to the one that it was made with
    ");
    insta::assert_snapshot!(refusal(&ours(&[1], &facts(1)), &Tokenizer::Bytes), @r"
    `DIR/data.bin` is a token file, but `data.tokenizer: bytes` expects text
      hint: set `data.tokenizer: gpt2`
    ");
}

#[test]
fn a_token_file_that_is_not_whole_is_refused() {
    let folder = Folder::new();
    let refusal = |bytes: &[u8]| folder.refusal(bytes, &Tokenizer::Gpt2);
    let good = good_llm_c(&[1, 2]);
    insta::assert_snapshot!(refusal(&good[..good.len() - 1]), @r"
    `DIR/data.bin` is 1027 bytes long, but its header promises 1028
      hint: it was truncated or extended: create or download it again
    ");
    insta::assert_snapshot!(refusal(&good[..100]), @r"
    `DIR/data.bin` is 100 bytes long, but its header promises 1028
      hint: it was truncated or extended: create or download it again
    ");
    let own = ours(&[1, 2], &facts(8));
    for length in [own.len() - 1, 4000, 20] {
        let message = refusal(&own[..length]);
        assert!(
            message.contains(&format!("is {length} bytes long, but its header promises 4")),
            "{message}"
        );
    }
    assert!(refusal(&[own, vec![0]].concat()).contains("is 4101 bytes long, but its header promises 4100"));
    insta::assert_snapshot!(refusal(b""), @"`DIR/data.bin` is empty");
    insta::assert_snapshot!(refusal(&good_llm_c(&[])), @"`DIR/data.bin` is empty");
}

#[test]
fn a_header_that_is_not_understood_is_refused() {
    let folder = Folder::new();
    let refusal = |bytes: &[u8]| folder.refusal(bytes, &Tokenizer::Gpt2);
    insta::assert_snapshot!(refusal(&llm_c([20_240_520, 3, 1], &[1])), @r"
    `DIR/data.bin` is a token file with an invalid header: of llm.c's kind 20240520 version 1 is known, and it has version 3
      hint: supported are the files of `ddp-train tokenize`, llm.c and NumPy: see `Tokens` in docs/configuration.md
    ");
    let first_line = |bytes: &[u8]| refusal(bytes).lines().next().unwrap().to_owned();
    insta::assert_snapshot!(first_line(&llm_c([20_240_520, 1, -5], &[1])), @"`DIR/data.bin` is a token file with an invalid header: it promises -5 tokens");
    let foreign = |json: &str, data: &[u8]| {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        bytes.extend(data);
        first_line(&bytes)
    };
    let tensor = |name: &str, dtype: &str, shape: &str, end: usize| {
        format!(r#"{{"{name}": {{"dtype": "{dtype}", "shape": {shape}, "data_offsets": [0, {end}]}}}}"#)
    };
    insta::assert_snapshot!(foreign(&tensor("wte", "U16", "[1]", 2), &[0; 2]), @"`DIR/data.bin` is a token file with an invalid header: there is no tensor `tokens`");
    insta::assert_snapshot!(foreign(&tensor("tokens", "F32", "[1]", 4), &[0; 4]), @"`DIR/data.bin` is a token file with an invalid header: tensor `tokens` is F32, expected U16 or U32");
    insta::assert_snapshot!(foreign(&tensor("tokens", "U16", "[1, 1]", 2), &[0; 2]), @"`DIR/data.bin` is a token file with an invalid header: tensor `tokens` has the shape [1, 1], expected one dimension");
    assert!(foreign("{", b"").contains("invalid header: EOF while parsing"));
    let later = r#"{"__metadata__": {"format": "ddp-tokens/2", "tokenizer_hash": "x"}, "tokens": {"dtype": "U16", "shape": [1], "data_offsets": [0, 2]}}"#;
    insta::assert_snapshot!(foreign(later, &[0; 2]), @"`DIR/data.bin` is a token file with an invalid header: `ddp-tokens/1` is known, and it is `ddp-tokens/2`");
}

#[test]
fn tokens_of_another_tokenizer_are_refused() {
    let folder = Folder::new();
    let other = TokenFacts {
        tokenizer: Some("llama.json".into()),
        tokenizer_hash: Some("f00d".into()),
        ..facts(4)
    };
    insta::assert_snapshot!(folder.refusal(&ours(&[1], &other), &Tokenizer::Gpt2), @r"
    `DIR/data.bin` holds tokens of `llama.json`, but `data.tokenizer` is `gpt2`
      hint: set `data.tokenizer` to the one that the file was made with, or make it again with `ddp-train tokenize`
    ");
    let problem = other_tokenizer("tokenizer.json", "tokenizer.json");
    insta::assert_snapshot!(problem, @"holds tokens of `tokenizer.json`, but `data.tokenizer` is `tokenizer.json`, which is a different version of it");
}

#[test]
fn a_number_that_is_no_token_is_named_with_its_place() {
    let folder = Folder::new();
    folder.write("a.bin", &good_llm_c(&[1, 2, 3]));
    folder.write("b.bin", &good_llm_c(&[4, 50_257, 60_000]));
    let tokens = folder.open(&["*.bin"]).unwrap();
    tokens.read(0, &mut [0; 4]).unwrap();
    let error = tokens.read(2, &mut [0; 4]).unwrap_err();
    insta::assert_snapshot!(folder.shown(&error), @r"
    `DIR/b.bin` has the number 50257 at position 1, but the last token of `gpt2` is 50256
      hint: set `data.tokenizer` to the one that the file was made with, or make it again with `ddp-train tokenize`
    ");
}

#[test]
fn a_shard_that_is_exchanged_changes_the_fingerprint() {
    let folder = Folder::new();
    let fingerprint = |tokens: &Tokens| tokens.fingerprint().unwrap();
    folder.write("a.bin", &good_llm_c(&[1, 2, 3]));
    folder.write("b.bin", &good_llm_c(&[4, 5, 6]));
    folder.write("c.bin", &good_llm_c(&[7, 8, 9]));
    let before = fingerprint(&folder.open(&["*.bin"]).unwrap());
    assert!(before.starts_with("9 tokens in 3 files, hash "), "{before}");
    let turned = folder.open(&["a.bin", "c.bin", "b.bin"]).unwrap();
    assert_ne!(fingerprint(&turned), before, "another order");
    folder.write("b.bin", &good_llm_c(&[4, 50, 6]));
    assert_ne!(
        fingerprint(&folder.open(&["*.bin"]).unwrap()),
        before,
        "another file in the middle"
    );
    let one = folder.open(&["a.bin"]).unwrap();
    assert!(fingerprint(&one).starts_with("3 tokens, hash "));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn blocks_are_the_same_wherever_the_files_are_cut(
        lengths in proptest::collection::vec(1_usize..9, 1..6),
        block_size in 1_usize..7,
        held_out in 0_usize..5,
    ) {
        let folder = Folder::new();
        let total: usize = lengths.iter().sum();
        let numbers: Vec<u16> = (0..total as u16).map(|number| number * 3).collect();
        let mut rest = &numbers[..];
        for (index, length) in lengths.iter().enumerate() {
            let (shard, later) = rest.split_at(*length);
            folder.write(&format!("{index}.bin"), &good_llm_c(shard));
            rest = later;
        }
        folder.write("whole", &ours(&numbers, &facts(9)));
        let part = |tokens: Tokens| tokens.part(held_out.min(total)..total);
        let (shards, whole) = (part(folder.open(&["*.bin"]).unwrap()), part(folder.open(&["whole"]).unwrap()));
        prop_assert_eq!(shards.blocks(block_size), whole.blocks(block_size));
        for k in 0..whole.blocks(block_size) {
            let block = |tokens: &Tokens| {
                let (mut inputs, mut targets) = (vec![-5; block_size], vec![-5; block_size]);
                tokens.read_sample(k * block_size as u64, &mut inputs, &mut targets).unwrap();
                (inputs, targets)
            };
            let expected = block(&whole);
            prop_assert_eq!(expected.0[0], 3 * (held_out.min(total) + k as usize * block_size) as i32);
            prop_assert_eq!(block(&shards), expected);
        }
    }
}
