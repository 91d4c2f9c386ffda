//! Texts become token files, and what is wrong with a text or a line is named.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::sys::stat::{Mode, SFlag};

use super::{Report, Request, TokenizeError, Tokenizer, tokenize};
use crate::data::{Tokens, Vocabulary};

/// Words with numbers, and a mark between documents that has another name than usual.
const WORDS: &str = r#"{
    "version": "1.0", "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
    "padding": null, "normalizer": {"type": "Lowercase"}, "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": null, "decoder": null,
    "added_tokens": [{"id": 7, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
                      "normalized": false, "special": true}],
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "one": 1, "two": 2, "three": 3, "<": 4, "s": 5, ">": 6}, "unk_token": "[UNK]"}
}"#;

struct Bench(tempfile::TempDir);

impl Bench {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    fn out(&self) -> PathBuf {
        self.0.path().join("out.safetensors")
    }

    fn run(&self, tokenizer: &Tokenizer, inputs: &[PathBuf]) -> Result<Report, TokenizeError> {
        self.run_with(tokenizer, inputs, |_| {})
    }

    fn run_with(
        &self,
        tokenizer: &Tokenizer,
        inputs: &[PathBuf],
        edit: impl FnOnce(&mut Request<'_>),
    ) -> Result<Report, TokenizeError> {
        let out = self.out();
        let mut request = Request {
            tokenizer,
            end_of_text: None,
            key: "text",
            skip_invalid: false,
            inputs,
            output: &out,
            overwrite: false,
            threads: NonZeroUsize::new(2),
        };
        edit(&mut request);
        tokenize(&request, &mut |_| {})
    }

    fn refusal(&self, tokenizer: &Tokenizer, inputs: &[PathBuf]) -> String {
        let error = self.run(tokenizer, inputs).unwrap_err();
        self.shown(&error)
    }

    fn shown(&self, error: &TokenizeError) -> String {
        let folder: &Path = self.0.path();
        error.to_string().replace(&folder.display().to_string(), "DIR")
    }

    /// The tokens that were written, and the bytes to each.
    fn tokens(&self, tokenizer: &Tokenizer) -> (Vec<i32>, f64) {
        let vocabulary = Arc::new(Vocabulary::of(tokenizer).unwrap());
        let tokens = Tokens::open(&self.out().into(), tokenizer, None, &vocabulary).unwrap();
        let mut out = vec![0; tokens.len()];
        tokens.read(0, &mut out).unwrap();
        (out, tokens.bytes_per_token().unwrap())
    }
}

#[test]
fn documents_come_behind_the_end_of_text() {
    let bench = Bench::new();
    let inputs = [
        bench.write("a.txt", "Hello world"),
        bench.write("b.jsonl", "{\"text\": \"hello world\"}\n\n{\"text\": \"\"}\n"),
        bench.write("empty.txt", ""),
    ];
    let report = bench.run(&Tokenizer::Gpt2, &inputs).unwrap();
    let expected = Report {
        documents: 4,
        tokens: 8,
        text_bytes: 22,
        skipped: 0,
        first_skipped: None,
        has_separator: true,
    };
    assert_eq!(report, expected);
    let (tokens, bytes) = bench.tokens(&Tokenizer::Gpt2);
    assert_eq!(tokens, [50_256, 15_496, 995, 50_256, 31_373, 995, 50_256, 50_256]);
    assert_eq!(bytes, 22.0 / 8.0);
}

#[test]
fn any_number_of_threads_writes_the_same_bytes() {
    let bench = Bench::new();
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/data/python-reference.txt");
    let mut lines = String::new();
    for line in std::fs::read_to_string(&text).unwrap().lines() {
        lines += &serde_json::json!({ "id": 1, "body": line }).to_string();
        lines.push('\n');
    }
    let inputs = [text, bench.write("lines.jsonl", lines)];
    let mut written = Vec::new();
    for threads in [1, 2, 5] {
        let edit = |request: &mut Request<'_>| {
            request.key = "body";
            request.overwrite = true;
            request.threads = NonZeroUsize::new(threads);
        };
        bench.run_with(&Tokenizer::Gpt2, &inputs, edit).unwrap();
        written.push(std::fs::read(bench.out()).unwrap());
    }
    assert!(written[0] == written[1] && written[0] == written[2]);
    assert_eq!(
        std::fs::read_dir(bench.0.path()).unwrap().count(),
        2,
        "no left-over"
    );
}

#[test]
fn a_tokenizer_of_a_file_encodes_whole_documents() {
    let bench = Bench::new();
    let tokenizer = Tokenizer::File(bench.write("words.json", WORDS));
    let inputs = [
        bench.write("a.txt", "One two\nthree <s>"),
        bench.write("b.txt", "four"),
    ];
    let report = bench.run(&tokenizer, &inputs).unwrap();
    assert!(!report.has_separator, "it has none of the usual names");
    // Neither shortened to two tokens, nor with a document's end in the middle of one.
    assert_eq!(bench.tokens(&tokenizer).0, [1, 2, 3, 4, 5, 6, 0]);
    let edit = |request: &mut Request<'_>| {
        request.end_of_text = Some("<s>");
        request.overwrite = true;
    };
    assert!(bench.run_with(&tokenizer, &inputs, edit).unwrap().has_separator);
    assert_eq!(bench.tokens(&tokenizer).0, [7, 1, 2, 3, 4, 5, 6, 7, 0]);
    let error = bench
        .run_with(&tokenizer, &inputs, |request| {
            request.end_of_text = Some("</s>");
            request.overwrite = true;
        })
        .unwrap_err();
    insta::assert_snapshot!(bench.shown(&error), @r"
    `--end-of-text </s>`: `words.json` has no such token
      hint: most tokenizers list it in `added_tokens`; `words.json` is searched for exactly this token
    ");
}

#[test]
fn what_windows_and_python_write_is_read() {
    let bench = Bench::new();
    let lines = [
        "\u{feff}{\"text\": \"one\"}",
        r#"{"score": NaN, "low": -Infinity, "title": "a \"NaN\" \\", "text": "two"}"#,
        r#"{"title": "\udc00", "text": "\ud83d three"}"#,
    ];
    let tokenizer = Tokenizer::File(bench.write("words.json", WORDS));
    let inputs = [
        bench.write("a.jsonl", lines.join("\n")),
        bench.write("b.txt", "\u{feff}one"),
    ];
    let report = bench.run(&tokenizer, &inputs).unwrap();
    assert_eq!(
        bench.tokens(&tokenizer).0,
        [1, 2, 0, 3, 1],
        "the lone half is an unknown word"
    );
    assert_eq!((report.documents, report.skipped), (4, 0));
    std::fs::remove_file(bench.out()).unwrap();
    let refused = bench.refusal(&tokenizer, &[bench.write("c.jsonl", r#"{"text": NaN}"#)]);
    assert!(
        refused.ends_with("not a document: expected value at column 10"),
        "{refused}"
    );
}

/// One bad line of a million ended the whole conversion.
#[test]
fn lines_without_a_document_can_be_left_out_and_are_counted() {
    let bench = Bench::new();
    let tokenizer = Tokenizer::File(bench.write("words.json", WORDS));
    let content = b"{\"text\": \"one\"}\n{\"text\": null}\n{\"text\": \"\xff\"}\n{\"txt\": \"x\"}\n{\"text\": \"two\"}\n{";
    let inputs = [bench.write("a.jsonl", content)];
    let skip = |request: &mut Request<'_>| request.skip_invalid = true;
    let report = bench.run_with(&tokenizer, &inputs, skip).unwrap();
    assert_eq!(bench.tokens(&tokenizer).0, [1, 2]);
    assert_eq!((report.documents, report.skipped), (2, 4));
    let first = report.first_skipped.unwrap();
    assert!(
        first.contains("a.jsonl`, line 2: not a document: invalid type: null, expected a string"),
        "{first}"
    );
    let inputs = [bench.write("b.jsonl", "[]")];
    let none = bench.run_with(&tokenizer, &inputs, |request| {
        (request.skip_invalid, request.overwrite) = (true, true);
    });
    let none = none.unwrap_err().to_string();
    assert!(none.contains("b.jsonl`, line 1: not a document"), "{none}");
}

/// `generate` ended a text at a token that `tokenize` had not put between texts.
#[test]
fn documents_come_behind_the_token_that_ends_a_text() {
    let bench = Bench::new();
    for name in ["<|end_of_text|>", "</s>"] {
        let tokenizer = Tokenizer::File(bench.write("words.json", WORDS.replace("<s>", name)));
        let edit = |request: &mut Request<'_>| request.overwrite = true;
        let report = bench
            .run_with(&tokenizer, &[bench.write("a.txt", "one")], edit)
            .unwrap();
        assert!(report.has_separator);
        assert_eq!(bench.tokens(&tokenizer).0, [7, 1], "{name}");
    }
}

#[test]
fn what_is_no_text_is_named_with_its_line() {
    let bench = Bench::new();
    let refusal = |name: &str, content: &[u8]| bench.refusal(&Tokenizer::Gpt2, &[bench.write(name, content)]);
    insta::assert_snapshot!(refusal("a.txt", b"one\ntwo\nth\xffree\n"), @r"
    `DIR/a.txt`, line 3: not UTF-8
      hint: `iconv` converts other texts; a packed file must be unpacked first
    ");
    // In a later piece than the first.
    let long = [&b"word and word\n".repeat(40_000)[..], b"\xff"].concat();
    insta::assert_snapshot!(refusal("a.txt", &long), @r"
    `DIR/a.txt`, line 40001: not UTF-8
      hint: `iconv` converts other texts; a packed file must be unpacked first
    ");
    let good = "{\"text\": \"x\"}\n";
    let line = |bad: &str| refusal("a.jsonl", format!("{good}\n{good}{bad}\n{good}").as_bytes());
    insta::assert_snapshot!(line("{\"text\": "), @"`DIR/a.jsonl`, line 4: not a document: EOF while parsing a value at column 9");
    insta::assert_snapshot!(line("{\"txt\": \"x\"}"), @r"
    `DIR/a.jsonl`, line 4: the object has no field `text`
      hint: set the field with the text by `--key`
    ");
    insta::assert_snapshot!(refusal("b.jsonl", b"{\"text\": \"x\"}\n{\"text\": \"\xff\"}\n"), @r"
    `DIR/b.jsonl`, line 2: not UTF-8
      hint: `iconv` converts other texts; a packed file must be unpacked first
    ");
    insta::assert_snapshot!(refusal("c.jsonl", b"\n"), @"the inputs contain no text, so there are no tokens");
    let gone = bench.0.path().join("gone.txt");
    insta::assert_snapshot!(bench.refusal(&Tokenizer::Gpt2, &[gone]), @"`DIR/gone.txt` cannot be read: No such file or directory (os error 2)");
    insta::assert_snapshot!(bench.refusal(&Tokenizer::Gpt2, &[bench.0.path().to_owned()]), @"`DIR` is not a regular file");
    assert!(!bench.out().exists());
    assert!(!bench.0.path().join(".out.safetensors.tokenizing").exists());
}

#[test]
fn an_output_that_is_there_stays() {
    let bench = Bench::new();
    let inputs = [bench.write("a.txt", "Hello world")];
    std::fs::write(bench.out(), "precious").unwrap();
    insta::assert_snapshot!(bench.refusal(&Tokenizer::Gpt2, &inputs), @r"
    `DIR/out.safetensors` already exists
      hint: replace it with `--overwrite`, or choose a different name with `-o`
    ");
    let bad = [bench.write("bad.txt", b"\xff")];
    let overwrite = |request: &mut Request<'_>| request.overwrite = true;
    bench.run_with(&Tokenizer::Gpt2, &bad, overwrite).unwrap_err();
    assert_eq!(
        std::fs::read(bench.out()).unwrap(),
        b"precious",
        "until the new one is whole"
    );
    let error = bench
        .run_with(&Tokenizer::Gpt2, &[bench.out()], |request| {
            request.overwrite = true;
        })
        .unwrap_err();
    insta::assert_snapshot!(bench.shown(&error), @r"
    `DIR/out.safetensors` is an input and cannot also be the output
      hint: choose a different name with `-o`
    ");
    bench
        .run_with(&Tokenizer::Gpt2, &inputs, |request| request.overwrite = true)
        .unwrap();
    assert_eq!(bench.tokens(&Tokenizer::Gpt2).0, [50_256, 15_496, 995]);
}

#[test]
fn only_a_regular_file_is_replaced() {
    let bench = Bench::new();
    let inputs = [bench.write("a.txt", "Hello world")];
    let target = bench.write("target", "precious");
    let kind = |path: &Path| path.symlink_metadata().unwrap().file_type();
    let overwrite = |request: &mut Request<'_>| request.overwrite = true;
    let refused = |path: &Path| {
        let before = kind(path);
        let error = bench.run_with(&Tokenizer::Gpt2, &inputs, overwrite).unwrap_err();
        assert_eq!(kind(path), before);
        bench.shown(&error)
    };
    std::os::unix::fs::symlink(&target, bench.out()).unwrap();
    insta::assert_snapshot!(refused(&bench.out()), @r"
    `DIR/out.safetensors` is not a regular file, and is not replaced
      hint: choose a different name with `-o`; for a symbolic link, the name of the file that it points to
    ");
    assert_eq!(std::fs::read(&target).unwrap(), b"precious");
    std::fs::remove_file(bench.out()).unwrap();
    nix::unistd::mkfifo(&bench.out(), Mode::S_IRWXU).unwrap();
    assert!(refused(&bench.out()).contains("is not a regular file"));
    std::fs::remove_file(bench.out()).unwrap();
    // Only root makes devices, and not everywhere: this one is the null device, under a name of ours.
    let null = nix::sys::stat::makedev(1, 3);
    if nix::sys::stat::mknod(&bench.out(), SFlag::S_IFCHR, Mode::S_IRWXU, null).is_ok() {
        assert!(refused(&bench.out()).contains("is not a regular file"));
        std::fs::remove_file(bench.out()).unwrap();
    }
    // Nor is the place where the file is written one.
    let hidden = bench.0.path().join(".out.safetensors.tokenizing");
    nix::unistd::mkfifo(&hidden, Mode::S_IRWXU).unwrap();
    let _reader = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&hidden)
        .unwrap();
    let error = bench.run(&Tokenizer::Gpt2, &inputs).unwrap_err();
    assert!(
        bench.shown(&error).contains(".tokenizing` is not a regular file"),
        "{error}"
    );
}

#[test]
fn threads_that_would_have_nothing_to_do_are_not_started() {
    let bench = Bench::new();
    let inputs = [bench.write("a.txt", "Hello world")];
    let out = bench.out();
    let request = Request {
        tokenizer: &Tokenizer::Gpt2,
        end_of_text: None,
        key: "text",
        skip_invalid: false,
        inputs: &inputs,
        output: &out,
        overwrite: false,
        threads: NonZeroUsize::new(300),
    };
    let mut started = 0;
    tokenize(&request, &mut |_| started = rayon::current_num_threads()).unwrap();
    assert_eq!(started, 128, "one for each piece of a batch");
}

#[test]
fn two_do_not_write_the_same_file() {
    let bench = Bench::new();
    let inputs = [bench.write("a.txt", "Hello world")];
    let _other = super::run::Output::create(&bench.out(), false).unwrap();
    insta::assert_snapshot!(bench.refusal(&Tokenizer::Gpt2, &inputs), @r"
    `DIR/out.safetensors` is being written by another `ddp-train tokenize`
      hint: wait for it, or choose a different name with `-o`
    ");
}

#[test]
fn what_cannot_make_tokens_is_refused() {
    let bench = Bench::new();
    let inputs = [bench.write("a.txt", "x")];
    insta::assert_snapshot!(bench.refusal(&Tokenizer::Bytes, &inputs), @r"
    `--tokenizer bytes` needs no token file: texts are trained on as they are
      hint: name the text in `data.train`, with `data.tokenizer: bytes`
    ");
    let random = WORDS.replace("WordLevel", "Unknown");
    let tokenizer = Tokenizer::File(bench.write("random.json", random));
    insta::assert_snapshot!(bench.refusal(&tokenizer, &inputs), @r"
    `DIR/random.json` is not a tokenizer file: data did not match any variant of untagged enum ModelUntagged at line 8 column 1
      hint: `data.tokenizer` expects a `tokenizer.json` of Hugging Face tokenizers
    ");
    let bpe = r#"{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "dropout": 0.5, "vocab": {"a": 0}, "merges": []}}"#;
    let tokenizer = Tokenizer::File(bench.write("bpe.json", bpe));
    insta::assert_snapshot!(bench.refusal(&tokenizer, &inputs), @r"
    `DIR/bpe.json` is not a tokenizer file: its `dropout` gives different tokens each time; set it to `null`
      hint: `data.tokenizer` expects a `tokenizer.json` of Hugging Face tokenizers
    ");
}
