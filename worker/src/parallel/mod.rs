//! Data parallelism: where gradients lie, how they are summed, and the checks that ranks agree.
//!
//! | type | what it is |
//! |---|---|
//! | [`GradientLayout`] | which gradient lies where, and in which bucket: a pure function, the same on every rank |
//! | [`Reducer`] | sums gradients over the ranks while they are being computed; knows no models |
//! | [`Step`], [`Reduced`] | its two phases: gradients are written, then sums are read |
//! | [`Sharding`], [`Portion`] | which rank owns which elements, where not every rank holds everything |
//! | [`ReplicaSet`] | over which ranks a gradient is summed, and how |
//! | [`Parameters`] | the parameters of a model under some strategy |
//! | [`WholeParameters`] | on every rank: DDP, ZeRO-1, -2 |
//! | [`GatheredParameters`] | gathered block by block: ZeRO-3 |
//! | [`Action`], [`sequential`] | what a rank does in a step, as data |
//! | [`CommTimes`], [`DeviceTimes`] | what communication took, as the host and the device see it |
//! | [`Dtypes`] | which type is used where, in f32 and in mixed precision |
//! | [`join_world`], [`join_world_on`] | from a session to the communicator of all ranks, over host memory or a GPU's |
//! | [`Signature`], [`Agreement`] | what all ranks must agree on before the first step |
//! | [`SyncBatchNorm`] | batch normalisation over the rows of all ranks |
//! | [`Replicas`] | the initial broadcast, and the comparison of all parameters across ranks |
//!
//! A program of its own needs only [`join_world`], a list of [`GradSpec`]s and a [`Reducer`].

mod agreement;
mod batch_norm;
mod comm_times;
mod dtypes;
mod gathered_parameters;
mod join;
mod layout;
mod parameters;
mod reduction;
mod replica_set;
mod replicas;
mod schedule;
mod sharding;

pub use agreement::{Agreement, AgreementError, Signature};
pub use batch_norm::SyncBatchNorm;
pub use comm_times::{CommTimes, DeviceTimes};
pub use dtypes::Dtypes;
pub use gathered_parameters::{GatheredParameters, ReshardPolicy};
pub use join::{JoinError, JoinOptions, join_world, join_world_on, join_world_through};
pub use layout::{Bucket, GradSpec, GradientLayout, LayoutConfig, LayoutError};
pub use parameters::{GatherGroup, Parameters, WholeParameters};
pub use reduction::{ReduceError, Reduced, Reducer, ReducerConfig, Step};
pub use replica_set::ReplicaSet;
pub use replicas::{Replicas, ReplicasError};
pub use schedule::{Action, sequential};
pub use sharding::{OwnPiece, Place, Portion, ShardUnit, Sharding};
