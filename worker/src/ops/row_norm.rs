//! Layer normalisation (Ba, Kiros & Hinton 2016), which has a bias, and root mean square normalisation (Zhang & Sennrich
//! 2019), which has none and does not subtract the mean. Both work on rows and have a gain.
//!
//! Backward reads the input and normalises it again, so neither the output nor the statistics are
//! kept. The CUDA kernels are compiled for each number of channels that occurs.
#![expect(
    clippy::inline_always,
    reason = "so that it is compiled for each instruction set"
)]

use super::column_sum::Partials;
use super::cpu::kernel::{
    Real, add_into, kernel, runs_in, sum_map, sum_map2, sum_map3, update, update2, update3, with_scratch,
};
use super::cpu::stored::Stored;
use super::cuda::plan::{Call, Plan, Scratch, count, element, expect_dtype, kernels, vec_define, width};
use super::{Cpu, Isa, Operation, expect_lens};
use crate::cuda::{Define, Grid, KernelSource};
use crate::memory::{Buffer, DeviceError};

/// ε of GPT-2's layer normalisation.
pub(crate) const LAYERNORM_EPSILON: f64 = 1e-5;
/// Rows of one part of the work.
const ROWS: usize = 32;

/// By rows, with a bias `out = (inp − mean)/√(variance + ε) · weight + bias`,
/// without one `out = inp/√(mean(inp²) + ε) · weight`
#[derive(Clone, Debug)]
pub struct NormForward {
    /// `[R, C]`
    pub inp: Buffer,
    /// `[C]`
    pub weight: Buffer,
    /// `[C]`; None for root mean square normalisation
    pub bias: Option<Buffer>,
    /// `[R, C]`
    pub out: Buffer,
    /// ε: 1e-5 in GPT-2, 1e-5 or 1e-6 in Llama's family
    pub epsilon: f64,
}

impl Operation for NormForward {
    const NAME: &'static str = "norm_forward";

    runs_in!(out);

    fn plan(&self) -> Result<Plan, DeviceError> {
        let rows = self.rows()?;
        let mut buffers = vec![&self.inp, &self.weight, &self.out];
        buffers.extend(&self.bias);
        expect_dtype(self.inp.dtype(), &buffers)?;
        let channels = self.weight.len();
        let shape = RowThreads::forward(channels, width(channels, &buffers));
        let defines = shape.defines(element(Self::NAME, &self.inp)?, self.bias.is_some());
        let grid = shape.grid(Self::NAME, rows.div_ceil(shape.at_once()))?;
        let call = Call::new(&SOURCE, Self::NAME, defines, grid)
            .read([&self.inp, &self.weight])
            .read_if(self.bias.as_ref())
            .write([&self.out])
            .u32([count(Self::NAME, "rows", rows)?]);
        Ok(call.f32([self.epsilon as f32]).into())
    }
}

impl NormForward {
    fn rows(&self) -> Result<usize, DeviceError> {
        let (len, channels) = (self.inp.len(), self.weight.len());
        let bias = self.bias.as_ref().map(|bias| ("bias", bias, channels));
        expect_lens(Self::NAME, bias.as_slice())?;
        expect_lens(Self::NAME, &[("out", &self.out, len)])?;
        rows(Self::NAME, len, channels)
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        self.rows()?;
        let (inp, weight) = (self.inp.host::<S>()?, self.weight.host::<S>()?);
        let bias = self.bias.as_ref().map(Buffer::host::<S>).transpose()?;
        let mut out = self.out.host_mut::<S>()?;
        let chunk = ROWS * weight.len();
        let parts = inp.chunks(chunk).zip(out.chunks_mut(chunk)).collect();
        let (isa, epsilon) = (cpu.isa(), S::Real::of(self.epsilon));
        S::read(isa, &weight, |weight| {
            S::read(isa, bias.as_deref().unwrap_or_default(), |bias| {
                cpu.for_each_part(parts, |(inp, out): (&[S], &mut [S])| {
                    S::read(isa, inp, |inp| {
                        S::write(isa, out, false, |out| {
                            normalize(isa, inp, [weight, bias], epsilon, out);
                        });
                    });
                });
            });
        });
        Ok(())
    }
}

/// Gradients of [`NormForward`].
#[derive(Clone, Debug)]
pub struct NormBackward {
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
    /// `[C]`, of type G; None for root mean square normalisation
    pub dbias: Option<Buffer>,
    /// As in forward.
    pub epsilon: f64,
    /// Add to `dinp`, which holds the gradient of the residual stream around the layer, instead of
    /// overwriting it.
    pub accumulate_dinp: bool,
    /// Add to `dweight` instead of overwriting it.
    pub accumulate_dweight: bool,
    /// Add to `dbias` instead of overwriting it.
    pub accumulate_dbias: bool,
}

impl Operation for NormBackward {
    const NAME: &'static str = "norm_backward";

    runs_in!(dinp, dweight);

    fn plan(&self) -> Result<Plan, DeviceError> {
        let rows = self.rows()?;
        let buffers = [&self.dout, &self.inp, &self.weight, &self.dinp];
        expect_dtype(self.inp.dtype(), &buffers)?;
        expect_dtype(self.dweight.dtype(), self.dbias.as_slice())?;
        let channels = self.weight.len();
        let act = element(Self::NAME, &self.inp)?;
        let shape = RowThreads::backward(channels, width(channels, &buffers));
        let (block_rows, blocks) = shape.blocks(rows);
        let mut scratch = Scratch::default();
        let partials = Partials {
            offset: scratch.take(blocks * self.sums().len() * channels * size_of::<f32>()),
            parts: blocks,
            act,
        };
        let grid = shape.grid(Self::NAME, blocks)?;
        let defines = shape.defines(act, self.dbias.is_some());
        let rows_back = Call::new(&SOURCE, Self::NAME, defines, grid)
            .read([&self.dout, &self.inp, &self.weight])
            .write([&self.dinp])
            .scratch([partials.offset])
            .u32([count(Self::NAME, "rows", rows)?, block_rows as u32])
            .f32([self.epsilon as f32])
            .flag(self.accumulate_dinp);
        let sums = partials.add(Self::NAME, &self.sums())?;
        Ok(scratch.plan(vec![rows_back, sums]))
    }
}

impl NormBackward {
    fn rows(&self) -> Result<usize, DeviceError> {
        let (len, channels) = (self.inp.len(), self.weight.len());
        expect_lens(
            Self::NAME,
            &[("dout", &self.dout, len), ("dinp", &self.dinp, len)],
        )?;
        let names = ["dweight", "dbias"].into_iter().zip(self.sums());
        let expected: Vec<_> = names.map(|(name, (sum, _))| (name, sum, channels)).collect();
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
        let (isa, epsilon, accumulate) = (cpu.isa(), S::Real::of(self.epsilon), self.accumulate_dinp);

        // Each part sums its rows; the sums are combined in the order of the parts.
        let (chunk, part_sums) = (ROWS * weight.len(), self.sums().len() * weight.len());
        with_scratch::<S::Real, _>(inp.len().div_ceil(chunk) * part_sums, |sums| {
            let parts = dout
                .chunks(chunk)
                .zip(inp.chunks(chunk))
                .zip(dinp.chunks_mut(chunk))
                .zip(sums.chunks_mut(part_sums))
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
            self.add_sums::<G>(isa, sums)
        })
    }

    /// Gradients of the parameters, and whether to add to them.
    fn sums(&self) -> Vec<(&Buffer, bool)> {
        let dbias = self.dbias.iter().map(|dbias| (dbias, self.accumulate_dbias));
        std::iter::once((&self.dweight, self.accumulate_dweight))
            .chain(dbias)
            .collect()
    }

    fn add_sums<G: Stored>(&self, isa: Isa, sums: &[G::Real]) -> Result<(), DeviceError> {
        let (channels, targets) = (self.weight.len(), self.sums());
        for (which, &(target, accumulate)) in targets.iter().enumerate() {
            let mut target = target.host_mut::<G>()?;
            G::write(isa, &mut target, accumulate, |target| {
                if !accumulate {
                    target.fill(G::Real::ZERO);
                }
                for sums in sums.chunks_exact(channels).skip(which).step_by(targets.len()) {
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
    /// `params` are weight and bias, which is empty for root mean square normalisation.
    fn normalize<'a, T>(inp: &'a [T], params: [&'a [T]; 2], epsilon: T, out: &'a mut [T]) -> () {
        let [weight, bias] = params;
        let channels = weight.len();
        let rows = inp.chunks_exact(channels).zip(out.chunks_exact_mut(channels));
        if bias.is_empty() {
            for (x, out) in rows {
                let scale = statistics::<T, false>(x, epsilon).1;
                update2(out, [x, weight], |out, x, w| *out = x * scale * w);
            }
        } else {
            for (x, out) in rows {
                let (mean, scale) = statistics::<T, true>(x, epsilon);
                update3(out, [x, weight, bias], |out, x, w, b| {
                    *out = (x - mean) * scale * w + b;
                });
            }
        }
    }
}

kernel! {
    /// `inputs` are `dout`, `inp` and `weight`. `sums` is `[1, C]`, of `dout · normalised`, and for layer normalisation
    /// `[2, C]`, of `dout` too.
    fn normalize_back<'a, T>(
        inputs: [&'a [T]; 3],
        epsilon: T,
        dinp: &'a mut [T],
        sums: &'a mut [T],
        accumulate: bool,
    ) -> () {
        if sums.len() == inputs[2].len() {
            rows_back::<T, false>(inputs, epsilon, dinp, sums, accumulate);
        } else {
            rows_back::<T, true>(inputs, epsilon, dinp, sums, accumulate);
        }
    }
}

/// `CENTERED`: the mean is subtracted.
#[inline(always)]
fn rows_back<T: Real, const CENTERED: bool>(
    [dout, inp, weight]: [&[T]; 3],
    epsilon: T,
    dinp: &mut [T],
    sums: &mut [T],
    accumulate: bool,
) {
    let channels = weight.len();
    sums.fill(T::ZERO);
    let (weight_sums, bias_sums) = sums.split_at_mut(channels);
    let inputs = dout.chunks_exact(channels).zip(inp.chunks_exact(channels));
    for ((dout, x), dinp) in inputs.zip(dinp.chunks_exact_mut(channels)) {
        let (mean, scale) = statistics::<T, CENTERED>(x, epsilon);
        row_back::<T, CENTERED>([dout, weight, x], mean, scale, dinp, accumulate);
        update2(weight_sums, [dout, x], |sum, d, x| {
            *sum += d * (offset::<T, CENTERED>(x, mean) * scale);
        });
        if CENTERED {
            update(bias_sums, dout, |sum, d| *sum += d);
        }
    }
}

/// With n = (x − mean)·scale and g = dout·weight: `dinp = scale·(g − mean(g) − n·mean(g·n))`; without the two means where
/// the mean is not subtracted.
#[inline(always)]
fn row_back<T: Real, const CENTERED: bool>(
    [dout, weight, x]: [&[T]; 3],
    mean: T,
    scale: T,
    dinp: &mut [T],
    accumulate: bool,
) {
    let share = T::ONE / T::of(x.len() as f64);
    let g_mean = if CENTERED {
        sum_map2(dout, weight, |d, w| d * w) * share
    } else {
        T::ZERO
    };
    let along = sum_map3(dout, weight, x, |d, w, x| d * w * offset::<T, CENTERED>(x, mean));
    let gn_mean = along * scale * share;
    let gradient = |d: T, w: T, x: T| {
        let g = offset::<T, CENTERED>(d * w, g_mean);
        (g - offset::<T, CENTERED>(x, mean) * scale * gn_mean) * scale
    };
    update3(dinp, [dout, weight, x], |dinp, d, w, x| {
        let gradient = gradient(d, w, x);
        *dinp = if accumulate { *dinp + gradient } else { gradient };
    });
}

/// `x − mean`, or `x` where the mean is not subtracted.
#[inline(always)]
fn offset<T: Real, const CENTERED: bool>(x: T, mean: T) -> T {
    if CENTERED { x - mean } else { x }
}

/// Mean, and 1/√(variance + ε), of a row; where the mean is not subtracted 0, and 1/√(mean(x²) + ε).
#[inline(always)]
fn statistics<T: Real, const CENTERED: bool>(x: &[T], epsilon: T) -> (T, T) {
    let share = T::ONE / T::of(x.len() as f64);
    let mean = if CENTERED {
        sum_map(x, |x| x) * share
    } else {
        T::ZERO
    };
    let square = |x| {
        let x = offset::<T, CENTERED>(x, mean);
        x * x
    };
    let variance = sum_map(x, square) * share;
    (mean, T::ONE / (variance + epsilon).sqrt())
}

/// How many rows `inp` has.
fn rows(op: &'static str, len: usize, channels: usize) -> Result<usize, DeviceError> {
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

static SOURCE: KernelSource = kernels("row_norm.cu", include_str!("cuda/row_norm.cu"));

/// How the threads of a block share the rows that a kernel normalises.
#[derive(Clone, Copy)]
struct RowThreads {
    channels: usize,
    width: usize,
    /// Threads of one row: a warp, or the block.
    threads: usize,
}

impl RowThreads {
    /// Only the row itself is in registers.
    fn forward(channels: usize, width: usize) -> Self {
        let packs = channels / width;
        let threads = if packs <= WARP * LANE_PACKS {
            WARP
        } else {
            packs.div_ceil(2)
        };
        Self::with(channels, width, threads)
    }

    /// Three rows and two sums are in registers: one pack of each per thread.
    fn backward(channels: usize, width: usize) -> Self {
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
    fn at_once(&self) -> usize {
        self.block_threads() / self.threads
    }

    /// Rows of a block of the backward, and how many blocks.
    fn blocks(&self, rows: usize) -> (usize, usize) {
        let block_rows = rows.div_ceil(BLOCKS).max(self.at_once() * GROUP_ROWS);
        (block_rows, rows.div_ceil(block_rows))
    }

    fn grid(&self, op: &'static str, blocks: usize) -> Result<Grid, DeviceError> {
        Ok(Grid::linear(
            count(op, "blocks", blocks)?,
            self.block_threads() as u32,
        ))
    }

    fn defines(&self, act: &'static str, centered: bool) -> Vec<Define> {
        vec![
            Define::Number("CENTERED", i64::from(centered)),
            Define::Word("ACT", act),
            vec_define(self.width),
            Define::Number("CHANNELS", self.channels as i64),
            Define::Number("ROW_THREADS", self.threads as i64),
        ]
    }
}
