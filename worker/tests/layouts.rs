//! The same numbers under any layout: runs of a generated set of layouts against the same run on one rank.
//!
//! A layout is a mesh (pipeline × data × tensor), a schedule with its chunks, what is sharded, sequence parallelism. Each
//! trains a model of some kind in some precision with some recomputation and accumulation. Where the contract says so, the
//! bits are those of one rank (or of as many data-parallel ranks without the rest); else losses and parameters agree to
//! 1e-5. A layout that fails prints the command that repeats it.

mod train_support;

use ddp_worker::config::{
    ModelKind, OptimizerKind, PipelineSchedule, Precision, Recompute, Strategy, TrainConfig,
};
use train_support::{Job, Trained};

/// One of the generated runs.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Layout {
    kind: ModelKind,
    tied: bool,
    stages: usize,
    schedule: PipelineSchedule,
    data: usize,
    strategy: Strategy,
    tensor: usize,
    sequence: bool,
    precision: Precision,
    recompute: Recompute,
    /// Of each data-parallel rank.
    accumulation: usize,
}

impl Layout {
    fn ranks(&self) -> usize {
        self.stages * self.data * self.tensor
    }

    fn apply(&self, c: &mut TrainConfig) {
        self.model(c);
        c.train.grad_accumulation = self.accumulation;
        c.parallel.strategy = self.strategy;
        c.parallel.tensor = self.tensor;
        c.parallel.sequence = self.sequence;
        c.parallel.pipeline.stages = self.stages;
        c.parallel.pipeline.schedule = self.schedule;
    }

    /// What the run on one rank has in common with it.
    fn model(&self, c: &mut TrainConfig) {
        c.model.kind = self.kind;
        c.model.tied = Some(self.tied);
        // A chunk has a layer at least.
        c.model.n_layer = if self.stages == 4 { 8 } else { 4 };
        c.model.n_head = 4;
        c.model.n_embd = 32;
        if self.kind == ModelKind::Llama {
            c.model.n_kv_head = Some(4);
            c.model.n_inner = Some(48);
        }
        c.train.steps = 20;
        c.train.verify_every = 10;
        c.train.micro_batch = 2;
        c.train.precision = self.precision;
        c.train.recompute = self.recompute;
        // Its update is linear in the gradient: small differences stay small.
        c.train.optimizer.kind = OptimizerKind::Sgd;
        c.train.optimizer.lr = 0.05;
    }

    /// To as many data-parallel ranks, each of which holds everything: sums are the same ones, in the same order. Slices
    /// that are reduced in every micro-batch are added up in another order.
    fn is_bit_equal(&self) -> bool {
        let reduces_once = self.accumulation == 1
            || self.stages > 1
            || matches!(self.strategy, Strategy::Ddp | Strategy::Zero1);
        self.tensor == 1 && reduces_once
    }

    /// The same samples a step on data-parallel ranks alone; on one rank they are accumulated.
    fn reference(&self, data: usize) -> Job {
        Job::with(|c| {
            self.model(c);
            c.train.grad_accumulation = self.accumulation * self.data / data;
        })
    }

    /// The words that repeat it.
    fn command(&self) -> String {
        let word = |value: serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        let schedule = word(serde_json::to_value(self.schedule).unwrap());
        let strategy = word(serde_json::to_value(self.strategy).unwrap());
        let kind = word(serde_json::to_value(self.kind).unwrap());
        let precision = word(serde_json::to_value(self.precision).unwrap());
        let recompute = word(serde_json::to_value(self.recompute).unwrap());
        format!(
            "ddp-run --nproc-per-node {} train.yaml --set model.kind={kind} --set model.tied={} --set parallel.pipeline.stages={} --set parallel.pipeline.schedule={schedule} --set parallel.strategy={strategy} --set parallel.tensor={} --set parallel.sequence={} --set train.precision={precision} --set train.recompute={recompute} --set train.grad_accumulation={}",
            self.ranks(),
            self.tied,
            self.stages,
            self.tensor,
            self.sequence,
            self.accumulation
        )
    }
}

/// Layouts of so many ranks: every mesh, with the other choices spread over them so that each is met with many others.
fn layouts(ranks: usize) -> Vec<Layout> {
    const SCHEDULES: [PipelineSchedule; 7] = [
        PipelineSchedule::OneFOneB,
        PipelineSchedule::Zbv,
        PipelineSchedule::Interleaved,
        PipelineSchedule::ZbH1,
        PipelineSchedule::GPipe,
        PipelineSchedule::DualPipeV,
        PipelineSchedule::Greedy,
    ];
    const STRATEGIES: [Strategy; 4] = [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3];
    const RECOMPUTE: [Recompute; 3] = [Recompute::None, Recompute::Selective, Recompute::Full];
    let divisors = |n: usize| (1..=n).filter(move |d| n.is_multiple_of(*d));
    let mut layouts = Vec::new();
    for stages in divisors(ranks).filter(|stages| *stages <= 4) {
        for tensor in divisors(ranks / stages).filter(|tensor| *tensor <= 4) {
            let data = ranks / stages / tensor;
            for turn in 0..4 {
                let i = layouts.len();
                layouts.push(Layout {
                    kind: if turn % 2 == 0 {
                        ModelKind::Gpt2
                    } else {
                        ModelKind::Llama
                    },
                    tied: i % 3 != 1,
                    stages,
                    schedule: SCHEDULES[i % SCHEDULES.len()],
                    data,
                    strategy: if data == 1 {
                        Strategy::Ddp
                    } else {
                        STRATEGIES[(i + turn) % 4]
                    },
                    tensor,
                    sequence: tensor > 1 && turn >= 2,
                    precision: if turn == 3 {
                        Precision::Bf16
                    } else {
                        Precision::F32
                    },
                    recompute: RECOMPUTE[i % 3],
                    accumulation: if stages > 1 { 2 * stages } else { 1 + turn % 2 },
                });
            }
        }
    }
    layouts
}

/// The bits of losses, norms, parameters and moments.
fn same_bits(one: &Trained, other: &Trained) -> Result<(), String> {
    for (a, b) in one.metrics.iter().zip(&other.metrics) {
        if a.loss.to_bits() != b.loss.to_bits() || a.grad_norm.to_bits() != b.grad_norm.to_bits() {
            return Err(format!(
                "step {}: loss {} and {}, norm {} and {}",
                a.step, a.loss, b.loss, a.grad_norm, b.grad_norm
            ));
        }
    }
    let differs = one
        .state
        .iter()
        .find(|(name, hash)| other.state.get(*name) != Some(hash));
    differs.map_or(Ok(()), |(name, _)| Err(format!("tensor `{name}` differs")))
}

/// Losses, and the distance of every parameter in terms of its length.
fn close(
    (one, job): (&Trained, &Job),
    (other, other_job): (&Trained, &Job),
    tolerance: f64,
) -> Result<(), String> {
    for (a, b) in one.metrics.iter().zip(&other.metrics) {
        let error = (a.loss - b.loss).abs() / a.loss;
        if error > tolerance {
            return Err(format!(
                "step {}: loss {} and {}, off by {error:.1e}",
                a.step, a.loss, b.loss
            ));
        }
    }
    let (one, other) = (job.parameters(), other_job.parameters());
    for (key, values) in &one {
        let squares = |f: &dyn Fn(usize) -> f64| (0..values.len()).map(f).map(|x| x * x).sum::<f64>();
        let length = squares(&|i| f64::from(values[i])).sqrt();
        let distance = squares(&|i| f64::from(values[i]) - f64::from(other[key][i])).sqrt();
        // Biases begin at zero: they are held to the distance alone.
        if distance > tolerance * length.max(1.0) {
            return Err(format!("`{key}` is {distance:.1e} away, of length {length:.1e}"));
        }
    }
    Ok(())
}

/// First values, to the bit: a step at learning rate 0 leaves them.
fn same_first_values(layout: &Layout) -> Result<(), String> {
    let standing_still = |c: &mut TrainConfig| {
        c.train.steps = 1;
        c.train.optimizer.lr = 0.0;
    };
    let job = Job::with(|c| {
        layout.apply(c);
        standing_still(c);
    });
    let alone = Job::with(|c| {
        layout.model(c);
        standing_still(c);
    });
    job.train(layout.ranks() as u32);
    alone.train(1);
    let (found, expected) = (job.parameters(), alone.parameters());
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let differs = expected
        .iter()
        .find(|(key, values)| found.get(*key).is_none_or(|found| bits(found) != bits(values)));
    differs.map_or(Ok(()), |(key, _)| {
        Err(format!("the first values of `{key}` differ"))
    })
}

fn check(layout: Layout) -> Result<(), String> {
    same_first_values(&layout)?;
    let job = Job::with(|c| layout.apply(c));
    let found = job.train(layout.ranks() as u32);
    if layout.is_bit_equal() {
        let alike = layout.reference(layout.data);
        same_bits(&alike.train(layout.data as u32), &found)?;
    }
    let tolerance = match layout.precision {
        Precision::Bf16 => 2e-2,
        _ => 1e-5,
    };
    let alone = layout.reference(1);
    close((&alone.train(1), &alone), (&found, &job), tolerance)
}

fn all_equal_one_rank(ranks: usize) {
    let layouts = layouts(ranks);
    let failures: Vec<String> = layouts
        .iter()
        .filter_map(|layout| {
            let error = check(*layout).err()?;
            Some(format!("{error}\n  {layout:?}\n  {}", layout.command()))
        })
        .collect();
    assert!(
        failures.is_empty(),
        "{} of {} layouts:\n{}",
        failures.len(),
        layouts.len(),
        failures.join("\n")
    );
}

#[test]
fn sixty_layouts_at_least_are_generated() {
    let count: usize = [1, 2, 4, 8].map(|ranks| layouts(ranks).len()).iter().sum();
    assert!(count >= 60, "{count}");
}

#[test]
fn layouts_of_one_rank_equal_it() {
    all_equal_one_rank(1);
}

#[test]
fn layouts_of_two_ranks_equal_one() {
    all_equal_one_rank(2);
}

#[test]
fn layouts_of_four_ranks_equal_one() {
    all_equal_one_rank(4);
}

#[test]
fn layouts_of_eight_ranks_equal_one() {
    all_equal_one_rank(8);
}
