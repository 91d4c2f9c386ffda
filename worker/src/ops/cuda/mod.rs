//! Operations on NVIDIA GPUs: their CUDA C, and what they ask of a GPU as data.
//!
//! `row_norm.cu` holds the kernels of an operation, without CUDA headers; `ops/row_norm.rs` checks sizes and chooses
//! grid and types ([`super::Operation::plan`]). The CPU kernels are the reference. Three rules:
//! - the same inputs give the same bits: no floating-point atomics, every sum has an order that is written down;
//! - that order follows from the sizes alone, not from the GPU;
//! - activations and parameters are f32 or bf16, statistics f32, arithmetic f32, partial norms f64.
//!
//! | file | kernels | bytes moved, for elements of s bytes |
//! |---|---|---|
//! | `plan` | none: [`Plan`], what an operation launches, as data | |
//! | `element.cuh`, `elementwise.cuh`, `row.cuh` | what kernels are written in | |
//! | `update` | the kernels of [`crate::optim`]'s rules; skipped where the factor is not finite | AdamW: 28 an element |
//! | `norm` | squared norm by chunks, the clipping factor | s an element |
//! | `cast`, `fill` | conversion, fill, scale | read + written |
//! | `dropout` | of the residual stream; its masks for attention in `dropout.cuh` | 2s, 3s |
//! | `gelu` | forward, backward in place | 2s; 4s |
//! | `layernorm` | forward; backward with the residual's gradient, sums of the gain's and bias's | 2s; 4s |
//! | `rmsnorm` | the same, without moving rows | 2s; 4s |
//! | `swiglu` | forward; backward in place; of an element of the output | 3s; 6s |
//! | `rotary` | forward and backward in place, of queries and keys | 2s |
//! | `column_sum` | sums over rows in two stages; a single row, added or copied, in one; a bias and a residual added to rows | s; 2s, 3s; 2s, 3s |
//! | `encoder` | forward, gradient of positions | 2s; s |
//! | `token_backward`, `token_sort` | gradient of the token embedding: rows sorted by token, then added | s, and the rows touched |
//! | `attention` | forward, backward in two kernels; in f32 arithmetic; bytes where no heads share | 4s·C a position; 12s·C |
//! | `flash_forward`, `flash_backward` | the same on tensor cores, in bf16 (`flash.cuh`, `tensor_core.cuh`) | as above |
//! | `attention_merge` | attention over two stretches of keys, joined | 3s |
//! | `decode` | appends to a key-value cache; attention by parts of the keys, and their sum | what is seen of the cache |
//! | `linear` | none of ours: cuBLASLt ([`crate::cuda::Product`]) | operands and output once, at best |
//! | `linear` with `gelu` | those of both; none of ours where one pass is asked for and cuBLASLt has it | as both; in one pass as `linear`, and 2s·O for the GELU's input |
//! | `routing` | a router's choices and weights; the gradient of its logits, in place | s, little beside the rows |
//! | `expert_order` | slots in the order of experts | 4 a slot and expert, from the cache |
//! | `expert_rows` | rows, or columns of them, moved and added by indices; gradients of rows, in place, and of their weights | s·(K + 1); 3s |
//! | `grouped` | a linear layer of each expert, gradients of its weights; in f32 arithmetic | operands once a tile of 64 × 64 |
//! | `cross_entropy` | losses; with the gradient in place; of a part of the logits: statistics, then the gradient | s; 2s; s, 2s |
//! | `loss_sum` | the sum of losses, in f64 | 4 a loss |

pub(super) mod plan;

pub(crate) use plan::kernels;
pub use plan::{Arg, Call, Plan};

use crate::memory::DeviceError;

/// What an operation launches; none if it does not say so beforehand, or has no kernel.
pub fn plan(op: &super::Op) -> Option<Result<Plan, DeviceError>> {
    match op.plan() {
        Err(DeviceError::NoKernel { .. }) => None,
        planned => Some(planned),
    }
}
