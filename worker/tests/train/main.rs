//! Whole runs of training on the CPU: small jobs whose ranks are threads of this process.

mod checkpoint_worlds;
mod checkpoints;
mod costs;
mod generations;
mod host_offload;
mod inference;
mod initial_weights;
mod layouts;
mod live;
mod mixed_precision;
mod overlap;
mod parallel_regressions;
mod parity;
mod pipelines;
mod reducer_errors;
mod train_equalities;
mod train_runs;
mod train_steps;
mod train_support;
mod zero;
mod zero_worlds;
