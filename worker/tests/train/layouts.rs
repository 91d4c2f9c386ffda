//! The same numbers under any layout: runs of a generated set of layouts against the same run on one rank.
//!
//! A layout is a mesh (pipeline × data × context × tensor), a schedule with its chunks, what is sharded, sequence parallelism. Each
//! trains a model of some kind in some precision with some recomputation and accumulation. Where the contract says so, the
//! bits are those of one rank (or of as many data-parallel ranks without the rest); else losses and parameters agree to
//! 1e-5. A layout that fails prints the command that repeats it.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use crate::train_support::deferred::DeferredDevice;
use crate::train_support::{Job, Trained};
use ddp_worker::config::{
    Accumulate, ContextAlgorithm, ModelKind, OptimizerKind, PipelineSchedule, Precision, Recompute,
    ShardGroup, Strategy, TrainConfig,
};

/// One of the generated runs.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Layout {
    kind: ModelKind,
    tied: bool,
    /// Several query heads share one of keys and values.
    grouped: bool,
    stages: usize,
    schedule: PipelineSchedule,
    chunks: Option<usize>,
    data: usize,
    strategy: Strategy,
    context: usize,
    /// Ranks that hold the experts of a layer together.
    expert: usize,
    algorithm: ContextAlgorithm,
    tensor: usize,
    sequence: bool,
    precision: Precision,
    recompute: Recompute,
    /// Of each data-parallel rank.
    accumulation: usize,
}

impl Layout {
    fn ranks(&self) -> usize {
        self.stages * self.data * self.context * self.tensor
    }

    fn apply(&self, c: &mut TrainConfig) {
        self.model(c);
        c.train.grad_accumulation = self.accumulation;
        c.parallel.strategy = self.strategy;
        c.parallel.context = self.context;
        c.parallel.expert = self.expert;
        c.parallel.context_algorithm = self.algorithm;
        c.parallel.tensor = self.tensor;
        c.parallel.sequence = self.sequence;
        c.parallel.pipeline.stages = self.stages;
        c.parallel.pipeline.schedule = self.schedule;
        c.parallel.pipeline.chunks = self.chunks;
    }

    /// What the run on one rank has in common with it.
    fn model(&self, c: &mut TrainConfig) {
        c.model.kind = self.kind;
        c.model.tied = Some(self.tied);
        // A chunk has a layer at least.
        let chunks = self.chunks.unwrap_or(2);
        c.model.n_layer = if self.stages * chunks > 4 { 8 } else { 4 };
        c.model.n_head = 4;
        c.model.n_embd = 32;
        if self.kind == ModelKind::Mixtral {
            c.model.experts.count = 8;
            c.model.experts.shared = usize::from(self.tied);
            c.model.experts.z_loss = 0.001;
        }
        if self.kind != ModelKind::Gpt2 {
            c.model.n_kv_head = Some(if self.grouped { 2 } else { 4 });
            c.model.n_inner = Some(48);
        }
        c.train.steps = 3;
        c.train.verify_every = 2;
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
        self.tensor == 1 && self.context == 1 && self.expert == 1 && reduces_once
    }

    /// The same samples a step on data-parallel ranks alone; on one rank they are accumulated.
    fn reference(&self, data: usize) -> Job {
        Job::with(|c| {
            self.model(c);
            c.train.grad_accumulation = self.accumulation * self.data / data;
        })
    }

    /// What repeats it beside the repository's README: the whole configuration, and how it is started.
    fn command(&self) -> String {
        let mut config = Job::with(|c| self.apply(c)).config;
        config.run.out_dir = None;
        config.data.train = PathBuf::from("README.md").into();
        if self.stages > 1 && matches!(self.strategy, Strategy::Zero2 | Strategy::Zero3) {
            // What stages do whatever is said: `sharded` is refused where it is said.
            config.parallel.accumulate = Accumulate::Full;
        }
        let config = serde_json::to_string(&config).unwrap();
        let ranks = self.ranks();
        format!("echo '{config}' > layout.yaml && ddp-run --nproc-per-node {ranks} layout.yaml")
    }
}

/// Options that are dealt one by one, in an order that depends only on the seed of the deck. Each
/// option is dealt equally often, independently of other decks.
struct Deck<T: 'static> {
    options: &'static [T],
    left: Vec<T>,
    state: u64,
}

impl<T: Copy> Deck<T> {
    fn new(seed: u64, options: &'static [T]) -> Self {
        Self {
            options,
            left: Vec::new(),
            state: seed,
        }
    }

    fn deal(&mut self) -> T {
        if self.left.is_empty() {
            self.left.extend_from_slice(self.options);
        }
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let index = (self.state >> 33) as usize % self.left.len();
        self.left.swap_remove(index)
    }
}

/// The numbers of ranks.
const RANKS: [usize; 4] = [1, 2, 4, 8];

/// Kinds, with or without grouped queries.
const KINDS: [(ModelKind, bool); 6] = [
    (ModelKind::Gpt2, false),
    (ModelKind::Mixtral, false),
    (ModelKind::Llama, false),
    (ModelKind::Gpt2, false),
    (ModelKind::Llama, true),
    (ModelKind::Mixtral, true),
];
/// Data-parallel ranks that hold the experts of a layer together; none: every rank holds all of them.
const EXPERTS: [usize; 4] = [0, 1, 2, 4];
/// The same where they are divided.
const DIVIDED: [usize; 2] = [2, 4];
/// And whether ranks share rows.
const PRECISIONS: [(Precision, bool); 4] = [
    (Precision::F32, false),
    (Precision::Bf16, false),
    (Precision::F32, true),
    (Precision::Bf16, true),
];
/// And whether weights are tied.
const RECOMPUTE: [(Recompute, bool); 6] = [
    (Recompute::Norms, false),
    (Recompute::Norms, true),
    (Recompute::Selective, false),
    (Recompute::Selective, true),
    (Recompute::Full, false),
    (Recompute::Full, true),
];
const SCHEDULES: [PipelineSchedule; 6] = [
    PipelineSchedule::OneFOneB,
    PipelineSchedule::Zbv,
    PipelineSchedule::Interleaved,
    PipelineSchedule::ZbH1,
    PipelineSchedule::GPipe,
    PipelineSchedule::Greedy,
];
const CHUNKS: [Option<usize>; 4] = [None, Some(2), Some(3), Some(4)];
const STRATEGIES: [Strategy; 4] = [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3];

/// All of them: four of every mesh, two where it has context ranks, and one more with divided experts where ranks can divide
/// them. Their other choices are made independently of the mesh and of each other.
fn layouts() -> Vec<Layout> {
    let (mut kinds, mut saved) = (Deck::new(15, &KINDS), Deck::new(2, &RECOMPUTE));
    // Alone, a rank shares no rows.
    let mut precisions = Deck::new(3, &PRECISIONS);
    let mut alone = Deck::new(4, &PRECISIONS[..2]);
    let (mut schedules, mut chunks) = (Deck::new(5, &SCHEDULES), Deck::new(6, &CHUNKS));
    let mut strategies = Deck::new(7, &STRATEGIES);
    let mut counts = Deck::new(8, &[1, 2, 3]);
    let (mut experts, mut divided) = (Deck::new(9, &EXPERTS), Deck::new(11, &DIVIDED));
    let mut algorithms = Deck::new(10, &[ContextAlgorithm::Gather, ContextAlgorithm::Ring]);
    let mut layouts = Vec::new();
    for [stages, data, context, tensor] in RANKS.into_iter().flat_map(meshes) {
        let of_any_kind = if context > 1 { 2 } else { 4 };
        for number in 0..of_any_kind + usize::from(data * context > 1) {
            let divides_experts = number == of_any_kind;
            let schedule = match stages {
                1 => PipelineSchedule::OneFOneB,
                _ => schedules.deal(),
            };
            let chunks = match schedule {
                PipelineSchedule::GPipe | PipelineSchedule::Interleaved | PipelineSchedule::ZbH1 => {
                    chunks.deal()
                }
                _ => None,
            };
            let ((kind, grouped), (recompute, tied)) = (kinds.deal(), saved.deal());
            let kind = if divides_experts { ModelKind::Mixtral } else { kind };
            let (precision, sequence) = match tensor {
                1 => alone.deal(),
                _ => precisions.deal(),
            };
            let count = counts.deal();
            layouts.push(Layout {
                kind,
                tied,
                // A rank has a head of keys and values at least.
                grouped: grouped && tensor <= 2,
                stages,
                schedule,
                // Of 8 layers.
                chunks: chunks.map(|chunks: usize| chunks.min(8 / stages)),
                data,
                strategy: match data * context {
                    1 => Strategy::Ddp,
                    _ => strategies.deal(),
                },
                context,
                expert: match kind {
                    ModelKind::Mixtral if divides_experts => context * divided.deal().min(data),
                    ModelKind::Mixtral => (context * experts.deal().min(data)).max(1),
                    _ => 1,
                },
                algorithm: match context {
                    1 => ContextAlgorithm::Gather,
                    _ => algorithms.deal(),
                },
                tensor,
                sequence,
                precision,
                recompute,
                accumulation: match stages {
                    1 => count,
                    4 => [3, 8, 9][count - 1],
                    _ => [2, 4, 5][count - 1],
                },
            });
        }
    }
    layouts
}

/// Stages, data-parallel, context and tensor ranks.
fn meshes(ranks: usize) -> Vec<[usize; 4]> {
    let divisors = |n: usize| (1..=n.min(4)).filter(move |d| n.is_multiple_of(*d));
    let mut meshes = Vec::new();
    for (context, stages) in
        divisors(ranks).flat_map(|context| divisors(ranks / context).map(move |stages| (context, stages)))
    {
        let rest = ranks / context / stages;
        meshes.extend(divisors(rest).map(|tensor| [stages, rest / tensor, context, tensor]));
    }
    meshes
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

/// Losses, norms, and the distance of every parameter in terms of its length.
fn close(
    (one, job): (&Trained, &Job),
    (other, other_job): (&Trained, &Job),
    tolerance: f64,
) -> Result<(), String> {
    for (a, b) in one.metrics.iter().zip(&other.metrics) {
        let step = a.step;
        for (what, a, b) in [("loss", a.loss, b.loss), ("norm", a.grad_norm, b.grad_norm)] {
            let error = (a - b).abs() / a;
            if error > tolerance {
                return Err(format!("step {step}: {what} {a} and {b}, off by {error:.1e}"));
            }
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
    } else if layout.tensor == 1 && layout.context == 1 {
        // Where an expert is makes no difference to forward.
        let alike = layout.reference(layout.data).train(layout.data as u32);
        let losses = [&alike, &found].map(|run| run.metrics[0].loss);
        if losses[0].to_bits() != losses[1].to_bits() {
            return Err(format!("losses of the first step: {losses:?}"));
        }
    }
    let tolerance = match layout.precision {
        Precision::Bf16 => 2e-2,
        _ => 1e-5,
    };
    let alone = layout.reference(1);
    close((&alone.train(1), &alone), (&found, &job), tolerance)
}

fn all_equal_one_rank(ranks: usize) {
    let layouts: Vec<Layout> = layouts()
        .into_iter()
        .filter(|layout| layout.ranks() == ranks)
        .collect();
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

/// The choices that some layout makes.
fn found<T: Ord>(of: impl Fn(&Layout) -> Option<T>) -> Vec<T> {
    let set: BTreeSet<T> = layouts().iter().filter_map(of).collect();
    set.into_iter().collect()
}

#[test]
fn many_layouts_are_generated_and_every_choice_is_among_them() {
    let of = |belongs: fn(&Layout) -> bool| layouts().iter().filter(|layout| belongs(layout)).count();
    let counts = [of(|_| true), of(|l| l.context > 1), of(|l| l.expert > 1)];
    assert!(
        counts[0] >= 120 && counts[1] >= 40 && counts[2] >= 30,
        "{counts:?}"
    );
    let shared = |of: fn(&Layout) -> String| found(|layout| (layout.data > 1).then(|| of(layout)));
    let piped = |of: fn(&Layout) -> String| found(|layout| (layout.stages > 1).then(|| of(layout)));
    let cut = |of: fn(&Layout) -> String| found(|layout| (layout.tensor > 1).then(|| of(layout)));
    let parted = |of: fn(&Layout) -> String| found(|layout| (layout.context > 1).then(|| of(layout)));
    assert_eq!(parted(|l| format!("{:?} {}", l.strategy, l.context)).len(), 8);
    assert_eq!(parted(|l| format!("{:?} {:?}", l.strategy, l.algorithm)).len(), 8);
    assert_eq!(
        parted(|l| format!("{:?} {} {}", l.kind, l.stages > 1, l.tensor > 1)).len(),
        12
    );
    // Beside stages, and without them.
    assert_eq!(shared(|l| format!("{:?} {}", l.strategy, l.stages > 1)).len(), 8);
    assert_eq!(shared(|l| format!("{:?} {}", l.strategy, l.tensor > 1)).len(), 8);
    assert_eq!(piped(|l| format!("{:?}", l.schedule)).len(), 6);
    assert_eq!(piped(|l| format!("{:?}", l.kind)).len(), 3);
    let divided = |of: fn(&Layout) -> String| found(|layout| (layout.expert > 1).then(|| of(layout)));
    assert_eq!(divided(|l| format!("{:?} {}", l.strategy, l.stages > 1)).len(), 8);
    assert_eq!(divided(|l| format!("{} {}", l.context, l.tensor > 1)).len(), 6);
    assert_eq!(
        divided(|l| format!("{:?} {}", l.precision, l.accumulation > 1)).len(),
        4
    );
    assert_eq!(divided(|l| format!("{}", l.expert)), ["2", "4", "8"]);
    assert_eq!(piped(|l| format!("{:?}", l.chunks)).len(), 4, "none, 2, 3 and 4");
    assert_eq!(
        cut(|l| format!("{:?} {:?} {}", l.kind, l.precision, l.sequence)).len(),
        12
    );
    assert_eq!(
        cut(|l| format!("{} {}", l.kind == ModelKind::Llama && l.grouped, l.tensor)),
        ["false 2", "false 4", "true 2"]
    );
    assert_eq!(found(|l| Some(format!("{:?} {}", l.recompute, l.tied))).len(), 6);
    let accumulated = |l: &Layout| Some((l.stages > 1, l.accumulation > 1, l.strategy == Strategy::Zero3));
    assert_eq!(
        found(accumulated).len(),
        6,
        "a pipeline has several micro-batches"
    );
}

/// Slices of two copies are summed within a group and then over the groups, beside stages and beside tensor ranks.
#[test]
fn copies_of_shards_beside_stages_and_tensor_ranks_equal_one_rank() {
    for [stages, tensor] in [[2, 1], [1, 2]] {
        let strategy = Strategy::Zero3;
        let layouts = layouts().into_iter();
        let mut layouts =
            layouts.filter(|layout| [layout.stages, layout.tensor, layout.context] == [stages, tensor, 1]);
        let layout = layouts
            .find(|layout| layout.data == 4)
            .expect("there are four of the mesh");
        let layout = Layout {
            strategy,
            precision: Precision::F32,
            ..layout
        };
        let job = Job::with(|c| {
            layout.apply(c);
            c.parallel.shard_group = Some(ShardGroup::Ranks(2));
        });
        let found = job.train(layout.ranks() as u32);
        let alone = layout.reference(1);
        close((&alone.train(1), &alone), (&found, &job), 1e-5).unwrap();
    }
}

/// Nothing runs there before somebody waits for it: what does not wait for the sum of the others comes too early.
#[test]
fn tensor_ranks_whose_devices_defer_everything_make_the_same_bits() {
    for sequence in [false, true] {
        let layout = layouts()
            .into_iter()
            .find(|l| [l.stages, l.context, l.tensor] == [1, 1, 2] && l.sequence == sequence);
        let layout = layout.expect("there are four of the mesh");
        let (at_once, mut later) = (Job::with(|c| layout.apply(c)), Job::with(|c| layout.apply(c)));
        later.device = Some(Box::new(|_| Arc::new(DeferredDevice::new())));
        let ranks = layout.ranks() as u32;
        same_bits(&at_once.train(ranks), &later.train(ranks)).unwrap();
    }
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
