//! Published weights as first values: what Hugging Face's `save_pretrained` and `ddp-train ckpt export` write, read back.
//!
//! | file | what it holds |
//! |---|---|
//! | `weights.rs` | [`PretrainedWeights`]: any range of any parameter, as f32 |
//! | `files.rs` | which files there are, which tensors their headers name; [`PretrainedError`] |
//! | `fit.rs` | which tensors are which parameter, and all that does not fit as one error |
//! | `settings.rs` | what `config.json` says, beside the `model` section |
//!
//! Names and settings are those of [`Published`](crate::model::Published): Hugging Face's, of GPT-2 and Llama, with or
//! without the prefix that some tools leave out. Headers are read when the weights are opened, values when somebody asks
//! for them: a rank reads what it owns.

mod files;
mod fit;
mod settings;
#[cfg(test)]
mod tests;
mod weights;

pub use files::PretrainedError;
pub use weights::PretrainedWeights;
