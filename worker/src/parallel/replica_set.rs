//! The ranks over which a gradient is summed, and how the sum comes about.
//!
//! | strategy | first | then |
//! |---|---|---|
//! | DDP | all-reduce over all of them | |
//! | ZeRO (FSDP) | reduce-scatter over the shard group, which is all of them | |
//! | hybrid sharding (HSDP; Zhao et al. 2023) | reduce-scatter over the shard group | once a step, all-reduce of each shard over the replicate group |
//!
//! Sums run in rank order within a shard group, then in the order of the groups.

use crate::collective::{CollectiveError, Communicator};
use crate::mesh::{Axis, DATA, Mesh};

/// The groups of one rank. Clones are the same groups.
#[derive(Clone)]
pub struct ReplicaSet {
    all: Communicator,
    reduce: Communicator,
    replicate: Option<Communicator>,
}

impl ReplicaSet {
    /// All ranks of `comm` hold one state: each a copy of it (DDP), or each a shard of it (ZeRO).
    #[must_use]
    pub fn of_all(comm: Communicator) -> Self {
        Self {
            reduce: comm.clone(),
            all: comm,
            replicate: None,
        }
    }

    /// The data-parallel ranks of a mesh. Every rank must call it.
    pub fn of(mesh: &Mesh) -> Result<Self, CollectiveError> {
        let all = mesh.group(&DATA)?;
        let is_hybrid = [Axis::Replicate, Axis::Shard].map(|axis| mesh.size(&[axis]) > 1);
        if is_hybrid != [true, true] {
            return Ok(Self::of_all(all));
        }
        Ok(Self {
            all,
            reduce: mesh.group(&[Axis::Shard])?,
            replicate: Some(mesh.group(&[Axis::Replicate])?),
        })
    }

    /// All of them. Memory that is allocated here serves the operations of both groups in place.
    #[must_use]
    pub fn all(&self) -> &Communicator {
        &self.all
    }

    /// The ranks of the first reduction: those that hold one copy of the state together or, where nothing is sharded,
    /// all.
    #[must_use]
    pub fn reduce(&self) -> &Communicator {
        &self.reduce
    }

    /// The ranks that hold copies of this rank's shard; none if there is one copy, or nothing is sharded.
    #[must_use]
    pub fn replicate(&self) -> Option<&Communicator> {
        self.replicate.as_ref()
    }
}
