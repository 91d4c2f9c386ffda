//! Which ranks sum, own, count and write a parameter. This follows from its role along each axis of the mesh.
//!
//! Gradients are summed over the data-parallel and the context ranks ([`GRADIENTS`]): over those that hold one copy of the
//! state together ([`MeshShape::sharded`]) they are reduce-scattered, so that each rank owns a slice, over the others
//! all-reduced. That is DDP where `shard` has one rank, ZeRO (FSDP) where
//! `replicate` has one, and hybrid sharding (HSDP; Zhao et al. 2023) where both have several: reduce-scatter over the
//! shard group, then once a step an all-reduce of each shard over the replicate group. Sums run in rank order within a
//! shard group, then in the order of the groups.
//!
//! Along a data-parallel axis a parameter may be cut instead: each rank holds another part of it, or another parameter, and
//! has the whole gradient of that. So it is summed over the ranks along the other axis only, and sharded over no rank that
//! holds something else. Parameters that are summed over the same axes ([`summed_over`]) are a [`StateGroup`]; their units
//! lie side by side in the same arenas, and every unit is reduced by its group. A dense model has one group.
//!
//! Along the other axes parameters differ too ([`AxisRole`]):
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
use crate::mesh::{Axis, GRADIENTS, Mesh, MeshShape};
use crate::model::{AxisRole, ParamId, ParamSpec};

/// The axes other than the data-parallel ones: of the copies along them, the first rank writes.
pub const MODEL_AXES: [Axis; 2] = [Axis::Tensor, Axis::Pipeline];

/// What the ranks along each of [`Axis::ALL`] hold of a parameter.
type Roles = [AxisRole; Axis::ALL.len()];

/// The data-parallel axes over which the gradient of a parameter with these roles is summed.
///
/// # Panics
/// If data-parallel ranks would have equal gradients.
pub fn summed_over(roles: &Roles) -> Vec<Axis> {
    let is_partial = |axis: &Axis| match roles[*axis as usize] {
        AxisRole::PartialGradients => true,
        AxisRole::Cut => false,
        AxisRole::EqualGradients => unreachable!("data-parallel ranks read different samples"),
    };
    GRADIENTS.into_iter().filter(is_partial).collect()
}

/// The axes of each [`StateGroup`] of a model. The first are all data-parallel axes.
pub fn group_axes(model: &[ParamSpec]) -> Vec<Vec<Axis>> {
    let mut groups = vec![GRADIENTS.to_vec()];
    for axes in model.iter().map(|spec| summed_over(&spec.roles)) {
        if !groups.contains(&axes) {
            groups.push(axes);
        }
    }
    groups
}

/// The axes along which ranks hold one copy of the model together, given all its parameters. The ranks along one of
/// [`GRADIENTS`] hold copies, unless state is `sharded` or a parameter cut there.
pub fn one_copy(model: &[ParamSpec], sharded: &[Axis]) -> Vec<Axis> {
    let is_cut = |axis: Axis| {
        model
            .iter()
            .any(|spec| spec.roles[axis as usize] == AxisRole::Cut)
    };
    let holds_part = |axis: &Axis| !GRADIENTS.contains(axis) || sharded.contains(axis) || is_cut(*axis);
    Axis::ALL.into_iter().filter(holds_part).collect()
}

/// True on one of the ranks that hold copies of the same elements along `axes`: the one that counts them in the norm (along
/// [`one_copy`]) and writes them to checkpoints (along [`MODEL_AXES`]). It is the `rank` of a mesh.
pub fn is_counted(roles: &Roles, axes: &[Axis], mesh: &MeshShape, rank: usize) -> bool {
    let is_cut = |axis: Axis| mesh.sharded().contains(&axis) || roles[axis as usize] == AxisRole::Cut;
    axes.iter()
        .all(|&axis| is_cut(axis) || mesh.index(rank, &[axis]) == 0)
}

/// The ranks that sum the gradients of some parameters, and own slices or copies of these. Clones are the same ranks.
#[derive(Clone)]
pub struct StateGroup {
    /// The axes that they are along ([`summed_over`]).
    pub axes: Vec<Axis>,
    /// All of them.
    pub all: Communicator,
    /// The ranks of the first reduction where they own slices of the sums; else all.
    pub shard: Communicator,
    /// The other axes' ranks, which hold copies of what this rank owns: its slice of the sums is added up over these
    /// after that. None if it is the only one.
    pub copies: Option<Communicator>,
    /// The ranks of `shard` again, who gather parameters.
    pub gathers: Communicator,
}

impl StateGroup {
    /// Every rank of the mesh must call it.
    fn new(mesh: &Mesh, axes: Vec<Axis>) -> Result<Self, CollectiveError> {
        let all = several(mesh, &axes)?.map_or_else(|| mesh.group(&axes), Ok)?;
        let sharded = mesh.shape().sharded_along(&axes);
        let shard = several(mesh, &sharded)?.unwrap_or_else(|| all.clone());
        Ok(Self {
            gathers: shard.clone(),
            shard,
            copies: several(mesh, &mesh.shape().copied_along(&axes))?,
            all,
            axes,
        })
    }
}

/// The ranks along those of `axes` that have several; none if none has.
fn several(mesh: &Mesh, axes: &[Axis]) -> Result<Option<Communicator>, CollectiveError> {
    let several = axes.iter().copied().filter(|&axis| mesh.size(&[axis]) > 1);
    let several: Vec<Axis> = several.collect();
    (!several.is_empty()).then(|| mesh.group(&several)).transpose()
}

/// The groups of one rank. Clones are the same groups.
#[derive(Clone)]
pub struct ReplicaSet {
    /// The data-parallel ranks. Memory that is allocated here serves all `groups` in place.
    pub all: Communicator,
    /// One for all parameters that are summed over the same axes. The first sums over all data-parallel ranks.
    pub groups: Vec<StateGroup>,
    /// The ranks that hold one copy of the model together ([`one_copy`]): the norm is combined over them. None if this
    /// rank holds all of it.
    pub owners: Option<Communicator>,
    /// Other ranks that hold some of the parameters too, in the order in which their gradients are summed.
    pub copy_groups: Vec<CopyGroup>,
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
        let group = StateGroup {
            axes: GRADIENTS.to_vec(),
            all: comm.clone(),
            shard: comm.clone(),
            gathers: comm.clone(),
            copies: None,
        };
        Self {
            all: comm,
            groups: vec![group],
            owners: None,
            copy_groups: Vec::new(),
        }
    }

    /// The groups for the parameters `params` that this rank holds of a `model`. Every rank of the mesh must call it.
    pub fn of(mesh: &Mesh, params: &[ParamSpec], model: &[ParamSpec]) -> Result<Self, CollectiveError> {
        let groups = (group_axes(model).into_iter()).map(|axes| StateGroup::new(mesh, axes));
        let groups = groups.collect::<Result<Vec<_>, _>>()?;
        let owners = several(mesh, &one_copy(model, mesh.shape().sharded()))?;
        let mut copy_groups = Vec::new();
        for axis in MODEL_AXES {
            if mesh.size(&[axis]) == 1 {
                continue;
            }
            let comm = match axis {
                Axis::Pipeline => mesh.ends(axis, "first and last stage")?,
                _ => mesh.group_for(&[axis], "copies along tensor")?,
            };
            copy_groups.extend(CopyGroup::of(comm, axis, params));
        }
        Ok(Self {
            all: groups[0].all.clone(),
            groups,
            owners,
            copy_groups,
        })
    }

    /// Gives each group a communicator of its own for gathering, which then overlaps with the reduction of gradients. Every
    /// rank of the mesh must call it.
    pub fn gather_apart(&mut self, mesh: &Mesh) -> Result<(), CollectiveError> {
        for group in &mut self.groups {
            let name = match group.axes.len() {
                all if all == GRADIENTS.len() => "parameters".into(),
                _ => format!("parameters along {:?}", group.axes),
            };
            let axes = mesh.shape().sharded_along(&group.axes);
            group.gathers = mesh.group_for(&axes, &name)?;
        }
        Ok(())
    }

    /// The group that sums over these axes.
    ///
    /// # Panics
    /// If no parameter of the model is summed over them.
    pub fn group(&self, axes: &[Axis]) -> &StateGroup {
        let group = self.groups.iter().find(|group| group.axes == axes);
        group.expect("every parameter of the model has a group")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use AxisRole::{Cut, EqualGradients, PartialGradients};
    use ddp_proto::env::WorkerEnv;
    use ddp_proto::ids::WorldSize;

    use super::*;
    use crate::collective::{Executor, SingleRank};
    use crate::config::{Parallel, Pipeline};
    use crate::device::DType;
    use crate::model::{GroupId, Init};
    use crate::session::Cancel;

    /// Of a parameter that is replicated but for these roles.
    fn roles(along_pipeline: AxisRole, along_tensor: AxisRole) -> [AxisRole; Axis::ALL.len()] {
        let mut roles = AxisRole::replicated();
        roles[Axis::Pipeline as usize] = along_pipeline;
        roles[Axis::Tensor as usize] = along_tensor;
        roles
    }

    /// Whether a rank at these places along pipeline and tensor counts; along the data-parallel axes it is not the first.
    fn counts(roles: Roles, pipeline: usize, tensor: usize) -> bool {
        let parallel = Parallel {
            tensor: 4,
            pipeline: Pipeline {
                stages: 4,
                ..Pipeline::default()
            },
            ..Parallel::default()
        };
        let env = WorkerEnv {
            world_size: WorldSize(32),
            local_world_size: 32,
            ..WorkerEnv::single()
        };
        let mesh = MeshShape::new(&parallel, &env).unwrap();
        is_counted(&roles, &MODEL_AXES, &mesh, (2 * pipeline + 1) * 4 + tensor)
    }

    #[test]
    fn every_part_of_a_cut_parameter_counts() {
        for (pipeline, tensor) in [(0, 0), (0, 1), (1, 0), (2, 3)] {
            assert!(counts(roles(Cut, Cut), pipeline, tensor));
        }
    }

    #[test]
    fn of_copies_along_tensor_the_first_counts() {
        for role in [EqualGradients, PartialGradients] {
            assert!(counts(roles(Cut, role), 2, 0));
            assert!(!counts(roles(Cut, role), 2, 1));
        }
    }

    #[test]
    fn of_a_tied_weight_the_first_stage_counts_every_part() {
        let tied = roles(PartialGradients, Cut);
        let counts = |pipeline, tensor| counts(tied, pipeline, tensor);
        assert!(counts(0, 0) && counts(0, 1) && !counts(3, 0));
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
        let (mesh, params) = (Mesh::new(shape, comm, Executor::Inline), roles.map(spec));
        ReplicaSet::of(&mesh, &params, &params).unwrap()
    }

    #[test]
    fn one_rank_owns_all() {
        let set = of_one_rank([
            roles(Cut, EqualGradients),
            roles(PartialGradients, PartialGradients),
        ]);
        assert_eq!(set.groups.len(), 1, "a dense model has one group");
        assert!(set.groups[0].copies.is_none() && set.owners.is_none());
        assert!(set.copy_groups.is_empty());
    }

    #[test]
    #[should_panic(expected = "data-parallel ranks read different samples")]
    fn equal_gradients_of_data_parallel_ranks_are_refused() {
        of_one_rank([AxisRole::replicated(), [EqualGradients; Axis::ALL.len()]]);
    }
}
