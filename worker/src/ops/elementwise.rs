//! Element-wise operations: conversion between element types, which is also a plain copy; filling; scaling in place.

use bytemuck::{cast_slice, cast_slice_mut};
use half::bf16;

use super::cuda::plan::{
    Arg, Call, ELEMENT, ELEMENTWISE, Plan, Planned, THREADS, act_defines, act_units, element,
    elementwise_grid, vec_define, width,
};
use super::kernel::kernel;
use super::stored::{Stored, narrow, widen};
use super::{CpuKernel, expect_len};
use crate::device::cuda::{CompileUnit, Define, Grid, KernelSource};
use crate::device::{Buffer, Cpu, DType, DeviceError, Element};

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

impl CpuKernel for Cast {
    const NAME: &'static str = "cast";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        expect_len(Self::NAME, "out", self.out.len(), self.x.len())?;
        let (from, to) = (self.x.dtype(), self.out.dtype());
        cast_bytes(
            cpu,
            (from, &self.x.host_bytes()?[..]),
            (to, &mut self.out.host_bytes_mut()?[..]),
        )
    }
}

/// [`Cast`] of memory that is no buffer's: as many elements of `from` and `to`, aligned for them.
pub(crate) fn cast_bytes(
    cpu: &Cpu,
    (from, x): (DType, &[u8]),
    (to, out): (DType, &mut [u8]),
) -> Result<(), DeviceError> {
    let isa = cpu.isa();
    match (from, to) {
        (DType::F32, DType::Bf16) => {
            let (x, out): (&[f32], &mut [bf16]) = (cast_slice(x), cast_slice_mut(out));
            let parts = x.chunks(PART).zip(out.chunks_mut(PART)).collect();
            cpu.for_each_part(parts, |(x, out): (&[f32], &mut [bf16])| narrow(isa, x, out));
        }
        (DType::Bf16, DType::F32) => {
            let (x, out): (&[bf16], &mut [f32]) = (cast_slice(x), cast_slice_mut(out));
            let parts = x.chunks(PART).zip(out.chunks_mut(PART)).collect();
            cpu.for_each_part(parts, |(x, out): (&[bf16], &mut [f32])| widen(isa, x, out));
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

static CAST_SOURCE: KernelSource =
    KernelSource::with_headers("cast.cu", include_str!("cuda/cast.cu"), &[ELEMENT, ELEMENTWISE]);

impl Planned for Cast {
    fn plan(&self) -> Result<Plan, DeviceError> {
        let n = self.x.len();
        expect_len(Self::NAME, "out", self.out.len(), n)?;
        let (from, to) = (element(Self::NAME, &self.x)?, element(Self::NAME, &self.out)?);
        let width = width(0, &[&self.x, &self.out]);
        Ok(Plan::one(Call {
            source: &CAST_SOURCE,
            kernel: Self::NAME,
            defines: cast_defines(from, to, width),
            grid: elementwise_grid(n, width, 2),
            args: vec![
                Arg::Read(self.x.clone()),
                Arg::Write(self.out.clone()),
                Arg::U64(n as u64),
            ],
        }))
    }
}

fn cast_defines(from: &'static str, to: &'static str, width: usize) -> Vec<Define> {
    vec![
        Define::word("FROM", from),
        Define::word("TO", to),
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

impl CpuKernel for Fill {
    const NAME: &'static str = "fill";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        match self.out.dtype() {
            DType::F64 => self.fill(cpu, self.value),
            DType::Bf16 => self.fill(cpu, half::bf16::from_f64(self.value)),
            // Any other type is refused there.
            _ => self.fill(cpu, self.value as f32),
        }
    }
}

impl Fill {
    fn fill<T: Element>(&self, cpu: &Cpu, value: T) -> Result<(), DeviceError> {
        let mut out = self.out.host_mut::<T>()?;
        cpu.for_each_part(out.chunks_mut(PART).collect(), |out: &mut [T]| out.fill(value));
        Ok(())
    }
}

/// `x[i] = x[i] · factor`
#[derive(Clone, Debug)]
pub struct Scale {
    /// `[n]`, f32 or bf16
    pub x: Buffer,
    /// The factor; the product is rounded to the type of `x`.
    pub factor: f32,
}

impl CpuKernel for Scale {
    const NAME: &'static str = "scale";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        match self.x.dtype() {
            DType::Bf16 => self.scale::<half::bf16>(cpu),
            // Any other type is refused there.
            _ => self.scale::<f32>(cpu),
        }
    }
}

impl Scale {
    fn scale<T: Stored<Real = f32>>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let (mut x, isa) = (self.x.host_mut::<T>()?, cpu.isa());
        cpu.for_each_part(x.chunks_mut(PART).collect(), |x: &mut [T]| {
            T::write(isa, x, true, |x| multiply(isa, x, self.factor));
        });
        Ok(())
    }
}

kernel! {
    /// `x[i] *= factor`
    fn multiply<'a, T>(x: &'a mut [T], factor: T) -> () {
        for x in x.iter_mut() {
            *x *= factor;
        }
    }
}

/// Bytes that a thread writes.
const BYTES: usize = 16;

static SOURCE: KernelSource =
    KernelSource::with_headers("fill.cu", include_str!("cuda/fill.cu"), &[ELEMENT, ELEMENTWISE]);

impl Planned for Fill {
    fn plan(&self) -> Result<Plan, DeviceError> {
        let twice = |bits: u32| u64::from(bits) << 32 | u64::from(bits);
        let pattern = match self.out.dtype() {
            DType::F64 => self.value.to_bits(),
            DType::F32 => twice((self.value as f32).to_bits()),
            DType::Bf16 => {
                let bits = u32::from(bf16::from_f64(self.value).to_bits());
                twice(bits << 16 | bits)
            }
            other => {
                let what = format!("cannot fill {other}");
                return Err(DeviceError::Shape { op: Self::NAME, what });
            }
        };
        let bytes = self.out.bytes();
        Ok(Plan::one(Call {
            source: &SOURCE,
            kernel: Self::NAME,
            defines: act_defines("f32", width(0, &[&self.out])),
            grid: Grid::covering(bytes.div_ceil(BYTES), THREADS),
            args: vec![
                Arg::Write(self.out.clone()),
                Arg::U64(pattern),
                Arg::U64(bytes as u64),
            ],
        }))
    }
}

impl Planned for Scale {
    fn plan(&self) -> Result<Plan, DeviceError> {
        let (n, width) = (self.x.len(), width(0, &[&self.x]));
        Ok(Plan::one(Call {
            source: &SOURCE,
            kernel: Self::NAME,
            defines: act_defines(element(Self::NAME, &self.x)?, width),
            grid: elementwise_grid(n, width, 2),
            args: vec![
                Arg::Write(self.x.clone()),
                Arg::F32(self.factor),
                Arg::U64(n as u64),
            ],
        }))
    }
}

pub(super) fn units() -> Vec<CompileUnit> {
    let mut units = act_units(&SOURCE);
    for from in ["f32", "bf16"] {
        for to in ["f32", "bf16"] {
            units.extend([8, 1].map(|width| CompileUnit::new(&CAST_SOURCE, &cast_defines(from, to, width))));
        }
    }
    units
}
