//! Rows moved to the order of experts and back, by the indices of [`super::SortByExpert`]. The rows of a token are added in
//! the order of its slots, so that sums do not depend on where the experts are.

use super::super::cpu::kernel::{Real, kernel, runs_in, sum_map2, update};
use super::super::cpu::stored::Stored;
use super::super::cuda::plan::{
    Call, Plan, THREADS, act_defines, count, element, expect_dtype, kernels, width,
};
use super::super::{Cpu, Fill, Operation, expect_indices, expect_len, expect_lens};
use crate::cuda::{Grid, KernelSource};
use crate::memory::{Buffer, DType, DeviceError};

/// Approximate number of elements of one part of the work.
const PART: usize = 8_192;

/// `out[m] = Σ_k weights[m, k] · inp[index[m, k] / per]`, in the order of `k`, or added to what is there. An index of −1 adds
/// nothing. Where the rows of one side are longer, their last channels are meant, as many as the other side has.
///
/// With the slots of rows as indices it takes rows to the experts, with the rows of slots back, or gradients of the former.
#[derive(Clone, Debug)]
pub struct IndexRows {
    /// `[N, I]`
    pub inp: Buffer,
    /// `[M, K]`, i32; `None`: row `m` is that of `inp`
    pub index: Option<Buffer>,
    /// Indices of a row of `inp`: the slots of a token, or 1.
    pub per: usize,
    /// `[M, K]`, f32 (f64 if the rows are); `None`: all 1
    pub weights: Option<Buffer>,
    /// `[M, O]`
    pub out: Buffer,
    /// `I` and `O`.
    pub widths: [usize; 2],
    /// Add to `out` instead of overwriting it: to what is there first.
    pub accumulate: bool,
}

impl Operation for IndexRows {
    const NAME: &'static str = "index_rows";

    runs_in!(out);

    fn plan(&self) -> Result<Plan, DeviceError> {
        let ([top_k, _], [from, to]) = (self.check()?, self.widths);
        expect_dtype(DType::I32, self.index.as_slice())?;
        expect_dtype(DType::F32, self.weights.as_slice())?;
        let sizes = [self.out.len() / to, from.min(to), top_k, self.per];
        let call = call(Self::NAME, [&self.out, &self.inp], sizes, from | to)?;
        let call = call.read([&self.inp]).read_if(self.index.as_ref());
        let call = call.read_if(self.weights.as_ref()).write([&self.out]);
        Ok(call.u32([from as u32, to as u32]).flag(self.accumulate).into())
    }
}

impl IndexRows {
    /// Refuses sizes that do not fit each other; indices of a row, and behind the last index.
    fn check(&self) -> Result<[usize; 2], DeviceError> {
        let (op, [from, to]) = (Self::NAME, self.widths);
        let end = rows_of(op, "inp", &self.inp, from)? * self.per;
        let rows = rows_of(op, "out", &self.out, to)?;
        let top_k = self.index.as_ref().map_or(1, |index| index.len() / rows.max(1));
        let all = ("inp", &self.inp, rows * from);
        let index = self.index.as_ref().map(|index| ("index", index, rows * top_k));
        let mut sizes = vec![index.unwrap_or(all)];
        sizes.extend(
            self.weights
                .as_ref()
                .map(|weights| ("weights", weights, rows * top_k)),
        );
        expect_lens(op, &sizes).map(|()| [top_k, end])
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let ([top_k, end], isa, [from, to]) = (self.check()?, cpu.isa(), self.widths);
        let (inp, channels) = (self.inp.host::<S>()?, from.min(to));
        let index = self.index.as_ref().map(Buffer::host::<i32>).transpose()?;
        expect_indices(Self::NAME, "index", index.as_deref().unwrap_or_default(), -1, end)?;
        let weights = self.weights.as_ref().map(Buffer::host::<S::Real>).transpose()?;
        let (inp, index, weights) = (&*inp, index.as_deref(), weights.as_deref());
        let source = |slot: usize| {
            let at = index.map_or(Some(slot), |index| usize::try_from(index[slot]).ok())?;
            Some(&row(inp, at / self.per, from)[from - channels..])
        };
        let mut out = self.out.host_mut::<S>()?;
        let each = part_rows(to);
        let parts = out.chunks_mut(each * to).enumerate().collect();
        cpu.for_each_part(parts, |(part, out): (usize, &mut [S])| {
            for (m, out) in (part * each..).zip(out.chunks_exact_mut(to)) {
                let out = &mut out[to - channels..];
                if top_k == 1 && weights.is_none() && !self.accumulate {
                    match source(m) {
                        Some(row) => out.copy_from_slice(row),
                        None => out.fill(S::zeroed()),
                    }
                    continue;
                }
                S::write(isa, out, self.accumulate, |out| {
                    if !self.accumulate {
                        out.fill(S::Real::ZERO);
                    }
                    for slot in m * top_k..(m + 1) * top_k {
                        if let Some(source) = source(slot) {
                            let weight = weights.map_or(S::Real::ONE, |weights| weights[slot]);
                            S::read(isa, source, |row| add_scaled(isa, row, weight, out));
                        }
                    }
                });
            }
        });
        Ok(())
    }
}

/// Gradient of the [`IndexRows`] that takes rows back to tokens with weights, the rows in place: `dinp[m] =
/// weights[slots[m]] · dout[slots[m] / K]`, 0 where the slot is −1; `dweights[slots[m]] = Σ_c inp[m, c] · dout[slots[m] / K,
/// c]`, 0 for dropped slots.
#[derive(Clone, Debug)]
pub struct CombineBackward {
    /// `[N, C]`
    pub dout: Buffer,
    /// `[M]`, i32
    pub slots: Buffer,
    /// `[N, K]`, f32 (f64 if the rows are)
    pub weights: Buffer,
    /// `[M, C]`: `inp`, becomes `dinp`
    pub inp_dinp: Buffer,
    /// `[N, K]`, as `weights`
    pub dweights: Buffer,
    /// `C`
    pub channels: usize,
}

impl Operation for CombineBackward {
    const NAME: &'static str = "combine_backward";

    runs_in!(dout);

    fn plan(&self) -> Result<Plan, DeviceError> {
        let sizes = [self.slots.len(), self.channels, self.check()?, 1];
        expect_dtype(DType::I32, &[&self.slots])?;
        expect_dtype(DType::F32, &[&self.weights, &self.dweights])?;
        let (out, value) = (self.dweights.clone(), 0.0);
        let mut plan = Fill { out, value }.plan()?;
        let call = call(Self::NAME, [&self.inp_dinp, &self.dout], sizes, self.channels)?;
        let call = call.read([&self.dout, &self.slots, &self.weights]);
        plan.calls.push(Call {
            // A warp a row.
            grid: Grid::covering(sizes[0] * 32, THREADS),
            ..call.write([&self.inp_dinp, &self.dweights])
        });
        Ok(plan)
    }
}

impl CombineBackward {
    /// Refuses sizes that do not fit each other; slots of a row.
    fn check(&self) -> Result<usize, DeviceError> {
        let (op, slots) = (Self::NAME, self.weights.len());
        let rows = rows_of(op, "dout", &self.dout, self.channels)?;
        let top_k = (slots / rows.max(1)).max(1);
        let sizes = [
            ("weights", &self.weights, rows * top_k),
            ("dweights", &self.dweights, slots),
            ("inp", &self.inp_dinp, self.slots.len() * self.channels),
        ];
        expect_lens(op, &sizes).map(|()| top_k)
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let (top_k, isa, channels) = (self.check()?, cpu.isa(), self.channels);
        let (dout, slots) = (self.dout.host::<S>()?, self.slots.host::<i32>()?);
        let (weights, mut inp) = (self.weights.host::<S::Real>()?, self.inp_dinp.host_mut::<S>()?);
        expect_indices(Self::NAME, "slots", &slots, -1, weights.len())?;
        let (dout, weights, mut dots) = (&*dout, &*weights, vec![S::Real::ZERO; slots.len()]);
        let rows = part_rows(channels);
        let dots_of_parts = slots.chunks(rows).zip(dots.chunks_mut(rows));
        let parts = inp.chunks_mut(rows * channels).zip(dots_of_parts).collect();
        cpu.for_each_part(parts, |(inp, (slots, dots)): Part<'_, S>| {
            for (inp, (&slot, dot)) in inp.chunks_exact_mut(channels).zip(slots.iter().zip(dots)) {
                let Ok(slot) = usize::try_from(slot) else {
                    inp.fill(S::zeroed());
                    continue;
                };
                let (dout, weight) = (row(dout, slot / top_k, channels), weights[slot]);
                *dot = S::write(isa, inp, true, |inp| {
                    S::read(isa, dout, |dout| dot_and_scale(isa, inp, dout, weight))
                });
            }
        });
        let mut dweights = self.dweights.host_mut::<S::Real>()?;
        dweights.fill(S::Real::ZERO);
        for (&slot, &dot) in slots.iter().zip(&dots).filter(|(slot, _)| **slot >= 0) {
            dweights[slot as usize] = dot;
        }
        Ok(())
    }
}

/// Some rows, their slots, and the gradients of their weights.
type Part<'a, S> = (&'a mut [S], (&'a [i32], &'a mut [<S as Stored>::Real]));

kernel! {
    /// `out[i] += x[i]·factor`
    fn add_scaled<'a, T>(x: &'a [T], factor: T, out: &'a mut [T]) -> () {
        update(out, x, |out, x| *out += x * factor);
    }
}

kernel! {
    /// `Σ inp[i]·dout[i]`; then `inp[i] = dout[i]·factor`
    fn dot_and_scale<'a, T>(inp: &'a mut [T], dout: &'a [T], factor: T) -> T {
        let dot = sum_map2(inp, dout, |x, d| x * d);
        update(inp, dout, |x, d| *x = d * factor);
        dot
    }
}

fn row<T>(rows: &[T], index: usize, channels: usize) -> &[T] {
    &rows[index * channels..][..channels]
}

/// Rows of one part of the work.
fn part_rows(channels: usize) -> usize {
    (PART / channels).max(1)
}

/// Rows of a buffer.
fn rows_of(op: &'static str, name: &str, buffer: &Buffer, channels: usize) -> Result<usize, DeviceError> {
    let rows = buffer.len() / channels.max(1);
    expect_len(op, "channels of a row", channels, channels.max(1))?;
    expect_len(op, name, buffer.len(), rows * channels).map(|()| rows)
}

/// A kernel over as many elements as the `sizes` of rows and channels say, in buffers of one type. Its first arguments are
/// the sizes: also indices of a row of one side and of the other. `whole` is a multiple of the pack that fits all rows.
fn call(
    op: &'static str,
    [rows, others]: [&Buffer; 2],
    sizes: [usize; 4],
    whole: usize,
) -> Result<Call, DeviceError> {
    expect_dtype(rows.dtype(), &[others])?;
    count(op, "rows", sizes[0] * sizes[2])?;
    count(op, "channels", sizes[1])?;
    let width = width(whole, &[rows, others]);
    let defines = act_defines(element(op, rows)?, width);
    let grid = Grid::covering(sizes[0] * (sizes[1] / width), THREADS);
    Ok(Call::new(&SOURCE, op, defines, grid).u32(sizes.map(|size| size as u32)))
}

static SOURCE: KernelSource = kernels("expert_rows.cu", include_str!("../cuda/expert_rows.cu"));
