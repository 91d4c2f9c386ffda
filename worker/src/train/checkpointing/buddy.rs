//! A second copy of another rank's part of the state, where no other rank has one (`train.recovery: buddy`).
//!
//! Each rank sends its part to its buddy when a generation begins, and its sums of the gradients in every step. The buddy
//! updates the copy with the same numbers as the rank its part, so that both have the same bits. It takes 4Ψ/N bytes on
//! the wire a step, and memory for masters and moments (12Ψ/N with AdamW) and for the gradients (4Ψ/N).

use std::sync::Arc;

use crate::collective::{AllToAll, Communicator, Launch, Traffic, Work};
use crate::config::Recovery;
use crate::device::{ArenaSpec, Buffer, Compute, DType, DeviceError, StateMemory, Stream};
use crate::mesh::Buddies;
use crate::optim::{Optimizer, UpdateStep};
use crate::parallel::{ArenaShare, Parameters, ReplicaSet, Sharding};
use crate::train::TrainError;
use crate::train::rank_spec::RankSpec;

/// The copy that a rank keeps.
pub(crate) struct BuddyCopy {
    /// The rank whose part it is a copy of, and the one that has a copy of this rank's part.
    pub(crate) buddies: Buddies,
    /// That of the owner.
    sharding: Sharding,
    masters: ArenaShare,
    optimizer: Optimizer,
    /// The owner's sums of this step.
    grads: ArenaShare,
    /// It is at the state of this rank's own part.
    is_whole: bool,
}

impl BuddyCopy {
    /// Memory for it, if the configuration wants one and state is sharded.
    pub(crate) fn new(
        spec: &RankSpec,
        set: &ReplicaSet,
        home: &Arc<StateMemory>,
    ) -> Result<Option<Self>, TrainError> {
        let (strategy, train) = (&spec.strategy, &spec.config.train);
        if train.recovery != Recovery::Buddy || strategy.shard_ranks() == 1 {
            return Ok(None);
        }
        let buddies = strategy.mesh.buddies(spec.rank);
        let sharding = strategy.sharding(&spec.layout, buddies.owner);
        let shard = |name, dtype| {
            let arena = home.alloc(&ArenaSpec::private(name, dtype, sharding.shard_len()))?;
            Ok::<_, DeviceError>(ArenaShare::Shard(arena))
        };
        let params = &spec.model.params;
        Ok(Some(Self {
            masters: shard("copy of a rank's master weights", DType::F32)?,
            grads: shard("gradients of a copy", spec.layout.accumulated())?,
            optimizer: Optimizer::new(home.clone(), set, &sharding, params, &train.optimizer)?,
            is_whole: false,
            buddies,
            sharding,
        }))
    }

    /// Size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let [masters, grads] = [&self.masters, &self.grads].map(|share| share.arena().bytes());
        masters + grads + self.optimizer.bytes()
    }

    /// The copy, unless it was not received yet.
    pub(crate) fn whole(self) -> Option<Self> {
        self.is_whole.then_some(self)
    }

    /// Sends this rank's sums to its buddy, and receives those of the owner.
    pub(crate) fn exchange_sums(
        &self,
        compute: &Compute,
        parameters: &Parameters,
        sums: &ArenaShare,
    ) -> Vec<Work> {
        let pieces = self.pieces(parameters, sums, &self.grads).into_iter();
        let all = pieces.map(|pieces| self.exchange(parameters, pieces, launch(compute, Traffic::Grads)));
        all.collect()
    }

    /// Puts the update of the copy on the stream: that of the owner.
    pub(crate) fn step(&self, stream: Stream, update: &UpdateStep) {
        // It has no exchanges with other ranks.
        let _ = (self.optimizer).step(stream, &self.masters, &self.grads, update);
    }

    /// Gives the part of the owner back to it, if it `lacks` that; a rank that lacks its own part gets it of its buddy.
    pub(crate) fn give_back(
        &self,
        compute: &Compute,
        parameters: &Parameters,
        optimizer: &Optimizer,
        lacks: impl Fn(usize) -> bool,
    ) -> Result<(), TrainError> {
        let comm = peers(parameters);
        for Pieces { own, copy } in self.state(parameters, optimizer) {
            let launch = launch(compute, Traffic::Params);
            let work = if lacks(self.buddies.owner) {
                comm.send(&copy, index(comm, self.buddies.owner), launch)
            } else if lacks(comm.members()[comm.rank()]) {
                comm.recv(&own, index(comm, self.buddies.buddy), launch)
            } else {
                continue;
            };
            work.wait(comm.deadline())?;
        }
        Ok(())
    }

    /// Receives all of the copy, and sends the buddy its copy. A copy from the generation before keeps its bits meanwhile;
    /// on a GPU only if no abort comes between, which leaves anything in what a collective receives.
    pub(crate) fn refresh(
        &mut self,
        compute: &Compute,
        parameters: &Parameters,
        optimizer: &Optimizer,
    ) -> Result<(), TrainError> {
        self.is_whole &= !compute.device.is_asynchronous();
        for pieces in self.state(parameters, optimizer) {
            let work = self.exchange(parameters, pieces, launch(compute, Traffic::Params));
            work.wait(peers(parameters).deadline())?;
        }
        self.is_whole = true;
        Ok(())
    }

    /// Masters and slots.
    fn state(&self, parameters: &Parameters, optimizer: &Optimizer) -> Vec<Pieces> {
        let masters = (optimizer.masters(parameters.own()), &self.masters);
        let [own, copy] =
            [optimizer, &self.optimizer].map(|optimizer| optimizer.slots().map(|(_, share)| share));
        let shares = std::iter::once(masters).chain(own.zip(copy));
        shares
            .flat_map(|(own, copy)| self.pieces(parameters, own, copy))
            .collect()
    }

    /// This rank's part of a share and its place in the copy: shards as a whole, else by unit.
    fn pieces(&self, parameters: &Parameters, own: &ArenaShare, copy: &ArenaShare) -> Vec<Pieces> {
        let sharding = parameters.sharding();
        let unit = |unit| Pieces {
            own: own.slice(&sharding.own_ranges(unit)),
            copy: copy.slice(&self.sharding.own_ranges(unit)),
        };
        match own {
            ArenaShare::Shard(arena) => vec![Pieces {
                own: arena.whole(),
                copy: copy.arena().whole(),
            }],
            ArenaShare::Whole(_) => (0..sharding.units().len()).map(unit).collect(),
        }
    }

    /// Every rank sends its part to its buddy at once.
    fn exchange(&self, parameters: &Parameters, Pieces { own, copy }: Pieces, launch: Launch) -> Work {
        let comm = peers(parameters);
        let counts = |rank, len| {
            let mut counts = vec![0; comm.size()];
            counts[index(comm, rank)] = len;
            counts
        };
        let parts = AllToAll {
            sent_counts: counts(self.buddies.buddy, own.len()),
            received_counts: counts(self.buddies.owner, copy.len()),
            sent: own,
        };
        comm.all_to_all(&copy, parts, launch)
    }
}

/// The same part of some numbers of a rank, and of the owner's.
struct Pieces {
    own: Buffer,
    copy: Buffer,
}

/// The ranks that hold one copy of the state together. A configuration with buddies has one group of parameters.
fn peers(parameters: &Parameters) -> &Communicator {
    &parameters.replica_set().groups[0].shard
}

/// Its rank in a group.
fn index(comm: &Communicator, rank: usize) -> usize {
    let found = comm.members().binary_search(&rank);
    found.expect("buddies hold one copy of the state together")
}

fn launch(compute: &Compute, traffic: Traffic) -> Launch {
    Launch::after(compute.record(), traffic, "copy for a buddy")
}
