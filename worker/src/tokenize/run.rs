//! Texts in, one token file out, which appears when it is whole.

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{self, BufWriter, Seek as _, Write as _};
use std::num::NonZeroUsize;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;

use rayon::iter::{IntoParallelRefIterator as _, ParallelIterator as _};
use safetensors::tensor::Dtype;

use super::encoder::Encoder;
use super::source::{InputKind, InputReader, MAX_THREADS, Piece, line_ends, text_of};
use super::{TokenizeError, Tokenizer};
use crate::data::token_file::{BYTE_ORDER_MARK, HEADER_BYTES, dtype_of_vocabulary, header, width};
use crate::data::{DataError, TokenFacts};

/// Bytes that are written at once.
const BUFFER_BYTES: usize = 1 << 20;

/// What to tokenize, and how.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Makes the tokens.
    pub tokenizer: &'a Tokenizer,
    /// Name of the token before each document; without one the first of [`ENDS_OF_TEXT`](super::ENDS_OF_TEXT) that there is.
    pub end_of_text: Option<&'a str>,
    /// Name of the field with the text, in lines of JSON.
    pub key: &'a str,
    /// Leave out lines that hold no document, and count them.
    pub skip_invalid: bool,
    /// Texts, and files of JSON lines, which end in `.jsonl`.
    pub inputs: &'a [PathBuf],
    /// The token file to make.
    pub output: &'a Path,
    /// Replace a file that is there.
    pub overwrite: bool,
    /// Threads that encode, at most 128; by default one per core.
    pub threads: Option<NonZeroUsize>,
}

const NO_TOKENS_OF_BYTES: &str = "`--tokenizer bytes` needs no token file: texts are trained on as they are\n  \
    hint: name the text in `data.train`, with `data.tokenizer: bytes`";

/// Progress of a tokenization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the inputs that are done.
    pub bytes: u64,
    /// Bytes of all inputs.
    pub total: u64,
    /// Tokens so far.
    pub tokens: u64,
}

/// The result of a tokenization.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Documents of the inputs.
    pub documents: u64,
    /// Tokens of the file, those between documents included.
    pub tokens: u64,
    /// Bytes of the documents, in UTF-8.
    pub text_bytes: u64,
    /// Lines that were left out.
    pub skipped: u64,
    /// What is wrong with the first of them.
    pub first_skipped: Option<String>,
    /// False if nothing separates the documents, because the vocabulary has no such token.
    pub has_separator: bool,
}

/// A piece after tokenization.
#[derive(Default)]
struct Encoded {
    /// Tokens as the file stores them.
    tokens: Vec<u8>,
    documents: u64,
    text_bytes: u64,
    skipped: u64,
    first_skipped: Option<String>,
}

/// Makes a token file of texts. It appears when it is whole; after an error the output is as it was before. The same
/// inputs make the same file, whatever the number of threads. `progress` is called after every batch.
pub fn tokenize(
    request: &Request<'_>,
    progress: &mut (dyn FnMut(Progress) + Send),
) -> Result<Report, TokenizeError> {
    if *request.tokenizer == Tokenizer::Bytes {
        return Err(TokenizeError::Refused(NO_TOKENS_OF_BYTES.to_owned()));
    }
    let encoder = Encoder::new(request.tokenizer, request.end_of_text)?;
    let source = InputReader::new(request.inputs, encoder.may_cut())?;
    let is_output = |input: &PathBuf| same_file(input, request.output);
    if let Some(path) = request.inputs.iter().find(|path| is_output(path)) {
        let problem = "is an input and cannot also be the output";
        return Err(DataError::file(path, problem, Some(OTHER_NAME)).into());
    }
    let output = Output::create(request.output, request.overwrite)?;
    let threads = request.threads.or_else(|| available_parallelism().ok());
    let threads = threads.map_or(1, NonZeroUsize::get).min(MAX_THREADS);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(|e| TokenizeError::Threads(e.to_string()))?;
    pool.install(|| run(&encoder, request, source, output, progress))
}

fn run(
    encoder: &Encoder,
    request: &Request<'_>,
    mut source: InputReader<'_>,
    mut output: Output,
    progress: &mut (dyn FnMut(Progress) + Send),
) -> Result<Report, TokenizeError> {
    let dtype = dtype_of_vocabulary(encoder.vocabulary.size);
    let mut report = Report {
        documents: 0,
        tokens: 0,
        text_bytes: 0,
        skipped: 0,
        first_skipped: None,
        has_separator: encoder.end_of_text.is_some(),
    };
    let mut batch = source.next_batch()?;
    while !batch.is_empty() {
        let bytes = source.read;
        let encode = || -> Vec<_> {
            let pieces = batch.par_iter();
            pieces
                .map(|piece| encode(encoder, request, dtype, piece))
                .collect()
        };
        let (encoded, next) = rayon::join(encode, || source.next_batch());
        // In order, so that the first of several errors is returned.
        for piece in encoded {
            let piece = piece?;
            output.write(&piece.tokens)?;
            report.documents += piece.documents;
            report.text_bytes += piece.text_bytes;
            report.skipped += piece.skipped;
            report.first_skipped = report.first_skipped.or(piece.first_skipped);
            report.tokens += (piece.tokens.len() / width(dtype)) as u64;
        }
        progress(Progress {
            bytes,
            total: source.total,
            tokens: report.tokens,
        });
        batch = next?;
    }
    if report.tokens == 0 {
        let why = "the inputs contain no text, so there are no tokens".to_owned();
        return Err(TokenizeError::Refused(report.first_skipped.unwrap_or(why)));
    }
    let facts = TokenFacts {
        tokenizer: Some(encoder.vocabulary.name.clone()),
        tokenizer_hash: encoder.vocabulary.hash.clone(),
        vocab_size: Some(encoder.vocabulary.size),
        documents: Some(report.documents),
        text_bytes: Some(report.text_bytes),
    };
    output.publish(dtype, &facts)?;
    Ok(report)
}

fn encode(
    encoder: &Encoder,
    request: &Request<'_>,
    dtype: Dtype,
    piece: &Piece,
) -> Result<Encoded, TokenizeError> {
    let mut encoded = Encoded::default();
    let (mut skipped, mut first_skipped) = (0, None);
    let mut tokens = Vec::new();
    let mut document = |text: &str, begins: bool, line: u64| {
        if begins {
            tokens.extend(encoder.end_of_text);
            encoded.documents += 1;
        }
        encoded.text_bytes += text.len() as u64;
        let done = encoder.encode(text, &mut tokens);
        done.map_err(|cause| {
            let problem = format!("the tokenizer cannot encode it: {cause}");
            TokenizeError::input(&piece.path, line, &problem)
        })
    };
    match piece.kind {
        InputKind::Text => {
            let mark = piece
                .bytes
                .strip_prefix(BYTE_ORDER_MARK)
                .filter(|_| piece.is_first);
            let text = utf8(piece, mark.unwrap_or(&piece.bytes), piece.line)?;
            document(text, piece.is_first, piece.line)?;
        }
        InputKind::Lines => {
            for (line, bytes) in (piece.line..).zip(piece.bytes.split(|byte| *byte == b'\n')) {
                if bytes.trim_ascii().is_empty() {
                    continue;
                }
                let text = utf8(piece, bytes, line).and_then(|text| {
                    let text = text_of(text, request.key);
                    text.map_err(|problem| TokenizeError::input(&piece.path, line, &problem))
                });
                match text {
                    Err(error) if request.skip_invalid => {
                        skipped += 1;
                        first_skipped.get_or_insert_with(|| error.to_string());
                    }
                    text => document(&text?, true, line)?,
                }
            }
        }
    }
    (encoded.skipped, encoded.first_skipped) = (skipped, first_skipped);
    encoded.tokens = store(&tokens, dtype, encoder.vocabulary.size);
    Ok(encoded)
}

const NOT_UTF8: &str =
    "not UTF-8\n  hint: `iconv` converts other texts; a packed file must be unpacked first";

/// The text of `bytes`, which begin in `line`.
fn utf8<'a>(piece: &Piece, bytes: &'a [u8], line: u64) -> Result<&'a str, TokenizeError> {
    std::str::from_utf8(bytes).map_err(|e| {
        let good = &bytes[..e.valid_up_to()];
        TokenizeError::input(&piece.path, line + line_ends(good), NOT_UTF8)
    })
}

/// Tokens as a file stores them.
fn store(tokens: &[u32], dtype: Dtype, vocabulary: usize) -> Vec<u8> {
    assert!(
        tokens.iter().all(|token| (*token as usize) < vocabulary),
        "a token beyond the vocabulary"
    );
    let stored = |token: &u32| token.to_le_bytes().into_iter().take(width(dtype));
    tokens.iter().flat_map(stored).collect()
}

/// True if both are there, and one file.
fn same_file(one: &Path, other: &Path) -> bool {
    let (one, other) = (one.canonicalize(), other.canonicalize());
    matches!((one, other), (Ok(one), Ok(other)) if one == other)
}

const OTHER_NAME: &str = "choose a different name with `-o`";

/// Only a regular file is replaced: a rename would put a file in the place of a device.
fn not_a_file(path: &Path) -> TokenizeError {
    let hint =
        "choose a different name with `-o`; for a symbolic link, the name of the file that it points to";
    DataError::file(path, "is not a regular file, and is not replaced", Some(hint)).into()
}

fn busy(path: &Path) -> TokenizeError {
    let hint = "wait for it, or choose a different name with `-o`";
    DataError::file(
        path,
        "is being written by another `ddp-train tokenize`",
        Some(hint),
    )
    .into()
}

/// A file beside its final place. What was at that place stays until the new file is whole and on the disk.
pub(super) struct Output {
    path: PathBuf,
    temporary: PathBuf,
    file: BufWriter<File>,
    /// Bytes of the tokens so far.
    bytes: usize,
    /// It is in its final place.
    is_published: bool,
}

impl Output {
    /// Begins a file that no other process writes.
    pub(super) fn create(path: &Path, overwrite: bool) -> Result<Self, TokenizeError> {
        let Some(name) = path.file_name().filter(|_| !path.is_dir()) else {
            let source = io::Error::from(io::ErrorKind::IsADirectory);
            return Err(TokenizeError::io("write", path, source));
        };
        if let Ok(there) = path.symlink_metadata() {
            if !there.is_file() {
                return Err(not_a_file(path));
            }
            if !overwrite {
                let hint = "replace it with `--overwrite`, or choose a different name with `-o`";
                return Err(DataError::file(path, "already exists", Some(hint)).into());
            }
        }
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(".tokenizing");
        let temporary = path.with_file_name(hidden);
        let failed = |e| TokenizeError::io("create", &temporary, e);
        let mut options = File::options();
        // A pipe would otherwise be waited for until somebody reads it.
        options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        // Cut to nothing only when it is ours.
        let opened = options.write(true).create(true).truncate(false).open(&temporary);
        let file = opened.map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(not_a_file(&temporary));
        }
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(busy(path)),
            Err(TryLockError::Error(e)) => return Err(failed(e)),
        }
        // The process that had it locked may have renamed it in between.
        let is_there = fs::metadata(&temporary).is_ok_and(|there| {
            file.metadata()
                .is_ok_and(|ours| (ours.dev(), ours.ino()) == (there.dev(), there.ino()))
        });
        if !is_there {
            return Err(busy(path));
        }
        file.set_len(0).map_err(failed)?;
        let mut output = Self {
            path: path.to_owned(),
            file: BufWriter::with_capacity(BUFFER_BYTES, file),
            bytes: 0,
            is_published: false,
            temporary,
        };
        output.write(&[0; HEADER_BYTES])?;
        output.bytes = 0;
        Ok(output)
    }

    /// Appends tokens as they are stored.
    pub(super) fn write(&mut self, tokens: &[u8]) -> Result<(), TokenizeError> {
        let written = self.file.write_all(tokens);
        written.map_err(|e| TokenizeError::io("write", &self.temporary, e))?;
        self.bytes += tokens.len();
        Ok(())
    }

    /// Writes the header, syncs everything, and puts the file in its place.
    pub(super) fn publish(mut self, dtype: Dtype, facts: &TokenFacts) -> Result<(), TokenizeError> {
        let tokens = self.bytes / width(dtype);
        let header = header(dtype, tokens, facts).ok_or_else(|| {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "the tokenizer's name is too long");
            TokenizeError::io("write", &self.path, source)
        })?;
        let written = self.finish(&header);
        written.map_err(|e| TokenizeError::io("write", &self.path, e))
    }

    fn finish(&mut self, header: &[u8]) -> io::Result<()> {
        self.file.rewind()?;
        self.file.write_all(header)?;
        self.file.flush()?;
        self.file.get_ref().sync_all()?;
        fs::rename(&self.temporary, &self.path)?;
        self.is_published = true;
        File::open(ddp_proto::paths::folder_of(&self.path))?.sync_all()
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if !self.is_published {
            // A left-over would only be overwritten next time.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}
