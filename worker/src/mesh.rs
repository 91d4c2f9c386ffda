//! The mesh: how the ranks of a job are arranged along axes, and the groups of ranks that follow from it.
//!
//! | axis | the ranks along it |
//! |---|---|
//! | [`Axis::Pipeline`] | hold different blocks of the model, and hand activations to each other |
//! | [`Axis::Replicate`] | hold copies of one shard of the state, and read different samples |
//! | [`Axis::Shard`] | hold one copy of the state together, each a shard of it, and read different samples |
//! | [`Axis::Expert`] | hold different experts of each layer, and read different samples |
//! | [`Axis::Context`] | read different positions of the same samples |
//! | [`Axis::Tensor`] | hold parts of the same matrices, and compute on the same samples together |
//!
//! `replicate`, `shard` and `expert` are the data-parallel ranks ([`SAMPLES`]): DDP has one rank along `shard`, ZeRO
//! (FSDP) one along `replicate`; hybrid sharding (HSDP) has several along both. Their number is what the others leave:
//! dp = world / (pp · cp · tp). The last axis varies fastest with the rank, so that the groups that exchange most lie
//! within a node.
//!
//! Experts have a second view of the same ranks: the ep ranks along [`MeshShape::expert_axes`] hold those of a layer
//! together. Ranks along `context` are among them, so that `expert` has ep / cp ranks.
//!
//! This is the only place that computes ranks. A function that needs "how many ranks share this" is given a group.

use std::fmt;

use ddp_proto::env::WorkerEnv;
use ddp_proto::words::counted;
use parking_lot::Mutex;

use crate::collective::{CollectiveError, CommPattern, Communicator, Executor, Subgroup, WireBytes};
use crate::config::{Parallel, Problem, ShardGroup, Strategy, nearest_multiples};
use crate::timeline::Timeline;

/// A direction of the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// Stages of a pipeline.
    Pipeline,
    /// Copies of one shard.
    Replicate,
    /// Shards of one copy.
    Shard,
    /// Experts of a layer.
    Expert,
    /// Positions of a sample.
    Context,
    /// Parts of matrices.
    Tensor,
}

/// The axes along which ranks read different samples: who reads what.
pub const SAMPLES: [Axis; 3] = [Axis::Replicate, Axis::Shard, Axis::Expert];

/// The axes along which gradients are summed: who sums what.
pub const GRADIENTS: [Axis; 4] = [Axis::Replicate, Axis::Shard, Axis::Expert, Axis::Context];

/// Those of them along which state can be sharded ([`MeshShape::sharded`]).
const SHARDED: [Axis; 3] = [Axis::Shard, Axis::Expert, Axis::Context];

/// The axes along which ranks can hold different experts ([`MeshShape::expert_axes`]).
const EXPERTS: [Axis; 2] = [Axis::Expert, Axis::Context];

impl Axis {
    /// All axes, the slowest first.
    pub const ALL: [Self; 6] = [
        Self::Pipeline,
        Self::Replicate,
        Self::Shard,
        Self::Expert,
        Self::Context,
        Self::Tensor,
    ];

    /// Name in configurations, errors and traces.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pipeline => "pipeline",
            Self::Replicate => "replicate",
            Self::Shard => "shard",
            Self::Expert => "expert",
            Self::Context => "context",
            Self::Tensor => "tensor",
        }
    }
}

/// The axes along which the ranks of a group differ, from the slowest to the fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The slowest.
    pub first: Axis,
    /// The fastest.
    pub last: Axis,
}

impl Span {
    /// Number of spans.
    pub const COUNT: usize = Axis::ALL.len() * (Axis::ALL.len() + 1) / 2;

    /// All of them, in the order of [`Span::index`].
    pub fn all() -> impl Iterator<Item = Self> {
        let to = |last| {
            Axis::ALL[..=last as usize]
                .iter()
                .map(move |&first| Self { first, last })
        };
        Axis::ALL.into_iter().flat_map(to)
    }

    /// Where it stands among [`Span::all`].
    pub const fn index(self) -> usize {
        let last = self.last as usize;
        last * (last + 1) / 2 + self.first as usize
    }

    /// The axes between both, and themselves.
    pub fn axes(self) -> &'static [Axis] {
        const ALL: &[Axis] = &Axis::ALL;
        &ALL[self.first as usize..=self.last as usize]
    }
}

/// Number of ranks along each axis: a pure function of configuration and job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MeshShape {
    /// In the order of [`Axis::ALL`].
    sizes: [usize; Axis::ALL.len()],
    shards_state: bool,
    divides_experts: bool,
    nodes: usize,
}

/// Who keeps a second copy of whose part of a sharded state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buddies {
    /// The rank that keeps a copy of this rank's part.
    pub buddy: usize,
    /// The rank of whose part this rank keeps a copy.
    pub owner: usize,
}

/// Ranks along each axis that has several, as `pp 4 × dp 2 × tp 8`.
impl fmt::Display for MeshShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes = [
            ("pp", &[Axis::Pipeline][..]),
            ("dp", &SAMPLES),
            ("cp", &[Axis::Context]),
            ("tp", &[Axis::Tensor]),
        ];
        let sizes = axes.map(|(name, axes)| (name, self.size(axes)));
        let several = sizes.iter().filter(|(_, ranks)| *ranks > 1);
        let words: Vec<String> = several.map(|(name, ranks)| format!("{name} {ranks}")).collect();
        f.write_str(&words.join(" × "))?;
        // No factor of the number of ranks: experts lie over those of dp and cp.
        match self.size(self.expert_axes()) {
            1 => Ok(()),
            ranks => write!(f, ", ep {ranks}"),
        }
    }
}

impl MeshShape {
    /// The mesh of a job. Every rank computes the same.
    pub fn new(parallel: &Parallel, env: &WorkerEnv) -> Result<Self, Problem> {
        let ranks = env.world_size.get() as usize;
        let (stages, context, tensor) = (parallel.pipeline.stages, parallel.context, parallel.tensor);
        let cell = stages * context * tensor;
        if cell == 0 || !ranks.is_multiple_of(cell) {
            return Err(no_multiple(ranks, parallel));
        }
        check_tensor_groups(parallel, env)?;
        let data = ranks / cell;
        let expert = expert_ranks(parallel, data)?;
        let group = match (parallel.strategy, parallel.shard_group) {
            (Strategy::Ddp, _) => expert,
            (_, None) => data,
            (_, Some(ShardGroup::Node)) => (local_ranks(env)? / (context * tensor)).clamp(1, data),
            (_, Some(ShardGroup::Ranks(group))) => group,
        };
        if group == 0 || !data.is_multiple_of(group) || !group.is_multiple_of(expert) {
            return Err(unequal_groups(parallel, [data, group, expert]));
        }
        check_node_groups(parallel, env, data, group)?;
        Ok(Self {
            sizes: [stages, data / group, group / expert, expert, context, tensor],
            shards_state: parallel.strategy != Strategy::Ddp,
            divides_experts: parallel.expert > 1,
            nodes: (env.node_count as usize).max(1),
        })
    }

    /// A mesh of `ranks` that hold one copy of the state together, and no other axis.
    pub const fn of_shards(ranks: usize) -> Self {
        Self {
            sizes: [1, 1, ranks, 1, 1, 1],
            shards_state: true,
            divides_experts: false,
            nodes: 1,
        }
    }

    /// The buddies of a rank, among the ranks that hold one copy of the state with it: the buddy comes as many places later
    /// as the first node has of them: it is on another node if each has as many.
    pub fn buddies(&self, rank: usize) -> Buddies {
        let (peers, at) = (
            self.members(rank, self.sharded()),
            self.index(rank, self.sharded()),
        );
        let node = |rank: usize| rank * self.nodes / self.ranks();
        let on_first = peers.iter().filter(|&&peer| node(peer) == node(peers[0])).count();
        let later = if on_first == peers.len() { 1 } else { on_first };
        Buddies {
            buddy: peers[(at + later) % peers.len()],
            owner: peers[(at + peers.len() - later) % peers.len()],
        }
    }

    /// The axes along which ranks hold one copy of the state together, each a shard of it.
    pub const fn sharded(&self) -> &'static [Axis] {
        if self.shards_state { &SHARDED } else { &[] }
    }

    /// Those of `axes` among them.
    pub fn sharded_along(&self, axes: &[Axis]) -> Vec<Axis> {
        let sharded = self.sharded().iter().copied();
        sharded.filter(|axis| axes.contains(axis)).collect()
    }

    /// The other ones of `axes`: the ranks along them hold copies.
    pub fn copied_along(&self, axes: &[Axis]) -> Vec<Axis> {
        let copied = axes.iter().copied();
        copied.filter(|axis| !self.sharded().contains(axis)).collect()
    }

    /// The axes along which ranks hold different experts of a layer. None: every rank holds all of them.
    pub const fn expert_axes(&self) -> &'static [Axis] {
        if self.divides_experts { &EXPERTS } else { &[] }
    }

    /// Ranks along all of `axes`.
    pub fn size(&self, axes: &[Axis]) -> usize {
        axes.iter().map(|&axis| self.sizes[axis as usize]).product()
    }

    /// All ranks.
    pub fn ranks(&self) -> usize {
        self.size(&Axis::ALL)
    }

    /// Ranks that hold one copy of the model together, if its state is not sharded.
    pub fn copy_ranks(&self) -> usize {
        self.ranks() / self.size(&GRADIENTS) * self.size(self.expert_axes())
    }

    /// Number of ranks that read different samples, in words: where these are not all, several ranks of the job count as one.
    pub fn data_ranks(&self) -> String {
        let (data, all) = (self.size(&SAMPLES), self.ranks());
        counted(data, if data == all { "rank" } else { "data-parallel rank" })
    }

    /// The difference between the numbers of two ranks that are neighbours along an axis.
    pub fn stride(&self, axis: Axis) -> usize {
        self.size(&Axis::ALL[axis as usize + 1..])
    }

    /// Index of `rank` among the ranks that differ from it along `axes` only.
    pub fn index(&self, rank: usize, axes: &[Axis]) -> usize {
        let along = Axis::ALL.iter().filter(|axis| axes.contains(axis));
        along.fold(0, |index, &axis| {
            index * self.sizes[axis as usize] + self.coordinate(rank, axis)
        })
    }

    /// The ranks that differ from `rank` along `axes` only, itself included, in ascending order.
    pub fn members(&self, rank: usize, axes: &[Axis]) -> Vec<usize> {
        let is_member = |other: &usize| {
            let mut fixed = Axis::ALL.iter().filter(|axis| !axes.contains(axis));
            fixed.all(|&axis| self.coordinate(*other, axis) == self.coordinate(rank, axis))
        };
        (0..self.ranks()).filter(is_member).collect()
    }

    /// The span of a group. None if it has one rank.
    fn span(&self, members: &[usize]) -> Option<Span> {
        let [first, next, ..] = *members else { return None };
        let differ =
            |other: usize, axis: &Axis| self.coordinate(first, *axis) != self.coordinate(other, *axis);
        Some(Span {
            first: Axis::ALL
                .into_iter()
                .find(|axis| differ(members[members.len() - 1], axis))?,
            last: Axis::ALL.into_iter().rfind(|axis| differ(next, axis))?,
        })
    }

    /// A job can continue with a different number of ranks only if that is a multiple of this
    /// number. `None` means any number.
    pub fn ranks_multiple_of(parallel: &Parallel) -> Option<u64> {
        let group = match (parallel.strategy, parallel.shard_group) {
            (Strategy::Ddp, _) | (_, None | Some(ShardGroup::Node)) => {
                (parallel.expert / parallel.context).max(1)
            }
            (_, Some(ShardGroup::Ranks(group))) => group,
        };
        let multiple = parallel.pipeline.stages * parallel.context * parallel.tensor * group;
        (multiple > 1).then_some(multiple as u64)
    }

    fn coordinate(&self, rank: usize, axis: Axis) -> usize {
        rank / self.stride(axis) % self.sizes[axis as usize]
    }
}

const SAME_SIZE: &str =
    "all groups must have the same number of ranks; change `--nproc-per-node` or `parallel.shard_group`";

/// The data-parallel ranks that hold the experts of a layer together, of `data`; context ranks come on top.
fn expert_ranks(parallel: &Parallel, data: usize) -> Result<usize, Problem> {
    let (expert, context) = (parallel.expert, parallel.context);
    let fits = |expert: &usize| expert.is_multiple_of(context) && data.is_multiple_of(expert / context);
    if expert == 1 || fits(&expert) {
        return Ok((expert / context).max(1));
    }
    let below = (1..expert).rev().find(fits);
    let above = (expert + 1..=data * context).find(fits);
    let nearest: Vec<String> = below.into_iter().chain(above).map(|n| n.to_string()).collect();
    let what = format!(
        "`parallel.expert` is {expert}, expected a multiple of `parallel.context` ({context}) that divides {data} data-parallel × {context} context ranks"
    );
    let hint = format!("set `parallel.expert` to {}", nearest.join(" or "));
    Err(Problem::new("parallel.expert", what).with_hint(hint))
}

/// `data` data-parallel ranks are not several groups of `group`, each a multiple of `expert`.
fn unequal_groups(parallel: &Parallel, [data, group, expert]: [usize; 3]) -> Problem {
    let (found, others) = match parallel.shard_group {
        Some(ShardGroup::Ranks(ranks)) => (ranks.to_string(), ""),
        _ => ("node".into(), ", `--nproc-per-node`"),
    };
    let (what, hint) = if group > 0 && data.is_multiple_of(group) {
        (
            format!(
                "but groups of {group} cannot be divided into the {expert} that hold the experts of a layer together"
            ),
            format!(
                "set `parallel.shard_group` to a multiple of {expert}, or change `parallel.expert`{others}"
            ),
        )
    } else {
        (
            format!("but {data} data-parallel ranks cannot be divided into groups of {group}"),
            SAME_SIZE.to_owned(),
        )
    };
    let what = format!("`parallel.shard_group` is {found}, {what}");
    Problem::new("parallel.shard_group", what).with_hint(hint)
}

/// The number of ranks is no multiple of the ranks that hold one model.
fn no_multiple(ranks: usize, parallel: &Parallel) -> Problem {
    let axes = [
        ("parallel.pipeline.stages", "pipeline", parallel.pipeline.stages),
        ("parallel.context", "context", parallel.context),
        ("parallel.tensor", "tensor", parallel.tensor),
    ];
    let cell: usize = axes.iter().map(|(.., size)| size).product();
    let nearest = nearest_multiples(ranks, cell.max(1));
    let used: Vec<_> = axes.into_iter().filter(|(.., size)| *size != 1).collect();
    let join = |part: &dyn Fn(&(&str, &str, usize)) -> String, with: &str| {
        used.iter().map(part).collect::<Vec<_>>().join(with)
    };
    let axes = join(&|(_, name, size)| format!("{size} {name} ranks"), " × ");
    let group = if used.len() > 1 {
        format!("{cell}: {axes}")
    } else {
        axes
    };
    let keys = join(&|(key, ..)| format!("`{key}`"), " or ");
    let what = format!(
        "{} cannot be divided into groups of {group}",
        counted(ranks as u64, "rank")
    );
    let key = used.first().map_or("parallel", |(key, ..)| key);
    Problem::new(key, what).with_hint(format!("start {nearest} ranks, or change {keys}"))
}

/// Ranks of each node, if all nodes have as many.
fn local_ranks(env: &WorkerEnv) -> Result<usize, Problem> {
    let (ranks, local) = (env.world_size.get(), env.local_world_size);
    if local * env.node_count == ranks {
        return Ok(local as usize);
    }
    let what = format!(
        "`parallel.shard_group` is node, but the {ranks} ranks are not spread evenly over {} nodes: this one has {local}",
        env.node_count
    );
    Err(Problem::new("parallel.shard_group", what).with_hint(SAME_SIZE))
}

/// Tensor groups lie within nodes, unless the configuration asks otherwise: they exchange activations in every layer.
pub fn check_tensor_groups(parallel: &Parallel, env: &WorkerEnv) -> Result<(), Problem> {
    let (tensor, local) = (parallel.tensor, env.local_world_size as usize);
    if env.node_count == 1 || parallel.tensor_across_nodes || local.is_multiple_of(tensor) {
        return Ok(());
    }
    let what = format!(
        "`parallel.tensor` is {tensor}, but a node has {}: a tensor group would span nodes",
        counted(local as u64, "rank")
    );
    let hint = format!(
        "use a divisor of {local}, or set `parallel.tensor_across_nodes: true`: every layer then waits for the network"
    );
    Err(Problem::new("parallel.tensor", what).with_hint(hint))
}

/// Refuses `shard_group: node` if a stage neither fills whole nodes nor divides one: shard groups
/// would then span nodes.
fn check_node_groups(parallel: &Parallel, env: &WorkerEnv, data: usize, shard: usize) -> Result<(), Problem> {
    let cell = parallel.context * parallel.tensor;
    let (local, group) = (env.local_world_size as usize, shard * cell);
    if shard == 1 || parallel.shard_group != Some(ShardGroup::Node) || local.is_multiple_of(group) {
        return Ok(());
    }
    let what = format!(
        "`parallel.shard_group` is node, but a stage has {} and a node has {local}: a shard group of {group} would span nodes",
        counted((data * cell) as u64, "rank")
    );
    let hint = "change the number of nodes so that a stage fills whole nodes or a node holds whole stages, or leave out `parallel.shard_group`";
    Err(Problem::new("parallel.shard_group", what).with_hint(hint))
}

/// This rank in the mesh, and the communicators of its groups.
pub struct Mesh {
    shape: MeshShape,
    world: Communicator,
    executor: Executor,
    /// Groups made so far, except the world.
    groups: Mutex<Vec<Group>>,
}

/// A communicator by what it is for.
struct Group {
    subgroup: Subgroup,
    executor: Executor,
    comm: Communicator,
}

impl Mesh {
    /// `world` has all ranks of the mesh. Groups get executors of their own.
    ///
    /// # Panics
    /// If `world` has a different number of ranks than the mesh.
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
    pub fn size(&self, axes: &[Axis]) -> usize {
        self.shape.size(axes)
    }

    /// Ranks along each axis.
    pub const fn shape(&self) -> &MeshShape {
        &self.shape
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.world.rank()
    }

    /// Index of this rank in the group along `axes`.
    pub fn index(&self, axes: &[Axis]) -> usize {
        self.shape.index(self.world.rank(), axes)
    }

    /// The communicator of this rank's group along `axes`. If the group is the world, it is the
    /// world's communicator. Otherwise it is made at the first call and kept. Every rank must make
    /// the same calls in the same order, with no operation of the world in flight.
    pub fn group(&self, axes: &[Axis]) -> Result<Communicator, CollectiveError> {
        let members = self.members(axes);
        if members.len() == self.world.size() {
            return Ok(self.world.clone());
        }
        let names: Vec<&str> = axes.iter().map(|axis| axis.name()).collect();
        self.split(Subgroup::new(&names.join(" × "), members), self.executor)
    }

    /// A separate communicator of the same group. Its operations do not wait for those of
    /// [`Mesh::group`].
    pub fn group_for(&self, axes: &[Axis], name: &str) -> Result<Communicator, CollectiveError> {
        self.split(Subgroup::new(name, self.members(axes)), self.executor)
    }

    /// The same, but operations run on the calling thread: for communication that overlaps with
    /// nothing.
    pub fn group_inline(&self, axes: &[Axis], name: &str) -> Result<Communicator, CollectiveError> {
        self.split(Subgroup::new(name, self.members(axes)), Executor::Inline)
    }

    /// A communicator of the first and the last of the ranks that differ along `axis` only. Any
    /// other rank gets a communicator of itself alone. Every rank must call it, as [`Mesh::group`].
    pub fn ends(&self, axis: Axis, name: &str) -> Result<Communicator, CollectiveError> {
        let (line, rank) = (self.members(&[axis]), self.world.rank());
        let ends = vec![line[0], line[line.len() - 1]];
        let is_end = ends.contains(&rank);
        let members = if is_end { ends } else { vec![rank] };
        self.split(Subgroup::new(name, members), Executor::Thread)
    }

    /// A separate communicator of the ranks along `axis`, for [messages](CommPattern::Messages) between two of them, with an
    /// executor thread of its own.
    pub fn line(&self, axis: Axis, name: &str) -> Result<Communicator, CollectiveError> {
        let subgroup = Subgroup {
            pattern: CommPattern::Messages,
            ..Subgroup::new(name, self.members(&[axis]))
        };
        self.split(subgroup, Executor::Thread)
    }

    /// The timeline of the world and of all groups.
    pub fn timeline(&self) -> &Timeline {
        self.world.timeline()
    }

    /// Ends the threads of all communicators, which cannot be used after that.
    pub fn end_threads(&self) {
        self.groups
            .lock()
            .iter()
            .for_each(|group| group.comm.end_thread());
        self.world.end_thread();
    }

    /// Bytes that this rank has sent in all groups.
    pub fn wire_bytes(&self) -> WireBytes {
        let groups = self.groups.lock();
        let of_groups = groups.iter().map(|group| group.comm.wire_bytes());
        of_groups.fold(self.world.wire_bytes(), |sum, bytes| sum + bytes)
    }

    /// Bytes sent by [`Span`].
    pub fn wire_bytes_by_span(&self) -> [WireBytes; Span::COUNT] {
        let mut bytes = [WireBytes::default(); Span::COUNT];
        let groups = self.groups.lock();
        for comm in groups.iter().map(|group| &group.comm).chain([&self.world]) {
            if let Some(span) = self.shape.span(comm.members()) {
                bytes[span.index()] = bytes[span.index()] + comm.wire_bytes();
            }
        }
        bytes
    }

    fn members(&self, axes: &[Axis]) -> Vec<usize> {
        self.shape.members(self.world.rank(), axes)
    }

    fn split(&self, subgroup: Subgroup, executor: Executor) -> Result<Communicator, CollectiveError> {
        let mut groups = self.groups.lock();
        if let Some(group) = groups.iter().find(|group| group.subgroup.name == subgroup.name) {
            let (made, asked) = ((&group.subgroup, group.executor), (&subgroup, executor));
            assert_eq!(made, asked, "a group has one use, and a name for it");
            return Ok(group.comm.clone());
        }
        let comm = self.world.split(&subgroup, executor)?;
        groups.push(Group {
            subgroup,
            executor,
            comm: comm.clone(),
        });
        Ok(comm)
    }
}

#[cfg(test)]
mod tests {
    use ddp_proto::ids::WorldSize;

    use super::*;
    use crate::config::Pipeline;

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
        assert_eq!((ddp.size(&SAMPLES), ddp.size(&[Axis::Shard])), (1, 1));
        assert!(ddp.sharded().is_empty());
    }

    #[test]
    fn groups_that_do_not_fit_are_refused() {
        insta::assert_snapshot!(shape(Some(ShardGroup::Ranks(4)), 2, 3, 6).unwrap_err(), @r"
        `parallel.shard_group` is 4, but 6 data-parallel ranks cannot be divided into groups of 4
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
        assert_eq!(shape.members(3, &SAMPLES), [0, 1, 2, 3, 4, 5]);
        assert_eq!(shape.members(3, &[]), [3]);
        assert_eq!(shape.index(3, &[Axis::Shard]), 1);
        assert_eq!(shape.index(3, &[Axis::Replicate]), 1);
        assert_eq!(shape.index(3, &SAMPLES), 3);
    }

    #[test]
    fn a_buddy_is_on_another_node_if_there_are_several() {
        let buddies = |shape: MeshShape, rank| {
            let Buddies { buddy, owner } = shape.buddies(rank);
            assert_eq!(
                (shape.buddies(buddy).owner, shape.buddies(owner).buddy),
                (rank, rank)
            );
            [owner, buddy]
        };
        let of = |nodes, local, rank| buddies(shape(None, nodes, local, nodes * local).unwrap(), rank);
        assert_eq!([of(1, 4, 0), of(1, 4, 3), of(1, 1, 0)], [[3, 1], [2, 0], [0, 0]]);
        assert_eq!([of(2, 2, 0), of(2, 2, 3)], [[2, 2], [1, 1]]);
        assert_eq!([of(3, 2, 1), of(3, 2, 4)], [[5, 3], [2, 0]]);
        let parallel = Parallel {
            strategy: Strategy::Zero1,
            tensor: 2,
            context: 2,
            pipeline: Pipeline {
                stages: 2,
                ..Pipeline::default()
            },
            ..Parallel::default()
        };
        let env = WorkerEnv {
            world_size: WorldSize(16),
            node_count: 4,
            local_world_size: 4,
            ..WorkerEnv::single()
        };
        let shape = MeshShape::new(&parallel, &env).unwrap();
        assert_eq!(
            [1, 6, 11].map(|rank| buddies(shape, rank)),
            [[5, 5], [2, 2], [15, 15]]
        );
    }

    #[test]
    fn a_rank_is_in_one_group_of_each_kind_at_its_index() {
        for (group, ranks) in [
            (None, 6),
            (Some(ShardGroup::Ranks(3)), 12),
            (Some(ShardGroup::Ranks(1)), 4),
        ] {
            let shape = shape(group, 1, ranks, ranks).unwrap();
            for axes in [&[][..], &[Axis::Replicate], &[Axis::Shard], &SAMPLES] {
                for rank in 0..shape.ranks() {
                    let members = shape.members(rank, axes);
                    assert_eq!(members.len(), shape.size(axes));
                    assert_eq!(members[shape.index(rank, axes)], rank);
                    assert!(members.iter().all(|&other| shape.members(other, axes) == members));
                }
            }
        }
    }

    #[test]
    fn experts_lie_on_the_context_ranks_of_neighbouring_data_parallel_ranks() {
        let shape = |strategy, expert, group: Option<usize>| {
            let parallel = Parallel {
                strategy,
                expert,
                context: 2,
                tensor: 2,
                shard_group: group.map(ShardGroup::Ranks),
                ..Parallel::default()
            };
            let env = WorkerEnv {
                world_size: WorldSize(32),
                local_world_size: 32,
                ..WorkerEnv::single()
            };
            assert_eq!(MeshShape::ranks_multiple_of(&parallel).unwrap() % 4, 0);
            MeshShape::new(&parallel, &env).map_err(|error| error.to_string())
        };
        let zero = shape(Strategy::Zero1, 4, Some(4)).unwrap();
        assert_eq!(zero.to_string(), "dp 8 × cp 2 × tp 2, ep 4");
        assert_eq!(zero.members(9, zero.expert_axes()), [9, 11, 13, 15]);
        assert_eq!(zero.members(9, &[Axis::Context]), [9, 11]);
        assert_eq!(zero.members(9, zero.sharded()), [1, 3, 5, 7, 9, 11, 13, 15]);
        assert_eq!(Axis::ALL.map(|axis| zero.size(&[axis])), [1, 2, 2, 2, 2, 2]);
        let ddp = shape(Strategy::Ddp, 2, None).unwrap();
        assert_eq!(ddp.members(9, ddp.expert_axes()), [9, 11]);
        assert_eq!((ddp.size(&SAMPLES), ddp.copy_ranks()), (8, 4));
        assert_eq!(
            shape(Strategy::Ddp, 1, None).unwrap().to_string(),
            "dp 8 × cp 2 × tp 2"
        );
        insta::assert_snapshot!(shape(Strategy::Ddp, 6, None).unwrap_err(), @r"
        `parallel.expert` is 6, expected a multiple of `parallel.context` (2) that divides 8 data-parallel × 2 context ranks
          hint: set `parallel.expert` to 4 or 8
        ");
        insta::assert_snapshot!(shape(Strategy::Zero1, 8, Some(2)).unwrap_err(), @r"
        `parallel.shard_group` is 2, but groups of 2 cannot be divided into the 4 that hold the experts of a layer together
          hint: set `parallel.shard_group` to a multiple of 4, or change `parallel.expert`
        ");
    }

    /// pp × dp × tp of eight ranks on two nodes.
    #[test]
    fn a_tensor_group_is_neighbours_and_a_pipeline_spans_the_nodes() {
        let parallel = Parallel {
            tensor: 2,
            pipeline: Pipeline {
                stages: 2,
                ..Pipeline::default()
            },
            ..Parallel::default()
        };
        let env = |nodes: u32, local: u32| WorkerEnv {
            world_size: WorldSize(nodes * local),
            node_count: nodes,
            local_world_size: local,
            ..WorkerEnv::single()
        };
        let shape = MeshShape::new(&parallel, &env(2, 4)).unwrap();
        assert_eq!(shape.members(5, &[Axis::Tensor]), [4, 5]);
        assert_eq!(shape.members(5, &SAMPLES), [5, 7]);
        assert_eq!(shape.members(5, &[Axis::Pipeline]), [1, 5]);
        assert_eq!(shape.members(5, &[Axis::Pipeline, Axis::Tensor]), [0, 1, 4, 5]);
        assert_eq!(MeshShape::ranks_multiple_of(&parallel), Some(4));
        let refused = |nodes, local| {
            MeshShape::new(&parallel, &env(nodes, local))
                .unwrap_err()
                .to_string()
        };
        insta::assert_snapshot!(refused(1, 6), @r"
        6 ranks cannot be divided into groups of 4: 2 pipeline ranks × 2 tensor ranks
          hint: start 4 or 8 ranks, or change `parallel.pipeline.stages` or `parallel.tensor`
        ");
        let per_node = Parallel {
            tensor: 1,
            strategy: Strategy::Zero2,
            shard_group: Some(ShardGroup::Node),
            pipeline: Pipeline {
                stages: 3,
                ..Pipeline::default()
            },
            ..Parallel::default()
        };
        let sharded = |nodes, local| MeshShape::new(&per_node, &env(nodes, local));
        assert_eq!(sharded(3, 2).unwrap().members(3, &[Axis::Shard]), [2, 3]);
        assert_eq!(sharded(1, 6).unwrap().members(3, &[Axis::Shard]), [2, 3]);
        insta::assert_snapshot!(sharded(2, 6).unwrap_err().to_string(), @r"
        `parallel.shard_group` is node, but a stage has 4 ranks and a node has 6: a shard group of 4 would span nodes
          hint: change the number of nodes so that a stage fills whole nodes or a node holds whole stages, or leave out `parallel.shard_group`
        ");
        insta::assert_snapshot!(refused(4, 1), @r"
        `parallel.tensor` is 2, but a node has 1 rank: a tensor group would span nodes
          hint: use a divisor of 1, or set `parallel.tensor_across_nodes: true`: every layer then waits for the network
        ");
    }
}
