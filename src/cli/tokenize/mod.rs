//! `ddp-train tokenize`: turns texts into a token file.
//!
//! | file | what it holds |
//! |---|---|
//! | `bar.rs` | how far it is, on a terminal |
//! | `answer.rs` | what it came to, and what to write into a configuration |

mod answer;
mod bar;

use std::io::Write as _;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use ddp_proto::exit;
use ddp_worker::tokenize::{Request, TokenizeError, Tokenizer, tokenize};

use super::error::fail;
use super::values::one_or_more;

/// Exit code where the machine is at fault, and not what was asked for.
const FAILED: u8 = 1;

/// Turn texts into a token file for `data.train` and `data.val`.
///
/// Each document follows an end-of-text token (`<|endoftext|>`), as in the files of llm.c. A file that ends in
/// `.jsonl` has one document per line; any other file is one document. The token file is a safetensors file with one
/// tensor `tokens`, which Python can read: `safetensors.numpy.load_file(path)["tokens"]`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// `gpt2`, or the path of a `tokenizer.json` of Hugging Face's tokenizers
    #[arg(long, value_name = "gpt2|FILE.json", value_parser = tokenizer)]
    tokenizer: Tokenizer,
    /// Token file to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Texts in UTF-8, and `.jsonl` files
    #[arg(value_name = "INPUT", required = true)]
    inputs: Vec<PathBuf>,
    /// Field of each JSON line that holds the text
    #[arg(long, value_name = "NAME", default_value = "text")]
    key: String,
    /// Token before each document [default: `<|endoftext|>`, if the vocabulary has it]
    #[arg(long, value_name = "TOKEN")]
    end_of_text: Option<String>,
    /// Replace the token file if it exists
    #[arg(long)]
    overwrite: bool,
    /// Encoding threads, at most 128 [default: one per core]
    #[arg(long, value_name = "N", value_parser = one_or_more::<NonZeroUsize>)]
    threads: Option<NonZeroUsize>,
}

fn tokenizer(text: &str) -> Result<Tokenizer, String> {
    Tokenizer::try_from(text.to_owned())
        .map_err(|_| "expected `gpt2` or the path of a `tokenizer.json`".into())
}

/// Main of `ddp-train tokenize`.
pub(super) fn run(args: &Args) -> ExitCode {
    super::native::ignore_file_size_signal();
    let started = Instant::now();
    let request = Request {
        tokenizer: &args.tokenizer,
        end_of_text: args.end_of_text.as_deref(),
        key: &args.key,
        inputs: &args.inputs,
        output: &args.output,
        overwrite: args.overwrite,
        threads: args.threads,
    };
    let bar = bar::Bar::new();
    let made = tokenize(&request, &mut |progress| bar.show(progress));
    bar.finish();
    match made {
        Ok(report) => {
            if !report.has_separator {
                let words = answer::no_separator(&args.tokenizer);
                // Nothing is left to do when that fails.
                let _ = writeln!(std::io::stderr(), "{words}");
            }
            super::answer::give(answer::words(&request, &report, started.elapsed()))
        }
        Err(error) => fail(&error, exit_code(&error)),
    }
}

/// Separates what the user must change from a full disk and other failures of the machine.
fn exit_code(error: &TokenizeError) -> u8 {
    match error {
        TokenizeError::Io { source, .. } => super::native::of_io(source.kind()),
        TokenizeError::Threads(_) => FAILED,
        _ => exit::USAGE,
    }
}
