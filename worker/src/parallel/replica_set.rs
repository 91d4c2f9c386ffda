//! Which ranks sum, own, count and write a parameter. This follows from its role along each axis of the mesh.
//!
//! All gradients are summed over the data-parallel ranks ([`GRADIENTS`]): over `shard` they are reduce-scattered, so that
//! each rank owns a slice, over `replicate` all-reduced. That is DDP where `shard` has one rank, ZeRO (FSDP) where
//! `replicate` has one, and hybrid sharding (HSDP; Zhao et al. 2023) where both have several: reduce-scatter over the
//! shard group, then once a step an all-reduce of each shard over the replicate group. Sums run in rank order within a
//! shard group, then in the order of the groups.
//!
//! Along the other axes parameters differ ([`AxisRole`]):
//!
//! | role along `tensor` or `pipeline` | its gradient | counted in the norm, written to a checkpoint |
//! |---|---|---|
//! | cut | is another one on each rank | by each rank |
//! | equal gradients | is the same on each rank | by the first rank |
//! | partial gradients | is summed over these ranks too, before the data-parallel ones | by the first rank |
//!
//! Partial are the gradients of norms and of row layers' biases over a tensor group that shares rows (Korthikanti et al.
//! 2022), and that of a tied embedding over the first and the last stage. These ranks are a [`CopyGroup`]. They sum before
//! the data-parallel ranks do, so that one rank that has both uses of a tied weight adds the same numbers in the same order.
//!
//! The norm is combined over the ranks that hold one copy of the model together. A checkpoint has everything once: of the
//! copies along `replicate` each rank writes an equal part.

use std::collections::BTreeSet;

use crate::collective::{CollectiveError, Communicator};
use crate::mesh::{Axis, GRADIENTS, Mesh};
use crate::model::{AxisRole, ParamId, ParamSpec};

/// The axes along which ranks hold one copy of the model together.
pub const ONE_COPY: [Axis; 3] = [Axis::Pipeline, Axis::Shard, Axis::Tensor];

/// The axes other than the data-parallel ones: along these parameters have roles of their own.
const MODEL: [Axis; 2] = [Axis::Tensor, Axis::Pipeline];

/// True on one of the ranks that hold copies of the same parameter along the axes other than `replicate`: it counts the
/// parameter in the norm and writes it. `index` is where the rank stands along an axis.
pub fn is_counted(roles: &[AxisRole; Axis::ALL.len()], index: impl Fn(Axis) -> usize) -> bool {
    let is_only = |axis: Axis| roles[axis as usize] == AxisRole::Cut || index(axis) == 0;
    MODEL.into_iter().all(is_only)
}

/// The groups of one rank. Clones are the same groups.
#[derive(Clone)]
pub struct ReplicaSet {
    /// The ranks over which a gradient is summed. Memory that is allocated here serves `reduce` and `replicate` in
    /// place.
    pub all: Communicator,
    /// The ranks of the first reduction, which own slices of the sums: those of a shard group or, where nothing is
    /// sharded, all.
    pub reduce: Communicator,
    /// The ranks over which this rank's slice of the sums is added up after that; none if that is the sum.
    pub replicate: Option<Communicator>,
    /// The ranks that hold one copy of the model together ([`ONE_COPY`]): the norm is combined over them. None if this
    /// rank holds all of it.
    pub owners: Option<Communicator>,
    /// The ranks along `replicate`, which hold copies of what this rank owns; none if it is the only one.
    pub copies: Option<Communicator>,
    /// Other ranks that hold some of the parameters too, in the order in which their gradients are summed.
    pub copy_groups: Vec<CopyGroup>,
    /// Counted and written by another rank.
    uncounted: BTreeSet<ParamId>,
}

/// Ranks along an axis that hold copies of some parameters, and read the same samples.
#[derive(Clone)]
pub struct CopyGroup {
    /// Communicator of these ranks, used for nothing else.
    pub comm: Communicator,
    /// Each of them holds all of these.
    pub held: BTreeSet<ParamId>,
    /// The ranks that each have a part of the gradient.
    pub summed: BTreeSet<ParamId>,
}

impl CopyGroup {
    /// What the ranks along `axis` share of `params`; none if that is nothing.
    fn of(comm: Communicator, axis: Axis, params: &[ParamSpec]) -> Option<Self> {
        let with_role = |is_asked_for: fn(AxisRole) -> bool| {
            let ids = (0..params.len()).map(ParamId);
            ids.filter(|id| is_asked_for(params[id.0].roles[axis as usize]))
                .collect::<BTreeSet<_>>()
        };
        let held = with_role(|role| role != AxisRole::Cut);
        let summed = with_role(|role| role == AxisRole::PartialGradients);
        (!held.is_empty()).then_some(Self { comm, held, summed })
    }
}

impl ReplicaSet {
    /// All ranks of `comm` hold one state: each a copy of it (DDP), or each a shard of it (ZeRO).
    pub fn of_all(comm: Communicator) -> Self {
        Self {
            reduce: comm.clone(),
            all: comm,
            replicate: None,
            owners: None,
            copies: None,
            copy_groups: Vec::new(),
            uncounted: BTreeSet::new(),
        }
    }

    /// The groups for the parameters that this rank holds. Every rank of the mesh must call it.
    ///
    /// # Panics
    /// If the data-parallel ranks do not all have a part of some gradient.
    pub fn of(mesh: &Mesh, params: &[ParamSpec]) -> Result<Self, CollectiveError> {
        let is_partial = |param: &ParamSpec, axis| param.roles[axis as usize] == AxisRole::PartialGradients;
        assert!(
            (params.iter()).all(|param| GRADIENTS.into_iter().all(|axis| is_partial(param, axis))),
            "data-parallel ranks read different samples"
        );
        let group_if_several = |axes: &[Axis]| {
            let several: Vec<Axis> = (axes.iter().copied())
                .filter(|&axis| mesh.size(&[axis]) > 1)
                .collect();
            match &several[..] {
                [] => Ok(None),
                several => mesh.group(several).map(Some),
            }
        };
        let all = match group_if_several(&GRADIENTS)? {
            Some(all) => all,
            None => mesh.group(&GRADIENTS)?,
        };
        let [shard, copies] = [Axis::Shard, Axis::Replicate].map(|axis| group_if_several(&[axis]));
        let (shard, copies) = (shard?, copies?);
        let (reduce, replicate) = match (shard, &copies) {
            (Some(shard), Some(copies)) => (shard, Some(copies.clone())),
            _ => (all.clone(), None),
        };
        let owners = group_if_several(&ONE_COPY)?;
        let mut copy_groups = Vec::new();
        for axis in MODEL {
            if mesh.size(&[axis]) == 1 {
                continue;
            }
            let comm = match axis {
                Axis::Pipeline => mesh.ends(axis, "first and last stage")?,
                _ => mesh.group_for(&[axis], "copies along tensor")?,
            };
            copy_groups.extend(CopyGroup::of(comm, axis, params));
        }
        let is_elsewhere = |id: &ParamId| !is_counted(&params[id.0].roles, |axis| mesh.index(&[axis]));
        Ok(Self {
            uncounted: (0..params.len()).map(ParamId).filter(is_elsewhere).collect(),
            all,
            reduce,
            replicate,
            owners,
            copies,
            copy_groups,
        })
    }

    /// Which of the copies along `replicate` this rank holds, and how many there are: each writes an equal part.
    pub fn copy(&self) -> (usize, usize) {
        self.copies
            .as_ref()
            .map_or((0, 1), |copies| (copies.rank(), copies.size()))
    }

    /// True if this rank counts in the norm, and writes, what it owns of a parameter; else another one does, which holds
    /// the same.
    pub fn is_counted(&self, id: ParamId) -> bool {
        !self.uncounted.contains(&id)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use AxisRole::{Cut, EqualGradients, PartialGradients};
    use ddp_proto::env::WorkerEnv;

    use super::*;
    use crate::collective::{Executor, SingleRank};
    use crate::config::Parallel;
    use crate::device::DType;
    use crate::mesh::MeshShape;
    use crate::model::{GroupId, Init};
    use crate::session::Cancel;

    /// Of a parameter that is replicated but for these roles.
    fn roles(along_pipeline: AxisRole, along_tensor: AxisRole) -> [AxisRole; Axis::ALL.len()] {
        let mut roles = AxisRole::replicated();
        roles[Axis::Pipeline as usize] = along_pipeline;
        roles[Axis::Tensor as usize] = along_tensor;
        roles
    }

    /// Where a rank stands along pipeline and tensor; along the data-parallel axes it is not the first.
    fn at(pipeline: usize, tensor: usize) -> impl Fn(Axis) -> usize {
        move |axis| match axis {
            Axis::Pipeline => pipeline,
            Axis::Tensor => tensor,
            Axis::Replicate | Axis::Shard => 1,
        }
    }

    #[test]
    fn every_part_of_a_cut_parameter_counts() {
        for (pipeline, tensor) in [(0, 0), (0, 1), (1, 0), (2, 3)] {
            assert!(is_counted(&roles(Cut, Cut), at(pipeline, tensor)));
        }
    }

    #[test]
    fn of_copies_along_tensor_the_first_counts() {
        for role in [EqualGradients, PartialGradients] {
            assert!(is_counted(&roles(Cut, role), at(2, 0)));
            assert!(!is_counted(&roles(Cut, role), at(2, 1)));
        }
    }

    #[test]
    fn of_a_tied_weight_the_first_stage_counts_every_part() {
        let tied = roles(PartialGradients, Cut);
        assert!(is_counted(&tied, at(0, 0)) && is_counted(&tied, at(0, 1)));
        assert!(!is_counted(&tied, at(3, 0)));
    }

    fn of_one_rank(roles: [[AxisRole; Axis::ALL.len()]; 2]) -> ReplicaSet {
        let (solo, timeout) = (Box::new(SingleRank::new(0)), Duration::from_secs(10));
        let comm = Communicator::new("solo", solo, Executor::Inline, timeout, &Cancel::default());
        let shape = MeshShape::new(&Parallel::default(), &WorkerEnv::single()).unwrap();
        let spec = |roles| ParamSpec {
            key: "w".into(),
            global_shape: vec![1],
            cut: None,
            roles,
            dtype: DType::F32,
            init: Init::Constant(0.0),
            decay: true,
            group: GroupId(0),
            projections: Vec::new(),
        };
        ReplicaSet::of(&Mesh::new(shape, comm, Executor::Inline), &roles.map(spec)).unwrap()
    }

    #[test]
    fn one_rank_owns_counts_and_writes_all() {
        let set = of_one_rank([
            roles(Cut, EqualGradients),
            roles(PartialGradients, PartialGradients),
        ]);
        assert!(set.replicate.is_none() && set.copies.is_none() && set.owners.is_none());
        assert!(set.copy_groups.is_empty());
        assert!(set.is_counted(ParamId(0)) && set.is_counted(ParamId(1)));
        assert_eq!(set.copy(), (0, 1));
    }

    #[test]
    #[should_panic(expected = "data-parallel ranks read different samples")]
    fn parameters_of_which_data_parallel_ranks_hold_parts_are_refused() {
        of_one_rank([AxisRole::replicated(), [Cut; Axis::ALL.len()]]);
    }
}
