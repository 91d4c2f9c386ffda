//! Launches of `encoder.cu`; the gradient of the token embedding is in `token_backward`.

use super::plan::{
    Arg, Call, ELEMENT, Plan, Planned, THREADS, count, element, expect_dtype, vec_define, width,
};
use crate::device::cuda::{Define, Grid, Source, Unit};
use crate::device::{DType, DeviceError};
use crate::ops::{CpuKernel, EncoderForward, PositionBackward, expect_len};

static SOURCE: Source = Source::with_headers("encoder.cu", include_str!("encoder.cu"), &[ELEMENT]);

impl Planned for EncoderForward {
    fn plan(&self) -> Result<Plan, DeviceError> {
        let rows = self.tokens.len();
        let channels = self.out.len() / rows.max(1);
        expect_len(Self::NAME, "out", self.out.len(), rows * channels)?;
        let vocab = self.wte.len() / channels.max(1);
        expect_len(Self::NAME, "wte", self.wte.len(), vocab * channels)?;
        expect_dtype(DType::I32, &[&self.tokens])?;
        let mut buffers = vec![&self.wte, &self.out];
        if let Some(wpe) = &self.wpe {
            let known = wpe.len() / channels.max(1);
            expect_positions(Self::NAME, known, self.positions, rows)?;
            buffers.push(wpe);
        }
        expect_dtype(self.out.dtype(), &buffers)?;
        let act = element(Self::NAME, &self.out)?;
        let width = width(channels, &buffers);
        Ok(Plan::one(Call {
            source: &SOURCE,
            kernel: Self::NAME,
            defines: defines(act, act, width),
            grid: Grid::covering(rows * (channels / width), THREADS),
            args: vec![
                Arg::Read(self.tokens.clone()),
                Arg::Read(self.wte.clone()),
                Arg::read_if(self.wpe.as_ref()),
                Arg::Write(self.out.clone()),
                Arg::U32(count(Self::NAME, "rows", rows)?),
                Arg::U32(count(Self::NAME, "channels", channels)?),
                Arg::U32(count(Self::NAME, "positions", self.positions.max(1))?),
                Arg::U32(count(Self::NAME, "tokens of the vocabulary", vocab)?),
            ],
        }))
    }
}

impl Planned for PositionBackward {
    fn plan(&self) -> Result<Plan, DeviceError> {
        let channels = self.channels.max(1);
        let rows = self.dout.len() / channels;
        let known = self.dwpe.len() / channels;
        expect_len(Self::NAME, "dout", self.dout.len(), rows * channels)?;
        expect_len(Self::NAME, "dwpe", self.dwpe.len(), known * channels)?;
        expect_positions(Self::NAME, known, self.positions, rows)?;
        let width = width(channels, &[&self.dout, &self.dwpe]);
        let grad = element(Self::NAME, &self.dwpe)?;
        Ok(Plan::one(Call {
            source: &SOURCE,
            kernel: Self::NAME,
            defines: defines(element(Self::NAME, &self.dout)?, grad, width),
            grid: Grid::covering(known * (channels / width), THREADS),
            args: vec![
                Arg::Read(self.dout.clone()),
                Arg::Write(self.dwpe.clone()),
                Arg::U32(count(Self::NAME, "samples", rows / self.positions)?),
                Arg::U32(count(Self::NAME, "channels", channels)?),
                Arg::U32(count(Self::NAME, "positions", self.positions)?),
                Arg::U32(count(Self::NAME, "positions", known)?),
                Arg::flag(self.accumulate),
            ],
        }))
    }
}

fn expect_positions(
    op: &'static str,
    known: usize,
    positions: usize,
    rows: usize,
) -> Result<(), DeviceError> {
    if positions == 0 || positions > known || !rows.is_multiple_of(positions) {
        let what = format!("{rows} rows of {positions} positions, with {known} position embeddings");
        return Err(DeviceError::Shape { op, what });
    }
    Ok(())
}

fn defines(act: &'static str, grad: &'static str, width: usize) -> Vec<Define> {
    vec![
        Define::word("ACT", act),
        Define::word("GRAD", grad),
        vec_define(width),
    ]
}

pub(super) fn units() -> Vec<Unit> {
    let types = [("f32", "f32"), ("bf16", "bf16"), ("bf16", "f32")];
    let units = types.map(|(act, grad)| [8, 1].map(|width| Unit::new(&SOURCE, &defines(act, grad, width))));
    units.concat()
}
