//! Buffers, times, and rows of the table.

use std::time::Instant;

use ddp_worker::device::{ArenaSpec, Buffer, CudaDevice, DType, Device, DeviceError, Stream};
use ddp_worker::ops::{LinearForward, LinearShape, Op};

/// Numbers that buffers are filled with, again and again.
const PERIOD: usize = 1 << 20;

/// How much is done for a number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    /// Shortest time that is measured, in seconds.
    pub(crate) span: f64,
    /// Bytes that operations touch before they come back to the same buffers.
    pub(crate) rotated: usize,
}

pub(crate) struct Bench {
    pub(crate) device: CudaDevice,
    pub(crate) stream: Stream,
    /// Bytes a second, read and written.
    pub(crate) copy_rate: f64,
    /// Floating-point operations a second.
    pub(crate) product_rate: f64,
    effort: Effort,
    /// In [−1, 1): products of zeros are faster than those of training.
    numbers: Vec<f32>,
    /// Of GPT-2's vocabulary.
    ids: Vec<i32>,
}

/// What an operation must do at least.
#[derive(Clone, Copy)]
pub(crate) struct Work {
    pub(crate) bytes: usize,
    pub(crate) flop: usize,
}

impl Work {
    /// Of an operation that computes next to nothing.
    pub(crate) const fn moving(bytes: usize) -> Self {
        Self { bytes, flop: 0 }
    }
}

impl Bench {
    /// Without ceilings. `ids`: at least one.
    pub(crate) fn new(device: CudaDevice, effort: Effort, ids: Vec<i32>) -> Self {
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / 8_388_608.0 - 1.0
        };
        Self {
            stream: device.stream(),
            device,
            copy_rate: f64::INFINITY,
            product_rate: f64::INFINITY,
            effort,
            numbers: (0..PERIOD).map(|_| next()).collect(),
            ids,
        }
    }

    pub(crate) fn zeros(&self, dtype: DType, len: usize) -> Result<Buffer, DeviceError> {
        let arena = self.device.alloc(&ArenaSpec::private("bench", dtype, len))?;
        Ok(arena.whole())
    }

    /// Of f32 or bf16.
    pub(crate) fn numbers(&self, dtype: DType, len: usize) -> Result<Buffer, DeviceError> {
        let buffer = self.zeros(dtype, len)?;
        let numbers = &self.numbers[..len.min(PERIOD)];
        let block: Vec<u8> = match dtype {
            DType::Bf16 => numbers
                .iter()
                .flat_map(|x| half::bf16::from_f32(*x).to_le_bytes())
                .collect(),
            _ => bytemuck::cast_slice(numbers).to_vec(),
        };
        for first in (0..len).step_by(PERIOD) {
            let end = len.min(first + PERIOD);
            let bytes = &block[..(end - first) * dtype.bytes()];
            self.device.upload(self.stream, &buffer.slice(first..end), bytes);
        }
        Ok(buffer)
    }

    /// Activations, or whatever else is bf16.
    pub(crate) fn act(&self, len: usize) -> Result<Buffer, DeviceError> {
        self.numbers(DType::Bf16, len)
    }

    /// Token ids below `end`, from their start again where there are fewer.
    pub(crate) fn ids(&self, len: usize, end: usize) -> Result<Buffer, DeviceError> {
        let buffer = self.zeros(DType::I32, len)?;
        let ids = self.ids.iter().cycle().take(len);
        let ids: Vec<i32> = ids.map(|id| id % end as i32).collect();
        self.device
            .upload(self.stream, &buffer, bytemuck::cast_slice(&ids));
        Ok(buffer)
    }

    pub(crate) fn linear_forward(
        &self,
        shape: LinearShape,
        adds: bool,
    ) -> Result<LinearForward, DeviceError> {
        let extra = |len| adds.then(|| self.act(len)).transpose();
        Ok(LinearForward {
            inp: self.act(shape.rows * shape.inputs)?,
            weight: self.act(shape.inputs * shape.outputs)?,
            bias: extra(shape.outputs)?,
            residual: extra(shape.rows * shape.outputs)?,
            out: self.act(shape.rows * shape.outputs)?,
            shape,
            exact: false,
        })
    }

    /// Seconds of one of these operations, which take turns.
    pub(crate) fn seconds_of(&self, ops: &[Op]) -> Result<f64, DeviceError> {
        self.seconds(|number| {
            self.device.enqueue(self.stream, ops[number % ops.len()].clone());
            Ok(())
        })
    }

    /// Seconds of one, which `enqueue` enqueues: it is told the how manieth it is.
    pub(crate) fn seconds(
        &self,
        enqueue: impl Fn(usize) -> Result<(), DeviceError>,
    ) -> Result<f64, DeviceError> {
        let many = |count: usize| {
            let start = Instant::now();
            for number in 0..count {
                enqueue(number)?;
            }
            self.device.synchronize(self.stream)?;
            Ok::<f64, DeviceError>(start.elapsed().as_secs_f64())
        };
        // Compiles, and chooses algorithms.
        many(3)?;
        let count = ((self.effort.span / (many(5)? / 5.0)) as usize).clamp(5, 2000);
        let mut seconds = Vec::new();
        for _ in 0..3 {
            seconds.push(many(count)? / count as f64);
        }
        seconds.sort_by(f64::total_cmp);
        Ok(seconds[1])
    }

    /// Measures an operation, on as many sets of buffers as keep it from finding any of it in a cache, and prints it.
    pub(crate) fn row<O: Into<Op>>(
        &self,
        name: &str,
        work: Work,
        make: impl Fn() -> Result<O, DeviceError>,
    ) -> Result<(), DeviceError> {
        let sets = 1 + self.effort.rotated / work.bytes;
        let ops = (0..sets).map(|_| make().map(Into::into));
        let ops: Vec<Op> = ops.collect::<Result<_, _>>()?;
        let seconds = self.seconds_of(&ops)?;
        let (bytes, flop) = (work.bytes as f64, work.flop as f64);
        let roof = (bytes / self.copy_rate).max(flop / self.product_rate);
        println!(
            "{name:34} {:10.1} {:9.0} {:9.1} {:6.0}%",
            seconds * 1e6,
            bytes / seconds / 1e9,
            flop / seconds / 1e12,
            100.0 * roof / seconds
        );
        Ok(())
    }
}
