//! Clipping by the global norm (Pascanu, Mikolov & Bengio 2013). Norm and factor stay on the device; the factor is
//! applied by the update itself, so that gradients are read once.
//!
//! A rank squares what it owns, chunk by chunk. Where that is not everything, the ranks tell each other their sums,
//! and all add them in the order of the layout's chunks: the norm has the same bits whoever owns what.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::collective::{Communicator, Launch, Traffic, WorkError};
use crate::device::{Arena, ArenaSpec, Buffer, DType, Device, DeviceError, Sharing, Stream};
use crate::ops::{CHUNK, ClipScale, SquaredNorm};
use crate::parallel::{Portion, ReduceError, Sharding};

/// Beyond its own deadline an operation is given this long to say so itself, with the better error.
const GRACE: Duration = Duration::from_secs(5);

/// Memory for the norm of the gradients of a model.
pub struct Clip {
    device: Arc<dyn Device>,
    max_norm: Option<f32>,
    sharding: Arc<Sharding>,
    /// By chunk of the layout.
    partials: Arena,
    exchange: Option<Exchange>,
    norm: Arena,
    scale: Arena,
}

/// The sums of all ranks.
struct Exchange {
    comm: Communicator,
    /// One slice a rank: the sums of its chunks, in the order of its shard.
    sums: Arena,
    /// By sum: the chunk of the layout.
    chunks: Vec<Option<usize>>,
}

impl Clip {
    /// For gradients that lie as `sharding` says; without `max_norm` the norm is only measured. Every rank of `comm`
    /// must call it.
    pub fn new(
        comm: &Communicator,
        device: &Arc<dyn Device>,
        sharding: &Arc<Sharding>,
        max_norm: Option<f32>,
    ) -> Result<Self, ReduceError> {
        let spec = |name: &str, dtype, len, sharing| ArenaSpec {
            name: name.into(),
            dtype,
            len,
            sharing,
        };
        let world = sharding.world();
        let exchange = if world > 1 {
            let len = sharding.whole_len() / CHUNK;
            let sums = spec("partial norms of each rank", DType::F64, len, Sharing::Node);
            Some(Exchange {
                comm: comm.clone(),
                sums: comm.alloc_shared(device, &sums)?,
                chunks: (0..world).flat_map(|rank| sharding.chunks_of(rank)).collect(),
            })
        } else {
            None
        };
        let private = |name, dtype, len| device.alloc(&spec(name, dtype, len, Sharing::Private));
        Ok(Self {
            partials: private("partial norms", DType::F64, sharding.layout_chunks())?,
            norm: private("gradient norm", DType::F32, 1)?,
            scale: private("clipping factor", DType::F32, 1)?,
            device: device.clone(),
            max_norm,
            sharding: sharding.clone(),
            exchange,
        })
    }

    /// Puts norm and factor of `grads` on the stream. Every rank must call it.
    pub fn measure(&self, stream: Stream, grads: &Portion) -> Result<(), WorkError> {
        let sums = match &self.exchange {
            Some(exchange) => exchange.own(),
            None => self.partials.whole(),
        };
        for unit in 0..self.sharding.units().len() {
            let place = self.sharding.own_place(unit);
            let squares = SquaredNorm {
                x: grads.slice(&place),
                partials: sums.slice(place.shard.start / CHUNK..place.shard.end / CHUNK),
            };
            self.device.enqueue(stream, squares.into());
        }
        if let Some(exchange) = &self.exchange {
            exchange.gather(self.device.as_ref(), stream, &self.partials)?;
        }
        let scale = ClipScale {
            partials: self.partials.whole(),
            max_norm: self.max_norm,
            norm: self.norm.whole(),
            scale: self.scale.whole(),
        };
        self.device.enqueue(stream, scale.into());
        Ok(())
    }

    /// The factor, `[1]`, f32, for the update.
    #[must_use]
    pub fn scale(&self) -> Buffer {
        self.scale.whole()
    }

    /// Synchronises, then returns the norm before clipping.
    pub fn norm(&self, stream: Stream) -> Result<f32, DeviceError> {
        let bytes = self.device.download(stream, &self.norm.whole())?;
        Ok(bytemuck::pod_read_unaligned(&bytes))
    }
}

impl Exchange {
    /// Where this rank's sums go.
    fn own(&self) -> Buffer {
        let each = self.sums.len() / self.comm.size();
        self.sums
            .slice(self.comm.rank() * each..(self.comm.rank() + 1) * each)
    }

    /// The sums of all ranks, by chunk of the layout.
    fn gather(&self, device: &dyn Device, stream: Stream, partials: &Arena) -> Result<(), WorkError> {
        let launch = Launch::after(device.record(stream), Traffic::Other, "partial norms");
        let work = self.comm.all_gather(&self.sums.whole(), launch);
        work.wait(Instant::now() + self.comm.timeout() + GRACE)?;
        let bytes = device
            .download(stream, &self.sums.whole())
            .map_err(WorkError::Pending)?;
        let sums = bytes
            .chunks_exact(size_of::<f64>())
            .map(bytemuck::pod_read_unaligned::<f64>);
        let mut ordered = vec![0.0_f64; partials.len()];
        for (chunk, sum) in self.chunks.iter().zip(sums) {
            if let Some(chunk) = chunk {
                ordered[*chunk] = sum;
            }
        }
        device.upload(stream, &partials.whole(), bytemuck::cast_slice(&ordered));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::{Executor, Solo};
    use crate::device::CpuDevice;
    use crate::model::ParamId;
    use crate::parallel::{GradSpec, GradientLayout, LayoutConfig};
    use crate::session::Cancel;

    #[test]
    fn a_long_gradient_is_cut_to_the_bound_and_a_short_one_is_left() {
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new(1).unwrap());
        let stream = device.stream();
        let timeout = Duration::from_secs(10);
        let comm = Communicator::new(
            "solo",
            Box::new(Solo::new(0)),
            Executor::Inline,
            timeout,
            &Cancel::default(),
        );
        let specs = vec![GradSpec::new("w", &[CHUNK + 2])];
        let layout = GradientLayout::new(specs, &[ParamId(0)], &LayoutConfig::new(1)).unwrap();
        let sharding = Arc::new(Sharding::replicated(&layout));
        let spec = ArenaSpec {
            name: "grads".into(),
            dtype: DType::F32,
            len: layout.len(),
            sharing: Sharing::Private,
        };
        let grads = device.alloc(&spec).unwrap();
        {
            let whole = grads.whole();
            let mut elements = whole.host_mut::<f32>().unwrap();
            elements[0] = 3.0;
            elements[CHUNK + 1] = 4.0;
        }
        let grads = Portion::Whole(grads);
        for (max_norm, scale) in [(Some(1.0), 0.2), (Some(10.0), 1.0), (None, 1.0)] {
            let clip = Clip::new(&comm, &device, &sharding, max_norm).unwrap();
            clip.measure(stream, &grads).unwrap();
            assert_eq!(clip.norm(stream).unwrap(), 5.0);
            assert_eq!(clip.scale().host::<f32>().unwrap()[0], scale);
        }
    }
}
