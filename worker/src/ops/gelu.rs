//! GELU in the tanh form of GPT-2 (Hendrycks & Gimpel 2016): `½x(1 + tanh u)` with `u = √(2/π)(x + 0.044715x³)`.
//!
//! As `½(1 + tanh u) = σ(2u)`, one exponential and one division do it.
#![expect(
    clippy::inline_always,
    reason = "so that it is compiled for each instruction set"
)]

use super::cuda::plan::{
    Arg, Call, ELEMENT, ELEMENTWISE, Plan, Planned, act_defines, act_units, element, elementwise_grid,
    expect_dtype, width,
};
use super::kernel::{Real, by_dtype, kernel};
use super::stored::Stored;
use super::{CpuKernel, expect_len};
use crate::device::cuda::{CompileUnit, KernelSource};
use crate::device::{Buffer, Cpu, DeviceError};

/// Elements of one part of the work.
const PART: usize = 16_384;
/// 2√(2/π)
const TWICE_ROOT: f64 = 1.595_769_121_605_730_7;
const CUBIC: f64 = 0.044_715;

/// `out[i] = gelu(inp[i])`
#[derive(Clone, Debug)]
pub struct GeluForward {
    /// `[n]`
    pub inp: Buffer,
    /// `[n]`
    pub out: Buffer,
}

impl CpuKernel for GeluForward {
    const NAME: &'static str = "gelu_forward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtype!(Self::NAME, self.out.dtype(), T => self.compute::<T>(cpu))
    }
}

impl GeluForward {
    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        expect_len(Self::NAME, "out", self.out.len(), self.inp.len())?;
        let inp = self.inp.host::<S>()?;
        let mut out = self.out.host_mut::<S>()?;
        let parts = inp.chunks(PART).zip(out.chunks_mut(PART)).collect();
        let isa = cpu.isa();
        cpu.for_each_part(parts, |(inp, out): (&[S], &mut [S])| {
            S::read(isa, inp, |inp| {
                S::write(isa, out, false, |out| gelu(isa, inp, out));
            });
        });
        Ok(())
    }
}

/// `dinp[i] = dout[i] · gelu′(inp[i])`, and `out[i] = gelu(inp[i])` once more, both in place: the output need not be
/// kept from forward to backward.
#[derive(Clone, Debug)]
pub struct GeluBackward {
    /// `[n]`: `inp`, becomes `out`
    pub inp_out: Buffer,
    /// `[n]`: `dout`, becomes `dinp`
    pub dout_dinp: Buffer,
}

impl CpuKernel for GeluBackward {
    const NAME: &'static str = "gelu_backward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtype!(Self::NAME, self.inp_out.dtype(), T => self.compute::<T>(cpu))
    }
}

impl GeluBackward {
    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        expect_len(Self::NAME, "dout", self.dout_dinp.len(), self.inp_out.len())?;
        let mut inp_out = self.inp_out.host_mut::<S>()?;
        let mut dout_dinp = self.dout_dinp.host_mut::<S>()?;
        let parts = inp_out.chunks_mut(PART).zip(dout_dinp.chunks_mut(PART)).collect();
        let isa = cpu.isa();
        cpu.for_each_part(parts, |(inp, dout): (&mut [S], &mut [S])| {
            S::write(isa, inp, true, |inp| {
                S::write(isa, dout, true, |dout| gelu_back(isa, inp, dout));
            });
        });
        Ok(())
    }
}

kernel! {
    fn gelu<'a, T>(inp: &'a [T], out: &'a mut [T]) -> () {
        for (out, &x) in out.iter_mut().zip(inp) {
            *out = x * gate(x);
        }
    }
}

kernel! {
    fn gelu_back<'a, T>(inp_out: &'a mut [T], dout_dinp: &'a mut [T]) -> () {
        let (root, slope) = (T::of(TWICE_ROOT), T::of(3.0 * TWICE_ROOT * CUBIC));
        for (x, d) in inp_out.iter_mut().zip(dout_dinp) {
            let gate = gate(*x);
            // d/dx x·σ(w) = σ + x·σ(1 − σ)·w′, with w = 2u.
            let dw = root + slope * *x * *x;
            *d *= gate + *x * gate * (T::ONE - gate) * dw;
            *x *= gate;
        }
    }
}

/// σ(2u)
#[inline(always)]
fn gate<T: Real>(x: T) -> T {
    let w = x * (T::of(TWICE_ROOT) + T::of(TWICE_ROOT * CUBIC) * x * x);
    T::ONE / (T::ONE + (-w).exp())
}

static SOURCE: KernelSource =
    KernelSource::with_headers("gelu.cu", include_str!("cuda/gelu.cu"), &[ELEMENT, ELEMENTWISE]);

impl Planned for GeluForward {
    fn plan(&self) -> Result<Plan, DeviceError> {
        expect_len(Self::NAME, "out", self.out.len(), self.inp.len())?;
        let args = vec![Arg::Read(self.inp.clone()), Arg::Write(self.out.clone())];
        plan(Self::NAME, [&self.inp, &self.out], args, 2)
    }
}

impl Planned for GeluBackward {
    fn plan(&self) -> Result<Plan, DeviceError> {
        expect_len(Self::NAME, "dout", self.dout_dinp.len(), self.inp_out.len())?;
        let args = vec![
            Arg::Write(self.inp_out.clone()),
            Arg::Write(self.dout_dinp.clone()),
        ];
        plan(Self::NAME, [&self.inp_out, &self.dout_dinp], args, 1)
    }
}

fn plan(
    op: &'static str,
    buffers: [&Buffer; 2],
    mut args: Vec<Arg>,
    unroll: usize,
) -> Result<Plan, DeviceError> {
    let act = element(op, buffers[0])?;
    expect_dtype(buffers[0].dtype(), &buffers)?;
    let (n, width) = (buffers[0].len(), width(0, &buffers));
    args.push(Arg::U64(n as u64));
    Ok(Plan::one(Call {
        source: &SOURCE,
        kernel: op,
        defines: act_defines(act, width),
        grid: elementwise_grid(n, width, unroll),
        args,
    }))
}

pub(super) fn units() -> Vec<CompileUnit> {
    act_units(&SOURCE)
}
