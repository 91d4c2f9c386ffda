//! What happens to a rank, in order, and who waits for it.

use std::sync::{Condvar, Mutex, MutexGuard};

use ddp_worker::device::Buffer;

use super::PATIENCE;

/// A pass over the blocks in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    Forward(usize),
    Backward(usize),
}

/// What happens to a rank.
#[derive(Clone, Debug)]
pub(super) enum Mark {
    /// The group of a block is being gathered, into this memory.
    GatherBegan(usize, Pass, Buffer),
    GatherEnded(usize, Pass),
    /// A block has begun to compute.
    Computes(usize, Pass),
    /// A weight is read.
    Reads(Buffer),
    /// The head has begun its backward.
    Head(usize),
    /// The embedding has begun its forward.
    Embedding(usize),
}

/// Marks, in order, and who waits for them.
#[derive(Default)]
pub(super) struct Log {
    marks: Mutex<Vec<Mark>>,
    more: Condvar,
    /// Marks that did not come.
    missed: Mutex<Vec<String>>,
}

impl Log {
    pub(super) fn marks(&self) -> MutexGuard<'_, Vec<Mark>> {
        self.marks.lock().unwrap()
    }

    pub(super) fn push(&self, mark: Mark) {
        self.marks().push(mark);
        self.more.notify_all();
    }

    /// Returns when there is such a mark. One that does not come is told of in the end, and no other is waited for.
    pub(super) fn wait(&self, what: &str, is_it: impl Fn(&Mark) -> bool) {
        if !self.missed.lock().unwrap().is_empty() {
            return;
        }
        let missing = |marks: &mut Vec<Mark>| !marks.iter().any(&is_it);
        let (_marks, waited) = self
            .more
            .wait_timeout_while(self.marks(), PATIENCE, missing)
            .unwrap();
        if waited.timed_out() {
            self.missed.lock().unwrap().push(what.to_owned());
        }
    }

    pub(super) fn assert_none_missed(&self) {
        assert_eq!(*self.missed.lock().unwrap(), Vec::<String>::new());
    }
}
