//! What can be wrong with the data, and with one file of it.

use std::path::{Path, PathBuf};

use ddp_proto::words::counted;

/// Most files that the data of one key lie in: each is kept open.
pub const MAX_FILES: usize = 4096;

/// The data cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DataError {
    /// One of the files, or the tokenizer's.
    #[error("`{}` {problem}{}", path.display(), problem.hint_line())]
    File {
        /// The file, or what was to name some.
        path: PathBuf,
        /// What is wrong with it.
        problem: FileProblem,
    },
    /// There are too few tokens for a single sample.
    #[error(
        "`{}` has {tokens} tokens of {part}, a sample needs {needed}\n  hint: use a longer text or a smaller `model.block_size`",
        path.display()
    )]
    TooShort {
        /// The file, or the first of several.
        path: PathBuf,
        /// Tokens of this part of it.
        tokens: u64,
        /// What the part is for: `training` or `validation`.
        part: &'static str,
        /// One more than the block size.
        needed: u64,
    },
    /// Somebody changed the file while it was read.
    #[error(
        "`{}` shrank from {was} to {is} bytes while it was in use\n  hint: write a new file and rename it over the old one instead of truncating it",
        path.display()
    )]
    Shrank {
        /// The file.
        path: PathBuf,
        /// Bytes when it was opened.
        was: u64,
        /// Bytes now.
        is: u64,
    },
    /// A bug of the caller.
    #[error("`{}`: {what}", path.display())]
    Misuse {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        what: String,
    },
}

impl DataError {
    /// Something is wrong with the file at `path`.
    pub(crate) fn file(path: &Path, problem: FileProblem) -> Self {
        Self::File {
            path: path.to_owned(),
            problem,
        }
    }
}

/// What is wrong with a file. Shown behind its name: "`data.bin` is empty".
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileProblem {
    /// It cannot be opened, mapped or listed.
    #[error("cannot be read: {cause}")]
    Unreadable {
        /// The system's words.
        cause: String,
    },
    /// A folder or a device, where a file is needed.
    #[error("is not a regular file")]
    NotAFile,
    /// It has no bytes, or no tokens.
    #[error("is empty")]
    Empty,
    /// A path with a `*` names nothing.
    #[error("matches no file")]
    NoMatch,
    /// A `*` where none is understood.
    #[error("has a `*` in the name of a folder")]
    StarInFolder,
    /// A path with a `*` names more files than are opened.
    #[error("matches {}, and at most {MAX_FILES} are opened", counted(*files, "file"))]
    TooMany {
        /// How many.
        files: usize,
    },
    /// A text, where tokens are needed.
    #[error("is no token file, and `data.tokenizer: {tokenizer}` needs one")]
    NoTokens {
        /// The tokenizer of the configuration.
        tokenizer: String,
        /// The command that makes tokens of it.
        command: String,
    },
    /// Tokens, where a text is needed.
    #[error("is a token file, and `data.tokenizer: bytes` takes texts")]
    Tokens {
        /// The tokenizer that it was made with, if it says so.
        tokenizer: Option<String>,
    },
    /// A header of a known kind with contents that are not known.
    #[error("is a token file whose header is wrong: {0}")]
    Header(String),
    /// The header and the file are at odds.
    #[error("is {found} bytes long, but its header promises {promised}")]
    Length {
        /// Bytes that there must be.
        promised: u64,
        /// Bytes that there are.
        found: u64,
    },
    /// The tokens are another tokenizer's.
    #[error(
        "holds tokens of `{found}`, but `data.tokenizer` is `{wanted}`{}",
        same_name(found, wanted)
    )]
    OtherTokenizer {
        /// The name that the file tells.
        found: String,
        /// That of the configuration.
        wanted: String,
    },
    /// A number that is no token.
    #[error(
        "has the number {token} at position {position}, but the vocabulary of `{tokenizer}` ends with {last}"
    )]
    NoSuchToken {
        /// The number.
        token: u32,
        /// Tokens of the file before it.
        position: u64,
        /// The tokenizer of the configuration.
        tokenizer: String,
        /// Its last token.
        last: u32,
    },
    /// Not what a tokenizer's file has to be.
    #[error("is not a tokenizer's file: {cause}")]
    NoTokenizer {
        /// Why.
        cause: String,
    },
}

/// Two versions of one tokenizer have the same name.
fn same_name(found: &str, wanted: &str) -> &'static str {
    if found == wanted {
        ", which is another version of it"
    } else {
        ""
    }
}

impl FileProblem {
    /// The next step, where there is an obvious one.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Unreadable { .. } | Self::NotAFile | Self::Empty => return None,
            Self::NoMatch => "a `*` stands for any characters of a file's name".into(),
            Self::StarInFolder => "a `*` may stand in the last part of a path only: name the folders one by one".into(),
            Self::TooMany { .. } => "join them to fewer files".into(),
            Self::NoTokens { command, .. } => {
                format!("make one, and name that instead: `{command}`")
            }
            Self::Tokens { tokenizer: Some(tokenizer) } => format!("set `data.tokenizer: {tokenizer}`"),
            Self::Tokens { tokenizer: None } => "set `data.tokenizer` to the one that it was made with".into(),
            Self::Header(_) => {
                "known are the files of `ddp-train tokenize` and those of llm.c: see `Tokens` in docs/configuration.md".into()
            }
            Self::Length { .. } => "it was cut short, or written on: make it again, or fetch it again".into(),
            Self::OtherTokenizer { .. } | Self::NoSuchToken { .. } => {
                "set `data.tokenizer` to the one that the file was made with, or make it again with `ddp-train tokenize`".into()
            }
            Self::NoTokenizer { .. } => "`data.tokenizer` takes a `tokenizer.json` of Hugging Face's tokenizers".into(),
        })
    }

    /// The hint as the end of a message.
    fn hint_line(&self) -> String {
        self.hint()
            .map_or_else(String::new, |hint| format!("\n  hint: {hint}"))
    }
}
