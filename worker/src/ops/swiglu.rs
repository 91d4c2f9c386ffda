//! SwiGLU, a gated linear unit with the sigmoid linear unit as its gate (Shazeer 2020): `silu(g)·u` with
//! `silu(g) = g·σ(g)`, between the first and the last product of Llama's feed-forward layer.
//!
//! Gate and up projection are one product. Its rows are `[gate, up]`, each of F channels.

use super::cpu::kernel::{Real, kernel, runs_in, update2};
use super::cpu::stored::Stored;
use super::cuda::plan::{
    Call, Plan, act_defines, count, element, elementwise_grid, expect_dtype, kernels, width,
};
use super::{Cpu, Operation, expect_len};
use crate::cuda::KernelSource;
use crate::memory::{Buffer, DeviceError};

/// Approximate number of output elements of one part of the work.
const PART: usize = 8_192;

/// `out = silu(gate)·up`, by rows
#[derive(Clone, Debug)]
pub struct SwigluForward {
    /// `[R, 2F]`: in each row the gate, then the up projection that it scales
    pub inp: Buffer,
    /// `[R, F]`
    pub out: Buffer,
    /// `F`
    pub channels: usize,
}

impl Operation for SwigluForward {
    const NAME: &'static str = "swiglu_forward";

    runs_in!(out);

    fn plan(&self) -> Result<Plan, DeviceError> {
        check(Self::NAME, [&self.inp, &self.out], self.channels)?;
        let add = |call: Call| call.read([&self.inp]).write([&self.out]);
        call(Self::NAME, [&self.inp, &self.out], self.channels, add)
    }
}

impl SwigluForward {
    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let channels = self.channels;
        check(Self::NAME, [&self.inp, &self.out], channels)?;
        let inp = self.inp.host::<S>()?;
        let mut out = self.out.host_mut::<S>()?;
        let part = part_rows(channels) * channels;
        let parts = inp.chunks(2 * part).zip(out.chunks_mut(part)).collect();
        let isa = cpu.isa();
        cpu.for_each_part(parts, |(inp, out): (&[S], &mut [S])| {
            S::read(isa, inp, |inp| {
                S::write(isa, out, false, |out| swiglu(isa, inp, out, channels));
            });
        });
        Ok(())
    }
}

/// Gradient of [`SwigluForward`], and its output again, both in place. So the output need not be
/// kept from forward to backward. With `s = σ(gate)`: `dgate = dout·up·s·(1 + gate·(1 − s))`,
/// `dup = dout·gate·s`.
#[derive(Clone, Debug)]
pub struct SwigluBackward {
    /// `[R, 2F]`: `inp`, becomes `dinp`
    pub inp_dinp: Buffer,
    /// `[R, F]`: `dout`, becomes `out`
    pub dout_out: Buffer,
    /// `F`
    pub channels: usize,
}

impl Operation for SwigluBackward {
    const NAME: &'static str = "swiglu_backward";

    runs_in!(inp_dinp);

    fn plan(&self) -> Result<Plan, DeviceError> {
        let buffers = [&self.inp_dinp, &self.dout_out];
        check(Self::NAME, buffers, self.channels)?;
        call(Self::NAME, buffers, self.channels, |call| call.write(buffers))
    }
}

impl SwigluBackward {
    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let channels = self.channels;
        check(Self::NAME, [&self.inp_dinp, &self.dout_out], channels)?;
        let mut inp_dinp = self.inp_dinp.host_mut::<S>()?;
        let mut dout_out = self.dout_out.host_mut::<S>()?;
        let part = part_rows(channels) * channels;
        let parts = inp_dinp
            .chunks_mut(2 * part)
            .zip(dout_out.chunks_mut(part))
            .collect();
        let isa = cpu.isa();
        cpu.for_each_part(parts, |(inp, dout): (&mut [S], &mut [S])| {
            S::write(isa, inp, true, |inp| {
                S::write(isa, dout, true, |dout| swiglu_back(isa, inp, dout, channels));
            });
        });
        Ok(())
    }
}

/// Rows of one part of the work.
fn part_rows(channels: usize) -> usize {
    (PART / channels).max(1)
}

/// Refuses sizes that do not fit each other, of `[R, 2F]` and `[R, F]`.
fn check(op: &'static str, [wide, narrow]: [&Buffer; 2], channels: usize) -> Result<(), DeviceError> {
    if channels == 0 || !narrow.len().is_multiple_of(channels) {
        let what = format!(
            "{} elements cannot be divided into rows of {channels}",
            narrow.len()
        );
        return Err(DeviceError::Shape { op, what });
    }
    expect_len(op, "gate and up", wide.len(), 2 * narrow.len())
}

/// A kernel over the elements of the second buffer.
fn call(
    op: &'static str,
    buffers: [&Buffer; 2],
    channels: usize,
    add: impl FnOnce(Call) -> Call,
) -> Result<Plan, DeviceError> {
    let [wide, narrow] = buffers;
    expect_dtype(wide.dtype(), &[narrow])?;
    let width = width(channels, &buffers);
    let defines = act_defines(element(op, wide)?, width);
    let grid = elementwise_grid(narrow.len(), width, 1);
    let call = add(Call::new(&SOURCE, op, defines, grid));
    let channels = count(op, "channels", channels)?;
    Ok(call.u32([channels]).u64([narrow.len() as u64]).into())
}

kernel! {
    fn swiglu<'a, T>(inp: &'a [T], out: &'a mut [T], channels: usize) -> () {
        for (inp, out) in inp.chunks_exact(2 * channels).zip(out.chunks_exact_mut(channels)) {
            let (gates, ups) = inp.split_at(channels);
            update2(out, [gates, ups], |out, gate, up| *out = gate * sigmoid(gate) * up);
        }
    }
}

kernel! {
    fn swiglu_back<'a, T>(inp_dinp: &'a mut [T], dout_out: &'a mut [T], channels: usize) -> () {
        let rows = inp_dinp.chunks_exact_mut(2 * channels);
        for (inp, dout) in rows.zip(dout_out.chunks_exact_mut(channels)) {
            let (gates, ups) = inp.split_at_mut(channels);
            let ups = &mut ups[..channels];
            for i in 0..channels {
                let (gate, up, d) = (gates[i], ups[i], dout[i]);
                let share = sigmoid(gate);
                let silu = gate * share;
                let slope = share * (T::ONE + gate * (T::ONE - share));
                (gates[i], ups[i], dout[i]) = (d * up * slope, d * silu, silu * up);
            }
        }
    }
}

/// σ(x)
#[expect(clippy::inline_always, reason = "compiled for each instruction set")]
#[inline(always)]
pub(super) fn sigmoid<T: Real>(x: T) -> T {
    T::ONE / (T::ONE + (-x).exp())
}

static SOURCE: KernelSource = kernels("swiglu.cu", include_str!("cuda/swiglu.cu"));
