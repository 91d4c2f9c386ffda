//! Layer normalisation (Ba, Kiros & Hinton 2016) with gain and bias.
//!
//! Backward reads the input and normalises it again, so neither the output nor the statistics are
//! kept. The CUDA kernels are compiled for each number of channels that occurs.
#![expect(
    clippy::inline_always,
    reason = "so that it is compiled for each instruction set"
)]

use super::column_sum::Partials;
use super::cpu::kernel::{
    Real, add_into, by_dtype, by_dtypes, kernel, sum_map, sum_map2, sum_map3, update, update2, update3,
    with_scratch,
};
use super::cpu::stored::Stored;
use super::cuda::plan::{
    Call, Plan, Scratch, WIDEST, count, element, expect_dtype, kernels, units_with, vec_define, width,
};
use super::{Operation, expect_lens};
use crate::device::cuda::{CompileUnit, Define, Grid, KernelSource};
use crate::device::{Buffer, Cpu, DeviceError, Isa};

/// Added to the variance, as in GPT-2.
pub(crate) const EPSILON: f64 = 1e-5;
/// Rows of one part of the work.
const ROWS: usize = 32;

/// `out = (inp − mean)/√(variance + ε) · weight + bias`, by rows
#[derive(Clone, Debug)]
pub struct LayerNormForward {
    /// `[R, C]`
    pub inp: Buffer,
    /// `[C]`
    pub weight: Buffer,
    /// `[C]`
    pub bias: Buffer,
    /// `[R, C]`
    pub out: Buffer,
}

impl Operation for LayerNormForward {
    const NAME: &'static str = "layernorm_forward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtype!(Self::NAME, self.out.dtype(), S => self.compute::<S>(cpu))
    }

    fn plan(&self) -> Result<Plan, DeviceError> {
        let rows = self.rows()?;
        let buffers = [&self.inp, &self.weight, &self.bias, &self.out];
        expect_dtype(self.inp.dtype(), &buffers)?;
        let channels = self.weight.len();
        let shape = RowThreads::forward(channels, width(channels, &buffers));
        let defines = shape.defines(element(Self::NAME, &self.inp)?);
        let grid = shape.grid(Self::NAME, rows.div_ceil(shape.at_once()))?;
        let call = Call::new(&SOURCE, Self::NAME, defines, grid)
            .read([&self.inp, &self.weight, &self.bias])
            .write([&self.out]);
        Ok(call.u32([count(Self::NAME, "rows", rows)?]).into())
    }
}

impl LayerNormForward {
    fn rows(&self) -> Result<usize, DeviceError> {
        let (len, channels) = (self.inp.len(), self.weight.len());
        let expected = [("bias", &self.bias, channels), ("out", &self.out, len)];
        expect_lens(Self::NAME, &expected)?;
        rows(Self::NAME, len, channels)
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let channels = self.weight.len();
        self.rows()?;
        let (inp, weight, bias) = (
            self.inp.host::<S>()?,
            self.weight.host::<S>()?,
            self.bias.host::<S>()?,
        );
        let mut out = self.out.host_mut::<S>()?;
        let chunk = ROWS * channels;
        let parts = inp.chunks(chunk).zip(out.chunks_mut(chunk)).collect();
        let isa = cpu.isa();
        S::read(isa, &weight, |weight| {
            S::read(isa, &bias, |bias| {
                cpu.for_each_part(parts, |(inp, out): (&[S], &mut [S])| {
                    S::read(isa, inp, |inp| {
                        S::write(isa, out, false, |out| normalize(isa, inp, weight, bias, out));
                    });
                });
            });
        });
        Ok(())
    }
}

/// Gradients of [`LayerNormForward`].
#[derive(Clone, Debug)]
pub struct LayerNormBackward {
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
    /// `[C]`, of type G
    pub dbias: Buffer,
    /// Add to `dinp`, which holds the gradient of the residual stream around the layer, instead of
    /// overwriting it.
    pub accumulate_dinp: bool,
    /// Add to `dweight` instead of overwriting it.
    pub accumulate_dweight: bool,
    /// Add to `dbias` instead of overwriting it.
    pub accumulate_dbias: bool,
}

impl Operation for LayerNormBackward {
    const NAME: &'static str = "layernorm_backward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtypes!(Self::NAME, self.dinp.dtype(), self.dweight.dtype(), (S, G) => self.compute::<S, G>(cpu))
    }

    fn plan(&self) -> Result<Plan, DeviceError> {
        let rows = self.rows()?;
        let buffers = [&self.dout, &self.inp, &self.weight, &self.dinp];
        expect_dtype(self.inp.dtype(), &buffers)?;
        expect_dtype(self.dweight.dtype(), &[&self.dbias])?;
        let channels = self.weight.len();
        let act = element(Self::NAME, &self.inp)?;
        let shape = RowThreads::backward(channels, width(channels, &buffers));
        let (block_rows, blocks) = shape.blocks(rows);
        let mut scratch = Scratch::default();
        let partials = Partials {
            offset: scratch.take(blocks * 2 * channels * size_of::<f32>()),
            parts: blocks,
            act,
        };
        let grid = shape.grid(Self::NAME, blocks)?;
        let rows_back = Call::new(&SOURCE, Self::NAME, shape.defines(act), grid)
            .read([&self.dout, &self.inp, &self.weight])
            .write([&self.dinp])
            .scratch([partials.offset])
            .u32([count(Self::NAME, "rows", rows)?, block_rows as u32])
            .flag(self.accumulate_dinp);
        let [dweight, dbias] = self.sums();
        let sums = partials.add(Self::NAME, dweight, Some(dbias))?;
        Ok(scratch.plan(vec![rows_back, sums]))
    }
}

impl LayerNormBackward {
    fn rows(&self) -> Result<usize, DeviceError> {
        let (len, channels) = (self.inp.len(), self.weight.len());
        let expected = [
            ("dout", &self.dout, len),
            ("dinp", &self.dinp, len),
            ("dweight", &self.dweight, channels),
            ("dbias", &self.dbias, channels),
        ];
        expect_lens(Self::NAME, &expected)?;
        rows(Self::NAME, len, channels)
    }

    fn compute<S: Stored, G: Stored<Real = S::Real>>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let channels = self.weight.len();
        self.rows()?;
        let (dout, inp, weight) = (
            self.dout.host::<S>()?,
            self.inp.host::<S>()?,
            self.weight.host::<S>()?,
        );
        let mut dinp = self.dinp.host_mut::<S>()?;
        let isa = cpu.isa();

        // Each part sums its rows; the sums are combined in the order of the parts.
        let chunk = ROWS * channels;
        with_scratch::<S::Real, _>(inp.len().div_ceil(chunk) * 2 * channels, |sums| {
            let parts = dout
                .chunks(chunk)
                .zip(inp.chunks(chunk))
                .zip(dinp.chunks_mut(chunk))
                .zip(sums.chunks_mut(2 * channels))
                .collect();
            let accumulate = self.accumulate_dinp;
            S::read(isa, &weight, |weight| {
                cpu.for_each_part(parts, |(((dout, inp), dinp), sums): RowSlices<'_, S>| {
                    S::read(isa, dout, |dout| {
                        S::read(isa, inp, |inp| {
                            S::write(isa, dinp, accumulate, |dinp| {
                                normalize_back(isa, [dout, inp, weight], dinp, sums, accumulate);
                            });
                        });
                    });
                });
            });
            self.add_sums::<G>(isa, sums)
        })
    }

    /// Gradients of the parameters, and whether to add to them.
    fn sums(&self) -> [(&Buffer, bool); 2] {
        [
            (&self.dweight, self.accumulate_dweight),
            (&self.dbias, self.accumulate_dbias),
        ]
    }

    fn add_sums<G: Stored>(&self, isa: Isa, sums: &[G::Real]) -> Result<(), DeviceError> {
        let channels = self.weight.len();
        for (which, (target, accumulate)) in self.sums().into_iter().enumerate() {
            let mut target = target.host_mut::<G>()?;
            G::write(isa, &mut target, accumulate, |target| {
                if !accumulate {
                    target.fill(G::Real::ZERO);
                }
                for sums in sums.chunks_exact(channels).skip(which).step_by(2) {
                    add_into(isa, sums, target);
                }
            });
        }
        Ok(())
    }
}

/// `dout`, `inp`, `dinp` and `sums` of one part, as they are stored.
type RowSlices<'a, S> = (((&'a [S], &'a [S]), &'a mut [S]), &'a mut [<S as Stored>::Real]);

kernel! {
    fn normalize<'a, T>(inp: &'a [T], weight: &'a [T], bias: &'a [T], out: &'a mut [T]) -> () {
        let channels = weight.len();
        for (x, out) in inp.chunks_exact(channels).zip(out.chunks_exact_mut(channels)) {
            let (mean, scale) = statistics(x);
            update3(out, [x, weight, bias], |out, x, w, b| {
                *out = (x - mean) * scale * w + b;
            });
        }
    }
}

kernel! {
    /// `inputs` are `dout`, `inp` and `weight`. `sums` is `[2, C]`: of `dout · normalised` and of `dout`.
    fn normalize_back<'a, T>(
        inputs: [&'a [T]; 3],
        dinp: &'a mut [T],
        sums: &'a mut [T],
        accumulate: bool,
    ) -> () {
        let [dout, inp, weight] = inputs;
        let channels = weight.len();
        sums.fill(T::ZERO);
        let (weight_sums, bias_sums) = sums.split_at_mut(channels);
        let inputs = dout.chunks_exact(channels).zip(inp.chunks_exact(channels));
        for ((dout, x), dinp) in inputs.zip(dinp.chunks_exact_mut(channels)) {
            let (mean, scale) = statistics(x);
            row_back([dout, weight, x], (mean, scale), dinp, accumulate);
            update2(weight_sums, [dout, x], |sum, d, x| {
                *sum += d * ((x - mean) * scale);
            });
            update(bias_sums, dout, |sum, d| *sum += d);
        }
    }
}

/// With n = (x − mean)·scale and g = dout·weight: `dinp = scale·(g − mean(g) − n·mean(g·n))`.
#[inline(always)]
fn row_back<T: Real>([dout, weight, x]: [&[T]; 3], (mean, scale): (T, T), dinp: &mut [T], accumulate: bool) {
    let share = T::ONE / T::of(x.len() as f64);
    let g_mean = sum_map2(dout, weight, |d, w| d * w) * share;
    let gn_mean = sum_map3(dout, weight, x, |d, w, x| d * w * (x - mean)) * scale * share;
    let gradient = |d: T, w: T, x: T| (d * w - g_mean - (x - mean) * scale * gn_mean) * scale;
    update3(dinp, [dout, weight, x], |dinp, d, w, x| {
        let gradient = gradient(d, w, x);
        *dinp = if accumulate { *dinp + gradient } else { gradient };
    });
}

/// Mean, and 1/√(variance + ε), of a row.
#[inline(always)]
fn statistics<T: Real>(x: &[T]) -> (T, T) {
    let share = T::ONE / T::of(x.len() as f64);
    let mean = sum_map(x, |x| x) * share;
    let variance = sum_map(x, |x| (x - mean) * (x - mean)) * share;
    (mean, T::ONE / (variance + T::of(EPSILON)).sqrt())
}

/// How many rows `inp` has.
pub(super) fn rows(op: &'static str, len: usize, channels: usize) -> Result<usize, DeviceError> {
    if channels == 0 || !len.is_multiple_of(channels) {
        let what = format!("`inp` has {len} elements, which cannot be divided into rows of {channels}");
        return Err(DeviceError::Shape { op, what });
    }
    Ok(len / channels)
}

const WARP: usize = 32;
/// Threads of a block in which each warp has a row of its own.
const WARPS_APART: usize = 256;
/// Most threads of a block.
const MOST: usize = 1024;
/// Most packs of a row per lane of a warp. A longer row is given to a whole block.
const LANE_PACKS: usize = 4;
/// Blocks of the backward that fill any GPU; each leaves partial sums.
const BLOCKS: usize = 1024;
/// Fewest rows per thread group for which a block of the backward pays.
const GROUP_ROWS: usize = 4;

static SOURCE: KernelSource = kernels("layernorm.cu", include_str!("cuda/layernorm.cu"));

/// How the threads of a block share the rows that a kernel normalises.
#[derive(Clone, Copy)]
pub(super) struct RowThreads {
    channels: usize,
    width: usize,
    /// Threads of one row: a warp, or the block.
    threads: usize,
}

impl RowThreads {
    /// Only the row itself is in registers.
    pub(super) fn forward(channels: usize, width: usize) -> Self {
        let packs = channels / width;
        let threads = if packs <= WARP * LANE_PACKS {
            WARP
        } else {
            packs.div_ceil(2)
        };
        Self::with(channels, width, threads)
    }

    /// Three rows and two sums are in registers: one pack of each per thread.
    pub(super) fn backward(channels: usize, width: usize) -> Self {
        Self::with(channels, width, channels / width)
    }

    fn with(channels: usize, width: usize, threads: usize) -> Self {
        let threads = threads.next_multiple_of(WARP).clamp(WARP, MOST);
        Self {
            channels,
            width,
            threads,
        }
    }

    fn block_threads(&self) -> usize {
        if self.threads == WARP {
            WARPS_APART
        } else {
            self.threads
        }
    }

    /// Rows that a block works on at once.
    pub(super) fn at_once(&self) -> usize {
        self.block_threads() / self.threads
    }

    /// Rows of a block of the backward, and how many blocks.
    pub(super) fn blocks(&self, rows: usize) -> (usize, usize) {
        let block_rows = rows.div_ceil(BLOCKS).max(self.at_once() * GROUP_ROWS);
        (block_rows, rows.div_ceil(block_rows))
    }

    pub(super) fn grid(&self, op: &'static str, blocks: usize) -> Result<Grid, DeviceError> {
        Ok(Grid::linear(
            count(op, "blocks", blocks)?,
            self.block_threads() as u32,
        ))
    }

    pub(super) fn defines(&self, act: &'static str) -> Vec<Define> {
        vec![
            Define::word("ACT", act),
            vec_define(self.width),
            Define::number("CHANNELS", self.channels as i64),
            Define::number("ROW_THREADS", self.threads as i64),
        ]
    }

    /// Samples to compile of each way to share rows: one warp per row, one block per row, and
    /// unaligned rows.
    pub(super) fn samples() -> impl Iterator<Item = Vec<Define>> {
        let shapes = [(128, WIDEST), (768, WIDEST), (1600, WIDEST), (33, 1)];
        let shapes = shapes.map(|(channels, width)| {
            let both = [Self::forward, Self::backward];
            both.map(|shape| shape(channels, width))
        });
        let acts = ["f32", "bf16"].into_iter();
        acts.flat_map(move |act| shapes.map(|both| both.map(|shape| shape.defines(act))))
            .flatten()
    }
}

pub(super) fn units() -> Vec<CompileUnit> {
    units_with(&SOURCE, RowThreads::samples())
}
