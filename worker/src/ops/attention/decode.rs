//! Attention in generation: queries of new positions over the keys and values of all positions so far, which a cache
//! holds. Forward only.
//!
//! Where the new positions are the first ones, it is [`AttentionForward`](super::AttentionForward) without a mask. Later,
//! a GPU divides the keys: each block attends to a part of them, and a second kernel joins the parts (Flash-Decoding, Dao
//! et al. 2023), so that one query of a long text keeps the whole GPU busy. The parts follow from the sizes alone.

use super::causal::{CausalMask, head_forward, heads_of, read_inputs};
use super::launches::{FORWARD, Launches, OUT, check_head};
use super::shape::{AttentionShape, buffers, scale};
use crate::cuda::{Define, Grid, KernelSource};
use crate::memory::{Buffer, DType, DeviceError};
use crate::ops::cpu::kernel::{runs_in, with_scratch};
use crate::ops::cpu::matrix::{Matrix, Tile};
use crate::ops::cpu::stored::Stored;
use crate::ops::cuda::plan::{
    Call, Plan, Scratch, THREADS, count, element, expect_dtype, kernels, vec_define, width,
};
use crate::ops::{Cpu, Operation, expect_len};

/// Appends keys and values to a cache, then attends: `out = softmax(q·kᵀ/√D, over keys 0..=p + t) · v` of query `t`, by
/// heads, where `p` is the position of the first query.
#[derive(Clone, Debug)]
pub struct AttentionDecode {
    /// `[B, T, (H + 2·KV)·D]`: queries, keys and values of the new positions
    pub qkv: Buffer,
    /// `[B, M, KV, D]`: the cache has room for `M` positions, of which `p` are there; `T` follow
    pub keys: Buffer,
    /// `[B, M, KV, D]`
    pub values: Buffer,
    /// `[B, T, H·D]`
    pub out: Buffer,
    /// Sizes; its positions are the new ones.
    pub shape: AttentionShape,
    /// `p`, the same in all samples.
    pub first_position: usize,
}

impl Operation for AttentionDecode {
    const NAME: &'static str = "attention_decode";

    runs_in!(out);

    fn plan(&self) -> Result<Plan, DeviceError> {
        let capacity = self.capacity()?;
        let act = element(Self::NAME, &self.out)?;
        expect_dtype(self.out.dtype(), &[&self.qkv, &self.keys, &self.values])?;
        check_head(Self::NAME, self.shape.head_size)?;
        let append = self.append_call(act, capacity)?;
        let mut scratch = Scratch::default();
        let mut calls = vec![append];
        if self.first_position == 0 {
            let views = self.shape.views(&self.qkv);
            let launches = Launches::new(Self::NAME, &FORWARD, self.shape, &views, &[&self.out, &self.qkv])?;
            let lse = scratch.take(self.shape.rows() * self.shape.heads * DType::F32.bytes());
            let add = |call: Call| call.read(buffers(&views)).write([&self.out]).scratch([lse]);
            calls.push(launches.call(&OUT, add)?);
        } else {
            calls.extend(self.split_calls(act, capacity, &mut scratch)?);
        }
        Ok(scratch.plan(calls))
    }
}

impl AttentionDecode {
    /// Positions that the cache has room for.
    fn capacity(&self) -> Result<usize, DeviceError> {
        let (op, shape) = (Self::NAME, self.shape);
        let buffers = [
            ("qkv", &self.qkv, shape.qkv_channels()),
            ("out", &self.out, shape.channels()),
        ];
        shape.check(op, &buffers)?;
        let capacity = self.keys.len() / (shape.batch * shape.kv_channels());
        let len = capacity * shape.batch * shape.kv_channels();
        expect_len(op, "keys", self.keys.len(), len)?;
        expect_len(op, "values", self.values.len(), len)?;
        let end = self.first_position + shape.positions;
        if end > capacity {
            let what = format!(
                "the cache has room for {capacity} positions, position {} follows",
                end - 1
            );
            return Err(DeviceError::Shape { op, what });
        }
        Ok(capacity)
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let capacity = self.capacity()?;
        let (shape, first) = (self.shape, self.first_position);
        let (kv_channels, end) = (shape.kv_channels(), first + shape.positions);
        let qkv = self.qkv.host::<S>()?;
        let (mut keys, mut values) = (self.keys.host_mut::<S>()?, self.values.host_mut::<S>()?);
        let rows = qkv.chunks_exact(shape.qkv_channels()).enumerate();
        for (row, qkv) in rows {
            let (new_keys, new_values) = qkv[shape.channels()..].split_at(kv_channels);
            let place = row / shape.positions * capacity + first + row % shape.positions;
            let place = place * kv_channels..(place + 1) * kv_channels;
            keys[place.clone()].copy_from_slice(new_keys);
            values[place].copy_from_slice(new_values);
        }
        let (qkv, keys, values) = (&*qkv, &*keys, &*values);
        let mut out = self.out.host_mut::<S>()?;
        let isa = cpu.isa();
        let mut views = shape.views(&self.qkv);
        views[0].first_position = first;
        let parts = heads_of(shape, &mut out).enumerate().collect();
        cpu.for_each_part(parts, |(i, mut out): (usize, Tile<'_, S>)| {
            let (sample, head) = (i / shape.heads, i % shape.heads);
            let [queries, ..] = shape.inputs(&views, [qkv; 3], [sample, head]);
            let first = head / shape.heads_per_kv() * shape.head_size;
            let cached = [keys, values].map(|cache: &[S]| {
                let sample = &cache[sample * capacity * kv_channels..][..end * kv_channels];
                Matrix::dense(sample, end, kv_channels).cols(first..first + shape.head_size)
            });
            read_inputs(isa, [queries, cached[0], cached[1]], |inputs| {
                S::write_matrix(isa, &mut out.out, false, |out| {
                    with_scratch(shape.positions, |lse| {
                        let mask = CausalMask::new(&views, None, [sample, head]);
                        head_forward(isa, inputs, out, lse, mask);
                    });
                });
            });
        });
        Ok(())
    }
}

static SOURCE: KernelSource = kernels("decode.cu", include_str!("../cuda/decode.cu"));

/// Keys of a block, one a thread.
const KEYS: usize = 128;
/// Most query heads that a block serves with the keys and values that it reads.
const MOST_HEADS: usize = 8;

/// Query heads of a block: as many as share keys and values, or a divisor.
fn heads_of_block(heads_per_kv: usize) -> usize {
    let fits = |heads: &usize| heads_per_kv.is_multiple_of(*heads);
    (1..=MOST_HEADS.min(heads_per_kv)).rev().find(fits).unwrap_or(1)
}

fn defines(act: &'static str, head: usize, heads: usize, width: usize) -> Vec<Define> {
    vec![
        Define::Word("ACT", act),
        Define::Number("HEAD", head as i64),
        Define::Number("HEADS", heads as i64),
        vec_define(width),
    ]
}

impl AttentionDecode {
    fn defines(&self, act: &'static str) -> (Vec<Define>, usize) {
        let buffers = [&self.qkv, &self.keys, &self.values, &self.out];
        let width = width(self.shape.head_size, &buffers);
        let heads = heads_of_block(self.shape.heads_per_kv());
        (defines(act, self.shape.head_size, heads, width), width)
    }

    fn append_call(&self, act: &'static str, capacity: usize) -> Result<Call, DeviceError> {
        let (defines, width) = self.defines(act);
        let elements = self.shape.rows() * self.shape.kv_channels();
        let grid = Grid::covering(elements / width, THREADS);
        let call = Call::new(&SOURCE, "cache_append", defines, grid)
            .read([&self.qkv])
            .write([&self.keys, &self.values]);
        let call = self.with_sizes(call, capacity)?;
        Ok(call.u64([elements as u64]))
    }

    /// A kernel that attends to parts of the keys, and one that joins them.
    fn split_calls(
        &self,
        act: &'static str,
        capacity: usize,
        scratch: &mut Scratch,
    ) -> Result<[Call; 2], DeviceError> {
        let (op, shape) = (Self::NAME, self.shape);
        let (defines, _) = self.defines(act);
        let splits = (self.first_position + shape.positions).div_ceil(KEYS);
        let queries = shape.rows() * shape.heads;
        let blocks = queries / heads_of_block(shape.heads_per_kv()) * splits;
        // Of each: sums of values, the greatest score, the sum of exponentials.
        let parts = scratch.take(queries * splits * (shape.head_size + 2) * size_of::<f32>());
        let splits = count(op, "parts of the keys", splits)?;
        let grid = |blocks| Ok::<_, DeviceError>(Grid::linear(count(op, "blocks", blocks)?, KEYS as u32));
        let attend = Call::new(&SOURCE, "attention_decode", defines.clone(), grid(blocks)?)
            .read([&self.qkv, &self.keys, &self.values])
            .scratch([parts]);
        let attend = self.with_sizes(attend, capacity)?;
        let attend = attend.u32([splits]).f32([scale(shape.head_size)]);
        let join = Call::new(&SOURCE, "attention_join", defines, grid(queries)?)
            .scratch([parts])
            .write([&self.out])
            .u32([splits]);
        Ok([attend, join])
    }

    fn with_sizes(&self, call: Call, capacity: usize) -> Result<Call, DeviceError> {
        let op = Self::NAME;
        count(op, "elements of a row", self.shape.qkv_channels())?;
        Ok(call.u32([
            count(op, "positions", self.shape.positions)?,
            count(op, "heads", self.shape.heads)?,
            count(op, "heads of keys and values", self.shape.kv_heads)?,
            count(op, "positions of the cache", capacity)?,
            count(op, "positions before", self.first_position)?,
        ]))
    }
}
