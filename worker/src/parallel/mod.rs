//! Several ranks: where gradients lie, how they and partial activations are summed, and the checks that ranks agree.
//!
//! | type | what it is |
//! |---|---|
//! | [`GradientLayout`] | which gradient lies where, and in which bucket: a pure function, the same on every rank |
//! | [`Reducer`] | sums gradients over the ranks while they are being computed; knows no models |
//! | [`Step`], [`Reduced`] | its two phases: gradients are written, then sums are read |
//! | [`Sharding`], [`ArenaShare`] | which rank owns which elements, where not every rank holds everything |
//! | [`ReplicaSet`], [`StateGroup`], [`CopyGroup`] | who sums, owns, counts and writes a parameter |
//! | [`NormOrder`] | in which order the norm of all ranks is summed |
//! | [`Parameters`] | what a rank owns of the parameters, gathered for as long as [`ReshardPolicy`] says |
//! | [`pipeline`] | what a rank does in a step, as data |
//! | [`StageMessages`] | what the ranks of a pipeline hand to each other |
//! | [`CommTimes`], [`DeviceTimes`] | what communication took, as the host and the device see it |
//! | [`Dtypes`] | which type is used where, in f32 and in mixed precision |
//! | [`SyncBatchNorm`] | batch normalisation over the rows of all ranks |
//! | [`join_world`], [`join_world_on`] | from a session to the communicator of all ranks, over host memory or a GPU's |
//! | [`Signature`], [`check_agreement`] | what all ranks must agree on before the first step |
//! | [`BlockGroups`], [`RankGroup`] | the ranks that hold a model together: sums and gathers activations for its blocks |
//!
//! A program of its own needs only [`join_world`], a list of [`GradSpec`]s and a [`Reducer`].

mod agreement;
mod batch_norm;
mod comm_times;
mod dtypes;
mod experts;
mod join;
mod layout;
mod norm_order;
mod parameters;
pub mod pipeline;
mod reduction;
mod replica_set;
mod sharding;
mod stage_messages;
mod tensor;

pub use agreement::{AgreementError, Signature, check_agreement};
pub use batch_norm::SyncBatchNorm;
pub use comm_times::{CommTimes, CommTracker, DeviceTimes};
pub use dtypes::Dtypes;
pub use join::{JoinError, JoinOptions, join_world, join_world_on, join_world_through};
pub use layout::{Bucket, GradSpec, GradientLayout, LayoutConfig, LayoutError};
pub use norm_order::NormOrder;
pub use parameters::{Difference, ParameterMemory, Parameters, ReshardPolicy};
pub use reduction::{ReduceError, Reduced, Reducer, ReducerConfig, Step};
pub use replica_set::{
    CopyGroup, MODEL_AXES, ReplicaSet, StateGroup, group_axes, is_counted, one_copy, summed_over,
};
pub use sharding::{ArenaRanges, ArenaShare, OwnPiece, ShardUnit, Sharding};
pub use stage_messages::{Arrival, MessageShape, StageMessages};
pub use tensor::{BlockGroups, RankGroup};
