//! `ddp-train tokenize`: turns texts into a token file.

use std::io::Write as _;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ddp_proto::exit;
use ddp_proto::words::{counted, quoted};
use ddp_worker::tokenize::{ENDS_OF_TEXT, Progress, Report, Request, TokenizeError, Tokenizer, tokenize};
use indicatif::ProgressBar;

use crate::cli::answer::{fail, give};
use crate::cli::native::{self, FAILED};
use crate::cli::values::one_or_more;

/// Turn texts into a token file for `data.train` and `data.val`.
///
/// Each document follows an end-of-text token, as in the files of llm.c. A file that ends in
/// `.jsonl` has one document per line; any other file is one document. The token file is a safetensors file with one
/// tensor `tokens`, which Python can read: `safetensors.numpy.load_file(path)["tokens"]`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
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
    /// Token before each document [default: `<|endoftext|>`, `<|end_of_text|>` or `</s>`, whichever the vocabulary has]
    #[arg(long, value_name = "TOKEN")]
    end_of_text: Option<String>,
    /// Leave out JSON lines that hold no document, and print how many there were
    #[arg(long)]
    skip_invalid: bool,
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
    native::ignore_file_size_signal();
    let started = Instant::now();
    let request = Request {
        tokenizer: &args.tokenizer,
        end_of_text: args.end_of_text.as_deref(),
        key: &args.key,
        skip_invalid: args.skip_invalid,
        inputs: &args.inputs,
        output: &args.output,
        overwrite: args.overwrite,
        threads: args.threads,
    };
    let bar =
        ddp_launcher::progress_bar("{bar:30} {bytes}/{total_bytes}  {msg}  {bytes_per_sec}  {eta} left");
    let made = tokenize(&request, &mut |progress| show(&bar, &progress));
    // What it came to is said in words.
    bar.finish_and_clear();
    match made {
        Ok(report) => {
            if !report.has_separator {
                let words = no_separator(&args.tokenizer);
                // Nothing is left to do when that fails.
                let _ = writeln!(std::io::stderr(), "{words}");
            }
            if let Some(first) = &report.first_skipped {
                let lines = counted(report.skipped, "line");
                let _ = writeln!(
                    std::io::stderr(),
                    "warning: {lines} left out, of which the first is {first}"
                );
            }
            give(words(&request, &report, started.elapsed()))
        }
        Err(error) => fail(&error, exit_code(&error)),
    }
}

/// Separates what the user must change from a full disk and other failures of the machine.
fn exit_code(error: &TokenizeError) -> u8 {
    match error {
        TokenizeError::Io { source, .. } => native::of_io(source.kind()),
        TokenizeError::Threads(_) => FAILED,
        _ => exit::USAGE,
    }
}

fn show(bar: &ProgressBar, progress: &Progress) {
    bar.set_length(progress.total);
    bar.set_message(format!("{} tokens", progress.tokens));
    bar.set_position(progress.bytes);
}

/// The end of a successful run.
fn words(request: &Request<'_>, report: &Report, took: Duration) -> String {
    let Report {
        documents,
        tokens,
        text_bytes,
        ..
    } = report;
    let seconds = took.as_secs_f64();
    let bytes = *text_bytes as f64;
    format!(
        "{}, {text_bytes} bytes of text: {}, {:.2} bytes per token\n\
         {seconds:.1} s, {:.1} MB/s\n\
         \n\
         data:\n  train: {}   # relative paths are resolved from the YAML's directory\n  tokenizer: {}\n",
        counted(*documents, "document"),
        counted(*tokens, "token"),
        bytes / *tokens as f64,
        bytes / 1e6 / seconds.max(1e-9),
        quoted(&request.output.display().to_string()),
        quoted(&request.tokenizer.to_string()),
    )
}

/// Nothing tells where a document ends.
fn no_separator(tokenizer: &Tokenizer) -> String {
    format!(
        "warning: `{tokenizer}` has no token `{}`, so nothing separates the documents\n  \
         hint: set the separator with `--end-of-text TOKEN`",
        ENDS_OF_TEXT.join("` or `")
    )
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_lines_can_be_pasted_into_a_configuration() {
        let request = Request {
            tokenizer: &Tokenizer::File("my tokenizer.json".into()),
            end_of_text: None,
            key: "text",
            skip_invalid: false,
            inputs: &[],
            output: Path::new("data/web.safetensors"),
            overwrite: false,
            threads: None,
        };
        let report = Report {
            documents: 1,
            tokens: 1_000_000,
            text_bytes: 4_430_000,
            skipped: 0,
            first_skipped: None,
            has_separator: true,
        };
        insta::assert_snapshot!(words(&request, &report, Duration::from_millis(500)), @r"
        1 document, 4430000 bytes of text: 1000000 tokens, 4.43 bytes per token
        0.5 s, 8.9 MB/s

        data:
          train: data/web.safetensors   # relative paths are resolved from the YAML's directory
          tokenizer: 'my tokenizer.json'
        ");
        insta::assert_snapshot!(no_separator(request.tokenizer), @r"
        warning: `my tokenizer.json` has no token `<|endoftext|>` or `<|end_of_text|>` or `</s>`, so nothing separates the documents
          hint: set the separator with `--end-of-text TOKEN`
        ");
    }
}
