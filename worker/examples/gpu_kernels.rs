//! Kernels of a GPU beside what the card can do: copy and matrix-product ceilings first, then each operation of a
//! training step of GPT-2 124M and 350M in bf16, with its bytes, its floating-point operations and its share of the
//! roofline.
//!
//! ```text
//! cargo run --release -p ddp-worker --example gpu_kernels
//! ```
//!
//! The time of an operation is that of many in a row on one stream, by the host's clock. `roof` is the time that its
//! bytes take at the measured copy rate or its operations at the measured rate of products, whichever is longer.

use std::time::Instant;

use ddp_worker::device::cuda::{CubinCache, CudaDevice, CudaOptions};
use ddp_worker::device::{ArenaSpec, Buffer, DType, Device, DeviceError, Stream};
use ddp_worker::ops::{
    AdamW, AdamWStep, AttentionBackward, AttentionForward, AttentionShape, CHUNK, Cast, ColumnSum,
    CrossEntropy, EncoderForward, GeluBackward, GeluForward, LayerNormBackward, LayerNormForward, LinearDinp,
    LinearDweight, LinearForward, LinearGeluBackward, LinearGeluForward, LinearShape, Op, SquaredNorm,
    TokenBackward, WeightLayout,
};

/// Shortest time that is measured, in seconds.
const SPAN: f64 = 0.02;

fn main() -> Result<(), DeviceError> {
    let device = CudaDevice::open(CudaOptions {
        cache: CubinCache::of_user(),
        // The rows `widen + gelu` are its measure; no other operation asks for it.
        fused_gelu: true,
        ..CudaOptions::default()
    })?;
    println!("{}", device.name());
    let mut bench = Bench {
        stream: device.stream(),
        device,
        copy_rate: f64::INFINITY,
        product_rate: f64::INFINITY,
    };
    bench.measure_ceilings()?;
    for (name, batch, channels, heads) in [("124M", 16, 768, 12), ("350M", 16, 1024, 16)] {
        println!("\nGPT-2 {name}: {batch} samples of 1024 positions, vocabulary 50304");
        println!(
            "{:34} {:>10} {:>9} {:>9} {:>7}",
            "operation", "µs", "GB/s", "TFLOP/s", "of roof"
        );
        let model = Model {
            batch,
            positions: 1024,
            channels,
            heads,
            vocab: 50_304,
        };
        model.linear(&bench)?;
        model.linear_gelu(&bench)?;
        model.mixing(&bench)?;
        model.elementwise(&bench)?;
        model.ends(&bench)?;
    }
    Ok(())
}

struct Bench {
    device: CudaDevice,
    stream: Stream,
    /// Bytes a second, read and written.
    copy_rate: f64,
    /// Floating-point operations a second.
    product_rate: f64,
}

/// What an operation must do at least.
#[derive(Clone, Copy)]
struct Work {
    bytes: usize,
    flop: usize,
}

impl Bench {
    fn measure_ceilings(&mut self) -> Result<(), DeviceError> {
        let elements = 1 << 29;
        let (x, out) = (
            self.zeros(DType::F32, elements)?,
            self.zeros(DType::F32, elements)?,
        );
        let seconds = self.time(&Cast { x, out }.into())?;
        self.copy_rate = (8 * elements) as f64 / seconds;
        println!("copy of 2 GiB: {:.0} GB/s", self.copy_rate / 1e9);

        let side = 8192;
        let shape = LinearShape {
            rows: side,
            inputs: side,
            outputs: side,
            layout: WeightLayout::InOut,
        };
        let product = self.linear_forward(shape, false)?;
        let seconds = self.time(&product)?;
        self.product_rate = 2.0 * (side as f64).powi(3) / seconds;
        println!(
            "bf16 product of {side} × {side}: {:.0} TFLOP/s",
            self.product_rate / 1e12
        );
        Ok(())
    }

    fn zeros(&self, dtype: DType, len: usize) -> Result<Buffer, DeviceError> {
        let arena = self.device.alloc(&ArenaSpec::private("bench", dtype, len))?;
        Ok(arena.whole())
    }

    /// In [−1, 1): products of zeros are faster than those of training.
    fn numbers(&self, dtype: DType, len: usize) -> Result<Buffer, DeviceError> {
        const PERIOD: usize = 1 << 20;
        let buffer = self.zeros(dtype, len)?;
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / 8_388_608.0 - 1.0
        };
        let block: Vec<u8> = match dtype {
            DType::Bf16 => (0..PERIOD)
                .flat_map(|_| half::bf16::from_f32(next()).to_le_bytes())
                .collect(),
            _ => (0..PERIOD).flat_map(|_| next().to_le_bytes()).collect(),
        };
        for first in (0..len).step_by(PERIOD) {
            let end = len.min(first + PERIOD);
            let bytes = &block[..(end - first) * dtype.bytes()];
            self.device.upload(self.stream, &buffer.slice(first..end), bytes);
        }
        Ok(buffer)
    }

    fn act(&self, len: usize) -> Result<Buffer, DeviceError> {
        self.numbers(DType::Bf16, len)
    }

    fn ids(&self, len: usize, end: usize) -> Result<Buffer, DeviceError> {
        let buffer = self.zeros(DType::I32, len)?;
        let ids =
            (0..len).flat_map(|i| ((i.wrapping_mul(2_654_435_761) >> 7) % end).to_le_bytes()[..4].to_vec());
        let ids: Vec<u8> = ids.collect();
        self.device.upload(self.stream, &buffer, &ids);
        Ok(buffer)
    }

    /// Seconds of one.
    fn time(&self, op: &Op) -> Result<f64, DeviceError> {
        let many = |count: usize| {
            let start = Instant::now();
            for _ in 0..count {
                self.device.enqueue(self.stream, op.clone());
            }
            self.device.synchronize(self.stream)?;
            Ok::<f64, DeviceError>(start.elapsed().as_secs_f64())
        };
        // Compiles, and fills the caches.
        many(3)?;
        let count = ((SPAN / (many(5)? / 5.0)) as usize).clamp(5, 2000);
        let mut seconds = Vec::new();
        for _ in 0..3 {
            seconds.push(many(count)? / count as f64);
        }
        seconds.sort_by(f64::total_cmp);
        Ok(seconds[1])
    }

    fn row(&self, name: &str, work: Work, op: impl Into<Op>) -> Result<(), DeviceError> {
        let seconds = self.time(&op.into())?;
        let (bytes, flop) = (work.bytes as f64, work.flop as f64);
        let roof = (bytes / self.copy_rate).max(flop / self.product_rate);
        println!(
            "{name:34} {:10.1} {:9.0} {:9.1} {:6.0}%",
            seconds * 1e6,
            bytes / seconds / 1e9,
            flop / seconds / 1e12,
            100.0 * roof / seconds
        );
        Ok(())
    }

    fn linear_forward(&self, shape: LinearShape, adds: bool) -> Result<Op, DeviceError> {
        let extra = |len| adds.then(|| self.act(len)).transpose();
        Ok(LinearForward {
            inp: self.act(shape.rows * shape.inputs)?,
            weight: self.act(shape.inputs * shape.outputs)?,
            bias: extra(shape.outputs)?,
            residual: extra(shape.rows * shape.outputs)?,
            out: self.act(shape.rows * shape.outputs)?,
            shape,
        }
        .into())
    }
}

struct Model {
    batch: usize,
    positions: usize,
    channels: usize,
    heads: usize,
    vocab: usize,
}

impl Model {
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
            bench.row(name, added, bench.linear_forward(shape, adds)?)?;
            let (inp, dout) = (bench.act(rows * inputs)?, bench.act(rows * outputs)?);
            let weight = bench.act(inputs * outputs)?;
            let dinp = LinearDinp {
                dout: dout.clone(),
                weight: weight.clone(),
                dinp: inp.clone(),
                shape,
            };
            bench.row("  gradient of the input", work, dinp)?;
            let dweight = LinearDweight {
                inp,
                dout,
                dweight: weight,
                accumulate: false,
                shape,
            };
            bench.row("  gradient of the weight", work, dweight)?;
        }
        Ok(())
    }

    /// To be compared with the sum of the rows `widen` and `gelu`, and of `projection`'s gradient of the input and
    /// `gelu`'s.
    fn linear_gelu(&self, bench: &Bench) -> Result<(), DeviceError> {
        let (rows, c) = (self.rows(), self.channels);
        let shape = |inputs, outputs| LinearShape {
            rows,
            inputs,
            outputs,
            layout: WeightLayout::InOut,
        };
        let (narrow, weight) = (bench.act(rows * c)?, bench.act(4 * c * c)?);
        let (wide, other) = (bench.act(4 * rows * c)?, bench.act(4 * rows * c)?);
        let work = |wide_passes: usize| Work {
            bytes: 2 * (rows * c + 4 * c * c + wide_passes * 4 * rows * c),
            flop: 8 * rows * c * c,
        };
        let forward = LinearGeluForward {
            inp: narrow.clone(),
            weight: weight.clone(),
            bias: bench.act(4 * c)?,
            wide: wide.clone(),
            out: other.clone(),
            shape: shape(c, 4 * c),
        };
        bench.row("widen + gelu", work(2), forward)?;
        let backward = LinearGeluBackward {
            dout: narrow,
            weight,
            wide_active: wide,
            dwide: other,
            shape: shape(4 * c, c),
        };
        bench.row("  gradients of both", work(3), backward)
    }

    fn mixing(&self, bench: &Bench) -> Result<(), DeviceError> {
        let shape = AttentionShape {
            batch: self.batch,
            positions: self.positions,
            heads: self.heads,
            channels: self.channels,
        };
        let n = self.rows() * self.channels;
        let (qkv, out, dout) = (bench.act(3 * n)?, bench.act(n)?, bench.act(n)?);
        let lse = bench.zeros(DType::F32, self.rows() * self.heads)?;
        // Half of the pairs of positions count.
        let product = self.rows() * self.positions * self.channels;
        let forward = AttentionForward {
            qkv: qkv.clone(),
            out: out.clone(),
            lse: lse.clone(),
            shape,
        };
        let work = Work {
            bytes: 2 * 4 * n,
            flop: 2 * product,
        };
        bench.row("attention", work, forward)?;
        let work = Work {
            bytes: 2 * 8 * n,
            flop: 5 * product,
        };
        let backward = AttentionBackward {
            dqkv: bench.act(3 * n)?,
            qkv,
            out,
            lse,
            dout,
            shape,
        };
        bench.row("  gradient", work, backward)
    }

    fn elementwise(&self, bench: &Bench) -> Result<(), DeviceError> {
        let (rows, c) = (self.rows(), self.channels);
        let n = rows * c;
        let moves = |elements| Work {
            bytes: 2 * elements,
            flop: 0,
        };
        let (wide, dwide) = (bench.act(4 * n)?, bench.act(4 * n)?);
        let forward = GeluForward {
            inp: wide.clone(),
            out: dwide.clone(),
        };
        bench.row("gelu", moves(8 * n), forward)?;
        let sum = ColumnSum {
            x: wide.slice(0..3 * n),
            out: bench.act(3 * c)?,
            accumulate: false,
        };
        bench.row("column sum of 3·C", moves(3 * n), sum)?;
        let backward = GeluBackward {
            inp_out: wide,
            dout_dinp: dwide,
        };
        bench.row("  gradient of gelu", moves(16 * n), backward)?;
        let (inp, out, dinp) = (bench.act(n)?, bench.act(n)?, bench.act(n)?);
        let (weight, bias) = (bench.act(c)?, bench.act(c)?);
        let forward = LayerNormForward {
            inp: inp.clone(),
            weight: weight.clone(),
            bias: bias.clone(),
            out: out.clone(),
        };
        bench.row("layernorm", moves(2 * n), forward)?;
        let backward = LayerNormBackward {
            dout: out,
            inp,
            weight,
            dinp,
            dweight: bench.act(c)?,
            dbias: bias,
            accumulate_dinp: true,
            accumulate_dweight: false,
            accumulate_dbias: false,
        };
        bench.row("  gradient, residual added", moves(4 * n), backward)
    }

    /// Both ends of the model, and the optimizer.
    fn ends(&self, bench: &Bench) -> Result<(), DeviceError> {
        let (rows, c, vocab) = (self.rows(), self.channels, self.vocab);
        let tokens = bench.ids(rows, vocab)?;
        let (wte, dout) = (bench.act(vocab * c)?, bench.act(rows * c)?);
        let moves = |bytes| Work { bytes, flop: 0 };
        let encoder = EncoderForward {
            tokens: tokens.clone(),
            wte: wte.clone(),
            wpe: Some(bench.act(self.positions * c)?),
            out: dout.clone(),
            positions: self.positions,
        };
        bench.row("encoder", moves(4 * rows * c), encoder)?;
        let tokens_back = TokenBackward {
            tokens: tokens.clone(),
            dout,
            dwte: wte,
            accumulate: true,
        };
        bench.row("  gradient of tokens", moves(6 * rows * c), tokens_back)?;
        let logits = bench.act(rows * vocab)?;
        let losses = CrossEntropy {
            logits,
            targets: tokens,
            losses: bench.zeros(DType::F32, rows)?,
            dlosses: None,
        };
        bench.row("cross-entropy", moves(2 * rows * vocab), losses.clone())?;
        let with_gradient = CrossEntropy {
            dlosses: Some(bench.zeros(DType::F32, rows)?),
            ..losses
        };
        bench.row(
            "  with gradient, in place",
            moves(4 * rows * vocab),
            with_gradient,
        )?;
        let params = 12 * 12 * c * c + vocab * c;
        let f32s = |_| bench.numbers(DType::F32, params);
        let [param, m, v] = [f32s(0)?, f32s(1)?, bench.zeros(DType::F32, params)?];
        let grad = bench.act(params)?;
        let partials = bench.zeros(DType::F64, params.div_ceil(CHUNK))?;
        let norm = SquaredNorm {
            x: grad.clone(),
            partials,
        };
        bench.row("squared norm", moves(2 * params), norm)?;
        let update = AdamW {
            param,
            copy: Some(bench.act(params)?),
            grad,
            m,
            v,
            scale: bench.numbers(DType::F32, 1)?,
            weight_decay: 0.1,
            // Four runs of norms and biases a block.
            spared: (0..48)
                .map(|run| run * (params / 48)..run * (params / 48) + c)
                .collect(),
            hyper: AdamWStep {
                lr: 1e-4,
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                step: 10,
            },
        };
        bench.row("adamw, bf16 copy", moves(28 * params), update)
    }
}
