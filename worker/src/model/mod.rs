//! Models: parameters described as data, and a list of blocks with an explicit backward. No autograd tape.
//!
//! | type | what it is |
//! |---|---|
//! | [`ParamSpec`], [`GroupId`] | key, shape, cut, initialiser, decay of a parameter; the unit of ZeRO-3 gathering |
//! | [`Region`], [`Cut`] | a box of a tensor; how a rank's part of a parameter consists of them |
//! | [`Block`] | forward and backward over parameters that are passed in, never held |
//! | [`Saved`], [`Keep`] | what a block's forward keeps for its backward; one per block and micro-batch in flight; how much |
//! | [`WeightGradient`] | a gradient of a parameter that is put off to the second half of backward |
//! | [`Activation`], [`ActivationPool`] | shaped buffers, leased from a pool |
//! | [`GroupOps`], [`Exchange`] | what blocks ask of the ranks that hold a model together |
//! | [`zigzag`] | which positions of a sample the ranks of a context group compute |
//! | [`ExpertOps`] | what blocks ask of the ranks that hold the experts of a layer together |
//! | [`Model`] | parameters, groups and blocks of one network |
//! | [`Published`] | how a kind of model is published: names of tensors, words of `config.json` |
//! | [`build()`] | a network from the `model` section: GPT-2, the same without attention, Llama, Mixtral |
//! | [`Passes`], [`ChunkState`], [`Hooks`] | forward and backward over a chunk of blocks; a micro-batch between them; what accompanies them |
//! | [`fill_init`] | stateless first values |

mod activation;
mod block;
mod build;
mod context_parallel;
mod decoder;
mod experts;
mod layers;
mod param;
mod passes;
mod published;
mod region;
mod tensor;
mod transformer;

pub use activation::{Activation, ActivationPool};
pub use block::{
    Backward, Block, Context, GradSink, GradSlot, Keep, Model, ModelPart, Params, SampleKey, Saved,
    WeightGradient,
};
pub use build::{block_count, build, build_part};
pub use context_parallel::zigzag;
pub use decoder::{ActivationKind, AttentionKind, Decoder, HEAD, Names, NormKind, PositionKind, ROUTER};
pub use param::{AxisRole, GroupId, Init, ParamId, ParamSpec, fill_init};
pub(crate) use passes::sum_of_losses;
pub use passes::{ChunkState, Hooks, NoHooks, Pass, Passes};
pub use published::{FixedSetting, FusedTensors, Published, PublishedTensor, Size, SizeSetting};
pub(crate) use region::Overlap;
pub use region::{Cut, Region, Run};
pub use tensor::{Exchange, ExchangeKind, ExpertOps, GroupOps, own_rows};
