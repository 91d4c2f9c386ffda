//! Sizes of an attention, and where the queries, keys and values of a head lie.

use crate::memory::{Buffer, DeviceError, HostRef};
use crate::ops::cpu::kernel::Real;
use crate::ops::cpu::matrix::Matrix;
use crate::ops::cpu::stored::Stored;
use crate::ops::expect_len;

/// The heads of queries, keys or values of all samples, in rows of a buffer that other views may share: `[B, T, stride]`.
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

    /// `View` of the kernels: two words, the offset first.
    pub(super) fn words(&self) -> u64 {
        (self.stride as u64) << 32 | self.offset as u64
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

    /// Refuses views that do not fit the sizes, or each other: keys and values begin together, not after the queries.
    pub(super) fn check_views(&self, op: &'static str, views: &[HeadsView; 3]) -> Result<(), DeviceError> {
        let [q, k, v] = views;
        let fits = |view: &HeadsView, heads: usize, rows: usize| {
            let (size, stride, offset) = (self.head_size, view.stride, view.offset);
            let in_heads = stride.is_multiple_of(size) && offset.is_multiple_of(size);
            // Kernels find rows within a sample by 32-bit arithmetic.
            let in_row = offset + heads * size <= stride && i32::try_from(stride).is_ok();
            in_heads && in_row && rows > 0 && view.buffer.len() == self.batch * rows * stride
        };
        let fit = fits(q, self.heads, self.positions);
        let fit = fit && [k, v].iter().all(|view| fits(view, self.kv_heads, k.rows(self)));
        if fit && k.first_position == v.first_position && k.first_position <= q.first_position {
            return Ok(());
        }
        let what = format!("queries, keys and values {views:?} do not fit each other in {self:?}");
        Err(DeviceError::Shape { op, what })
    }

    /// What a query head of a sample reads: queries, keys and values, each `[T, D]`.
    pub(super) fn inputs<'a, T>(
        &self,
        views: &[HeadsView; 3],
        data: [&'a [T]; 3],
        [sample, head]: [usize; 2],
    ) -> [Matrix<'a, T>; 3] {
        let kv_head = head / self.heads_per_kv();
        [(0, head), (1, kv_head), (2, kv_head)].map(|(i, head)| {
            let HeadsView { stride, offset, .. } = views[i];
            self.columns(data[i], stride, [sample, offset + head * self.head_size])
        })
    }

    /// The channels of a query head of a sample, of `[B, T, H·D]`.
    pub(super) fn head<'a, T>(&self, data: &'a [T], [sample, head]: [usize; 2]) -> Matrix<'a, T> {
        self.columns(data, self.channels(), [sample, head * self.head_size])
    }

    /// A head of a sample, of rows of `stride` elements: from element `first` of a row on.
    fn columns<'a, T>(&self, data: &'a [T], stride: usize, [sample, first]: [usize; 2]) -> Matrix<'a, T> {
        let of_sample = data.len() / self.batch;
        let rows = Matrix::dense(
            &data[sample * of_sample..][..of_sample],
            of_sample / stride,
            stride,
        );
        rows.cols(first..first + self.head_size)
    }
}

/// Factor of the scores: 1/√D.
pub(super) fn scale<T: Real>(head_size: usize) -> T {
    T::of(1.0 / (head_size as f64).sqrt())
}
