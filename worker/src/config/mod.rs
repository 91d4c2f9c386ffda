//! `train.yaml`: its sections as types.
//!
//! All sections but `model` and `data` are optional; unknown keys are refused.

mod schema;

pub use schema::{
    Backend, Data, LearningRate, Model, ModelKind, Optimizer, OptimizerKind, Order, Parallel, Precision,
    Resume, Run, Schedule, Strategy, Sync, Tokenizer, Train, TrainConfig,
};
