//! Which bytes of which rank each operation moves.
//!
//! Between nodes every byte that all ranks of a node give or get crosses once: for each rank of another node, one of
//! this node speaks for all ([`Group::speaker`]). It adds up what they give to that rank's sum, and hands its result
//! on to all of them. With as many ranks on each node, each speaks with one rank of every other node. A brief operation,
//! which has nothing to save, goes from every rank to every other one.

use super::board::SLOT_BYTES;
use super::flow::{Contribution, Script, Span};
use super::group::Group;
use super::header::Header;
use super::kernel::{NodeGives, Reduction};
use super::moves::{Fold, Moves, Source};
use super::node_part::NodePart;
use super::partition::slice;
use super::{Failure, Operation, ReduceOp, Request, Traffic};
use crate::device::DType;

/// A collective operation on so many elements, wherever they are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    /// What to do.
    pub(super) operation: Operation,
    /// How to reduce.
    pub(super) reduce: ReduceOp,
    /// Type of the elements.
    pub(super) dtype: DType,
    /// Number of elements.
    pub(super) len: usize,
    /// What for.
    pub(super) traffic: Traffic,
}

/// Where the elements of one round are in memory.
pub(super) struct Views<'a> {
    /// What each neighbour gives.
    pub(super) given: &'a [*mut u8],
    /// Where this rank's own result goes. In place, the same as what it gives.
    pub(super) own: *mut u8,
}

impl Job {
    /// The job of a request.
    pub(super) fn of(request: &Request) -> Self {
        Self {
            operation: request.operation,
            reduce: request.reduce,
            dtype: request.buffer.dtype(),
            len: request.buffer.len(),
            traffic: request.traffic,
        }
    }

    /// Size in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.len * self.dtype.bytes()
    }

    /// An error if a group of this size cannot do it.
    pub(super) fn check(&self, size: usize) -> Result<(), Failure> {
        match self.operation {
            Operation::ReduceScatter | Operation::AllGather if !self.len.is_multiple_of(size) => {
                Err(Failure::Invalid(format!(
                    "{} elements are not {size} equal slices\n  hint: pad the buffer to a multiple of the group's size",
                    self.len
                )))
            }
            Operation::AllReduce | Operation::ReduceScatter => {
                Reduction::new(self.dtype, self.reduce).map(drop)
            }
            Operation::Broadcast { root } if root >= size => Err(Failure::Invalid(format!(
                "there is no rank {root} in a group of {size}"
            ))),
            _ => Ok(()),
        }
    }

    /// True if the elements travel beside the header, so that the ranks meet once.
    ///
    /// Each rank of an all-reduce then reads everything of all others: (N−1)·S bytes and not 2(N−1)/N·S. For more
    /// than two ranks that is reserved to the odds and ends; gradients and parameters keep to the bound.
    pub(super) fn is_brief(&self, size: usize) -> bool {
        let frugal = self.operation != Operation::AllReduce || size == 2 || self.traffic == Traffic::Other;
        frugal && self.bytes() <= SLOT_BYTES
    }

    /// The elements that a rank gives, so that others can read them.
    pub(super) fn given(&self, group: &Group) -> std::ops::Range<usize> {
        match self.operation {
            Operation::AllReduce | Operation::ReduceScatter => 0..self.len,
            Operation::AllGather => slice(self.len, group.size(), group.me()),
            Operation::Broadcast { root } if root == group.me() => 0..self.len,
            _ => 0..0,
        }
    }

    /// The moves of this rank. `brief`: others do not write into this rank's memory.
    pub(super) fn plan(
        &self,
        group: &Group,
        views: &Views<'_>,
        header: Header,
        brief: bool,
    ) -> Result<Moves, Failure> {
        let mut moves = Moves::new(header);
        let planner = Planner {
            job: self,
            group,
            views,
        };
        match self.operation {
            Operation::AllReduce if brief => planner.all_reduce_brief(&mut moves)?,
            Operation::AllReduce => planner.all_reduce(&mut moves)?,
            Operation::ReduceScatter if brief => planner.reduce_scatter_brief(&mut moves)?,
            Operation::ReduceScatter => planner.reduce_scatter(&mut moves)?,
            Operation::AllGather => planner.all_gather(&mut moves, brief)?,
            Operation::Broadcast { root } => planner.broadcast(root, &mut moves, brief),
            Operation::Barrier | Operation::Send { .. } | Operation::Recv { .. } => {
                moves.scripts = group.remote().map(Script::header_only).collect();
            }
        }
        Ok(moves)
    }
}

struct Planner<'a> {
    job: &'a Job,
    group: &'a Group,
    views: &'a Views<'a>,
}

impl Planner<'_> {
    /// Each rank sums everything for itself.
    fn all_reduce_brief(&self, moves: &mut Moves) -> Result<(), Failure> {
        let whole = 0..self.job.len;
        moves.fold = Some(self.fold_of_ranks(&whole, vec![self.views.own])?);
        let contribution = self.span(self.mine(), &whole);
        moves.scripts = self.to_all(|rank| Script {
            contribution: Contribution::Lies(contribution),
            taken: contribution.len,
            taken_element: self.job.dtype.bytes(),
            ..Script::header_only(rank)
        });
        Ok(())
    }

    /// Rank r sums slice r and keeps it.
    fn reduce_scatter_brief(&self, moves: &mut Moves) -> Result<(), Failure> {
        let own = self.slice(self.group.me());
        let target = self.span(self.views.own, &own);
        moves.fold = Some(self.fold_of_ranks(&own, vec![target.start])?);
        moves.scripts = self.to_all(|rank| Script {
            contribution: Contribution::Lies(self.span(self.mine(), &self.slice(rank))),
            taken: target.len,
            taken_element: self.job.dtype.bytes(),
            ..Script::header_only(rank)
        });
        Ok(())
    }

    /// Rank r sums slice r and gives the result to all.
    fn all_reduce(&self, moves: &mut Moves) -> Result<(), Failure> {
        let own = self.slice(self.group.me());
        let targets = self.views.given.iter().map(|view| self.span(*view, &own).start);
        moves.fold = Some(self.fold_of_nodes(&own, targets.collect())?);
        moves.scripts = self.to_speakers(|rank, script| {
            let script = self.summed_by(rank, script)?;
            Ok(self.result_of(rank, script))
        })?;
        Ok(())
    }

    /// Rank r sums slice r and keeps it.
    fn reduce_scatter(&self, moves: &mut Moves) -> Result<(), Failure> {
        let own = self.slice(self.group.me());
        let target = self.span(self.views.own, &own);
        moves.fold = Some(self.fold_of_nodes(&own, vec![target.start])?);
        moves.scripts = self.to_speakers(|rank, script| self.summed_by(rank, script))?;
        Ok(())
    }

    /// Each rank reads the slices of all others.
    fn all_gather(&self, moves: &mut Moves, brief: bool) -> Result<(), Failure> {
        for (view, &rank) in self.views.given.iter().zip(self.group.neighbours()) {
            if rank != self.group.me() {
                let theirs = self.slice(rank);
                moves.copies.push((
                    self.span(*view, &theirs).start,
                    self.span(self.views.own, &theirs),
                ));
            }
        }
        let result_out = self.span(self.mine(), &self.slice(self.group.me()));
        moves.scripts = if brief {
            self.to_all(|rank| Script {
                result_out,
                result_in: self.span(self.views.own, &self.slice(rank)),
                ..Script::header_only(rank)
            })
        } else {
            self.to_speakers(|rank, script| Ok(self.result_of(rank, script)))?
        };
        Ok(())
    }

    /// Each rank reads the root's elements.
    fn broadcast(&self, root: usize, moves: &mut Moves, brief: bool) {
        let whole = 0..self.job.len;
        let own = self.span(self.views.own, &whole);
        let speaks = |rank| brief || self.group.speaker(self.group.node_of(rank), root) == rank;
        if root == self.group.me() {
            let result_out = self.span(self.mine(), &whole);
            moves.scripts = self.to_all(|rank| Script {
                result_out: if speaks(rank) { result_out } else { Span::EMPTY },
                ..Script::header_only(rank)
            });
            return;
        }
        let mut to_neighbours = if brief {
            Vec::new()
        } else {
            self.at_neighbours(&whole)
        };
        moves.scripts = self.to_all(|rank| {
            if rank != root || !speaks(self.group.me()) {
                return Script::header_only(rank);
            }
            Script {
                result_in: own,
                result_copies: std::mem::take(&mut to_neighbours),
                ..Script::header_only(rank)
            }
        });
        if let Some(neighbour) = self.group.neighbour(root) {
            moves.copies.push((self.views.given[neighbour], own));
        }
    }

    /// Something with each rank of another node.
    fn to_all(&self, script: impl FnMut(usize) -> Script) -> Vec<Script> {
        self.group.remote().map(script).collect()
    }

    /// Something with each rank of another node with which this one speaks for its node, or that speaks for its own
    /// node with this one.
    fn to_speakers(
        &self,
        script: impl Fn(usize, Script) -> Result<Script, Failure>,
    ) -> Result<Vec<Script>, Failure> {
        let spoken = |&rank: &usize| self.speaks_with(rank) || self.is_spoken_to_by(rank);
        let scripts = self.group.remote().filter(spoken);
        scripts
            .map(|rank| script(rank, Script::header_only(rank)))
            .collect()
    }

    /// True if this rank speaks for its node with that one.
    fn speaks_with(&self, rank: usize) -> bool {
        self.group.speaker(self.group.home(), rank) == self.group.me()
    }

    /// True if that rank speaks for its node with this one.
    fn is_spoken_to_by(&self, rank: usize) -> bool {
        self.group.speaker(self.group.node_of(rank), self.group.me()) == rank
    }

    /// The peer makes the sum of its slice, and this rank that of its own.
    fn summed_by(&self, rank: usize, mut script: Script) -> Result<Script, Failure> {
        if self.speaks_with(rank) {
            script.contribution = self.contribution(&self.slice(rank))?;
        }
        if self.is_spoken_to_by(rank) {
            script.taken_element = match &self.group.nodes()[self.group.node_of(rank)][..] {
                [_] => self.job.dtype.bytes(),
                _ => self.reduction()?.part_bytes(),
            };
            script.taken = self.slice(self.group.me()).len() * script.taken_element;
        }
        Ok(script)
    }

    /// The peer has the result of its slice, and this rank that of its own.
    fn result_of(&self, rank: usize, mut script: Script) -> Script {
        if self.is_spoken_to_by(rank) {
            script.result_out = self.span(self.mine(), &self.slice(self.group.me()));
        }
        if self.speaks_with(rank) {
            let theirs = self.slice(rank);
            script.result_in = self.span(self.views.own, &theirs);
            script.result_copies = self.at_neighbours(&theirs);
        }
        script
    }

    /// What the ranks of this node give to a sum that is made elsewhere.
    fn contribution(&self, range: &std::ops::Range<usize>) -> Result<Contribution, Failure> {
        if let [_] = self.views.given {
            return Ok(Contribution::Lies(self.span(self.mine(), range)));
        }
        let ranks = self.views.given.iter();
        let ranks = ranks.map(|view| self.span(*view, range).start.cast_const());
        let part = NodePart::new(self.reduction()?, ranks.collect(), range.len());
        Ok(Contribution::Made(part))
    }

    /// Where the elements are at all neighbours but this rank.
    fn at_neighbours(&self, range: &std::ops::Range<usize>) -> Vec<*mut u8> {
        let views = self.views.given.iter().zip(self.group.neighbours());
        let others = views.filter(|&(_, &rank)| rank != self.group.me());
        others.map(|(view, _)| self.span(*view, range).start).collect()
    }

    fn reduction(&self) -> Result<Reduction, Failure> {
        Reduction::new(self.job.dtype, self.job.reduce)
    }

    /// The sum of what every rank gives.
    fn fold_of_ranks(&self, range: &std::ops::Range<usize>, targets: Vec<*mut u8>) -> Result<Fold, Failure> {
        let nodes = self.group.nodes().iter();
        let sources =
            nodes.map(|node| NodeGives::Ranks(node.iter().map(|&rank| self.source(rank, range)).collect()));
        Ok(Fold {
            reduction: self.reduction()?,
            sources: sources.collect(),
            targets,
            elements: range.len(),
            foreign: (self.group.size() - 1) * self.job.dtype.bytes(),
        })
    }

    /// The sum of what every node gives, by the one who speaks for it with this rank.
    fn fold_of_nodes(&self, range: &std::ops::Range<usize>, targets: Vec<*mut u8>) -> Result<Fold, Failure> {
        let reduction = self.reduction()?;
        let (element, neighbours) = (self.job.dtype.bytes(), self.group.neighbours().len());
        let mut foreign = (neighbours - 1 + targets.len() - 1) * element;
        let mut sources = Vec::with_capacity(self.group.nodes().len());
        for (index, node) in self.group.nodes().iter().enumerate() {
            let speaker = self.group.speaker(index, self.group.me());
            sources.push(if index == self.group.home() {
                NodeGives::Ranks(node.iter().map(|&rank| self.source(rank, range)).collect())
            } else if node.len() == 1 {
                foreign += element;
                NodeGives::Ranks(vec![Source::Far(speaker)])
            } else {
                foreign += reduction.part_bytes();
                NodeGives::Part(Source::Far(speaker))
            });
        }
        Ok(Fold {
            reduction,
            sources,
            targets,
            elements: range.len(),
            foreign,
        })
    }

    fn source(&self, rank: usize, range: &std::ops::Range<usize>) -> Source {
        match self.group.neighbour(rank) {
            Some(neighbour) => Source::Here(self.span(self.views.given[neighbour], range).start),
            None => Source::Far(rank),
        }
    }

    fn mine(&self) -> *mut u8 {
        let me = self
            .group
            .neighbour(self.group.me())
            .expect("this rank is on its own node");
        self.views.given[me]
    }

    fn slice(&self, rank: usize) -> std::ops::Range<usize> {
        slice(self.job.len, self.group.size(), rank)
    }

    fn span(&self, view: *mut u8, range: &std::ops::Range<usize>) -> Span {
        let element = self.job.dtype.bytes();
        Span {
            start: view.wrapping_add(range.start * element),
            len: range.len() * element,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::ReduceOp;
    use super::super::group::Seat;
    use super::*;

    /// Group of one rank of a world with so many ranks on each node.
    fn group(nodes: &[usize], me: usize) -> Group {
        let seat = |(node, &ranks): (usize, &usize)| (0..ranks).map(move |local| (node, local));
        let seats = nodes.iter().enumerate().flat_map(seat).enumerate();
        let seats = seats.map(|(global, (node, local))| Seat { global, node, local });
        Group::new(seats.collect(), me)
    }

    fn scripts(nodes: &[usize], me: usize, operation: Operation, dtype: DType) -> Vec<Script> {
        let group = group(nodes, me);
        let job = Job {
            operation,
            reduce: ReduceOp::Sum { scale: 1.0 },
            dtype,
            len: 840,
            traffic: Traffic::Grads,
        };
        let given = vec![std::ptr::null_mut(); group.neighbours().len()];
        let views = Views {
            given: &given,
            own: std::ptr::null_mut(),
        };
        let header = Header::of(
            &Request {
                operation,
                reduce: job.reduce,
                buffer: buffer(dtype),
                traffic: job.traffic,
                tag: "test".into(),
            },
            me,
            0,
            None,
        );
        job.plan(&group, &views, header, false).unwrap().scripts
    }

    fn buffer(dtype: DType) -> crate::device::Buffer {
        use crate::device::{ArenaSpec, CpuDevice, Device as _};
        let spec = ArenaSpec::private("test", dtype, 840);
        CpuDevice::new(1).unwrap().alloc(&spec).unwrap().whole()
    }

    /// Of every slice each other node gives one sum and gets one result, however many ranks it has.
    #[test]
    fn bytes_cross_between_two_nodes_once() {
        let bytes = 840 * 4;
        for nodes in [&[4, 4][..], &[2, 2, 2], &[3, 3, 2], &[5, 1], &[1, 1, 1]] {
            let (ranks, others) = (nodes.iter().sum::<usize>(), nodes.len() - 1);
            for (operation, given, got) in [
                (Operation::AllReduce, others * bytes, others * bytes),
                (Operation::ReduceScatter, others * bytes, 0),
                (Operation::AllGather, 0, others * bytes),
                (Operation::Broadcast { root: 1 }, 0, others * bytes),
            ] {
                let (mut contributions, mut taken, mut results_out, mut results_in) = (0, 0, 0, 0);
                for me in 0..ranks {
                    let scripts = scripts(nodes, me, operation, DType::F32);
                    contributions += scripts.iter().map(|s| s.contribution.bytes()).sum::<usize>();
                    taken += scripts.iter().map(|s| s.taken).sum::<usize>();
                    results_out += scripts.iter().map(|s| s.result_out.len).sum::<usize>();
                    results_in += scripts.iter().map(|s| s.result_in.len).sum::<usize>();
                }
                let what = format!("{operation} on {nodes:?}");
                assert_eq!((contributions, taken), (given, given), "{what}");
                assert_eq!((results_out, results_in), (got, got), "{what}");
            }
        }
    }

    /// What one of a pair sends is what the other expects, and with equal nodes each speaks with one rank of every node.
    #[test]
    fn pairs_agree() {
        for (nodes, dtype) in [
            (&[4, 4][..], DType::Bf16),
            (&[3, 1, 2], DType::Bf16),
            (&[2, 2, 2], DType::F32),
        ] {
            let ranks = nodes.iter().sum::<usize>();
            let all: Vec<_> = (0..ranks)
                .map(|me| scripts(nodes, me, Operation::AllReduce, dtype))
                .collect();
            for (me, scripts) in all.iter().enumerate() {
                if nodes.iter().all(|&ranks| ranks == nodes[0]) {
                    assert_eq!(scripts.len(), nodes.len() - 1);
                }
                for script in scripts {
                    let other = all[script.rank].iter().find(|other| other.rank == me).unwrap();
                    assert_eq!(
                        script.contribution.bytes(),
                        other.taken,
                        "{nodes:?}: {me} to {}",
                        script.rank
                    );
                    assert_eq!(script.result_out.len, other.result_in.len);
                }
            }
        }
    }
}
