//! Data parallelism: where gradients lie, how they are summed, and the checks that ranks agree.
//!
//! | type | what it is |
//! |---|---|
//! | [`GradientLayout`] | which gradient lies where, and in which bucket: a pure function, the same on every rank |
//! | [`Reducer`] | sums gradients over the ranks while they are being computed; knows no models |
//! | [`Step`], [`Reduced`] | its two phases: gradients are written, then sums are read |
//! | [`Sharding`], [`Portion`] | which rank owns which elements, where not every rank holds everything |
//! | [`ReplicaSet`] | over which ranks a gradient is summed, and how |
//! | [`Weights`] | the parameters: on every rank ([`WholeWeights`]: DDP, ZeRO-1, -2) or gathered block by block ([`GatheredWeights`]: ZeRO-3) |
//! | [`Action`], [`sequential`] | what a rank does in a step, as data |
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
mod gather_plan;
mod gathered_weights;
mod grad_memory;
mod grad_shard;
mod grad_spec;
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
mod replica_set;
mod replicas;
mod reports;
mod schedule;
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
pub use gather_plan::{Residence, gathered_elements, gathering_slots};
pub use gathered_weights::GatheredWeights;
pub use grad_spec::GradSpec;
pub use in_flight::in_flight_slots;
pub use join::{JoinError, JoinOptions, join_world, join_world_on, join_world_through};
pub use layout::{Bucket, GradientLayout, LayoutError};
pub use layout_config::LayoutConfig;
pub use ledger::Ledger;
pub use portion::{OwnPiece, Place, Portion};
pub use reduce_error::ReduceError;
pub use reduced::Reduced;
pub use reducer::{Between, Reducer, ReducerConfig};
pub use replica_set::ReplicaSet;
pub use replicas::{Replicas, ReplicasError};
pub use schedule::{Action, sequential};
pub use sharding::{ShardUnit, Sharding};
pub use step::Step;
pub use step_traffic::StepTraffic;
pub use waiting::SyncTimes;
pub use weights::{Group, Weights};
pub use whole_weights::WholeWeights;
