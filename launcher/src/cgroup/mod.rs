//! Control groups: which ones this process is in, and a group that holds all workers of one launcher.
//!
//! | module | what it does |
//! |---|---|
//! | `membership` | finds this process's groups, of version 2 and of version 1, wherever they are mounted |
//! | `group` | makes, watches, ends and removes the workers' group; removes empty groups of launchers that are gone |
//! | `entry` | lets processes into it |
//! | `cores` | how many cores the groups leave |
//!
//! No other module of this package knows where control groups are mounted, or what their files are called.

mod cores;
mod entry;
mod group;
mod membership;

pub use cores::{cpu_quota, usable_cores};
pub(crate) use entry::{CgroupEntry, fork, wait_for};
pub use group::{NoGroup, parent_of_workers};
pub(crate) use group::{WorkerCgroup, kill_members, members, remove};
pub(crate) use membership::CgroupMembership;
pub use membership::memory_limit;
#[cfg(test)]
pub(crate) use membership::tests::machine;
