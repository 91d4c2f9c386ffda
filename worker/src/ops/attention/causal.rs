//! Causal self-attention, exact, by tiles of queries (after Dao et al. 2022).
//!
//! The scores of one tile of one head are the most that exists at a time: `QUERIES × T`, never `T × T` and never of
//! all heads. Forward keeps one number a query, the logarithm of its softmax's denominator, from which backward
//! computes the probabilities again. Where heads of queries share keys and values, the gradients of these are sums over
//! the heads, in their order.
//!
//! The rows of one head lie a whole row of all heads apart. What several tiles read or add to is copied together first.
//! Scratch memory of a thread, in numbers: forward 4·T·D and a tile of scores, 64·(T + 80) at most; backward 8·T·D and two
//! such tiles.

use std::ops::Range;

use super::launches::{BACKWARD, DKV, DQ, FORWARD, Launches, OUT};
use super::panels::{Keys, scores, weighted, with_copies, with_keys};
use super::shape::{AttentionShape, scale};
use crate::memory::{Buffer, DType, DeviceError};
use crate::ops::cpu::kernel::{
    EXPS, Real, by_dtype, kernel, ln, max_of, sum_map, sum_map2, update, with_scratch,
};
use crate::ops::cpu::matrix::{Matrix, MatrixMut, Tile, product};
use crate::ops::cpu::stored::Stored;
use crate::ops::cuda::plan::{Call, Plan, Scratch, expect_dtype};
use crate::ops::{Cpu, DropoutMask, Isa, Operation};

/// Queries of a tile.
const QUERIES: usize = 64;

/// Elements from one row of a tile to the next: whole blocks of exponentials, and a cache line or two more, so that the
/// rows do not fall on one another in the cache.
fn stride_of(width: usize) -> usize {
    width.next_multiple_of(EXPS) + 16
}

/// Calls `work` with the numbers of a head's queries, keys and values: 3·T·D of them in training.
pub(super) fn read_inputs<S: Stored>(
    isa: Isa,
    [q, k, v]: [Matrix<'_, S>; 3],
    work: impl FnOnce([Matrix<'_, S::Real>; 3]),
) {
    S::read_matrix(isa, q, |q| {
        S::read_matrix(isa, k, |k| S::read_matrix(isa, v, |v| work([q, k, v])));
    });
}

/// `out = dropout(softmax(q·kᵀ/√D, over keys not after the query)) · v`, by heads
#[derive(Clone, Debug)]
pub struct AttentionForward {
    /// `[B, T, (H + 2·KV)·D]`: queries, keys, values; within each, the heads one after the other
    pub qkv: Buffer,
    /// `[B, T, H·D]`
    pub out: Buffer,
    /// `[B, H, T]`, f32 (f64 if `out` is): ln Σ e^score, for backward
    pub lse: Buffer,
    /// Sizes.
    pub shape: AttentionShape,
    /// What of the probabilities is dropped; none: nothing.
    pub dropout: Option<DropoutMask>,
}

impl Operation for AttentionForward {
    const NAME: &'static str = "attention_forward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtype!(Self::NAME, self.out.dtype(), S => self.compute::<S>(cpu))
    }

    fn plan(&self) -> Result<Plan, DeviceError> {
        self.check()?;
        expect_dtype(self.out.dtype(), &[&self.qkv])?;
        expect_dtype(DType::F32, &[&self.lse])?;
        let buffers = [&self.out, &self.qkv];
        let launches = Launches::new(Self::NAME, &FORWARD, self.shape, &buffers)?.dropping(self.dropout);
        let add = |call: Call| call.read([&self.qkv]).write([&self.out, &self.lse]);
        Ok(launches.call(&OUT, add)?.into())
    }
}

impl AttentionForward {
    fn check(&self) -> Result<(), DeviceError> {
        self.shape.check(
            Self::NAME,
            &[
                ("qkv", &self.qkv, self.shape.qkv_channels()),
                ("out", &self.out, self.shape.channels()),
                ("lse", &self.lse, self.shape.heads),
            ],
        )
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        self.check()?;
        let shape = self.shape;
        let (positions, heads) = (shape.positions, shape.heads);
        let qkv = self.qkv.host::<S>()?;
        let (mut out, mut lse) = (self.out.host_mut::<S>()?, self.lse.host_mut::<S::Real>()?);
        let qkv = &*qkv;
        let outs = heads_of(shape, &mut out);
        let parts = outs.zip(lse.chunks_mut(positions)).enumerate().collect();
        let isa = cpu.isa();
        cpu.for_each_part(parts, |(i, (mut out, lse)): (usize, (Tile<'_, S>, _))| {
            let pair = [i / heads, i % heads];
            let mask = self.dropout.as_ref().map(|mask| (mask, pair));
            read_inputs(isa, shape.inputs(qkv, pair), |inputs| {
                S::write_matrix(isa, &mut out.out, false, |out| {
                    head_forward(isa, inputs, out, lse, mask);
                });
            });
        });
        Ok(())
    }
}

/// The channels of each head of each sample, of `[B, T, H·D]`.
pub(super) fn heads_of<T>(shape: AttentionShape, out: &mut [T]) -> impl Iterator<Item = Tile<'_, T>> {
    let (positions, channels) = (shape.positions, shape.channels());
    let samples = out.chunks_mut(positions * channels);
    samples.flat_map(move |sample| {
        MatrixMut::dense(sample, positions, channels).tiles(positions, shape.head_size)
    })
}

/// What is dropped of a sample and head.
type HeadMask<'a> = Option<(&'a DropoutMask, [usize; 2])>;

/// Drops numbers of the queries, a row of the tile each, and the keys that each sees.
fn drop_keys<T: Real>(mask: HeadMask<'_>, tile: &mut [T], queries: Range<usize>) {
    let Some((mask, [sample, head])) = mask else {
        return;
    };
    let stride = tile.len() / queries.len();
    for (query, row) in queries.zip(tile.chunks_exact_mut(stride)) {
        mask.drop_keys(sample, head, query, &mut row[..=query]);
    }
}

/// One head of one sample. With more keys than queries, the queries are the last positions.
pub(super) fn head_forward<T: Real>(
    isa: Isa,
    [q, k, v]: [Matrix<'_, T>; 3],
    out: &mut MatrixMut<'_, T>,
    lse: &mut [T],
    mask: HeadMask<'_>,
) {
    let (positions, past) = (out.row_count(), k.row_count() - out.row_count());
    let (size, scale) = (
        QUERIES.min(positions) * stride_of(past + positions),
        scale(q.col_count()),
    );
    let mut work = |q: Matrix<'_, T>, keys: Keys<'_, T>, v: Matrix<'_, T>, tile: &mut [T]| {
        for first in (0..positions).step_by(QUERIES) {
            let end = positions.min(first + QUERIES);
            let (seen, stride) = (past + end, stride_of(past + end));
            let tile = &mut tile[..(end - first) * stride];
            scores(tile, seen, q.rows(first..end), keys, scale);
            softmax_rows(isa, tile, past + first, &mut lse[first..end]);
            drop_keys(mask, tile, past + first..seen);
            let weights = Matrix::new(tile, end - first, seen, stride);
            weighted(&mut out.rows_mut(first..end), weights, v);
        }
    };
    with_copies(positions, [q, k, v], |[q, k, v]| {
        with_keys(positions, k, |keys| {
            with_scratch(size, |tile| work(q, keys, v, tile));
        });
    });
}

kernel! {
    /// From scores to probabilities, and ln Σ e^score of each row. Row `i` is that of query `first + i`. Whole blocks are
    /// computed, and what a query does not see becomes 0 (NaN in a row of NaN).
    fn softmax_rows<'a, T>(scores: &'a mut [T], first: usize, lse: &'a mut [T]) -> () {
        let (width, stride) = (first + lse.len(), scores.len() / lse.len());
        let mut sums = [T::ONE; QUERIES];
        let rows = scores.chunks_exact_mut(stride).zip(&mut *lse).zip(&mut sums);
        // For now `lse` holds the maximum.
        for (i, ((row, lse), total)) in rows.enumerate() {
            let seen = first + i + 1;
            let whole = seen.next_multiple_of(EXPS);
            row[seen..whole].fill(T::LEAST);
            let max = max_of(&row[..whole]);
            for block in row[..whole].as_chunks_mut().0 {
                for score in block.iter_mut() {
                    *score = *score - max;
                }
                T::exp_each(block);
            }
            row[seen..whole.max(width)].fill(T::ZERO);
            let row = &mut row[..whole];
            let sum = sum_map(row, |e| e);
            let share = T::ONE / sum;
            for e in row.iter_mut() {
                *e *= share;
            }
            (*lse, *total) = (max, sum);
        }
        // Apart from the rows, so that a processor computes several at a time.
        for (lse, &sum) in lse.iter_mut().zip(&sums) {
            *lse += T::of(ln(sum.to_f64()));
        }
    }
}

/// Gradients of [`AttentionForward`].
#[derive(Clone, Debug)]
pub struct AttentionBackward {
    /// `[B, T, (H + 2·KV)·D]`
    pub qkv: Buffer,
    /// `[B, T, H·D]`: of forward
    pub out: Buffer,
    /// `[B, H, T]`, f32 (f64 if `out` is): of forward
    pub lse: Buffer,
    /// `[B, T, H·D]`
    pub dout: Buffer,
    /// `[B, T, (H + 2·KV)·D]`
    pub dqkv: Buffer,
    /// Sizes.
    pub shape: AttentionShape,
    /// As in forward.
    pub dropout: Option<DropoutMask>,
}

impl Operation for AttentionBackward {
    const NAME: &'static str = "attention_backward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtype!(Self::NAME, self.dqkv.dtype(), S => self.compute::<S>(cpu))
    }

    fn plan(&self) -> Result<Plan, DeviceError> {
        self.check()?;
        expect_dtype(self.dqkv.dtype(), &[&self.qkv, &self.out, &self.dout])?;
        expect_dtype(DType::F32, &[&self.lse])?;
        let buffers = [&self.dqkv, &self.qkv, &self.out, &self.dout];
        let launches = Launches::new(Self::NAME, &BACKWARD, self.shape, &buffers)?.dropping(self.dropout);
        // Numbers in f32 that the first kernel leaves of each query and head for the second.
        let on_tensor_cores = launches.on_tensor_cores();
        let left = if on_tensor_cores { 2 } else { 1 };
        let mut scratch = Scratch::default();
        let left = scratch.take(left * self.lse.len() * DType::F32.bytes());
        let write = |call: Call| call.write([&self.dqkv]).scratch([left]);
        let queries = launches.call(&DQ, |call| {
            write(call.read([&self.qkv, &self.out, &self.lse, &self.dout]))
        })?;
        let keys = launches.call(&DKV, |call| {
            write(if on_tensor_cores {
                call.read([&self.qkv, &self.dout])
            } else {
                call.read([&self.qkv, &self.lse, &self.dout])
            })
        })?;
        Ok(scratch.plan(vec![queries, keys]))
    }
}

impl AttentionBackward {
    fn check(&self) -> Result<(), DeviceError> {
        let (channels, qkv_channels) = (self.shape.channels(), self.shape.qkv_channels());
        self.shape.check(
            Self::NAME,
            &[
                ("qkv", &self.qkv, qkv_channels),
                ("out", &self.out, channels),
                ("lse", &self.lse, self.shape.heads),
                ("dout", &self.dout, channels),
                ("dqkv", &self.dqkv, qkv_channels),
            ],
        )
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        self.check()?;
        let shape = self.shape;
        let (qkv, out, lse) = (
            self.qkv.host::<S>()?,
            self.out.host::<S>()?,
            self.lse.host::<S::Real>()?,
        );
        let dout = self.dout.host::<S>()?;
        let mut dqkv = self.dqkv.host_mut::<S>()?;
        let forward = Forward {
            qkv: &qkv,
            out: [&out, &dout],
            lse: &lse,
        };
        let parts = dqkv
            .chunks_mut(shape.positions * shape.qkv_channels())
            .flat_map(|sample| groups_of(shape, sample))
            .enumerate()
            .collect();
        let isa = cpu.isa();
        cpu.for_each_part(parts, |(i, group): (usize, GroupGradients<'_, S>)| {
            let [sample, kv_head] = [i / shape.kv_heads, i % shape.kv_heads];
            self.group_backward(isa, forward, group, [sample, kv_head * shape.heads_per_kv()]);
        });
        Ok(())
    }

    /// The heads of queries that share keys and values, in their order; `first_head` is the first.
    fn group_backward<S: Stored>(
        &self,
        isa: Isa,
        forward: Forward<'_, S>,
        group: GroupGradients<'_, S>,
        [sample, first_head]: [usize; 2],
    ) {
        let shape = self.shape;
        let GroupGradients { dq, mut dk, mut dv } = group;
        S::write_copy(isa, &mut dk, false, |dk| {
            S::write_copy(isa, &mut dv, false, |dv| {
                for (member, mut dq) in dq.into_iter().enumerate() {
                    let pair = [sample, first_head + member];
                    let mask = self.dropout.as_ref().map(|mask| (mask, pair));
                    let row = (sample * shape.heads + pair[1]) * shape.positions;
                    let lse = &forward.lse[row..][..shape.positions];
                    let outs = forward.out.map(|out| shape.head(out, pair));
                    read_head(isa, shape.inputs(forward.qkv, pair), outs, |inputs, outs| {
                        S::write_matrix(isa, &mut dq, false, |dq| {
                            let head = AttentionHead {
                                inputs,
                                outs,
                                lse,
                                mask,
                            };
                            let gradients = [dq.whole_mut(), dk.whole_mut(), dv.whole_mut()];
                            head.backward(isa, gradients, member > 0);
                        });
                    });
                }
            });
        });
    }
}

/// What backward reads: `[B, T, (H + 2·KV)·D]`; forward's output and its gradient, `[B, T, H·D]`; `[B, H, T]`.
#[derive(Clone, Copy)]
struct Forward<'a, S: Stored> {
    qkv: &'a [S],
    out: [&'a [S]; 2],
    lse: &'a [S::Real],
}

/// Gradients of the heads of queries that share a head of keys and values, and of that, each `[T, D]`.
struct GroupGradients<'a, T> {
    dq: Vec<MatrixMut<'a, T>>,
    dk: MatrixMut<'a, T>,
    dv: MatrixMut<'a, T>,
}

/// Cuts `[T, (H + 2·KV)·D]` of one sample into the gradients of each head of keys and values, and of its queries.
fn groups_of<T>(shape: AttentionShape, sample: &mut [T]) -> Vec<GroupGradients<'_, T>> {
    let rows = MatrixMut::dense(sample, shape.positions, shape.qkv_channels());
    let tiles = rows.tiles(shape.positions, shape.head_size);
    let mut heads = tiles.into_iter().map(|tile| tile.out);
    let mut dq: Vec<_> = heads.by_ref().take(shape.heads).collect();
    let dk: Vec<_> = heads.by_ref().take(shape.kv_heads).collect();
    let groups = dk.into_iter().zip(heads).map(|(dk, dv)| {
        let dq = dq.drain(..shape.heads_per_kv()).collect();
        GroupGradients { dq, dk, dv }
    });
    groups.collect()
}

/// [`read_inputs`], and the numbers of two more matrices: 5·T·D.
fn read_head<S: Stored>(
    isa: Isa,
    inputs: [Matrix<'_, S>; 3],
    [out, dout]: [Matrix<'_, S>; 2],
    work: impl FnOnce([Matrix<'_, S::Real>; 3], [Matrix<'_, S::Real>; 2]),
) {
    read_inputs(isa, inputs, |inputs| {
        S::read_matrix(isa, out, |out| {
            S::read_matrix(isa, dout, |dout| work(inputs, [out, dout]));
        });
    });
}

/// What backward reads of one head of one sample.
#[derive(Clone, Copy)]
struct AttentionHead<'a, T> {
    /// Queries, keys and values, `[T, D]`.
    inputs: [Matrix<'a, T>; 3],
    /// Forward's output and its gradient, `[T, D]`.
    outs: [Matrix<'a, T>; 2],
    /// `[T]`
    lse: &'a [T],
    mask: HeadMask<'a>,
}

impl<T: Real> AttentionHead<'_, T> {
    /// Gradients of the inputs. The last tile of queries sees all keys and overwrites their gradients, or adds to them; the
    /// tiles before it add to them.
    fn backward(self, isa: Isa, gradients: [MatrixMut<'_, T>; 3], adds: bool) {
        let ([q, k, v], [out, dout]) = (self.inputs, self.outs);
        let queries = q.row_count();
        with_copies(queries, [q, k, v, dout], |[q, k, v, dout]| {
            let (inputs, outs) = ([q, k, v], [out, dout]);
            let head = AttentionHead { inputs, outs, ..self };
            with_keys(queries, k, |keys| {
                with_keys(queries, v, |values| {
                    head.tiles_backward(isa, [keys, values], gradients, adds);
                });
            });
        });
    }

    /// [`AttentionHead::backward`], by tiles.
    fn tiles_backward(
        self,
        isa: Isa,
        [keys, values]: [Keys<'_, T>; 2],
        [mut dq, mut dk, mut dv]: [MatrixMut<'_, T>; 3],
        adds: bool,
    ) {
        let ([q, k, _], [out, dout], mask) = (self.inputs, self.outs, self.mask);
        let positions = dq.row_count();
        let (size, scale) = (
            QUERIES.min(positions) * stride_of(positions),
            scale(q.col_count()),
        );
        with_scratch::<T, _>(2 * size, |scratch| {
            let (probabilities, dscores) = scratch.split_at_mut(size);
            for first in (0..positions).step_by(QUERIES).rev() {
                let end = positions.min(first + QUERIES);
                let (tile, adds) = (first..end, adds || end < positions);
                let (rows, stride) = (tile.len(), stride_of(end));
                let len = rows * stride;
                let (probabilities, dscores) = (&mut probabilities[..len], &mut dscores[..len]);
                let [q, dout, out] = [q, dout, out].map(|all| all.rows(tile.clone()));
                scores(probabilities, end, q, keys, scale);
                scores(dscores, end, dout, values, T::ONE);
                drop_keys(mask, dscores, tile.clone());
                let tiles = [&mut *probabilities, &mut *dscores];
                softmax_rows_back(isa, tiles, [out, dout], first, &self.lse[tile.clone()]);
                drop_keys(mask, probabilities, tile.clone());
                let probabilities = Matrix::new(probabilities, rows, end, stride);
                let dscores = Matrix::new(dscores, rows, end, stride);
                weighted(&mut dq.rows_mut(tile), dscores, k);
                product(&mut dk.rows_mut(0..end), dscores.transposed(), q, T::ONE, adds);
                let probabilities = probabilities.transposed();
                product(&mut dv.rows_mut(0..end), probabilities, dout, T::ONE, adds);
            }
        });
    }
}

kernel! {
    /// `p = e^(score − lse)` and `dscore = p·(dp − Σ dout·out)·scale`, of queries from the first on. `tiles` are
    /// `[queries, keys]`: scores, which become probabilities, and gradients of these, which become those of the scores. Whole
    /// blocks are computed, and what a query does not see becomes 0.
    fn softmax_rows_back<'a, T>(
        tiles: [&'a mut [T]; 2],
        outputs: [Matrix<'a, T>; 2],
        first: usize,
        lse: &'a [T],
    ) -> () {
        let ([probabilities, dscores], [out, dout]) = (tiles, outputs);
        let (width, stride, scale) = (first + lse.len(), probabilities.len() / lse.len(), scale::<T>(out.col_count()));
        let rows = probabilities.chunks_exact_mut(stride).zip(dscores.chunks_exact_mut(stride));
        for (i, ((p, ds), &lse)) in rows.zip(lse).enumerate() {
            let along = sum_map2(dout.row(i), out.row(i), |d, o| d * o);
            let seen = first + i + 1;
            let whole = seen.next_multiple_of(EXPS);
            let blocks = p[..whole].as_chunks_mut().0.iter_mut();
            for (p, ds) in blocks.zip(ds[..whole].as_chunks_mut::<EXPS>().0) {
                for p in p.iter_mut() {
                    *p = *p - lse;
                }
                T::exp_each(p);
                update(ds, p, |ds, p| *ds = p * (*ds - along) * scale);
            }
            let unseen = seen..whole.max(width);
            p[unseen.clone()].fill(T::ZERO);
            ds[unseen].fill(T::ZERO);
        }
    }
}
