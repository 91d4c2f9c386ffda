//! Sizes of an attention, and where the queries, keys and values of a head lie.

use crate::memory::{Buffer, DeviceError};
use crate::ops::cpu::kernel::Real;
use crate::ops::cpu::matrix::Matrix;
use crate::ops::expect_len;

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

    /// First channels of a query head's queries, keys and values within a row.
    pub(super) const fn starts(&self, head: usize) -> [usize; 3] {
        let kv_head = head / self.heads_per_kv();
        let heads = [head, self.heads + kv_head, self.heads + self.kv_heads + kv_head];
        let [q, k, v] = heads;
        [q * self.head_size, k * self.head_size, v * self.head_size]
    }

    /// The parts of `qkv` that a query head of a sample reads: queries, keys and values, each
    /// `[T, D]`.
    pub(super) fn inputs<'a, T: Copy>(&self, qkv: &'a [T], [sample, head]: [usize; 2]) -> [Matrix<'a, T>; 3] {
        let (t, c) = (self.positions, self.qkv_channels());
        let rows = Matrix::dense(&qkv[sample * t * c..][..t * c], t, c);
        self.starts(head)
            .map(|first| rows.cols(first..first + self.head_size))
    }

    /// The channels of a query head of a sample, of `[B, T, H·D]`.
    pub(super) fn head<'a, T>(&self, data: &'a [T], [sample, head]: [usize; 2]) -> Matrix<'a, T> {
        let (t, c, size) = (self.positions, self.channels(), self.head_size);
        let rows = Matrix::dense(&data[sample * t * c..][..t * c], t, c);
        rows.cols(head * size..(head + 1) * size)
    }
}

/// Factor of the scores: 1/√D.
pub(super) fn scale<T: Real>(head_size: usize) -> T {
    T::of(1.0 / (head_size as f64).sqrt())
}
