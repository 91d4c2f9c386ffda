//! `ddp-train generate` and `ddp-train eval`: use a trained model.
//!
//! | file | what it holds |
//! |---|---|
//! | `generate.rs` | continues a prompt, and prints the text while it is generated |
//! | `evaluate.rs` | loss, perplexity and bits per byte of a text |

mod evaluate;
mod generate;

use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::thread::available_parallelism;

use clap::Args;
use ddp_proto::exit;
use ddp_worker::inference::{
    InferenceError, LoadedModel, Precision, Reader, RunSettings, Tokenizer, open_device,
};

use super::ckpt;
use crate::cli::answer::print_error;
use crate::cli::native::FAILED;
use crate::cli::values::one_or_more;
pub(super) use evaluate::{EvalArgs, run as evaluate};
pub(super) use generate::{GenerateArgs, run as generate};

/// Which model to use, and on which device.
#[derive(Debug, Args)]
pub(super) struct ModelArgs {
    #[command(flatten)]
    which: ckpt::Which,
    /// `bytes`, `gpt2`, or the path of a `tokenizer.json` [default: the run's]
    #[arg(long, value_name = "NAME|FILE.json", value_parser = tokenizer)]
    tokenizer: Option<Tokenizer>,
    /// Where to compute: `cpu` or `gpu` [default: the first GPU, if there is one]
    #[arg(long, value_name = "DEVICE", value_parser = ["cpu", "gpu"])]
    device: Option<String>,
    /// Number of CPU threads [default: one per core]
    #[arg(long, value_name = "N", value_parser = one_or_more::<NonZeroUsize>)]
    threads: Option<NonZeroUsize>,
}

/// A model that is ready to be used.
struct Opened {
    reader: Reader,
    tokenizer: Tokenizer,
    model: LoadedModel,
}

impl ModelArgs {
    /// Reads the checkpoint. Without `precision`, the run's precision is used.
    fn open(&self, precision: Option<Precision>) -> Result<Opened, InferenceError> {
        let reader = self.which.open()?;
        let run = RunSettings::of(&reader);
        let tokenizer = run.tokenizer(self.tokenizer.as_ref())?;
        let threads = self.threads.or_else(|| available_parallelism().ok());
        let is_gpu = self.device.as_ref().map(|device| device == "gpu");
        let device = open_device(is_gpu, threads.map_or(1, NonZeroUsize::get))?;
        let model = LoadedModel::open(&reader, &device, precision.unwrap_or(run.precision()))?;
        Ok(Opened {
            reader,
            tokenizer,
            model,
        })
    }
}

fn tokenizer(text: &str) -> Result<Tokenizer, String> {
    Tokenizer::try_from(text.to_owned())
        .map_err(|_| "expected `bytes`, `gpt2` or the path of a `tokenizer.json`".into())
}

fn precision(word: &str) -> Result<Precision, String> {
    match word {
        "f32" => Ok(Precision::F32),
        "bf16" => Ok(Precision::Bf16),
        _ => Err("expected `f32` or `bf16`".into()),
    }
}

/// Prints the error. The exit code separates what the user must change from damage and other failures of the machine.
fn refuse(error: &InferenceError) -> ExitCode {
    match error {
        InferenceError::Checkpoint(error) => print_error(error),
        _ => print_error(error),
    }
    ExitCode::from(match error {
        InferenceError::Checkpoint(error) => ckpt::exit_code(std::slice::from_ref(error)),
        InferenceError::Device(_) => FAILED,
        _ => exit::USAGE,
    })
}
