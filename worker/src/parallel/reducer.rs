//! The reducer: averages gradients over the ranks while they are being computed.
//!
//! It knows no models. Whoever can say "gradient i is ready" can use it:
//!
//! 1. [`Reducer::step`] begins a step and gives the right to write gradients ([`Step`]);
//! 2. each gradient is written and reported ([`Step::ready`]); a bucket is launched as soon as it and all before it
//!    are complete, strictly in layout order, whatever the order of the reports, so that all ranks issue the same
//!    operations;
//! 3. [`Step::finish`] waits for the others and gives the right to read the averages ([`Reduced`]);
//!    [`Step::finish_on`] lets a stream wait instead of the host.
//!
//! With [`Reducer::new`] every rank ends with all averages; with [`Reducer::sharded`] each with those that it owns,
//! reduce-scattered among the ranks of its copy and, when nothing is added to it any more, averaged over the copies
//! ([`ShardGroups`]).
//!
//! Peers write into the arena while a bucket is under way. The two guards keep Rust code out of it meanwhile; an
//! operation in flight owns its segment, so that it outlives even a reducer that is dropped too early.

use std::sync::Arc;
use std::time::Instant;

use super::copies::Copies;
use super::grad_memory::{GradMemory, WholeGrads};
use super::grad_shard::GradShard;
use super::reduce_unit::Unit;
use super::reports::Turn;
use super::waiting::Waiting;
use super::{GradientLayout, ReduceError, ShardGroups, Sharding, Step};
use crate::collective::{Communicator, Launch, ReduceOp, Traffic, Work, WorkError};
use crate::config::{Sync, Unused};
use crate::device::{Buffer, Device, Event, Stream};
use crate::model::ParamId;

/// How gradients are synchronised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReducerConfig {
    /// What one operation carries.
    pub sync: Sync,
    /// Launch while gradients are still being computed; otherwise all at the end.
    pub overlap: bool,
}

impl Default for ReducerConfig {
    /// Buckets, launched as soon as they are complete.
    fn default() -> Self {
        Self {
            sync: Sync::Bucketed,
            overlap: true,
        }
    }
}

/// What a rank holds of gradients that it does not own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Between {
    /// All of them until the last micro-batch, which alone communicates.
    Full,
    /// Nothing: every micro-batch communicates, and the averages of each are added to the shard.
    Shard,
}

/// See the module.
pub struct Reducer {
    /// The ranks that hold a copy together.
    comm: Communicator,
    copies: Option<Copies>,
    /// Over which the average is.
    ranks: usize,
    pub(super) layout: Arc<GradientLayout>,
    pub(super) config: ReducerConfig,
    pub(super) units: Vec<Unit>,
    /// Unit of each parameter.
    pub(super) unit_of: Vec<usize>,
    pub(super) memory: GradMemory,
    pub(super) in_flight: Vec<Work>,
    pub(super) waiting: Waiting,
    pub(super) poison: Option<String>,
    pub(super) unused: Unused,
    /// Global rank.
    pub(super) rank: usize,
}

impl Reducer {
    /// Allocates the gradients. Every rank of `comm` must call it, with the same layout and configuration.
    pub fn new(
        comm: &Communicator,
        device: &Arc<dyn Device>,
        layout: Arc<GradientLayout>,
        config: ReducerConfig,
    ) -> Result<Self, ReduceError> {
        let groups = ShardGroups::one(comm.clone());
        let units = Unit::of_layout(&layout, config.sync);
        let whole = WholeGrads::new(&groups, device, &layout, None, &units)?;
        let memory = GradMemory::Whole(whole);
        Ok(Self::with(&groups, device, layout, config, units, memory))
    }

    /// A reducer that leaves each average on the ranks that own it. Every rank of `groups` must call it; `sharding`
    /// is over [`ShardGroups::shard`]. `stream` is the one that computes the gradients; `overlap` is as in
    /// [`ReducerConfig`].
    pub fn sharded(
        groups: &ShardGroups,
        (device, stream): (&Arc<dyn Device>, Stream),
        layout: Arc<GradientLayout>,
        sharding: &Arc<Sharding>,
        between: Between,
        overlap: bool,
    ) -> Result<Self, ReduceError> {
        let units = Unit::of_sharding(sharding);
        let memory = match between {
            Between::Full => {
                let whole = WholeGrads::new(groups, device, &layout, Some(sharding), &units)?;
                GradMemory::Whole(whole)
            }
            Between::Shard => GradMemory::Shard(GradShard::new(groups, (device, stream), &layout, sharding)?),
        };
        let sync = Sync::Bucketed;
        let config = ReducerConfig { sync, overlap };
        Ok(Self::with(groups, device, layout, config, units, memory))
    }

    fn with(
        groups: &ShardGroups,
        device: &Arc<dyn Device>,
        layout: Arc<GradientLayout>,
        config: ReducerConfig,
        units: Vec<Unit>,
        memory: GradMemory,
    ) -> Self {
        let mut unit_of = vec![0; layout.params()];
        for (unit, params) in units.iter().map(|u| &u.params).enumerate() {
            for id in params {
                unit_of[id.0] = unit;
            }
        }
        Self {
            comm: groups.shard().clone(),
            copies: groups.copies().map(|comm| Copies::new(comm, units.len())),
            ranks: groups.world().size(),
            layout,
            config,
            units,
            unit_of,
            memory,
            in_flight: Vec::new(),
            waiting: Waiting::new(device, groups.world().timeline()),
            poison: None,
            unused: Unused::Error,
            rank: groups.world().members()[groups.world().rank()],
        }
    }

    /// The same, with another answer to parameters that take no part in a backward.
    #[must_use]
    pub fn with_unused(mut self, unused: Unused) -> Self {
        self.unused = unused;
        self
    }

    /// Where each gradient lies.
    #[must_use]
    pub fn layout(&self) -> &Arc<GradientLayout> {
        &self.layout
    }

    /// Size of the memory for gradients in bytes, padding and slots included.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// Number of operations in which all gradients are reduced.
    #[must_use]
    pub fn operations(&self) -> usize {
        self.units.len()
    }

    /// Why an operation that a stream waits for has failed, if one has: the stream itself only says so in words.
    #[must_use]
    pub fn failure(&self) -> Option<WorkError> {
        self.waiting.failure()
    }

    /// Begins a step of `accumulation` micro-batches. The average is over all of them and all ranks. Only the last
    /// one communicates, but with [`Between::Shard`].
    pub fn step(&mut self, accumulation: usize) -> Result<Step<'_>, ReduceError> {
        if let Some(cause) = &self.poison {
            return Err(ReduceError::Poisoned(cause.clone()));
        }
        let turn = Turn {
            micro_batch: 0,
            accumulation,
        };
        if accumulation == 0 {
            return Err(turn.wrong("the step was begun"));
        }
        self.memory.reset();
        if let Some(copies) = &mut self.copies {
            copies.reset();
        }
        Ok(Step::begin(self, turn))
    }

    /// Memory of a gradient, to be written.
    pub(super) fn grad(&mut self, id: ParamId) -> Result<Buffer, ReduceError> {
        let buffer = self.memory.grad(id, &self.waiting, self.comm.deadline())?;
        self.add_copies();
        Ok(buffer)
    }

    /// Sends a unit on its way that is complete at `ready`.
    pub(super) fn launch(&mut self, index: usize, ready: Event, turn: Turn) {
        let unit = (index, &self.units[index]);
        let (waiting, deadline) = (&self.waiting, self.comm.deadline());
        let (buffer, ready) = self.memory.outgoing(unit, ready, waiting, deadline);
        let average = ReduceOp::Sum {
            scale: 1.0 / (turn.accumulation * self.ranks) as f32,
        };
        let launch = Launch::after(ready, Traffic::Grads, unit.1.tag.clone());
        let work = waiting.launch(|| {
            if self.memory.is_scattered() {
                self.comm.reduce_scatter(&buffer, average, launch)
            } else {
                self.comm.all_reduce(&buffer, average, launch)
            }
        });
        self.memory.launched(unit, work.clone(), turn);
        self.in_flight.push(work);
        self.add_copies();
    }

    /// Puts the averages where they belong, after the operations that were launched. Reached when those are there that
    /// the stream that computes does not wait for.
    pub(super) fn land(&mut self, deadline: Instant) -> Event {
        let landed = self.memory.land_all(&self.waiting, deadline);
        self.add_copies();
        landed
    }

    /// Adds up over the copies of the state what is complete.
    fn add_copies(&mut self) {
        let landed = self.memory.take_landed();
        let Some(copies) = &mut self.copies else {
            return;
        };
        let units = &self.units;
        for landed in landed {
            let works = copies.arrived(landed, |unit| units[unit].tag.clone(), &self.waiting);
            self.in_flight.extend(works);
        }
    }
}
