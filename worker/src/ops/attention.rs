//! Causal self-attention, exact, by tiles of queries (after Dao et al. 2022).
//!
//! The scores of one tile of one head are the most that exists at a time: `QUERIES × T`, never `T × T` and never of
//! all heads. Forward keeps one number a query, the logarithm of its softmax's denominator, from which backward
//! computes the probabilities again.

use super::kernel::{Real, ln, max_of, sum_map2};
use super::kernel::{by_dtype, kernel, with_scratch};
use super::matrix::{Matrix, MatrixMut, Tile, product};
use super::stored::Stored;
use super::{CpuKernel, DropoutMask, expect_len};
use crate::device::{Buffer, Cpu, DeviceError, Isa};

/// Queries of a tile.
const QUERIES: usize = 64;

/// Sizes of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Samples `B`.
    pub batch: usize,
    /// Positions `T`.
    pub positions: usize,
    /// Heads `H`.
    pub heads: usize,
    /// Channels `C` of all heads together.
    pub channels: usize,
}

impl AttentionShape {
    /// Channels of one head.
    pub(super) fn head_channels(&self) -> usize {
        self.channels / self.heads
    }

    /// Refuses sizes that do not fit each other; of each buffer, its channels.
    fn check(&self, op: &'static str, buffers: &[(&str, &Buffer, usize)]) -> Result<(), DeviceError> {
        let sizes = [self.batch, self.positions, self.heads, self.channels];
        if sizes.contains(&0) || !self.channels.is_multiple_of(self.heads) {
            let what = format!("{self:?} is no attention");
            return Err(DeviceError::Shape { op, what });
        }
        for (name, buffer, channels) in buffers {
            expect_len(op, name, buffer.len(), self.batch * self.positions * channels)?;
        }
        Ok(())
    }

    /// Queries, keys and values of one sample and head, from `qkv`.
    fn inputs<'a, T: Copy>(&self, qkv: &'a [T], sample: usize, head: usize) -> Inputs<'a, T> {
        let (t, c, width) = (self.positions, self.channels, self.head_channels());
        let rows = Matrix::dense(&qkv[sample * t * 3 * c..][..t * 3 * c], t, 3 * c);
        let [q, k, v] = [0, 1, 2].map(|part| {
            let first = part * c + head * width;
            rows.cols(first..first + width)
        });
        Inputs { q, k, v }
    }

    /// Factor of the scores: 1/√(channels of a head).
    fn scale<T: Real>(&self) -> T {
        T::of(1.0 / (self.head_channels() as f64).sqrt())
    }
}

/// Of one sample and head, each `[T, C/H]`.
#[derive(Clone, Copy)]
struct Inputs<'a, T> {
    q: Matrix<'a, T>,
    k: Matrix<'a, T>,
    v: Matrix<'a, T>,
}

impl<S: Stored> Inputs<'_, S> {
    /// Calls `work` with the numbers: 3·T·C/H of them.
    fn read<R>(self, isa: Isa, work: impl FnOnce(Inputs<'_, S::Real>) -> R) -> R {
        S::read_matrix(isa, self.q, |q| {
            S::read_matrix(isa, self.k, |k| {
                S::read_matrix(isa, self.v, |v| work(Inputs { q, k, v }))
            })
        })
    }
}

/// `out = dropout(softmax(q·kᵀ/√(C/H), over keys not after the query)) · v`, by heads
#[derive(Clone, Debug)]
pub struct AttentionForward {
    /// `[B, T, 3C]`: queries, keys, values; within each, the heads one after the other
    pub qkv: Buffer,
    /// `[B, T, C]`
    pub out: Buffer,
    /// `[B, H, T]`, f32 (f64 if `out` is): ln Σ e^score, for backward
    pub lse: Buffer,
    /// Sizes.
    pub shape: AttentionShape,
    /// What of the probabilities is dropped; none: nothing.
    pub dropout: Option<DropoutMask>,
}

impl CpuKernel for AttentionForward {
    const NAME: &'static str = "attention_forward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtype!(Self::NAME, self.out.dtype(), S => self.compute::<S>(cpu))
    }
}

impl AttentionForward {
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        let (channels, heads) = (self.shape.channels, self.shape.heads);
        self.shape.check(
            Self::NAME,
            &[
                ("qkv", &self.qkv, 3 * channels),
                ("out", &self.out, channels),
                ("lse", &self.lse, heads),
            ],
        )
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let shape = self.shape;
        let AttentionShape {
            positions,
            heads,
            channels,
            ..
        } = shape;
        self.check()?;
        let qkv = self.qkv.host::<S>()?;
        let (mut out, mut lse) = (self.out.host_mut::<S>()?, self.lse.host_mut::<S::Real>()?);
        let outs = out.chunks_mut(positions * channels).flat_map(|sample| {
            MatrixMut::dense(sample, positions, channels).tiles(positions, shape.head_channels())
        });
        let qkv = &*qkv;
        let parts = outs.zip(lse.chunks_mut(positions)).enumerate().collect();
        let isa = cpu.isa();
        cpu.for_each_part(parts, |(i, (mut out, lse)): (usize, (Tile<'_, S>, _))| {
            let pair = [i / heads, i % heads];
            let mask = self.dropout.as_ref().map(|mask| HeadMask { mask, pair });
            shape.inputs(qkv, pair[0], pair[1]).read(isa, |inputs| {
                S::write_matrix(isa, &mut out.out, false, |out| {
                    head_forward(isa, inputs, (out, lse), shape.scale(), mask);
                });
            });
        });
        Ok(())
    }
}

/// What is dropped of one sample and head.
#[derive(Clone, Copy)]
struct HeadMask<'a> {
    mask: &'a DropoutMask,
    pair: [usize; 2],
}

impl HeadMask<'_> {
    /// Drops numbers of queries `first..end` (rows) and the keys that each sees.
    fn drop<T: Real>(&self, tile: &mut [T], first: usize, end: usize) {
        for (query, row) in (first..end).zip(tile.chunks_exact_mut(end)) {
            self.mask
                .drop_keys(self.pair[0], self.pair[1], query, &mut row[..=query]);
        }
    }
}

/// One head of one sample.
fn head_forward<T: Real>(
    isa: Isa,
    inputs: Inputs<'_, T>,
    (out, lse): (&mut MatrixMut<'_, T>, &mut [T]),
    scale: T,
    mask: Option<HeadMask<'_>>,
) {
    let Inputs { q, k, v } = inputs;
    let positions = out.row_count();
    with_scratch::<T, _>(QUERIES.min(positions) * positions, |scores| {
        for first in (0..positions).step_by(QUERIES) {
            let end = positions.min(first + QUERIES);
            let scores = &mut scores[..(end - first) * end];
            let mut tile = MatrixMut::dense(scores, end - first, end);
            product(
                &mut tile,
                q.rows(first..end),
                k.rows(0..end).transposed(),
                scale,
                false,
            );
            softmax_rows(isa, scores, first, &mut lse[first..end]);
            if let Some(mask) = mask {
                mask.drop(scores, first, end);
            }
            let scores = Matrix::dense(scores, end - first, end);
            product(
                &mut out.rows_mut(first..end),
                scores,
                v.rows(0..end),
                T::ONE,
                false,
            );
        }
    });
}

kernel! {
    /// From scores to probabilities, and ln Σ e^score of each row. Row `i` is that of query `first + i`.
    fn softmax_rows<'a, T>(scores: &'a mut [T], first: usize, lse: &'a mut [T]) -> () {
        let width = first + lse.len();
        for (i, (row, lse)) in scores.chunks_exact_mut(width).zip(lse).enumerate() {
            let (row, masked) = row.split_at_mut(first + i + 1);
            masked.fill(T::ZERO);
            let max = max_of(row);
            for score in row.iter_mut() {
                *score = (*score - max).exp();
            }
            let sum = super::kernel::sum_map(row, |e| e);
            let share = T::ONE / sum;
            for e in row.iter_mut() {
                *e *= share;
            }
            *lse = max + T::of(ln(sum.to_f64()));
        }
    }
}

/// Gradients of [`AttentionForward`].
#[derive(Clone, Debug)]
pub struct AttentionBackward {
    /// `[B, T, 3C]`
    pub qkv: Buffer,
    /// `[B, T, C]`: of forward
    pub out: Buffer,
    /// `[B, H, T]`, f32 (f64 if `out` is): of forward
    pub lse: Buffer,
    /// `[B, T, C]`
    pub dout: Buffer,
    /// `[B, T, 3C]`
    pub dqkv: Buffer,
    /// Sizes.
    pub shape: AttentionShape,
    /// As in forward.
    pub dropout: Option<DropoutMask>,
}

impl CpuKernel for AttentionBackward {
    const NAME: &'static str = "attention_backward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtype!(Self::NAME, self.dqkv.dtype(), S => self.compute::<S>(cpu))
    }
}

impl AttentionBackward {
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        let (channels, heads) = (self.shape.channels, self.shape.heads);
        self.shape.check(
            Self::NAME,
            &[
                ("qkv", &self.qkv, 3 * channels),
                ("out", &self.out, channels),
                ("lse", &self.lse, heads),
                ("dout", &self.dout, channels),
                ("dqkv", &self.dqkv, 3 * channels),
            ],
        )
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let shape = self.shape;
        let AttentionShape {
            positions,
            heads,
            channels,
            ..
        } = shape;
        self.check()?;
        let (qkv, out, lse) = (
            self.qkv.host::<S>()?,
            self.out.host::<S>()?,
            self.lse.host::<S::Real>()?,
        );
        let dout = self.dout.host::<S>()?;
        let mut dqkv = self.dqkv.host_mut::<S>()?;
        let (qkv, out, lse, dout) = (&*qkv, &*out, &*lse, &*dout);
        let parts = dqkv
            .chunks_mut(positions * 3 * channels)
            .flat_map(|sample| self.gradients_by_head(sample))
            .enumerate()
            .collect();
        let isa = cpu.isa();
        cpu.for_each_part(parts, |(i, gradients): (usize, [MatrixMut<'_, S>; 3])| {
            let (sample, head) = (i / heads, i % heads);
            let of_head = |data| {
                let width = shape.head_channels();
                let rows = Matrix::<S>::dense(data, positions, channels);
                rows.cols(head * width..(head + 1) * width)
            };
            let range = sample * positions * channels..(sample + 1) * positions * channels;
            let (out, dout) = (of_head(&out[range.clone()]), of_head(&dout[range]));
            let lse = &lse[i * positions..][..positions];
            shape.inputs(qkv, sample, head).read(isa, |inputs| {
                S::read_matrix(isa, out, |out| {
                    S::read_matrix(isa, dout, |dout| {
                        let forward = Forward {
                            inputs,
                            out,
                            lse,
                            dout,
                        };
                        let pair = [sample, head];
                        let mask = self.dropout.as_ref().map(|mask| HeadMask { mask, pair });
                        write_all(isa, gradients, |gradients| {
                            head_backward(isa, forward, gradients, shape.scale(), mask);
                        });
                    });
                });
            });
        });
        Ok(())
    }

    /// Cuts `[T, 3C]` of one sample into the gradients of each head's queries, keys and values.
    fn gradients_by_head<'a, T>(&self, sample: &'a mut [T]) -> Vec<[MatrixMut<'a, T>; 3]> {
        let AttentionShape {
            positions,
            heads,
            channels,
            ..
        } = self.shape;
        let rows = MatrixMut::dense(sample, positions, 3 * channels);
        let mut tiles = rows
            .tiles(positions.max(1), self.shape.head_channels())
            .into_iter();
        let mut third = || {
            tiles
                .by_ref()
                .take(heads)
                .map(|tile| tile.out)
                .collect::<Vec<_>>()
        };
        let (dq, dk, dv) = (third(), third(), third());
        dq.into_iter()
            .zip(dk)
            .zip(dv)
            .map(|((dq, dk), dv)| [dq, dk, dv])
            .collect()
    }
}

/// Calls `work` with memory for the gradients of queries, keys and values of one head: 3·T·C/H numbers.
fn write_all<S: Stored>(
    isa: Isa,
    gradients: [MatrixMut<'_, S>; 3],
    work: impl FnOnce([MatrixMut<'_, S::Real>; 3]),
) {
    let [mut dq, mut dk, mut dv] = gradients;
    S::write_matrix(isa, &mut dq, false, |dq| {
        S::write_matrix(isa, &mut dk, false, |dk| {
            S::write_matrix(isa, &mut dv, false, |dv| {
                work([dq.whole_mut(), dk.whole_mut(), dv.whole_mut()]);
            });
        });
    });
}

/// What the backward of one head reads.
#[derive(Clone, Copy)]
struct Forward<'a, T> {
    inputs: Inputs<'a, T>,
    out: Matrix<'a, T>,
    lse: &'a [T],
    dout: Matrix<'a, T>,
}

/// One head of one sample. The last tile of queries sees all keys and overwrites their gradients, the tiles before
/// it add to them.
fn head_backward<T: Real>(
    isa: Isa,
    forward: Forward<'_, T>,
    gradients: [MatrixMut<'_, T>; 3],
    scale: T,
    mask: Option<HeadMask<'_>>,
) {
    let Forward {
        inputs: Inputs { q, k, v },
        out,
        lse,
        dout,
    } = forward;
    let [mut dq, mut dk, mut dv] = gradients;
    let positions = dq.row_count();
    let size = QUERIES.min(positions) * positions;
    with_scratch::<T, _>(2 * size, |scratch| {
        let (probabilities, dscores) = scratch.split_at_mut(size);
        for first in (0..positions).step_by(QUERIES).rev() {
            let end = positions.min(first + QUERIES);
            let (tile, later) = (first..end, end < positions);
            let len = tile.len() * end;
            let (probabilities, dscores) = (&mut probabilities[..len], &mut dscores[..len]);
            let (q, dout, out) = (
                q.rows(tile.clone()),
                dout.rows(tile.clone()),
                out.rows(tile.clone()),
            );
            let shape = |data| MatrixMut::dense(data, tile.len(), end);
            product(
                &mut shape(probabilities),
                q,
                k.rows(0..end).transposed(),
                scale,
                false,
            );
            product(
                &mut shape(dscores),
                dout,
                v.rows(0..end).transposed(),
                T::ONE,
                false,
            );
            if let Some(mask) = mask {
                mask.drop(dscores, first, end);
            }
            let rows = TileRows {
                probabilities: &mut *probabilities,
                dscores: &mut *dscores,
                first,
                lse: &lse[tile.clone()],
                out,
                dout,
            };
            softmax_rows_back(isa, rows, scale);
            if let Some(mask) = mask {
                mask.drop(probabilities, first, end);
            }
            let probabilities = Matrix::dense(probabilities, tile.len(), end);
            let dscores = Matrix::dense(dscores, tile.len(), end);
            product(&mut dq.rows_mut(tile), dscores, k.rows(0..end), T::ONE, false);
            product(&mut dk.rows_mut(0..end), dscores.transposed(), q, T::ONE, later);
            product(
                &mut dv.rows_mut(0..end),
                probabilities.transposed(),
                dout,
                T::ONE,
                later,
            );
        }
    });
}

/// A tile on its way from scores to their gradients.
struct TileRows<'a, T> {
    /// `[queries, keys]`: scores, become probabilities.
    probabilities: &'a mut [T],
    /// `[queries, keys]`: gradients of the probabilities, become those of the scores.
    dscores: &'a mut [T],
    /// First query.
    first: usize,
    lse: &'a [T],
    out: Matrix<'a, T>,
    dout: Matrix<'a, T>,
}

kernel! {
    /// `p = e^(score − lse)` and `dscore = p·(dp − Σ dout·out)·scale`
    fn softmax_rows_back<'a, T>(tile: TileRows<'a, T>, scale: T) -> () {
        let TileRows { probabilities, dscores, first, lse, out, dout } = tile;
        let width = first + lse.len();
        let rows = probabilities.chunks_exact_mut(width).zip(dscores.chunks_exact_mut(width));
        for (i, ((p, ds), &lse)) in rows.zip(lse).enumerate() {
            let (p, masked) = p.split_at_mut(first + i + 1);
            masked.fill(T::ZERO);
            let (ds, masked) = ds.split_at_mut(first + i + 1);
            masked.fill(T::ZERO);
            let along = sum_map2(dout.row(i), out.row(i), |d, o| d * o);
            for (p, ds) in p.iter_mut().zip(ds) {
                *p = (*p - lse).exp();
                *ds = *p * (*ds - along) * scale;
            }
        }
    }
}
