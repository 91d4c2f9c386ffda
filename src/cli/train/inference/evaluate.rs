//! `ddp-train eval`: how well a trained model predicts a text.

use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use ddp_worker::inference::{
    DataError, InferenceError, Paths, Precision, RunSettings, Tokenizer, open_tokens,
};
use serde_json::json;

use super::{ModelArgs, Opened, precision, refuse};
use crate::cli::answer;
use crate::cli::values::one_or_more;

/// Evaluate a trained model on a text: loss, perplexity, bits per byte.
///
/// Without `--data`, the text is the run's validation data, and the loss is the run's validation
/// loss at that step.
#[derive(Debug, Args)]
pub(in crate::cli) struct EvalArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Texts (tokenizer `bytes`) or token files, read one after the other; `*` in a name matches
    /// any characters
    #[arg(long, value_name = "PATH", num_args = 1..)]
    data: Vec<PathBuf>,
    /// Evaluate the first N tokens only, rounded up to whole samples
    #[arg(long, value_name = "N", value_parser = one_or_more::<NonZeroU64>)]
    tokens: Option<NonZeroU64>,
    /// Samples that go through the model at once [default: the run's]
    #[arg(long, value_name = "N", value_parser = one_or_more::<NonZeroUsize>)]
    micro_batch: Option<NonZeroUsize>,
    /// Type of parameters and activations: `f32` or `bf16` [default: the run's]
    #[arg(long, value_name = "TYPE", value_parser = precision)]
    precision: Option<Precision>,
    /// Print JSON, for programs
    #[arg(long)]
    json: bool,
}

/// Main of `ddp-train eval`.
pub(in crate::cli) fn run(args: &EvalArgs) -> ExitCode {
    evaluate(args).map_or_else(|error| refuse(&error), answer::give)
}

fn evaluate(args: &EvalArgs) -> Result<String, InferenceError> {
    let Opened {
        reader,
        tokenizer,
        model,
    } = args.model.open(args.precision)?;
    let (run, block_size) = (RunSettings::of(&reader), model.config.block_size);
    let is_validation = args.data.is_empty();
    let data = if is_validation {
        run.validation(&tokenizer, block_size)?
    } else {
        open_tokens(&Paths::Several(args.data.clone()), &tokenizer, run.dtype()).map_err(named_data)?
    };
    let is_held_out = is_validation && run.holds_out();
    let blocks = args
        .tokens
        .map_or(u64::MAX, NonZeroU64::get)
        .div_ceil(block_size as u64);
    let micro_batch = args.micro_batch.map_or(run.micro_batch(), NonZeroUsize::get);
    let started = Instant::now();
    let bar = ddp_launcher::progress_bar("{bar:30} {pos}/{len} samples  {eta} left");
    let evaluated = model.evaluate(&data, blocks, micro_batch, &mut |done, all| {
        bar.set_length(all);
        bar.set_position(done);
    });
    // An error must not share its line.
    bar.finish_and_clear();
    let evaluated = evaluated?;
    let seconds = started.elapsed().as_secs_f64();
    let (loss, tokens, bits) = (evaluated.loss, evaluated.tokens, evaluated.bits_per_byte());
    let (checkpoint, text) = (reader.path().display(), data.path().display());
    if args.json {
        let document = json!({
            "checkpoint": checkpoint.to_string(),
            "step": run.step(),
            "data": text.to_string(),
            "files": data.file_count(),
            "held_out": is_held_out,
            "loss": loss,
            "perplexity": loss.exp(),
            "bits_per_byte": bits,
            "bytes_per_token": evaluated.bytes_per_token,
            "tokens": tokens,
            "seconds": seconds,
            "device": model.device_name(),
        });
        return Ok(format!("{document:#}\n"));
    }
    let bits = bits.map_or_else(String::new, |bits| format!("bits per byte  {bits:.4}\n"));
    let (speed, device) = (tokens as f64 / seconds, model.device_name());
    let perplexity = loss.exp();
    let unit = match tokenizer {
        Tokenizer::Bytes => "byte",
        _ => "token",
    };
    let part = if is_held_out {
        ": its last tenth, held out of training"
    } else {
        ""
    };
    Ok(format!(
        "checkpoint     {checkpoint}\n\
         data           {text}{part}\n\
         tokens         {tokens}, in samples of {block_size}\n\
         loss           {loss:.4} nats/{unit}\n\
         perplexity     {perplexity:.4}\n\
         {bits}\
         speed          {speed:.0} tokens/s on {device}\n"
    ))
}

/// What is wrong with the data of `--data`.
fn named_data(error: DataError) -> InferenceError {
    match error {
        DataError::Unreadable { .. } => InferenceError::Refused(format!(
            "{error}\n  hint: relative paths after `--data` are resolved from the current directory"
        )),
        DataError::File { .. } => error.into(),
    }
}
