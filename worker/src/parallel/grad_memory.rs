//! Where gradients are, and what becomes of them.

use std::sync::Arc;
use std::time::Instant;

use super::grad_shard::GradShard;
use super::reduce_unit::{Round, Unit};
use super::slots::{Landed, Landing};
use super::waiting::Waiting;
use super::wire::Wire;
use super::{GradientLayout, Portion, ReduceError, ReplicaSet, Sharding};
use crate::collective::Work;
use crate::device::{Arena, ArenaSpec, Buffer, Device, Event};
use crate::model::ParamId;

/// See the module.
pub(super) enum GradMemory {
    /// All in one arena.
    Whole(WholeGrads),
    /// In slots for as long as they are in flight, then in the shard of their owner.
    Shard(GradShard),
}

/// Gradients in one arena: summed on every rank, or each on its owner.
pub(super) struct WholeGrads {
    arena: Arena,
    /// By parameter.
    grads: Vec<Buffer>,
    is_scattered: bool,
    /// Where they cross the wire in another type.
    wire: Option<Wire>,
    landed: Vec<Landed>,
}

impl WholeGrads {
    /// Every rank of `replicas` must call it. Without a `sharding` every rank ends with all sums.
    pub(super) fn new(
        replicas: &ReplicaSet,
        device: &Arc<dyn Device>,
        layout: &GradientLayout,
        sharding: Option<&Sharding>,
        units: &[Unit],
    ) -> Result<Self, ReduceError> {
        let comm = replicas.all();
        let is_narrowed = layout.dtype() != layout.accumulated();
        let is_reduced_in_place = !is_narrowed || replicas.replicate().is_some();
        let wire = if is_narrowed {
            let lens = units.iter().map(|unit| unit.range.len());
            Some(Wire::new(comm, device, layout.dtype(), lens)?)
        } else {
            None
        };
        let len = sharding.map_or(layout.len(), Sharding::whole_len);
        let (name, dtype) = ("gradients", layout.accumulated());
        let arena = if is_reduced_in_place {
            comm.alloc_shared(device, &ArenaSpec::on_node(name, dtype, len))?
        } else {
            device.alloc(&ArenaSpec::private(name, dtype, len))?
        };
        let range = |id| sharding.map_or_else(|| layout.range(id), |sharding| sharding.whole_range(id));
        Ok(Self {
            grads: (0..layout.params())
                .map(|id| arena.slice(range(ParamId(id))))
                .collect(),
            arena,
            is_scattered: sharding.is_some(),
            wire,
            landed: Vec::new(),
        })
    }

    fn launched(&mut self, index: usize, unit: &Unit, work: Work) {
        let place = self.arena.slice(unit.range.clone()).slice(unit.own.clone());
        let Some(wire) = &mut self.wire else {
            let at = work.event().clone();
            self.landed.push(Landed {
                unit: index,
                place,
                at,
            });
            return;
        };
        wire.launched(Landing {
            unit: index,
            work,
            own: unit.own.clone(),
            place,
            accumulate: false,
            is_last: true,
        });
    }
}

impl GradMemory {
    /// Memory of a gradient, to be written.
    pub(super) fn grad(
        &mut self,
        id: ParamId,
        waiting: &Waiting,
        deadline: Instant,
    ) -> Result<Buffer, ReduceError> {
        match self {
            Self::Whole(whole) => Ok(whole.grads[id.0].clone()),
            Self::Shard(shard) => shard.grad(id, waiting, deadline),
        }
    }

    /// All elements of a gradient, where every rank ends with them.
    pub(super) fn sum(&self, id: ParamId) -> Option<&Buffer> {
        match self {
            Self::Whole(whole) if !whole.is_scattered => Some(&whole.grads[id.0]),
            _ => None,
        }
    }

    /// A unit as it crosses the wire, complete at `ready`, and when it is there.
    pub(super) fn outgoing(
        &mut self,
        (index, unit): (usize, &Unit),
        ready: Event,
        waiting: &Waiting,
        deadline: Instant,
    ) -> (Buffer, Event) {
        match self {
            Self::Shard(shard) => (shard.buffer(index), ready),
            Self::Whole(whole) => {
                let place = whole.arena.slice(unit.range.clone());
                match &mut whole.wire {
                    Some(wire) => wire.narrow(&place, &ready, waiting, deadline),
                    None => (place, ready),
                }
            }
        }
    }

    /// The unit that went out last is being reduced.
    pub(super) fn launched(&mut self, (index, unit): (usize, &Unit), work: Work, round: Round) {
        match self {
            Self::Whole(whole) => whole.launched(index, unit, work),
            Self::Shard(shard) => shard.launched(index, work, round),
        }
    }

    /// Puts the sums that were launched where they belong. Reached when those are there that the stream that
    /// computes does not wait for.
    pub(super) fn land_all(&mut self, waiting: &Waiting, deadline: Instant) -> Event {
        match self {
            Self::Whole(whole) => whole.wire.as_mut().map_or_else(Event::reached, |wire| {
                wire.land_all(waiting, deadline);
                wire.record()
            }),
            Self::Shard(shard) => {
                shard.land_all(waiting, deadline);
                Event::reached()
            }
        }
    }

    /// Units of which this rank's part is complete since the last call.
    pub(super) fn take_landed(&mut self) -> Vec<Landed> {
        match self {
            Self::Whole(whole) => match &mut whole.wire {
                Some(wire) => wire.take_landed(),
                None => std::mem::take(&mut whole.landed),
            },
            Self::Shard(shard) => shard.take_landed(),
        }
    }

    /// True if every micro-batch communicates.
    pub(super) fn is_shard(&self) -> bool {
        matches!(self, Self::Shard(_))
    }

    /// True if a sum ends on its owner only.
    pub(super) fn is_scattered(&self) -> bool {
        match self {
            Self::Whole(whole) => whole.is_scattered,
            Self::Shard(_) => true,
        }
    }

    /// Forgets what an abandoned step has left.
    pub(super) fn reset(&mut self) {
        drop(self.take_landed());
        if let Self::Shard(shard) = self {
            shard.reset();
        }
    }

    pub(super) fn portion(&self) -> Portion {
        match self {
            Self::Whole(whole) => Portion::Whole(whole.arena.clone()),
            Self::Shard(shard) => shard.portion(),
        }
    }

    /// Size, padding and slots included.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Whole(whole) => whole.arena.bytes() + whole.wire.as_ref().map_or(0, Wire::bytes),
            Self::Shard(shard) => shard.bytes(),
        }
    }
}
