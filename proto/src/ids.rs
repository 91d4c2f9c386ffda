//! Newtypes for the numbers that must never be mixed up.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Most nodes of a job: launchers and the daemon refuse more.
pub const MAX_NODES: u32 = 16_384;

/// Most workers of a node.
pub const MAX_WORKERS: u32 = 4096;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// The plain number.
            pub const fn get(self) -> $inner {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

    };
}

id!(
    /// Position of a node in the job, from 0. Torch calls it group rank.
    NodeRank(u32)
);
id!(
    /// Position of a worker among all workers of the job, from 0.
    GlobalRank(u32)
);
id!(
    /// Position of a worker among the workers of its node, from 0.
    LocalRank(u32)
);
id!(
    /// Number of workers of the job.
    WorldSize(u32)
);
id!(
    /// One life of the job between two changes of its membership, from 1; 0 means "not yet assigned".
    Generation(u64)
);

/// Name of one agent process, unique over restarts of the agent: its incarnation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub String);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
