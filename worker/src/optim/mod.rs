//! Optimization: the update of flat arenas, the learning rate, clipping by the global norm.
//!
//! | type | what it is |
//! |---|---|
//! | [`AdamW`] | moments and update of what this rank owns |
//! | [`Clip`] | the global norm and the factor that bounds it, both computed on the device |
//! | [`learning_rate`] | warm-up and decay as a pure function of the step |

mod adamw;
mod clip;
mod schedule;

pub use adamw::{AdamW, Moment, UpdateStep};
pub use clip::Clip;
pub use schedule::learning_rate;
