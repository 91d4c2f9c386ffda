//! Sizes of an attention, and where the queries, keys and values of a head lie.

use crate::memory::{Buffer, DeviceError, HostRef};
use crate::ops::cpu::kernel::Real;
use crate::ops::cpu::matrix::Matrix;
use crate::ops::cpu::stored::Stored;
use crate::ops::cuda::plan::count;
use crate::ops::expect_len;

/// The heads of queries, keys or values of all samples: in rows of a buffer, `[B, T, stride]`, which other views may share.
#[derive(Clone, Debug)]
pub struct HeadsView {
    /// All rows, without a gap between samples.
    pub buffer: Buffer,
    /// Elements from one row to the next: a multiple of `D`.
    pub stride: usize,
    /// Elements of a row before the first head: a multiple of `D`.
    pub offset: usize,
    /// Position of the first row of each sample; the others follow.
    pub first_position: usize,
}

impl HeadsView {
    /// Rows of a sample.
    pub(super) fn rows(&self, shape: &AttentionShape) -> usize {
        self.buffer.len() / (shape.batch * self.stride.max(1))
    }

    /// A head of a sample, `[T, D]`; `data` are the buffer's elements.
    pub(super) fn head<'a, T>(
        &self,
        shape: &AttentionShape,
        data: &'a [T],
        [sample, head]: [usize; 2],
    ) -> Matrix<'a, T> {
        let (rows, size) = (self.rows(shape), shape.head_size);
        let first = self.offset + head * size;
        let of_sample = &data[sample * rows * self.stride..][..rows * self.stride];
        Matrix::dense(of_sample, rows, self.stride).cols(first..first + size)
    }

    /// `View` of the kernels: two words, the offset first.
    pub(super) fn words(&self, op: &'static str) -> Result<u64, DeviceError> {
        // Within a sample, rows are found by 32-bit arithmetic.
        let stride = count(op, "elements of a row", self.stride)?;
        Ok(u64::from(stride) << 32 | self.offset as u64)
    }
}

/// The buffers of queries, keys and values.
pub(super) fn buffers([q, k, v]: &[HeadsView; 3]) -> [&Buffer; 3] {
    [&q.buffer, &k.buffer, &v.buffer]
}

/// The elements of queries, keys and values.
pub(super) fn host<S: Stored>(views: &[HeadsView; 3]) -> Result<[HostRef<'_, S>; 3], DeviceError> {
    let [q, k, v] = buffers(views);
    Ok([q.host()?, k.host()?, v.host()?])
}

/// Sizes of an attention. Query head `h` reads the head `h / (H / KV)` of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Samples `B`.
    pub batch: usize,
    /// Positions `T`.
    pub positions: usize,
    /// Heads of queries `H`.
    pub heads: usize,
    /// Heads of keys and values `KV`: a divisor of `H`.
    pub kv_heads: usize,
    /// Channels of one head `D`.
    pub head_size: usize,
}

impl AttentionShape {
    /// Channels of all heads of queries, and of the output: `H·D`. Their number may differ from the
    /// model's channels.
    pub const fn channels(&self) -> usize {
        self.heads * self.head_size
    }

    /// Channels of all heads of keys: `KV·D`.
    pub const fn kv_channels(&self) -> usize {
        self.kv_heads * self.head_size
    }

    /// Channels of queries, keys and values together: `(H + 2·KV)·D`.
    pub const fn qkv_channels(&self) -> usize {
        self.channels() + 2 * self.kv_channels()
    }

    /// Rows of samples and positions: `B·T`.
    pub const fn rows(&self) -> usize {
        self.batch * self.positions
    }

    /// Heads of queries that read one head of keys and values.
    pub(super) const fn heads_per_kv(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Refuses sizes that do not fit each other. `buffers` gives the name and the channels of each
    /// buffer.
    pub(super) fn check(
        &self,
        op: &'static str,
        buffers: &[(&str, &Buffer, usize)],
    ) -> Result<(), DeviceError> {
        let sizes = [
            self.batch,
            self.positions,
            self.heads,
            self.kv_heads,
            self.head_size,
        ];
        if sizes.contains(&0) {
            let what = format!("sizes must be at least 1, but are {self:?}");
            return Err(DeviceError::Shape { op, what });
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let (heads, kv_heads) = (self.heads, self.kv_heads);
            let what = format!("{heads} heads cannot share {kv_heads} heads of keys and values evenly");
            return Err(DeviceError::Shape { op, what });
        }
        for (name, buffer, channels) in buffers {
            expect_len(op, name, buffer.len(), self.rows() * channels)?;
        }
        Ok(())
    }

    /// Queries, keys and values in one buffer, `[B, T, (H + 2·KV)·D]`, as the fused projection leaves them.
    pub fn views(&self, qkv: &Buffer) -> [HeadsView; 3] {
        let keys = self.channels();
        [0, keys, keys + self.kv_channels()].map(|offset| HeadsView {
            buffer: qkv.clone(),
            stride: self.qkv_channels(),
            offset,
            first_position: 0,
        })
    }

    /// Refuses views that do not fit the sizes, or each other.
    pub(super) fn check_views(&self, op: &'static str, [q, k, v]: &[HeadsView; 3]) -> Result<(), DeviceError> {
        let keys = k.rows(self).max(1);
        let parts = [
            ("queries", q, self.heads, self.positions),
            ("keys", k, self.kv_heads, keys),
            ("values", v, self.kv_heads, keys),
        ];
        for (name, view, heads, rows) in parts {
            let (size, stride, offset) = (self.head_size, view.stride, view.offset);
            let in_heads = stride.is_multiple_of(size) && offset.is_multiple_of(size);
            if !in_heads || offset + heads * size > stride {
                let what = format!("{name}: {heads} heads of {size} from element {offset} of rows of {stride}");
                return Err(DeviceError::Shape { op, what });
            }
            expect_len(op, name, view.buffer.len(), self.batch * rows * stride)?;
        }
        let [q, k, v] = [q, k, v].map(|view| view.first_position);
        if k != v || k > q || !k.is_multiple_of(KEY_GROUP) {
            let what = format!(
                "queries from position {q} on, keys from {k}, values from {v}: \
                 keys and values must start together, at a multiple of {KEY_GROUP}, and not after the queries"
            );
            return Err(DeviceError::Shape { op, what });
        }
        Ok(())
    }

    /// What a query head of a sample reads: queries, keys and values, each `[T, D]`.
    pub(super) fn inputs<'a, T>(
        &self,
        [q, k, v]: &[HeadsView; 3],
        data: [&'a [T]; 3],
        [sample, head]: [usize; 2],
    ) -> [Matrix<'a, T>; 3] {
        let kv_pair = [sample, head / self.heads_per_kv()];
        [
            q.head(self, data[0], [sample, head]),
            k.head(self, data[1], kv_pair),
            v.head(self, data[2], kv_pair),
        ]
    }

    /// The channels of a query head of a sample, of `[B, T, H·D]`.
    pub(super) fn head<'a, T>(&self, data: &'a [T], [sample, head]: [usize; 2]) -> Matrix<'a, T> {
        let (t, c, size) = (self.positions, self.channels(), self.head_size);
        let rows = Matrix::dense(&data[sample * t * c..][..t * c], t, c);
        rows.cols(head * size..(head + 1) * size)
    }
}

/// Keys that dropout knows together.
const KEY_GROUP: usize = 16;

/// Factor of the scores: 1/√D.
pub(super) fn scale<T: Real>(head_size: usize) -> T {
    T::of(1.0 / (head_size as f64).sqrt())
}
