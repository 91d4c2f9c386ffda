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
use super::shape::{AttentionShape, HeadsView, buffers, host, scale};
use crate::memory::{Buffer, DType, DeviceError, HostMut};
use crate::ops::cpu::kernel::{
    EXPS, Real, by_dtypes, kernel, ln, max_of, sum_map, sum_map2, update, with_scratch,
};
use crate::ops::cpu::matrix::{Matrix, MatrixMut, Tile, product};
use crate::ops::cpu::stored::Stored;
use crate::ops::cuda::plan::{Arg, Call, Plan, Scratch, expect_dtype};
use crate::ops::{Cpu, DropoutMask, Isa, Operation, expect_len};

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
    /// Queries, keys, values; the queries may be fewer
    pub qkv: [HeadsView; 3],
    /// `[B, T, H·D]`, of their type or f32
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
        let [q, ..] = &self.qkv;
        by_dtypes!(Self::NAME, q.buffer.dtype(), self.out.dtype(), (S, G) => self.compute::<S, G>(cpu))
    }

    fn plan(&self) -> Result<Plan, DeviceError> {
        self.check(Self::NAME)?;
        let [q, k, v] = buffers(&self.qkv);
        expect_dtype(q.dtype(), &[k, v])?;
        expect_dtype(DType::F32, &[&self.lse])?;
        let launches = Launches::new(Self::NAME, &FORWARD, self.shape, &self.qkv, &[q, k, v, &self.out])?;
        let launches = launches.dropping(self.dropout);
        let add = |call: Call| call.read([q, k, v]).write([&self.out, &self.lse]);
        Ok(launches.call(&OUT, add)?.into())
    }
}

impl AttentionForward {
    /// Of `op`, which may be its backward.
    fn check(&self, op: &'static str) -> Result<(), DeviceError> {
        let outputs = [
            ("out", &self.out, self.shape.channels()),
            ("lse", &self.lse, self.shape.heads),
        ];
        self.shape.check(op, &outputs)?;
        self.shape.check_views(op, &self.qkv)
    }

    fn compute<S: Stored, G: Stored<Real = S::Real>>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        self.check(Self::NAME)?;
        let shape = self.shape;
        let (positions, heads) = (shape.positions, shape.heads);
        let qkv = host::<S>(&self.qkv)?;
        let (mut out, mut lse) = (self.out.host_mut::<G>()?, self.lse.host_mut::<S::Real>()?);
        let qkv = qkv.each_ref().map(|data| &**data);
        let outs = heads_of(shape, &mut out);
        let parts = outs.zip(lse.chunks_mut(positions)).enumerate().collect();
        let isa = cpu.isa();
        cpu.for_each_part(parts, |(i, (mut out, lse)): (usize, (Tile<'_, G>, _))| {
            let pair = [i / heads, i % heads];
            let mask = CausalMask::new(&self.qkv, self.dropout.as_ref(), pair);
            read_inputs(isa, shape.inputs(&self.qkv, qkv, pair), |inputs| {
                G::write_matrix(isa, &mut out.out, false, |out| {
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

/// Which keys the queries of a head of a sample see, and what is dropped of these.
#[derive(Clone, Copy)]
pub(super) struct CausalMask<'a> {
    /// Positions.
    first_query: usize,
    first_key: usize,
    dropout: Option<(&'a DropoutMask, [usize; 2])>,
}

impl<'a> CausalMask<'a> {
    pub(super) fn new(
        [q, k, _]: &[HeadsView; 3],
        dropout: Option<&'a DropoutMask>,
        pair: [usize; 2],
    ) -> Self {
        Self {
            first_query: q.first_position,
            first_key: k.first_position,
            dropout: dropout.map(|mask| (mask, pair)),
        }
    }

    /// Keys before that of the first query.
    fn past(&self) -> usize {
        self.first_query - self.first_key
    }

    /// Drops numbers of the queries, a row of the tile each, and the keys that each sees. `span` begins at the key of the
    /// first query, and ends behind the keys that any sees.
    fn drop_keys<T: Real>(&self, tile: &mut [T], stride: usize, span: Range<usize>) {
        let Some((mask, pair)) = self.dropout else {
            return;
        };
        for (key, row) in (span.start..).zip(tile.chunks_exact_mut(stride)) {
            let seen = span.end.min(key + 1);
            mask.drop_keys(pair, [self.first_key + key, self.first_key], &mut row[..seen]);
        }
    }
}

/// One head of one sample.
pub(super) fn head_forward<T: Real>(
    isa: Isa,
    [q, k, v]: [Matrix<'_, T>; 3],
    out: &mut MatrixMut<'_, T>,
    lse: &mut [T],
    mask: CausalMask<'_>,
) {
    let (positions, key_count, past) = (out.row_count(), k.row_count(), mask.past());
    let (size, scale) = (
        QUERIES.min(positions) * stride_of(key_count.min(past + positions)),
        scale(q.col_count()),
    );
    let mut work = |q: Matrix<'_, T>, keys: Keys<'_, T>, v: Matrix<'_, T>, tile: &mut [T]| {
        for first in (0..positions).step_by(QUERIES) {
            let end = positions.min(first + QUERIES);
            let seen = key_count.min(past + end);
            let (span, stride) = (past + first..seen, stride_of(seen));
            let tile = &mut tile[..(end - first) * stride];
            scores(tile, span.clone(), q.rows(first..end), keys, scale);
            softmax_rows(isa, tile, span.clone(), &mut lse[first..end]);
            mask.drop_keys(tile, stride, span);
            let weights = Matrix::new(tile, end - first, seen, stride);
            weighted(&mut out.rows_mut(first..end), past + first, weights, v, false);
        }
    };
    with_copies(positions, [q, k, v], |[q, k, v]| {
        with_keys(positions, k, |keys| {
            with_scratch(size, |tile| work(q, keys, v, tile));
        });
    });
}

kernel! {
    /// From scores to probabilities, and ln Σ e^score of each row. Row `i` sees the keys up to `span.start + i`, of the
    /// first `span.end`. Whole blocks are computed, and what a query does not see becomes 0 (NaN in a row of NaN).
    fn softmax_rows<'a, T>(scores: &'a mut [T], span: Range<usize>, lse: &'a mut [T]) -> () {
        let (width, stride) = (span.end, scores.len() / lse.len());
        let mut sums = [T::ONE; QUERIES];
        let rows = scores.chunks_exact_mut(stride).zip(&mut *lse).zip(&mut sums);
        // For now `lse` holds the maximum.
        for (i, ((row, lse), total)) in rows.enumerate() {
            let seen = width.min(span.start + i + 1);
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

/// Gradients of [`AttentionForward`]. Over a part of the keys of a query, of which `out` and `lse` are those of all its keys:
/// the part's share of these gradients.
#[derive(Clone, Debug)]
pub struct AttentionBackward {
    /// Its inputs and outputs.
    pub forward: AttentionForward,
    /// `[B, T, H·D]`
    pub dout: Buffer,
    /// Of queries, keys and values, of their type or all f32: of keys that no query sees, zeros. Views of one buffer, or of
    /// buffers without a common element.
    pub dqkv: [HeadsView; 3],
    /// Add to what is there.
    pub accumulate: bool,
}

impl Operation for AttentionBackward {
    const NAME: &'static str = "attention_backward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let [dq, ..] = &self.dqkv;
        by_dtypes!(Self::NAME, self.dout.dtype(), dq.buffer.dtype(), (S, G) => self.compute::<S, G>(cpu))
    }

    fn plan(&self) -> Result<Plan, DeviceError> {
        self.check()?;
        let AttentionForward { qkv, out, lse, .. } = &self.forward;
        let ([q, k, v], [dq, dk, dv]) = (buffers(qkv), buffers(&self.dqkv));
        let [dq_view, dk_view, dv_view] = self.dqkv.each_ref().map(HeadsView::words);
        let all = [out, &self.dout, q, k, v, dq, dk, dv];
        expect_dtype(out.dtype(), &all[..5])?;
        expect_dtype(dv.dtype(), &[dq, dk])?;
        expect_dtype(DType::F32, &[lse])?;
        let launches = Launches::new(Self::NAME, &BACKWARD, self.forward.shape, qkv, &all)?;
        let launches = launches.dropping(self.forward.dropout);
        // Numbers in f32 that the first kernel leaves of each query and head for the second.
        let on_tensor_cores = launches.on_tensor_cores();
        let left = if on_tensor_cores { 2 } else { 1 };
        let mut scratch = Scratch::default();
        let left = scratch.take(left * lse.len() * DType::F32.bytes());
        let queries = launches.call(&DQ, |call| {
            let call = call.read([q, k, v, out, lse, &self.dout]).write([dq]);
            call.scratch([left]).u64([dq_view]).flag(self.accumulate)
        })?;
        let keys = launches.call(&DKV, |call| {
            let lse = (!on_tensor_cores).then(|| Arg::Read(lse.clone()));
            let call = call.read([q, k, v]).with(lse).read([&self.dout]);
            let call = call.write([dk, dv]).scratch([left]);
            call.u64([dk_view, dv_view]).flag(self.accumulate)
        })?;
        Ok(scratch.plan(vec![queries, keys]))
    }
}

impl AttentionBackward {
    fn check(&self) -> Result<(), DeviceError> {
        self.forward.check(Self::NAME)?;
        expect_len(Self::NAME, "dout", self.dout.len(), self.forward.out.len())?;
        self.forward.shape.check_views(Self::NAME, &self.dqkv)
    }

    fn compute<S: Stored, G: Stored<Real = S::Real>>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        self.check()?;
        let (isa, forward, accumulate) = (cpu.isa(), &self.forward, self.accumulate);
        let shape = forward.shape;
        let (qkv, lse) = (host::<S>(&forward.qkv)?, forward.lse.host::<S::Real>()?);
        let (out, dout) = (forward.out.host::<S>()?, self.dout.host::<S>()?);
        let (qkv, outs, lse) = (qkv.each_ref().map(|data| &**data), [&*out, &*dout], &*lse);
        // Of views of one buffer, only the first borrows it.
        let mut borrowed: Vec<(&HeadsView, HostMut<'_, G>)> = Vec::new();
        for view in &self.dqkv {
            if borrowed.iter().all(|(first, _)| !first.buffer.same(&view.buffer)) {
                borrowed.push((view, view.buffer.host_mut()?));
            }
        }
        let groups = groups_of(shape, &self.dqkv, &mut borrowed);
        let parts = groups.into_iter().enumerate().collect();
        // The heads of queries that share keys and values, in their order.
        cpu.for_each_part(parts, |(i, group): (usize, GroupGradients<'_, G>)| {
            let GroupGradients { dq, mut dk, mut dv } = group;
            let (sample, first_head) = (i / shape.kv_heads, i % shape.kv_heads * shape.heads_per_kv());
            G::write_copy(isa, &mut dk, accumulate, |dk| {
                G::write_copy(isa, &mut dv, accumulate, |dv| {
                    for (member, mut dq) in dq.into_iter().enumerate() {
                        let pair = [sample, first_head + member];
                        let row = (sample * shape.heads + pair[1]) * shape.positions;
                        let inputs = shape.inputs(&forward.qkv, qkv, pair);
                        read_head(
                            isa,
                            inputs,
                            outs.map(|out| shape.head(out, pair)),
                            |inputs, outs| {
                                let head = AttentionHead {
                                    inputs,
                                    outs,
                                    lse: &lse[row..][..shape.positions],
                                    mask: CausalMask::new(&forward.qkv, forward.dropout.as_ref(), pair),
                                };
                                G::write_matrix(isa, &mut dq, accumulate, |dq| {
                                    let gradients = [dq.whole_mut(), dk.whole_mut(), dv.whole_mut()];
                                    head.backward(isa, gradients, [accumulate, accumulate || member > 0]);
                                });
                            },
                        );
                    }
                });
            });
        });
        Ok(())
    }
}

/// Gradients of the heads of queries that share a head of keys and values, and of that, each `[T, D]`.
struct GroupGradients<'a, T> {
    dq: Vec<MatrixMut<'a, T>>,
    dk: MatrixMut<'a, T>,
    dv: MatrixMut<'a, T>,
}

/// Cuts the buffers of the views into the gradients of each head of keys and values, and of its queries.
fn groups_of<'a, S: Stored>(
    shape: AttentionShape,
    [dq, dk, dv]: &[HeadsView; 3],
    buffers: &'a mut [(&HeadsView, HostMut<'_, S>)],
) -> Vec<GroupGradients<'a, S>> {
    let cut = buffers.iter_mut().map(|(view, data)| {
        let rows = data.len() / view.stride;
        let tiles = MatrixMut::dense(data, rows, view.stride).tiles(view.rows(&shape), shape.head_size);
        let heads: Vec<_> = tiles.into_iter().map(|tile| Some(tile.out)).collect();
        (&view.buffer, heads)
    });
    let mut cut: Vec<_> = cut.collect();
    let mut take = |view: &HeadsView, [sample, head]: [usize; 2]| {
        let of_view = cut.iter_mut().find(|(buffer, _)| buffer.same(&view.buffer));
        let at = (sample * view.stride + view.offset) / shape.head_size + head;
        let head = of_view.and_then(|(_, heads)| heads[at].take());
        head.expect("views of a buffer have no element in common")
    };
    let group = |i: usize| {
        let (sample, kv_head, members) = (i / shape.kv_heads, i % shape.kv_heads, shape.heads_per_kv());
        let heads = kv_head * members..(kv_head + 1) * members;
        GroupGradients {
            dq: heads.map(|head| take(dq, [sample, head])).collect(),
            dk: take(dk, [sample, kv_head]),
            dv: take(dv, [sample, kv_head]),
        }
    };
    (0..shape.batch * shape.kv_heads).map(group).collect()
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
    mask: CausalMask<'a>,
}

impl<T: Real> AttentionHead<'_, T> {
    /// Gradients of the inputs, or added to those of queries, and of keys and values. The last tile of queries sees all
    /// keys and overwrites their gradients, or adds to them; the tiles before it add to them.
    fn backward(self, isa: Isa, gradients: [MatrixMut<'_, T>; 3], adds: [bool; 2]) {
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
        [adds_dq, adds]: [bool; 2],
    ) {
        let ([q, k, _], [out, dout], mask) = (self.inputs, self.outs, self.mask);
        let (positions, key_count, past) = (dq.row_count(), dk.row_count(), mask.past());
        let most = key_count.min(past + positions);
        let (size, scale) = (QUERIES.min(positions) * stride_of(most), scale(q.col_count()));
        for row in if adds { key_count } else { most }..key_count {
            dk.row_mut(row).fill(T::ZERO);
            dv.row_mut(row).fill(T::ZERO);
        }
        with_scratch::<T, _>(2 * size, |scratch| {
            let (probabilities, dscores) = scratch.split_at_mut(size);
            for first in (0..positions).step_by(QUERIES).rev() {
                let end = positions.min(first + QUERIES);
                let (tile, adds) = (first..end, adds || end < positions);
                let seen = key_count.min(past + end);
                let (rows, stride, span) = (tile.len(), stride_of(seen), past + first..seen);
                let len = rows * stride;
                let (probabilities, dscores) = (&mut probabilities[..len], &mut dscores[..len]);
                let [q, dout, out] = [q, dout, out].map(|all| all.rows(tile.clone()));
                scores(probabilities, span.clone(), q, keys, scale);
                scores(dscores, span.clone(), dout, values, T::ONE);
                mask.drop_keys(dscores, stride, span.clone());
                let tiles = [&mut *probabilities, &mut *dscores];
                softmax_rows_back(isa, tiles, [out, dout], span.clone(), &self.lse[tile.clone()]);
                mask.drop_keys(probabilities, stride, span);
                let probabilities = Matrix::new(probabilities, rows, seen, stride);
                let dscores = Matrix::new(dscores, rows, seen, stride);
                let mut dq = dq.rows_mut(tile);
                weighted(&mut dq, past + first, dscores, k, adds_dq);
                product(&mut dk.rows_mut(0..seen), dscores.transposed(), q, T::ONE, adds);
                let probabilities = probabilities.transposed();
                product(&mut dv.rows_mut(0..seen), probabilities, dout, T::ONE, adds);
            }
        });
    }
}

kernel! {
    /// `p = e^(score − lse)` and `dscore = p·(dp − Σ dout·out)·scale`, of queries that see the keys of `span` as in
    /// [`softmax_rows`]. `tiles` are `[queries, keys]`: scores, which become probabilities, and gradients of these, which become those of the scores. Whole
    /// blocks are computed, and what a query does not see becomes 0.
    fn softmax_rows_back<'a, T>(
        tiles: [&'a mut [T]; 2],
        outputs: [Matrix<'a, T>; 2],
        span: Range<usize>,
        lse: &'a [T],
    ) -> () {
        let ([probabilities, dscores], [out, dout]) = (tiles, outputs);
        let (width, stride, scale) = (span.end, probabilities.len() / lse.len(), scale::<T>(out.col_count()));
        let rows = probabilities.chunks_exact_mut(stride).zip(dscores.chunks_exact_mut(stride));
        for (i, ((p, ds), &lse)) in rows.zip(lse).enumerate() {
            let along = sum_map2(dout.row(i), out.row(i), |d, o| d * o);
            let seen = width.min(span.start + i + 1);
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
