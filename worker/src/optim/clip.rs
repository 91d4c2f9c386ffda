//! Clipping by the global norm (Pascanu, Mikolov & Bengio 2013). Norm and factor stay on the device; the factor is
//! applied by the update itself, so that gradients are read once. If the norm is not finite, the factor is none
//! either, and the update leaves everything as it is. So whether a step counts is known there alone, and the updates are
//! counted there too, for AdamW's bias corrections: a skipped step is none, as in PyTorch under a `GradScaler`. Steps
//! that the device runs before the host knows of a skipped one are skipped as well, until [`Clip::release`].
//!
//! A rank squares what it owns, chunk by chunk. Where that is not everything, the ranks that hold one copy of the model
//! together tell each other their sums, and all add them in the order of the whole model's chunks ([`NormOrder`]): the
//! norm has the same bits whoever owns what.

use std::ops::Range;
use std::sync::Arc;

use crate::collective::{Communicator, Launch, Traffic, Work};
use crate::config::Train;
use crate::device::{Arena, ArenaSpec, Buffer, Compute, DType, DeviceError, StateMemory};
use crate::ops::{CHUNK, ClipScale, SquaredNorm, UPDATE_NUMBERS, Updates};
use crate::parallel::{ArenaShare, NormOrder, ReduceError, ReplicaSet, Sharding};

/// Memory for the norm of the gradients of a model.
pub struct Clip {
    compute: Compute,
    max_norm: Option<f32>,
    betas: [f32; 2],
    sharding: Arc<Sharding>,
    /// Units of which this rank counts something.
    counted: Vec<usize>,
    /// The ranks that have the rest.
    owners: Option<Communicator>,
    /// Sums of squares, one a chunk: one slice a rank, in the order of its shard.
    sums: Buffer,
    /// Those of this rank.
    own_sums: Buffer,
    /// Where the sums are, in the order in which they are added.
    order: Buffer,
    norm: Arena,
    /// The factor, and both bias corrections.
    scale: Arena,
    /// Updates since the run began.
    updates: Arena,
}

impl Clip {
    /// For gradients that lie as `sharding` says; without `train.grad_clip` the norm is only measured. No update was
    /// made yet. `order` is that of [`ReplicaSet::owners`]. Every rank of `set` must call it.
    ///
    /// # Panics
    /// If `order` is one of another number of ranks.
    pub fn new(
        set: &ReplicaSet,
        compute: &Compute,
        sharding: &Arc<Sharding>,
        order: &NormOrder,
        train: &Train,
    ) -> Result<Self, ReduceError> {
        let device = &compute.device;
        let private = |name: &str, dtype, len| device.alloc(&ArenaSpec::private(name, dtype, len));
        let owners = set.owners.as_ref();
        assert_eq!(
            owners.map_or(1, Communicator::size),
            order.ranks(),
            "ranks of the norm"
        );
        let (len, each) = (order.ranks() * order.each(), order.each());
        let (sums, first) = match owners {
            Some(comm) => {
                let spec = ArenaSpec::on_node("partial norms of each rank", DType::F64, len);
                (comm.alloc_shared(device, &spec)?.whole(), comm.rank() * each)
            }
            None => (private("partial norms", DType::F64, len)?.whole(), 0),
        };
        let places = private("order of the chunks", DType::I32, order.places().len())?.whole();
        compute.upload(&places, order.places());
        let mut is_counted = vec![false; each];
        let own = |place: &i32| (*place as usize).checked_sub(first).filter(|&own| own < each);
        order
            .places()
            .iter()
            .filter_map(own)
            .for_each(|own| is_counted[own] = true);
        let counts = |unit: &usize| is_counted[chunks(sharding, *unit)].contains(&true);
        let clip = Self {
            own_sums: sums.slice(first..first + sharding.shard_len() / CHUNK),
            sums,
            order: places,
            owners: set.owners.clone(),
            norm: private("gradient norm", DType::F32, 1)?,
            scale: private("clipping factor", DType::F32, UPDATE_NUMBERS)?,
            updates: private("number of updates", DType::I32, 1)?,
            compute: compute.clone(),
            max_norm: train.grad_clip,
            betas: train.optimizer.betas(),
            counted: (0..sharding.units().len()).filter(counts).collect(),
            sharding: sharding.clone(),
        };
        clip.resume(0);
        Ok(clip)
    }

    /// Goes on after so many updates.
    pub fn resume(&self, updates: u64) {
        let updates = i32::try_from(updates).unwrap_or(i32::MAX);
        self.compute.upload(&self.updates.whole(), &[updates]);
        self.release();
    }

    /// Updates so far, of all that is in the stream: synchronises.
    pub fn updates(&self) -> Result<u64, DeviceError> {
        let bytes = self.compute.download(&self.updates.whole())?;
        Ok(u64::from(bytemuck::pod_read_unaligned::<u32>(&bytes)))
    }

    /// Without the other ranks. What was measured can still be finished.
    #[must_use]
    pub fn alone(self) -> Self {
        Self { owners: None, ..self }
    }

    /// After a skipped step: the next one may count again.
    pub fn release(&self) {
        self.compute.upload(&self.scale.slice(0..1), &[1.0_f32]);
    }

    /// Puts this rank's squares of `grads`, which may lie in `home`, on the stream, and tells the other ranks where they own the rest: the
    /// operation that the stream must wait for before [`Clip::finish`]. Every rank must call it.
    #[must_use]
    pub fn measure(&self, home: &StateMemory, grads: &ArenaShare) -> Option<Work> {
        let squares = self.counted.iter().map(|&unit| {
            let squares = SquaredNorm {
                x: grads.slice(&self.sharding.own_ranges(unit)),
                partials: self.own_sums.slice(chunks(&self.sharding, unit)),
            };
            squares.into()
        });
        home.enqueue_all(self.compute.stream, squares.collect());
        let owners = self.owners.as_ref()?;
        let launch = Launch::after(self.compute.record(), Traffic::Other, "partial norms");
        Some(owners.all_gather(&self.sums, launch))
    }

    /// Puts norm and factor of what was measured on the stream. `witnesses` are other numbers, `[n]`, f64, that must be
    /// finite.
    pub fn finish(&self, witnesses: Option<Buffer>) {
        self.compute.enqueue(ClipScale {
            partials: self.sums.clone(),
            order: Some(self.order.clone()),
            witnesses,
            max_norm: self.max_norm,
            norm: self.norm.whole(),
            scale: self.scale.whole(),
            updates: Some(Updates {
                count: self.updates.whole(),
                betas: self.betas,
            }),
        });
    }

    /// For the update, `[3]`, f32: the factor, NaN if the step is to be skipped, and both bias corrections. After a NaN
    /// all steps are skipped until [`Clip::release`].
    pub fn scale(&self) -> Buffer {
        self.scale.whole()
    }

    /// The norm before clipping, `[1]`, f32.
    pub fn norm(&self) -> Buffer {
        self.norm.whole()
    }
}

/// What this rank owns of a unit, in chunks of its shard.
fn chunks(sharding: &Sharding, unit: usize) -> Range<usize> {
    let shard = sharding.own_ranges(unit).shard;
    shard.start / CHUNK..shard.end / CHUNK
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::{Executor, SingleRank};
    use crate::device::CpuDevice;
    use crate::model::ParamId;
    use crate::parallel::{GradSpec, GradientLayout, LayoutConfig};
    use crate::session::Cancel;

    #[test]
    fn a_long_gradient_is_cut_to_the_bound_and_a_short_one_is_left() {
        let compute = Compute::new(Arc::new(CpuDevice::new(1).unwrap()));
        let timeout = std::time::Duration::from_secs(10);
        let comm = Communicator::new(
            "solo",
            Box::new(SingleRank::new(0)),
            Executor::Inline,
            timeout,
            &Cancel::default(),
        );
        let set = ReplicaSet::of_all(comm);
        let specs = vec![GradSpec::new("w", &[CHUNK + 2])];
        let layout = GradientLayout::new(specs, &[ParamId(0)], &LayoutConfig::new(1)).unwrap();
        let sharding = Arc::new(Sharding::replicated(&layout));
        let chunks = NormOrder::chunks(&sharding, 0, &layout.chunks_in(&layout, |_| true));
        let order = NormOrder::new(&[chunks]);
        let spec = ArenaSpec::private("grads", DType::F32, layout.len());
        let grads = compute.device.alloc(&spec).unwrap();
        {
            let whole = grads.whole();
            let mut elements = whole.host_mut::<f32>().unwrap();
            elements[0] = 3.0;
            elements[CHUNK + 1] = 4.0;
        }
        let grads = ArenaShare::Whole(grads);
        for (max_norm, scale) in [(Some(1.0), 0.2), (Some(10.0), 1.0), (None, 1.0)] {
            let train = Train {
                grad_clip: max_norm,
                ..Train::default()
            };
            let clip = Clip::new(&set, &compute, &sharding, &order, &train).unwrap();
            assert!(
                clip.measure(&StateMemory::on_device(compute.device.clone()), &grads)
                    .is_none()
            );
            clip.finish(None);
            assert_eq!(clip.norm().host::<f32>().unwrap()[0], 5.0);
            assert_eq!(clip.scale().host::<f32>().unwrap()[0], scale);
        }
    }
}
