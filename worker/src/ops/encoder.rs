//! Embeddings: the row of the token plus the row of the position. For the gradient of the token
//! embedding, a GPU sorts the rows by token and adds all rows of one token together.
//!
//! The ranks of a tensor group may hold the table together ([`VocabularyPart`]; Shoeybi et al.
//! 2019, section 3). Each looks up the tokens that it holds, and the first rank adds the positions.
//! The sum over the ranks is bit-identical to the result with the whole table: all summands of an
//! element but one or two are −0, which changes no number, not even +0.

use super::cpu::kernel::{add_into, runs_in};
use super::cpu::matrix::MatrixMut;
use super::cpu::stored::Stored;
use super::cuda::plan::{
    Call, Plan, Scratch, THREADS, count, element, expect_dtype, grad_defines, kernels, width,
};
use super::{Cpu, Fill, Operation, expect_indices, expect_len};
use crate::cuda::{Grid, KernelSource};
use crate::memory::{Buffer, DType, DeviceError};

/// Rows of one part of the forward.
const ROWS: usize = 32;
/// Channels of one part of the backward: a part adds all tokens' gradients, in their order, to its channels.
const WIDTH: usize = 64;

/// The rows of a vocabulary's table, or the logits of a row, that one rank of a tensor group holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VocabularyPart {
    /// The first token of the part.
    pub first: usize,
    /// Number of tokens in the part.
    pub held: usize,
    /// Tokens `V` of the whole vocabulary.
    pub whole: usize,
}

impl VocabularyPart {
    /// The part of the vocabulary for which the buffer `name` of an operation has `found` rows.
    /// Without `part`, it is the whole vocabulary. Refuses a part that is empty, outside of the
    /// vocabulary, or not of the buffer's size.
    pub(super) fn of(
        part: Option<Self>,
        op: &'static str,
        name: &str,
        found: usize,
    ) -> Result<Self, DeviceError> {
        let Some(part) = part else {
            let (first, held, whole) = (0, found, found);
            return Ok(Self { first, held, whole });
        };
        let Self { first, held, whole } = part;
        let what = if held == 0 || first.checked_add(held).is_none_or(|end| end > whole) {
            format!("{held} tokens from token {first} on are not a valid part of a vocabulary of {whole}")
        } else if found != held {
            format!("`{name}` holds {found} tokens, expected {held}")
        } else {
            return Ok(part);
        };
        Err(DeviceError::Shape { op, what })
    }

    /// Index of a token within the part. `None` if another rank holds it.
    pub(super) fn place(&self, token: i32) -> Option<usize> {
        let token = usize::try_from(token).ok()?;
        token.checked_sub(self.first).filter(|&place| place < self.held)
    }

    /// Arguments for kernels: the first token, the number of tokens in the part, and the size of
    /// the vocabulary.
    pub(super) fn counts(&self, op: &'static str) -> Result<[u32; 3], DeviceError> {
        let whole = count(op, "tokens of the vocabulary", self.whole)?;
        // Both are at most that.
        Ok([self.first as u32, self.held as u32, whole])
    }
}

/// `out[b, t] = wte[tokens[b, t]] + wpe[t]`, where the row of a token that another rank holds is −0
#[derive(Clone, Debug)]
pub struct EncoderForward {
    /// `[B, T]`, i32: tokens of the whole vocabulary
    pub tokens: Buffer,
    /// `[V, C]`, or the rows of `part`
    pub wte: Buffer,
    /// `[T, C]` or longer; `None`: no position embedding
    pub wpe: Option<Buffer>,
    /// `[B, T, C]`
    pub out: Buffer,
    /// Positions `T`.
    pub positions: usize,
    /// Which rows `wte` holds; `None`: all.
    pub part: Option<VocabularyPart>,
}

impl Operation for EncoderForward {
    const NAME: &'static str = "encoder_forward";

    runs_in!(out);

    fn plan(&self) -> Result<Plan, DeviceError> {
        let (channels, part) = self.sizes()?;
        expect_dtype(DType::I32, &[&self.tokens])?;
        let mut buffers = vec![&self.wte, &self.out];
        buffers.extend(&self.wpe);
        expect_dtype(self.out.dtype(), &buffers)?;
        let act = element(Self::NAME, &self.out)?;
        let width = width(channels, &buffers);
        let grid = Grid::covering(self.tokens.len() * (channels / width), THREADS);
        let call = Call::new(&SOURCE, Self::NAME, grad_defines(act, act, width), grid)
            .read([&self.tokens, &self.wte])
            .read_if(self.wpe.as_ref())
            .write([&self.out])
            .u32([
                count(Self::NAME, "rows", self.tokens.len())?,
                count(Self::NAME, "channels", channels)?,
                count(Self::NAME, "positions", self.positions.max(1))?,
            ]);
        Ok(call.u32(part.counts(Self::NAME)?).into())
    }
}

impl EncoderForward {
    /// Channels, and the part of the vocabulary that `wte` is.
    fn sizes(&self) -> Result<(usize, VocabularyPart), DeviceError> {
        let rows = self.tokens.len();
        let channels = channels(Self::NAME, "out", &self.out, rows)?;
        let held = self.wte.len() / channels;
        expect_len(Self::NAME, "wte", self.wte.len(), held * channels)?;
        if let Some(wpe) = &self.wpe {
            expect_positions(Self::NAME, wpe.len() / channels, self.positions, rows)?;
        }
        let part = VocabularyPart::of(self.part, Self::NAME, "wte", held)?;
        Ok((channels, part))
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let tokens = self.tokens.host::<i32>()?;
        let (channels, part) = self.sizes()?;
        expect_indices(Self::NAME, "tokens", &tokens, 0, part.whole)?;
        let wte = self.wte.host::<S>()?;
        let wpe = self.wpe.as_ref().map(Buffer::host::<S>).transpose()?;
        let (tokens, wte, wpe) = (&*tokens, &*wte, wpe.as_deref());
        let mut out = self.out.host_mut::<S>()?;
        let parts = out.chunks_mut(ROWS * channels).enumerate().collect();
        let isa = cpu.isa();
        cpu.for_each_part(parts, |(index, out): (usize, &mut [S])| {
            for (i, out) in out.chunks_exact_mut(channels).enumerate() {
                let row = index * ROWS + i;
                let place = part.place(tokens[row]);
                let token = place.map(|place| &wte[place * channels..][..channels]);
                let position = wpe.map(|wpe| &wpe[row % self.positions * channels..][..channels]);
                match (token, position) {
                    (None, None) => out.fill(S::of(-0.0)),
                    (Some(alone), None) | (None, Some(alone)) => out.copy_from_slice(alone),
                    (Some(token), Some(position)) => S::write(isa, out, false, |out| {
                        S::widen(isa, token, out);
                        S::read(isa, position, |position| add_into(isa, position, out));
                    }),
                }
            }
        });
        Ok(())
    }
}

/// `dwte[v] = Σ dout[b, t] over tokens[b, t] = v`, or added to what is there; tokens that another rank holds add nothing
#[derive(Clone, Debug)]
pub struct TokenBackward {
    /// `[B, T]`, i32: tokens of the whole vocabulary
    pub tokens: Buffer,
    /// `[B, T, C]`
    pub dout: Buffer,
    /// `[V, C]`, or the rows of `part`, of type G
    pub dwte: Buffer,
    /// Add to `dwte` instead of overwriting it.
    pub accumulate: bool,
    /// Which rows `dwte` holds; `None`: all.
    pub part: Option<VocabularyPart>,
}

impl Operation for TokenBackward {
    const NAME: &'static str = "token_backward";

    runs_in!(dout, dwte);

    fn plan(&self) -> Result<Plan, DeviceError> {
        let op = Self::NAME;
        let rows = self.tokens.len();
        let (channels, part) = self.sizes()?;
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
        let [first, held, _] = part.counts(op)?;
        let numbers = [count(op, "rows", rows)?, first, held];
        let order = sort(&self.tokens, numbers, &mut scratch, &mut plan.calls);
        let partials = scratch.take(rows.div_ceil(PLACES) * 2 * channels * size_of::<f32>());
        let width = width(channels, &[&self.dout, &self.dwte]);
        let defines = grad_defines(element(op, &self.dout)?, element(op, &self.dwte)?, width);
        // No more threads than there are packs of channels.
        let packs = channels / width;
        let threads = (packs.next_multiple_of(32) as u32).min(THREADS);
        let tiles = packs.div_ceil(threads as usize) as u32;
        let grid = Grid::of([numbers[0].div_ceil(PLACES as u32), tiles, 1], threads);
        let channels = count(op, "channels", channels)?;
        let call = |kernel| {
            let call = Call::new(&SUM, kernel, defines.clone(), grid);
            call.read([&self.tokens]).scratch([order])
        };
        let sizes = |call: Call| {
            let call = call.u32([numbers[0], channels, first, held]);
            call.flag(self.accumulate)
        };
        let sum = call("token_sum").read([&self.dout]).write([&self.dwte]);
        let join = call("token_join").scratch([partials]).write([&self.dwte]);
        plan.calls.push(sizes(sum.scratch([partials])));
        plan.calls.push(sizes(join));
        Ok(scratch.plan(plan.calls))
    }
}

impl TokenBackward {
    /// Channels, and the part of the vocabulary that `dwte` is of.
    fn sizes(&self) -> Result<(usize, VocabularyPart), DeviceError> {
        let channels = channels(Self::NAME, "dout", &self.dout, self.tokens.len())?;
        let held = self.dwte.len() / channels;
        expect_len(Self::NAME, "dwte", self.dwte.len(), held * channels)?;
        let part = VocabularyPart::of(self.part, Self::NAME, "dwte", held)?;
        Ok((channels, part))
    }

    fn compute<S: Stored, G: Stored<Real = S::Real>>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let tokens = self.tokens.host::<i32>()?;
        let (channels, part) = self.sizes()?;
        expect_indices(Self::NAME, "tokens", &tokens, 0, part.whole)?;
        let dout = self.dout.host::<S>()?;
        let mut dwte = self.dwte.host_mut::<G>()?;
        let dout = &*dout;
        // Rows by the place of their token. All rows of a token are added before its sum is rounded.
        let places = tokens.iter().enumerate();
        let mut order: Vec<(usize, usize)> = places
            .filter_map(|(row, &token)| Some((part.place(token)?, row)))
            .collect();
        order.sort_unstable();
        let groups: Vec<&[(usize, usize)]> = order.chunk_by(|a, b| a.0 == b.0).collect();
        let isa = cpu.isa();
        let tiles = MatrixMut::dense(&mut dwte, part.held, channels).tiles(part.held.max(1), WIDTH);
        cpu.for_each_part(tiles, |mut tile| {
            if !self.accumulate {
                for row in 0..tile.out.row_count() {
                    tile.out.row_mut(row).fill(G::zeroed());
                }
            }
            for rows in &groups {
                G::write(isa, tile.out.row_mut(rows[0].0), true, |sum| {
                    for (_, row) in *rows {
                        let dout = &dout[row * channels..][tile.cols.clone()];
                        S::read(isa, dout, |dout| add_into(isa, dout, sum));
                    }
                });
            }
        });
        Ok(())
    }
}

/// `dwpe[first_s + t] = Σ_b dout[s, b, t]`, or added to what is there; all other positions get 0
#[derive(Clone, Debug)]
pub struct PositionBackward {
    /// `[S, B, T, C]`: by stretches of neighbouring positions
    pub dout: Buffer,
    /// `[T, C]` or longer, of type G
    pub dwpe: Buffer,
    /// Add to `dwpe` instead of overwriting it.
    pub accumulate: bool,
    /// The first position of a stretch.
    pub first: usize,
    /// That of the other one, if there are two.
    pub second: Option<usize>,
    /// Positions `T` of a stretch.
    pub positions: usize,
    /// Channels `C`.
    pub channels: usize,
}

impl Operation for PositionBackward {
    const NAME: &'static str = "position_backward";

    runs_in!(dout, dwpe);

    fn plan(&self) -> Result<Plan, DeviceError> {
        let channels = self.channels.max(1);
        let (samples, known) = self.sizes()?;
        let width = width(channels, &[&self.dout, &self.dwpe]);
        let (act, grad) = (element(Self::NAME, &self.dout)?, element(Self::NAME, &self.dwpe)?);
        let grid = Grid::covering(known * (channels / width), THREADS);
        let call = Call::new(&SOURCE, Self::NAME, grad_defines(act, grad, width), grid)
            .read([&self.dout])
            .write([&self.dwpe])
            .u32([
                count(Self::NAME, "samples", samples)?,
                count(Self::NAME, "channels", channels)?,
                count(Self::NAME, "positions", self.positions)?,
                count(Self::NAME, "positions", known)?,
            ]);
        // Without a second one, it begins behind the last position.
        let firsts = [self.first, self.second.unwrap_or(known)].map(|first| first as u32);
        Ok(call.u32(firsts).flag(self.accumulate).into())
    }
}

impl PositionBackward {
    /// Samples of a stretch, and rows of `dwpe`.
    fn sizes(&self) -> Result<(usize, usize), DeviceError> {
        let channels = self.channels.max(1);
        let (rows, known) = (self.dout.len() / channels, self.dwpe.len() / channels);
        expect_len(Self::NAME, "dout", self.dout.len(), rows * channels)?;
        expect_len(Self::NAME, "dwpe", self.dwpe.len(), known * channels)?;
        let of_sample = self.positions * (1 + usize::from(self.second.is_some()));
        expect_positions(Self::NAME, known, of_sample, rows)?;
        let end = self.second.unwrap_or(0).max(self.first) + self.positions;
        expect_positions(Self::NAME, known, end, end)?;
        Ok((rows / of_sample, known))
    }

    fn compute<S: Stored, G: Stored<Real = S::Real>>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let (positions, channels) = (self.positions, self.channels.max(1));
        let (samples, _) = self.sizes()?;
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
                let within = |first| position.checked_sub(first).filter(|at| *at < positions);
                let first = within(self.first);
                let second = || Some(samples * positions + within(self.second?)?);
                if let Some(at) = first.or_else(second) {
                    let rows = dout.chunks_exact(channels).skip(at).step_by(positions);
                    G::write(isa, dwpe, true, |sum| {
                        for row in rows.take(samples) {
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
        let what =
            format!("{rows} rows in samples of {positions} positions do not fit {known} position embeddings");
        return Err(DeviceError::Shape { op, what });
    }
    Ok(())
}

static SOURCE: KernelSource = kernels("encoder.cu", include_str!("cuda/encoder.cu"));

/// Bits of a token that one pass sorts by, and what they can be.
const DIGIT_BITS: u32 = 8;
const DIGITS: usize = 1 << DIGIT_BITS;
/// Rows of a block that sorts.
const SLAB: usize = 1024;
const SCAN_THREADS: u32 = 1024;
/// Places of the sorted order of a block that adds.
const PLACES: usize = 16;

static SORT: KernelSource = kernels("token_sort.cu", include_str!("cuda/token_sort.cu"));
static SUM: KernelSource = kernels("token_backward.cu", include_str!("cuda/token_backward.cu"));

/// Adds the kernels that find the order of rows by (token, row), for the tokens from `first` on that are `held`; all others
/// come last. Returns where the order is: `[rows]`, u32.
fn sort(
    tokens: &Buffer,
    [rows, first, held]: [u32; 3],
    scratch: &mut Scratch,
    calls: &mut Vec<Call>,
) -> usize {
    let slabs = rows.div_ceil(SLAB as u32);
    let orders = [(); 2].map(|()| scratch.take(rows as usize * size_of::<u32>()));
    let counts = scratch.take(slabs as usize * DIGITS * size_of::<u32>());
    // The others sort as `held`.
    let bits = u32::BITS - held.leading_zeros();
    let passes = bits.div_ceil(DIGIT_BITS).max(1) as usize;
    let call = |kernel, grid| Call::new(&SORT, kernel, Vec::new(), grid);
    let each_slab = Grid::linear(slabs, THREADS);
    for pass in 0..passes {
        // The order so far.
        let read = |call: Call| match pass {
            0 => call.read([tokens]).read_if(None),
            _ => call.read([tokens]).scratch([orders[(pass - 1) % 2]]),
        };
        let sizes = [rows, slabs, first, held, pass as u32 * DIGIT_BITS];
        let count = read(call("digit_count", each_slab)).scratch([counts]);
        let scan = call("digit_scan", Grid::linear(1, SCAN_THREADS)).scratch([counts]);
        let scatter = read(call("digit_scatter", each_slab)).scratch([counts, orders[pass % 2]]);
        calls.extend([
            count.u32(sizes),
            scan.u32([slabs * DIGITS as u32]),
            scatter.u32(sizes),
        ]);
    }
    orders[(passes - 1) % 2]
}
