//! Published weights as first values: what Hugging Face's `save_pretrained` and `ddp-train ckpt export` write, read back.
//!
//! | file | what it holds |
//! |---|---|
//! | `weights.rs` | [`PretrainedWeights`]: any range of any parameter, as f32 |
//! | `files.rs` | which files there are, and which tensors they say that they hold |
//! | `fit.rs` | which tensor is which parameter, what `config.json` says, and all that does not fit as one error |
//! | `error.rs` | [`PretrainedError`] |
//!
//! Names are those of GPT-2's published checkpoints, with or without `transformer.` in front. Headers are read when the
//! weights are opened, values when somebody asks for them: a rank reads what it owns.

mod error;
mod files;
mod fit;
#[cfg(test)]
mod tests;
mod weights;

pub use error::PretrainedError;
pub use weights::PretrainedWeights;
