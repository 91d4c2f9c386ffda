//! Clipping by the global norm (Pascanu, Mikolov & Bengio 2013). Norm and factor stay on the device; the factor is
//! applied by the update itself, so that gradients are read once. If the norm is not finite, the factor is none
//! either, and the update leaves everything as it is. So whether a step counts is known there alone, and the updates are
//! counted there too, for AdamW's bias corrections: a skipped step is none, as in PyTorch under a `GradScaler`. Steps
//! that the device runs before the host knows of a skipped one are skipped as well, until [`Clip::release`].
//!
//! A rank squares what it owns, chunk by chunk. Where that is not everything, the ranks tell each other their sums,
//! and all add them in the order of the layout's chunks: the norm has the same bits whoever owns what.

use std::sync::Arc;

use crate::collective::{Communicator, Launch, Traffic, Work};
use crate::config::Train;
use crate::device::{Arena, ArenaSpec, Buffer, DType, Device, Stream};
use crate::ops::{CHUNK, ClipScale, SquaredNorm, UPDATE_NUMBERS, Updates};
use crate::parallel::{Portion, ReduceError, ReplicaSet, Sharding};

/// Memory for the norm of the gradients of a model.
pub struct Clip {
    device: Arc<dyn Device>,
    max_norm: Option<f32>,
    betas: [f32; 2],
    sharding: Arc<Sharding>,
    /// What this rank owns counts: no other rank of the norm counts a copy of it.
    is_counted: bool,
    /// Sums of squares, one a chunk: in the order of the layout or, where they are gathered, one slice a rank, the sums
    /// of its chunks in the order of its shard.
    sums: Arena,
    /// Where other ranks own parts: these ranks and, by chunk of the layout, the place of its sum, -1 for padding
    /// between buckets.
    gathered: Option<(Communicator, Buffer)>,
    norm: Arena,
    /// The factor, and both bias corrections.
    scale: Arena,
    /// Updates since the run began.
    updates: Arena,
}

impl Clip {
    /// For gradients that lie as `sharding` says; without `train.grad_clip` the norm is only measured. No update was
    /// made yet. Every rank of `set` must call it.
    pub fn new(
        set: &ReplicaSet,
        (device, stream): (&Arc<dyn Device>, Stream),
        sharding: &Arc<Sharding>,
        train: &Train,
    ) -> Result<Self, ReduceError> {
        let private = |name: &str, dtype, len| device.alloc(&ArenaSpec::private(name, dtype, len));
        let (sums, gathered) = if sharding.world() > 1 {
            let order = private("order of the chunks", DType::I32, sharding.layout_chunks())?.whole();
            device.upload(stream, &order, bytemuck::cast_slice(&places(sharding)));
            let len = sharding.whole_len() / CHUNK;
            let sums = ArenaSpec::on_node("partial norms of each rank", DType::F64, len);
            let sums = set.owners.alloc_shared(device, &sums)?;
            (sums, Some((set.owners.clone(), order)))
        } else {
            (
                private("partial norms", DType::F64, sharding.layout_chunks())?,
                None,
            )
        };
        let clip = Self {
            sums,
            gathered,
            norm: private("gradient norm", DType::F32, 1)?,
            scale: private("clipping factor", DType::F32, UPDATE_NUMBERS)?,
            updates: private("number of updates", DType::I32, 1)?,
            device: device.clone(),
            max_norm: train.grad_clip,
            betas: train.optimizer.betas(),
            sharding: sharding.clone(),
            is_counted: set.is_counted,
        };
        clip.resume(stream, 0);
        Ok(clip)
    }

    /// Goes on after so many updates.
    pub fn resume(&self, stream: Stream, updates: u64) {
        let updates = i32::try_from(updates).unwrap_or(i32::MAX);
        self.device
            .upload(stream, &self.updates.whole(), bytemuck::bytes_of(&updates));
        self.release(stream);
    }

    /// After a skipped step: the next one may count again.
    pub fn release(&self, stream: Stream) {
        let factor = self.scale.slice(0..1);
        self.device.upload(stream, &factor, bytemuck::bytes_of(&1.0_f32));
    }

    /// Puts this rank's squares of `grads` on the stream, and tells the other ranks where they own the rest: the
    /// operation that the stream must wait for before [`Clip::finish`]. Every rank must call it.
    #[must_use]
    pub fn measure(&self, stream: Stream, grads: &Portion) -> Option<Work> {
        let each = self.sharding.shard_len() / CHUNK;
        let rank = self.gathered.as_ref().map_or(0, |(comm, _)| comm.rank());
        let own = self.sums.slice(rank * each..(rank + 1) * each);
        let counted = if self.is_counted {
            self.sharding.units().len()
        } else {
            0
        };
        for unit in 0..counted {
            let place = self.sharding.own_place(unit);
            let squares = SquaredNorm {
                x: grads.slice(&place),
                partials: own.slice(place.shard.start / CHUNK..place.shard.end / CHUNK),
            };
            self.device.enqueue(stream, squares.into());
        }
        self.gathered.as_ref().map(|(comm, _)| {
            let launch = Launch::after(self.device.record(stream), Traffic::Other, "partial norms");
            comm.all_gather(&self.sums.whole(), launch)
        })
    }

    /// Puts norm and factor of what was measured on the stream. `witnesses` are other numbers, `[n]`, f64, that must be
    /// finite.
    pub fn finish(&self, stream: Stream, witnesses: Option<Buffer>) {
        let scale = ClipScale {
            partials: self.sums.whole(),
            order: self.gathered.as_ref().map(|(_, order)| order.clone()),
            witnesses,
            max_norm: self.max_norm,
            norm: self.norm.whole(),
            scale: self.scale.whole(),
            updates: Some(Updates {
                count: self.updates.whole(),
                betas: self.betas,
            }),
        };
        self.device.enqueue(stream, scale.into());
    }

    /// For the update, `[3]`, f32: the factor, NaN if the step is to be skipped, and both bias corrections. After a NaN
    /// all steps are skipped until [`Clip::release`].
    #[must_use]
    pub fn scale(&self) -> Buffer {
        self.scale.whole()
    }

    /// The norm before clipping, `[1]`, f32.
    #[must_use]
    pub fn norm(&self) -> Buffer {
        self.norm.whole()
    }
}

/// By chunk of the layout: the place of its sum among those of all ranks.
fn places(sharding: &Sharding) -> Vec<i32> {
    let mut places = vec![-1; sharding.layout_chunks()];
    let chunks = (0..sharding.world()).flat_map(|rank| sharding.chunks_of(rank));
    for (place, chunk) in chunks.enumerate() {
        if let Some(chunk) = chunk {
            places[chunk] = place as i32;
        }
    }
    places
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
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new(1).unwrap());
        let stream = device.stream();
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
        let spec = ArenaSpec::private("grads", DType::F32, layout.len());
        let grads = device.alloc(&spec).unwrap();
        {
            let whole = grads.whole();
            let mut elements = whole.host_mut::<f32>().unwrap();
            elements[0] = 3.0;
            elements[CHUNK + 1] = 4.0;
        }
        let grads = Portion::Whole(grads);
        for (max_norm, scale) in [(Some(1.0), 0.2), (Some(10.0), 1.0), (None, 1.0)] {
            let train = Train {
                grad_clip: max_norm,
                ..Train::default()
            };
            let clip = Clip::new(&set, (&device, stream), &sharding, &train).unwrap();
            assert!(clip.measure(stream, &grads).is_none());
            clip.finish(stream, None);
            assert_eq!(clip.norm().host::<f32>().unwrap()[0], 5.0);
            assert_eq!(clip.scale().host::<f32>().unwrap()[0], scale);
        }
    }
}
