//! Control groups: what those of this process leave to it, and a group that holds all workers of one launcher.
//!
//! | module | what it does |
//! |---|---|
//! | `group` | makes, watches, ends and removes the workers' group; removes empty groups of launchers that are gone |
//! | `entry` | lets processes into it |
//! | `cores` | how many cores the groups leave |
//!
//! No other module of this package knows where control groups are mounted, or what their files are called.

mod cores;
mod entry;
mod group;

#[cfg(test)]
pub(crate) use cores::tests::machine;
pub use cores::{cpu_quota, usable_cores};
pub(crate) use entry::{CgroupEntry, fork, wait_for};
pub use group::{NoGroup, parent_of_workers};
pub(crate) use group::{WorkerCgroup, kill_members, members, remove};
