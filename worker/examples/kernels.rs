//! Times every operation of one training step: milliseconds, GFLOP/s, GB/s.
//!
//!     cargo run --release -p ddp-worker --example kernels                        6 × 384, vocabulary 256
//!     cargo run --release -p ddp-worker --example kernels -- --threads 2
//!     cargo run --release -p ddp-worker --example kernels -- --layers 12 --channels 768 --heads 12 \
//!         --vocab 50257 --positions 128 --batch 1
//!
//! The bound is what one core multiplies and adds in its registers alone; it is printed first. Rates are those of
//! the fastest call, so that another process on the machine does not blur them.

#[path = "../tests/local_model/mod.rs"]
mod local_model;

use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ddp_worker::config::{self, Recompute};
use ddp_worker::device::{
    Arena, ArenaSpec, Buffer, Compute, CpuDevice, DType, Device, DeviceError, Event, Isa, Stream,
};
use ddp_worker::model::{
    Activation, ActivationPool, ChunkState, Context, Keep, Model, NoHooks, Passes, build,
};
use ddp_worker::ops::{AttentionShape, CHUNK, ClipScale, LinearShape, Op, Rates, Runs, SquaredNorm, Update};
use ddp_worker::optim::adamw;
use local_model::{LocalGrads, LocalParams};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let sizes = Sizes::from_args()?;
    let device = Arc::new(Stopwatch::new(sizes.threads)?);
    println!(
        "{}; one core's registers: {:.0} GFLOP/s",
        device.name(),
        peak_gflops()
    );
    let config = config::Model {
        kind: config::ModelKind::Gpt2,
        n_layer: sizes.layers,
        n_head: sizes.heads,
        n_embd: sizes.channels,
        block_size: sizes.positions,
        vocab_size: Some(sizes.vocab),
        dropout: 0.0,
        ..config::Model::default()
    };
    let model = build(&config, sizes.vocab)?;
    let millions = model.param_count() as f64 / 1e6;
    println!(
        "{}: {millions:.1} M parameters, {} × {} tokens",
        model.name, sizes.batch, sizes.positions
    );

    let mut run = Run::new(device, &model, &sizes)?;
    run.step(&model)?;
    run.device.reset();
    let mut times = (0..sizes.steps)
        .map(|_| run.step(&model))
        .collect::<Result<Vec<_>, _>>()?;
    times.sort();
    run.device.print(sizes.steps);
    let [median, best] = [times[times.len() / 2], times[0]].map(|time| time.as_secs_f64());
    println!(
        "step: median {:.1} ms, best {:.1} ms, {:.0} tokens/s; activations {:.0} MB",
        median * 1e3,
        best * 1e3,
        (sizes.batch * sizes.positions) as f64 / median,
        run.pool.allocated_bytes() as f64 / 1e6
    );
    Ok(())
}

struct Sizes {
    layers: usize,
    heads: usize,
    channels: usize,
    vocab: usize,
    positions: usize,
    batch: usize,
    threads: usize,
    steps: usize,
}

impl Sizes {
    fn from_args() -> Result<Self, Box<dyn std::error::Error>> {
        let mut sizes = Self {
            layers: 6,
            heads: 6,
            channels: 384,
            vocab: 256,
            positions: 256,
            batch: 8,
            threads: 1,
            steps: 5,
        };
        let mut args = std::env::args().skip(1);
        while let Some(flag) = args.next() {
            let value: usize = args.next().ok_or("a flag without a value")?.parse()?;
            let target = match flag.as_str() {
                "--layers" => &mut sizes.layers,
                "--heads" => &mut sizes.heads,
                "--channels" => &mut sizes.channels,
                "--vocab" => &mut sizes.vocab,
                "--positions" => &mut sizes.positions,
                "--batch" => &mut sizes.batch,
                "--threads" => &mut sizes.threads,
                "--steps" => &mut sizes.steps,
                other => return Err(format!("unknown flag `{other}`").into()),
            };
            *target = value.max(1);
        }
        Ok(sizes)
    }
}

/// Fused multiply-adds that touch no memory.
fn peak_gflops() -> f64 {
    struct Registers;
    impl pulp::WithSimd for Registers {
        type Output = f64;

        #[inline(always)]
        fn with_simd<S: pulp::Simd>(self, simd: S) -> f64 {
            // With both constants they fit into the 16 registers of AVX2; two products at a time need 8 or more.
            const CHAINS: usize = 12;
            const ROUNDS: usize = 2_000_000;
            let (a, b) = (
                simd.splat_f32s(black_box(0.999)),
                simd.splat_f32s(black_box(0.001)),
            );
            let mut chains = [b; CHAINS];
            let started = Instant::now();
            for _ in 0..ROUNDS {
                for chain in &mut chains {
                    *chain = simd.mul_add_f32s(*chain, a, b);
                }
            }
            let seconds = started.elapsed().as_secs_f64();
            black_box(chains);
            (2 * CHAINS * S::F32_LANES * ROUNDS) as f64 / seconds / 1e9
        }
    }
    (0..3)
        .map(|_| Isa::detect().dispatch(Registers))
        .fold(0.0, f64::max)
}

/// One model on one rank.
struct Run {
    device: Arc<Stopwatch>,
    compute: Compute,
    pool: ActivationPool,
    params: LocalParams,
    grads: LocalGrads,
    tokens: Activation,
    targets: Buffer,
    dloss: Buffer,
    moments: [Buffer; 2],
    norm: [Buffer; 3],
    steps: u64,
}

impl Run {
    fn new(device: Arc<Stopwatch>, model: &Model, sizes: &Sizes) -> Result<Self, DeviceError> {
        let rows = sizes.batch * sizes.positions;
        let alloc = |name: &str, dtype, len| {
            let spec = ArenaSpec::private(name, dtype, len);
            device.alloc(&spec).map(|arena| arena.whole())
        };
        let n = model.param_count();
        let (tokens, targets) = (
            alloc("tokens", DType::I32, rows)?,
            alloc("targets", DType::I32, rows)?,
        );
        let random = |i: usize| (i.wrapping_mul(2_654_435_761) >> 7) % sizes.vocab;
        for (i, token) in tokens.host_mut::<i32>()?.iter_mut().enumerate() {
            *token = random(i) as i32;
        }
        for (i, target) in targets.host_mut::<i32>()?.iter_mut().enumerate() {
            *target = random(i + 1) as i32;
        }
        let dloss = alloc("dloss", DType::F32, rows)?;
        dloss.host_mut::<f32>()?.fill(1.0 / rows as f32);
        Ok(Self {
            pool: ActivationPool::new(device.clone()),
            params: LocalParams::new(device.as_ref(), model, DType::F32, 1)?,
            grads: LocalGrads::new(device.as_ref(), model, DType::F32)?,
            tokens: Activation::borrowed(tokens, vec![sizes.batch, sizes.positions]),
            targets,
            dloss,
            moments: [alloc("m", DType::F32, n)?, alloc("v", DType::F32, n)?],
            norm: [
                alloc("partials", DType::F64, n.div_ceil(CHUNK))?,
                alloc("norm", DType::F32, 1)?,
                alloc("scale", DType::F32, 1)?,
            ],
            compute: Compute::new(device.clone()),
            device,
            steps: 0,
        })
    }

    fn step(&mut self, model: &Model) -> Result<Duration, DeviceError> {
        let started = Instant::now();
        let shape = self.tokens.shape().try_into().expect("samples and positions");
        let ctx = Context {
            targets: Some(&self.targets),
            dloss: Some(&self.dloss),
            keep: Keep::ForBackward(Recompute::Norms),
            ..Context::new(&self.compute, &self.pool, &self.params, shape, DType::F32)
        };
        self.grads.start_step();
        let passes = Passes { model, ctx: &ctx };
        let mut flight = ChunkState::new(model.whole());
        drop(passes.forward(&mut flight, &self.tokens, &mut NoHooks)?);
        passes.backward(&mut flight, None, &mut NoHooks, &mut self.grads)?;
        self.steps += 1;
        let [partials, norm, scale] = self.norm.clone();
        let [m, v] = self.moments.clone();
        ctx.enqueue(SquaredNorm {
            x: self.grads.whole(),
            partials: partials.clone(),
        });
        ctx.enqueue(ClipScale {
            partials,
            order: None,
            witnesses: None,
            max_norm: Some(1.0),
            norm,
            scale: scale.clone(),
            updates: None,
        });
        ctx.enqueue(Update {
            rule: adamw([0.9, 0.95], 1e-8),
            runs: Runs::uniform(self.params.whole().len(), Rates::new(1e-4, 0.1)),
            param: self.params.whole(),
            copy: None,
            grad: self.grads.whole(),
            slots: vec![m, v],
            scale,
            step: self.steps,
        });
        self.compute.synchronize()?;
        Ok(started.elapsed())
    }
}

/// What an operation costs.
#[derive(Clone, Copy, Default)]
struct Cost {
    calls: f64,
    /// Of all calls.
    seconds: f64,
    /// Of the fastest call.
    best: f64,
    /// Of products, in one call.
    flop: f64,
    /// Of the buffers, each access once, in one call.
    bytes: f64,
}

/// Name with sizes, and what is known before it runs.
fn account(op: &Op) -> (String, Cost) {
    let cost = |flop, bytes| Cost {
        flop,
        bytes,
        ..Cost::default()
    };
    let linear = |s: &LinearShape| {
        let (r, i, o) = (s.rows as f64, s.inputs as f64, s.outputs as f64);
        let name = format!(
            "{} {} × {} × {} {:?}",
            op.name(),
            s.rows,
            s.inputs,
            s.outputs,
            s.layout
        );
        (name, cost(2.0 * r * i * o, 4.0 * (r * i + i * o + r * o)))
    };
    let attention = |s: &AttentionShape, products: f64, passes: f64| {
        let elements = (s.rows() * s.channels()) as f64;
        // Half of T × T: what a causal mask leaves.
        let keys = (s.positions + 1) as f64 / 2.0;
        (
            op.name().to_owned(),
            cost(products * 2.0 * elements * keys, passes * 4.0 * elements),
        )
    };
    let plain = |bytes: usize| {
        (
            format!("{} {:.1} MB", op.name(), bytes as f64 / 1e6),
            cost(0.0, bytes as f64),
        )
    };
    match op {
        Op::LinearForward(op) => linear(&op.shape),
        Op::LinearDinp(op) => linear(&op.shape),
        Op::LinearDweight(op) => linear(&op.shape),
        Op::AttentionForward(op) => attention(&op.shape, 2.0, 4.0),
        Op::AttentionBackward(op) => attention(&op.forward.shape, 5.0, 8.0),
        Op::GeluForward(op) => plain(2 * op.inp.bytes()),
        Op::GeluBackward(op) => plain(4 * op.inp_out.bytes()),
        Op::NormForward(op) => plain(2 * op.inp.bytes()),
        Op::NormBackward(op) => plain(4 * op.inp.bytes()),
        Op::SwigluForward(op) => plain(3 * op.out.bytes()),
        Op::SwigluBackward(op) => plain(6 * op.dout_out.bytes()),
        Op::Rotary(op) => plain(2 * op.qkv.bytes()),
        Op::ColumnSum(op) => plain(op.x.bytes()),
        Op::CrossEntropy(op) => plain(2 * op.logits.bytes()),
        Op::EncoderForward(op) => plain(2 * op.out.bytes()),
        Op::TokenBackward(op) => plain(op.dout.bytes() + op.dwte.bytes()),
        Op::PositionBackward(op) => plain(op.dout.bytes()),
        Op::Update(op) => plain(7 * op.param.bytes()),
        Op::SquaredNorm(op) => plain(op.x.bytes()),
        _ => plain(0),
    }
}

/// The CPU, with a clock around each operation.
struct Stopwatch {
    inner: CpuDevice,
    costs: Mutex<BTreeMap<String, Cost>>,
}

impl Stopwatch {
    fn new(threads: usize) -> Result<Self, DeviceError> {
        Ok(Self {
            inner: CpuDevice::new(threads)?,
            costs: Mutex::default(),
        })
    }

    fn reset(&self) {
        self.costs.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn print(&self, steps: usize) {
        let costs = self.costs.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rows: Vec<_> = costs.iter().collect();
        rows.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds));
        let steps = steps as f64;
        println!(
            "{:42} {:>5} {:>9} {:>9} {:>8} {:>6}",
            "a step:", "calls", "mean ms", "best ms", "GFLOP/s", "GB/s"
        );
        let mut total = 0.0;
        for (name, cost) in rows {
            let calls = cost.calls / steps;
            let (mean, best) = (cost.seconds * 1e3 / steps, cost.best * 1e3 * calls);
            let [gflops, gbytes] = [cost.flop, cost.bytes].map(|count| count / cost.best / 1e9);
            println!("{name:42} {calls:5.0} {mean:9.2} {best:9.2} {gflops:8.1} {gbytes:6.1}");
            total += best;
        }
        println!("{:42} {:5} {:9} {total:9.2}", "all", "", "");
    }
}

impl Device for Stopwatch {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        self.inner.alloc(spec)
    }

    fn stream(&self) -> Stream {
        self.inner.stream()
    }

    fn enqueue(&self, stream: Stream, op: Op) {
        let (name, cost) = account(&op);
        let started = Instant::now();
        self.inner.enqueue(stream, op);
        let seconds = started.elapsed().as_secs_f64();
        let mut costs = self.costs.lock().unwrap_or_else(PoisonError::into_inner);
        let total = costs.entry(name).or_default();
        let best = if total.calls == 0.0 {
            seconds
        } else {
            total.best.min(seconds)
        };
        *total = Cost {
            calls: total.calls + 1.0,
            seconds: total.seconds + seconds,
            best,
            ..cost
        };
    }

    fn record(&self, stream: Stream) -> Event {
        self.inner.record(stream)
    }

    fn wait_event(&self, stream: Stream, event: &Event, deadline: Instant) {
        self.inner.wait_event(stream, event, deadline);
    }

    fn synchronize(&self, stream: Stream) -> Result<(), DeviceError> {
        self.inner.synchronize(stream)
    }

    fn upload(&self, stream: Stream, dst: &Buffer, bytes: &[u8]) {
        self.inner.upload(stream, dst, bytes);
    }

    fn download(&self, stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
        self.inner.download(stream, src)
    }
}
