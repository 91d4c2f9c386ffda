//! Which bytes of which rank each operation moves.

use super::board::SLOT_BYTES;
use super::flow::{Script, Span};
use super::group::Group;
use super::header::Header;
use super::kernel::Reduction;
use super::moves::{Fold, Moves, Source};
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
            Operation::ReduceScatter => planner.reduce_scatter(&mut moves)?,
            Operation::AllGather => planner.all_gather(&mut moves),
            Operation::Broadcast { root } => planner.broadcast(root, &mut moves),
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
        moves.fold = Some(self.fold(&whole, vec![self.views.own], self.group.size() - 1)?);
        let contribution = self.span(self.mine(), &whole);
        moves.scripts = self.scripts(|_| Script {
            contribution,
            taken: contribution.len,
            ..Script::header_only(0)
        });
        Ok(())
    }

    /// Rank r sums slice r and gives the result to all.
    fn all_reduce(&self, moves: &mut Moves) -> Result<(), Failure> {
        let own = self.slice(self.group.me());
        let targets: Vec<_> = self
            .views
            .given
            .iter()
            .map(|view| self.span(*view, &own).start)
            .collect();
        let foreign = self.group.size() - 1 + targets.len() - 1;
        moves.fold = Some(self.fold(&own, targets, foreign)?);
        let result_out = self.span(self.mine(), &own);
        moves.scripts = self.scripts(|rank| {
            let theirs = self.span(self.mine(), &self.slice(rank));
            Script {
                rank,
                contribution: theirs,
                taken: result_out.len,
                result_out,
                result_in: theirs,
            }
        });
        Ok(())
    }

    /// Rank r sums slice r and keeps it.
    fn reduce_scatter(&self, moves: &mut Moves) -> Result<(), Failure> {
        let own = self.slice(self.group.me());
        let target = self.span(self.views.own, &own);
        moves.fold = Some(self.fold(&own, vec![target.start], self.group.size() - 1)?);
        moves.scripts = self.scripts(|rank| Script {
            contribution: self.span(self.mine(), &self.slice(rank)),
            taken: target.len,
            ..Script::header_only(rank)
        });
        Ok(())
    }

    /// Each rank reads the slices of all others.
    fn all_gather(&self, moves: &mut Moves) {
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
        moves.scripts = self.scripts(|rank| Script {
            result_out,
            result_in: self.span(self.views.own, &self.slice(rank)),
            ..Script::header_only(rank)
        });
    }

    /// Each rank reads the root's elements.
    fn broadcast(&self, root: usize, moves: &mut Moves) {
        let whole = 0..self.job.len;
        let own = self.span(self.views.own, &whole);
        if root == self.group.me() {
            let result_out = self.span(self.mine(), &whole);
            moves.scripts = self.scripts(|rank| Script {
                result_out,
                ..Script::header_only(rank)
            });
            return;
        }
        moves.scripts = self.scripts(|rank| Script {
            result_in: if rank == root { own } else { Span::EMPTY },
            ..Script::header_only(rank)
        });
        if let Some(neighbour) = self.group.neighbour(root) {
            moves.copies.push((self.views.given[neighbour], own));
        }
    }

    fn scripts(&self, script: impl Fn(usize) -> Script) -> Vec<Script> {
        self.group
            .remote()
            .map(|rank| Script { rank, ..script(rank) })
            .collect()
    }

    fn fold(
        &self,
        range: &std::ops::Range<usize>,
        targets: Vec<*mut u8>,
        foreign: usize,
    ) -> Result<Fold, Failure> {
        let source = |&rank: &usize| match self.group.neighbour(rank) {
            Some(neighbour) => Source::Here(self.span(self.views.given[neighbour], range).start),
            None => Source::Far(rank),
        };
        Ok(Fold {
            reduction: Reduction::new(self.job.dtype, self.job.reduce)?,
            sources: self
                .group
                .nodes()
                .iter()
                .map(|node| node.iter().map(source).collect())
                .collect(),
            targets,
            bytes: range.len() * self.job.dtype.bytes(),
            foreign,
        })
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
