//! Causal self-attention, exact, by tiles of queries (after Dao et al. 2022).
//!
//! The scores of one tile of one head are the most that exists at a time: `QUERIES × T`, never `T × T` and never of
//! all heads. Forward keeps one number a query, the logarithm of its softmax's denominator, from which backward
//! computes the probabilities again.
//!
//! On a GPU, tensor cores do it for bf16 and the usual widths of heads, plain f32 arithmetic for everything else.

use super::cuda::plan::{Call, Plan, Scratch, count, element, expect_dtype, is_aligned, kernels, units_with};
use super::kernel::{Real, by_dtype, kernel, ln, max_of, sum_map, sum_map2, with_scratch};
use super::matrix::{Matrix, MatrixMut, Tile, product};
use super::stored::Stored;
use super::{DropoutMask, Operation, expect_len};
use crate::device::cuda::{CompileUnit, Define, Grid, KernelSource};
use crate::device::{Buffer, Cpu, DType, DeviceError, Isa};

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
    fn head_channels(&self) -> usize {
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

    /// Queries, keys and values of one sample and head, from `qkv`, each `[T, C/H]`.
    fn inputs<'a, T: Copy>(&self, qkv: &'a [T], [sample, head]: [usize; 2]) -> [Matrix<'a, T>; 3] {
        let (t, c, width) = (self.positions, self.channels, self.head_channels());
        let rows = Matrix::dense(&qkv[sample * t * 3 * c..][..t * 3 * c], t, 3 * c);
        [0, 1, 2].map(|part| {
            let first = part * c + head * width;
            rows.cols(first..first + width)
        })
    }

    /// The channels of one sample and head, of `[B, T, C]`.
    fn head<'a, T>(&self, data: &'a [T], [sample, head]: [usize; 2]) -> Matrix<'a, T> {
        let (t, c, width) = (self.positions, self.channels, self.head_channels());
        let rows = Matrix::dense(&data[sample * t * c..][..t * c], t, c);
        rows.cols(head * width..(head + 1) * width)
    }

    /// Factor of the scores: 1/√(channels of a head).
    fn scale<T: Real>(&self) -> T {
        T::of(1.0 / (self.head_channels() as f64).sqrt())
    }
}

/// Calls `work` with the numbers of queries, keys and values of one head: 3·T·C/H of them.
fn read_inputs<S: Stored>(
    isa: Isa,
    [q, k, v]: [Matrix<'_, S>; 3],
    work: impl FnOnce([Matrix<'_, S::Real>; 3]),
) {
    S::read_matrix(isa, q, |q| {
        S::read_matrix(isa, k, |k| S::read_matrix(isa, v, |v| work([q, k, v])));
    });
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

impl Operation for AttentionForward {
    const NAME: &'static str = "attention_forward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtype!(Self::NAME, self.out.dtype(), S => self.compute::<S>(cpu))
    }

    fn plan(&self) -> Result<Plan, DeviceError> {
        self.check()?;
        expect_dtype(self.out.dtype(), &[&self.qkv])?;
        expect_dtype(DType::F32, &[&self.lse])?;
        let launches = Launches {
            op: Self::NAME,
            act: element(Self::NAME, &self.out)?,
            shape: self.shape,
            mask: self.dropout.as_ref(),
            cut: flash_cut(&FORWARD, self.shape, &[&self.qkv, &self.out]),
            flash: &FLASH_FORWARD,
        };
        let call = launches
            .call(["flash_forward", "attention_forward"], [1, 2])?
            .read([&self.qkv])
            .write([&self.out, &self.lse]);
        Ok(launches.with_sizes(call)?.into())
    }
}

impl AttentionForward {
    fn check(&self) -> Result<(), DeviceError> {
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
        let (positions, heads, channels) = (shape.positions, shape.heads, shape.channels);
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
            let mask = self.dropout.as_ref().map(|mask| (mask, pair));
            read_inputs(isa, shape.inputs(qkv, pair), |inputs| {
                S::write_matrix(isa, &mut out.out, false, |out| {
                    head_forward(isa, inputs, (out, lse), shape.scale(), mask);
                });
            });
        });
        Ok(())
    }
}

/// What is dropped of a sample and head.
type HeadMask<'a> = Option<(&'a DropoutMask, [usize; 2])>;

/// Drops numbers of queries `first..end` (rows) and the keys that each sees.
fn drop_keys<T: Real>(mask: HeadMask<'_>, tile: &mut [T], first: usize, end: usize) {
    let Some((mask, [sample, head])) = mask else {
        return;
    };
    for (query, row) in (first..end).zip(tile.chunks_exact_mut(end)) {
        mask.drop_keys(sample, head, query, &mut row[..=query]);
    }
}

/// One head of one sample.
fn head_forward<T: Real>(
    isa: Isa,
    [q, k, v]: [Matrix<'_, T>; 3],
    (out, lse): (&mut MatrixMut<'_, T>, &mut [T]),
    scale: T,
    mask: HeadMask<'_>,
) {
    let positions = out.row_count();
    with_scratch::<T, _>(QUERIES.min(positions) * positions, |scores| {
        for first in (0..positions).step_by(QUERIES) {
            let end = positions.min(first + QUERIES);
            let scores = &mut scores[..(end - first) * end];
            let mut tile = MatrixMut::dense(scores, end - first, end);
            let (queries, keys, values) = (q.rows(first..end), k.rows(0..end), v.rows(0..end));
            product(&mut tile, queries, keys.transposed(), scale, false);
            softmax_rows(isa, scores, first, &mut lse[first..end]);
            drop_keys(mask, scores, first, end);
            let scores = Matrix::dense(scores, end - first, end);
            product(&mut out.rows_mut(first..end), scores, values, T::ONE, false);
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
            let sum = sum_map(row, |e| e);
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

impl Operation for AttentionBackward {
    const NAME: &'static str = "attention_backward";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtype!(Self::NAME, self.dqkv.dtype(), S => self.compute::<S>(cpu))
    }

    fn plan(&self) -> Result<Plan, DeviceError> {
        self.check()?;
        expect_dtype(self.dqkv.dtype(), &[&self.qkv, &self.out, &self.dout])?;
        expect_dtype(DType::F32, &[&self.lse])?;
        let buffers = [&self.qkv, &self.out, &self.dout, &self.dqkv];
        let launches = Launches {
            op: Self::NAME,
            act: element(Self::NAME, &self.dqkv)?,
            shape: self.shape,
            mask: self.dropout.as_ref(),
            cut: flash_cut(&BACKWARD, self.shape, &buffers),
            flash: &FLASH_BACKWARD,
        };
        let queries = launches
            .call(["flash_dq", "attention_dq"], [2, 4])?
            .read([&self.qkv, &self.out, &self.lse, &self.dout]);
        let keys = launches.call(["flash_dkv", "attention_dkv"], [2, 4])?;
        // Numbers in f32 that the first kernel leaves of each query and head for the second.
        let (keys, left) = match launches.cut {
            Some(_) => (keys.read([&self.qkv, &self.dout]), 2),
            None => (keys.read([&self.qkv, &self.lse, &self.dout]), 1),
        };
        let mut scratch = Scratch::default();
        let left = scratch.take(left * self.lse.len() * DType::F32.bytes());
        let whole = |call: Call| launches.with_sizes(call.write([&self.dqkv]).scratch([left]));
        Ok(scratch.plan(vec![whole(queries)?, whole(keys)?]))
    }
}

impl AttentionBackward {
    fn check(&self) -> Result<(), DeviceError> {
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
        let (positions, heads, channels) = (shape.positions, shape.heads, shape.channels);
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
            let pair = [i / heads, i % heads];
            let mask = self.dropout.as_ref().map(|mask| (mask, pair));
            let lse = &lse[i * positions..][..positions];
            read_inputs(isa, shape.inputs(qkv, pair), |inputs| {
                S::read_matrix(isa, shape.head(out, pair), |out| {
                    S::read_matrix(isa, shape.head(dout, pair), |dout| {
                        write_all(isa, gradients, |gradients| {
                            let forward = (inputs, [out, dout], lse);
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
        let AttentionShape { positions, heads, .. } = self.shape;
        let rows = MatrixMut::dense(sample, positions, 3 * self.shape.channels);
        let tiles = rows.tiles(positions, self.shape.head_channels());
        let mut dq: Vec<_> = tiles.into_iter().map(|tile| tile.out).collect();
        let mut dk = dq.split_off(heads);
        let dv = dk.split_off(heads);
        let all = dq.into_iter().zip(dk).zip(dv);
        all.map(|((dq, dk), dv)| [dq, dk, dv]).collect()
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

/// One head of one sample. The last tile of queries sees all keys and overwrites their gradients, the tiles before
/// it add to them.
fn head_backward<T: Real>(
    isa: Isa,
    ([q, k, v], [out, dout], lse): ([Matrix<'_, T>; 3], [Matrix<'_, T>; 2], &[T]),
    gradients: [MatrixMut<'_, T>; 3],
    scale: T,
    mask: HeadMask<'_>,
) {
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
            let [q, dout, out] = [q, dout, out].map(|all| all.rows(tile.clone()));
            let (keys, values) = (k.rows(0..end), v.rows(0..end));
            let shape = |data| MatrixMut::dense(data, tile.len(), end);
            product(&mut shape(probabilities), q, keys.transposed(), scale, false);
            product(&mut shape(dscores), dout, values.transposed(), T::ONE, false);
            drop_keys(mask, dscores, first, end);
            let tiles = [&mut *probabilities, &mut *dscores];
            softmax_rows_back(isa, tiles, [out, dout], (first, &lse[tile.clone()]), scale);
            drop_keys(mask, probabilities, first, end);
            let probabilities = Matrix::dense(probabilities, tile.len(), end);
            let dscores = Matrix::dense(dscores, tile.len(), end);
            product(&mut dq.rows_mut(tile), dscores, keys, T::ONE, false);
            product(&mut dk.rows_mut(0..end), dscores.transposed(), q, T::ONE, later);
            let probabilities = probabilities.transposed();
            product(&mut dv.rows_mut(0..end), probabilities, dout, T::ONE, later);
        }
    });
}

kernel! {
    /// `p = e^(score − lse)` and `dscore = p·(dp − Σ dout·out)·scale`, of queries from the first on. `tiles` are
    /// `[queries, keys]`: scores, which become probabilities, and gradients of these, which become those of the scores.
    fn softmax_rows_back<'a, T>(
        tiles: [&'a mut [T]; 2],
        outputs: [Matrix<'a, T>; 2],
        queries: (usize, &'a [T]),
        scale: T,
    ) -> () {
        let ([probabilities, dscores], [out, dout], (first, lse)) = (tiles, outputs, queries);
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

static PLAIN: KernelSource = kernels("attention.cu", include_str!("cuda/attention.cu"));
static FLASH_FORWARD: KernelSource = kernels("flash_forward.cu", include_str!("cuda/flash_forward.cu"));
static FLASH_BACKWARD: KernelSource = kernels("flash_backward.cu", include_str!("cuda/flash_backward.cu"));

/// Only where there is a mask: without one a kernel is compiled as it always was.
fn mask_define(has_mask: bool) -> Option<Define> {
    has_mask.then(|| Define::number("DROPOUT", 1))
}

/// Bytes of keys and values that the blocks in flight share through the L2 cache, a third of a small one.
const GROUP_BYTES: usize = 16 << 20;

/// Widest head of the plain kernels.
const MAX_HEAD: usize = 256;

/// How a flash kernel is cut: see `flash.cuh`. The numbers are the fastest of those measured on an H200.
#[derive(Clone, Copy, Debug)]
struct TileCut {
    head: usize,
    warps: usize,
    row_tiles: usize,
    step: usize,
    /// Blocks of a multiprocessor, which bounds the registers of a thread.
    blocks: usize,
    /// Backward: columns of scores at a time, and operands that stay in registers.
    part: Option<(usize, usize)>,
}

const fn cut(
    head: usize,
    [warps, row_tiles, step, blocks]: [usize; 4],
    part: Option<(usize, usize)>,
) -> TileCut {
    TileCut {
        head,
        warps,
        row_tiles,
        step,
        blocks,
        part,
    }
}

const FORWARD: [TileCut; 3] = [
    cut(32, [4, 1, 64, 4], None),
    cut(64, [4, 2, 64, 2], None),
    cut(128, [4, 1, 64, 2], None),
];

const BACKWARD: [TileCut; 3] = [
    cut(32, [4, 2, 64, 2], Some((32, 2))),
    cut(64, [4, 2, 64, 2], Some((32, 1))),
    cut(128, [4, 1, 64, 1], Some((32, 1))),
];

impl TileCut {
    /// Queries or keys of a block.
    const fn rows(self) -> usize {
        self.warps * self.row_tiles * 16
    }

    fn grid(self, shape: AttentionShape, own_tiles: usize, op: &'static str) -> Result<Grid, DeviceError> {
        let blocks = shape.batch * shape.heads * shape.positions.div_ceil(self.rows());
        // Own rows, and two steps of two operands.
        let rows = own_tiles * self.rows() + 4 * self.step;
        let grid = Grid::linear(count(op, "blocks", blocks)?, 32 * self.warps as u32);
        Ok(grid.with_shared(rows * self.head * DType::Bf16.bytes()))
    }

    fn defines(self, has_mask: bool) -> Vec<Define> {
        let number = |name, value: usize| Define::number(name, value as i64);
        let mut defines = vec![
            number("HEAD", self.head),
            number("WARPS", self.warps),
            number("ROW_TILES", self.row_tiles),
            number("STEP", self.step),
            number("BLOCKS", self.blocks),
        ];
        if let Some((part, resident)) = self.part {
            defines.extend([number("PART", part), number("RESIDENT", resident)]);
        }
        defines.extend(mask_define(has_mask));
        defines
    }
}

/// The cut for these buffers, if tensor cores can have them: rows must start at multiples of 16 bytes.
fn flash_cut(cuts: &[TileCut], shape: AttentionShape, buffers: &[&Buffer]) -> Option<TileCut> {
    let fits = |buffer: &&Buffer| buffer.dtype() == DType::Bf16 && is_aligned(buffer);
    let cut = cuts.iter().find(|cut| cut.head == shape.head_channels())?;
    buffers.iter().all(fits).then_some(*cut)
}

/// Heads whose blocks start together.
fn group(shape: AttentionShape) -> usize {
    let bytes = 2 * shape.positions * shape.head_channels() * DType::Bf16.bytes();
    (GROUP_BYTES / bytes).clamp(1, shape.batch * shape.heads)
}

/// Queries and keys of a tile of the plain kernels. Up to heads of 176 channels the four operands of backward fit into
/// the 99 KiB that a block has on every card since sm_80.
const fn plain_tile(head: usize) -> usize {
    if head > 80 { 32 } else { 64 }
}

fn plain_defines(act: &'static str, head: usize, has_mask: bool) -> Vec<Define> {
    let mut defines = vec![
        Define::word("ACT", act),
        Define::number("HEAD", head as i64),
        Define::number("TILE", plain_tile(head) as i64),
    ];
    defines.extend(mask_define(has_mask));
    defines
}

/// What the launches of an attention have in common.
struct Launches<'a> {
    op: &'static str,
    act: &'static str,
    shape: AttentionShape,
    mask: Option<&'a DropoutMask>,
    /// None: the plain kernels.
    cut: Option<TileCut>,
    flash: &'static KernelSource,
}

impl Launches<'_> {
    /// A kernel by its names on tensor cores and elsewhere, without arguments. There it has so many tiles of its own
    /// rows in shared memory, elsewhere so many operands.
    fn call(&self, [flash, plain]: [&'static str; 2], tiles: [usize; 2]) -> Result<Call, DeviceError> {
        let (op, shape, has_mask) = (self.op, self.shape, self.mask.is_some());
        if let Some(cut) = self.cut {
            let grid = cut.grid(shape, tiles[0], op)?;
            return Ok(Call::new(self.flash, flash, cut.defines(has_mask), grid));
        }
        let head = shape.head_channels();
        if head > MAX_HEAD {
            let what = format!("heads of {head} channels, on a GPU at most {MAX_HEAD}");
            return Err(DeviceError::Shape { op, what });
        }
        // Channels as these kernels lay them out.
        let (tile, padded) = (plain_tile(head), head.next_multiple_of(16));
        let blocks = shape.batch * shape.heads * shape.positions.div_ceil(tile);
        let words = tiles[1] * tile * (padded + 1) + tile * (tile + 1);
        let threads = (tile / 4) * (tile / 4);
        let grid = Grid::linear(count(op, "blocks", blocks)?, threads as u32);
        let defines = plain_defines(self.act, head, has_mask);
        let grid = grid.with_shared(words * DType::F32.bytes());
        Ok(Call::new(&PLAIN, plain, defines, grid))
    }

    /// Adds what all kernels take after their buffers.
    fn with_sizes(&self, call: Call) -> Result<Call, DeviceError> {
        let (op, shape) = (self.op, self.shape);
        // Within a sample, rows are found by 32-bit arithmetic.
        count(op, "elements of a row", 3 * shape.channels)?;
        let positions = count(op, "positions", shape.positions)?;
        let heads = count(op, "heads", shape.heads)?;
        let pairs = count(op, "heads of all samples", shape.batch * shape.heads)?;
        let group = count(op, "heads of a group", group(shape))?;
        let call = match self.cut {
            Some(_) => call.u32([positions, heads, pairs, group]),
            None => call.u32([positions, heads]),
        };
        let call = call.f32([(1.0 / (shape.head_channels() as f64).sqrt()) as f32]);
        Ok(call.with(self.mask.into_iter().flat_map(DropoutMask::args)))
    }
}

pub(super) fn units() -> Vec<CompileUnit> {
    let flash = [(&FLASH_FORWARD, FORWARD), (&FLASH_BACKWARD, BACKWARD)];
    let of_tiles = |has_mask: bool| {
        flash.map(|(source, cuts)| units_with(source, cuts.map(|cut| cut.defines(has_mask))).into_iter())
    };
    let plain = [("f32", 48), ("f32", 64), ("f32", 96), ("f32", 256), ("bf16", 48)];
    let plain = plain.map(|(act, head)| plain_defines(act, head, false));
    let masked = [("f32", 64), ("bf16", 48)].map(|(act, head)| plain_defines(act, head, true));
    let mut units: Vec<CompileUnit> = [false, true].into_iter().flat_map(of_tiles).flatten().collect();
    units.extend(units_with(&PLAIN, plain.into_iter().chain(masked)));
    units
}
