//! Published weights as first values: what Hugging Face's `save_pretrained` and `ddp-train ckpt export` write, read back.
//!
//! | file | what it holds |
//! |---|---|
//! | `weights.rs` | [`PretrainedWeights`]: any range of any parameter, as f32 |
//! | `files.rs` | which files there are, which tensors their headers name; [`PretrainedError`] |
//! | `fit.rs` | which tensor is which parameter, what `config.json` says, and all that does not fit as one error |
//!
//! Names are those of GPT-2's published checkpoints, with or without `transformer.` in front. Headers are read when the
//! weights are opened, values when somebody asks for them: a rank reads what it owns.

mod files;
mod fit;
#[cfg(test)]
mod tests;
mod weights;

pub use files::PretrainedError;
pub use weights::PretrainedWeights;
