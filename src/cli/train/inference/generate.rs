//! `ddp-train generate`: continues a prompt, and prints the text while it is generated.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::{self, Read as _, Write as _};
use std::num::NonZeroUsize;
use std::process::ExitCode;

use clap::Args;
use ddp_proto::words::counted;
use ddp_worker::inference::{CompletionOptions, Encoder, InferenceError, Precision, Sampling, complete};
use serde_json::json;

use super::{ModelArgs, Opened, precision, refuse};
use crate::cli::answer;
use crate::cli::values::one_or_more;

/// Longest prompt that is read from standard input: no model has positions for more.
const MAX_PROMPT_BYTES: u64 = 64 << 20;
/// This value of `--prompt` means standard input.
const STDIN: &str = "-";

/// Continue a text with a trained model.
///
/// Prints the prompt, then each piece of new text as soon as it is generated, and at the end the
/// speed on standard error. The text may become longer than the model's positions
/// (`model.block_size`): when all positions are used, the older half of them is dropped.
#[derive(Debug, Args)]
pub(in crate::cli) struct GenerateArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Text to continue; `-` reads it from standard input
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: String,
    /// Maximum number of tokens to generate
    #[arg(long, value_name = "N", default_value = "200", value_parser = one_or_more::<NonZeroUsize>)]
    max_tokens: NonZeroUsize,
    /// Token at which generation stops early [default: `<|endoftext|>`, `<|end_of_text|>` or
    /// `</s>`, if the vocabulary has it]
    #[arg(long, value_name = "TOKEN")]
    end_of_text: Option<String>,
    /// Divide the logits by T: below 1 favours probable tokens, above 1 makes the text more varied,
    /// 0 always selects the most probable token
    #[arg(long, value_name = "T", default_value_t = 1.0, value_parser = temperature, allow_negative_numbers = true)]
    temperature: f32,
    /// Sample from the K most probable tokens only
    #[arg(long, value_name = "K", value_parser = one_or_more::<NonZeroUsize>)]
    top_k: Option<NonZeroUsize>,
    /// Sample from the smallest set of most probable tokens whose probabilities add up to P
    #[arg(long, value_name = "P", value_parser = share)]
    top_p: Option<f32>,
    /// Seed of the sampling: the same seed gives the same text [default: a random seed, printed at
    /// the end]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Data type of the parameters: `f32`, or `bf16`, which needs half of the memory
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = precision)]
    precision: Precision,
    /// Print one JSON document at the end, for programs, and no text before it
    #[arg(long)]
    json: bool,
}

fn temperature(text: &str) -> Result<f32, String> {
    let number = text.parse::<f32>().ok();
    let number = number.filter(|number| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| "expected a number of at least 0, such as 0.8".into())
}

fn share(text: &str) -> Result<f32, String> {
    let number = text
        .parse::<f32>()
        .ok()
        .filter(|share| *share > 0.0 && *share <= 1.0);
    number.ok_or_else(|| "expected a number above 0 and at most 1, such as 0.9".into())
}

/// Main of `ddp-train generate`.
pub(in crate::cli) fn run(args: &GenerateArgs) -> ExitCode {
    // If the reader of standard output has gone, nothing more is printed.
    let mut written = Ok(());
    match generate(args, &mut |text| {
        let mut out = io::stdout().lock();
        written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        written.is_ok()
    }) {
        Ok(report) => {
            if written.is_ok() {
                // If the report cannot be printed, there is nothing left to do.
                let _ = io::stderr().write_all(report.as_bytes());
            }
            answer::given(written)
        }
        Err(error) => refuse(&error),
    }
}

/// Passes the text to `write`, which returns false if the reader has gone. Returns the report to
/// print at the end.
fn generate(args: &GenerateArgs, write: &mut dyn FnMut(&str) -> bool) -> Result<String, InferenceError> {
    let prompt = prompt(&args.prompt)?;
    let Opened { tokenizer, model, .. } = args.model.open(Some(args.precision))?;
    let encoder = Encoder::new(&tokenizer, args.end_of_text.as_deref())?;
    let seed = args.seed.unwrap_or_else(any_seed);
    let options = CompletionOptions {
        tokens: args.max_tokens.get(),
        sampling: Sampling {
            temperature: args.temperature,
            top_k: args.top_k.map(NonZeroUsize::get),
            top_p: args.top_p,
            seed,
        },
        vocabulary: encoder.vocabulary.size,
        end_of_text: encoder.end_of_text,
    };
    let mut text = String::new();
    let mut is_read = true;
    let completion = complete(&model, &encoder, &prompt, &options, &mut |more| {
        if args.json {
            text.push_str(more);
        } else {
            is_read = write(more);
        }
        is_read
    })?;
    let first_token_ms = completion.first_token.as_secs_f64() * 1e3;
    if args.json {
        let document = json!({
            "prompt": prompt,
            "text": &text[prompt.len()..],
            "prompt_tokens": completion.prompt_tokens,
            "tokens": completion.tokens,
            "tokens_per_s": completion.tokens_per_s(),
            "first_token_ms": first_token_ms,
            "seed": seed,
            "ended_by": if completion.is_ended { "end_of_text" } else { "max_tokens" },
        });
        write(&format!("{document:#}\n"));
        return Ok(String::new());
    }
    if is_read {
        write("\n");
    }
    let (tokens, device) = (counted(completion.tokens, "token"), model.device_name());
    let speed = completion.tokens_per_s();
    let speed = speed.map_or_else(String::new, |speed| format!(", {speed:.1} tokens/s"));
    Ok(format!(
        "{tokens}{speed}, the first after {first_token_ms:.1} ms, on {device}, seed {seed}\n"
    ))
}

fn prompt(word: &str) -> Result<String, InferenceError> {
    if word != STDIN {
        return Ok(word.to_owned());
    }
    let mut prompt = String::new();
    let mut input = io::stdin().lock().take(MAX_PROMPT_BYTES);
    let read = input.read_to_string(&mut prompt);
    read.map_err(|e| InferenceError::Refused(format!("cannot read the prompt from standard input: {e}")))?;
    Ok(prompt)
}

/// A random seed, short enough to be typed.
fn any_seed() -> u64 {
    RandomState::new().build_hasher().finish() % 1_000_000
}
