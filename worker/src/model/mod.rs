//! Models: parameters described as data, and a list of blocks with an explicit backward. No autograd tape.
//!
//! | type | what it is |
//! |---|---|
//! | [`ParamSpec`], [`ParamGroup`] | name, shape, initialiser, decay of a parameter; the unit of ZeRO-3 gathering |
//! | [`Block`] | forward and backward over parameters that are passed in, never held |
//! | [`Saved`] | what a block's forward keeps for its backward; one per block and micro-batch in flight |
//! | [`Activation`], [`ActivationPool`] | shaped buffers, leased from a pool that stops growing after the first step |
//! | [`Model`] | parameters, groups and blocks of one network |

mod activation;
mod block;
mod param;

pub use activation::{Activation, ActivationPool};
pub use block::{Block, Context, GradSink, GradSlot, Model, Params, Saved, StepKey};
pub use param::{GroupId, Init, ParamGroup, ParamId, ParamSpec, Shard};
