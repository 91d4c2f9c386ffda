//! The operations that a decoder of Llama's kind has beside GPT-2's.

use ddp_worker::device::{DType, DeviceError};
use ddp_worker::ops::{
    AttentionBackward, AttentionDecode, AttentionForward, AttentionShape, NormBackward, NormForward, Rotary,
    RotaryEmbedding, SwigluBackward, SwigluForward,
};

use crate::bench::{Bench, Work};

/// Sizes of Llama and of what it is given.
pub(crate) struct Llama {
    pub(crate) shape: AttentionShape,
    /// Channels of the feed-forward layer.
    pub(crate) wide: usize,
}

impl Llama {
    /// Samples, positions, heads of queries and of keys, channels of a head; a cache has room for as many positions.
    pub(crate) const fn of([batch, positions, heads, kv_heads, head_size]: [usize; 5], wide: usize) -> Self {
        let shape = AttentionShape {
            batch,
            positions,
            heads,
            kv_heads,
            head_size,
        };
        Self { shape, wide }
    }

    /// Prints a row for each operation.
    pub(crate) fn measure(&self, bench: &Bench) -> Result<(), DeviceError> {
        self.rmsnorm(bench)?;
        self.rotary(bench)?;
        self.attention(bench)?;
        self.decode(bench)?;
        self.swiglu(bench)
    }

    /// Those whose threads share memory.
    pub(crate) fn measure_for_sanitizer(&self, bench: &Bench) -> Result<(), DeviceError> {
        self.attention(bench)?;
        self.decode(bench)
    }

    fn rmsnorm(&self, bench: &Bench) -> Result<(), DeviceError> {
        let (n, c) = (self.shape.rows() * self.shape.channels(), self.shape.channels());
        let epsilon = 1e-5;
        bench.row("rmsnorm", Work::moving(4 * n), || {
            Ok(NormForward {
                inp: bench.act(n)?,
                weight: bench.act(c)?,
                bias: None,
                out: bench.act(n)?,
                epsilon,
            })
        })?;
        bench.row("  gradient, residual added", Work::moving(8 * n), || {
            Ok(NormBackward {
                dout: bench.act(n)?,
                inp: bench.act(n)?,
                weight: bench.act(c)?,
                dinp: bench.act(n)?,
                dweight: bench.act(c)?,
                dbias: None,
                epsilon,
                accumulate_dinp: true,
                accumulate_dweight: false,
                accumulate_dbias: false,
            })
        })
    }

    fn rotary(&self, bench: &Bench) -> Result<(), DeviceError> {
        let shape = self.shape;
        let (n, rotated) = (
            shape.rows() * shape.qkv_channels(),
            shape.rows() * (shape.channels() + shape.kv_channels()),
        );
        let embedding = RotaryEmbedding {
            base: 500_000.0,
            scaling: None,
        };
        let first_position = 0;
        bench.row("rotary embedding", Work::moving(4 * rotated), || {
            Ok(Rotary {
                qkv: bench.act(n)?,
                shape,
                embedding,
                first_position,
                backward: false,
            })
        })?;
        bench.row("  gradient", Work::moving(4 * rotated), || {
            Ok(Rotary {
                qkv: bench.act(n)?,
                shape,
                embedding,
                first_position,
                backward: true,
            })
        })
    }

    fn attention(&self, bench: &Bench) -> Result<(), DeviceError> {
        let shape = self.shape;
        let (n, n_qkv) = (
            shape.rows() * shape.channels(),
            shape.rows() * shape.qkv_channels(),
        );
        let lse = || bench.zeros(DType::F32, shape.rows() * shape.heads);
        // Half of the pairs of positions count.
        let product = n * shape.positions;
        let work = Work {
            bytes: 2 * (n_qkv + n),
            flop: 2 * product,
        };
        bench.row("grouped-query attention", work, || {
            Ok(AttentionForward {
                qkv: shape.views(&bench.act(n_qkv)?),
                out: bench.act(n)?,
                lse: lse()?,
                shape,
                dropout: None,
            })
        })?;
        let work = Work {
            bytes: 2 * (2 * n_qkv + 2 * n),
            flop: 5 * product,
        };
        bench.row("  gradient", work, || {
            Ok(AttentionBackward {
                forward: AttentionForward {
                    qkv: shape.views(&bench.act(n_qkv)?),
                    out: bench.act(n)?,
                    lse: lse()?,
                    shape,
                    dropout: None,
                },
                dout: bench.act(n)?,
                dqkv: shape.views(&bench.act(n_qkv)?),
                accumulate: false,
            })
        })
    }

    /// The last position that the cache has room for.
    fn decode(&self, bench: &Bench) -> Result<(), DeviceError> {
        let shape = AttentionShape {
            positions: 1,
            ..self.shape
        };
        let room = self.shape.positions;
        let cached = shape.batch * room * shape.kv_channels();
        let work = Work {
            bytes: 2 * 2 * cached,
            flop: 4 * room * shape.rows() * shape.channels(),
        };
        bench.row("attention over a cache", work, || {
            Ok(AttentionDecode {
                qkv: bench.act(shape.rows() * shape.qkv_channels())?,
                keys: bench.act(cached)?,
                values: bench.act(cached)?,
                out: bench.act(shape.rows() * shape.channels())?,
                shape,
                first_position: room - 1,
            })
        })
    }

    fn swiglu(&self, bench: &Bench) -> Result<(), DeviceError> {
        let channels = self.wide;
        let n = self.shape.rows() * channels;
        bench.row("swiglu", Work::moving(6 * n), || {
            Ok(SwigluForward {
                inp: bench.act(2 * n)?,
                out: bench.act(n)?,
                channels,
            })
        })?;
        // Three numbers are read and written.
        bench.row("  gradient", Work::moving(12 * n), || {
            Ok(SwigluBackward {
                inp_dinp: bench.act(2 * n)?,
                dout_out: bench.act(n)?,
                channels,
            })
        })
    }
}
