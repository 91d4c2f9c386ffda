//! Control groups: where this process stands in them, and a group that holds all workers of one launcher.
//!
//! | module | what it does |
//! |---|---|
//! | `standing` | finds this process's groups, of version 2 and of version 1, wherever they are mounted |
//! | `group` | makes, watches, ends and removes the workers' group |
//! | `entry` | lets processes into it |
//! | `leftovers` | removes empty groups of launchers that are gone |
//! | `cores` | how many cores the groups leave |
//!
//! No other module of this package knows where control groups are mounted, or what their files are called.

mod cores;
mod entry;
mod group;
mod leftovers;
mod standing;

pub use cores::{cpu_quota, usable_cores};
pub(crate) use entry::{CgroupEntry, Forked, fork, wait_for};
pub use group::{NoGroup, parent_of_workers};
pub(crate) use group::{WorkerCgroup, kill_members, members, remove};
pub(crate) use standing::Standing;
pub use standing::memory_limit;
#[cfg(test)]
pub(crate) use standing::tests::machine;
