//! From tokens to channels: the row of the token, plus the row of the position. For the gradient of the token embedding a
//! GPU sorts the rows by token and adds them run by run.

use super::cuda::plan::{
    Arg, Call, ELEMENT, Plan, Planned, Scratch, THREADS, count, element, expect_dtype, grad_defines,
    grad_units, width,
};
use super::kernel::{by_dtype, by_dtypes};
use super::linear::add_into;
use super::matrix::MatrixMut;
use super::stored::Stored;
use super::{CpuKernel, Fill, expect_len, expect_tokens};
use crate::device::cuda::{CompileUnit, Grid, KernelSource};
use crate::device::{Buffer, Cpu, DType, DeviceError};

/// Rows of one part of the forward.
const ROWS: usize = 32;
/// Channels of one part of the backward: a part adds all tokens' gradients, in their order, to its channels.
const WIDTH: usize = 64;

/// `out[b, t] = wte[tokens[b, t]] + wpe[t]`
#[derive(Clone, Debug)]
pub struct EncoderForward {
    /// `[B, T]`, i32
    pub tokens: Buffer,
    /// `[V, C]`
    pub wte: Buffer,
    /// `[T, C]` or longer; none: positions make no difference
    pub wpe: Option<Buffer>,
    /// `[B, T, C]`
    pub out: Buffer,
    /// Positions `T`.
    pub positions: usize,
}

impl CpuKernel for EncoderForward {
    const NAME: &'static str = "encoder_forward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtype!(Self::NAME, self.out.dtype(), S => self.compute::<S>(cpu))
    }
}

impl EncoderForward {
    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let tokens = self.tokens.host::<i32>()?;
        let channels = channels(Self::NAME, "out", &self.out, tokens.len())?;
        let wte = self.wte.host::<S>()?;
        expect_tokens(Self::NAME, "tokens", &tokens, 0, wte.len() / channels)?;
        let wpe = self.wpe.as_ref().map(Buffer::host::<S>).transpose()?;
        if let Some(wpe) = &wpe {
            expect_positions(Self::NAME, wpe.len() / channels, self.positions, tokens.len())?;
        }
        let (tokens, wte, wpe) = (&*tokens, &*wte, wpe.as_deref());
        let mut out = self.out.host_mut::<S>()?;
        let parts = out.chunks_mut(ROWS * channels).enumerate().collect();
        let isa = cpu.isa();
        cpu.for_each_part(parts, |(part, out): (usize, &mut [S])| {
            for (i, out) in out.chunks_exact_mut(channels).enumerate() {
                let row = part * ROWS + i;
                // Negative tokens were refused above.
                let token = tokens[row].unsigned_abs() as usize;
                let token = &wte[token * channels..][..channels];
                let Some(wpe) = wpe else {
                    out.copy_from_slice(token);
                    continue;
                };
                let position = &wpe[row % self.positions * channels..][..channels];
                S::write(isa, out, false, |out| {
                    S::widen(isa, token, out);
                    S::read(isa, position, |position| add_into(isa, position, out));
                });
            }
        });
        Ok(())
    }
}

/// `dwte[v] = Σ dout[b, t] over tokens[b, t] = v`, or added to what is there
#[derive(Clone, Debug)]
pub struct TokenBackward {
    /// `[B, T]`, i32
    pub tokens: Buffer,
    /// `[B, T, C]`
    pub dout: Buffer,
    /// `[V, C]`, of type G
    pub dwte: Buffer,
    /// Add to `dwte` instead of overwriting it.
    pub accumulate: bool,
}

impl CpuKernel for TokenBackward {
    const NAME: &'static str = "token_backward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtypes!(Self::NAME, self.dout.dtype(), self.dwte.dtype(), (S, G) => self.compute::<S, G>(cpu))
    }
}

impl TokenBackward {
    /// Channels, and tokens of the vocabulary.
    fn sizes(&self) -> Result<(usize, usize), DeviceError> {
        let channels = channels(Self::NAME, "dout", &self.dout, self.tokens.len())?;
        let vocab = self.dwte.len() / channels;
        expect_len(Self::NAME, "dwte", self.dwte.len(), vocab * channels)?;
        Ok((channels, vocab))
    }

    fn compute<S: Stored, G: Stored<Real = S::Real>>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let tokens = self.tokens.host::<i32>()?;
        let (channels, vocab) = self.sizes()?;
        expect_tokens(Self::NAME, "tokens", &tokens, 0, vocab)?;
        let dout = self.dout.host::<S>()?;
        let mut dwte = self.dwte.host_mut::<G>()?;
        let (tokens, dout) = (&*tokens, &*dout);
        // All rows of a token are added before its sum is rounded.
        let mut order: Vec<usize> = (0..tokens.len()).collect();
        order.sort_by_key(|row| tokens[*row]);
        let groups: Vec<&[usize]> = order.chunk_by(|a, b| tokens[*a] == tokens[*b]).collect();
        let isa = cpu.isa();
        let parts = MatrixMut::dense(&mut dwte, vocab, channels).tiles(vocab.max(1), WIDTH);
        cpu.for_each_part(parts, |mut part| {
            if !self.accumulate {
                for row in 0..part.out.row_count() {
                    part.out.row_mut(row).fill(G::zeroed());
                }
            }
            for rows in &groups {
                let token = tokens[rows[0]].unsigned_abs() as usize;
                G::write(isa, part.out.row_mut(token), true, |sum| {
                    for row in *rows {
                        let dout = &dout[row * channels..][part.cols.clone()];
                        S::read(isa, dout, |dout| add_into(isa, dout, sum));
                    }
                });
            }
        });
        Ok(())
    }
}

/// `dwpe[t] = Σ_b dout[b, t]`, or added to what is there; positions beyond `T` get 0
#[derive(Clone, Debug)]
pub struct PositionBackward {
    /// `[B, T, C]`
    pub dout: Buffer,
    /// `[T, C]` or longer, of type G
    pub dwpe: Buffer,
    /// Add to `dwpe` instead of overwriting it.
    pub accumulate: bool,
    /// Positions `T`.
    pub positions: usize,
    /// Channels `C`.
    pub channels: usize,
}

impl CpuKernel for PositionBackward {
    const NAME: &'static str = "position_backward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtypes!(Self::NAME, self.dout.dtype(), self.dwpe.dtype(), (S, G) => self.compute::<S, G>(cpu))
    }
}

impl PositionBackward {
    /// Rows of `dout`, and of `dwpe`.
    fn sizes(&self) -> Result<(usize, usize), DeviceError> {
        let channels = self.channels.max(1);
        let (rows, known) = (self.dout.len() / channels, self.dwpe.len() / channels);
        expect_len(Self::NAME, "dout", self.dout.len(), rows * channels)?;
        expect_len(Self::NAME, "dwpe", self.dwpe.len(), known * channels)?;
        expect_positions(Self::NAME, known, self.positions, rows)?;
        Ok((rows, known))
    }

    fn compute<S: Stored, G: Stored<Real = S::Real>>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let (positions, channels) = (self.positions, self.channels.max(1));
        self.sizes()?;
        let dout = self.dout.host::<S>()?;
        let mut dwpe = self.dwpe.host_mut::<G>()?;
        let isa = cpu.isa();
        let dout = &*dout;
        let parts = dwpe.chunks_mut(ROWS * channels).enumerate().collect();
        cpu.for_each_part(parts, |(part, dwpe): (usize, &mut [G])| {
            if !self.accumulate {
                dwpe.fill(G::zeroed());
            }
            for (i, dwpe) in dwpe.chunks_exact_mut(channels).enumerate() {
                let position = part * ROWS + i;
                if position < positions {
                    let rows = dout.chunks_exact(channels).skip(position).step_by(positions);
                    G::write(isa, dwpe, true, |sum| {
                        for row in rows {
                            S::read(isa, row, |row| add_into(isa, row, sum));
                        }
                    });
                }
            }
        });
        Ok(())
    }
}

fn channels(op: &'static str, name: &str, buffer: &Buffer, tokens: usize) -> Result<usize, DeviceError> {
    let channels = buffer.len() / tokens.max(1);
    expect_len(op, name, buffer.len(), tokens * channels)?;
    Ok(channels.max(1))
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

static SOURCE: KernelSource =
    KernelSource::with_headers("encoder.cu", include_str!("cuda/encoder.cu"), &[ELEMENT]);

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
            defines: grad_defines(act, act, width),
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
        let (rows, known) = self.sizes()?;
        let width = width(channels, &[&self.dout, &self.dwpe]);
        let grad = element(Self::NAME, &self.dwpe)?;
        Ok(Plan::one(Call {
            source: &SOURCE,
            kernel: Self::NAME,
            defines: grad_defines(element(Self::NAME, &self.dout)?, grad, width),
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

pub(super) fn units() -> Vec<CompileUnit> {
    [
        grad_units(&SOURCE),
        grad_units(&SUM),
        vec![CompileUnit::new(&SORT, &[])],
    ]
    .concat()
}

/// Bits of a token that one pass sorts by, and what they can be.
const DIGIT_BITS: u32 = 8;
const DIGITS: usize = 1 << DIGIT_BITS;
/// Rows of a block that sorts.
const SLAB: usize = 1024;
const SCAN_THREADS: u32 = 1024;
/// Places of the sorted order of a block that adds.
const PLACES: usize = 16;

static SORT: KernelSource =
    KernelSource::with_headers("token_sort.cu", include_str!("cuda/token_sort.cu"), &[ELEMENT]);
static SUM: KernelSource = KernelSource::with_headers(
    "token_backward.cu",
    include_str!("cuda/token_backward.cu"),
    &[ELEMENT],
);

impl Planned for TokenBackward {
    fn plan(&self) -> Result<Plan, DeviceError> {
        let op = Self::NAME;
        let rows = self.tokens.len();
        let (channels, vocab) = self.sizes()?;
        expect_dtype(DType::I32, &[&self.tokens])?;
        let mut plan = Plan::default();
        if !self.accumulate {
            let (out, value) = (self.dwte.clone(), 0.0);
            plan = Fill { out, value }.plan()?;
        }
        if rows == 0 {
            return Ok(plan);
        }
        let mut scratch = Scratch::default();
        let sort = Sort {
            tokens: &self.tokens,
            rows: count(op, "rows", rows)?,
            vocab: count(op, "tokens of the vocabulary", vocab)?,
        };
        let order = sort.calls(&mut scratch, &mut plan.calls);
        let partials = scratch.take(rows.div_ceil(PLACES) * 2 * channels * size_of::<f32>());
        let width = width(channels, &[&self.dout, &self.dwte]);
        let tiles = (channels / width).div_ceil(THREADS as usize);
        let call = |kernel, dout: &[Arg]| -> Result<Call, DeviceError> {
            let mut args = vec![Arg::Read(self.tokens.clone()), Arg::Scratch(order)];
            args.extend_from_slice(dout);
            args.extend([
                Arg::U32(sort.rows),
                Arg::U32(count(op, "channels", channels)?),
                Arg::U32(sort.vocab),
                Arg::flag(self.accumulate),
            ]);
            // No more threads than there are packs of channels.
            let threads = ((channels / width).next_multiple_of(32) as u32).min(THREADS);
            let tiles = if threads == THREADS { tiles } else { 1 };
            Ok(Call {
                source: &SUM,
                kernel,
                defines: grad_defines(element(op, &self.dout)?, element(op, &self.dwte)?, width),
                grid: Grid {
                    blocks: [sort.rows.div_ceil(PLACES as u32), tiles as u32, 1],
                    ..Grid::linear(1, threads)
                },
                args,
            })
        };
        let (dout, dwte) = (Arg::Read(self.dout.clone()), Arg::Write(self.dwte.clone()));
        let partials = Arg::Scratch(partials);
        plan.calls
            .push(call("token_sum", &[dout, dwte.clone(), partials.clone()])?);
        plan.calls.push(call("token_join", &[partials, dwte])?);
        plan.scratch_bytes = scratch.bytes();
        Ok(plan)
    }
}

/// The order of rows by (token, row).
struct Sort<'a> {
    tokens: &'a Buffer,
    rows: u32,
    vocab: u32,
}

impl Sort<'_> {
    /// Adds its kernels; returns where the order is: `[rows]`, u32.
    fn calls(&self, scratch: &mut Scratch, calls: &mut Vec<Call>) -> usize {
        let slabs = self.rows.div_ceil(SLAB as u32);
        let orders = [(); 2].map(|()| scratch.take(self.rows as usize * size_of::<u32>()));
        let counts = scratch.take(slabs as usize * DIGITS * size_of::<u32>());
        // What is no token sorts as `vocab`.
        let bits = u32::BITS - self.vocab.leading_zeros();
        let passes = bits.div_ceil(DIGIT_BITS).max(1) as usize;
        for pass in 0..passes {
            let order = match pass {
                0 => Arg::Null,
                _ => Arg::Scratch(orders[(pass - 1) % 2]),
            };
            let sizes = [
                Arg::U32(self.rows),
                Arg::U32(slabs),
                Arg::U32(self.vocab),
                Arg::U32(pass as u32 * DIGIT_BITS),
            ];
            let mut call = |kernel, grid, args: Vec<Arg>| {
                calls.push(Call {
                    source: &SORT,
                    kernel,
                    defines: Vec::new(),
                    grid,
                    args,
                });
            };
            let tokens = Arg::Read(self.tokens.clone());
            let mut args = vec![tokens.clone(), order.clone(), Arg::Scratch(counts)];
            args.extend_from_slice(&sizes);
            call("digit_count", Grid::linear(slabs, THREADS), args);
            let total = Arg::U32(slabs * DIGITS as u32);
            let args = vec![Arg::Scratch(counts), total];
            call("digit_scan", Grid::linear(1, SCAN_THREADS), args);
            let sorted = Arg::Scratch(orders[pass % 2]);
            let mut args = vec![tokens, order, Arg::Scratch(counts), sorted];
            args.extend_from_slice(&sizes);
            call("digit_scatter", Grid::linear(slabs, THREADS), args);
        }
        orders[(passes - 1) % 2]
    }
}
