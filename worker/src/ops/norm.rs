//! The global norm of the gradients, and the factor that clips it. Both stay on the device.

use super::cpu::kernel::{kernel, runs_in, sum_lanes, update};
use super::cpu::stored::Stored;
use super::cuda::plan::{Call, Plan, THREADS, count, element, expect_dtype, kernels, vec_define, width};
use super::update::{UPDATE_NUMBERS, bias_correction};
use super::{Cpu, Operation, expect_len};
use crate::cuda::{Define, Grid, KernelSource};
use crate::memory::{Buffer, DType, DeviceError};

/// Elements of an arena whose squares are summed together, in f64. Shards align to it, so that the norm does
/// not depend on who owns what.
pub const CHUNK: usize = 16_384;

/// `partials[c] = Σ x[i]²` over chunk `c`, in f64
#[derive(Clone, Debug)]
pub struct SquaredNorm {
    /// `[n]`, f32 or bf16; starts at a multiple of [`CHUNK`] in its arena
    pub x: Buffer,
    /// `[⌈n / CHUNK⌉]`, f64
    pub partials: Buffer,
}

impl Operation for SquaredNorm {
    const NAME: &'static str = "squared_norm";

    runs_in!(x);

    fn plan(&self) -> Result<Plan, DeviceError> {
        let chunks = self.chunks()?;
        expect_dtype(DType::F64, &[&self.partials])?;
        let defines = defines(element(Self::NAME, &self.x)?, width(0, &[&self.x]));
        let grid = Grid::linear(count(Self::NAME, "chunks", chunks.div_ceil(CHUNKS))?, THREADS);
        let call = Call::new(&SOURCE, Self::NAME, defines, grid);
        let call = call.read([&self.x]).write([&self.partials]);
        Ok(call.u64([self.x.len() as u64]).into())
    }
}

impl SquaredNorm {
    fn chunks(&self) -> Result<usize, DeviceError> {
        let chunks = self.x.len().div_ceil(CHUNK);
        expect_len(Self::NAME, "partials", self.partials.len(), chunks)?;
        Ok(chunks)
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        self.chunks()?;
        let x = self.x.host::<S>()?;
        let mut partials = self.partials.host_mut::<f64>()?;
        let parts = partials.iter_mut().zip(x.chunks(CHUNK)).collect();
        let isa = cpu.isa();
        cpu.for_each_part(parts, |(partial, chunk): (&mut f64, &[S])| {
            *partial = S::read(isa, chunk, |chunk| squared_sum(isa, chunk));
        });
        Ok(())
    }
}

/// Partial sums of a chunk. More than elsewhere, so that widening to f64 is a loop over whole registers.
const LANES: usize = 256;

kernel! {
    /// `Σ x[i]²`, the squares and their sum in f64.
    fn squared_sum<'a, T>(x: &'a [T]) -> f64 {
        let mut lanes = [0.0; LANES];
        for block in x.chunks(LANES) {
            update(&mut lanes, block, |lane, x| *lane += x.to_f64() * x.to_f64());
        }
        sum_lanes(lanes)
    }
}

/// `norm = √Σ partials; scale = min(1, max_norm / norm)`, summed in chunk order; the scale is NaN, so that
/// [`super::Update`] leaves everything as it is, if the norm or one of `witnesses` is not finite
#[derive(Clone, Debug)]
pub struct ClipScale {
    /// `[partials]`, f64, of [`SquaredNorm`], of all ranks
    pub partials: Buffer,
    /// `[chunks]`, i32: where the sum of each chunk is in `partials`, negative for a chunk that has none. None: in order.
    pub order: Option<Buffer>,
    /// `[n]`, f64: other numbers that must be finite, such as the losses of all ranks.
    pub witnesses: Option<Buffer>,
    /// Largest norm that is let through; none: only measure.
    pub max_norm: Option<f32>,
    /// `[1]`, f32
    pub norm: Buffer,
    /// For [`super::Update`]: the factor, `[1]`, f32; with `updates` also the bias corrections, `[3]`.
    pub scale: Buffer,
    /// None: the host counts the updates.
    pub updates: Option<Updates>,
}

/// How often parameters were updated, counted where a step is skipped or not. A factor that is NaN stays NaN: the steps
/// after a skipped one are skipped too, until the host has looked at it and uploads another factor.
#[derive(Clone, Debug)]
pub struct Updates {
    /// `[1]`, i32: one more, unless the step is to be skipped.
    pub count: Buffer,
    /// Decays of the moments.
    pub betas: [f32; 2],
}

impl Operation for ClipScale {
    const NAME: &'static str = "clip_scale";

    fn run(&self, _cpu: &Cpu) -> Result<(), DeviceError> {
        let norm = self.sum()?.sqrt();
        let witnesses = self.witnesses.as_ref().map(Buffer::host::<f64>).transpose()?;
        let finite =
            (norm as f32).is_finite() && witnesses.is_none_or(|all| all.iter().all(|x| x.is_finite()));
        self.expect_scale()?;
        let mut scale = self.scale.host_mut::<f32>()?;
        let held = self.updates.is_some() && scale[0].is_nan();
        let counts = finite && !held;
        self.norm.host_mut::<f32>()?[0] = norm as f32;
        scale[0] = match self.max_norm {
            _ if !counts => f32::NAN,
            Some(max) if norm > f64::from(max) => (f64::from(max) / norm) as f32,
            _ => 1.0,
        };
        if let (Some(Updates { count, betas }), true) = (&self.updates, counts) {
            let mut count = count.host_mut::<i32>()?;
            count[0] = count[0].saturating_add(1);
            for (correction, beta) in scale[1..].iter_mut().zip(betas) {
                *correction = bias_correction(*beta, count[0]);
            }
        }
        Ok(())
    }

    fn plan(&self) -> Result<Plan, DeviceError> {
        expect_len(Self::NAME, "norm", self.norm.len(), 1)?;
        self.expect_scale()?;
        expect_dtype(DType::F64, &[&self.partials])?;
        expect_dtype(DType::F32, &[&self.norm, &self.scale])?;
        expect_dtype(DType::I32, self.order.as_slice())?;
        expect_dtype(DType::F64, self.witnesses.as_slice())?;
        let updates = self.updates.as_ref();
        if let Some(Updates { count, .. }) = updates {
            expect_len(Self::NAME, "updates", count.len(), 1)?;
            expect_dtype(DType::I32, &[count])?;
        }
        let chunks = self.order.as_ref().map_or(self.partials.len(), Buffer::len);
        let witnesses = self.witnesses.as_ref().map_or(0, Buffer::len);
        let call = Call::new(
            &SOURCE,
            Self::NAME,
            defines("f32", 8),
            Grid::linear(1, SCALE_THREADS),
        )
        .read([&self.partials])
        .u32([count(Self::NAME, "partial sums", self.partials.len())?])
        .read_if(self.order.as_ref())
        .u32([count(Self::NAME, "chunks", chunks)?])
        .read_if(self.witnesses.as_ref())
        .u32([count(Self::NAME, "witnesses", witnesses)?])
        .f32([self.max_norm.unwrap_or_default()])
        .flag(self.max_norm.is_some())
        .write([&self.norm, &self.scale])
        .write_if(updates.map(|updates| &updates.count))
        .f32(updates.map_or([0.0; 2], |updates| updates.betas));
        Ok(call.into())
    }
}

impl ClipScale {
    /// Refuses memory for the factor that has no room for the bias corrections, or room for nothing.
    fn expect_scale(&self) -> Result<(), DeviceError> {
        let len = if self.updates.is_some() { UPDATE_NUMBERS } else { 1 };
        expect_len(Self::NAME, "scale", self.scale.len(), len)
    }

    fn sum(&self) -> Result<f64, DeviceError> {
        let partials = self.partials.host::<f64>()?;
        let Some(order) = &self.order else {
            return Ok(partials.iter().sum());
        };
        let mut sum = 0.0;
        for &at in order.host::<i32>()?.iter() {
            let Ok(at) = usize::try_from(at) else { continue };
            sum += partials.get(at).ok_or_else(|| DeviceError::Shape {
                op: Self::NAME,
                what: format!("`order` names partial {at} of {}", partials.len()),
            })?;
        }
        Ok(sum)
    }
}

/// Chunks that a block sums, one a warp.
const CHUNKS: usize = THREADS as usize / 32;
/// Threads that combine the chunks.
const SCALE_THREADS: u32 = 1024;

static SOURCE: KernelSource = kernels("norm.cu", include_str!("cuda/norm.cu"));

fn defines(grad: &'static str, width: usize) -> Vec<Define> {
    vec![Define::Word("GRAD", grad), vec_define(width)]
}
