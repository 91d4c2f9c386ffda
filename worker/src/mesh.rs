//! The mesh: how the ranks of a job are arranged along axes, and the groups of ranks that follow from it.
//!
//! | axis | the ranks along it |
//! |---|---|
//! | [`Axis::Replicate`] | hold copies of one shard of the state, and read different samples |
//! | [`Axis::Shard`] | hold one copy of the state together, each a shard of it, and read different samples |
//!
//! Both together are the data-parallel ranks ([`DATA`]). DDP has one rank along `shard`, ZeRO (FSDP) one along
//! `replicate`; hybrid sharding (HSDP) has several along both. The last axis varies fastest with the rank, so that
//! its groups are neighbours, and lie within a node where they can.
//!
//! This is the only place that computes ranks. A function that needs "how many ranks share this" is given a group.

use std::sync::{Mutex, PoisonError};

use ddp_proto::env::WorkerEnv;

use crate::collective::{CollectiveError, Communicator, Executor, WireBytes};
use crate::config::{Parallel, ShardGroup, Strategy};

/// A direction of the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// Copies of one shard.
    Replicate,
    /// Shards of one copy.
    Shard,
}

/// The axes along which ranks read different samples.
pub const DATA: [Axis; 2] = [Axis::Replicate, Axis::Shard];

impl Axis {
    /// All axes, the slowest first.
    pub const ALL: [Self; 2] = [Self::Replicate, Self::Shard];

    /// Name in configurations, errors and traces.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Replicate => "replicate",
            Self::Shard => "shard",
        }
    }
}

/// The ranks do not make a mesh.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`parallel.shard_group` is {found}, but {why}\n  hint: all groups must have the same number of ranks; change `--nproc-per-node` or `parallel.shard_group`"
)]
pub struct MeshError {
    /// Value of the key.
    pub found: String,
    /// In words.
    pub why: String,
}

/// Number of ranks along each axis: a pure function of configuration and job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeshShape {
    /// In the order of [`Axis::ALL`].
    sizes: [usize; Axis::ALL.len()],
}

impl MeshShape {
    /// The mesh of a job. Every rank computes the same.
    pub fn new(parallel: &Parallel, env: &WorkerEnv) -> Result<Self, MeshError> {
        let ranks = env.world_size.get() as usize;
        let refuse = |found: String, why: String| Err(MeshError { found, why });
        let shard = match (parallel.strategy, parallel.shard_group) {
            (Strategy::Ddp, _) => 1,
            (_, None) => ranks,
            (_, Some(ShardGroup::Node)) => {
                let local = env.local_world_size as usize;
                if local * env.node_count as usize != ranks {
                    let why = format!(
                        "the {ranks} ranks are not spread evenly over {} nodes: this one has {local}",
                        env.node_count
                    );
                    return refuse("node".into(), why);
                }
                local
            }
            (_, Some(ShardGroup::Ranks(shard))) if shard == 0 || !ranks.is_multiple_of(shard) => {
                let why = format!("{ranks} ranks are not groups of {shard}");
                return refuse(shard.to_string(), why);
            }
            (_, Some(ShardGroup::Ranks(shard))) => shard,
        };
        Ok(Self {
            sizes: [ranks / shard, shard],
        })
    }

    /// Ranks along all of `axes`.
    #[must_use]
    pub fn size(&self, axes: &[Axis]) -> usize {
        axes.iter().map(|&axis| self.sizes[axis as usize]).product()
    }

    /// All ranks.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.size(&Axis::ALL)
    }

    /// Where `rank` stands among the ranks that differ from it along `axes` only.
    #[must_use]
    pub fn index(&self, rank: usize, axes: &[Axis]) -> usize {
        let along = Axis::ALL.iter().filter(|axis| axes.contains(axis));
        along.fold(0, |index, &axis| {
            index * self.sizes[axis as usize] + self.coordinate(rank, axis)
        })
    }

    /// The ranks that differ from `rank` along `axes` only, itself included, in ascending order.
    #[must_use]
    pub fn members(&self, rank: usize, axes: &[Axis]) -> Vec<usize> {
        let is_member = |other: &usize| {
            let mut fixed = Axis::ALL.iter().filter(|axis| !axes.contains(axis));
            fixed.all(|&axis| self.coordinate(*other, axis) == self.coordinate(rank, axis))
        };
        (0..self.ranks()).filter(is_member).collect()
    }

    /// A job can go on with another number of ranks only if it is a multiple of this one; none: with any.
    #[must_use]
    pub fn ranks_multiple_of(parallel: &Parallel) -> Option<u64> {
        match (parallel.strategy, parallel.shard_group) {
            (Strategy::Ddp, _) | (_, None | Some(ShardGroup::Node | ShardGroup::Ranks(1))) => None,
            (_, Some(ShardGroup::Ranks(shard))) => Some(shard as u64),
        }
    }

    fn coordinate(&self, rank: usize, axis: Axis) -> usize {
        let faster = &Axis::ALL[axis as usize + 1..];
        rank / self.size(faster) % self.sizes[axis as usize]
    }
}

/// This rank in the mesh, and the communicators of its groups.
pub struct Mesh {
    shape: MeshShape,
    world: Communicator,
    executor: Executor,
    /// Groups made so far, but for the world.
    groups: Mutex<Vec<Group>>,
}

struct Group {
    members: Vec<usize>,
    name: String,
    comm: Communicator,
}

impl Mesh {
    /// `world` has all ranks of the mesh. Groups get executors of their own.
    ///
    /// # Panics
    /// If `world` has another number of ranks than the mesh.
    #[must_use]
    pub fn new(shape: MeshShape, world: Communicator, executor: Executor) -> Self {
        assert_eq!(shape.ranks(), world.size(), "the mesh has all ranks of the world");
        Self {
            shape,
            world,
            executor,
            groups: Mutex::default(),
        }
    }

    /// Ranks along all of `axes`.
    #[must_use]
    pub fn size(&self, axes: &[Axis]) -> usize {
        self.shape.size(axes)
    }

    /// Where this rank stands in the group along `axes`.
    #[must_use]
    pub fn index(&self, axes: &[Axis]) -> usize {
        self.shape.index(self.world.rank(), axes)
    }

    /// The communicator of this rank's group along `axes`: the world's where the group is the world, else one that is
    /// made at the first call and kept. Every rank must make the same calls in the same order, with no operation of
    /// the world in flight.
    pub fn group(&self, axes: &[Axis]) -> Result<Communicator, CollectiveError> {
        let members = self.members(axes);
        if members.len() == self.world.size() {
            return Ok(self.world.clone());
        }
        let names: Vec<&str> = axes.iter().map(|axis| axis.name()).collect();
        self.split(members, &names.join(" × "))
    }

    /// Another communicator of the same group, whose operations do not queue behind those of [`Mesh::group`].
    pub fn group_for(&self, axes: &[Axis], name: &str) -> Result<Communicator, CollectiveError> {
        self.split(self.members(axes), name)
    }

    /// Bytes that this rank has sent in all groups.
    #[must_use]
    pub fn wire_bytes(&self) -> WireBytes {
        let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let of_groups = groups.iter().map(|group| group.comm.wire_bytes());
        of_groups.fold(self.world.wire_bytes(), |sum, bytes| sum + bytes)
    }

    fn members(&self, axes: &[Axis]) -> Vec<usize> {
        self.shape.members(self.world.rank(), axes)
    }

    fn split(&self, members: Vec<usize>, name: &str) -> Result<Communicator, CollectiveError> {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let is_asked_for = |group: &&Group| group.members == members && group.name == name;
        if let Some(group) = groups.iter().find(is_asked_for) {
            return Ok(group.comm.clone());
        }
        let comm = self.world.split(name, &members, self.executor)?;
        groups.push(Group {
            members,
            name: name.to_owned(),
            comm: comm.clone(),
        });
        Ok(comm)
    }
}

#[cfg(test)]
mod tests {
    use ddp_proto::ids::WorldSize;

    use super::*;

    /// The mesh of so many nodes of so many ranks, `ranks` in all.
    fn shape(group: Option<ShardGroup>, nodes: u32, local: u32, ranks: u32) -> Result<MeshShape, String> {
        let parallel = Parallel {
            strategy: Strategy::Zero2,
            shard_group: group,
            ..Parallel::default()
        };
        let env = WorkerEnv {
            world_size: WorldSize(ranks),
            node_count: nodes,
            local_world_size: local,
            ..WorkerEnv::single()
        };
        MeshShape::new(&parallel, &env).map_err(|error| error.to_string())
    }

    #[test]
    fn groups_are_all_ranks_or_a_node_or_as_many_as_asked_for() {
        let sizes = |group| {
            let shape = shape(group, 2, 3, 6).unwrap();
            [Axis::Replicate, Axis::Shard].map(|axis| shape.size(&[axis]))
        };
        assert_eq!(sizes(None), [1, 6]);
        assert_eq!(sizes(Some(ShardGroup::Node)), [2, 3]);
        assert_eq!(sizes(Some(ShardGroup::Ranks(2))), [3, 2]);
        let ddp = MeshShape::new(&Parallel::default(), &WorkerEnv::single()).unwrap();
        assert_eq!((ddp.size(&DATA), ddp.size(&[Axis::Shard])), (1, 1));
    }

    #[test]
    fn groups_that_do_not_fit_are_refused() {
        insta::assert_snapshot!(shape(Some(ShardGroup::Ranks(4)), 2, 3, 6).unwrap_err(), @r"
        `parallel.shard_group` is 4, but 6 ranks are not groups of 4
          hint: all groups must have the same number of ranks; change `--nproc-per-node` or `parallel.shard_group`
        ");
        insta::assert_snapshot!(shape(Some(ShardGroup::Node), 2, 2, 3).unwrap_err(), @r"
        `parallel.shard_group` is node, but the 3 ranks are not spread evenly over 2 nodes: this one has 2
          hint: all groups must have the same number of ranks; change `--nproc-per-node` or `parallel.shard_group`
        ");
    }

    #[test]
    fn the_last_axis_varies_fastest() {
        let shape = shape(Some(ShardGroup::Ranks(2)), 1, 6, 6).unwrap();
        assert_eq!(shape.members(3, &[Axis::Shard]), [2, 3]);
        assert_eq!(shape.members(3, &[Axis::Replicate]), [1, 3, 5]);
        assert_eq!(shape.members(3, &DATA), [0, 1, 2, 3, 4, 5]);
        assert_eq!(shape.members(3, &[]), [3]);
        assert_eq!(shape.index(3, &[Axis::Shard]), 1);
        assert_eq!(shape.index(3, &[Axis::Replicate]), 1);
        assert_eq!(shape.index(3, &DATA), 3);
    }

    #[test]
    fn a_rank_is_in_one_group_of_each_kind_at_its_index() {
        for (group, ranks) in [
            (None, 6),
            (Some(ShardGroup::Ranks(3)), 12),
            (Some(ShardGroup::Ranks(1)), 4),
        ] {
            let shape = shape(group, 1, ranks, ranks).unwrap();
            for axes in [&[][..], &[Axis::Replicate], &[Axis::Shard], &DATA] {
                for rank in 0..shape.ranks() {
                    let members = shape.members(rank, axes);
                    assert_eq!(members.len(), shape.size(axes));
                    assert_eq!(members[shape.index(rank, axes)], rank);
                    assert!(members.iter().all(|&other| shape.members(other, axes) == members));
                }
            }
        }
    }
}
