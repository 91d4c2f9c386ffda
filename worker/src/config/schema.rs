//! `train.yaml` as types. A line of a section is a field, its row in the table of keys, and its line in
//! `docs/reference.md`: adding a key touches this file and the code that reads it; CONTRIBUTING.md lists the rest.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

use super::source::Value;
use super::table::{
    Allowed, BELOW_ONE, DEGREE, Key, KeyValue, MIB, NOT_NEGATIVE, SECONDS, STEPS, allowed, is_path,
    is_read_as, only, row, sections, words,
};
use super::tokenizer::{Tokenizer, Vocabulary};

/// A whole `train.yaml`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// The directory of the run, and how it begins.
    pub run: Run,
    /// The network.
    pub model: Model,
    /// The tokens.
    pub data: Data,
    /// Steps, batch, optimizer.
    pub train: Train,
    /// How ranks work together.
    pub parallel: Parallel,
    /// Defaults of the command-line flags, by name; read by the launcher.
    #[serde(default)]
    pub launch: BTreeMap<String, Json>,
    /// Of `data.tokenizer`; of `bytes` until [`super::Located::complete`] is called.
    #[serde(skip)]
    pub vocabulary: Arc<Vocabulary>,
}

sections! {
    /// `run:`
    Run at "run." {
        /// Name of the run.
        name: String = "train";
        /// Directory for metrics, checkpoints and logs; by default `runs/<name>/<run id>`.
        out_dir: Option<PathBuf>;
        /// Seed of initial weights, data order and everything random.
        seed: u64 = 1337;
        /// What to do when `out_dir` holds a run.
        resume: Resume = "never";
        /// Delete the run that `out_dir` holds.
        overwrite: bool = false;
        /// Steps to record in a timeline, at most 100.
        timeline: Option<StepRange>;
        /// Write scalars for TensorBoard to `tensorboard/` in the run's directory.
        tensorboard: bool = false;
    }

    /// `model:`
    Model at "model." {
        /// Architecture.
        kind: ModelKind;
        /// Transformer layers (blocks).
        n_layer: usize, DEGREE;
        /// Attention heads; must divide `n_embd`.
        n_head: usize = 1, DEGREE;
        /// `llama`, `mixtral`: key and value heads, by default `n_head`; must divide `n_head` (Ainslie et al. 2023).
        n_kv_head: Option<usize>, DEGREE;
        /// Channels (hidden size).
        n_embd: usize, Allowed::Whole(1..=1 << 17);
        /// Width of the feed-forward layers; the default depends on `kind`.
        n_inner: Option<usize>, Allowed::Whole(1..=1 << 20);
        /// Positions per sample (sequence length).
        block_size: usize, Allowed::Whole(1..=1 << 20);
        /// Size of the vocabulary, at least the tokenizer's, which is the default.
        vocab_size: Option<usize>, Allowed::Whole(1..=1 << 22);
        /// `llama`, `mixtral`: epsilon of RMS norm.
        norm_eps: f64 = 1e-5;
        /// `llama`, `mixtral`: base of the rotary angles.
        rope_theta: f64 = 10000.0;
        /// `llama`, `mixtral`: scaled rotary angles, for longer sequences than those of the original training.
        rope_scaling { Option<RopeScaling> };
        /// The head uses the matrix of the token embedding; by default with `gpt2` only.
        tied: Option<bool>;
        /// Initial weights, as published; random by default. A relative path counts from the YAML's directory.
        init_from: Option<PathBuf>, Allowed::Form("the path of a directory or of a `.safetensors` file", is_path);
        /// Dropout probability in training, of the embedding, of attention's probabilities and of each layer's output.
        dropout: f32 = 0.0, BELOW_ONE;
        /// The experts of a `mixtral`.
        experts { Experts };
    }

    /// `model.experts`
    Experts at "model.experts." {
        /// Experts of a layer.
        count: usize = 8, DEGREE;
        /// Experts that a token goes to. With 1, the weight is the score (Fedus et al. 2022); with more, scores are divided
        /// by their sum, as transformers' Mixtral always does.
        top_k: usize = 2, DEGREE;
        /// Every Nth layer has experts; the others are those of `llama`.
        every: usize = 1, DEGREE;
        /// Most of a rank's own rows of a micro-batch that an expert takes in training, as a multiple of the mean; it drops the
        /// others. By default it takes all.
        capacity: Option<f64>;
        /// Factor of the load-balancing loss (Fedus et al. 2022).
        aux_loss: f32 = 0.01, NOT_NEGATIVE;
        /// Factor of the router's z-loss (Zoph et al. 2022).
        z_loss: f32 = 0.0, NOT_NEGATIVE;
        /// Experts that every token goes to, beside the others (Dai et al. 2024).
        shared: usize = 0, Allowed::Whole(0..=1 << 12);
        /// How the router's numbers become scores.
        score: RouterScore = "softmax";
    }

    /// `model.rope_scaling`: slower rotation of the channels that turn slowly, as in Llama 3.1 (Grattafiori et al. 2024).
    RopeScaling at "model.rope_scaling." {
        /// Divisor of the slow angles.
        factor: f64;
        /// Angles with fewer rotations than this within `original_positions` are divided by `factor`.
        low_freq_factor: f64;
        /// Angles with more rotations than this are unchanged.
        high_freq_factor: f64;
        /// Sequence length of the original training.
        original_positions: usize;
    }

    /// `data:`
    Data at "data." {
        /// Training data: a text, or token files. A relative path counts from the YAML's directory.
        train: Paths;
        /// Validation data; by default the last tenth of `train`, held out.
        val: Option<Paths>;
        /// How text becomes tokens.
        tokenizer: Tokenizer = "bytes";
        /// Numbers of a token file without a header, such as nanoGPT's `.bin`. Files with a header say it themselves.
        dtype: Option<TokenDtype>;
        /// Order of the samples.
        order: Order = "shuffled";
        /// What happens to the samples at the end of an epoch that do not fill a global batch.
        last_batch: LastBatch = "wrap";
    }

    /// `train:`
    Train at "train." {
        /// Optimizer steps.
        steps: u64 = 1000, STEPS;
        /// Samples per forward pass and replica.
        micro_batch: usize = 8;
        /// Micro-batches per step.
        grad_accumulation: usize = 1;
        /// Arithmetic and storage.
        precision: Precision = "f32";
        /// What to do when loss or gradient of a step is not finite.
        on_nonfinite: OnNonFinite = "stop";
        /// With `on_nonfinite: skip`: most skipped steps in a row.
        max_skips: u64 = 10, STEPS;
        /// What backward computes again instead of keeping it.
        recompute: Recompute = "norms";
        /// Largest global norm of the gradient.
        grad_clip: Option<f32> = 1.0, Allowed::Number("a number above 0, or empty not to clip", |x| x > 0.0);
        /// The optimizer.
        optimizer { OptimizerConfig };
        /// Where the state of training is kept.
        offload { Offload };
        /// The learning rate over the steps.
        schedule { Schedule };
        /// What happens to the global batch when the number of ranks changes.
        rescale: Rescale = "keep_global_batch";
        /// How a new rank gets the state that only a dead one had.
        recovery: Recovery = "none";
        /// How the learning rate follows the size of the global batch.
        lr_scaling: LrScaling = "none";
        /// With `lr_scaling: linear`: global batch, in samples, for which `optimizer.lr` was tuned.
        base_batch: Option<u64>, STEPS;
        /// Steps between validations; 0: only at the end.
        eval_every: u64 = 0;
        /// Steps between checkpoints; 0: only at the end.
        checkpoint_every: u64 = 0;
        /// Write checkpoints while training continues, from a copy in host memory.
        checkpoint_async: bool = true;
        /// Seconds without progress after which a save fails.
        checkpoint_timeout_s: f64 = 300.0, SECONDS;
        /// Which checkpoints stay; all of them by default.
        checkpoint_keep { Option<CheckpointKeep> };
        /// Steps between comparisons of all parameters across ranks; 0: never.
        verify_every: u64 = 0;
        /// Steps between step lines on the console; by default one line per second at first, fewer later.
        log_every: Option<u64>, STEPS;
        /// Compute threads per rank; by default `OMP_NUM_THREADS`, which `ddp-run` sets, else 1.
        threads: Option<usize>, DEGREE;
    }

    /// `train.optimizer`
    OptimizerConfig at "train.optimizer." {
        /// The algorithm.
        kind: OptimizerKind = "adamw";
        /// Peak learning rate.
        lr: f32 = 3e-4, NOT_NEGATIVE;
        /// Decay of the two moments: by default 0.9 and 0.95, with `lion` 0.9 and 0.99.
        betas: Option<[f32; 2]>;
        /// Added to the denominator.
        eps: f32 = 1e-8;
        /// Weight decay; norms and biases have none, unless a group has its own.
        weight_decay: f32 = 0.1, NOT_NEGATIVE;
        /// Decay of the momentum: by default 0.9, with `muon` 0.95.
        momentum: Option<f32>, BELOW_ONE;
        /// Nesterov momentum; by default with `muon` only.
        nesterov: Option<bool>;
        /// Parameter groups with numbers of their own. The first group whose pattern matches counts.
        groups: Vec<OptimizerGroup> = [];
    }

    /// `train.offload`
    Offload at "train.offload." {
        /// Where the optimizer's state is kept.
        optimizer: OffloadTarget = "none";
        /// `zero3`: where shards of parameters and gradients are kept.
        parameters: OffloadTarget = "none";
        /// With `optimizer: file`: directory on the file system to use; by default the run's.
        dir: Option<PathBuf>;
    }

    /// `train.schedule`
    Schedule at "train.schedule." {
        /// Learning rate after the warm-up.
        kind: LearningRate = "cosine";
        /// Steps of the linear warm-up from 0 to the peak.
        warmup_steps: u64 = 0;
        /// With `kind: wsd`: steps of the decay at the end.
        decay_steps: Option<u64>, STEPS;
        /// Learning rate at the last step, with `inverse_sqrt` the least one; at most `optimizer.lr`.
        min_lr: f32 = 0.0, NOT_NEGATIVE;
    }

    /// `train.checkpoint_keep`
    CheckpointKeep at "train.checkpoint_keep." {
        /// Keep this many of the newest checkpoints.
        last: usize;
        /// Also keep checkpoints whose step is a multiple of this.
        every: Option<u64>, STEPS;
    }

    /// `parallel:`
    Parallel at "parallel." {
        /// What is sharded over the data-parallel ranks.
        strategy: Strategy = "ddp";
        /// What `zero2` and `zero3` hold of the gradients between the micro-batches of a step.
        accumulate: Accumulate = "sharded";
        /// `zero3`: release the parameters of a block after its forward, and gather them again for its backward.
        reshard_after_forward: bool = true;
        /// `zero3`: groups of fewer elements stay gathered from step to step.
        persist_below: usize = 0, u64::ALLOWED;
        /// Type of the gradients while they are averaged.
        reduce_dtype: ReduceDtype = "f32";
        /// Data-parallel ranks per copy of the state; by default all.
        shard_group: Option<ShardGroup>;
        /// Ranks that hold the experts of a layer together, each some of them.
        expert: usize = 1, DEGREE;
        /// Context-parallel ranks: each computes a part of the positions of every sample.
        context: usize = 1, DEGREE;
        /// How attention reaches the keys and values of other context ranks.
        context_algorithm: ContextAlgorithm = "gather";
        /// Tensor-parallel ranks: each holds a part of every matrix.
        tensor: usize = 1, DEGREE;
        /// Sequence parallelism: norms and the residual stream hold a part of the rows on each tensor rank.
        sequence: bool = false;
        /// Let a tensor group span nodes.
        tensor_across_nodes: bool = false;
        /// Stages of a pipeline.
        pipeline { Pipeline };
        /// How gradients are averaged.
        sync: Sync = "bucketed";
        /// `ddp`: sum the gradients of every micro-batch, not of a step, as PyTorch does without `no_sync`.
        sync_each_batch: bool = false;
        /// Communicate while backward runs.
        overlap: bool = true;
        /// Size of a gradient bucket, MiB.
        bucket_mb: f64 = 25.0, MIB;
        /// Size of the first bucket, MiB: smaller, so that communication starts early.
        first_bucket_mb: f64 = 1.0, MIB;
        /// Device and transport.
        backend: Backend = "auto";
        /// Seconds that a collective waits for other ranks.
        timeout_s: f64 = 300.0, SECONDS;
    }

    /// `parallel.pipeline`
    Pipeline at "parallel.pipeline." {
        /// Ranks of a pipeline.
        stages: usize = 1, DEGREE;
        /// The order in which they compute.
        schedule: PipelineSchedule = "1f1b";
        /// Chunks (virtual stages) per rank; by default as few as the schedule works with.
        chunks: Option<usize>, DEGREE;
        /// Layers of each chunk, in the order of the model; by default divided by cost.
        layers: Option<Vec<usize>>;
    }
}

/// The row of all keys of the section `launch`.
static LAUNCH: [Option<Key>; 1] = [Some(Key {
    path: "launch.<flag>",
    about: " Default of a `ddp-run` flag, such as `nproc_per_node` or `max_restarts`.",
    default: None,
    is_nullable: true,
    allowed: Allowed::Form("finite numbers", is_finite),
})];

/// All rows, in the order of the sections.
pub(super) fn keys() -> impl Iterator<Item = &'static Key> {
    TABLES.iter().copied().chain([&LAUNCH[..]]).flatten().flatten()
}

/// A section, from values in which some keys may be left out: in a checkpoint of an older build, those that were added
/// since. `path` is that of the section, empty for the whole configuration.
pub fn section<T: DeserializeOwned>(path: &str, mut values: Json) -> serde_json::Result<T> {
    for key in keys() {
        let (Some(default), Some(below)) = (key.default, key.path.strip_prefix(path)) else {
            continue;
        };
        let (sections, name) = below.rsplit_once('.').unwrap_or(("", below));
        let mut sections = sections.split('.').filter(|section| !section.is_empty());
        let section = sections.try_fold(&mut values, |above, section| {
            let above = above.as_object_mut()?.entry(section);
            Some(above.or_insert_with(|| json!({})))
        });
        if let Some(Json::Object(section)) = section
            && !section.contains_key(name)
        {
            section.insert(name.to_owned(), serde_json::from_str(default)?);
        }
    }
    serde_json::from_value(values)
}

impl Copy for RopeScaling {}
impl Copy for CheckpointKeep {}
impl Copy for Experts {}

macro_rules! with_defaults {
    ($($name:ident at $path:literal),+) => { $(
        impl Default for $name {
            fn default() -> Self {
                section($path, json!({})).expect("the table has a default for each key of the section")
            }
        }
    )+ };
}

with_defaults! {
    Run at "run", Train at "train", OptimizerConfig at "train.optimizer", Schedule at "train.schedule",
    Parallel at "parallel", Pipeline at "parallel.pipeline"
}

/// One layer of GPT-2 with one channel, for code that sets the sizes it needs.
impl Default for Model {
    fn default() -> Self {
        let smallest = json!({ "kind": "gpt2", "n_layer": 1, "n_embd": 1, "block_size": 1 });
        section("model", smallest).expect("the table has a default for each other key")
    }
}

words! {
    /// `run.resume`
    Resume {
        /// Refuse a directory that holds a run of another job, or a finished run.
        Never = "never",
        /// Resume if there is a checkpoint, else start.
        Auto = "auto",
        /// Resume, or fail.
        Require = "require",
    }

    /// `model.kind`
    ModelKind {
        /// GPT-2 (Radford et al. 2019).
        Gpt2 = "gpt2",
        /// Llama: RMS norms, rotary positions, SwiGLU, grouped queries, no biases (Touvron et al. 2023).
        Llama = "llama",
        /// GPT-2 without attention: every position sees itself only.
        Mlp = "mlp",
        /// Llama whose feed-forward layers are experts (Jiang et al. 2024).
        Mixtral = "mixtral",
    }

    /// `model.experts.score`
    RouterScore {
        /// Of all experts, they add up to 1.
        Softmax = "softmax",
        /// Each is a number from 0 to 1.
        Sigmoid = "sigmoid",
    }

    /// `data.dtype`
    TokenDtype {
        /// Two bytes per token, little-endian.
        Uint16 = "uint16",
        /// Four bytes per token, little-endian.
        Uint32 = "uint32",
    }

    /// `data.order`
    Order {
        /// A new permutation each epoch, and after the first a new offset of the samples, from (seed, epoch).
        Shuffled = "shuffled",
        /// The order of the file.
        Sequential = "sequential",
    }

    /// `data.last_batch`
    LastBatch {
        /// The next epoch begins within the batch.
        Wrap = "wrap",
        /// They are a smaller batch of their own, in which every sample has the same weight.
        Short = "short",
    }

    /// `train.precision`
    Precision {
        /// Everything in f32.
        F32 = "f32",
        /// Parameters and activations in bf16, with f32 masters and moments.
        Bf16 = "bf16",
        /// As f32, but matrix products round their operands to 10 bits of mantissa: GPUs only.
        Tf32 = "tf32",
    }

    /// `train.on_nonfinite`
    OnNonFinite {
        /// End the run, and name the rank that saw it first.
        Stop = "stop",
        /// Leave parameters and moments as they are, and continue with the next step.
        Skip = "skip",
    }

    /// `train.recompute`: see [`crate::model::Keep`] for the memory of each.
    Recompute {
        /// Backward keeps all that it reads.
        Nothing = "nothing",
        /// Norms and GELUs, but no matmuls.
        Norms = "norms",
        /// Also the widened half of each feed-forward layer: much memory, little arithmetic.
        Selective = "selective",
        /// Each block, from its input.
        Full = "full",
    }

    /// `train.lr_scaling`
    LrScaling {
        /// The learning rate stays as it is.
        None = "none",
        /// The learning rate grows in proportion to the global batch (Goyal et al. 2017).
        Linear = "linear",
    }

    /// `train.offload.optimizer` and `train.offload.parameters`
    OffloadTarget {
        /// In memory of the device.
        None = "none",
        /// In a mapped file without a name.
        File = "file",
        /// In memory of the host, also where a GPU trains.
        Host = "host",
    }

    /// `train.rescale`
    Rescale {
        /// It stays: the accumulation changes. A number of ranks for which no accumulation fits is refused.
        KeepGlobalBatch = "keep_global_batch",
        /// It changes with the number of ranks: micro-batch and accumulation stay.
        KeepMicroBatch = "keep_micro_batch",
    }

    /// `train.recovery`
    Recovery {
        /// All ranks read the latest checkpoint.
        None = "none",
        /// From its buddy, which keeps a copy of it, on another node if all have equally many ranks.
        Buddy = "buddy",
    }

    /// `train.optimizer.kind`
    OptimizerKind {
        /// Loshchilov & Hutter 2019.
        Adamw = "adamw",
        /// Chen et al. 2023.
        Lion = "lion",
        /// As `torch.optim.SGD`: with momentum, and weight decay as a part of the gradient.
        Sgd = "sgd",
        /// Jordan et al. 2024, for the matrices of the blocks; AdamW for all other parameters.
        Muon = "muon",
    }

    /// `train.schedule.kind`
    LearningRate {
        /// Half a cosine from the peak to `min_lr`.
        Cosine = "cosine",
        /// A line from the peak to `min_lr`.
        Linear = "linear",
        /// The peak throughout.
        Constant = "constant",
        /// Warm-up, stable, decay: the peak, then a line to `min_lr`.
        Wsd = "wsd",
        /// The peak divided by the root of the number of steps.
        InverseSqrt = "inverse_sqrt",
    }

    /// `parallel.pipeline.schedule`
    PipelineSchedule {
        /// All forwards, then all backwards (Huang et al. 2019).
        GPipe = "gpipe",
        /// One forward, one backward (Narayanan et al. 2019; PipeDream-flush).
        OneFOneB = "1f1b",
        /// 1F1B with several chunks a rank (Narayanan et al. 2021).
        Interleaved = "interleaved",
        /// Weight gradients fill the bubble (Qi et al. 2023).
        ZbH1 = "zb-h1",
        /// `zb-h1` with two chunks a rank in a V (Qi et al. 2024).
        Zbv = "zbv",
        /// Any pass that is ready, for few micro-batches.
        Greedy = "greedy",
    }

    /// `parallel.strategy`
    Strategy {
        /// Nothing: gradients are averaged.
        Ddp = "ddp",
        /// The optimizer's state.
        Zero1 = "zero1",
        /// The optimizer's state and the gradients.
        Zero2 = "zero2",
        /// The optimizer's state, the gradients and the parameters, which are gathered block by block.
        Zero3 = "zero3",
    }

    /// `parallel.accumulate`
    Accumulate {
        /// This rank's shard: least memory, gradients are reduced in every micro-batch.
        Sharded = "sharded",
        /// All of them: gradients are reduced once a step.
        Full = "full",
    }

    /// `parallel.context_algorithm`
    ContextAlgorithm {
        /// All are gathered: bit-identical to one rank, but takes memory for the keys and values of all positions.
        Gather = "gather",
        /// They go round, and attention is computed meanwhile: memory for those of two ranks.
        Ring = "ring",
    }

    /// `parallel.reduce_dtype`
    ReduceDtype {
        /// Exact to f32.
        F32 = "f32",
        /// Half the traffic, with `precision: bf16` only; gradients and their sums (with NCCL at each hop) are rounded.
        Bf16 = "bf16",
    }

    /// `parallel.sync`
    Sync {
        /// In buckets, each as soon as its gradients are ready.
        Bucketed = "bucketed",
        /// Each gradient as soon as it is ready.
        PerParameter = "per-parameter",
        /// One all-reduce of everything after backward.
        Naive = "naive",
    }

    /// `parallel.backend`
    Backend {
        /// `nccl` where the driver shows a GPU, else `cpu`.
        Auto = "auto",
        /// CPU, shared memory and TCP.
        Cpu = "cpu",
        /// One GPU a rank, and NCCL between them.
        Nccl = "nccl",
    }
}

impl KeyValue for Tokenizer {
    const ALLOWED: Allowed = Allowed::Form("`bytes`, `gpt2` or the path of a `tokenizer.json`", |value| {
        is_path(value) && is_read_as::<Self>(value)
    });
}

impl KeyValue for StepRange {
    const ALLOWED: Allowed = Allowed::Form("steps as `10-12`, or one step, from 1 on", is_read_as::<Self>);
}

impl KeyValue for ShardGroup {
    const ALLOWED: Allowed = Allowed::Form("`node` or a number of ranks, at least 1", |value| {
        !matches!(value, Value::Unsigned(0)) && is_read_as::<Self>(value)
    });
}

impl KeyValue for [f32; 2] {
    const ALLOWED: Allowed = Allowed::Form("two numbers from 0 to below 1", |value| {
        let betas = serde_json::from_value::<Self>(value.json());
        betas.is_ok_and(|betas| betas.iter().all(|beta| (0.0..1.0).contains(beta)))
    });
}

impl KeyValue for Vec<usize> {
    const ALLOWED: Allowed = Allowed::Form("a list of numbers, each at least 1", |value| {
        let layers = serde_json::from_value::<Vec<u32>>(value.json());
        layers.is_ok_and(|layers| !layers.is_empty() && !layers.contains(&0))
    });
}

impl KeyValue for Paths {
    const ALLOWED: Allowed = Allowed::Form("a path (a string), or a list of them", |value| match value {
        Value::List(nodes) => !nodes.is_empty() && nodes.iter().all(|node| is_path(&node.value)),
        one => is_path(one),
    });
}

impl KeyValue for Vec<OptimizerGroup> {
    const ALLOWED: Allowed = Allowed::Form(
        "a list of at most 15 sections of `params`, `lr_scale` and `weight_decay`, with rates of 0 or more",
        |value| {
            let is_rate = |x: &f32| *x >= 0.0 && x.is_finite();
            let is_good = |group: &OptimizerGroup| {
                is_rate(&group.lr_scale) && group.weight_decay.as_ref().is_none_or(is_rate)
            };
            let groups = serde_json::from_value::<Self>(value.json());
            groups.is_ok_and(|groups| groups.len() <= OptimizerGroup::MOST && groups.iter().all(is_good))
        },
    );
}

fn is_finite(value: &Value) -> bool {
    match value {
        Value::Float(x) => x.is_finite(),
        Value::List(nodes) => nodes.iter().all(|node| is_finite(&node.value)),
        Value::Map(entries) => entries.iter().all(|entry| is_finite(&entry.node.value)),
        _ => true,
    }
}

impl Model {
    /// [`Model::n_kv_head`], or its default.
    pub fn kv_heads(&self) -> usize {
        self.n_kv_head.unwrap_or(self.n_head)
    }

    /// [`Model::n_inner`], or its default: 4 · channels; with SwiGLU 8/3 · channels, rounded up to a multiple of 256
    /// where that is less than the whole (Touvron et al. 2023).
    pub fn inner(&self) -> usize {
        self.n_inner.unwrap_or_else(|| match self.kind {
            ModelKind::Gpt2 | ModelKind::Mlp => self.n_embd.saturating_mul(4),
            ModelKind::Llama | ModelKind::Mixtral => {
                let width = self.n_embd.saturating_mul(8) / 3;
                width
                    .checked_next_multiple_of(if width < 256 { 8 } else { 256 })
                    .unwrap_or(width)
            }
        })
    }

    /// [`Model::tied`], or its default.
    pub fn is_tied(&self) -> bool {
        self.tied.unwrap_or(self.kind == ModelKind::Gpt2)
    }
}

impl ModelKind {
    /// Llama's blocks: RMS norms, rotary positions, SwiGLU, no biases.
    pub fn is_llama(self) -> bool {
        matches!(self, Self::Llama | Self::Mixtral)
    }
}

impl RopeScaling {
    /// True if all numbers are above 0, and the lower factor below the higher one.
    pub fn is_valid(&self) -> bool {
        let numbers = [self.factor, self.low_freq_factor, self.high_freq_factor];
        numbers.iter().all(|x| x.is_finite() && *x > 0.0)
            && self.low_freq_factor < self.high_freq_factor
            && self.original_positions > 0
    }
}

/// As in YAML.
impl fmt::Display for RopeScaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{{ factor: {:?}, low_freq_factor: {:?}, high_freq_factor: {:?}, original_positions: {} }}",
            self.factor, self.low_freq_factor, self.high_freq_factor, self.original_positions
        )
    }
}

impl OptimizerConfig {
    /// Decays of the moments.
    pub fn betas(&self) -> [f32; 2] {
        self.betas.unwrap_or(match self.kind {
            OptimizerKind::Lion => [0.9, 0.99],
            OptimizerKind::Adamw | OptimizerKind::Sgd | OptimizerKind::Muon => [0.9, 0.95],
        })
    }

    /// Decay of the momentum.
    pub fn momentum(&self) -> f32 {
        self.momentum.unwrap_or(match self.kind {
            OptimizerKind::Muon => 0.95,
            OptimizerKind::Adamw | OptimizerKind::Lion | OptimizerKind::Sgd => 0.9,
        })
    }

    /// Nesterov's momentum.
    pub fn nesterov(&self) -> bool {
        self.nesterov.unwrap_or(self.kind == OptimizerKind::Muon)
    }
}

/// One of `train.optimizer.groups`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerGroup {
    /// Pattern of parameter names; `*` stands for any characters.
    pub params: String,
    /// Factor of the learning rate.
    #[serde(default = "one")]
    pub lr_scale: f32,
    /// Weight decay of all of them; by default the optimizer's.
    #[serde(default)]
    pub weight_decay: Option<f32>,
}

const fn one() -> f32 {
    1.0
}

impl OptimizerGroup {
    /// Most groups.
    pub const MOST: usize = 15;

    /// True if the pattern matches the name of a parameter.
    pub fn matches(&self, name: &str) -> bool {
        star_matches(self.params.as_bytes(), name.as_bytes())
    }
}

/// True if `name` is `pattern` with something for each of its stars. What is between two stars is taken where it
/// occurs first: a later place leaves less for the rest.
pub(crate) fn star_matches(pattern: &[u8], name: &[u8]) -> bool {
    let mut parts = pattern.split(|byte| *byte == b'*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else {
        return false;
    };
    let mut parts: Vec<&[u8]> = parts.collect();
    let Some(last) = parts.pop() else {
        return rest.is_empty();
    };
    for part in parts {
        if part.is_empty() {
            continue;
        }
        let Some(at) = rest.windows(part.len()).position(|window| window == part) else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// `data.train` and `data.val`: one file, or several that follow each other. A `*` in the last part of a path stands for
/// any characters: see [`crate::data::matching()`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Paths {
    /// A string.
    One(PathBuf),
    /// A list.
    Several(Vec<PathBuf>),
}

impl From<PathBuf> for Paths {
    fn from(path: PathBuf) -> Self {
        Self::One(path)
    }
}

impl Paths {
    /// In the order in which their contents follow each other.
    pub fn iter(&self) -> impl Iterator<Item = &Path> {
        let paths = match self {
            Self::One(path) => std::slice::from_ref(path),
            Self::Several(paths) => paths,
        };
        paths.iter().map(PathBuf::as_path)
    }

    /// Relative ones count from `folder`.
    #[must_use]
    pub(super) fn below(&self, folder: &Path) -> Self {
        match self {
            Self::One(path) => Self::One(folder.join(path)),
            Self::Several(paths) => Self::Several(paths.iter().map(|path| folder.join(path)).collect()),
        }
    }
}

/// `run.timeline`: `10-12`, or `10` for one step. Steps count from 1, as in `metrics.jsonl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "serde_json::Value", into = "String")]
pub struct StepRange {
    /// The first one.
    pub first: u64,
    /// The last one, not before the first.
    pub last: u64,
}

impl StepRange {
    /// The steps as a range.
    pub fn steps(self) -> RangeInclusive<u64> {
        self.first..=self.last
    }

    /// The number of steps.
    pub fn count(self) -> u64 {
        self.last - self.first + 1
    }
}

impl fmt::Display for StepRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { first, last } = self;
        if first == last {
            write!(f, "{first}")
        } else {
            write!(f, "{first}-{last}")
        }
    }
}

impl TryFrom<serde_json::Value> for StepRange {
    type Error = String;

    fn try_from(value: serde_json::Value) -> Result<Self, String> {
        let text = value
            .as_str()
            .map_or_else(|| value.to_string(), ToOwned::to_owned);
        let (first, last) = text.split_once('-').unwrap_or((&text, &text));
        let step = |text: &str| text.trim().parse::<u64>().ok();
        match (step(first), step(last)) {
            (Some(first), Some(last)) if first > 0 && first <= last => Ok(Self { first, last }),
            _ => Err(format!("`{text}` is not a range of steps")),
        }
    }
}

impl From<StepRange> for String {
    fn from(range: StepRange) -> Self {
        range.to_string()
    }
}

/// `parallel.shard_group`: ranks that hold one copy of the state together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ShardGroup {
    /// The ranks of a node.
    Node,
    /// This many neighbouring ranks.
    #[serde(untagged)]
    Ranks(usize),
}
