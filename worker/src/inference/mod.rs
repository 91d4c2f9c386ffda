//! A trained model at work: text that goes on from a prompt, and the loss of any text.
//!
//! | file | what it holds |
//! |---|---|
//! | `loaded.rs` | the parameters of a checkpoint in the memory of one device |
//! | `generate.rs` | token after token, with a key-value cache |
//! | `sampling.rs` | from logits to a token: temperature, top-k, top-p |

mod generate;
mod loaded;
mod sampling;

pub use generate::{Generation, Generator};
pub use loaded::{InferenceError, LoadedModel};
pub use sampling::Sampling;
