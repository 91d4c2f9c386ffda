//! Clipping by the global norm (Pascanu, Mikolov & Bengio 2013). Norm and factor stay on the device; the factor is
//! applied by the update itself, so that gradients are read once.

use std::sync::Arc;

use crate::device::{Arena, ArenaSpec, Buffer, DType, Device, DeviceError, Sharing, Stream};
use crate::ops::{CHUNK, ClipScale, SquaredNorm};

/// Memory for the norm of one gradient arena.
pub struct Clip {
    device: Arc<dyn Device>,
    max_norm: Option<f32>,
    partials: Arena,
    norm: Arena,
    scale: Arena,
}

impl Clip {
    /// For an arena of `len` elements; without `max_norm` the norm is only measured.
    pub fn new(device: &Arc<dyn Device>, len: usize, max_norm: Option<f32>) -> Result<Self, DeviceError> {
        let alloc = |name: &str, dtype, len| {
            device.alloc(&ArenaSpec {
                name: name.into(),
                dtype,
                len,
                sharing: Sharing::Private,
            })
        };
        Ok(Self {
            device: device.clone(),
            max_norm,
            partials: alloc("partial norms", DType::F64, len.div_ceil(CHUNK))?,
            norm: alloc("gradient norm", DType::F32, 1)?,
            scale: alloc("clipping factor", DType::F32, 1)?,
        })
    }

    /// Puts norm and factor of `grads` on the stream.
    pub fn measure(&self, stream: Stream, grads: &Arena) {
        let squares = SquaredNorm {
            x: grads.whole(),
            partials: self.partials.whole(),
        };
        self.device.enqueue(stream, squares.into());
        let scale = ClipScale {
            partials: self.partials.whole(),
            max_norm: self.max_norm,
            norm: self.norm.whole(),
            scale: self.scale.whole(),
        };
        self.device.enqueue(stream, scale.into());
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::CpuDevice;

    #[test]
    fn a_long_gradient_is_cut_to_the_bound_and_a_short_one_is_left() {
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new(1).unwrap());
        let stream = device.stream();
        let len = CHUNK + 2;
        let spec = ArenaSpec {
            name: "grads".into(),
            dtype: DType::F32,
            len,
            sharing: Sharing::Private,
        };
        let grads = device.alloc(&spec).unwrap();
        {
            let whole = grads.whole();
            let mut elements = whole.host_mut::<f32>().unwrap();
            elements[0] = 3.0;
            elements[len - 1] = 4.0;
        }
        for (max_norm, scale) in [(Some(1.0), 0.2), (Some(10.0), 1.0), (None, 1.0)] {
            let clip = Clip::new(&device, len, max_norm).unwrap();
            clip.measure(stream, &grads);
            assert_eq!(clip.norm(stream).unwrap(), 5.0);
            assert_eq!(clip.scale().host::<f32>().unwrap()[0], scale);
        }
    }
}
