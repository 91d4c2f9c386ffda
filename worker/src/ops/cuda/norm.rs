//! Launches of `norm.cu`.

use super::plan::{
    Arg, Call, ELEMENT, Plan, Planned, THREADS, count, element, expect_dtype, vec_define, width,
};
use crate::device::cuda::{Define, Grid, Source, Unit};
use crate::device::{Buffer, DType, DeviceError};
use crate::ops::{CHUNK, ClipScale, CpuKernel, SquaredNorm, Updates, expect_len};

/// Chunks that a block sums, one a warp.
const CHUNKS: usize = THREADS as usize / 32;
/// Threads that combine the chunks.
const SCALE_THREADS: u32 = 1024;

static SOURCE: Source = Source::with_headers("norm.cu", include_str!("norm.cu"), &[ELEMENT]);

impl Planned for SquaredNorm {
    fn plan(&self) -> Result<Plan, DeviceError> {
        let chunks = self.x.len().div_ceil(CHUNK);
        expect_len(Self::NAME, "partials", self.partials.len(), chunks)?;
        expect_dtype(DType::F64, &[&self.partials])?;
        Ok(Plan::one(Call {
            source: &SOURCE,
            kernel: Self::NAME,
            defines: defines(element(Self::NAME, &self.x)?, width(0, &[&self.x])),
            grid: Grid::linear(count(Self::NAME, "chunks", chunks.div_ceil(CHUNKS))?, THREADS),
            args: vec![
                Arg::Read(self.x.clone()),
                Arg::Write(self.partials.clone()),
                Arg::U64(self.x.len() as u64),
            ],
        }))
    }
}

impl Planned for ClipScale {
    fn plan(&self) -> Result<Plan, DeviceError> {
        expect_len(Self::NAME, "norm", self.norm.len(), 1)?;
        self.expect_scale()?;
        expect_dtype(DType::F64, &[&self.partials])?;
        expect_dtype(DType::F32, &[&self.norm, &self.scale])?;
        expect_dtype(DType::I32, self.order.as_slice())?;
        expect_dtype(DType::F64, self.witnesses.as_slice())?;
        let chunks = self.order.as_ref().map_or(self.partials.len(), Buffer::len);
        let witnesses = self.witnesses.as_ref().map_or(0, Buffer::len);
        let [beta1, beta2] = self.updates.as_ref().map_or([0.0; 2], |updates| updates.betas);
        let updates = match &self.updates {
            None => Arg::Null,
            Some(Updates { count, .. }) => {
                expect_len(Self::NAME, "updates", count.len(), 1)?;
                expect_dtype(DType::I32, &[count])?;
                Arg::Write(count.clone())
            }
        };
        Ok(Plan::one(Call {
            source: &SOURCE,
            kernel: Self::NAME,
            defines: defines("f32", 8),
            grid: Grid::linear(1, SCALE_THREADS),
            args: vec![
                Arg::Read(self.partials.clone()),
                Arg::U32(count(Self::NAME, "partial sums", self.partials.len())?),
                Arg::read_if(self.order.as_ref()),
                Arg::U32(count(Self::NAME, "chunks", chunks)?),
                Arg::read_if(self.witnesses.as_ref()),
                Arg::U32(count(Self::NAME, "witnesses", witnesses)?),
                Arg::F32(self.max_norm.unwrap_or_default()),
                Arg::flag(self.max_norm.is_some()),
                Arg::Write(self.norm.clone()),
                Arg::Write(self.scale.clone()),
                updates,
                Arg::F32(beta1),
                Arg::F32(beta2),
            ],
        }))
    }
}

fn defines(grad: &'static str, width: usize) -> Vec<Define> {
    vec![Define::word("GRAD", grad), vec_define(width)]
}

pub(super) fn units() -> Vec<Unit> {
    let units = ["f32", "bf16"].map(|grad| [8, 1].map(|width| Unit::new(&SOURCE, &defines(grad, width))));
    units.concat()
}
