//! Optimization: the update of flat arenas, the learning rate, clipping by the global norm.
//!
//! | type | what it is |
//! |---|---|
//! | [`Optimizer`] | state, masters and update of what this rank owns |
//! | [`adamw`], [`lion`], [`sgd`] | rules: the formula of one element, its state slots, its kernels |
//! | `muon` | the update of whole matrices; AdamW updates the rest |
//! | [`ParamGroups`] | learning rate and weight decay by parameter |
//! | [`Clip`] | the global norm and the factor that bounds it, both computed on the device |
//! | [`learning_rate`] | warm-up and decay as a pure function of the step |

mod clip;
mod muon;
mod optimizer;
mod rates;
mod rules;

pub use clip::Clip;
pub use optimizer::{Optimizer, UpdateStep};
pub use rates::{GroupRates, ParamGroups, batch_factor, learning_rate};
pub use rules::{adamw, lion, muon_blend, muon_descend, muon_momentum, rule, sgd};
