//! Sums over several copies of the state: what a rank owns is added up with the ranks that own the same of the
//! other copies, once a step, when nothing is added to it any more (hybrid sharding; [`super::ReplicaSet`]).

use super::slots::Landed;
use super::waiting::Waiting;
use crate::collective::{Communicator, Launch, ReduceOp, Traffic, Work};

/// See the module.
pub(super) struct Copies {
    /// The ranks that own the same slices.
    comm: Communicator,
    /// By unit: complete, but an earlier unit is not.
    landed: Vec<Option<Landed>>,
    /// Units added up so far: always a prefix, so that all ranks issue the same operations.
    added: usize,
}

impl Copies {
    pub(super) fn new(comm: &Communicator, units: usize) -> Self {
        Self {
            comm: comm.clone(),
            landed: (0..units).map(|_| None).collect(),
            added: 0,
        }
    }

    /// This rank's part of a unit is complete. Returns the operations that can begin; `tag` names a unit.
    pub(super) fn arrived(
        &mut self,
        landed: Landed,
        tag: impl Fn(usize) -> String,
        waiting: &Waiting,
    ) -> Vec<Work> {
        let unit = landed.unit;
        self.landed[unit] = Some(landed);
        let mut works = Vec::new();
        while let Some(Landed { unit, place, at }) = self.landed.get_mut(self.added).and_then(Option::take) {
            self.added += 1;
            let launch = Launch::after(at, Traffic::Grads, format!("{} of all copies", tag(unit)));
            // It is scaled already.
            let sum = ReduceOp::Sum { scale: 1.0 };
            works.push(waiting.launch(|| self.comm.all_reduce(&place, sum, launch)));
        }
        works
    }

    /// The next step begins.
    pub(super) fn reset(&mut self) {
        self.landed.fill_with(|| None);
        self.added = 0;
    }
}
