//! Data parallelism: where gradients lie, how they are averaged, and the checks that ranks agree.
//!
//! | type | what it is |
//! |---|---|
//! | [`GradientLayout`] | which gradient lies where, and in which bucket: a pure function, the same on every rank |
//! | [`Reducer`] | averages gradients over the ranks while they are being computed; knows no models |
//! | [`Step`], [`Reduced`] | its two phases: gradients are written, then averages are read |
//! | [`Sharding`], [`Portion`] | which rank owns which elements, where not every rank holds everything |
//! | [`Weights`] | the parameters: on every rank ([`WholeWeights`]: DDP, ZeRO-1, -2) or gathered block by block ([`GatheredWeights`]: ZeRO-3) |
//! | [`join_world`] | from a session to the communicator of all ranks |
//! | [`Signature`], [`Agreement`] | what all ranks must agree on before the first step |
//! | [`Replicas`] | the initial broadcast, and the comparison of all parameters across ranks |
//!
//! A program of its own needs only [`join_world`], a list of [`GradSpec`]s and a [`Reducer`].

mod agreement;
mod events;
mod gate;
mod gather_plan;
mod gathered_weights;
mod join;
mod layout;
mod reduce_error;
mod reducer;
mod replicas;
mod sharding;
mod staging;
mod step;
mod weights;
mod whole_weights;

pub use agreement::{Agreement, AgreementError, Signature};
pub use gate::gated;
pub use gathered_weights::GatheredWeights;
pub use join::{JoinError, JoinOptions, join_world};
pub use layout::{Bucket, GradSpec, GradientLayout, LayoutConfig, LayoutError};
pub use reduce_error::ReduceError;
pub use reducer::{Between, Reduced, Reducer, ReducerConfig, SyncTimes};
pub use replicas::{Replicas, ReplicasError};
pub use sharding::{OwnPiece, Place, Portion, ShardUnit, Sharding};
pub use step::Step;
pub use weights::{Group, Pass, Weights};
pub use whole_weights::WholeWeights;
