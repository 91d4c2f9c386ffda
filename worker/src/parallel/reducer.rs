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
//! reduce-scattered among the ranks of its copy and then averaged over the copies ([`ShardGroups`]).
//!
//! Peers write into the arena while a bucket is under way. The two guards keep Rust code out of it meanwhile; an
//! operation in flight owns its segment, so that it outlives even a reducer that is dropped too early.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::staging::Staging;
use super::wire::Wire;
use super::{GradientLayout, Portion, ReduceError, ShardGroups, Sharding, Step};
use crate::collective::{Communicator, Work, WorkError};
use crate::config::{Sync, Unused};
use crate::device::{Arena, ArenaSpec, Buffer, Device, Element, HostRef, Sharing, Stream};
use crate::model::ParamId;

/// Beyond its own deadline an operation is given this long to say so itself, with the better error.
pub(super) const GRACE: Duration = Duration::from_secs(5);

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

/// Time that averaging took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SyncTimes {
    /// In collective operations, waiting for other ranks included.
    pub comm: Duration,
    /// The part that nothing else hid: time that the host was blocked.
    pub exposed: Duration,
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
    pub(super) comm: Communicator,
    /// The ranks that own the same slices of all copies.
    pub(super) copies: Option<Communicator>,
    /// Over which the average is.
    pub(super) ranks: usize,
    pub(super) layout: Arc<GradientLayout>,
    pub(super) config: ReducerConfig,
    pub(super) units: Vec<Unit>,
    /// Unit of each parameter.
    pub(super) unit_of: Vec<usize>,
    pub(super) memory: GradMemory,
    pub(super) in_flight: Vec<Work>,
    /// Of finished steps: streams wait for it, the host has not asked how it ended.
    pub(super) unsettled: Vec<Work>,
    pub(super) poison: Option<String>,
    pub(super) unused: Unused,
    /// Global rank.
    pub(super) rank: usize,
}

/// What one operation carries.
pub(super) struct Unit {
    /// Its elements, where all gradients lie in one arena.
    pub(super) range: Range<usize>,
    /// Those of them whose averages end on this rank, counted from the unit's first.
    pub(super) own: Range<usize>,
    /// Parameters that must be ready.
    pub(super) params: Vec<ParamId>,
    /// For errors and traces.
    pub(super) tag: String,
}

/// Where gradients are, and what becomes of them.
pub(super) enum GradMemory {
    /// All in one arena: averaged on every rank, or, if `scattered`, each on its owner.
    Whole {
        arena: Arena,
        grads: Vec<Buffer>,
        scattered: bool,
        /// Where they cross the wire in another type.
        wire: Option<Wire>,
    },
    /// In slots for as long as they are in flight, then in the shard of their owner.
    Staged(Staging),
}

impl GradMemory {
    fn whole(
        comm: &Communicator,
        device: &Arc<dyn Device>,
        layout: &GradientLayout,
        sharding: Option<&Sharding>,
        units: &[Unit],
    ) -> Result<Self, ReduceError> {
        let is_narrowed = layout.dtype() != layout.accumulated();
        let spec = ArenaSpec {
            name: "gradients".into(),
            dtype: layout.accumulated(),
            len: sharding.map_or(layout.len(), Sharding::whole_len),
            sharing: if is_narrowed {
                Sharing::Private
            } else {
                Sharing::Node
            },
        };
        let (arena, wire) = if is_narrowed {
            let lens = units.iter().map(|unit| unit.range.len());
            let wire = Wire::new(comm, device, layout.dtype(), lens)?;
            (device.alloc(&spec)?, Some(wire))
        } else {
            (comm.alloc_shared(device, &spec)?, None)
        };
        let range = |id| sharding.map_or_else(|| layout.range(id), |sharding| sharding.whole_range(id));
        Ok(Self::Whole {
            grads: (0..layout.params())
                .map(|id| arena.slice(range(ParamId(id))))
                .collect(),
            arena,
            scattered: sharding.is_some(),
            wire,
        })
    }
}

impl Reducer {
    /// Allocates the gradients. Every rank of `comm` must call it, with the same layout and configuration.
    pub fn new(
        comm: &Communicator,
        device: &Arc<dyn Device>,
        layout: Arc<GradientLayout>,
        config: ReducerConfig,
    ) -> Result<Self, ReduceError> {
        let units = units(&layout, config.sync);
        let memory = GradMemory::whole(comm, device, &layout, None, &units)?;
        Ok(Self::with(
            &ShardGroups::one(comm.clone()),
            layout,
            config,
            units,
            memory,
        ))
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
        let units = sharding.units().iter().enumerate().map(|(index, unit)| Unit {
            range: unit.whole(),
            own: sharding.own(index),
            params: unit.params.clone(),
            tag: unit.name.clone(),
        });
        let units: Vec<Unit> = units.collect();
        let memory = match between {
            Between::Full => GradMemory::whole(groups.world(), device, &layout, Some(sharding), &units)?,
            Between::Shard => {
                let staging = Staging::new(groups.world(), device, stream, &layout, sharding)?;
                GradMemory::Staged(staging)
            }
        };
        let sync = Sync::Bucketed;
        let config = ReducerConfig { sync, overlap };
        Ok(Self::with(groups, layout, config, units, memory))
    }

    fn with(
        groups: &ShardGroups,
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
            copies: groups.copies().cloned(),
            ranks: groups.world().size(),
            layout,
            config,
            units,
            unit_of,
            memory,
            in_flight: Vec::new(),
            unsettled: Vec::new(),
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
        match &self.memory {
            GradMemory::Whole { arena, wire, .. } => arena.bytes() + wire.as_ref().map_or(0, Wire::bytes),
            GradMemory::Staged(staging) => staging.bytes(),
        }
    }

    /// Number of operations in which all gradients are reduced.
    #[must_use]
    pub fn operations(&self) -> usize {
        self.units.len()
    }

    /// Memory of a gradient, to be written.
    pub(super) fn grad(&mut self, id: ParamId) -> Result<Buffer, ReduceError> {
        match &mut self.memory {
            GradMemory::Whole { grads, .. } => Ok(grads[id.0].clone()),
            GradMemory::Staged(staging) => staging.grad(id, Instant::now() + self.comm.timeout() + GRACE),
        }
    }

    /// What is known to have ended of the operations that streams wait for: time of those that succeeded, or why the
    /// first did not.
    pub(super) fn settle(&mut self) -> Result<Duration, WorkError> {
        let now = Instant::now();
        let mut time = Duration::ZERO;
        for work in self.unsettled.extract_if(.., |work| work.is_done()) {
            let times = work.wait(now)?;
            time += times.ended.saturating_duration_since(times.started);
        }
        Ok(time)
    }

    /// Why an operation that a stream waits for has failed, if one has: the stream itself only says so in words.
    #[must_use]
    pub fn failure(&self) -> Option<WorkError> {
        let ended = self.unsettled.iter().filter(|work| work.is_done());
        let now = Instant::now();
        ended.map(|work| work.wait(now)).find_map(Result::err)
    }

    /// True if every micro-batch communicates.
    pub(super) fn is_staged(&self) -> bool {
        matches!(self.memory, GradMemory::Staged(_))
    }

    /// Begins a step of `accumulation` micro-batches. The average is over all of them and all ranks. Only the last
    /// one communicates, but with [`Between::Shard`].
    pub fn step(&mut self, accumulation: usize) -> Result<Step<'_>, ReduceError> {
        if let Some(cause) = &self.poison {
            return Err(ReduceError::Poisoned(cause.clone()));
        }
        if accumulation == 0 {
            return Err(ReduceError::MicroBatches {
                accumulation,
                micro_batch: 0,
                what: "the step was begun",
            });
        }
        if let GradMemory::Staged(staging) = &mut self.memory {
            staging.reset();
        }
        Ok(Step::begin(self, accumulation))
    }
}

/// The averaged gradients, for reading. The next step can begin when this is gone.
pub struct Reduced<'a> {
    reducer: &'a mut Reducer,
    times: SyncTimes,
}

impl<'a> Reduced<'a> {
    pub(super) fn new(reducer: &'a mut Reducer, times: SyncTimes) -> Self {
        Self { reducer, times }
    }

    /// The memory, padding included. Of a whole arena that is scattered, only what this rank owns has a meaning.
    #[must_use]
    pub fn portion(&self) -> Portion {
        match &self.reducer.memory {
            GradMemory::Whole { arena, .. } => Portion::Whole(arena.clone()),
            GradMemory::Staged(staging) => staging.portion(),
        }
    }

    /// Where each gradient lies.
    #[must_use]
    pub fn layout(&self) -> &GradientLayout {
        &self.reducer.layout
    }

    /// The elements of one gradient on the host. A sharded reducer has them on their owner only, and says so.
    ///
    /// # Panics
    /// If there is no such parameter.
    pub fn grad<T: Element>(&self, id: ParamId) -> Result<HostRef<'_, T>, ReduceError> {
        if let GradMemory::Whole {
            grads,
            scattered: false,
            ..
        } = &self.reducer.memory
        {
            return Ok(grads[id.0].host()?);
        }
        let param = self.reducer.layout.spec(id).name.clone();
        Err(ReduceError::Sharded { param })
    }

    /// Time that averaging took. After [`Step::finish_on`], of all operations that have ended since the step before.
    #[must_use]
    pub fn times(&self) -> SyncTimes {
        self.times
    }
}

/// What each operation carries where every rank holds all gradients.
pub(super) fn units(layout: &GradientLayout, sync: Sync) -> Vec<Unit> {
    let unit = |range: Range<usize>, params: &[ParamId], tag: String| Unit {
        own: 0..range.len(),
        range,
        params: params.to_vec(),
        tag,
    };
    match sync {
        Sync::Naive => vec![unit(0..layout.len(), layout.order(), "all gradients".into())],
        Sync::PerParameter => {
            let ordered = layout.order().iter();
            ordered
                .map(|id| {
                    let tag = format!("gradient of `{}`", layout.spec(*id).name);
                    unit(layout.range(*id), &[*id], tag)
                })
                .collect()
        }
        Sync::Bucketed => {
            let buckets = layout.buckets().iter().enumerate();
            buckets
                .map(|(i, bucket)| {
                    let first = &layout.spec(bucket.params[0]).name;
                    let tag = format!("bucket {i}, from `{first}`");
                    unit(bucket.range.clone(), &bucket.params, tag)
                })
                .collect()
        }
    }
}
