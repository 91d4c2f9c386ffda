//! Launches of `gelu.cu`.

use super::plan::{Arg, Call, ELEMENT, ELEMENTWISE, Plan, Planned, elementwise_grid, expect_dtype, width};
use super::plan::{element, vec_define};
use crate::device::cuda::{Define, Source, Unit};
use crate::device::{Buffer, DeviceError};
use crate::ops::{CpuKernel, GeluBackward, GeluForward, expect_len};

static SOURCE: Source = Source::with_headers("gelu.cu", include_str!("gelu.cu"), &[ELEMENT, ELEMENTWISE]);

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
        defines: defines(act, width),
        grid: elementwise_grid(n, width, unroll),
        args,
    }))
}

fn defines(act: &'static str, width: usize) -> Vec<Define> {
    vec![Define::word("ACT", act), vec_define(width)]
}

pub(super) fn units() -> Vec<Unit> {
    let units = ["f32", "bf16"].map(|act| [8, 1].map(|width| Unit::new(&SOURCE, &defines(act, width))));
    units.concat()
}
