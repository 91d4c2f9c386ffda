//! Element-wise operations: conversion between element types, which is also a plain copy; filling; GELU.
//!
//! GELU is the tanh form of GPT-2 (Hendrycks & Gimpel 2016): `½x(1 + tanh u)` with `u = √(2/π)(x + 0.044715x³)`. As
//! `½(1 + tanh u) = σ(2u)`, one exponential and one division do it.
#![expect(
    clippy::inline_always,
    reason = "so that it is compiled for each instruction set"
)]

use bytemuck::{cast_slice, cast_slice_mut};
use half::bf16;

use super::cpu::kernel::{EXPS, Real, by_dtype, kernel, runs_in, with_scratch};
use super::cpu::stored::Stored;
use super::cuda::plan::{
    Call, Plan, THREADS, act_defines, element, elementwise, elementwise_grid, kernels, vec_define, width,
};
use super::{Cpu, Operation, expect_len};
use crate::cuda::{Define, Grid, KernelSource};
use crate::memory::{Buffer, DType, DeviceError};

/// Elements of one part of the work.
const PART: usize = 65_536;

/// `out[i] = x[i]`, rounded to nearest even where the type of `out` is narrower.
#[derive(Clone, Debug)]
pub struct Cast {
    /// `[n]`, f32 or bf16
    pub x: Buffer,
    /// `[n]`, f32 or bf16
    pub out: Buffer,
}

impl Operation for Cast {
    const NAME: &'static str = "cast";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        expect_len(Self::NAME, "out", self.out.len(), self.x.len())?;
        let (from, to) = (self.x.dtype(), self.out.dtype());
        let (x, mut out) = (self.x.host_bytes()?, self.out.host_bytes_mut()?);
        let isa = cpu.isa();
        match (from, to) {
            (DType::F32, DType::Bf16) => {
                let (x, out): (&[f32], &mut [bf16]) = (cast_slice(&x), cast_slice_mut(&mut out));
                let parts = x.chunks(PART).zip(out.chunks_mut(PART)).collect();
                cpu.for_each_part(parts, |(x, out): (&[f32], &mut [bf16])| bf16::narrow(isa, x, out));
            }
            (DType::Bf16, DType::F32) => {
                let (x, out): (&[bf16], &mut [f32]) = (cast_slice(&x), cast_slice_mut(&mut out));
                let parts = x.chunks(PART).zip(out.chunks_mut(PART)).collect();
                cpu.for_each_part(parts, |(x, out): (&[bf16], &mut [f32])| bf16::widen(isa, x, out));
            }
            (from, to) if from == to => {
                let parts = x.chunks(PART).zip(out.chunks_mut(PART)).collect();
                cpu.for_each_part(parts, |(x, out): (&[u8], &mut [u8])| out.copy_from_slice(x));
            }
            (from, to) => {
                return Err(DeviceError::Shape {
                    op: Cast::NAME,
                    what: format!("cannot cast {from} to {to}"),
                });
            }
        }
        Ok(())
    }

    fn plan(&self) -> Result<Plan, DeviceError> {
        let n = self.x.len();
        expect_len(Self::NAME, "out", self.out.len(), n)?;
        let (from, to) = (element(Self::NAME, &self.x)?, element(Self::NAME, &self.out)?);
        let width = width(0, &[&self.x, &self.out]);
        let (defines, grid) = (cast_defines(from, to, width), elementwise_grid(n, width, 2));
        let call = Call::new(&CAST_SOURCE, Self::NAME, defines, grid);
        Ok(call.read([&self.x]).write([&self.out]).u64([n as u64]).into())
    }
}

static CAST_SOURCE: KernelSource = kernels("cast.cu", include_str!("cuda/cast.cu"));

fn cast_defines(from: &'static str, to: &'static str, width: usize) -> Vec<Define> {
    vec![
        Define::Word("FROM", from),
        Define::Word("TO", to),
        vec_define(width),
    ]
}

/// `out[i] = value`
#[derive(Clone, Debug)]
pub struct Fill {
    /// `[n]`, f32, bf16 or f64
    pub out: Buffer,
    /// Rounded to the type of `out`.
    pub value: f64,
}

impl Operation for Fill {
    const NAME: &'static str = "fill";

    runs_in!(out);

    fn plan(&self) -> Result<Plan, DeviceError> {
        let pattern = by_dtype!(Self::NAME, self.out.dtype(), S => Ok(self.pattern::<S>()))?;
        let bytes = self.out.bytes();
        let defines = act_defines("f32", width(0, &[&self.out]));
        let grid = Grid::covering(bytes.div_ceil(BYTES), THREADS);
        let call = Call::new(&FILL_SOURCE, Self::NAME, defines, grid);
        Ok(call.write([&self.out]).u64([pattern, bytes as u64]).into())
    }
}

impl Fill {
    /// Eight bytes of the memory that is filled.
    fn pattern<S: Stored>(&self) -> u64 {
        let values = [S::of(self.value); size_of::<u64>()];
        bytemuck::pod_read_unaligned(&cast_slice(&values)[..size_of::<u64>()])
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let (mut out, value) = (self.out.host_mut::<S>()?, S::of(self.value));
        cpu.for_each_part(out.chunks_mut(PART).collect(), |out: &mut [S]| out.fill(value));
        Ok(())
    }
}

/// Bytes that a thread of `fill` writes.
const BYTES: usize = 16;

static FILL_SOURCE: KernelSource = kernels("fill.cu", include_str!("cuda/fill.cu"));

/// Elements of one part of the work of a GELU.
const GELU_PART: usize = 16_384;
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

impl Operation for GeluForward {
    const NAME: &'static str = "gelu_forward";

    runs_in!(out);

    fn plan(&self) -> Result<Plan, DeviceError> {
        expect_len(Self::NAME, "out", self.out.len(), self.inp.len())?;
        let call = elementwise(Self::NAME, &GELU_SOURCE, &[&self.inp, &self.out], 0, 2)?;
        let call = call.read([&self.inp]).write([&self.out]);
        Ok(call.u64([self.inp.len() as u64]).into())
    }
}

impl GeluForward {
    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        expect_len(Self::NAME, "out", self.out.len(), self.inp.len())?;
        let inp = self.inp.host::<S>()?;
        let mut out = self.out.host_mut::<S>()?;
        let parts = inp.chunks(GELU_PART).zip(out.chunks_mut(GELU_PART)).collect();
        let isa = cpu.isa();
        cpu.for_each_part(parts, |(inp, out): (&[S], &mut [S])| {
            S::read(isa, inp, |inp| {
                S::write(isa, out, false, |out| gelu(isa, inp, out));
            });
        });
        Ok(())
    }
}

/// `dinp[i] = dout[i] · gelu′(inp[i])`, in place, and `out[i] = gelu(inp[i])` once more, in the place of the input: so the
/// output need not be kept from forward to backward. Where it was, the input stays.
#[derive(Clone, Debug)]
pub struct GeluBackward {
    /// `[n]`: `inp`, becomes `out` if that is wanted
    pub inp_out: Buffer,
    /// `[n]`: `dout`, becomes `dinp`
    pub dout_dinp: Buffer,
    /// Whether the output is wanted.
    pub makes_out: bool,
}

impl Operation for GeluBackward {
    const NAME: &'static str = "gelu_backward";

    runs_in!(inp_out);

    fn plan(&self) -> Result<Plan, DeviceError> {
        expect_len(Self::NAME, "dout", self.dout_dinp.len(), self.inp_out.len())?;
        let buffers = [&self.inp_out, &self.dout_dinp];
        let call = elementwise(Self::NAME, &GELU_SOURCE, &buffers, 0, 1)?;
        let call = call.write(buffers).flag(self.makes_out);
        Ok(call.u64([self.inp_out.len() as u64]).into())
    }
}

impl GeluBackward {
    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        expect_len(Self::NAME, "dout", self.dout_dinp.len(), self.inp_out.len())?;
        let mut dout_dinp = self.dout_dinp.host_mut::<S>()?;
        let douts = dout_dinp.chunks_mut(GELU_PART);
        let isa = cpu.isa();
        let back = |inp: &mut [S::Real], dout: &mut [S]| {
            S::write(isa, dout, true, |dout| gelu_back(isa, inp, dout));
        };
        if self.makes_out {
            let mut inp_out = self.inp_out.host_mut::<S>()?;
            let parts = inp_out.chunks_mut(GELU_PART).zip(douts).collect();
            cpu.for_each_part(parts, |(inp, dout): (&mut [S], &mut [S])| {
                S::write(isa, inp, true, |inp| back(inp, dout));
            });
        } else {
            let inp = self.inp_out.host::<S>()?;
            let parts = inp.chunks(GELU_PART).zip(douts).collect();
            cpu.for_each_part(parts, |(inp, dout): (&[S], &mut [S])| {
                with_scratch(inp.len(), |copy| {
                    S::widen(isa, inp, copy);
                    back(copy, dout);
                });
            });
        }
        Ok(())
    }
}

kernel! {
    fn gelu<'a, T>(inp: &'a [T], out: &'a mut [T]) -> () {
        let (blocks, rest) = inp.as_chunks();
        let (out_blocks, out_rest) = out.as_chunks_mut::<EXPS>();
        for (out, x) in out_blocks.iter_mut().zip(blocks) {
            let mut gates = *x;
            gate_each(&mut gates);
            for i in 0..EXPS {
                out[i] = x[i] * gates[i];
            }
        }
        for (out, &x) in out_rest.iter_mut().zip(rest) {
            *out = x * gate(x);
        }
    }
}

kernel! {
    fn gelu_back<'a, T>(inp_out: &'a mut [T], dout_dinp: &'a mut [T]) -> () {
        let (blocks, rest) = inp_out.as_chunks_mut();
        let (d_blocks, d_rest) = dout_dinp.as_chunks_mut::<EXPS>();
        for (x, d) in blocks.iter_mut().zip(d_blocks) {
            let mut gates = *x;
            gate_each(&mut gates);
            for i in 0..EXPS {
                gate_back(&mut x[i], &mut d[i], gates[i]);
            }
        }
        for (x, d) in rest.iter_mut().zip(d_rest) {
            let gate = gate(*x);
            gate_back(x, d, gate);
        }
    }
}

#[inline(always)]
fn gate_back<T: Real>(x: &mut T, d: &mut T, gate: T) {
    let (root, slope) = (T::of(TWICE_ROOT), T::of(3.0 * TWICE_ROOT * CUBIC));
    // d/dx x·σ(w) = σ + x·σ(1 − σ)·w′, with w = 2u.
    let dw = root + slope * *x * *x;
    *d *= gate + *x * gate * (T::ONE - gate) * dw;
    *x *= gate;
}

/// σ(2u)
#[inline(always)]
fn gate<T: Real>(x: T) -> T {
    T::ONE / (T::ONE + minus_twice(x).exp())
}

/// [`gate`] of each.
#[inline(always)]
fn gate_each<T: Real>(x: &mut [T; EXPS]) {
    for x in x.iter_mut() {
        *x = minus_twice(*x);
    }
    T::exp_each(x);
    for x in x.iter_mut() {
        *x = T::ONE / (T::ONE + *x);
    }
}

/// −2u
#[inline(always)]
fn minus_twice<T: Real>(x: T) -> T {
    -(x * (T::of(TWICE_ROOT) + T::of(TWICE_ROOT * CUBIC) * x * x))
}

static GELU_SOURCE: KernelSource = kernels("gelu.cu", include_str!("cuda/gelu.cu"));
