//! The operations of a training step.

use ddp_worker::device::{DType, DeviceError};
use ddp_worker::ops::{
    AttentionBackward, AttentionForward, AttentionShape, CHUNK, ColumnSum, CrossEntropy, EncoderForward,
    GeluBackward, GeluForward, LinearDinp, LinearDweight, LinearShape, NormBackward, NormForward, Rates,
    Runs, SquaredNorm, TokenBackward, Update, WeightLayout,
};
use ddp_worker::optim::adamw;

use crate::bench::{Bench, Work};

/// Sizes of GPT-2 and of what it is given.
pub(crate) struct Model {
    pub(crate) batch: usize,
    pub(crate) positions: usize,
    pub(crate) channels: usize,
    pub(crate) heads: usize,
    pub(crate) vocab: usize,
}

impl Model {
    /// Prints a row for each operation.
    pub(crate) fn measure(&self, bench: &Bench) -> Result<(), DeviceError> {
        self.linear(bench)?;
        self.attention(bench)?;
        self.elementwise(bench)?;
        self.layernorm(bench)?;
        self.ends(bench)?;
        self.optimizer(bench)
    }

    /// Those whose threads share memory, or whose places come from data.
    pub(crate) fn measure_for_sanitizer(&self, bench: &Bench) -> Result<(), DeviceError> {
        self.attention(bench)?;
        self.ends(bench)
    }

    fn rows(&self) -> usize {
        self.batch * self.positions
    }

    fn linear(&self, bench: &Bench) -> Result<(), DeviceError> {
        let (rows, c) = (self.rows(), self.channels);
        let layers = [
            ("qkv", c, 3 * c, WeightLayout::InOut, false),
            ("attention projection + residual", c, c, WeightLayout::InOut, true),
            ("widen", c, 4 * c, WeightLayout::InOut, false),
            ("projection + residual", 4 * c, c, WeightLayout::InOut, true),
            ("head", c, self.vocab, WeightLayout::OutIn, false),
        ];
        for (name, inputs, outputs, layout, adds) in layers {
            let shape = LinearShape {
                rows,
                inputs,
                outputs,
                layout,
            };
            let elements = rows * inputs + inputs * outputs + rows * outputs;
            let work = Work {
                bytes: 2 * elements,
                flop: 2 * rows * inputs * outputs,
            };
            let added = Work {
                bytes: work.bytes + if adds { 2 * rows * outputs } else { 0 },
                ..work
            };
            bench.row(name, added, || bench.linear_forward(shape, adds))?;
            bench.row("  gradient of the input", work, || {
                Ok(LinearDinp {
                    dout: bench.act(rows * outputs)?,
                    weight: bench.act(inputs * outputs)?,
                    dinp: bench.act(rows * inputs)?,
                    shape,
                })
            })?;
            bench.row("  gradient of the weight", work, || {
                Ok(LinearDweight {
                    inp: bench.act(rows * inputs)?,
                    dout: bench.act(rows * outputs)?,
                    dweight: bench.act(inputs * outputs)?,
                    accumulate: false,
                    shape,
                })
            })?;
        }
        Ok(())
    }

    fn attention(&self, bench: &Bench) -> Result<(), DeviceError> {
        let shape = AttentionShape {
            batch: self.batch,
            positions: self.positions,
            heads: self.heads,
            kv_heads: self.heads,
            head_size: self.channels / self.heads,
        };
        let n = self.rows() * self.channels;
        let lse = || bench.zeros(DType::F32, self.rows() * self.heads);
        // Half of the pairs of positions count.
        let product = self.rows() * self.positions * self.channels;
        let work = Work {
            bytes: 2 * 4 * n,
            flop: 2 * product,
        };
        bench.row("attention", work, || {
            Ok(AttentionForward {
                qkv: shape.views(&bench.act(3 * n)?),
                out: bench.act(n)?,
                lse: lse()?,
                shape,
                dropout: None,
            })
        })?;
        let work = Work {
            bytes: 2 * 8 * n,
            flop: 5 * product,
        };
        bench.row("  gradient", work, || {
            Ok(AttentionBackward {
                forward: AttentionForward {
                    qkv: shape.views(&bench.act(3 * n)?),
                    out: bench.act(n)?,
                    lse: lse()?,
                    shape,
                    dropout: None,
                },
                dout: bench.act(n)?,
                dqkv: shape.views(&bench.act(3 * n)?),
                accumulate: false,
            })
        })
    }

    fn elementwise(&self, bench: &Bench) -> Result<(), DeviceError> {
        let (n, c) = (self.rows() * self.channels, self.channels);
        let moves = |elements| Work::moving(2 * elements);
        bench.row("gelu", moves(8 * n), || {
            Ok(GeluForward {
                inp: bench.act(4 * n)?,
                out: bench.act(4 * n)?,
            })
        })?;
        // Both are read and written.
        bench.row("  gradient", moves(16 * n), || {
            Ok(GeluBackward {
                inp_out: bench.act(4 * n)?,
                dout_dinp: bench.act(4 * n)?,
                makes_out: true,
            })
        })?;
        bench.row("column sum of 3·C", moves(3 * n), || {
            Ok(ColumnSum {
                x: bench.act(3 * n)?,
                out: bench.act(3 * c)?,
                accumulate: false,
            })
        })
    }

    fn layernorm(&self, bench: &Bench) -> Result<(), DeviceError> {
        let (n, c) = (self.rows() * self.channels, self.channels);
        let moves = |elements| Work::moving(2 * elements);
        bench.row("layernorm", moves(2 * n), || {
            Ok(NormForward {
                inp: bench.act(n)?,
                weight: bench.act(c)?,
                bias: Some(bench.act(c)?),
                out: bench.act(n)?,
                epsilon: 1e-5,
            })
        })?;
        bench.row("  gradient, residual added", moves(4 * n), || {
            Ok(NormBackward {
                dout: bench.act(n)?,
                inp: bench.act(n)?,
                weight: bench.act(c)?,
                dinp: bench.act(n)?,
                dweight: bench.act(c)?,
                dbias: Some(bench.act(c)?),
                epsilon: 1e-5,
                accumulate_dinp: true,
                accumulate_dweight: false,
                accumulate_dbias: false,
            })
        })
    }

    /// Both ends of the model.
    fn ends(&self, bench: &Bench) -> Result<(), DeviceError> {
        let (rows, c, vocab) = (self.rows(), self.channels, self.vocab);
        bench.row("encoder", Work::moving(4 * rows * c), || {
            Ok(EncoderForward {
                tokens: bench.ids(rows, vocab)?,
                wte: bench.act(vocab * c)?,
                wpe: Some(bench.act(self.positions * c)?),
                out: bench.act(rows * c)?,
                positions: self.positions,
                part: None,
            })
        })?;
        bench.row("  gradient of tokens", Work::moving(6 * rows * c), || {
            Ok(TokenBackward {
                tokens: bench.ids(rows, vocab)?,
                dout: bench.act(rows * c)?,
                dwte: bench.act(vocab * c)?,
                accumulate: true,
                part: None,
            })
        })?;
        let losses = || {
            Ok(CrossEntropy {
                logits: bench.act(rows * vocab)?,
                targets: bench.ids(rows, vocab)?,
                losses: bench.zeros(DType::F32, rows)?,
                dlosses: None,
            })
        };
        bench.row("cross-entropy", Work::moving(2 * rows * vocab), losses)?;
        let work = Work::moving(4 * rows * vocab);
        bench.row("  with gradient, in place", work, || {
            Ok(CrossEntropy {
                dlosses: Some(bench.zeros(DType::F32, rows)?),
                ..losses()?
            })
        })
    }

    fn optimizer(&self, bench: &Bench) -> Result<(), DeviceError> {
        let c = self.channels;
        let params = 12 * 12 * c * c + self.vocab * c;
        bench.row("squared norm", Work::moving(2 * params), || {
            Ok(SquaredNorm {
                x: bench.act(params)?,
                partials: bench.zeros(DType::F64, params.div_ceil(CHUNK))?,
            })
        })?;
        // Four runs of norms and biases a block.
        let starts = (0..48).map(|run| run * (params / 48));
        let spared: Vec<_> = starts.map(|start| start..start + c).collect();
        bench.row("adamw, bf16 copy", Work::moving(28 * params), || {
            Ok(Update {
                rule: adamw([0.9, 0.95], 1e-8),
                runs: Runs::sparing(params, &spared, Rates::new(1e-4, 0.1)),
                param: bench.numbers(DType::F32, params)?,
                copy: Some(bench.act(params)?),
                grad: bench.act(params)?,
                slots: vec![
                    bench.numbers(DType::F32, params)?,
                    bench.zeros(DType::F32, params)?,
                ],
                scale: bench.numbers(DType::F32, 1)?,
                step: 10,
            })
        })
    }
}
