//! Pipeline parallelism: schedules as data, and what can be said of them before anything runs.
//!
//! The layers of a model are cut into stages, and each rank of the pipeline's axis holds one or several of them (its
//! chunks). A schedule says what every rank does in a step. It is made by a generator, completed by passes, checked by
//! the validator, and timed by the simulator; nothing here computes or communicates, or knows a model.
//!
//! | part | what it is |
//! |---|---|
//! | [`Action`], [`Cell`], [`Schedule`] | what ranks do, in order; [`Transfer`] and [`Edge`]: messages between them |
//! | [`Placement`], [`divide_layers`] | which rank holds which stage; which layers a stage consists of |
//! | [`gpipe`], [`one_f_one_b`], [`interleaved_1f1b`], [`zb_h1`] | generators for stages in a loop |
//! | [`zbv`], [`dual_pipe_v`], [`greedy`] | generators for stages in a V |
//! | [`with_transfers`], [`with_reduction`] | passes that complete a schedule |
//! | [`without_overlap`], [`forward_only`] | passes that change what it computes |
//! | [`validate`], [`least_capacity`] | refuses what cannot be run, and says why |
//! | [`simulate`] | when each rank does what, its bubbles and its memory |
//! | [`SchedulePicture`], [`grid`] | a simulated step as an SVG, and as text |
//! | [`PipelinePlan`] | the pipeline of a configuration: its schedule, checked, and the layers of each stage |
//! | [`csv`] | schedules as text, as PyTorch's `torch.distributed.pipelining` has them |

mod action;
pub mod csv;
mod generators;
mod passes;
mod picture;
mod plan;
mod simulator;
mod stages;
mod validator;

pub use action::{Action, ActionKind, Cell, Edge, Schedule, Transfer};
pub use generators::{
    PipelineShape, ShapeError, dual_pipe_v, gpipe, greedy, interleaved_1f1b, one_f_one_b, zb_h1, zbv,
};
pub use passes::{forward_only, with_reduction, with_transfers, without_overlap};
pub use picture::{SchedulePicture, grid};
pub use plan::{PipelinePlan, PlanError};
pub use simulator::{Deadlock, Interval, Links, RankTimeline, Simulation, StageCosts, Waiting, simulate};
pub use stages::{LayerCosts, Placement, TooFewLayers, divide_layers};
pub use validator::{Purpose, Reason, Refusal, Rules, least_capacity, validate};
