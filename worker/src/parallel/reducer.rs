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
//! Peers write into the arena while a bucket is under way. The two guards keep Rust code out of it meanwhile; an
//! operation in flight owns its segment, so that it outlives even a reducer that is dropped too early.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::{GradientLayout, ReduceError, Step};
use crate::collective::{Communicator, Work};
use crate::config::Sync;
use crate::device::{Arena, ArenaSpec, Buffer, Device, Element, HostRef, Sharing};
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

/// Time that averaging took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SyncTimes {
    /// In collective operations, waiting for other ranks included.
    pub comm: Duration,
    /// The part that nothing else hid: time that [`Step::finish`] blocked.
    pub exposed: Duration,
}

/// See the module.
pub struct Reducer {
    pub(super) comm: Communicator,
    pub(super) layout: Arc<GradientLayout>,
    pub(super) config: ReducerConfig,
    pub(super) units: Vec<Unit>,
    /// Unit of each parameter.
    pub(super) unit_of: Vec<usize>,
    /// Memory of each gradient.
    pub(super) grads: Vec<Buffer>,
    pub(super) in_flight: Vec<Work>,
    pub(super) poison: Option<String>,
    arena: Arena,
}

/// What one operation carries.
pub(super) struct Unit {
    pub(super) buffer: Buffer,
    /// Parameters that must be ready.
    pub(super) params: Vec<ParamId>,
    /// For errors and traces.
    pub(super) tag: String,
}

impl Reducer {
    /// Allocates the gradients. Every rank of `comm` must call it, with the same layout and configuration.
    pub fn new(
        comm: Communicator,
        device: &Arc<dyn Device>,
        layout: Arc<GradientLayout>,
        config: ReducerConfig,
    ) -> Result<Self, ReduceError> {
        let spec = ArenaSpec {
            name: "gradients".into(),
            dtype: layout.dtype(),
            len: layout.len(),
            sharing: Sharing::Node,
        };
        let arena = comm.alloc_shared(device, &spec)?;
        let units = units(&layout, config.sync, &arena);
        let mut unit_of = vec![0; layout.params()];
        for (unit, params) in units.iter().map(|u| &u.params).enumerate() {
            for id in params {
                unit_of[id.0] = unit;
            }
        }
        let grads = (0..layout.params())
            .map(|id| arena.slice(layout.range(ParamId(id))))
            .collect();
        Ok(Self {
            comm,
            layout,
            config,
            units,
            unit_of,
            grads,
            in_flight: Vec::new(),
            poison: None,
            arena,
        })
    }

    /// Where each gradient lies.
    #[must_use]
    pub fn layout(&self) -> &Arc<GradientLayout> {
        &self.layout
    }

    /// Size of the gradients in bytes, padding included.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.arena.bytes()
    }

    /// Begins a step of `accumulation` micro-batches. Only the last one communicates; the average is over all of
    /// them and all ranks.
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

    /// All of them, padding included, in the layout of [`Reducer::layout`].
    #[must_use]
    pub fn arena(&self) -> &Arena {
        &self.reducer.arena
    }

    /// Where each gradient lies.
    #[must_use]
    pub fn layout(&self) -> &GradientLayout {
        &self.reducer.layout
    }

    /// The elements of one gradient on the host.
    ///
    /// # Panics
    /// If there is no such parameter.
    pub fn grad<T: Element>(&self, id: ParamId) -> Result<HostRef<'_, T>, ReduceError> {
        Ok(self.reducer.grads[id.0].host()?)
    }

    /// Time that averaging took.
    #[must_use]
    pub fn times(&self) -> SyncTimes {
        self.times
    }
}

fn units(layout: &GradientLayout, sync: Sync, arena: &Arena) -> Vec<Unit> {
    let unit = |range: Range<usize>, params: &[ParamId], tag: String| Unit {
        buffer: arena.slice(range),
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
