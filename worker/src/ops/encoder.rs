//! From tokens to channels: the row of the token, plus the row of the position.

use super::kernel::{by_dtype, by_dtypes};
use super::linear::add_into;
use super::matrix::MatrixMut;
use super::stored::Stored;
use super::{CpuKernel, expect_len, expect_tokens};
use crate::device::{Buffer, Cpu, DeviceError};

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
    fn compute<S: Stored, G: Stored<Real = S::Real>>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let tokens = self.tokens.host::<i32>()?;
        let channels = channels(Self::NAME, "dout", &self.dout, tokens.len())?;
        let vocab = self.dwte.len() / channels;
        expect_len(Self::NAME, "dwte", self.dwte.len(), vocab * channels)?;
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
    fn compute<S: Stored, G: Stored<Real = S::Real>>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let (positions, channels) = (self.positions, self.channels.max(1));
        let rows = self.dout.len() / channels;
        expect_len(Self::NAME, "dout", self.dout.len(), rows * channels)?;
        expect_positions(Self::NAME, self.dwpe.len() / channels, positions, rows)?;
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
