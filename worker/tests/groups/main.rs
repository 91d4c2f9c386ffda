//! Groups of ranks within this process: collectives, the reducer and layers that are cut over ranks.

mod batch_norm;
mod collective_failures;
mod collective_operations;
mod collective_properties;
mod collective_world;
mod mesh_ranks;
mod reducer_ranks;
mod seams;
mod state_groups;
mod tensor_group;
#[path = "../train/train_support/mod.rs"]
mod train_support;
