//! Published weights as first values: what Hugging Face's `save_pretrained` and `ddp-train ckpt export` write, read back.
//!
//! | file | what it holds |
//! |---|---|
//! | `weights.rs` | [`PretrainedWeights`]: any range of any parameter, as f32 |
//! | `files.rs` | which files there are, and which tensors they say that they hold |
//! | `settings.rs` | `config.json`: what no shape tells |
//! | `fit.rs` | which tensor is which parameter, and how much of it |
//! | `misfit.rs` | all that does not fit, as one error |
//! | `error.rs` | [`PretrainedError`] |
//!
//! Names are those of GPT-2's published checkpoints, with or without `transformer.` in front. Headers are read when the
//! weights are opened, values when somebody asks for them: a rank reads what it owns.

mod error;
mod files;
mod fit;
mod misfit;
mod settings;
#[cfg(test)]
mod tests;
mod weights;

pub use error::PretrainedError;
pub use weights::PretrainedWeights;
