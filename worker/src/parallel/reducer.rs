//! The reducer: sums gradients over the ranks while they are being computed.
//!
//! It knows no models. Whoever can say "gradient i is ready" can use it:
//!
//! 1. [`Reducer::step`] begins a step and gives the right to write gradients ([`Step`]);
//! 2. each gradient is written and reported ([`Step::ready`]); a bucket is launched as soon as it and all before it
//!    are complete, strictly in layout order, whatever the order of the reports, so that all ranks issue the same
//!    operations;
//! 3. [`Step::finish`] waits for the others and gives the right to read the sums ([`Reduced`]);
//!    [`Step::finish_on`] lets a stream wait instead of the host.
//!
//! With [`Reducer::new`] every rank ends with all sums; with [`Reducer::sharded`] each with those that it owns,
//! reduce-scattered among the ranks of its copy and, when nothing is added to it any more, summed over the replicate group
//! ([`ReplicaSet`]).
//!
//! Peers write into the arena while a bucket is under way. The two guards keep Rust code out of it meanwhile; an
//! operation in flight owns its segment, so that it outlives even a reducer that is dropped too early.

use std::sync::Arc;
use std::time::Instant;

use super::copies::Copies;
use super::grad_memory::{GradMemory, WholeGrads};
use super::grad_shard::GradShard;
use super::reduce_unit::{Round, Unit};
use super::waiting::Waiting;
use super::{GradientLayout, ReduceError, ReplicaSet, Sharding, Step};
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
    /// Nothing: every micro-batch communicates, and the sums of each are added to the shard.
    Shard,
}

/// See the module.
pub struct Reducer {
    /// The ranks that hold a copy together.
    comm: Communicator,
    copies: Option<Copies>,
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
        let replicas = ReplicaSet::of_all(comm.clone());
        let units = Unit::of_layout(&layout, config.sync);
        let whole = WholeGrads::new(&replicas, device, &layout, None, &units)?;
        let memory = GradMemory::Whole(whole);
        Ok(Self::with(&replicas, device, layout, config, units, memory))
    }

    /// A reducer that leaves each sum on the ranks that own it. Every rank of `replicas` must call it; `sharding`
    /// is over [`ReplicaSet::reduce`]. `stream` is the one that computes the gradients; `overlap` is as in
    /// [`ReducerConfig`].
    pub fn sharded(
        replicas: &ReplicaSet,
        (device, stream): (&Arc<dyn Device>, Stream),
        layout: Arc<GradientLayout>,
        sharding: &Arc<Sharding>,
        between: Between,
        overlap: bool,
    ) -> Result<Self, ReduceError> {
        let units = Unit::of_sharding(sharding);
        let memory = match between {
            Between::Full => {
                let whole = WholeGrads::new(replicas, device, &layout, Some(sharding), &units)?;
                GradMemory::Whole(whole)
            }
            Between::Shard => {
                GradMemory::Shard(GradShard::new(replicas, (device, stream), &layout, sharding)?)
            }
        };
        let sync = Sync::Bucketed;
        let config = ReducerConfig { sync, overlap };
        Ok(Self::with(replicas, device, layout, config, units, memory))
    }

    fn with(
        replicas: &ReplicaSet,
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
            comm: replicas.reduce().clone(),
            copies: replicas.replicate().map(|comm| Copies::new(comm, units.len())),
            layout,
            config,
            units,
            unit_of,
            memory,
            in_flight: Vec::new(),
            waiting: Waiting::new(device, replicas.all().timeline()),
            poison: None,
            unused: Unused::Error,
            rank: replicas.all().members()[replicas.all().rank()],
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

    /// Begins a step of so many micro-batches. The sum is over all of them and all ranks, and nothing scales it: the
    /// gradient of the mean is the sum of gradients of losses that were divided by all samples. It is launched when the last
    /// of them is complete, with [`Between::Shard`] for each of them.
    ///
    /// # Panics
    /// If there are none.
    pub fn step(&mut self, micro_batches: usize) -> Result<Step<'_>, ReduceError> {
        assert!(micro_batches > 0, "a step has a micro-batch");
        if let Some(cause) = &self.poison {
            return Err(ReduceError::Poisoned(cause.clone()));
        }
        self.memory.reset();
        if let Some(copies) = &mut self.copies {
            copies.reset();
        }
        Ok(Step::begin(self, micro_batches))
    }

    /// Memory of a gradient, to be written.
    pub(super) fn grad(&mut self, id: ParamId) -> Result<Buffer, ReduceError> {
        let buffer = self.memory.grad(id, &self.waiting, self.comm.deadline())?;
        self.add_copies();
        Ok(buffer)
    }

    /// Sends a unit on its way that is complete at `ready`.
    pub(super) fn launch(&mut self, index: usize, ready: Event, round: Round) {
        let unit = (index, &self.units[index]);
        let (waiting, deadline) = (&self.waiting, self.comm.deadline());
        let (buffer, ready) = self.memory.outgoing(unit, ready, waiting, deadline);
        let sum = ReduceOp::Sum { scale: 1.0 };
        let launch = Launch::after(ready, Traffic::Grads, unit.1.tag.clone());
        let work = waiting.launch(|| {
            if self.memory.is_scattered() {
                self.comm.reduce_scatter(&buffer, sum, launch)
            } else {
                self.comm.all_reduce(&buffer, sum, launch)
            }
        });
        self.memory.launched(unit, work.clone(), round);
        self.in_flight.push(work);
        self.add_copies();
    }

    /// Puts the sums where they belong, after the operations that were launched. Reached when those are there that
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
