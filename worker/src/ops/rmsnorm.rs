//! Root mean square normalisation (Zhang & Sennrich 2019) with gain, as in Llama: rows are scaled, and not moved.
//!
//! Backward takes the input and normalises it again: neither the output nor the statistics need to be kept. The CUDA
//! kernels are compiled for each number of channels that is met; how threads share rows is layer normalisation's.
#![expect(
    clippy::inline_always,
    reason = "so that it is compiled for each instruction set"
)]

use super::column_sum::Partials;
use super::cpu::kernel::{
    Real, add_into, by_dtype, by_dtypes, kernel, sum_map, sum_map3, update2, update3, with_scratch,
};
use super::cpu::stored::Stored;
use super::cuda::plan::{Call, Plan, Scratch, count, element, expect_dtype, kernels, units_with, width};
use super::layernorm::{RowThreads, rows};
use super::{Operation, expect_lens};
use crate::device::cuda::{CompileUnit, KernelSource};
use crate::device::{Buffer, Cpu, DeviceError};

/// Rows of one part of the work.
const ROWS: usize = 32;

/// `out = inp/√(mean(inp²) + ε) · weight`, by rows
#[derive(Clone, Debug)]
pub struct RmsNormForward {
    /// `[R, C]`
    pub inp: Buffer,
    /// `[C]`
    pub weight: Buffer,
    /// `[R, C]`
    pub out: Buffer,
    /// ε: 1e-5 or 1e-6 in Llama's family.
    pub epsilon: f64,
}

impl Operation for RmsNormForward {
    const NAME: &'static str = "rmsnorm_forward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtype!(Self::NAME, self.out.dtype(), S => self.compute::<S>(cpu))
    }

    fn plan(&self) -> Result<Plan, DeviceError> {
        let rows = self.rows()?;
        let buffers = [&self.inp, &self.weight, &self.out];
        expect_dtype(self.inp.dtype(), &buffers)?;
        let channels = self.weight.len();
        let shape = RowThreads::forward(channels, width(channels, &buffers));
        let defines = shape.defines(element(Self::NAME, &self.inp)?);
        let grid = shape.grid(Self::NAME, rows.div_ceil(shape.at_once()))?;
        let call = Call::new(&SOURCE, Self::NAME, defines, grid)
            .read([&self.inp, &self.weight])
            .write([&self.out]);
        let call = call.u32([count(Self::NAME, "rows", rows)?]);
        Ok(call.f32([self.epsilon as f32]).into())
    }
}

impl RmsNormForward {
    fn rows(&self) -> Result<usize, DeviceError> {
        let (len, channels) = (self.inp.len(), self.weight.len());
        expect_lens(Self::NAME, &[("out", &self.out, len)])?;
        rows(Self::NAME, len, channels)
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        self.rows()?;
        let (inp, weight) = (self.inp.host::<S>()?, self.weight.host::<S>()?);
        let mut out = self.out.host_mut::<S>()?;
        let chunk = ROWS * weight.len();
        let parts = inp.chunks(chunk).zip(out.chunks_mut(chunk)).collect();
        let (isa, epsilon) = (cpu.isa(), S::Real::of(self.epsilon));
        S::read(isa, &weight, |weight| {
            cpu.for_each_part(parts, |(inp, out): (&[S], &mut [S])| {
                S::read(isa, inp, |inp| {
                    S::write(isa, out, false, |out| normalize(isa, inp, weight, epsilon, out));
                });
            });
        });
        Ok(())
    }
}

/// Gradients of [`RmsNormForward`].
#[derive(Clone, Debug)]
pub struct RmsNormBackward {
    /// `[R, C]`
    pub dout: Buffer,
    /// `[R, C]`
    pub inp: Buffer,
    /// `[C]`
    pub weight: Buffer,
    /// `[R, C]`
    pub dinp: Buffer,
    /// `[C]`, of type G
    pub dweight: Buffer,
    /// As in forward.
    pub epsilon: f64,
    /// Add to `dinp`, where the gradient of the residual stream around the layer is, instead of overwriting it.
    pub accumulate_dinp: bool,
    /// Add to `dweight` instead of overwriting it.
    pub accumulate_dweight: bool,
}

impl Operation for RmsNormBackward {
    const NAME: &'static str = "rmsnorm_backward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtypes!(Self::NAME, self.dinp.dtype(), self.dweight.dtype(), (S, G) => self.compute::<S, G>(cpu))
    }

    fn plan(&self) -> Result<Plan, DeviceError> {
        let rows = self.rows()?;
        let buffers = [&self.dout, &self.inp, &self.weight, &self.dinp];
        expect_dtype(self.inp.dtype(), &buffers)?;
        let channels = self.weight.len();
        let act = element(Self::NAME, &self.inp)?;
        let shape = RowThreads::backward(channels, width(channels, &buffers));
        let (block_rows, blocks) = shape.blocks(rows);
        let mut scratch = Scratch::default();
        let partials = Partials {
            offset: scratch.take(blocks * channels * size_of::<f32>()),
            parts: blocks,
            act,
        };
        let grid = shape.grid(Self::NAME, blocks)?;
        let rows_back = Call::new(&SOURCE, Self::NAME, shape.defines(act), grid)
            .read([&self.dout, &self.inp, &self.weight])
            .write([&self.dinp])
            .scratch([partials.offset])
            .u32([count(Self::NAME, "rows", rows)?, block_rows as u32])
            .f32([self.epsilon as f32])
            .flag(self.accumulate_dinp);
        let sums = partials.add(Self::NAME, (&self.dweight, self.accumulate_dweight), None)?;
        Ok(scratch.plan(vec![rows_back, sums]))
    }
}

impl RmsNormBackward {
    fn rows(&self) -> Result<usize, DeviceError> {
        let (len, channels) = (self.inp.len(), self.weight.len());
        let expected = [
            ("dout", &self.dout, len),
            ("dinp", &self.dinp, len),
            ("dweight", &self.dweight, channels),
        ];
        expect_lens(Self::NAME, &expected)?;
        rows(Self::NAME, len, channels)
    }

    fn compute<S: Stored, G: Stored<Real = S::Real>>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        self.rows()?;
        let (dout, inp, weight) = (
            self.dout.host::<S>()?,
            self.inp.host::<S>()?,
            self.weight.host::<S>()?,
        );
        let mut dinp = self.dinp.host_mut::<S>()?;
        let (isa, channels) = (cpu.isa(), weight.len());
        let (epsilon, accumulate) = (S::Real::of(self.epsilon), self.accumulate_dinp);

        // Each part sums its rows; the sums are combined in the order of the parts.
        let chunk = ROWS * channels;
        with_scratch::<S::Real, _>(inp.len().div_ceil(chunk) * channels, |sums| {
            let parts = dout
                .chunks(chunk)
                .zip(inp.chunks(chunk))
                .zip(dinp.chunks_mut(chunk))
                .zip(sums.chunks_mut(channels))
                .collect();
            S::read(isa, &weight, |weight| {
                cpu.for_each_part(parts, |(((dout, inp), dinp), sums): RowSlices<'_, S>| {
                    S::read(isa, dout, |dout| {
                        S::read(isa, inp, |inp| {
                            S::write(isa, dinp, accumulate, |dinp| {
                                let inputs = [dout, inp, weight];
                                normalize_back(isa, inputs, epsilon, dinp, sums, accumulate);
                            });
                        });
                    });
                });
            });
            let mut dweight = self.dweight.host_mut::<G>()?;
            G::write(isa, &mut dweight, self.accumulate_dweight, |dweight| {
                if !self.accumulate_dweight {
                    dweight.fill(G::Real::ZERO);
                }
                for sums in sums.chunks_exact(channels) {
                    add_into(isa, sums, dweight);
                }
            });
            Ok(())
        })
    }
}

/// `dout`, `inp`, `dinp` and `sums` of one part, as they are stored.
type RowSlices<'a, S> = (((&'a [S], &'a [S]), &'a mut [S]), &'a mut [<S as Stored>::Real]);

kernel! {
    fn normalize<'a, T>(inp: &'a [T], weight: &'a [T], epsilon: T, out: &'a mut [T]) -> () {
        let channels = weight.len();
        for (x, out) in inp.chunks_exact(channels).zip(out.chunks_exact_mut(channels)) {
            let scale = scale_of(x, epsilon);
            update2(out, [x, weight], |out, x, w| *out = x * scale * w);
        }
    }
}

kernel! {
    /// `inputs` are `dout`, `inp` and `weight`. `sums` is `[C]`: of `dout · normalised`. With n = x·scale and
    /// g = dout·weight: `dinp = scale·(g − n·mean(g·n))`.
    fn normalize_back<'a, T>(
        inputs: [&'a [T]; 3],
        epsilon: T,
        dinp: &'a mut [T],
        sums: &'a mut [T],
        accumulate: bool,
    ) -> () {
        let [dout, inp, weight] = inputs;
        let channels = weight.len();
        let share = T::ONE / T::of(channels as f64);
        sums.fill(T::ZERO);
        let inputs = dout.chunks_exact(channels).zip(inp.chunks_exact(channels));
        for ((dout, x), dinp) in inputs.zip(dinp.chunks_exact_mut(channels)) {
            let scale = scale_of(x, epsilon);
            let gn_mean = sum_map3(dout, weight, x, |d, w, x| d * w * x) * scale * share;
            let gradient = |d: T, w: T, x: T| (d * w - x * scale * gn_mean) * scale;
            update3(dinp, [dout, weight, x], |dinp, d, w, x| {
                let gradient = gradient(d, w, x);
                *dinp = if accumulate { *dinp + gradient } else { gradient };
            });
            update2(sums, [dout, x], |sum, d, x| *sum += d * (x * scale));
        }
    }
}

/// 1/√(mean(x²) + ε) of a row.
#[inline(always)]
fn scale_of<T: Real>(x: &[T], epsilon: T) -> T {
    let share = T::ONE / T::of(x.len() as f64);
    T::ONE / (sum_map(x, |x| x * x) * share + epsilon).sqrt()
}

static SOURCE: KernelSource = kernels("rmsnorm.cu", include_str!("cuda/rmsnorm.cu"));

pub(super) fn units() -> Vec<CompileUnit> {
    units_with(&SOURCE, RowThreads::samples())
}
