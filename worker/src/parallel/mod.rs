//! Data parallelism: where gradients lie, how they are averaged, and the checks that ranks agree.
//!
//! | type | what it is |
//! |---|---|
//! | [`GradientLayout`] | which gradient lies where, and in which bucket: a pure function, the same on every rank |
//! | [`Reducer`] | averages gradients over the ranks while they are being computed; knows no models |
//! | [`Step`], [`Reduced`] | its two phases: gradients are written, then averages are read |
//! | [`Sharding`], [`Portion`] | which rank owns which elements, where not every rank holds everything |
//! | [`ShardGroups`] | which ranks hold one copy of the state together, and which the same part of all copies |
//! | [`Weights`] | the parameters: on every rank ([`WholeWeights`]: DDP, ZeRO-1, -2) or gathered block by block ([`GatheredWeights`]: ZeRO-3) |
//! | [`StepTraffic`] | what a rank of a sharded strategy sends in a step, by its terms |
//! | [`Dtypes`] | which type is used where, in f32 and in mixed precision |
//! | [`join_world`], [`join_world_on`], [`join_world_through`] | from a session to the communicator of all ranks, over host memory or a GPU's |
//! | [`Signature`], [`Agreement`] | what all ranks must agree on before the first step |
//! | [`SyncBatchNorm`] | batch normalisation over the rows of all ranks |
//! | [`Replicas`] | the initial broadcast, and the comparison of all parameters across ranks |
//!
//! A program of its own needs only [`join_world`], a list of [`GradSpec`]s and a [`Reducer`].

mod agreement;
mod batch_norm;
mod copies;
mod dtypes;
mod events;
mod gate;
mod gather_plan;
mod gathered_weights;
mod grad_memory;
mod grad_shard;
mod grad_spec;
mod groups;
mod in_flight;
mod join;
mod layout;
mod layout_config;
mod ledger;
mod portion;
mod reduce_error;
mod reduce_unit;
mod reduced;
mod reducer;
mod replicas;
mod reports;
mod sharding;
mod slots;
mod step;
mod step_traffic;
mod waiting;
mod weights;
mod whole_weights;
mod wire;

pub use agreement::{Agreement, AgreementError, Signature};
pub use batch_norm::SyncBatchNorm;
pub use dtypes::Dtypes;
pub use gate::gated;
pub use gather_plan::{Residence, gathered_elements, gathering_slots};
pub use gathered_weights::GatheredWeights;
pub use grad_spec::GradSpec;
pub use groups::ShardGroups;
pub use in_flight::in_flight_slots;
pub use join::{JoinError, JoinOptions, join_world, join_world_on, join_world_through};
pub use layout::{Bucket, GradientLayout, LayoutError};
pub use layout_config::LayoutConfig;
pub use ledger::Ledger;
pub use portion::{OwnPiece, Place, Portion};
pub use reduce_error::ReduceError;
pub use reduced::Reduced;
pub use reducer::{Between, Reducer, ReducerConfig};
pub use replicas::{Replicas, ReplicasError};
pub use sharding::{ShardUnit, Sharding};
pub use step::Step;
pub use step_traffic::StepTraffic;
pub use waiting::SyncTimes;
pub use weights::{Group, Pass, Weights};
pub use whole_weights::WholeWeights;
