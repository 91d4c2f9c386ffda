//! The agent of one node: joins the job, spawns and guards its workers, supervises them, reports failures.
//!
//! It knows the protocol of the daemon ([`ddp_proto`]) but not its insides, and nothing of tensors.

mod plan;

pub use plan::{LaunchPlan, NodeRange, WorkerCommand};
