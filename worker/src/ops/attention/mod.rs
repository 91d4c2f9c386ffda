//! Attention over views of the heads of queries, keys and values. The three may lie in one fused activation,
//! `[B, T, (H + 2·KV)·D]`: of each row the heads of queries, then those of keys, then those of values, as the fused
//! projection of GPT-2 has them. Or the queries are some of the positions, and the keys all of them.
//!
//! With fewer heads of keys and values than of queries (`KV < H`), each is read by `H / KV` heads of queries: grouped-
//! query attention (Ainslie et al. 2023); with one, multi-query attention (Shazeer 2019).
//!
//! | file | what it is |
//! |---|---|
//! | `shape` | [`AttentionShape`], [`HeadsView`]: sizes, and where a head lies |
//! | `causal` | [`AttentionForward`], [`AttentionBackward`]: in training |
//! | `merge` | [`AttentionMerge`]: of the outputs over several stretches of keys |
//! | `decode` | [`AttentionDecode`]: in generation, over a key-value cache |
//! | `rotary` | [`Rotary`]: positions as rotations of queries and keys |
//! | `panels` | products with the keys and values of a head, on the CPU |
//! | `launches` | the kernels of `causal` on a GPU: on tensor cores, or plain |

mod causal;
mod decode;
mod launches;
mod merge;
mod panels;
mod rotary;
mod shape;

pub use causal::{AttentionBackward, AttentionForward};
pub use decode::AttentionDecode;
pub(crate) use launches::has_tensor_kernels;
pub use merge::AttentionMerge;
pub use rotary::{Rotary, RotaryEmbedding};
pub use shape::{AttentionShape, HeadsView};
