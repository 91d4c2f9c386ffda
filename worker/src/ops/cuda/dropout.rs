//! Launches of `dropout.cu`, and the mask as arguments of other kernels.

use super::plan::{
    Arg, Call, ELEMENT, ELEMENTWISE, Plan, Planned, count, element, elementwise_grid, expect_dtype,
    vec_define, width,
};
use crate::device::DeviceError;
use crate::device::cuda::{Define, Source, Unit};
use crate::ops::{CpuKernel, Dropout, DropoutMask};

/// The file that kernels with masks include.
pub(super) const DROPOUT: (&str, &str) = ("dropout.cuh", include_str!("dropout.cuh"));

static SOURCE: Source = Source::with_headers(
    "dropout.cu",
    include_str!("dropout.cu"),
    &[ELEMENT, ELEMENTWISE, DROPOUT],
);

/// The members of `Mask`, as the last parameters of a kernel.
pub(super) fn mask_args(mask: Option<&DropoutMask>) -> Vec<Arg> {
    mask.map_or_else(Vec::new, |mask| {
        vec![
            Arg::U64(mask.key()),
            Arg::U64(mask.first_sample()),
            Arg::U32(mask.threshold()),
            Arg::F32(mask.scale() as f32),
        ]
    })
}

/// The definition of `DROPOUT`, only where there is a mask: without one a kernel is compiled as it always was.
pub(super) fn mask_define(has_mask: bool) -> Option<Define> {
    has_mask.then(|| Define::number("DROPOUT", 1))
}

impl Planned for Dropout {
    fn plan(&self) -> Result<Plan, DeviceError> {
        self.check()?;
        let mut buffers = vec![&self.inp, &self.out];
        buffers.extend(&self.residual);
        expect_dtype(self.out.dtype(), &buffers)?;
        let (n, width) = (self.out.len(), width(self.channels, &buffers));
        let mut args = vec![
            Arg::Read(self.inp.clone()),
            Arg::read_if(self.residual.as_ref()),
            Arg::Write(self.out.clone()),
            Arg::U32(count(Self::NAME, "positions", self.positions)?),
            Arg::U32(count(Self::NAME, "channels", self.channels)?),
        ];
        args.extend(mask_args(Some(&self.mask)));
        args.push(Arg::U64(n as u64));
        Ok(Plan::one(Call {
            source: &SOURCE,
            kernel: Self::NAME,
            defines: defines(element(Self::NAME, &self.out)?, width),
            grid: elementwise_grid(n, width, 1),
            args,
        }))
    }
}

fn defines(act: &'static str, width: usize) -> Vec<Define> {
    vec![Define::word("ACT", act), vec_define(width)]
}

pub(super) fn units() -> Vec<Unit> {
    let units = ["f32", "bf16"].map(|act| [8, 1].map(|width| Unit::new(&SOURCE, &defines(act, width))));
    units.concat()
}
