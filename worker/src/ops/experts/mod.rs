//! Operations of a layer of experts: which experts a token goes to, rows in the order of experts, products of one weight
//! per expert.
//!
//! | file | operations |
//! |---|---|
//! | `routing` | [`RouteForward`], [`RouteBackward`]: the chosen experts and their weights, auxiliary losses |
//! | `order` | [`SortByExpert`], [`MergedOrder`]: rows in order of (expert, source rank, position), as indices |
//! | `rows` | [`IndexRows`], [`CombineBackward`]: rows moved and added by such indices, or as they are |
//! | `grouped` | [`GroupedLinear`], [`GroupedDweight`]: a linear layer of each expert over its rows |
//!
//! Letters: `R` tokens, `K` experts of a token, `E` experts, `M` rows in order of experts. A *slot* is one choice of a
//! token: slot `r·K + k` is the `k`-th expert of token `r`. How many rows an expert has is known on the device only:
//! buffers have room for `M` rows, indices of rows that do not exist are −1, and an expert without rows is ordinary.

mod grouped;
mod order;
mod routing;
mod rows;

pub use grouped::{GroupedDweight, GroupedLinear};
pub use order::{MergedOrder, SortByExpert, inverse};
pub use routing::{RouteBackward, RouteForward, Router, RouterScore};
pub use rows::{CombineBackward, IndexRows};
