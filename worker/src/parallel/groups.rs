//! Which ranks hold one copy of the state together, and how the copies stay the same (hybrid sharding: Zhao et al.
//! 2023, PyTorch FSDP).
//!
//! Ranks are cut into groups of neighbours; each group holds one copy. Gradients are reduce-scattered within a group,
//! then, once a step, each slice is all-reduced with the ranks that own the same slice of the other copies; parameters
//! are gathered within a group. Sums run in rank order within a group, then in the order of groups. One group of all ranks is plain
//! sharding, and costs no communicator of its own.

use crate::collective::{CollectiveError, Communicator, Executor, Mesh, WireBytes};

/// See the module. Clones are the same groups.
#[derive(Clone)]
pub struct ShardGroups {
    world: Communicator,
    shard: Communicator,
    copies: Option<Communicator>,
}

impl ShardGroups {
    /// All ranks hold one copy.
    #[must_use]
    pub fn one(world: Communicator) -> Self {
        Self {
            shard: world.clone(),
            world,
            copies: None,
        }
    }

    /// Each `ranks` neighbours hold a copy; the size of `world` must be a multiple. Every rank must call it.
    pub fn of(world: &Communicator, ranks: usize, executor: Executor) -> Result<Self, CollectiveError> {
        if ranks == world.size() {
            return Ok(Self::one(world.clone()));
        }
        let dims = [("copies", world.size() / ranks.max(1)), ("shards", ranks)];
        let mesh = Mesh::new(world, &dims, executor)?;
        let group = |name| mesh.group(name).expect("the mesh has both dimensions").clone();
        Ok(Self {
            world: world.clone(),
            shard: group("shards"),
            copies: Some(group("copies")),
        })
    }

    /// All ranks. Memory that is allocated here serves the operations of all groups in place.
    #[must_use]
    pub fn world(&self) -> &Communicator {
        &self.world
    }

    /// The ranks that hold this rank's copy.
    #[must_use]
    pub fn shard(&self) -> &Communicator {
        &self.shard
    }

    /// The ranks that own the same slices of all copies; none if there is one copy.
    #[must_use]
    pub fn copies(&self) -> Option<&Communicator> {
        self.copies.as_ref()
    }

    /// Bytes that this rank has sent in all groups.
    #[must_use]
    pub fn wire_bytes(&self) -> WireBytes {
        let mut total = self.world.wire_bytes();
        if let Some(copies) = &self.copies {
            for part in [self.shard.wire_bytes(), copies.wire_bytes()] {
                total.grads += part.grads;
                total.params += part.params;
                total.other += part.other;
            }
        }
        total
    }
}
