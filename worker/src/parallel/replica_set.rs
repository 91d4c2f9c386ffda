//! Who sums, owns, counts and writes a parameter: what follows from its role along each axis of the mesh.
//!
//! | role along an axis ([`AxisRole`]) | its gradient | its elements |
//! |---|---|---|
//! | cut | is another one on each rank | each rank owns other ones |
//! | partial gradients, axis `shard` | is reduce-scattered | each rank owns a slice |
//! | partial gradients, another axis | is all-reduced | the ranks hold copies |
//! | equal gradients | is the same on each rank | the ranks hold copies |
//!
//! The global norm is combined over the ranks that own other elements; of copies the first rank's counts. A checkpoint
//! has everything once: of copies each rank writes an equal part.
//!
//! With both axes of today's meshes that is DDP where `shard` has one rank, ZeRO (FSDP) where `replicate` has one, and
//! hybrid sharding (HSDP; Zhao et al. 2023) where both have several: reduce-scatter over the shard group, then once a
//! step an all-reduce of each shard over the replicate group. Sums run in rank order within a shard group, then in the
//! order of the groups.

use crate::collective::{CollectiveError, Communicator};
use crate::mesh::{Axis, Mesh};
use crate::model::{AxisRole, ParamSpec};

/// The axes of a mesh by what the ranks along them do with a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
struct AxisSets<A> {
    /// Its gradient is summed over the ranks along these.
    summed: Vec<A>,
    /// The ranks along these own different elements of it.
    divided: Vec<A>,
    /// The ranks along these hold copies of the same elements.
    copied: Vec<A>,
}

impl<A: Copy + PartialEq> AxisSets<A> {
    /// `shard` is the axis over whose ranks sums are cut into slices.
    fn of(roles: impl IntoIterator<Item = (A, AxisRole)>, shard: A) -> Self {
        let mut sets = Self {
            summed: Vec::new(),
            divided: Vec::new(),
            copied: Vec::new(),
        };
        for (axis, role) in roles {
            let is_summed = role == AxisRole::PartialGradients;
            if is_summed {
                sets.summed.push(axis);
            }
            if role == AxisRole::Cut || (is_summed && axis == shard) {
                sets.divided.push(axis);
            } else {
                sets.copied.push(axis);
            }
        }
        sets
    }

    /// True on one of the ranks that hold copies, where the norm is combined over all ranks along `combined`.
    fn is_counted(&self, combined: &[A], coordinate: impl Fn(A) -> usize) -> bool {
        let copied = self.copied.iter().filter(|axis| combined.contains(axis));
        copied.into_iter().all(|&axis| coordinate(axis) == 0)
    }
}

/// The groups of one rank for parameters of the same roles. Clones are the same groups.
#[derive(Clone)]
pub struct ReplicaSet {
    /// The ranks over which a gradient is summed. Memory that is allocated here serves `reduce` and `replicate` in
    /// place.
    pub all: Communicator,
    /// The ranks of the first reduction: those that hold one copy of the state together or, where nothing is sharded,
    /// all.
    pub reduce: Communicator,
    /// The ranks over which this rank's slice of the sums is added up after that; none if that is the sum.
    pub replicate: Option<Communicator>,
    /// The ranks that own everything together, each other elements: the norm is combined over them. Where this rank
    /// owns everything, all.
    pub owners: Communicator,
    /// The ranks that hold copies of what this rank owns; none if it is the only one.
    pub copies: Option<Communicator>,
    /// This rank counts what it owns in the norm.
    pub is_counted: bool,
}

impl ReplicaSet {
    /// All ranks of `comm` hold one state: each a copy of it (DDP), or each a shard of it (ZeRO).
    #[must_use]
    pub fn of_all(comm: Communicator) -> Self {
        Self {
            reduce: comm.clone(),
            owners: comm.clone(),
            all: comm,
            replicate: None,
            copies: None,
            is_counted: true,
        }
    }

    /// Of parameters that are all of the same roles. Every rank of the mesh must call it.
    ///
    /// # Panics
    /// If there are none, or their roles differ: parameters of other roles need a reducer of their own.
    pub fn of(mesh: &Mesh, params: &[ParamSpec]) -> Result<Self, CollectiveError> {
        let roles = params[0].roles;
        assert!(
            params.iter().all(|param| param.roles == roles),
            "parameters of one reducer have the same roles"
        );
        let sets = AxisSets::of(Axis::ALL.into_iter().zip(roles), Axis::Shard);
        let group_if_several = |axes: &[Axis]| match mesh.size(axes) {
            1 => Ok(None),
            _ => mesh.group(axes).map(Some),
        };
        let all = mesh.group(&sets.summed)?;
        let (sliced, whole): (Vec<Axis>, Vec<Axis>) =
            sets.summed.iter().partition(|axis| sets.divided.contains(axis));
        let (reduce, replicate) = match [group_if_several(&sliced)?, group_if_several(&whole)?] {
            [Some(sliced), Some(whole)] => (sliced, Some(whole)),
            _ => (all.clone(), None),
        };
        Ok(Self {
            owners: group_if_several(&sets.divided)?.unwrap_or_else(|| all.clone()),
            copies: group_if_several(&sets.copied)?,
            is_counted: sets.is_counted(&sets.divided, |axis| mesh.index(&[axis])),
            all,
            reduce,
            replicate,
        })
    }

    /// Which of the copies of what this rank owns it holds, and how many there are: each writes an equal part.
    #[must_use]
    pub fn copy(&self) -> (usize, usize) {
        self.copies
            .as_ref()
            .map_or((0, 1), |copies| (copies.rank(), copies.size()))
    }
}

#[cfg(test)]
mod tests {
    use AxisRole::{Cut, EqualGradients, PartialGradients};
    use MeshAxis::{Replicate, Shard, Tensor};

    use super::*;

    /// The axes of today, and one that there is not yet.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum MeshAxis {
        Replicate,
        Shard,
        Tensor,
    }

    fn sets(along_tensor: AxisRole) -> AxisSets<MeshAxis> {
        let roles = [
            (Replicate, PartialGradients),
            (Shard, PartialGradients),
            (Tensor, along_tensor),
        ];
        AxisSets::of(roles, Shard)
    }

    #[test]
    fn todays_parameters_are_summed_over_all_sharded_and_copied() {
        let roles = Axis::ALL.into_iter().zip(AxisRole::replicated());
        let expected = AxisSets {
            summed: vec![Axis::Replicate, Axis::Shard],
            divided: vec![Axis::Shard],
            copied: vec![Axis::Replicate],
        };
        assert_eq!(AxisSets::of(roles, Axis::Shard), expected);
    }

    #[test]
    fn a_part_of_a_cut_parameter_is_summed_over_the_ranks_that_hold_the_same_part() {
        let expected = AxisSets {
            summed: vec![Replicate, Shard],
            divided: vec![Shard, Tensor],
            copied: vec![Replicate],
        };
        assert_eq!(sets(Cut), expected);
        // Every rank of the tensor group owns something else, so all count.
        for tensor in 0..2 {
            let coordinate = |axis| if axis == Tensor { tensor } else { 0 };
            assert!(sets(Cut).is_counted(&[Shard, Tensor], coordinate));
        }
    }

    /// A norm's weight under sequence parallelism: each rank of the tensor group has gradients of its own rows.
    #[test]
    fn partial_gradients_are_summed_over_the_tensor_group_too() {
        let expected = AxisSets {
            summed: vec![Replicate, Shard, Tensor],
            divided: vec![Shard],
            copied: vec![Replicate, Tensor],
        };
        assert_eq!(sets(PartialGradients), expected);
    }

    #[test]
    fn equal_gradients_are_not_summed() {
        let expected = AxisSets {
            summed: vec![Replicate, Shard],
            divided: vec![Shard],
            copied: vec![Replicate, Tensor],
        };
        assert_eq!(sets(EqualGradients), expected);
    }

    #[test]
    fn of_copies_one_counts_in_a_norm_that_is_combined_over_them() {
        for role in [PartialGradients, EqualGradients] {
            let is_counted = |combined: &[MeshAxis], at: [usize; 3]| {
                sets(role).is_counted(combined, |axis| at[axis as usize])
            };
            // Cut parameters beside it make the norm one over the tensor group.
            let combined = [Shard, Tensor];
            assert!(is_counted(&combined, [0, 1, 0]));
            assert!(!is_counted(&combined, [0, 1, 1]));
            // The replicate groups combine the same norm, each for itself.
            assert!(is_counted(&combined, [1, 1, 0]));
            assert!(is_counted(&[Shard], [0, 1, 1]));
        }
    }
}
