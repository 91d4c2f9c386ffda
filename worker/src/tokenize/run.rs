//! Texts in, one token file out.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;

use rayon::iter::{IntoParallelRefIterator as _, ParallelIterator as _};

use super::encoder::Encoder;
use super::output::Output;
use super::source::text_of;
use super::source::{InputKind, InputReader, MAX_THREADS, Piece, line_ends};
use super::{TokenizeError, Tokenizer};
use crate::data::{TokenFacts, Width};

/// What is to be done.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Makes the tokens.
    pub tokenizer: &'a Tokenizer,
    /// Name of the token before each document; without one [`END_OF_TEXT`](super::END_OF_TEXT), where there is one.
    pub end_of_text: Option<&'a str>,
    /// Name of the field with the text, in lines of JSON.
    pub key: &'a str,
    /// Texts, and files of JSON lines, which end in `.jsonl`.
    pub inputs: &'a [PathBuf],
    /// The token file to make.
    pub output: &'a Path,
    /// Replace a file that is there.
    pub overwrite: bool,
    /// Threads that encode, of which at most 128 are started; none: one a core.
    pub threads: Option<NonZeroUsize>,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the inputs that are done.
    pub bytes: u64,
    /// Bytes of all inputs.
    pub total: u64,
    /// Tokens so far.
    pub tokens: u64,
}

/// What it came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Documents of the inputs.
    pub documents: u64,
    /// Tokens of the file, those between documents included.
    pub tokens: u64,
    /// Bytes of the documents, in UTF-8.
    pub text_bytes: u64,
    /// False if nothing separates the documents, because the vocabulary has no such token.
    pub has_separator: bool,
}

/// What has become of a piece.
#[derive(Default)]
struct Encoded {
    /// As the file stores them.
    tokens: Vec<u8>,
    documents: u64,
    text_bytes: u64,
}

/// Makes a token file of texts. It appears when it is whole; after an error the output is as it was before. The same
/// inputs make the same file, whatever the number of threads. `progress` hears of every batch.
pub fn tokenize(
    request: &Request<'_>,
    progress: &mut (dyn FnMut(Progress) + Send),
) -> Result<Report, TokenizeError> {
    let encoder = Encoder::new(request.tokenizer, request.end_of_text)?;
    let source = InputReader::new(request.inputs, encoder.may_cut())?;
    let is_output = |input: &PathBuf| same_file(input, request.output);
    if let Some(path) = request.inputs.iter().find(|path| is_output(path)) {
        return Err(TokenizeError::IsInput { path: path.clone() });
    }
    let output = Output::create(request.output, request.overwrite)?;
    let threads = request.threads.or_else(|| available_parallelism().ok());
    let threads = threads.map_or(1, NonZeroUsize::get).min(MAX_THREADS);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(|e| TokenizeError::Threads(e.to_string()))?;
    pool.install(|| run(&encoder, request.key, source, output, progress))
}

fn run(
    encoder: &Encoder,
    key: &str,
    mut source: InputReader<'_>,
    mut output: Output,
    progress: &mut (dyn FnMut(Progress) + Send),
) -> Result<Report, TokenizeError> {
    let width = Width::of_vocabulary(encoder.vocabulary.size);
    let mut report = Report {
        documents: 0,
        tokens: 0,
        text_bytes: 0,
        has_separator: encoder.end_of_text.is_some(),
    };
    let mut batch = source.next_batch()?;
    while !batch.is_empty() {
        let bytes = source.read;
        let encode = || -> Vec<_> {
            let pieces = batch.par_iter();
            pieces.map(|piece| encode(encoder, key, width, piece)).collect()
        };
        let (encoded, next) = rayon::join(encode, || source.next_batch());
        // In order, so that of several errors the first one is told.
        for piece in encoded {
            let piece = piece?;
            output.write(&piece.tokens)?;
            report.documents += piece.documents;
            report.text_bytes += piece.text_bytes;
            report.tokens += (piece.tokens.len() / width.bytes()) as u64;
        }
        progress(Progress {
            bytes,
            total: source.total,
            tokens: report.tokens,
        });
        batch = next?;
    }
    if report.tokens == 0 {
        return Err(TokenizeError::NoTokens);
    }
    let facts = TokenFacts {
        tokenizer: Some(encoder.vocabulary.name.clone()),
        tokenizer_hash: encoder.vocabulary.hash.clone(),
        vocab_size: Some(encoder.vocabulary.size),
        documents: Some(report.documents),
        text_bytes: Some(report.text_bytes),
    };
    output.publish(width, &facts)?;
    Ok(report)
}

fn encode(encoder: &Encoder, key: &str, width: Width, piece: &Piece) -> Result<Encoded, TokenizeError> {
    let mut encoded = Encoded::default();
    let mut tokens = Vec::new();
    let mut document = |text: &str, begins: bool, line: u64| {
        if begins {
            tokens.extend(encoder.end_of_text);
            encoded.documents += 1;
        }
        encoded.text_bytes += text.len() as u64;
        let done = encoder.encode(text, &mut tokens);
        done.map_err(|cause| TokenizeError::Encode {
            path: piece.path.clone(),
            line,
            cause,
        })
    };
    match piece.kind {
        InputKind::Text => document(utf8(piece, &piece.bytes, piece.line)?, piece.is_first, piece.line)?,
        InputKind::Lines => {
            for (line, bytes) in (piece.line..).zip(piece.bytes.split(|byte| *byte == b'\n')) {
                if bytes.trim_ascii().is_empty() {
                    continue;
                }
                let text = text_of(utf8(piece, bytes, line)?, key);
                let text = text.map_err(|what| TokenizeError::Record {
                    path: piece.path.clone(),
                    line,
                    what,
                })?;
                document(&text, true, line)?;
            }
        }
    }
    encoded.tokens = store(&tokens, width, encoder.vocabulary.size);
    Ok(encoded)
}

/// The text of `bytes`, which begin in `line`.
fn utf8<'a>(piece: &Piece, bytes: &'a [u8], line: u64) -> Result<&'a str, TokenizeError> {
    std::str::from_utf8(bytes).map_err(|e| {
        let good = &bytes[..e.valid_up_to()];
        TokenizeError::NotUtf8 {
            path: piece.path.clone(),
            line: line + line_ends(good),
        }
    })
}

/// Tokens as a file stores them.
fn store(tokens: &[u32], width: Width, vocabulary: usize) -> Vec<u8> {
    assert!(
        tokens.iter().all(|token| (*token as usize) < vocabulary),
        "a token beyond the vocabulary"
    );
    match width {
        Width::U8 => tokens.iter().map(|token| *token as u8).collect(),
        Width::U16 => tokens
            .iter()
            .flat_map(|token| (*token as u16).to_le_bytes())
            .collect(),
        Width::U32 => tokens.iter().flat_map(|token| token.to_le_bytes()).collect(),
    }
}

/// True if both are there, and one file.
fn same_file(one: &Path, other: &Path) -> bool {
    match (one.canonicalize(), other.canonicalize()) {
        (Ok(one), Ok(other)) => one == other,
        _ => false,
    }
}
