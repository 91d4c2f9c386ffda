//! The reducer: averages gradients over the ranks while they are being computed.
//!
//! It knows no models. Whoever can say "gradient i is ready" can use it:
//!
//! 1. [`Reducer::step`] begins a step and gives the right to write gradients ([`Step`]);
//! 2. each gradient is written and reported ([`Step::ready`]); a bucket is launched as soon as it and all before it
//!    are complete, strictly in layout order, whatever the order of the reports, so that all ranks issue the same
//!    operations;
//! 3. [`Step::finish`] waits for the others and gives the right to read the averages ([`Reduced`]).
//!
//! With [`Reducer::new`] every rank ends with all averages; with [`Reducer::sharded`] each with those that it owns.
//!
//! Peers write into the arena while a bucket is under way. The two guards keep Rust code out of it meanwhile; an
//! operation in flight owns its segment, so that it outlives even a reducer that is dropped too early.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::staging::Staging;
use super::{GradientLayout, Portion, ReduceError, Sharding, Step};
use crate::collective::{Communicator, Work};
use crate::config::Sync;
use crate::device::{Arena, ArenaSpec, Buffer, Device, Element, HostRef, Sharing, Stream};
use crate::model::ParamId;

/// Beyond its own deadline an operation is given this long to say so itself, with the better error.
const GRACE: Duration = Duration::from_secs(5);

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
    /// The part that nothing else hid: time that [`Step::finish`] blocked.
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
    pub(super) comm: Communicator,
    pub(super) layout: Arc<GradientLayout>,
    pub(super) config: ReducerConfig,
    pub(super) units: Vec<Unit>,
    /// Unit of each parameter.
    pub(super) unit_of: Vec<usize>,
    pub(super) memory: GradMemory,
    pub(super) in_flight: Vec<Work>,
    pub(super) poison: Option<String>,
}

/// What one operation carries.
pub(super) struct Unit {
    /// Its elements, where all gradients lie in one arena.
    pub(super) range: Range<usize>,
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
    ) -> Result<Self, ReduceError> {
        let spec = ArenaSpec {
            name: "gradients".into(),
            dtype: layout.dtype(),
            len: sharding.map_or(layout.len(), Sharding::whole_len),
            sharing: Sharing::Node,
        };
        let arena = comm.alloc_shared(device, &spec)?;
        let range = |id| sharding.map_or_else(|| layout.range(id), |sharding| sharding.whole_range(id));
        Ok(Self::Whole {
            grads: (0..layout.params())
                .map(|id| arena.slice(range(ParamId(id))))
                .collect(),
            arena,
            scattered: sharding.is_some(),
        })
    }
}

impl Reducer {
    /// Allocates the gradients. Every rank of `comm` must call it, with the same layout and configuration.
    pub fn new(
        comm: Communicator,
        device: &Arc<dyn Device>,
        layout: Arc<GradientLayout>,
        config: ReducerConfig,
    ) -> Result<Self, ReduceError> {
        let memory = GradMemory::whole(&comm, device, &layout, None)?;
        let units = units(&layout, config.sync);
        Ok(Self::with(comm, layout, config, units, memory))
    }

    /// A reducer that leaves each average on the rank that owns it. Every rank of `comm` must call it. `stream` is
    /// the one that computes the gradients; `overlap` is as in [`ReducerConfig`].
    pub fn sharded(
        comm: Communicator,
        (device, stream): (&Arc<dyn Device>, Stream),
        layout: Arc<GradientLayout>,
        sharding: &Arc<Sharding>,
        between: Between,
        overlap: bool,
    ) -> Result<Self, ReduceError> {
        let memory = match between {
            Between::Full => GradMemory::whole(&comm, device, &layout, Some(sharding))?,
            Between::Shard => GradMemory::Staged(Staging::new(&comm, device, stream, &layout, sharding)?),
        };
        let units = sharding.units().iter().map(|unit| Unit {
            range: unit.whole(),
            params: unit.params.clone(),
            tag: unit.name.clone(),
        });
        let units = units.collect();
        let sync = Sync::Bucketed;
        Ok(Self::with(
            comm,
            layout,
            ReducerConfig { sync, overlap },
            units,
            memory,
        ))
    }

    fn with(
        comm: Communicator,
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
            comm,
            layout,
            config,
            units,
            unit_of,
            memory,
            in_flight: Vec::new(),
            poison: None,
        }
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
            GradMemory::Whole { arena, .. } => arena.bytes(),
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

    /// Time that averaging took.
    #[must_use]
    pub fn times(&self) -> SyncTimes {
        self.times
    }
}

fn units(layout: &GradientLayout, sync: Sync) -> Vec<Unit> {
    let unit = |range: Range<usize>, params: &[ParamId], tag: String| Unit {
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
