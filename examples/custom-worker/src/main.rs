//! A training program of its own: a two-layer network with its backward written out, on synthetic data.
//!
//! It takes its place in the job from a `Session` and has its gradients summed over all ranks by the public `Reducer`, which knows
//! nothing of the network: it only hears "this gradient is ready".

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use ddp_worker::collective::{Launch, ReduceOp, Traffic};
use ddp_worker::device::{ArenaSpec, CpuDevice, DType, Device, Event};
use ddp_worker::model::ParamId;
use ddp_worker::parallel::{
    GradSpec, GradientLayout, JoinOptions, LayoutConfig, Reduced, Reducer, ReducerConfig, Step, join_world,
};
use ddp_worker::session::{Phase, Session};

const FEATURES: usize = 2;
const HIDDEN: usize = 32;
const CLASSES: usize = 3;
const BATCH: u64 = 64;
const STEPS: u64 = 1000;
const LEARNING_RATE: f32 = 1.0;
const UNSEEN: std::ops::Range<u64> = 1 << 40..(1 << 40) + 1000;
const TIMEOUT: Duration = Duration::from_mins(1);

const W1: ParamId = ParamId(0);
const B1: ParamId = ParamId(1);
const W2: ParamId = ParamId(2);
const B2: ParamId = ParamId(3);
const SHAPES: [(&str, &[usize]); 4] = [
    ("w1", &[HIDDEN, FEATURES]),
    ("b1", &[HIDDEN]),
    ("w2", &[CLASSES, HIDDEN]),
    ("b2", &[CLASSES]),
];

fn main() -> Result<()> {
    let session = Session::from_env()?;
    let result = train(&session);
    match &result {
        Ok(net) => println!(
            "accuracy {:.1}%, parameters {:016x}",
            100.0 * net.accuracy(UNSEEN),
            net.fingerprint()
        ),
        // After a lost rank the agent knows the cause; this rank must not be blamed for it.
        Err(error) => match session.verdict() {
            Some(cause) => session.fail(&cause, None, true),
            None => session.fail(&error.to_string(), None, false),
        },
    }
    session.shutdown();
    result.map(|_| ())
}

/// Trains on all ranks; every one ends with the same network.
fn train(session: &Session) -> Result<Net> {
    let comm = join_world(session, &JoinOptions::default())?;
    let device: Arc<dyn Device> = Arc::new(CpuDevice::new(1)?);
    let specs = SHAPES
        .iter()
        .map(|(name, shape)| GradSpec::new(*name, shape))
        .collect();
    // Backward finishes the second layer first.
    let order = [B2, W2, B1, W1];
    let layout = GradientLayout::new(specs, &order, &LayoutConfig::new(comm.size()))?;
    let mut reducer = Reducer::new(&comm, &device, Arc::new(layout), ReducerConfig::default())?;
    let loss_spec = ArenaSpec::on_node("loss", DType::F32, 1);
    let loss = comm.alloc_shared(&device, &loss_spec)?.whole();

    let mut net = Net::new();
    for step in 0..STEPS {
        let first = (step * comm.size() as u64 + comm.rank() as u64) * BATCH;
        let mut grads = reducer.step(1)?;
        let samples_of_all = BATCH * comm.size() as u64;
        loss.host_mut::<f32>()?[0] = net.learn(first..first + BATCH, samples_of_all, &mut grads)?;
        net.update(&grads.finish(Instant::now() + TIMEOUT)?)?;

        let sum = ReduceOp::Sum;
        comm.all_reduce(&loss, sum, Launch::now(Traffic::Other, "loss"))
            .wait(Instant::now() + TIMEOUT)?;
        session.heartbeat(step + 1, Phase::Training, None);
        if comm.rank() == 0 && (step + 1) % 200 == 0 {
            println!("step {}/{STEPS}  loss {:.4}", step + 1, loss.host::<f32>()?[0]);
        }
    }
    comm.shutdown();
    Ok(net)
}

/// `tanh(x·W1ᵀ + b1)·W2ᵀ + b2`; parameters by id, row-major.
struct Net([Vec<f32>; 4]);

impl Net {
    /// The same on every rank: from the element's number alone.
    fn new() -> Self {
        Self(std::array::from_fn(|id| {
            let (name, shape) = SHAPES[id];
            let scale = if name.starts_with('w') { 2.0 } else { 0.0 };
            (0..shape.iter().product())
                .map(|i| scale * (random(id as u64, i as u64) - 0.5))
                .collect()
        }))
    }

    fn param(&self, id: ParamId) -> &[f32] {
        &self.0[id.0]
    }

    /// Hidden activations and class probabilities of one point.
    fn forward(&self, x: [f32; FEATURES]) -> ([f32; HIDDEN], [f32; CLASSES]) {
        let hidden = std::array::from_fn(|h| {
            (dot(&self.param(W1)[h * FEATURES..][..FEATURES], &x) + self.param(B1)[h]).tanh()
        });
        let logits: [f32; CLASSES] = std::array::from_fn(|c| {
            dot(&self.param(W2)[c * HIDDEN..][..HIDDEN], &hidden) + self.param(B2)[c]
        });
        let largest = logits.iter().copied().fold(f32::MIN, f32::max);
        let exp = logits.map(|z| (z - largest).exp());
        let sum: f32 = exp.iter().sum();
        (hidden, exp.map(|e| e / sum))
    }

    /// The samples' part of the mean loss over the `n` samples of all ranks; reports each gradient as soon as it is
    /// complete. Ranks add up losses and gradients, so that both are the mean's.
    fn learn(&self, samples: std::ops::Range<u64>, n: u64, grads: &mut Step<'_>) -> Result<f32> {
        let n = n as f32;
        let points: Vec<_> = samples.map(sample).collect();
        let passes: Vec<_> = points.iter().map(|(x, _)| self.forward(*x)).collect();
        let loss = points
            .iter()
            .zip(&passes)
            .map(|((_, class), (_, p))| -p[*class].ln())
            .sum::<f32>()
            / n;
        let dlogits: Vec<[f32; CLASSES]> = points
            .iter()
            .zip(&passes)
            .map(|((_, class), (_, p))| std::array::from_fn(|c| (p[c] - f32::from(c == *class)) / n))
            .collect();
        for id in [B2, W2] {
            let mut grad = grads.grad_mut::<f32>(id)?;
            for (dlogits, (hidden, _)) in dlogits.iter().zip(&passes) {
                add_layer(&mut grad, dlogits, if id == W2 { hidden } else { &[1.0] });
            }
            drop(grad);
            grads.ready(id, Event::reached())?;
        }
        let dhidden = |dlogits: &[f32; CLASSES], hidden: &[f32; HIDDEN]| -> [f32; HIDDEN] {
            std::array::from_fn(|h| {
                let dh: f32 = (0..CLASSES)
                    .map(|c| dlogits[c] * self.param(W2)[c * HIDDEN + h])
                    .sum();
                dh * (1.0 - hidden[h] * hidden[h])
            })
        };
        for id in [B1, W1] {
            let mut grad = grads.grad_mut::<f32>(id)?;
            for ((dlogits, (hidden, _)), (x, _)) in dlogits.iter().zip(&passes).zip(&points) {
                add_layer(
                    &mut grad,
                    &dhidden(dlogits, hidden),
                    if id == W1 { x } else { &[1.0] },
                );
            }
            drop(grad);
            grads.ready(id, Event::reached())?;
        }
        Ok(loss)
    }

    /// Plain gradient descent by the sum over all ranks: they stay bit-equal.
    fn update(&mut self, reduced: &Reduced<'_>) -> Result<()> {
        for id in [W1, B1, W2, B2] {
            let grad = reduced.grad::<f32>(id)?;
            self.0[id.0]
                .iter_mut()
                .zip(grad.iter())
                .for_each(|(p, g)| *p -= LEARNING_RATE * g);
        }
        Ok(())
    }

    fn accuracy(&self, samples: std::ops::Range<u64>) -> f32 {
        let n = (samples.end - samples.start) as f32;
        let right = samples.map(sample).filter(|(x, class)| {
            let (_, p) = self.forward(*x);
            p.iter().all(|other| *other <= p[*class])
        });
        right.count() as f32 / n
    }

    /// Hash of all bits (FNV-1a), to see that ranks agree.
    fn fingerprint(&self) -> u64 {
        let bits = self.0.iter().flatten().map(|p| u64::from(p.to_bits()));
        bits.fold(0xcbf2_9ce4_8422_2325, |hash, bits| {
            (hash ^ bits).wrapping_mul(0x100_0000_01b3)
        })
    }
}

/// `grad[o, i] += dout[o] · x[i]`
fn add_layer(grad: &mut [f32], dout: &[f32], x: &[f32]) {
    for (row, d) in grad.chunks_mut(x.len()).zip(dout) {
        row.iter_mut().zip(x).for_each(|(g, x)| *g += d * x);
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Point `n` of three arms of a spiral, and its arm: a pure function, so that ranks share nothing but the rule.
fn sample(n: u64) -> ([f32; FEATURES], usize) {
    let class = (n % CLASSES as u64) as usize;
    let radius = random(100, n);
    let noise = 0.3 * (random(101, n) - 0.5);
    let angle = std::f32::consts::TAU * (class as f32 / CLASSES as f32 + 0.5 * radius) + noise;
    ([radius * angle.cos(), radius * angle.sin()], class)
}

/// Number `n` of stream `key`, uniform in [0, 1) (SplitMix64's output function).
fn random(key: u64, n: u64) -> f32 {
    let mut z = key.wrapping_mul(0xd1b5_4a32_d192_ed03) ^ n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 40) as f32 / (1 << 24) as f32
}

#[cfg(test)]
mod tests {
    use ddp_proto::env::WorkerEnv;
    use ddp_proto::ids::{GlobalRank, LocalRank, WorldSize};
    use ddp_worker::session::MemoryStore;

    use super::*;

    #[test]
    fn two_ranks_learn_the_same() {
        let store = Arc::new(MemoryStore::default());
        let nets: Vec<Net> = std::thread::scope(|scope| {
            let start = |rank: u32| {
                let mut env = WorkerEnv::single();
                (env.rank, env.local_rank) = (GlobalRank(rank), LocalRank(rank));
                (env.world_size, env.local_world_size) = (WorldSize(2), 2);
                let session = Session::in_process(env, store.clone());
                scope.spawn(move || train(&session).unwrap())
            };
            let ranks = [start(0), start(1)];
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert_eq!(nets[0].fingerprint(), nets[1].fingerprint());
        let (learned, fresh) = (nets[0].accuracy(UNSEEN), Net::new().accuracy(UNSEEN));
        assert!(learned > 0.95 && fresh < 0.8, "{fresh} to {learned}");
    }
}
